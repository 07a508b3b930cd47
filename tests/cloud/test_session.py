"""A session: its rows are the target's whatever happened before, drafts are taken in order, noise is the picture's own.

The reference of every row is a fresh teacher-forced run over the committed and drafted tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cloud.acceptance import Judgement, coupled_sample
from cloud.engine import Engine, Feed
from cloud.methods import CLOUD_ROLES
from cloud.methods.sampler import sample
from cloud.methods.verifier import verify
from cloud.models.transformer import Transformer
from cloud.session import AWAIT_DRAFT, Cost, Request, Selective, Session
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import BusyError, ProtocolError
from shared.noise import Purpose
from shared.sampling import SamplingSettings, guide, warp
from shared.transcript import Provenance

SIZE, PREFIX, VOCABULARY = 12, 4, 7
MakeRequest = Callable[..., Request]


@pytest.fixture
def sent() -> list[pb.CloudMessage]:
    """Messages that sessions emitted."""
    return []


@pytest.fixture
def begin(engine: Engine, make_request: MakeRequest, sent: list[pb.CloudMessage]) -> Callable[..., Session]:
    """Begins a session; `prefilled=False` leaves the caption to the test."""

    def make(prefilled: bool = True, **fields: Any) -> Session:
        session = Session(engine, make_request(**fields), sent.append)
        if prefilled:
            drive(session, session.prefill())
        return session

    return make


def drive(session: Session, work: Generator[Any, Any, Any], drafts: Iterable[pb.Draft] = ()) -> Any:
    """Runs a piece of a method as the scheduler does; returns what it returns, or None when no draft is left."""
    coming, value = iter(drafts), None
    try:
        while True:
            need = work.send(value)
            value = None
            if isinstance(need, Feed):
                (value,) = session.engine.forward([need])
                session.cost.add(1, len(need.tokens), 0.001)
                continue
            assert need is AWAIT_DRAFT
            if (arrived := next(coming, None)) is None:
                return work.close()
            session.deliver(arrived)
    except StopIteration as stop:
        return stop.value


def draft(ids: Sequence[int], start: int = 0, epoch: int = 0) -> pb.Draft:
    return pb.Draft(epoch=epoch, start=start, ids=ids)


def reference(session: Session, model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Warped rows that predict every position 0..len(tokens), as far as there are any, from one fresh run."""
    features, settings = torch.from_numpy(session.request.features), session.request.sampling
    padded = torch.zeros(2, model.config.prefix_rows, features.shape[1])
    padded[0, : len(features)] = features
    fed = torch.tensor([[*tokens, 0][:SIZE]]).expand(2, -1)
    logits = model(padded, torch.tensor([len(features), 0]), fed).logits
    return warp(guide(logits[0], logits[1], settings.guidance), settings)


def assert_target_rows(session: Session, model: Transformer, drafted: Sequence[int]) -> Tensor:
    """The session's rows for a draft equal the reference; returns them."""
    committed = session.transcript.tokens
    rows: Tensor = drive(session, session.target_rows(drafted))
    expected = reference(session, model, [*committed, *drafted])[len(committed) :]
    assert len(rows) == min(len(drafted) + 1, SIZE - len(committed))
    torch.testing.assert_close(rows, expected[: len(rows)], rtol=1e-4, atol=1e-4)
    return rows


# -- rows of the target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", range(SIZE))
@pytest.mark.parametrize("drafted", [0, 1, 3, SIZE])
def test_rows_behind_a_resumed_transcript_are_the_targets(
    begin: Callable[..., Session], model: Transformer, committed: int, drafted: int
) -> None:
    """Up to the end of the picture, where the last token is never fed and its row does not exist."""
    tokens = [(3 * i) % VOCABULARY for i in range(SIZE)]
    session = begin(tokens=tokens[:committed])
    assert_target_rows(session, model, tokens[committed : committed + drafted])
    assert session.sequence.length <= PREFIX + SIZE - 1


@pytest.mark.parametrize("unfed", [1, 2, 4])
@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_rows_behind_tokens_that_were_committed_without_being_fed_are_the_targets(
    begin: Callable[..., Session], model: Transformer, unfed: int, drafted: int
) -> None:
    session = begin(tokens=[1, 2])
    for token in range(unfed):
        session.commit([token], Provenance.SAMPLED)
    assert_target_rows(session, model, [5, 6, 0][:drafted])


def test_rows_reach_the_end_of_the_picture_with_unfed_tokens_before_it(
    begin: Callable[..., Session], model: Transformer
) -> None:
    session = begin(tokens=[0] * (SIZE - 3))
    session.commit([4], Provenance.SAMPLED)
    assert_target_rows(session, model, [5, 6])


def test_asking_again_for_the_next_row_feeds_nothing(begin: Callable[..., Session], model: Transformer) -> None:
    session = begin(tokens=[1, 2])
    before = session.cost.forwards
    for _ in range(2):
        assert_target_rows(session, model, [])
    assert session.cost.forwards == before


JUDGEMENTS = {
    "rejected at once": Judgement(0, 4),
    "rejected in the middle": Judgement(1, 4),
    "accepted with bonus": Judgement(3, 4),
    "accepted without bonus": Judgement(3, None),
}


@pytest.mark.parametrize("judgement", JUDGEMENTS.values(), ids=JUDGEMENTS)
@pytest.mark.parametrize("next_draft", [[], [2], [2, 2, 2]])
def test_rows_after_a_verdict_are_the_targets(
    begin: Callable[..., Session], model: Transformer, judgement: Judgement, next_draft: list[int]
) -> None:
    session, ids = begin(tokens=[1, 2]), [5, 6, 0]
    rows = assert_target_rows(session, model, ids)
    session.settle(draft(ids, start=2), judgement, rows)
    behind = [] if judgement.token is None else [judgement.token]
    assert session.transcript.tokens == [1, 2, *ids[: judgement.accepted], *behind]
    assert session.sequence.length <= PREFIX + session.position
    assert_target_rows(session, model, next_draft)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_targets_through_any_history_of_drafts_and_verdicts(
    begin: Callable[..., Session], model: Transformer, guidance: float, seed: int
) -> None:
    chance = random.Random(seed)
    session = begin(sampling=SamplingSettings(temperature=0.7, top_p=0.9, guidance=guidance))
    while not session.complete:
        room = SIZE - session.position
        ids = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, min(4, room)))]
        rows = assert_target_rows(session, model, ids)
        accepted = chance.randint(0, len(ids))
        wants_token = accepted < len(ids) or (len(rows) > len(ids) and chance.random() < 0.5)
        token = chance.randrange(VOCABULARY) if wants_token else None
        session.settle(draft(ids, session.position, session.epoch), Judgement(accepted, token), rows)
    assert session.sequence.length <= PREFIX + SIZE - 1


def test_the_last_token_may_be_rejected_and_corrected(begin: Callable[..., Session], model: Transformer) -> None:
    session = begin(tokens=[0] * (SIZE - 2))
    rows = assert_target_rows(session, model, [3, 4])
    session.settle(draft([3, 4], SIZE - 2), Judgement(1, 6), rows)
    assert session.complete
    assert session.transcript.tokens[-2:] == [3, 6]


def test_unguided_rows_are_the_warped_conditional_rows(begin: Callable[..., Session], model: Transformer) -> None:
    session = begin(sampling=SamplingSettings(guidance=1.0))
    assert session.sequence.branches == 1
    assert_target_rows(session, model, [1, 2])
    assert begin().sequence.branches == 2


# -- opening and closing --------------------------------------------------------------------------------------------


def test_prefill_tells_the_device_how_far_the_picture_is_and_what_it_cost(
    begin: Callable[..., Session], sent: list[pb.CloudMessage]
) -> None:
    begin(tokens=[1, 2, 3])
    (message,) = sent
    assert message.opened.position == 3
    assert message.opened.cost.forwards == 1
    assert message.opened.law == "lossless"


def test_a_complete_transcript_is_opened_without_a_pass(
    begin: Callable[..., Session], sent: list[pb.CloudMessage]
) -> None:
    session = begin(tokens=[1] * SIZE)
    assert session.complete
    assert session.sequence.length == 0
    assert sent[0].opened.position == SIZE
    assert sent[0].opened.cost.forwards == 0


def test_a_session_holds_a_slot_from_its_beginning_until_it_is_closed(
    begin: Callable[..., Session], engine: Engine
) -> None:
    sessions = [begin(prefilled=False) for _ in range(3)]
    with pytest.raises(BusyError):
        begin()
    sessions[1].close()
    assert engine.cache.free_slots == 1
    begin()


# -- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judgement", JUDGEMENTS.values(), ids=JUDGEMENTS)
def test_a_verdict_names_its_draft_and_starts_a_new_epoch_only_after_a_rejection(
    begin: Callable[..., Session], sent: list[pb.CloudMessage], judgement: Judgement
) -> None:
    session, ids = begin(tokens=[1, 2], epoch=5), [5, 6, 0]
    rows = drive(session, session.target_rows(ids))
    session.settle(draft(ids, start=2, epoch=5), judgement, rows)
    verdict, rejected = sent[-1].verdict, judgement.accepted < 3
    assert (verdict.epoch, verdict.start, verdict.accepted) == (5, 2, judgement.accepted)
    assert verdict.HasField("token") == (judgement.token is not None)
    assert session.epoch == 5 + rejected
    assert verdict.cost.forwards == 1
    kinds = [Provenance.VERIFIED] * judgement.accepted
    if judgement.token is not None:
        assert verdict.token == judgement.token
        kinds.append(Provenance.CORRECTED if rejected else Provenance.SAMPLED)
    assert session.transcript.provenance[2:] == kinds


def test_cost_counts_since_the_last_message() -> None:
    cost = Cost()
    cost.add(1, 5, 0.25)
    cost.add(1, 2, 0.5)
    assert cost.taken() == pb.Cost(forwards=2, tokens=7, microseconds=750000)
    assert cost.taken() == pb.Cost()


def test_a_viewer_is_sent_what_was_committed_since(begin: Callable[..., Session], sent: list[pb.CloudMessage]) -> None:
    session = begin(tokens=[1, 2])
    session.commit([5, 6], Provenance.SAMPLED)
    session.send_tokens(2)
    assert (sent[-1].tokens.start, list(sent[-1].tokens.ids)) == (2, [5, 6])


# -- drafts ---------------------------------------------------------------------------------------------------------


def take(session: Session, *drafts: pb.Draft) -> pb.Draft | None:
    """The draft that a method gets when these arrive."""
    return drive(session, session.next_draft(), drafts)


def test_a_draft_that_continues_the_transcript_is_taken(begin: Callable[..., Session]) -> None:
    session = begin(tokens=[1, 2], epoch=3)
    assert take(session, draft([4, 5], start=2, epoch=3)) == draft([4, 5], start=2, epoch=3)
    assert session.stale_drafts == 0


def test_drafts_are_taken_in_the_order_they_came(begin: Callable[..., Session]) -> None:
    session = begin()
    session.deliver(draft([1], start=0))
    session.deliver(draft([2], start=1))
    assert session.has_draft
    assert take(session) == draft([1], start=0)
    session.commit([1], Provenance.VERIFIED)
    assert take(session) == draft([2], start=1)
    assert not session.has_draft


@pytest.mark.parametrize(
    ("stale", "what"),
    [
        (draft([1, 1], start=2, epoch=2), "an old epoch"),
        (draft([1], start=50, epoch=1), "an old epoch, beyond the grid"),
        (draft([], start=2, epoch=0), "an old epoch, empty"),
        (draft([99], start=2, epoch=2), "an old epoch, outside the vocabulary"),
        (draft([1], start=0, epoch=3), "a position that is committed"),
        (draft([1, 1, 1, 1], start=1, epoch=3), "a position that is committed, reaching beyond"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stale_draft_is_dropped_and_counted(begin: Callable[..., Session], stale: pb.Draft, what: str) -> None:
    session = begin(tokens=[1, 2], epoch=3)
    before = session.transcript.tokens
    assert take(session, stale) is None
    assert take(session, stale, draft([4], start=2, epoch=3)) == draft([4], start=2, epoch=3)
    assert session.stale_drafts == 2
    assert session.transcript.tokens == before


def test_a_draft_that_comes_twice_changes_nothing_the_second_time(begin: Callable[..., Session]) -> None:
    session, repeated = begin(), draft([1, 2])
    taken = take(session, repeated)
    assert taken is not None
    session.settle(taken, Judgement(2, None), drive(session, session.target_rows(taken.ids)))
    assert take(session, repeated) is None
    assert session.stale_drafts == 1
    assert session.transcript.tokens == [1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (draft([1], start=2, epoch=4), "draft of epoch 4, but epoch 3 is current"),
        (draft([1], start=3, epoch=3), "draft starts at position 3, but 2 is next: out of order"),
        (draft([], start=2, epoch=3), "draft at position 2 holds no tokens"),
        (draft([0] * 11, start=2, epoch=3), "draft of 11 tokens at position 2 exceeds the 3x4 grid"),
        (draft([0, 7], start=2, epoch=3), r"token id 7 at position 3 is outside the vocabulary 0\.\.6"),
        (draft([2**32 - 1], start=2, epoch=3), "token id 4294967295 at position 2"),
    ],
)
def test_a_draft_the_protocol_does_not_allow_is_refused_with_what_and_where(
    begin: Callable[..., Session], bad: pb.Draft, message: str
) -> None:
    session = begin(tokens=[1, 2], epoch=3)
    with pytest.raises(ProtocolError, match=message):
        take(session, bad)


def test_a_draft_up_to_the_last_position_is_taken(begin: Callable[..., Session]) -> None:
    session = begin(tokens=[1, 2])
    assert take(session, draft([0] * 10, start=2)) == draft([0] * 10, start=2)


def test_draft_rows_without_a_shadow_drafter_are_an_error_not_a_guess(begin: Callable[..., Session]) -> None:
    with pytest.raises(RuntimeError, match="needs a shadow drafter"):
        begin(rule="mrs").draft_probs([1])


# -- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 2), (0, 12), (5, 3), (11, 1), (2, 7), (4, 4)])
def test_gumbel_rows_are_the_pictures_shared_noise(begin: Callable[..., Session], start: int, count: int) -> None:
    session = begin(prefilled=False, seed=2**40 + 9)
    expected = noise.gumbel(2**40 + 9, Purpose.TOKEN, range(start, start + count), VOCABULARY)
    np.testing.assert_array_equal(session.gumbel(start, count).numpy(), expected)


def test_gumbel_rows_do_not_depend_on_what_was_asked_before_or_on_the_epoch(begin: Callable[..., Session]) -> None:
    session, chance = begin(prefilled=False), random.Random(0)
    for _ in range(40):
        start = chance.randrange(SIZE)
        count = chance.randint(1, SIZE - start)
        session.epoch += 1
        expected = noise.gumbel(11, Purpose.TOKEN, range(start, start + count), VOCABULARY)
        np.testing.assert_array_equal(session.gumbel(start, count).numpy(), expected)


def test_uniforms_are_fresh_in_every_epoch_and_for_every_purpose_and_position(begin: Callable[..., Session]) -> None:
    session = begin(prefilled=False)
    seen: list[float] = []
    for epoch, purpose in itertools.product(range(4), (Purpose.ACCEPT, Purpose.RESIDUAL)):
        session.epoch = epoch
        seen += session.uniforms(purpose, 0, SIZE)
    assert len(set(seen)) == len(seen) == 4 * 2 * SIZE
    assert all(0.0 < uniform < 1.0 for uniform in seen)


def test_a_uniform_belongs_to_its_position_not_to_where_the_draft_began(begin: Callable[..., Session]) -> None:
    session = begin(prefilled=False, epoch=2)
    expected = noise.uniform(11, Purpose.ACCEPT, range(SIZE), 1, round=2)[:, 0].tolist()
    for start in range(SIZE):
        assert session.uniforms(Purpose.ACCEPT, start, SIZE - start) == expected[start:]


# -- methods --------------------------------------------------------------------------------------------------------


def drawn_by_hand(session: Session, model: Transformer) -> list[int]:
    """The picture that the target draws with the shared noise, one fresh run a token."""
    tokens: list[int] = []
    for position in range(SIZE):
        row = reference(session, model, tokens)[position]
        shared = torch.from_numpy(noise.gumbel(session.request.seed, Purpose.TOKEN, [position], VOCABULARY)[0])
        tokens.append(int(coupled_sample(row, shared)))
    return tokens


@pytest.mark.parametrize("committed", [0, 1, 5, 11, 12])
def test_the_sampler_draws_the_targets_picture_and_a_resumed_one_goes_on_the_same(
    begin: Callable[..., Session], model: Transformer, sent: list[pb.CloudMessage], committed: int
) -> None:
    expected = drawn_by_hand(begin(), model)
    sent.clear()
    session = begin(prefilled=False, method="ar", tokens=expected[:committed])
    drive(session, sample(session))
    assert session.transcript.tokens == expected
    shown = [(message.tokens.start, list(message.tokens.ids)) for message in sent[1:]]
    assert [token for _, ids in shown for token in ids] == expected[committed:]
    assert all((start + len(ids)) % 4 == 0 for start, ids in shown)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gumbel_verification_commits_the_samplers_picture_whatever_is_drafted(
    begin: Callable[..., Session], model: Transformer, sent: list[pb.CloudMessage], bonus: bool, seed: int
) -> None:
    expected = drawn_by_hand(begin(), model)
    session, chance = begin(prefilled=False, bonus=bonus), random.Random(seed)

    def drafts() -> Iterator[pb.Draft]:
        while True:
            count = chance.randint(1, min(5, SIZE - session.position))
            right = expected[session.position : session.position + count]
            ids = [token if chance.random() < 0.7 else (token + 1) % VOCABULARY for token in right]
            yield draft(ids, session.position, session.epoch)

    drive(session, verify(session), drafts())
    assert session.transcript.tokens == expected
    verdicts = [message.verdict for message in sent if message.HasField("verdict")]
    assert {verdict.epoch for verdict in verdicts} != {0}
    if not bonus:
        assert session.transcript.count(Provenance.SAMPLED) == 0


def test_a_failing_draft_ends_the_method(begin: Callable[..., Session]) -> None:
    session = begin(prefilled=False)
    with pytest.raises(ProtocolError, match="outside the vocabulary"):
        drive(session, verify(session), [draft([1, 9])])


def test_cloud_roles_are_generators_of_sessions(make_request: MakeRequest, engine: Engine) -> None:
    selective = Selective(0, "none", np.zeros((0, 0), np.float32), local_repair=False, audit=0.0)
    for role in CLOUD_ROLES.values():
        request = replace(make_request(), bonus=False, selective=selective)
        session = Session(engine, request, lambda message: None)
        work = role(session)
        assert isinstance(next(work), Feed)
        work.close()
        session.close()
