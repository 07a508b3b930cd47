"""The report tells where tokens, bytes and time went, in JSON and for people."""

from __future__ import annotations

import json

import pytest

from device.link import WireCounters
from device.report import Report
from protos import ciar_pb2 as pb
from shared.grid import Grid
from shared.transcript import Provenance, Transcript

KINDS = [
    *[Provenance.SAMPLED] * 2,
    *[Provenance.KEPT] * 3,
    *[Provenance.VERIFIED] * 4,
    *[Provenance.CORRECTED],
    *[Provenance.DEGRADED] * 2,
]


@pytest.fixture
def report() -> Report:
    report = Report("sd", "gumbel", "lossless", 7, "eine Katze, 猫")
    transcript = Transcript(Grid(3, 4), 8)
    transcript.extend([1] * 12, KINDS)
    report.count_tokens(transcript)
    return report


def test_every_token_is_counted_once_by_where_it_came_from(report: Report) -> None:
    draft = report.draft
    assert (report.tokens, draft.accepted, draft.corrected, draft.uncertain, draft.kept_on_device) == (12, 4, 1, 5, 5)


def test_call_rate_is_the_share_the_cloud_sampled_or_judged(report: Report) -> None:
    assert report.cloud_call_rate == pytest.approx(7 / 12)


def test_report_of_nothing_divides_by_nothing() -> None:
    report = Report("device", None, "lossy", 7, "a cat")
    report.count_tokens(Transcript(Grid(3, 4), 8))
    assert report.cloud_call_rate == 0.0


def test_costs_add_up_in_seconds(report: Report) -> None:
    for _ in range(3):
        report.cloud.add(pb.Cost(forwards=1, tokens=5, microseconds=250_000))
    assert (report.cloud.forwards, report.cloud.tokens) == (3, 15)
    assert report.cloud.seconds == pytest.approx(0.75)


def test_wire_takes_over_the_counters_and_keeps_the_round_trips(report: Report) -> None:
    report.wire.round_trips = 5
    counters = WireCounters()
    up, down = pb.DeviceMessage(draft=pb.Draft(ids=[1] * 40)), pb.CloudMessage(done=pb.Done(bytes_in=9))
    counters.count_up(up)
    counters.count_down(down)
    counters.count_down(down)
    report.count_wire(counters)
    wire = report.wire
    assert (wire.messages_up, wire.messages_down, wire.round_trips) == (1, 2, 5)
    assert (wire.bytes_up, wire.bytes_down) == (len(up.SerializeToString()), 2 * len(down.SerializeToString()))


def test_json_is_one_line_and_keeps_the_prompt_as_written(report: Report) -> None:
    text = report.to_json()
    assert "\n" not in text
    assert "猫" in text
    assert json.loads(text) == report.to_dict()


def test_text_says_what_people_need_to_make_it_again(report: Report) -> None:
    report.resumed = 2
    report.draft.proposed = 20
    text = report.to_text()
    for words in ("sd with rule gumbel (lossless), seed 7", "20 proposed", "4 accepted", "58%", "resumed 2 times"):
        assert words in text


def test_text_leaves_out_what_did_not_happen() -> None:
    text = Report("device", None, "lossy", 7, "a cat").to_text()
    assert [line.split()[0] for line in text.splitlines()] == ["device", "time", "calls"]
