"""The report tells where tokens, bytes and time went, in JSON and for people."""

from __future__ import annotations

import json
import math

import pytest

from device.link import WireCounters
from device.report import Report, SelectionUse
from protos import ciar_pb2 as pb
from shared.audit import Audit
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
    for words in ("sd with rule gumbel (lossy), seed 7", "20 proposed", "4 accepted", "58%", "resumed 2 times"):
        assert words in text


def test_text_leaves_out_what_did_not_happen() -> None:
    text = Report("device", None, "lossy", 7, "a cat").to_text()
    assert [line.split()[0] for line in text.splitlines()] == ["device", "time", "calls"]


def test_tokens_drawn_for_want_of_a_link_make_any_law_lossy_and_are_told(report: Report) -> None:
    assert (report.law, report.degraded) == ("lossy", 2)
    assert "the device drew 2 tokens that the cloud should have judged" in report.to_text()
    whole = Report("sd", "gumbel", "lossless", 7, "a cat")
    transcript = Transcript(Grid(3, 4), 8)
    transcript.extend([1] * 10, KINDS[:10])
    whole.count_tokens(transcript)
    assert (whole.law, whole.degraded) == ("lossless", 0)
    assert "should have judged" not in whole.to_text()


# -- what a selective device kept -----------------------------------------------------------------------------------


def selective(audited: list[float]) -> Report:
    """A report whose audit found these ratios of target to draft probability."""
    report = Report("ciar", "gumbel", "lossy", 7, "a cat")
    report.selection = SelectionUse("pipelined", "local", "interval", "quantile", 0.3, 15, "code64", 12)
    audit = Audit()
    for ratio in audited:
        audit.add(0.0, math.log(ratio))
    report.selection.count_audit(audit)
    return report


def test_selection_is_told_with_its_settings_and_the_audits_estimate() -> None:
    text = selective([0.5, 0.7, 0.6]).to_text()
    kept, audit = (next(line for line in text.splitlines() if line.startswith(word)) for word in ("kept", "audit"))
    for words in ("by interval score", "quantile threshold", "pipelined", "local repair", "12 uncertain", "code64"):
        assert words in kept
    assert "3 kept tokens" in audit
    assert "about 0.400 +- 0.058" in audit


def test_an_estimate_from_one_token_has_no_error_and_from_none_no_line() -> None:
    one = selective([0.5]).to_text()
    assert "about 0.500" in one
    assert "+-" not in one
    assert not any(line.startswith("audit") for line in selective([]).to_text().splitlines())


def test_selection_is_an_object_in_json_and_null_for_other_methods(report: Report) -> None:
    found = json.loads(selective([0.5, 0.7, 0.6]).to_json())["selection"]
    assert found["kept_tv"] == pytest.approx(0.4)
    assert found["kept_tv_error"] == pytest.approx(0.1 / math.sqrt(3))
    settings = {name: found[name] for name in ("mode", "repair", "score", "threshold_mode", "features")}
    assert settings == {
        "mode": "pipelined",
        "repair": "local",
        "score": "interval",
        "threshold_mode": "quantile",
        "features": "code64",
    }
    assert (found["cloud_budget"], found["prefix"], found["batch"], found["audited"]) == (0.3, 15, 12, 3)
    nothing = json.loads(selective([]).to_json())["selection"]
    assert (nothing["audited"], nothing["kept_tv"], nothing["kept_tv_error"]) == (0, None, None)
    assert json.loads(report.to_json())["selection"] is None
