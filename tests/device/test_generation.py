"""A picture in progress: how it opens and opens again, draws its tokens, and takes what a verifier says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from device.generation import Generation
from device.graphs import DeviceModels
from device.link import Link, LinkSettings, LostLinkError, WireCounters
from device.report import Report
from device.roles import DEVICE_ROLES
from device.selection import SelectionSettings
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import BusyError, LinkError, ProtocolError, RefusedError
from shared.intervals import score
from shared.methods import METHODS, find_method, find_rule
from shared.noise import Purpose
from shared.sampling import SamplingSettings, probabilities, warp
from shared.transcript import Provenance
from tests.device.conftest import FakeVerifier

Script = Callable[[], None]
LOGITS = np.array([0.5, -1.0, 2.0, 0.0, 0.3, 1.1, -2.0, 0.9], np.float32)


@dataclass
class FakeLink:
    """A link whose streams do what a script says: one call of `script` for each."""

    settings: LinkSettings = field(default_factory=lambda: LinkSettings(retry_seconds=0.3))
    address: str = "nowhere:1"
    openings: list[pb.Open] = field(default_factory=list)
    patience: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def open(self, opening: pb.Open, counters: WireCounters, silence_seconds: float) -> Iterator[None]:
        self.openings.append(opening)
        self.patience.append(silence_seconds)
        yield


def generation(models: DeviceModels, method: str = "sd", rule: str = "", **changes: Any) -> Generation:
    found = find_method(method)
    options: dict[str, Any] = {"prompt": "a cat", "seed": 7, "sampling": SamplingSettings()} | changes
    report = Report(method, rule or None, "lossless", options["seed"], options["prompt"])
    return Generation(models, found, find_rule(found, rule), report=report, **options)


def lose(word: str = "cut") -> None:
    raise LostLinkError(word)


def never() -> None:
    raise AssertionError("the device went on alone")


# -- the link is lost and found -------------------------------------------------------------------------------------


def test_each_stream_carries_the_whole_state(models: DeviceModels) -> None:
    link = FakeLink()
    picture = generation(models, rule="mrs", link=link, in_flight=2)

    def talk(stream: Any) -> None:
        if len(link.openings) == 1:
            picture.commit([1, 2, 3], Provenance.VERIFIED)
            picture.commit([4], Provenance.CORRECTED)
            lose()
        picture.commit([5] * 12, Provenance.SAMPLED)

    picture.converse(talk, never)
    first, second = link.openings
    manifest = models.bundle.manifest
    assert (first.protocol, first.bundle_digest, first.codebook_digest) == (
        PROTOCOL, manifest.digest, manifest.codebook_digest)  # fmt: skip
    assert (first.rows, first.cols, first.vocabulary) == (4, 4, 8)
    assert (first.prompt, first.seed, first.method, first.rule) == ("a cat", 7, "sd", "mrs")
    assert first.pipelined
    assert (list(first.tokens), first.provenance) == ([], b"")
    assert (list(second.tokens), second.provenance) == ([1, 2, 3, 4], b"\x02\x02\x02\x03")
    assert second.generation == first.generation != generation(models).name
    assert second.epoch > first.epoch


def test_no_two_streams_share_an_epoch(models: DeviceModels) -> None:
    link = FakeLink()
    picture = generation(models, link=link)

    def talk(stream: Any) -> None:
        picture.epoch += 2  # two corrections on each stream
        picture.commit([1] * 4, Provenance.VERIFIED)
        lose()

    picture.converse(talk, never)
    assert [opening.epoch for opening in link.openings] == [0, 3, 6, 9]


def test_picture_that_is_complete_is_not_opened_again(models: DeviceModels) -> None:
    link = FakeLink()
    picture = generation(models, link=link)

    def talk(stream: Any) -> None:
        picture.commit([1] * 16, Provenance.SAMPLED)
        lose("before the last word")

    picture.converse(talk, never)
    assert len(link.openings) == 1
    assert picture.report.resumed == 0


def test_resumed_counts_how_often_the_picture_went_on(models: DeviceModels) -> None:
    link = FakeLink(LinkSettings(retry_seconds=5.0))
    picture = generation(models, link=link)
    works = iter([True, False, False, False, True, False, True])

    def talk(stream: Any) -> None:
        if not next(works):
            lose("no verifier there")
        picture.commit([1] * (8 if not len(picture.transcript) else 4), Provenance.SAMPLED)
        if not picture.transcript.complete:
            lose()

    picture.converse(talk, never)
    assert len(link.openings) == 7
    assert picture.report.resumed == 2


def test_lost_picture_is_given_up_with_what_was_done(models: DeviceModels) -> None:
    picture = generation(models, link=FakeLink())
    picture.commit([1] * 5, Provenance.SAMPLED)
    with pytest.raises(LinkError, match=r"nowhere:1 was lost with 5 of 16 tokens done .* within 0\.3 s: cut") as caught:
        picture.converse(lambda stream: lose(), never)
    assert not isinstance(caught.value, LostLinkError)


def test_full_verifier_is_asked_again_and_then_reported_as_full(models: DeviceModels) -> None:
    link = FakeLink()

    def talk(stream: Any) -> None:
        raise BusyError("no slot")

    picture = generation(models, link=link)
    with pytest.raises(BusyError, match="no slot"):
        picture.converse(talk, never)
    assert len(link.openings) >= 2
    assert picture.report.resumed == 0


def test_refusal_is_not_tried_again(models: DeviceModels) -> None:
    link = FakeLink()

    def talk(stream: Any) -> None:
        raise RefusedError("verifier: no cats")

    with pytest.raises(RefusedError, match="no cats"):
        generation(models, link=link).converse(talk, never)
    assert len(link.openings) == 1


def test_verifier_that_is_done_too_early_broke_the_protocol(models: DeviceModels) -> None:
    picture = generation(models, link=FakeLink())
    with pytest.raises(ProtocolError, match="done after 2 tokens"):
        picture.converse(lambda stream: picture.commit([1, 1], Provenance.SAMPLED), never)


@pytest.mark.parametrize("error", [LostLinkError("cut"), BusyError("no slot")])
def test_a_lost_link_may_be_the_end(models: DeviceModels, error: Exception) -> None:
    link = FakeLink(LinkSettings(retry_seconds=60.0))
    picture = generation(models, link=link, on_lost_link="fail")

    def talk(stream: Any) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        picture.converse(talk, never)
    assert len(link.openings) == 1


@pytest.mark.parametrize("error", [LostLinkError("cut"), BusyError("no slot")])
def test_a_picture_may_be_finished_alone_after_the_first_loss(models: DeviceModels, error: Exception) -> None:
    link = FakeLink(LinkSettings(silence_seconds=30.0, retry_seconds=60.0))
    picture = generation(models, link=link, on_lost_link="finish-alone", verdict_seconds=0.7)

    def talk(stream: Any) -> None:
        picture.commit([1, 2], Provenance.VERIFIED)
        raise error

    picture.converse(talk, lambda: picture.commit([3] * 14, Provenance.DEGRADED))
    assert picture.transcript.provenance == [Provenance.VERIFIED] * 2 + [Provenance.DEGRADED] * 14
    assert len(link.openings) == 1
    # A verdict's deadline is shorter than the patience with a verifier that will be asked again.
    assert link.patience == [0.7]


def test_patience_with_a_verifier_is_the_links_unless_the_device_may_go_on_alone(models: DeviceModels) -> None:
    link = FakeLink(LinkSettings(silence_seconds=30.0))
    picture = generation(models, link=link, verdict_seconds=0.7)
    picture.converse(lambda stream: picture.commit([1] * 16, Provenance.SAMPLED), never)
    assert link.patience == [30.0]


def test_an_error_of_the_verifier_is_not_answered_by_going_on_alone(models: DeviceModels) -> None:
    picture = generation(models, link=FakeLink(), on_lost_link="finish-alone")

    def talk(stream: Any) -> None:
        raise RefusedError("verifier: no cats")

    with pytest.raises(RefusedError, match="no cats"):
        picture.converse(talk, never)


def test_a_selective_device_says_what_it_keeps_and_brings_its_features_along(models: DeviceModels) -> None:
    chosen = SelectionSettings(prefix_rate=0.25, repair="truncate", audit=0.125)
    link = FakeLink()
    picture = generation(models, "ciar", link=link, selection=chosen, feature_mode="scalars")

    def talk(stream: Any) -> None:
        if len(link.openings) == 1:
            picture.commit([1, 2], [Provenance.SAMPLED, Provenance.KEPT])
            picture.kept_features += b"sixbyt"
            lose()
        picture.commit([5] * 14, Provenance.VERIFIED)

    picture.converse(talk, never)
    first, second = (opening.selective for opening in link.openings)
    assert (first.prefix, first.feature_mode, first.local_repair, first.audit) == (4, "scalars", False, 0.125)
    assert (first.features, second.features) == (b"", b"sixbyt")
    assert link.openings[0].rule == "gumbel"
    assert not generation(models, "sd").opening().HasField("selective")


# -- drawing --------------------------------------------------------------------------------------------------------


def drawn(picture: Generation, positions: Iterable[int]) -> list[int]:
    row = picture.draft_row(LOGITS)
    return [picture.draw(position, row) for position in positions]


def test_draft_rows_are_warped_but_not_guided(models: DeviceModels) -> None:
    row = generation(models, sampling=SamplingSettings(0.7, top_k=5, guidance=3.0)).draft_row(LOGITS)
    assert np.array_equal(row, warp(LOGITS, SamplingSettings(0.7, top_k=5)))


def test_coupled_draw_is_the_argmax_under_the_pictures_own_noise(models: DeviceModels) -> None:
    picture = generation(models)
    scores = warp(LOGITS, SamplingSettings()) + noise.gumbel(7, Purpose.TOKEN, range(16), 8)
    tokens = drawn(picture, range(16))
    assert tokens == np.argmax(scores, axis=-1).tolist()
    picture.epoch += 1
    assert drawn(picture, reversed(range(16))) == tokens[::-1]
    assert len(set(tokens)) > 2


def test_independent_draw_is_fresh_at_every_attempt(models: DeviceModels) -> None:
    picture = generation(models, rule="mrs")
    attempts = []
    for picture.epoch in range(4):
        attempts.append(drawn(picture, range(16)))
        assert drawn(picture, range(16)) == attempts[-1]
    assert len(set(map(tuple, attempts))) == 4


def test_independent_draw_has_the_warped_law(models: DeviceModels) -> None:
    sampling, draws = SamplingSettings(temperature=0.8, top_k=5), 1000
    picture = generation(models, rule="block", sampling=sampling)
    law = probabilities(warp(LOGITS, sampling))
    counts = np.zeros(8)
    for picture.epoch in range(draws):
        counts[drawn(picture, [5])] += 1
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(law))
    assert np.abs(counts / draws - law).max() < 4.5 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize("rule", ["gumbel", "mrs"])
def test_excluded_token_is_never_drawn(models: DeviceModels, rule: str) -> None:
    assert set(drawn(generation(models, rule=rule, sampling=SamplingSettings(top_k=1)), range(16))) == {2}


# -- committing -----------------------------------------------------------------------------------------------------


def test_who_watches_hears_of_every_commit_and_of_nothing_else(models: DeviceModels) -> None:
    picture = generation(models)
    heard: list[int] = []
    picture.on_progress = lambda transcript: heard.append(len(transcript))
    picture.commit([1, 2], Provenance.VERIFIED)
    picture.commit([], Provenance.VERIFIED)
    picture.commit([3], Provenance.CORRECTED)
    assert heard == [2, 3]


def test_clock_adds_up_even_when_the_work_fails(models: DeviceModels) -> None:
    picture = generation(models)
    with picture.clock("wait"):
        pass
    first = picture.report.seconds.wait
    with pytest.raises(ValueError, match="broken"), picture.clock("wait"):
        raise ValueError("broken")
    assert picture.report.seconds.wait > first > 0
    assert picture.report.seconds.draft == 0


# -- a verifier that breaks the protocol ----------------------------------------------------------------------------


def test_every_device_role_of_the_table_is_there() -> None:
    assert {method.device_role for method in METHODS.values()} == set(DEVICE_ROLES)


def opened() -> pb.CloudMessage:
    return pb.CloudMessage(opened=pb.Opened())


def verdict(**fields: Any) -> pb.CloudMessage:
    return pb.CloudMessage(verdict=pb.Verdict(**fields))


def tokens(start: int, ids: list[int]) -> pb.CloudMessage:
    return pb.CloudMessage(tokens=pb.Tokens(start=start, ids=ids))


@pytest.mark.parametrize(
    ("method", "replies", "words"),
    [
        ("sd", [verdict(accepted=5)], "accepts 5 of 4 drafted tokens"),
        ("sd", [verdict(start=1, accepted=2)], "came for position 1, but 0 is next"),
        ("sd", [verdict(accepted=2)], "rejects a token without a correction"),
        ("sd", [verdict(accepted=2, token=8)], "token id 8 at position 2 is outside the vocabulary"),
        ("sd", [tokens(0, [1, 1])], "sent tokens to a drafter"),
        ("sd", [pb.CloudMessage()], "sent an empty message"),
        ("sd", [pb.CloudMessage(done=pb.Done())], "done after 0 tokens"),
        ("ar", [tokens(1, [1])], "from position 1, but 0 is next"),
        ("ar", [tokens(0, [1, 8])], "token id 8 at position 1 is outside the vocabulary"),
        ("ar", [tokens(0, [1] * 17)], "exceed the 4x4 grid"),
        ("ar", [tokens(0, [1]), tokens(0, [1])], "from position 0, but 1 is next"),
        ("ar", [verdict(accepted=1)], "sent a verdict to a viewer"),
        ("ar", [pb.CloudMessage()], "sent an empty message"),
        ("ar", [pb.CloudMessage(done=pb.Done())], "done after 0 tokens"),
    ],
)
def test_what_the_protocol_does_not_allow_is_named(
    fake: FakeVerifier, models: DeviceModels, method: str, replies: list[pb.CloudMessage], words: str
) -> None:
    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        if method == "sd":
            assert len(next(messages).draft.ids) == 4
        yield from replies

    fake.talk = talk
    link = Link(fake.address)
    try:
        with pytest.raises(ProtocolError, match=words):
            DEVICE_ROLES[METHODS[method].device_role](generation(models, method, link=link, draft_length=4))
    finally:
        link.close()


EVERYTHING = SelectionSettings(prefix_rate=0.0, audit=0.0, mode="batched", threshold_mode="absolute", threshold=0.0)
NOTHING = replace(EVERYTHING, threshold=math.inf)
PREFIXED = replace(EVERYTHING, prefix_rate=0.25)


@pytest.mark.parametrize(
    ("selection", "replies", "words"),
    [
        (EVERYTHING, [verdict(accepted=5)], "accepts 5 of 4 drafted tokens"),
        (EVERYTHING, [verdict(accepted=2)], "rejects a token without a correction"),
        (EVERYTHING, [verdict(accepted=2, token=8)], "token id 8 at position 2 is outside the vocabulary"),
        (EVERYTHING, [verdict(accepted=4, corrected=[0])], "corrects 1 tokens with 0 replacements"),
        (EVERYTHING, [verdict(accepted=4, corrected=[4], replacements=[1])], "a token that was not uncertain"),
        (EVERYTHING, [verdict(accepted=2, token=1, corrected=[2], replacements=[1])], "that was not uncertain"),
        (EVERYTHING, [verdict(accepted=4, corrected=[1], replacements=[8])], "token id 8 at position 1"),
        (EVERYTHING, [verdict(accepted=4, audited=[-1.0])], "audits 1 tokens, but 0 were to be audited"),
        (EVERYTHING, [tokens(0, [1])], "sent 1 tokens from position 0, but the prefix ends at position 0"),
        (NOTHING, [verdict(accepted=16, corrected=[0], replacements=[1])], "a token that was not uncertain"),
        (replace(NOTHING, audit=1.0), [verdict(accepted=16)], "audits 0 tokens, but 16 were to be audited"),
        (PREFIXED, [tokens(1, [1])], "sent tokens from position 1, but 0 is next"),
        (PREFIXED, [tokens(0, [1] * 5)], "sent 5 tokens from position 0, but the prefix ends at position 4"),
        (PREFIXED, [verdict(accepted=1)], "came for position 0, but 0 is next"),
    ],
)
def test_what_the_protocol_does_not_allow_a_selective_device_is_named(
    fake: FakeVerifier,
    models: DeviceModels,
    selection: SelectionSettings,
    replies: list[pb.CloudMessage],
    words: str,
) -> None:
    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        if selection is not PREFIXED:
            assert next(messages).draft.ids
        yield from replies

    fake.talk = talk
    link = Link(fake.address)
    try:
        with pytest.raises(ProtocolError, match=words):
            DEVICE_ROLES["selective drafter"](generation(models, "ciar", link=link, selection=selection))
    finally:
        link.close()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_marks_and_features_travel_with_the_tokens_they_belong_to(
    fake: FakeVerifier, models: DeviceModels, rows: int
) -> None:
    """One bit a token in order, features of the kept ones alone, and what was committed goes along when it resumes."""
    drafts: list[pb.Draft] = []
    openings: list[pb.Open] = []

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        openings.append(next(messages).open)
        yield opened()
        for message in messages:
            draft = message.draft
            drafts.append(draft)
            yield verdict(epoch=draft.epoch, start=draft.start, accepted=len(draft.ids))
            if draft.start + len(draft.ids) == 16:
                yield pb.CloudMessage(done=pb.Done())
            elif len(openings) == 1:
                return

    fake.talk = talk
    link = Link(fake.address)
    selection = replace(EVERYTHING, score="random", threshold=0.5, draft_rows=rows)
    picture = generation(models, "ciar", link=link, selection=selection, feature_mode="scalars")
    DEVICE_ROLES["selective drafter"](picture)
    link.close()
    marks = [bool(draft.uncertain[i // 8] >> (i % 8) & 1) for draft in drafts for i in range(len(draft.ids))]
    assert marks == (picture.scores > 0.5).tolist()
    assert set(marks) == {True, False}
    kinds = [Provenance.VERIFIED if mark else Provenance.KEPT for mark in marks]
    assert picture.transcript.provenance == kinds
    assert [len(draft.uncertain) for draft in drafts] == [(len(draft.ids) + 7) // 8 for draft in drafts]
    assert b"".join(draft.features for draft in drafts) == picture.kept_features
    assert len(picture.kept_features) == 6 * marks.count(False)
    assert [opening.selective.features for opening in openings] == [b"", drafts[0].features]
    # A draft ends with rows of tokens that hold an uncertain one, or with the picture.
    assert [draft.start + len(draft.ids) for draft in drafts] == {1: [4, 8, 12, 16], 2: [8, 16], 3: [12, 16]}[rows]


def test_local_repair_replaces_in_place_and_the_device_drafts_on_from_what_stands(
    fake: FakeVerifier, models: DeviceModels
) -> None:
    drafts: list[pb.Draft] = []

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        for message in messages:
            draft = message.draft
            drafts.append(draft)
            other = (draft.ids[1] + 1) % 8
            yield verdict(epoch=0, start=draft.start, accepted=4, corrected=[1], replacements=[other])
            if draft.start == 12:
                yield pb.CloudMessage(done=pb.Done())

    fake.talk = talk
    link = Link(fake.address)
    picture = generation(models, "ciar", link=link, selection=EVERYTHING)
    DEVICE_ROLES["selective drafter"](picture)
    link.close()
    expected = [(token + 1) % 8 if i == 1 else token for draft in drafts for i, token in enumerate(draft.ids)]
    assert picture.transcript.tokens == expected
    kinds = [Provenance.VERIFIED, Provenance.CORRECTED, Provenance.VERIFIED, Provenance.VERIFIED]
    assert picture.transcript.provenance == kinds * 4
    assert {draft.epoch for draft in drafts} == {0}
    # Each row of tokens is decided on and drawn behind the repaired ones before it.
    features, cache = models.captions.encode("a cat"), models.drafter(detail=True)
    for place in range(16):
        draft = drafts[place // 4]
        rows = cache.prefill(features, [*expected[: draft.start], *draft.ids[: place - draft.start]])
        assert picture.scores[place] == pytest.approx(score("interval", rows.measures[-1], 8), rel=1e-4)
        assert draft.ids[place - draft.start] == picture.draw(place, picture.draft_row(rows.centre[-1]))


def _drawn_in_turn(models: DeviceModels, picture: Generation, other: int) -> list[int]:
    """What a device draws that waits for each verdict, where the second token of the picture becomes `other`."""
    features, cache, drawn = models.captions.encode("a cat"), models.drafter(detail=True), list[int]()
    for place in range(16):
        seen = [*drawn[:1], other, *drawn[2:]] if place >= 4 else drawn
        drawn.append(picture.draw(place, picture.draft_row(cache.prefill(features, seen).centre[-1])))
    return [*drawn[:1], other, *drawn[2:]]


def test_drafts_in_flight_that_a_repair_changes_are_drawn_again_and_the_others_stand(
    fake: FakeVerifier, models: DeviceModels
) -> None:
    drafts: list[pb.Draft] = []
    others: list[int] = []

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        drafts[:] = [next(messages).draft for _ in range(3)]
        others[:] = [(drafts[0].ids[1] + 1) % 8]
        yield verdict(epoch=0, start=0, accepted=4, corrected=[1], replacements=others)
        yield from (verdict(epoch=0, start=draft.start, accepted=4) for draft in drafts[1:])
        for message in messages:
            drafts.append(message.draft)
            yield verdict(epoch=message.draft.epoch, start=message.draft.start, accepted=4)
            if message.draft.start == 12:
                yield pb.CloudMessage(done=pb.Done())

    fake.talk = talk
    again = []
    for seed in range(8):
        link = Link(fake.address)
        selection = replace(EVERYTHING, mode="pipelined")
        picture = generation(models, "ciar", link=link, selection=selection, in_flight=4, seed=seed)
        DEVICE_ROLES["selective drafter"](picture)
        link.close()
        assert picture.transcript.tokens == _drawn_in_turn(models, picture, others[0])
        void = next((i for i in (1, 2) if list(drafts[i].ids) != picture.transcript.tokens[4 * i : 4 * i + 4]), 3)
        # The last row waits until nothing is in flight, since the verifier takes nothing back once it is done.
        assert [(draft.start, draft.epoch) for draft in drafts[3:]] == [
            (start, int(void < 3)) for start in range(4 * void, 16, 4)
        ]
        again.append(void)
    assert {1, 3} <= set(again) <= {1, 2, 3}


@pytest.mark.parametrize("method", ["sd", "ciar", "ar"])
def test_a_device_that_goes_on_alone_marks_what_the_cloud_should_have_judged(
    fake: FakeVerifier, models: DeviceModels, method: str
) -> None:
    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        for message in messages:
            yield verdict(start=0, accepted=len(message.draft.ids))
            break
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def sampling(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        yield tokens(0, [1] * 4)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    fake.talk = sampling if method == "ar" else talk
    link = Link(fake.address)
    selection = replace(EVERYTHING, score="random", threshold=0.5)
    picture = generation(
        models, method, link=link, selection=selection, draft_length=4, in_flight=1, on_lost_link="finish-alone"
    )
    DEVICE_ROLES[METHODS[method].device_role](picture)
    link.close()
    assert picture.transcript.complete
    first, rest = picture.transcript.provenance[:4], picture.transcript.provenance[4:]
    assert Provenance.DEGRADED not in first
    if method == "ciar":
        owed = (picture.scores[4:] > 0.5).tolist()
        assert rest == [Provenance.DEGRADED if value else Provenance.KEPT for value in owed]
    else:
        assert rest == [Provenance.DEGRADED] * 12


def test_verdicts_of_the_past_change_nothing(fake: FakeVerifier, models: DeviceModels) -> None:
    drafts: list[pb.Draft] = []

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        draft = None
        for message in messages:
            draft = message.draft
            drafts.append(draft)
            accepted = verdict(epoch=draft.epoch, start=draft.start, accepted=len(draft.ids))
            yield accepted
            yield accepted  # comes twice
            yield verdict(epoch=draft.epoch + 9, start=draft.start + len(draft.ids), accepted=0, token=0)
            if draft.start + len(draft.ids) == 16:
                yield pb.CloudMessage(done=pb.Done())

    fake.talk = talk
    link = Link(fake.address)
    picture = generation(models, link=link, draft_length=4)
    DEVICE_ROLES["drafter"](picture)
    link.close()
    assert [draft.start for draft in drafts] == [0, 4, 8, 12]
    assert picture.transcript.tokens == [token for draft in drafts for token in draft.ids]
    assert picture.transcript.count(Provenance.VERIFIED) == 16


def test_correction_discards_what_was_drafted_behind_it(fake: FakeVerifier, models: DeviceModels) -> None:
    drafts: list[pb.Draft] = []

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        next(messages)
        yield opened()
        for message in messages:
            drafts.append(message.draft)
            if len(drafts) == 2:  # both in flight: the first is rejected at its third token
                yield verdict(start=0, accepted=2, token=(drafts[0].ids[2] + 1) % 8)
            if message.draft.epoch == 1:
                yield verdict(epoch=1, start=message.draft.start, accepted=len(message.draft.ids))
                if message.draft.start + len(message.draft.ids) == 16:
                    yield pb.CloudMessage(done=pb.Done())

    fake.talk = talk
    link = Link(fake.address)
    picture = generation(models, link=link, draft_length=4, in_flight=2)
    DEVICE_ROLES["drafter"](picture)
    link.close()
    assert [(draft.epoch, draft.start) for draft in drafts[:3]] == [(0, 0), (0, 4), (1, 3)]
    assert picture.transcript.tokens[:3] == [*drafts[0].ids[:2], (drafts[0].ids[2] + 1) % 8]
    assert picture.transcript.provenance[:4] == [2, 2, 3, 2]
    assert picture.report.draft.proposed == sum(len(draft.ids) for draft in drafts)


def test_resumed_drafter_draws_the_same_tokens_from_a_rebuilt_cache(fake: FakeVerifier, models: DeviceModels) -> None:
    """Accepting every draft gives the drafter's own picture, however often the link was lost."""

    def accepting(losses: int) -> list[int]:
        left = [losses]

        def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
            next(messages)
            yield opened()
            for message in messages:
                draft = message.draft
                yield verdict(epoch=draft.epoch, start=draft.start, accepted=len(draft.ids))
                if draft.start + len(draft.ids) == 16:
                    yield pb.CloudMessage(done=pb.Done())
                elif left[0]:
                    left[0] -= 1
                    return

        fake.talk = talk
        link = Link(fake.address)
        picture = generation(models, link=link, draft_length=3)
        DEVICE_ROLES["drafter"](picture)
        link.close()
        return picture.transcript.tokens

    alone = generation(models, "device")
    DEVICE_ROLES["solo"](alone)
    assert accepting(0) == alone.transcript.tokens
    assert accepting(3) == alone.transcript.tokens
