"""A picture in progress: how it opens and opens again, draws its tokens, and takes what a verifier says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from device.generation import Generation
from device.graphs import DeviceModels
from device.link import Link, LinkSettings, LostLinkError, WireCounters
from device.report import Report
from device.roles import DEVICE_ROLES
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import BusyError, LinkError, ProtocolError, RefusedError
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

    @contextlib.contextmanager
    def open(self, opening: pb.Open, counters: WireCounters) -> Iterator[None]:
        self.openings.append(opening)
        yield


def generation(models: DeviceModels, method: str = "sd", rule: str = "", **changes: Any) -> Generation:
    found = find_method(method)
    options: dict[str, Any] = {"prompt": "a cat", "seed": 7, "sampling": SamplingSettings()} | changes
    report = Report(method, rule or None, "lossless", options["seed"], options["prompt"])
    return Generation(models, found, find_rule(found, rule), report=report, **options)


def lose(word: str = "cut") -> None:
    raise LostLinkError(word)


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

    picture.converse(talk)
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

    picture.converse(talk)
    assert [opening.epoch for opening in link.openings] == [0, 3, 6, 9]


def test_picture_that_is_complete_is_not_opened_again(models: DeviceModels) -> None:
    link = FakeLink()
    picture = generation(models, link=link)

    def talk(stream: Any) -> None:
        picture.commit([1] * 16, Provenance.SAMPLED)
        lose("before the last word")

    picture.converse(talk)
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

    picture.converse(talk)
    assert len(link.openings) == 7
    assert picture.report.resumed == 2


def test_lost_picture_is_given_up_with_what_was_done(models: DeviceModels) -> None:
    picture = generation(models, link=FakeLink())
    picture.commit([1] * 5, Provenance.SAMPLED)
    with pytest.raises(LinkError, match=r"nowhere:1 was lost with 5 of 16 tokens done .* within 0\.3 s: cut") as caught:
        picture.converse(lambda stream: lose())
    assert not isinstance(caught.value, LostLinkError)


def test_full_verifier_is_asked_again_and_then_reported_as_full(models: DeviceModels) -> None:
    link = FakeLink()

    def talk(stream: Any) -> None:
        raise BusyError("no slot")

    picture = generation(models, link=link)
    with pytest.raises(BusyError, match="no slot"):
        picture.converse(talk)
    assert len(link.openings) >= 2
    assert picture.report.resumed == 0


def test_refusal_is_not_tried_again(models: DeviceModels) -> None:
    link = FakeLink()

    def talk(stream: Any) -> None:
        raise RefusedError("verifier: no cats")

    with pytest.raises(RefusedError, match="no cats"):
        generation(models, link=link).converse(talk)
    assert len(link.openings) == 1


def test_verifier_that_is_done_too_early_broke_the_protocol(models: DeviceModels) -> None:
    picture = generation(models, link=FakeLink())
    with pytest.raises(ProtocolError, match="done after 2 tokens"):
        picture.converse(lambda stream: picture.commit([1, 1], Provenance.SAMPLED))


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
