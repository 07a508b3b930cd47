"""Continuous batching: one thread drives all generations and feeds whatever is ready in one pass. No timers.

The engine computes here and nowhere else, so the server's event loop never waits for a forward.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cloud.engine import Engine, Feed
from cloud.session import AWAIT_DRAFT, Session, Work
from protos import ciar_pb2 as pb

__all__ = ["Scheduler", "Task"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Task:
    """A generation in the scheduler.

    Args:
        start: makes the session; called on the engine's thread.
        method: the cloud's side of the method.
        finished: called once at the end, on the engine's thread, with the session (None when it never began) and the
            error that ended it (None after success). Not called for a cancelled task.
    """

    start: Callable[[], Session]
    method: Callable[[Session], Work]
    finished: Callable[[Session | None, BaseException | None], None]
    session: Session | None = None
    work: Work | None = None
    need: Any = None

    @property
    def awaits_device(self) -> bool:
        """Whether the method has nothing to do until the device's next draft."""
        return self.need is AWAIT_DRAFT


class Scheduler:
    """Drives tasks on a thread of its own.

    Args:
        engine: computes the passes; used by the scheduler's thread alone from now on.
        threads: threads of the CPU's matrix products on the scheduler's thread; 0 leaves torch's choice.
    """

    def __init__(self, engine: Engine, threads: int = 0) -> None:
        self.engine, self.threads = engine, threads
        self.passes = 0
        self._tasks: list[Task] = []
        self._events: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the pass in progress and closes all sessions."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, task: Task) -> None:
        """Begins a task. Thread-safe."""
        self._post(lambda: self._begin(task))

    def deliver(self, task: Task, draft: pb.Draft) -> None:
        """Hands a device's draft to its task. Thread-safe."""
        self._post(lambda: self._deliver(task, draft))

    def cancel(self, task: Task) -> None:
        """Ends a task without calling `finished`; its slot is free afterwards. Thread-safe."""
        self._post(lambda: self._remove(task))

    def _post(self, event: Callable[[], None]) -> None:
        with self._wake:
            self._events.append(event)
            self._wake.notify()

    # -- on the engine's thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        while True:
            with self._wake:
                while not (self._events or self._stopping or self._ready()):
                    self._wake.wait()
                events, self._events = self._events, deque()
                if self._stopping:
                    break
            for event in events:
                event()
            if ready := self._ready():
                self._pass(ready)
        for task in list(self._tasks):
            self._remove(task)

    def _ready(self) -> list[Task]:
        return [task for task in self._tasks if isinstance(task.need, Feed)]

    def _pass(self, tasks: list[Task]) -> None:
        begun = time.perf_counter()
        try:
            outputs = self.engine.forward([task.need for task in tasks])
        except Exception as error:
            log.exception("a pass of %d generations failed", len(tasks))
            for task in tasks:
                self._end(task, error)
            return
        seconds = time.perf_counter() - begun
        self.passes += 1
        for task, rows in zip(tasks, outputs, strict=True):
            assert task.session is not None
            prefix = self.engine.config.prefix_rows if task.need.caption is not None else 0
            task.session.cost.add(1, len(task.need.tokens) + prefix, seconds)
            self._advance(task, rows)

    def _begin(self, task: Task) -> None:
        try:
            task.session = task.start()
        except Exception as error:
            self._tell(task, None, error)
            return
        task.work = task.method(task.session)
        self._tasks.append(task)
        self._advance(task, None)

    def _deliver(self, task: Task, draft: pb.Draft) -> None:
        if task.session is None or task not in self._tasks:
            return
        task.session.deliver(draft)
        if task.awaits_device:
            self._advance(task, None)

    def _advance(self, task: Task, value: Any) -> None:
        """Runs a method up to its next need."""
        assert task.work is not None
        try:
            task.need = task.work.send(value)
        except StopIteration:
            self._end(task, None)
        except Exception as error:
            self._end(task, error)

    def _end(self, task: Task, error: BaseException | None) -> None:
        session = task.session
        self._remove(task)
        self._tell(task, session, error)

    def _tell(self, task: Task, session: Session | None, error: BaseException | None) -> None:
        # A callback that raises must not end the thread that all generations share.
        try:
            task.finished(session, error)
        except Exception:
            log.exception("the end of a generation could not be told")

    def _remove(self, task: Task) -> None:
        if task not in self._tasks:
            return
        self._tasks.remove(task)
        task.need = None
        assert task.work is not None
        assert task.session is not None
        task.work.close()
        task.session.close()
