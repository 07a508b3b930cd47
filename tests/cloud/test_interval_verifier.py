"""The interval verifier: features reach the tokens they belong to and no others, and a verdict leaves a clean cache.

The reference of every row is a fresh teacher-forced run over the tokens, with the vectors of kept tokens added.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud.acceptance import coupled_sample
from cloud.engine import Engine, Feed
from cloud.methods import sampler
from cloud.methods.interval_verifier import verify_uncertain
from cloud.models.transformer import Transformer
from cloud.session import AWAIT_DRAFT, Request, Selective, Session
from protos import ciar_pb2 as pb
from shared import noise
from shared.audit import audited
from shared.errors import ProtocolError
from shared.features import pack, unpack
from shared.noise import Purpose
from shared.sampling import SamplingSettings, guide, warp
from shared.transcript import Provenance, Transcript

SIZE, PREFIX, VOCABULARY, DIM = 12, 4, 7, 16
K, U = False, True
MakeRequest = Callable[..., Request]
Features = dict[int, NDArray[np.float32]]


def adapt(features: NDArray[np.float32]) -> Tensor:
    """Vectors (n, 16) of features (n, 3), as long as embeddings."""
    matrix = torch.randn(3, DIM, generator=torch.Generator().manual_seed(5)) * 0.5
    return torch.from_numpy(features) @ matrix


def feature(seed: int) -> NDArray[np.float32]:
    """Three numbers as they arrive, (1, 3): rounded to float16."""
    drawn = np.random.default_rng(seed).normal(size=(1, 3))
    return unpack("scalars", pack("scalars", drawn), 1, DIM)


@dataclass
class Talk:
    """One stream of the verifier, driven by hand as the scheduler and the network do.

    Attributes:
        session: the generation.
        sent: messages that the device got.
        passes: tokens fed in each pass.
        kept: features of committed kept tokens, by position, as the device remembers them.
        ended: the method is done.
    """

    session: Session
    sent: list[pb.CloudMessage]
    passes: list[list[int]] = field(default_factory=list)
    kept: Features = field(default_factory=dict)
    ended: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._work = verify_uncertain(self.session)
        self._run()

    def judge(
        self, ids: Sequence[int], marks: Sequence[bool], kept: Features | None = None, **changes: Any
    ) -> pb.Verdict:
        """What the verifier says of a draft behind the transcript; kept tokens come with features by position."""
        start = changes.get("start", self.session.position)
        places = [start + i for i, mark in enumerate(marks) if not mark]
        told = {place: (kept or {}).get(place, feature(place)) for place in places}
        fields: dict[str, Any] = {
            "epoch": self.session.epoch,
            "start": start,
            "ids": ids,
            "uncertain": np.packbits(list(marks), bitorder="little").tobytes(),
            "features": b"".join(pack("scalars", told[place]) for place in places),
        }
        self.session.deliver(pb.Draft(**fields | changes))
        self._run()
        committed = self.session.transcript.provenance
        self.kept |= {p: f for p, f in told.items() if p < len(committed) and committed[p] == Provenance.KEPT}
        verdict: pb.Verdict = self.sent[-1].verdict
        return verdict

    @property
    def tokens(self) -> list[int]:
        return self.session.transcript.tokens

    def close(self) -> None:
        """Gives the slot back, once."""
        if not self.closed:
            self.session.close()
        self.closed = True

    def _run(self) -> None:
        value = None
        try:
            while True:
                need = self._work.send(value)
                value = None
                if isinstance(need, Feed):
                    (value,) = self.session.engine.forward([need])
                    self.passes.append(list(need.tokens))
                    self.session.cost.add(1, len(need.tokens), 0.001)
                elif not self.session.has_draft:
                    assert need is AWAIT_DRAFT
                    return
        except StopIteration:
            self.ended = True


@pytest.fixture
def begin(engine: Engine, make_request: MakeRequest) -> Iterator[Callable[..., Talk]]:
    """Begins a stream; `tokens`, `kinds` and `kept` are what a device brings along when it resumes."""
    talks: list[Talk] = []

    def make(
        tokens: Sequence[int] = (),
        kinds: Sequence[Provenance] | Provenance = Provenance.SAMPLED,
        kept: Features | None = None,
        *,
        local: bool = False,
        prefix: int = 0,
        audit: float = 0.0,
        shadow: Any = None,
        **fields: Any,
    ) -> Talk:
        request = make_request("ciar", **fields)
        transcript = Transcript(request.transcript.grid, VOCABULARY)
        transcript.extend(tokens, kinds)
        rows = [kept[place] for place in sorted(kept)] if kept else [np.zeros((0, 3), np.float32)]
        selective = Selective(prefix, "scalars", np.concatenate(rows), local, audit)
        sent: list[pb.CloudMessage] = []
        made = replace(request, transcript=transcript, selective=selective)
        session = Session(engine, made, sent.append, shadow, adapt)
        talks.append(Talk(session, sent))
        talks[-1].kept |= kept or {}
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()


@pytest.fixture
def resumed(begin: Callable[..., Talk]) -> Callable[[Talk], Talk]:
    """The picture of a stream, opened again as a device does after a lost link."""

    def make(talk: Talk) -> Talk:
        held, wish = talk.session.transcript, talk.session.request.selective
        assert wish is not None
        return begin(held.tokens, held.provenance, talk.kept, local=wish.local_repair, audit=wish.audit)

    return make


def reference(model: Transformer, request: Request, tokens: Sequence[int], kept: Features) -> Tensor:
    """Warped rows that predict positions 0..len(tokens), as far as there are any, from one fresh dense run."""
    features = torch.from_numpy(request.features)
    padded = torch.zeros(2, PREFIX, features.shape[1])
    padded[0, : len(features)] = features
    added = torch.zeros(SIZE, DIM)
    for place, told in kept.items():
        added[place] = adapt(told)[0]
    fed = torch.tensor([[*tokens, *[0] * SIZE][:SIZE]]).expand(2, -1)
    logits = model(padded, torch.tensor([len(features), 0]), fed, added.expand(2, -1, -1)).logits
    return warp(guide(logits[0], logits[1], request.sampling.guidance), request.sampling)[: len(tokens) + 1]


def own_tokens(model: Transformer, talk: Talk, draft: Sequence[int], kept: Features) -> list[int]:
    """What the target draws with the shared noise at each drafted place, the draft before it taken as it is."""
    rows = reference(model, talk.session.request, [*talk.tokens, *draft], talk.kept | kept)
    shared = noise.gumbel(talk.session.request.seed, Purpose.TOKEN, range(SIZE), VOCABULARY)
    drawn = coupled_sample(rows[:SIZE], torch.from_numpy(shared[: len(rows)])).tolist()
    return drawn[len(talk.tokens) : len(talk.tokens) + len(draft)]


def right_draft(model: Transformer, talk: Talk, marks: Sequence[bool], kept: Features | None = None) -> list[int]:
    """A draft whose uncertain tokens all stand; kept ones are anything."""
    ids: list[int] = []
    told = kept or {talk.session.position + i: feature(talk.session.position + i) for i in range(len(marks))}
    known: Features = {}
    for i, mark in enumerate(marks):
        place = talk.session.position + i
        ids.append(own_tokens(model, talk, [*ids, 0], known)[-1] if mark else (place * 3) % VOCABULARY)
        if not mark:
            known[place] = told[place]
    return ids


def own_in_turn(
    model: Transformer, talk: Talk, draft: Sequence[int], marks: Sequence[bool], kept: Features
) -> list[int]:
    """The draft with each uncertain token the target's own, drawn behind those before it."""
    ids, start = list(draft), len(talk.tokens)
    for i, mark in enumerate(marks):
        if mark:
            known = {place: value for place, value in kept.items() if place < start + i}
            ids[i] = own_tokens(model, talk, ids[: i + 1], known)[-1]
    return ids


def assert_cache_is_fresh(talk: Talk, again: Talk) -> None:
    """What a stream holds equals what a resumed one computed from transcript and features in one pass."""
    one, other, length = talk.session, again.session, talk.session.sequence.length
    assert PREFIX <= length <= other.sequence.length == PREFIX + one.position
    for layer in range(one.engine.config.layers):
        held = one.engine.cache.read(layer, one.sequence, length)
        expected = other.engine.cache.read(layer, other.sequence, length)
        for x, y in zip(held, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def wrong(token: int) -> int:
    return (token + 1) % VOCABULARY


# -- features reach the target --------------------------------------------------------------------------------------


def test_features_of_kept_tokens_reach_the_target(begin: Callable[..., Talk], model: Transformer) -> None:
    """Rows behind them are those of a dense run with the vectors added, and not those of one without."""
    talk, ids = begin(audit=1.0, sampling=SamplingSettings(guidance=2.0)), [1, 2, 3, 4, 5]
    told = {i: feature(50 + i) for i in range(5)}
    seen = torch.tensor(talk.judge(ids, [K] * 5, told).audited)
    with_them = reference(model, talk.session.request, ids, told)[range(5), ids]
    without = reference(model, talk.session.request, ids, {})[range(5), ids]
    torch.testing.assert_close(seen, with_them, rtol=1e-4, atol=1e-4)
    # The first row comes before any feature.
    torch.testing.assert_close(seen[0], without[0], rtol=1e-4, atol=1e-4)
    assert ((seen - without)[1:].abs() > 0.01).all()


def test_uncertain_tokens_and_the_clouds_own_have_no_features(begin: Callable[..., Talk], model: Transformer) -> None:
    talk = begin(prefix=2, audit=1.0)
    ids = right_draft(model, talk, [U, K, U, K])
    verdict = talk.judge(ids, [U, K, U, K])
    assert verdict.accepted == 4
    assert set(talk.kept) == {3, 5}
    rows = reference(model, talk.session.request, talk.tokens, talk.kept)
    expected = rows[[3, 5], [talk.tokens[3], talk.tokens[5]]]
    torch.testing.assert_close(torch.tensor(verdict.audited), expected, rtol=1e-4, atol=1e-4)


def test_both_guidance_branches_get_the_features(begin: Callable[..., Talk], engine: Engine) -> None:
    with_them, without = begin(), begin()
    for talk, told in ((with_them, feature(1)), (without, np.zeros((1, 3), np.float32))):
        talk.judge([1, 2, 3], [K, K, U], {0: told, 1: told})
    held = [engine.cache.read(0, t.session.sequence, PREFIX + 2) for t in (with_them, without)]
    for one, other in zip(*held, strict=True):
        difference = (one - other).abs().amax(dim=(1, 3))  # (branches, rows)
        assert (difference[:, PREFIX:] > 0.01).all()
        assert (difference[:, :PREFIX] == 0.0).all()


def test_without_an_adapter_features_change_nothing(
    begin: Callable[..., Talk], make_request: MakeRequest, engine: Engine, model: Transformer
) -> None:
    talk = begin(audit=1.0)
    talk.session.adapt = None
    seen = torch.tensor(talk.judge([1, 2, 3], [K, K, K]).audited)
    torch.testing.assert_close(seen, reference(model, talk.session.request, [1, 2, 3], {})[range(3), [1, 2, 3]])


# -- drafts that were dropped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [[U, U, U], [K, U, U], [U, K, U], [K, K, K]], ids=str)
def test_features_of_a_dropped_draft_never_reach_other_tokens_at_the_same_place(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk], model: Transformer, second: list[bool]
) -> None:
    talk = begin([1, 2])
    first = right_draft(model, talk, [U, K, K, K])
    verdict = talk.judge([wrong(first[0]), *first[1:]], [U, K, K, K], {p: feature(70 + p) for p in range(12)})
    assert (verdict.accepted, verdict.token) == (0, first[0])
    assert talk.kept == {}
    ids = right_draft(model, talk, second)
    assert talk.judge(ids, second).accepted == 3
    assert set(talk.kept) == {3 + i for i, mark in enumerate(second) if not mark}
    # Another round feeds what is still unfed.
    assert talk.judge(right_draft(model, talk, [U]), [U]).accepted == 1
    assert_cache_is_fresh(talk, resumed(talk))


@pytest.mark.parametrize("local", [False, True], ids=["truncate", "local"])
@pytest.mark.parametrize("seed", range(5))
def test_through_any_history_verdicts_are_the_targets_and_the_cache_is_a_fresh_prefills(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk], model: Transformer, local: bool, seed: int
) -> None:
    chance, talk = random.Random(seed), begin(local=local, prefix=1)
    failures = 0
    while not talk.ended:
        start = talk.session.position
        count = chance.randint(1, min(4, SIZE - start))
        marks = [chance.random() < 0.6 for _ in range(count)]
        told = {start + i: feature(chance.randrange(1000)) for i, mark in enumerate(marks) if not mark}
        ids = [chance.randrange(VOCABULARY) for _ in range(count)]
        if chance.random() < 0.4:
            ids = right_draft(model, talk, marks, told)
        own = own_tokens(model, talk, ids, told)
        fails = [i for i in range(count) if marks[i] and ids[i] != own[i]]
        failures += bool(fails)
        repaired = own_in_turn(model, talk, ids, marks, told)
        verdict = talk.judge(ids, marks, told)
        if local:
            assert verdict.accepted == count
            expected = {i: token for i, token in enumerate(repaired) if token != ids[i]}
            assert dict(zip(verdict.corrected, verdict.replacements, strict=True)) == expected
            assert not verdict.HasField("token")
        elif fails:
            assert (verdict.accepted, verdict.token) == (fails[0], own[fails[0]])
        else:
            assert verdict.accepted == count
            assert not verdict.HasField("token")
        again = resumed(talk)
        if not again.ended:
            assert_cache_is_fresh(talk, again)
        again.close()
    assert failures > 0
    assert talk.session.epoch == (0 if local else failures)


# -- verdicts -------------------------------------------------------------------------------------------------------


def test_a_failure_truncates_the_draft_and_begins_an_epoch(begin: Callable[..., Talk], model: Transformer) -> None:
    talk, marks = begin([1, 2]), [K, U, K, U, K]
    right = right_draft(model, talk, marks)
    verdict = talk.judge([*right[:3], wrong(right[3]), right[4]], marks)
    assert (verdict.epoch, verdict.start, verdict.accepted, verdict.token) == (0, 2, 3, right[3])
    assert list(verdict.corrected) == []
    assert talk.session.epoch == 1
    assert talk.tokens == [1, 2, *right[:4]]
    kinds = [Provenance.KEPT, Provenance.VERIFIED, Provenance.KEPT, Provenance.CORRECTED]
    assert talk.session.transcript.provenance[2:] == kinds


def test_local_repair_replaces_failures_in_place_and_keeps_the_rest(
    begin: Callable[..., Talk], model: Transformer
) -> None:
    talk, marks = begin([1, 2], local=True), [U, K, U, U, K]
    right = right_draft(model, talk, marks)
    ids = [wrong(right[0]), *right[1:]]
    repaired = own_in_turn(model, talk, ids, marks, {p: feature(p) for p in (3, 6)})
    verdict = talk.judge(ids, marks)
    replaced = {i: repaired[i] for i in range(5) if repaired[i] != ids[i]}
    assert 0 in replaced
    assert dict(zip(verdict.corrected, verdict.replacements, strict=True)) == replaced
    assert (verdict.accepted, verdict.HasField("token"), talk.session.epoch) == (5, False, 0)
    assert talk.tokens == [1, 2, *[replaced.get(i, token) for i, token in enumerate(ids)]]
    kinds = [Provenance.VERIFIED if mark else Provenance.KEPT for mark in marks]
    for place in replaced:
        kinds[place] = Provenance.CORRECTED
    assert talk.session.transcript.provenance[2:] == kinds


@pytest.mark.parametrize("local", [False, True], ids=["truncate", "local"])
def test_a_kept_token_stands_whatever_the_target_would_draw(begin: Callable[..., Talk], local: bool) -> None:
    for token in range(VOCABULARY):
        talk = begin([1], local=local, audit=1.0)
        assert talk.judge([token, token], [K, K]).accepted == 2
        assert talk.tokens == [1, token, token]
        talk.close()


class FixedShadow:
    """Draft rows that a test decides: the same for every position."""

    def __init__(self, row: Sequence[float]) -> None:
        self.row = np.array(row, np.float32)

    def probs(self, committed: Sequence[int], draft: Sequence[int]) -> NDArray[np.float32]:
        return np.repeat(self.row[None], len(draft), 0)


@pytest.mark.parametrize(("rule", "local"), [("mrs", False), ("block", False), ("mrs", True)])
@pytest.mark.parametrize("first", range(4))
def test_under_rules_that_compare_rows_a_kept_token_stands_and_an_uncertain_hopeless_one_falls(
    begin: Callable[..., Talk], model: Transformer, rule: str, local: bool, first: int
) -> None:
    """The drafter is sure of a token that the target's warp excludes, twice; the first is kept, the second judged."""
    talk = begin([first], rule=rule, local=local, sampling=SamplingSettings(top_k=1, guidance=2.0))
    for token in range(VOCABULARY):
        own = reference(model, talk.session.request, [first, token], {1: feature(1)})[1:].argmax(-1).tolist()
        if token not in own:
            break
    talk.session.shadow = FixedShadow(np.eye(VOCABULARY)[token].tolist())  # type: ignore[assignment]
    verdict = talk.judge([token, token], [K, U])
    assert talk.tokens == [first, token, own[1]]
    assert talk.session.transcript.provenance[1:] == [Provenance.KEPT, Provenance.CORRECTED]
    assert (verdict.accepted, list(verdict.corrected)) == ((2, [1]) if local else (1, []))


@pytest.mark.parametrize(("rule", "local"), [("mrs", False), ("block", False), ("mrs", True)])
def test_an_uncertain_token_that_the_target_likes_better_always_stands_behind_kept_ones(
    begin: Callable[..., Talk], model: Transformer, rule: str, local: bool
) -> None:
    talk = begin([1], rule=rule, local=local, shadow=FixedShadow([1.0 / VOCABULARY] * VOCABULARY))
    ids = [3, 5, 0]
    rows = reference(model, talk.session.request, [1, *ids], {1: feature(1), 2: feature(2)})
    ids[2] = int(rows[3].argmax())
    assert talk.judge(ids, [K, K, U]).accepted == 3
    assert talk.tokens == [1, *ids]


# -- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True], ids=["truncate", "local"])
@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_session_goes_on_as_the_unbroken_one(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk], model: Transformer, local: bool, seed: int
) -> None:
    chance, talk = random.Random(seed), begin(local=local, audit=1.0)
    for _ in range(2):
        marks = [chance.random() < 0.5 for _ in range(3)]
        talk.judge([chance.randrange(VOCABULARY) for _ in range(3)], marks)
    again = resumed(talk)
    assert again.sent[0].opened.position == talk.session.position
    while not talk.ended:
        count = min(3, SIZE - talk.session.position)
        marks = [chance.random() < 0.5 for _ in range(count)]
        ids = [chance.randrange(VOCABULARY) for _ in range(count)]
        one, other = talk.judge(ids, marks), again.judge(ids, marks)
        np.testing.assert_allclose(other.audited, one.audited, rtol=1e-4, atol=1e-4)
        assert (other.accepted, other.token, list(other.corrected)) == (one.accepted, one.token, list(one.corrected))
        assert list(other.replacements) == list(one.replacements)
    assert again.tokens == talk.tokens
    assert again.ended


def test_features_that_a_resume_leaves_out_are_noticed(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk]
) -> None:
    """The comparison of caches is not blind: a resumed session without the features is another one."""
    talk = begin(audit=1.0)
    talk.judge([1, 2, 3], [K, K, K])
    assert_cache_is_fresh(talk, resumed(talk))
    talk.kept = {place: told * 0.0 for place, told in talk.kept.items()}
    with pytest.raises(AssertionError):
        assert_cache_is_fresh(talk, resumed(talk))


# -- passes ---------------------------------------------------------------------------------------------------------


def test_a_last_chunk_of_kept_tokens_costs_no_pass(begin: Callable[..., Talk]) -> None:
    talk = begin([1] * 8)
    before = len(talk.passes)
    verdict = talk.judge([2, 3, 4, 5], [K] * 4)
    assert (verdict.accepted, verdict.cost.forwards, len(talk.passes)) == (4, 0, before)
    assert talk.ended
    assert talk.tokens == [1] * 8 + [2, 3, 4, 5]


def test_an_audited_token_costs_the_pass_that_judges_it(begin: Callable[..., Talk]) -> None:
    talk = begin([1] * 8, audit=1.0)
    verdict = talk.judge([2, 3, 4, 5], [K] * 4)
    assert verdict.cost.forwards == 1
    assert len(verdict.audited) == 4
    assert talk.passes[-1] == [2, 3, 4]


def test_kept_tokens_in_between_are_fed_with_the_next_draft_that_needs_a_row(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk], model: Transformer
) -> None:
    talk = begin([1, 2])
    talk.judge([3, 4], [K, K])
    talk.judge([5], [K])
    assert len(talk.passes) == 1
    ids = right_draft(model, talk, [U, U])
    assert talk.judge(ids, [U, U]).accepted == 2
    # The row behind the last token is not wanted, so it is not fed.
    assert talk.passes[1:] == [[3, 4, 5, ids[0]]]
    assert_cache_is_fresh(talk, resumed(talk))


def test_a_draft_takes_one_pass_whatever_was_corrected_before(begin: Callable[..., Talk], model: Transformer) -> None:
    talk = begin([1, 2])
    for _ in range(2):
        ids = right_draft(model, talk, [U, K, U])
        before = len(talk.passes)
        talk.judge([wrong(ids[0]), *ids[1:]], [U, K, U])
        assert len(talk.passes) <= before + 1


def test_local_repair_reads_again_only_from_a_failure_on_and_only_for_uncertain_tokens_behind_it(
    begin: Callable[..., Talk], model: Transformer
) -> None:
    talk, marks = begin([1, 2], local=True), [K, U, K, U, K, K]
    ids = right_draft(model, talk, marks)
    before = len(talk.passes)
    talk.judge([*ids[:3], wrong(ids[3]), *ids[4:]], marks)
    assert len(talk.passes) == before + 1
    talk = begin([1, 2], local=True)
    before = len(talk.passes)
    talk.judge([ids[0], wrong(ids[1]), *ids[2:]], marks)
    assert talk.passes[before + 1] == [ids[1], ids[2], ids[3], ids[4]]


# -- drawn again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [2, 4, 5, 7])
def test_a_draft_drawn_again_takes_back_what_was_judged_from_its_start_on(
    begin: Callable[..., Talk], resumed: Callable[[Talk], Talk], model: Transformer, start: int
) -> None:
    talk, marks = begin([1, 2], local=True, prefix=2, audit=1.0), [K, U, K]
    for _ in range(2):
        talk.judge(right_draft(model, talk, marks), marks)
    held = talk.tokens[:start]
    talk.kept = {place: told for place, told in talk.kept.items() if place < start}
    straight = begin(held, talk.session.transcript.provenance[:start], talk.kept, local=True, audit=1.0)
    ids = [wrong(token) for token in right_draft(model, straight, [U, K, U, K])]
    told = {start + i: feature(90 + i) for i in (1, 3)}
    drawn = [t.judge(ids, [U, K, U, K], told, epoch=e, start=start) for t, e in ((talk, 1), (straight, 0))]
    assert talk.session.epoch == drawn[0].epoch == 1
    assert talk.tokens == straight.tokens
    assert talk.tokens[:start] == held
    assert list(drawn[0].corrected) == list(drawn[1].corrected) != []
    np.testing.assert_allclose(drawn[0].audited, drawn[1].audited, rtol=1e-4)
    assert_cache_is_fresh(talk, resumed(talk))


@pytest.mark.parametrize(
    ("fields", "local", "words"),
    [
        ({"epoch": 1, "start": 1}, True, r"an epoch begins at position 1, but only 2\.\.5 may be drawn again"),
        ({"epoch": 1, "start": 6}, True, "an epoch begins at position 6"),
        ({"epoch": 2, "start": 4}, True, "draft of epoch 2, but epoch 0 is current"),
        ({"epoch": 1, "start": 4}, False, "draft of epoch 1, but epoch 0 is current"),
    ],
)
def test_no_more_is_taken_back_than_the_device_may_draw_again(
    begin: Callable[..., Talk], fields: dict[str, int], local: bool, words: str
) -> None:
    talk = begin([1, 2], local=local, prefix=2)
    talk.judge([3, 4, 5], [K, K, K])
    with pytest.raises(ProtocolError, match=words):
        talk.judge([1], [K], **fields)


@pytest.mark.parametrize("waiting", [1, 3])
def test_a_draft_whose_successor_is_there_already_is_not_judged(
    begin: Callable[..., Talk], model: Transformer, waiting: int
) -> None:
    talk, marks = begin([1, 2], local=True), [U, U]
    ids = right_draft(model, talk, marks)
    for epoch in range(waiting):
        talk.session.deliver(pb.Draft(epoch=epoch, start=2, ids=[wrong(ids[0]), ids[1]], uncertain=b"\3"))
    verdict = talk.judge(ids, marks, epoch=waiting)
    assert (verdict.epoch, verdict.accepted, list(verdict.corrected)) == (waiting, 2, [])
    assert talk.session.stale_drafts == waiting
    assert len(talk.passes) == 2


# -- the prefix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "prefix"), [(0, 0), (0, 3), (2, 3), (3, 3), (5, 3), (0, 7), (1, 8), (0, SIZE - 1), (0, SIZE)]
)
def test_the_prefix_is_the_clouds_own_sample_and_streamed_as_passes_settle_it(
    begin: Callable[..., Talk], model: Transformer, held: int, prefix: int
) -> None:
    plain: list[int] = []
    empty = begin()
    for position in range(SIZE):
        row = reference(model, empty.session.request, plain, {})[position]
        shared = noise.gumbel(11, Purpose.TOKEN, [position], VOCABULARY)[0]
        plain.append(int(coupled_sample(row, torch.from_numpy(shared))))
    talk = begin(plain[:held], prefix=prefix)
    shown = list(plain[:held])
    for message in talk.sent[1:]:
        assert message.WhichOneof("body") == "tokens"
        assert message.tokens.start == len(shown)
        shown += message.tokens.ids
    assert shown == plain[: max(held, prefix)]
    # The first token is known behind what prefill read; every later message took a pass.
    assert len(talk.passes) == max(1, len(talk.sent) - 1)
    assert talk.tokens == plain[: max(held, prefix)]
    assert talk.session.transcript.count(Provenance.SAMPLED) == max(held, prefix)
    assert talk.ended == (prefix == SIZE)


def test_a_plain_beginning_takes_a_pass_or_two(begin: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "coupled_sample", lambda rows, shared: torch.full(rows.shape[:-1], 3))
    talk = begin(prefix=9)
    assert talk.tokens == [3] * 9
    assert len(talk.passes) == 2  # prefill, and one over eight right guesses


def test_the_law_is_told_as_lossy(begin: Callable[..., Talk]) -> None:
    assert begin().sent[0].opened.law == "lossy"


# -- the audit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True], ids=["truncate", "local"])
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_what_is_audited_are_committed_kept_tokens_and_no_others(
    begin: Callable[..., Talk], model: Transformer, local: bool, rate: float
) -> None:
    talk, marks = begin([1, 2], local=local, audit=rate), [K, U, K, K, U, K, U, K]
    right = right_draft(model, talk, marks)
    ids = [*right[:4], wrong(right[4]), *right[5:]]
    told = {2 + i: feature(2 + i) for i, mark in enumerate(marks) if not mark}
    seen = own_in_turn(model, talk, ids, marks, told) if local else ids
    rows = reference(model, talk.session.request, [1, 2, *seen], told)
    verdict = talk.judge(ids, marks)
    committed = range(8) if local else range(4)
    chosen = audited(11, range(2, 10), rate)
    places = [i for i in committed if not marks[i] and chosen[i]]
    assert len(places) == {0.0: 0, 1.0: 5 if local else 3}.get(rate, len(places))
    expected = [float(rows[2 + i, ids[i]]) for i in places]
    np.testing.assert_allclose(list(verdict.audited), expected, rtol=1e-4, atol=1e-4)


def test_a_token_that_the_warp_excludes_is_audited_as_impossible(
    begin: Callable[..., Talk], model: Transformer
) -> None:
    talk = begin([1], audit=1.0)
    excluded = int(torch.isinf(reference(model, talk.session.request, [1], {})[1]).nonzero()[0])
    assert list(talk.judge([excluded], [K]).audited) == [-np.inf]


# -- what the protocol does not allow -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "marks"),
    [(3, b""), (8, b"\x00\x00"), (9, b"\x00"), (1, b"\x00\x00")],
)
def test_a_wrong_number_of_marks_is_refused_with_what_and_where(
    begin: Callable[..., Talk], count: int, marks: bytes
) -> None:
    talk = begin([1, 2])
    with pytest.raises(ProtocolError, match=f"position 2: {count} tokens, but {len(marks)} bytes of marks"):
        talk.judge([0] * count, [K] * count, uncertain=marks)


@pytest.mark.parametrize("bytes_", [0, 6, 11, 13, 18])
def test_features_of_another_number_of_tokens_are_refused(begin: Callable[..., Talk], bytes_: int) -> None:
    talk = begin([1, 2])
    with pytest.raises(ProtocolError, match=f"2 tokens in mode scalars take 12 bytes, {bytes_} came"):
        talk.judge([0, 1, 2], [K, U, K], features=bytes(bytes_))


def test_bits_behind_the_last_mark_say_nothing(begin: Callable[..., Talk]) -> None:
    talk = begin([1, 2])
    assert talk.judge([0, 1, 2], [K, K, K], uncertain=b"\xf8").accepted == 3
    assert talk.session.transcript.count(Provenance.KEPT) == 3


def test_a_bad_draft_commits_nothing(begin: Callable[..., Talk]) -> None:
    talk = begin([1, 2])
    with pytest.raises(ProtocolError, match="token id 7 at position 3 is outside the vocabulary"):
        talk.judge([0, 7], [K, U])
    assert talk.tokens == [1, 2]
