"""The scheduler: generations share passes, none holds up, ends or outlives another, and no slot is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cloud.engine import Caption, Engine, Feed
from cloud.methods.sampler import sample
from cloud.methods.verifier import verify
from cloud.models.transformer import Rows, Transformer
from cloud.scheduler import Scheduler, Task
from cloud.session import AWAIT_DRAFT, Request, Session, Work
from protos import ciar_pb2 as pb
from shared.errors import BusyError, ProtocolError

SIZE, SLOTS, PATIENCE = 12, 8, 20.0
MakeRequest = Callable[..., Request]


@dataclass
class Run:
    """A generation and what became of it."""

    task: Task
    messages: list[pb.CloudMessage] = field(default_factory=list)
    ends: list[tuple[Session | None, BaseException | None]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def result(self) -> BaseException | None:
        """The error that ended it, None after success."""
        assert self.ended.wait(PATIENCE), "it never ended"
        ((_, error),) = self.ends
        return error

    @property
    def tokens(self) -> list[int]:
        assert self.task.session is not None
        return self.task.session.transcript.tokens

    @property
    def forwards(self) -> int:
        return sum(getattr(message, message.WhichOneof("body")).cost.forwards for message in self.messages)


@pytest.fixture
def engine(model: Transformer) -> Engine:
    return Engine(model, slots=SLOTS)


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler that is not started yet; stopped at the end."""
    made = Scheduler(engine)
    yield made
    if made._thread.is_alive():
        made.stop()


@pytest.fixture
def make(engine: Engine, make_request: MakeRequest) -> Callable[..., Run]:
    """Makes a generation: a method, and what its request holds."""

    def make_run(role: Callable[[Session], Work] = sample, **fields: Any) -> Run:
        fields.setdefault("method", "ar" if role is sample else "sd")
        run: Run

        def emit(message: pb.CloudMessage) -> None:
            run.messages.append(message)

        def finished(session: Session | None, error: BaseException | None) -> None:
            run.ends.append((session, error))
            run.ended.set()

        run = Run(Task(lambda: Session(engine, make_request(**fields), emit), role, finished))
        return run

    return make_run


def settled(scheduler: Scheduler) -> None:
    """Returns once everything that was posted before has been done."""
    done = threading.Event()
    scheduler._post(done.set)
    assert done.wait(PATIENCE)


def eventually(condition: Callable[[], bool]) -> None:
    """Returns once a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def reaches_a_draft(run: Run) -> None:
    """Returns once a task waits for a draft."""
    eventually(lambda: run.task.need is AWAIT_DRAFT)


# -- batching -------------------------------------------------------------------------------------------------------


def test_eight_generations_share_their_passes(scheduler: Scheduler, make: Callable[..., Run]) -> None:
    runs = [make(seed=seed) for seed in range(SLOTS)]
    for run in runs:
        scheduler.submit(run.task)
    scheduler.start()
    assert [run.result() for run in runs] == [None] * SLOTS
    # A caption and eleven tokens: the last token is not fed.
    assert [run.forwards for run in runs] == [SIZE] * SLOTS
    assert scheduler.passes == SIZE


def test_generations_that_share_passes_give_the_pictures_they_give_alone(
    scheduler: Scheduler, make: Callable[..., Run]
) -> None:
    scheduler.start()
    alone = []
    for seed in range(SLOTS):
        run = make(seed=seed)
        scheduler.submit(run.task)
        assert run.result() is None
        alone.append(run.tokens)
    assert scheduler.passes == SIZE * SLOTS
    together = [make(seed=seed) for seed in range(SLOTS)]
    for run in together:
        scheduler.submit(run.task)
    assert [run.result() for run in together] == [None] * SLOTS
    assert [run.tokens for run in together] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_a_generation_that_comes_later_joins_the_passes_of_those_that_run(
    scheduler: Scheduler, make: Callable[..., Run]
) -> None:
    late = make(seed=1)
    early = make(lambda session: _then(sample(session), 4, lambda: scheduler.submit(late.task)), seed=0)
    scheduler.submit(early.task)
    scheduler.start()
    assert early.result() is None
    assert late.result() is None
    assert scheduler.passes < SIZE + 6


def _then(work: Work, passes: int, action: Callable[[], object]) -> Work:
    """A method that does something before a pass of its own."""
    value = None
    for count in itertools.count():
        try:
            need = work.send(value)
        except StopIteration:
            return
        if count == passes:
            action()
        value = yield need


# -- waiting for drafts ---------------------------------------------------------------------------------------------


def test_a_generation_that_waits_for_a_draft_holds_up_no_other(scheduler: Scheduler, make: Callable[..., Run]) -> None:
    scheduler.start()
    waiting, other = make(verify), make(seed=5)
    scheduler.submit(waiting.task)
    scheduler.submit(other.task)
    assert other.result() is None
    assert not waiting.ends
    assert waiting.task.need is AWAIT_DRAFT
    scheduler.deliver(waiting.task, pb.Draft(ids=[0] * SIZE))
    eventually(lambda: waiting.messages[-1].HasField("verdict"))


def test_a_draft_that_comes_before_it_is_asked_for_is_kept(scheduler: Scheduler, make: Callable[..., Run]) -> None:
    run = make(verify)
    scheduler.submit(run.task)
    scheduler.deliver(run.task, pb.Draft(ids=[0]))
    scheduler.start()
    eventually(lambda: any(message.HasField("verdict") for message in run.messages))


# -- cancelling -----------------------------------------------------------------------------------------------------


def _waits(session: Session) -> Work:
    yield from session.prefill()
    yield from session.next_draft()


CANCELLED_AT = ["before it began", "between two passes", "while it waits for a draft", "after it ended", "twice"]


@pytest.mark.parametrize("point", CANCELLED_AT)
def test_cancelling_frees_the_slot_at_any_point_and_reports_no_end(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run], point: str
) -> None:
    bystander = make(seed=3)
    if point == "before it began":
        run = make()
        scheduler.submit(run.task)
        scheduler.cancel(run.task)
        scheduler.submit(bystander.task)
        scheduler.start()
    else:
        scheduler.start()
        scheduler.submit(bystander.task)
        if point == "between two passes":
            run = make(lambda session: _then(sample(session), 3, lambda: scheduler.cancel(run.task)))
            scheduler.submit(run.task)
        else:
            run = make() if point == "after it ended" else make(_waits)
            scheduler.submit(run.task)
            run.result() if point == "after it ended" else reaches_a_draft(run)
            for _ in range(1 + (point == "twice")):
                scheduler.cancel(run.task)
    assert bystander.result() is None
    settled(scheduler)
    assert len(run.ends) == (point == "after it ended")
    assert engine.cache.free_slots == SLOTS


def test_a_cancelled_generation_computes_nothing_more_and_ignores_drafts(
    scheduler: Scheduler, make: Callable[..., Run]
) -> None:
    scheduler.start()
    run = make(verify)
    scheduler.submit(run.task)
    reaches_a_draft(run)
    scheduler.cancel(run.task)
    scheduler.deliver(run.task, pb.Draft(ids=[0]))
    settled(scheduler)
    assert scheduler.passes == 1
    assert not any(message.HasField("verdict") for message in run.messages)


def test_a_method_cleans_up_when_it_is_cancelled(scheduler: Scheduler, make: Callable[..., Run]) -> None:
    cleaned = threading.Event()

    def method(session: Session) -> Work:
        try:
            yield from _waits(session)
        finally:
            cleaned.set()

    scheduler.start()
    run = make(method)
    scheduler.submit(run.task)
    reaches_a_draft(run)
    scheduler.cancel(run.task)
    assert cleaned.wait(PATIENCE)


# -- failures -------------------------------------------------------------------------------------------------------


def _fails_after_a_pass(session: Session) -> Work:
    yield from session.prefill()
    raise ProtocolError("what is wrong")


def _fails_at_once(session: Session) -> Work:
    raise ProtocolError("what is wrong")
    yield  # a generator, like every method


@pytest.mark.parametrize("method", [_fails_at_once, _fails_after_a_pass])
def test_a_failing_method_ends_alone_and_frees_its_slot(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run], method: Callable[[Session], Work]
) -> None:
    failing, others = make(method), [make(seed=seed) for seed in range(3)]
    for run in (others[0], failing, *others[1:]):
        scheduler.submit(run.task)
    scheduler.start()
    assert str(failing.result()) == "what is wrong"
    assert [run.result() for run in others] == [None] * 3
    settled(scheduler)
    assert engine.cache.free_slots == SLOTS


def test_a_bad_draft_ends_its_own_generation_only(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run]
) -> None:
    scheduler.start()
    bad, good = make(verify), make(verify)
    for run in (bad, good):
        scheduler.submit(run.task)
    scheduler.deliver(bad.task, pb.Draft(ids=[99]))
    scheduler.deliver(good.task, pb.Draft(ids=[0]))
    assert isinstance(bad.result(), ProtocolError)
    reaches_a_draft(good)
    assert not good.ends
    assert engine.cache.free_slots == SLOTS - 1


def test_a_generation_for_which_there_is_no_slot_is_told_so(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run]
) -> None:
    scheduler.start()
    full = [make(_waits) for _ in range(SLOTS)]
    for run in full:
        scheduler.submit(run.task)
    refused = make()
    scheduler.submit(refused.task)
    assert isinstance(refused.result(), BusyError)
    assert refused.ends[0][0] is None
    scheduler.cancel(full[0].task)
    later = make()
    scheduler.submit(later.task)
    assert later.result() is None


def test_a_failed_pass_ends_the_generations_in_it_and_the_next_ones_work(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run]
) -> None:
    def feeds_too_much(session: Session) -> Work:
        yield Feed(session.sequence, [0] * 100, Caption(torch.from_numpy(session.request.features)))

    scheduler.start()
    run = make(feeds_too_much)
    scheduler.submit(run.task)
    assert isinstance(run.result(), ValueError)
    later = make()
    scheduler.submit(later.task)
    assert later.result() is None
    settled(scheduler)
    assert engine.cache.free_slots == SLOTS


@pytest.mark.parametrize("when", ["a slot was lacking", "the picture was complete"])
def test_a_callback_that_raises_does_not_end_the_engine(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run], when: str
) -> None:
    """A stream whose event loop is gone raises when it is told the end; the other streams must go on."""
    broken = make()
    begin = broken.task.start

    def start() -> Session:
        if when == "a slot was lacking":
            raise BusyError("full")
        return begin()

    def finished(session: Session | None, error: BaseException | None) -> None:
        raise RuntimeError("event loop is closed")

    scheduler.start()
    scheduler.submit(Task(start, sample, finished))
    later = make()
    scheduler.submit(later.task)
    assert later.ended.wait(2.0), "the engine's thread died with the callback"
    assert later.result() is None
    settled(scheduler)
    assert engine.cache.free_slots == SLOTS


# -- stopping -------------------------------------------------------------------------------------------------------


def test_stopping_closes_every_session_and_ends_the_thread(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run]
) -> None:
    cleaned: list[str] = []

    def method(name: str) -> Callable[[Session], Work]:
        def run(session: Session) -> Work:
            try:
                yield from _waits(session)
            finally:
                cleaned.append(name)

        return run

    scheduler.start()
    runs = [make(method(name)) for name in "abc"]
    for run in runs:
        scheduler.submit(run.task)
    for run in runs:
        reaches_a_draft(run)
    scheduler.stop()
    assert not scheduler._thread.is_alive()
    assert sorted(cleaned) == ["a", "b", "c"]
    assert engine.cache.free_slots == SLOTS


def test_stopping_in_the_middle_of_pictures_ends_after_the_pass_in_progress(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run]
) -> None:
    going = threading.Event()
    run = make(lambda session: _then(sample(session), 2, going.set))
    scheduler.start()
    scheduler.submit(run.task)
    assert going.wait(PATIENCE)
    scheduler.stop()
    assert not scheduler._thread.is_alive()
    assert engine.cache.free_slots == SLOTS


def test_the_engine_computes_on_its_own_thread_alone(
    scheduler: Scheduler, engine: Engine, make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    forward = engine.forward

    def watched(feeds: Sequence[Feed]) -> list[Rows]:
        threads.add(threading.current_thread().name)
        return forward(feeds)

    monkeypatch.setattr(engine, "forward", watched)
    scheduler.start()
    run = make()
    scheduler.submit(run.task)
    assert run.result() is None
    assert threads == {"engine"}
