"""A draft goes on while its next token is worth its cost, by what verdicts and clocks have told."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from device.pacing import AdaptivePace, FixedPace, Pace

SURE, UNSURE = 0.95, 0.15


def length(pace: Pace, confidences: Iterable[float]) -> int:
    """Tokens of a draft over rows of these confidences."""
    pace.begin()
    return sum(1 for _ in itertools.takewhile(pace.wants, confidences))


def run(confidence: float) -> Iterable[float]:
    return itertools.repeat(confidence, 1000)


def teach(pace: AdaptivePace, confidences: list[float], accepted: int, seconds: float = 0.01, times: int = 50) -> None:
    """Lets the pace see the same draft and verdict many times."""
    for _ in range(times):
        pace.begin()
        drafted = sum(1 for _ in itertools.takewhile(pace.wants, confidences))
        pace.drafted(0.001 * drafted)
        pace.judged(min(accepted, drafted), seconds)


def frozen(**settings: Any) -> AdaptivePace:
    """A pace that learns chances only, not speeds."""
    return AdaptivePace(memory=1.0, **settings)


def test_fixed_pace_wants_the_same_of_every_draft_whatever_it_hears() -> None:
    pace = FixedPace(7)
    assert length(pace, run(UNSURE)) == 7
    pace.drafted(100.0)
    pace.judged(0, 100.0)
    pace.forget()
    assert length(pace, run(SURE)) == 7


@pytest.mark.parametrize("settings", [{}, {"token_seconds": 100.0}, {"rate": 1e9}])
@pytest.mark.parametrize("confidence", [0.0, UNSURE, 1.0])
def test_every_draft_has_a_token(settings: dict[str, Any], confidence: float) -> None:
    assert length(AdaptivePace(**settings), run(confidence)) >= 1


def test_no_draft_is_longer_than_the_longest() -> None:
    assert length(AdaptivePace(longest=5, rate=1e-9), run(1.0)) == 5


def test_sure_rows_are_drafted_in_longer_runs() -> None:
    assert length(AdaptivePace(), run(SURE)) > length(AdaptivePace(), run(0.5)) > length(AdaptivePace(), run(UNSURE))


def test_draft_ends_where_the_drafter_grows_unsure() -> None:
    pace = AdaptivePace()
    certain = length(pace, run(SURE))
    assert length(pace, [*[SURE] * 3, *run(0.0)]) < certain


def test_tokens_that_cost_more_are_drafted_less() -> None:
    assert length(AdaptivePace(token_seconds=0.002), run(SURE)) < length(AdaptivePace(), run(SURE))


def test_time_is_worth_more_where_the_link_is_fast() -> None:
    assert length(AdaptivePace(rate=400.0), run(SURE)) < length(AdaptivePace(rate=50.0), run(SURE))


def test_rejections_shorten_and_acceptances_lengthen_the_drafts_of_such_rows() -> None:
    doubtful, trusted = frozen(), frozen()
    before = length(frozen(), run(0.5))
    teach(doubtful, [0.5] * 8, accepted=0)
    teach(trusted, [0.5] * 8, accepted=8)
    assert length(doubtful, run(0.5)) < before < length(trusted, run(0.5))


def test_tokens_behind_the_first_rejection_say_nothing() -> None:
    pace = frozen(rate=1.0)  # time is cheap, so that long drafts are made
    before = length(pace, run(UNSURE)), length(pace, run(SURE))
    teach(pace, [SURE, *[UNSURE] * 5], accepted=0)
    assert length(pace, run(UNSURE)) == before[0]
    assert length(pace, run(SURE)) < before[1]


def test_verdicts_belong_to_drafts_in_the_order_they_were_sent() -> None:
    pace = frozen(rate=1.0)
    before = length(pace, run(UNSURE)), length(pace, run(0.5))
    for _ in range(50):
        for confidence in (0.5, UNSURE):
            pace.begin()
            assert pace.wants(confidence)
            pace.drafted(0.001)
        pace.judged(0, 0.01)
        pace.judged(1, 0.01)
    assert length(pace, run(UNSURE)) > before[0]
    assert length(pace, run(0.5)) < before[1]


def test_what_was_in_flight_on_a_lost_link_is_forgotten() -> None:
    pace = frozen(rate=1.0)
    before = length(pace, run(SURE))
    for _ in range(50):
        pace.begin()
        assert pace.wants(SURE)
        pace.drafted(0.001)
        pace.forget()
        pace.begin()
        assert pace.wants(UNSURE)
        pace.drafted(0.001)
        pace.judged(0, 0.01)
    assert length(pace, run(SURE)) == before


def test_speeds_are_running_means_of_what_the_clock_says() -> None:
    pace = AdaptivePace(memory=0.5, token_seconds=0.1, rate=100.0)
    pace.begin()
    assert pace.wants(SURE)
    pace.drafted(0.3)
    assert pace.token_seconds == pytest.approx(0.2)
    pace.judged(1, 0.7)  # an accepted token and the bonus behind it, in a second with the drafting
    assert pace.rate == pytest.approx((100.0 + 2.0) / 2)


def test_rounds_that_grow_with_the_draft_make_drafts_shorter() -> None:
    def taught(seconds_a_token: float) -> AdaptivePace:
        pace = frozen()
        for count in [2, 6] * 30:
            pace.begin()
            assert all(pace.wants(1.0) for _ in range(count))
            pace.drafted(0.001)
            pace.judged(count, 0.01 + seconds_a_token * count)
        return pace

    assert length(taught(0.002), run(0.5)) < length(taught(0.0), run(0.5))
    assert length(taught(-0.002), run(0.5)) == length(taught(0.0), run(0.5)), "a token never counts as a gain of time"


def test_nothing_is_drafted_behind_a_draft_that_will_hardly_stand() -> None:
    """The device waits for the verdict instead; once that is there, or will never come, it drafts again."""
    for end in ("judged", "forgotten"):
        pace = AdaptivePace(rate=400.0)
        pace.begin()
        assert pace.wants(0.0)
        pace.drafted(0.001)
        pace.begin()
        assert not pace.wants(0.0)
        if end == "judged":
            pace.judged(0, 0.01)
        else:
            pace.forget()
        pace.begin()
        assert pace.wants(0.0)


def test_drafts_behind_a_likely_one_are_as_long_as_their_chances_allow() -> None:
    pace = frozen(rate=400.0)
    alone = length(pace, run(SURE))
    pace.begin()
    assert pace.wants(0.5)
    pace.drafted(0.001)
    assert 0 < length(pace, run(SURE)) < alone
