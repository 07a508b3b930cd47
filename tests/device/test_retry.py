"""Back-off: bounded in each wait and in all, with full jitter, without sleeping in tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from device.retry import Retry


@dataclass
class Clock:
    """A clock that only sleeping and `spend` move."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retry(clock: Clock, jitter: float = 1.0, **settings: float) -> Retry:
    return Retry(**settings, clock=lambda: clock.now, sleep=clock.sleep, jitter=lambda: jitter)


def test_waits_double_up_to_the_longest() -> None:
    clock = Clock()
    again = retry(clock, first=0.1, longest=1.0, patience=100.0)
    assert all(again.wait() for _ in range(6))
    assert clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_jitter_takes_any_part_of_a_wait() -> None:
    clock = Clock()
    again = retry(clock, jitter=0.25, first=0.4, patience=100.0)
    again.wait()
    again.wait()
    assert clock.slept == pytest.approx([0.1, 0.2])


def test_patience_bounds_all_waits_together() -> None:
    clock = Clock()
    again = retry(clock, first=1.0, longest=4.0, patience=10.0)
    while again.wait():
        assert len(clock.slept) < 100
    assert sum(clock.slept) == pytest.approx(10.0)
    assert not again.wait()
    assert sum(clock.slept) == pytest.approx(10.0), "no wait when patience has run out"


def test_time_of_the_attempts_counts_as_well() -> None:
    clock = Clock()
    again = retry(clock, first=0.1, patience=10.0)
    assert again.wait()
    clock.now += 10.0
    assert not again.wait()


def test_progress_starts_afresh() -> None:
    clock = Clock()
    again = retry(clock, first=1.0, longest=8.0, patience=5.0)
    for _ in range(4):
        assert again.wait()
        assert again.wait()
        again.progressed()
    assert clock.slept == pytest.approx([1.0, 2.0] * 4)
