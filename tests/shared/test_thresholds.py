"""Thresholds: the quantile holds its budget whatever the scores are, and decisions can be taken back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.calibration import ROW_QUANTILES, quantiles_of
from shared.errors import SettingsError
from shared.thresholds import THRESHOLDS, Absolute, MaxNorm, Quantile, Threshold, make_threshold

Law = Callable[[np.random.Generator, int], NDArray[np.float64]]

POSITIONS = 241
BUDGETS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9]
EXACT = 1.0 / POSITIONS  # a token


def lognormal(chance: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.exp(1.5 * chance.normal(size=count))


def autocorrelated(chance: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Lognormal scores in long runs, as the sky above and the meadow below."""
    drive, value = chance.normal(size=count), chance.normal()
    values = []
    for step in drive:
        value = 0.95 * value + math.sqrt(1.0 - 0.95**2) * step
        values.append(math.exp(1.5 * value))
    return np.array(values)


LAWS: dict[str, Law] = {
    "lognormal": lognormal,
    "pareto": lambda chance, count: chance.pareto(1.2, count),
    "cauchy": lambda chance, count: np.abs(chance.standard_cauchy(count)),
    "two scales": lambda chance, count: chance.exponential(size=count) * 1000.0 ** chance.integers(0, 2, size=count),
    "mostly zero": lambda chance, count: np.maximum(0.0, chance.normal(size=count)),
}


def calibration(law: Law) -> list[float]:
    return quantiles_of(law(np.random.default_rng(0), 20000))


def share(budget: float, start: Sequence[float], scores: Iterable[float]) -> float:
    """Share of uncertain tokens that a quantile makes of a picture's scores."""
    values = [float(score) for score in scores]
    threshold = Quantile(budget, [start], [len(values)])
    return float(np.mean([threshold.uncertain(value) for value in values]))


# -- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_share_of_uncertain_tokens_is_the_budget_on_scores_like_the_calibrations(law: Law, budget: float) -> None:
    start = calibration(law)
    for seed in range(1, 5):
        assert abs(share(budget, start, law(np.random.default_rng(seed), POSITIONS)) - budget) <= EXACT


@pytest.mark.parametrize("factor", [0.0, 0.01, 0.3, 3.0, 100.0, 1e6], ids=lambda factor: f"x{factor:g}")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_share_is_the_budget_on_a_picture_harder_or_easier_than_the_calibrations(
    factor: float, budget: float
) -> None:
    start = calibration(lognormal)
    for seed in range(1, 4):
        scores = factor * lognormal(np.random.default_rng(seed), POSITIONS)
        assert abs(share(budget, start, scores) - budget) <= EXACT


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_share_is_the_budget_on_scores_that_come_in_runs(budget: float) -> None:
    start = calibration(lognormal)
    for seed in range(1, 5):
        scores = autocorrelated(np.random.default_rng(seed), POSITIONS)
        assert abs(share(budget, start, scores) - budget) <= EXACT


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("eager", [False, True], ids=["shy", "eager"])
def test_an_adversary_that_sees_the_level_cannot_move_the_share(budget: float, eager: bool) -> None:
    """Scores just under the level for as long as that is possible, or just above it."""
    start = calibration(lognormal)
    threshold, verdicts = Quantile(budget, [start], [POSITIONS]), list[bool]()
    for _ in range(POSITIONS):
        verdicts.append(threshold.uncertain(1e9 if eager else 0.0))
        assert sum(verdicts) < budget * POSITIONS + 1.0
    assert abs(np.mean(verdicts) - budget) <= EXACT


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_first_decision_is_the_calibrations_quantile(budget: float) -> None:
    """The threshold starts warm: it has no level to find first."""
    start = calibration(lognormal)
    scores = lognormal(np.random.default_rng(9), 2000)
    first = [Quantile(budget, [start], [POSITIONS]).uncertain(float(score)) for score in scores]
    assert abs(np.mean(first) - budget) < 4.0 * math.sqrt(0.25 / 2000)


def test_the_larger_scores_are_the_uncertain_ones() -> None:
    scores = lognormal(np.random.default_rng(3), POSITIONS)
    threshold = Quantile(0.3, [calibration(lognormal)], [POSITIONS])
    verdicts = np.array([threshold.uncertain(float(score)) for score in scores])
    assert np.median(scores[verdicts]) > 4.0 * np.median(scores[~verdicts])


def test_the_budget_goes_to_the_hard_part_of_a_picture_and_not_to_the_easy_rows_above_it() -> None:
    chance, start = np.random.default_rng(5), calibration(LAWS["two scales"])
    easy, hard = chance.exponential(size=120), 1000.0 * chance.exponential(size=60)
    threshold = Quantile(0.3, [start], [240])
    verdicts = [threshold.uncertain(float(score)) for score in (*easy, *hard, *easy[:60])]
    above, middle = np.mean(verdicts[:120]), np.mean(verdicts[120:180])
    assert above < 0.05
    assert middle > 0.75
    assert sum(verdicts) == 72


def test_what_easy_rows_still_to_come_will_not_need_is_spent_before_them() -> None:
    """Hard rows above easy ones: a budget kept for the easy ones would be spent on them for want of anything better."""
    chance, count = np.random.default_rng(6), 16
    rows = [1000.0] * 5 + [1.0] * 10
    scores = [scale * chance.exponential(size=count) for scale in rows]
    by_row = [quantiles_of(scale * chance.exponential(size=5000), ROW_QUANTILES) for scale in rows]
    pooled = [quantiles_of(np.concatenate(by_row), ROW_QUANTILES)] * len(rows)

    def spent_on_hard_rows(quantiles: list[list[float]]) -> int:
        threshold = Quantile(0.3, quantiles, [count] * len(rows))
        verdicts = [threshold.uncertain(float(score)) for row in scores for score in row]
        assert sum(verdicts) == 72
        return sum(verdicts[: 5 * count])

    assert spent_on_hard_rows(by_row) >= 70
    assert spent_on_hard_rows(pooled) <= 60


def test_the_level_of_a_row_is_the_one_that_uses_up_the_budget_over_all_rows() -> None:
    """By hand: 4 tokens to judge; from the second row on, scores of 0..1 and then of 0..4."""
    even = [0.0, 0.25, 0.5, 0.75, 1.0]
    threshold = Quantile(0.4, [[0.0] * 5, even, [4.0 * value for value in even]], [2, 4, 4])
    # No score of the first row is as high as what is expected below it, whatever it turns out to be within it.
    assert [threshold.uncertain(0.0) for _ in range(2)] == [False, False]
    # A score of s leaves 4 (1 - s) + 4 (1 - s / 4) higher ones expected, which is fewer than 4 above s = 0.8.
    verdicts = list[bool]()
    for score in (0.79, 0.81):
        verdicts.append(threshold.uncertain(score))
        threshold.truncate(2)
    assert verdicts == [False, True]


def test_rows_to_be_decided_in_part_or_not_at_all_count_for_what_they_hold() -> None:
    """A prefix takes a row and a half: the budget is that of the rest, whose first position is in the second row."""
    easy, hard = (quantiles_of(scale * np.arange(1.0, 100.0), ROW_QUANTILES) for scale in (1.0, 1000.0))
    threshold = Quantile(0.5, [hard, easy, easy], [0, 2, 4])
    assert [threshold.uncertain(score) for score in (70.0, 20.0, 80.0, 30.0, 90.0, 10.0)] == [
        True, False, True, False, True, False]  # fmt: skip


def test_quantiles_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(SettingsError, match="calibration: it is of 1 rows, not 2"):
        Quantile(0.3, [[0.0, 1.0]], [4, 4])


@pytest.mark.parametrize("mode", ["quantile", "average"])
@pytest.mark.parametrize(("budget", "expected"), [(0.0, False), (1.0, True)])
def test_a_budget_of_nothing_or_everything_is_exactly_that(mode: str, budget: float, expected: bool) -> None:
    scores = [0.0, 1e-9, 1.0, 1e9, *lognormal(np.random.default_rng(4), POSITIONS).tolist()]
    start = calibration(lognormal)
    threshold = make_threshold(mode, budget, None, start, [start], [len(scores)])
    assert {threshold.uncertain(score) for score in scores} == {expected}


@pytest.mark.parametrize("budget", BUDGETS)
def test_on_average_pictures_like_the_calibrations_keep_to_the_budget_and_hard_ones_may_exceed_it(
    budget: float,
) -> None:
    start = calibration(lognormal)

    def spent(scores: NDArray[np.float64]) -> float:
        threshold = make_threshold("average", budget, None, start, (), ())
        return float(np.mean([threshold.uncertain(float(score)) for score in scores]))

    scores = lognormal(np.random.default_rng(8), 4000)
    assert abs(spent(scores) - budget) < 0.03
    assert spent(0.2 * scores) < spent(scores) < spent(5.0 * scores)


# -- taking decisions back ------------------------------------------------------------------------------------------


MAKERS: dict[str, Callable[[], Threshold]] = {
    "quantile": lambda: make_threshold("quantile", 0.3, None, (), [calibration(lognormal)] * 7, [10] * 7),
    "average": lambda: make_threshold("average", 0.3, None, calibration(lognormal), (), ()),
    "maxnorm": lambda: make_threshold("maxnorm", 0.3, 0.3, [0.0, 5.0], (), ()),
    "absolute": lambda: make_threshold("absolute", 0.3, 1.0, (), (), ()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("seed", range(5))
def test_after_any_truncations_the_same_scores_give_the_same_decisions(
    make: Callable[[], Threshold], seed: int
) -> None:
    """However often a verifier sends the device back, the picture is decided as if it never had."""
    chance = random.Random(seed)
    scores = autocorrelated(np.random.default_rng(seed), 60).tolist()
    straight = make()
    expected = [straight.uncertain(score) for score in scores]
    threshold, decided = make(), list[bool]()
    while len(decided) < len(scores):
        if chance.random() < 0.3:
            del decided[max(0, len(decided) - chance.randint(1, 4)) :]
            threshold.truncate(len(decided))
        # Drafts behind a failure had other scores: they must leave no trace.
        for _ in range(chance.randint(0, 3)):
            threshold.uncertain(chance.expovariate(0.01))
        threshold.truncate(len(decided))
        decided.append(threshold.uncertain(scores[len(decided)]))
    assert decided == expected
    assert set(expected) == {True, False}


@pytest.mark.parametrize("make", [MAKERS["quantile"], MAKERS["maxnorm"]], ids=["quantile", "maxnorm"])
def test_a_truncation_that_is_left_out_is_noticed(make: Callable[[], Threshold]) -> None:
    """The comparison above is not blind: decisions of a dropped draft would change later ones."""
    scores = autocorrelated(np.random.default_rng(1), 60).tolist()
    straight, other = make(), make()
    for _ in range(5):
        other.uncertain(1000.0)
    assert [straight.uncertain(score) for score in scores] != [other.uncertain(score) for score in scores]


def test_truncating_to_more_than_was_decided_changes_nothing() -> None:
    for make in MAKERS.values():
        one, other = make(), make()
        one.uncertain(3.0)
        other.uncertain(3.0)
        other.truncate(50)
        assert one == other


# -- the other modes ------------------------------------------------------------------------------------------------


def test_a_level_of_nothing_makes_everything_uncertain_and_an_infinite_one_makes_nothing() -> None:
    for score in (0.0, 1e-30, 1.0, 1e30):
        assert Absolute(0.0).uncertain(score)
        assert not Absolute(math.inf).uncertain(score)


def test_an_absolute_level_is_compared_with_the_score() -> None:
    assert [Absolute(2.0).uncertain(score) for score in (1.9, 2.0, 2.1)] == [False, False, True]


def test_maxnorm_compares_with_the_largest_score_so_far() -> None:
    threshold = MaxNorm(0.5, first=0.0, fade=1.0)
    assert [threshold.uncertain(score) for score in (1.0, 0.6, 0.4, 4.0, 1.9, 2.1)] == [
        True, True, False, True, False, True]  # fmt: skip


def test_maxnorm_expects_the_calibrations_largest_score_until_it_fades() -> None:
    threshold = MaxNorm(0.5, first=10.0, fade=0.9)
    # 1.0 is uncertain once 10 * 0.9^n < 2, so from the 16th position on.
    assert [threshold.uncertain(1.0) for _ in range(20)] == [False] * 15 + [True] * 5


def test_maxnorm_at_level_nothing_makes_everything_uncertain() -> None:
    assert MaxNorm(0.0, first=1.0).uncertain(0.0)


# -- making them ----------------------------------------------------------------------------------------------------


def test_each_mode_makes_its_threshold() -> None:
    start, rows = [0.0, 1.0, 5.0], [[0.0, 1.0], [4.0, 6.0]]
    assert make_threshold("quantile", 0.2, None, start, rows, [3, 6]) == Quantile(0.2, rows, [3, 6])
    assert make_threshold("average", 0.25, None, start, rows, [3, 6]) == Absolute(3.0)
    assert make_threshold("maxnorm", 0.2, None, start, rows, [3, 6]) == MaxNorm(0.30, 1.0)  # the largest is an outlier
    assert make_threshold("maxnorm", 0.2, 0.7, start, rows, [3, 6]) == MaxNorm(0.7, 1.0)
    assert make_threshold("absolute", 0.2, 0.7, (), (), ()) == Absolute(0.7)
    assert set(MAKERS) == set(THRESHOLDS)


def test_what_cannot_be_made_is_named() -> None:
    with pytest.raises(SettingsError, match="threshold: mode absolute needs a level"):
        make_threshold("absolute", 0.3, None, (), (), ())
    with pytest.raises(SettingsError, match=r"one of quantile, average, maxnorm, absolute .* not 'median'"):
        make_threshold("median", 0.3, None, [0.0, 1.0], (), ())
