"""The audit: one number a kept token estimates the total variation without bias, and the seed alone chooses tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.audit import Audit, audited

Floats = NDArray[np.float64]


def pair(seed: int, vocabulary: int = 12, excluded: bool = False) -> tuple[Floats, Floats]:
    """A draft and a target row; with `excluded` each gives nothing to some tokens of the other."""
    generator = np.random.default_rng(seed)
    draft, target = generator.dirichlet(np.ones(vocabulary) * 0.5, size=2)
    if excluded:
        draft[:2], target[-2:] = 0.0, 0.0
    return draft / draft.sum(), target / target.sum()


def excess(draft_prob: float, target_prob: float) -> float:
    """What an audit makes of one token."""
    audit = Audit()
    audit.add(math.log(draft_prob), math.log(target_prob) if target_prob else -math.inf)
    assert audit.tv is not None
    return audit.tv


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_mean_over_drafted_tokens_is_the_total_variation_exactly(seed: int, excluded: bool) -> None:
    draft, target = pair(seed, excluded=excluded)
    expected = sum(p * excess(p, q) for p, q in zip(draft, target, strict=True) if p > 0.0)
    assert expected == pytest.approx(0.5 * np.abs(draft - target).sum(), abs=1e-12)
    assert expected > 0.1


def test_equal_rows_cost_nothing_and_disjoint_ones_everything() -> None:
    assert excess(0.3, 0.3) == 0.0
    assert excess(0.3, 0.9) == 0.0
    assert excess(0.3, 0.0) == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_on_sampled_tokens_is_right_within_its_own_error(seed: int) -> None:
    """Rows differ from token to token, as in a picture; the estimate is of their mean."""
    generator = np.random.default_rng(100 + seed)
    audit, truths = Audit(), []
    for index in range(1500):
        draft, target = pair(1000 * seed + index % 50)
        token = generator.choice(len(draft), p=draft)
        audit.add(math.log(draft[token]), math.log(target[token]))
        truths.append(0.5 * np.abs(draft - target).sum())
    assert audit.tokens == 1500
    assert audit.tv is not None
    assert audit.error is not None
    assert 0.001 < audit.error < 0.02
    assert abs(audit.tv - np.mean(truths)) < 4.0 * audit.error


def test_the_error_is_the_standard_error_of_the_mean() -> None:
    audit, ratios = Audit(), [0.9, 0.5, 0.1, 2.0, 0.7]
    for ratio in ratios:
        audit.add(0.0, math.log(ratio))
    values = [max(0.0, 1.0 - ratio) for ratio in ratios]
    assert audit.tv == pytest.approx(np.mean(values))
    assert audit.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_nothing_audited_is_no_estimate_and_one_token_no_error() -> None:
    audit = Audit()
    assert (audit.tv, audit.error) == (None, None)
    audit.add(-1.0, -1.5)
    assert audit.tv is not None
    assert audit.error is None


# -- which tokens ---------------------------------------------------------------------------------------------------


def test_the_choice_belongs_to_seed_and_position_not_to_the_message() -> None:
    whole = audited(7, range(256), 0.2)
    for start in (0, 1, 100, 255):
        assert audited(7, range(start, 256), 0.2) == whole[start:]
    assert [audited(7, [position], 0.2)[0] for position in range(256)] == whole
    assert audited(8, range(256), 0.2) != whole
    assert audited(7, [], 0.2) == []


def test_a_larger_rate_audits_the_same_tokens_and_more() -> None:
    few, many = (np.array(audited(3, range(1000), rate)) for rate in (0.1, 0.4))
    assert (many | ~few).all()
    assert many.sum() > few.sum() > 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_audited_tokens_is_near_the_rate(rate: float) -> None:
    chosen = [pick for seed in range(20) for pick in audited(seed, range(1000), rate)]
    assert abs(np.mean(chosen) - rate) < 4.0 * math.sqrt(rate * (1.0 - rate) / len(chosen))


def test_rates_of_nothing_and_everything_are_exactly_that() -> None:
    assert not any(audited(1, range(2000), 0.0))
    assert all(audited(1, range(2000), 1.0))
