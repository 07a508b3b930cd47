"""The batch controller asks for what earns the most tokens a second, by a formula that a simulation confirms."""

from __future__ import annotations

import random
from typing import Any

import pytest

from device.batching import BatchController

LONGEST = 16


def controller(**fields: Any) -> BatchController:
    return BatchController(LONGEST, **fields)


def settled(acceptance: float, round_seconds: float = 0.03, share: float = 0.3, **fields: Any) -> BatchController:
    """A controller that has seen a link, a target and a device of that kind for long."""
    made = controller(**fields)
    for _ in range(400):
        made.drafted(tokens=10, uncertain=round(10 * share), seconds=0.01)
        made.judged(accepted=round(100 * acceptance), failed=100 - round(100 * acceptance), seconds=round_seconds)
    return made


# -- the choice -----------------------------------------------------------------------------------------------------


def test_when_nearly_everything_stands_batches_are_long_and_when_little_does_short() -> None:
    batches = [settled(acceptance).batch() for acceptance in (0.1, 0.5, 0.8, 0.95, 1.0)]
    assert batches == sorted(batches)
    assert batches[0] <= 2
    assert batches[-1] == LONGEST


def test_a_slow_link_wants_longer_batches_than_a_fast_one() -> None:
    batches = [settled(0.7, round_seconds).batch() for round_seconds in (0.0005, 0.005, 0.03, 0.2, 1.0)]
    assert batches == sorted(batches)
    assert batches[0] <= 2
    assert batches[-1] >= 3 * batches[0]


def test_while_verdicts_fly_a_batch_need_not_outlast_the_round_trip() -> None:
    """In 0.03 s the device draws thirty tokens, nine of them uncertain: a longer batch would only be a later one."""
    assert settled(1.0, overlapped=True).batch() <= 9
    assert settled(1.0).batch() > 9


def test_local_repair_drops_nothing_so_the_longest_batch_is_best() -> None:
    assert settled(0.1, local=True).batch() == LONGEST


@pytest.mark.parametrize("local", [False, True])
def test_a_fixed_batch_wins(local: bool) -> None:
    for acceptance in (0.1, 1.0):
        assert settled(acceptance, local=local, fixed=3).batch() == 3


def test_a_batch_is_never_less_than_one_nor_more_than_the_longest() -> None:
    for acceptance in (0.0, 0.3, 0.999, 1.0):
        for round_seconds in (0.0, 1e-6, 100.0):
            for share in (0.0, 1.0):
                assert 1 <= settled(acceptance, round_seconds, share).batch() <= LONGEST


def test_the_choice_has_the_highest_rate() -> None:
    made = settled(0.8)
    rates = [made.rate(batch) for batch in range(1, LONGEST + 1)]
    assert rates[made.batch() - 1] == max(rates)
    assert 1 < made.batch() < LONGEST


# -- the formula ----------------------------------------------------------------------------------------------------


def simulated(
    acceptance: float, share: float, batch: int, token_seconds: float, round_seconds: float, overlapped: bool
) -> float:
    """Tokens a second of a device that drafts up to `batch` uncertain tokens, asks, and drafts on or waits."""
    chance, committed, seconds, drafted_on = random.Random(0), 0, 0.0, False
    for _ in range(4000):
        drafted = uncertain = 0
        failed_at = None
        while uncertain < batch:
            drafted += 1
            if chance.random() < share:
                uncertain += 1
                if failed_at is None and chance.random() >= acceptance:
                    failed_at = drafted
        committed += failed_at or drafted  # the failed token is corrected, so it counts
        drafting = drafted * token_seconds
        seconds += max(drafting, round_seconds) if drafted_on else drafting + round_seconds
        drafted_on = overlapped and failed_at is None  # what was drafted behind a failure is void
    return committed / seconds


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_expected_rate_is_that_of_a_simulation(
    acceptance: float, batch: int, share: float, overlapped: bool
) -> None:
    made = controller(
        token_seconds=0.002, round_seconds=0.03, acceptance=acceptance, share=share, overlapped=overlapped
    )
    # The simulated lengths vary, and the longer of two varying times is longer than that of their means.
    expected = simulated(acceptance, share, batch, 0.002, 0.03, overlapped)
    assert made.rate(batch) == pytest.approx(expected, rel=0.17 if overlapped else 0.03)


def test_a_device_that_drafts_on_never_earns_less_than_one_that_waits() -> None:
    fields = {"token_seconds": 0.001, "round_seconds": 0.03, "share": 0.3}
    for acceptance in (0.0, 0.5, 0.9, 1.0):
        made, waiting = (controller(overlapped=on, acceptance=acceptance, **fields) for on in (True, False))
        assert all(made.rate(batch) >= waiting.rate(batch) for batch in range(1, LONGEST + 1))
    assert made.rate(9) == pytest.approx(2 * waiting.rate(9), rel=0.01)  # nine take a round trip to draft


# -- what is measured -----------------------------------------------------------------------------------------------


def test_what_is_measured_is_followed_within_a_few_dozen_messages() -> None:
    made = controller()
    for _ in range(60):
        made.drafted(tokens=10, uncertain=6, seconds=0.05)
        made.judged(accepted=3, failed=3, seconds=0.2)
    assert made.token_seconds == pytest.approx(0.005, rel=0.05)
    assert made.share == pytest.approx(0.6, rel=0.05)
    assert made.acceptance == pytest.approx(0.5, rel=0.05)
    assert made.round_seconds == pytest.approx(0.2, rel=0.05)


def test_a_message_of_many_tokens_weighs_as_much_as_as_many_messages_of_one() -> None:
    one, many = controller(), controller()
    many.judged(accepted=8, failed=0, seconds=0.1)
    for _ in range(8):
        one.judged(accepted=1, failed=0, seconds=0.1)
    assert many.acceptance == pytest.approx(one.acceptance)


def test_a_draft_of_kept_tokens_says_nothing_of_acceptance() -> None:
    made = controller()
    made.judged(accepted=0, failed=0, seconds=0.1)
    assert made.acceptance == controller().acceptance
    assert made.round_seconds > controller().round_seconds
