"""Probability intervals: bounds around the probability, the Interval SoftMax they stand for, and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.intervals import SCORES, interval_measures, log_odds, probability_bounds, score

# log_odds clamps p to 1 - 1e-6, so nothing can be more exact than that.
CLAMP = 1.5e-6


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)


def case(seed: int, vocabulary: int = 50, spread: float = 2.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(4, vocabulary)) * spread
    return log_softmax(logits), generator.exponential(1.0, size=(4, vocabulary)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_enclose_the_probability_and_their_sums_enclose_one(seed: int, spread: float) -> None:
    log_probs, radius = case(seed, spread=spread)
    low, high = probability_bounds(log_probs, radius)
    probs = np.exp(log_probs)
    assert (low >= 0).all()
    assert (high <= 1).all()
    assert (low <= probs + CLAMP).all()
    assert (probs <= high + CLAMP).all()
    assert (low.sum(-1) <= 1 + 1e-4).all()
    assert (high.sum(-1) >= 1 - 1e-4).all()


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_the_interval_softmax_of_credal_deep_ensembles(seed: int) -> None:
    generator = np.random.default_rng(seed)
    centre, radius = generator.normal(size=(4, 30)) * 2, generator.exponential(1.0, size=(4, 30))
    total = np.exp(centre).sum(-1, keepdims=True)
    low, high = probability_bounds(log_softmax(centre), radius.astype(np.float32))
    for bound, signed in ((low, -radius), (high, radius)):
        power = np.exp(centre + signed)
        np.testing.assert_allclose(bound, power / (power + total - np.exp(centre)), rtol=1e-3, atol=1e-6)


def test_small_probabilities_keep_their_relative_precision() -> None:
    """Most tokens of a large vocabulary: their bounds must still be positive and enclose them."""
    probs = np.array([1e-4, 1e-6, 1e-8, 1e-12], np.float32)
    low, high = probability_bounds(np.log(probs), np.float32(0.5))
    assert (low > 0).all()
    assert (low < probs).all()
    assert (probs < high).all()
    # For a tiny p the bounds are p * e^-r and p * e^r.
    np.testing.assert_allclose(high / probs, np.exp(0.5), rtol=1e-3)
    np.testing.assert_allclose(low / probs, np.exp(-0.5), rtol=1e-3)


def test_no_radius_gives_the_probability_itself() -> None:
    log_probs, _ = case(0)
    low, high = probability_bounds(log_probs, np.zeros((4, 1), np.float32))
    np.testing.assert_array_equal(low, high)
    np.testing.assert_allclose(low, np.exp(log_probs), rtol=1e-4, atol=CLAMP)


def test_a_larger_radius_gives_a_wider_interval_around_the_smaller_one() -> None:
    log_probs, radius = case(1)
    inner, outer = probability_bounds(log_probs, radius), probability_bounds(log_probs, radius + 0.3)
    assert (outer[0] < inner[0]).all()
    assert (outer[1] > inner[1]).all()


def test_one_radius_for_a_token_equals_that_radius_for_every_word() -> None:
    log_probs, _ = case(2)
    radius = np.full((4, 1), 0.7, np.float32)
    for one, every in zip(
        probability_bounds(log_probs, radius), probability_bounds(log_probs, np.repeat(radius, 50, -1)), strict=True
    ):
        np.testing.assert_array_equal(one, every)


def test_numpy_and_torch_agree() -> None:
    log_probs, radius = case(3)
    ours = probability_bounds(log_probs, radius)
    theirs = probability_bounds(torch.from_numpy(log_probs), torch.from_numpy(radius))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(other.numpy(), one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_certain_and_excluded_tokens_give_finite_bounds(library: Any) -> None:
    log_probs = np.array([0.0, -np.inf, -1e-9, -80.0], np.float32)
    for bound in probability_bounds(library(log_probs), library(np.full(4, 2.0, np.float32))):
        assert np.isfinite(np.asarray(bound)).all()
        assert float(bound[0]) > 1 - 1e-4
        assert float(bound[1]) == 0.0


def test_log_odds_are_the_logit_of_the_probability() -> None:
    probs = np.array([0.1, 0.5, 0.9], np.float64)
    np.testing.assert_allclose(log_odds(np.log(probs)), np.log(probs / (1 - probs)), rtol=1e-5, atol=1e-6)
    assert log_odds(np.log(probs)).dtype == np.float32


# -- measures and scores --------------------------------------------------------------------------------------------


def test_measures_are_the_sum_and_the_spread_of_the_widths_and_the_entropy() -> None:
    log_probs, radius = case(4)
    low, high = (bound.astype(np.float64) for bound in probability_bounds(log_probs, radius))
    wide = log_probs.astype(np.float64)
    expected = [(high - low).sum(-1), (high - low).std(-1), -(np.exp(wide) * wide).sum(-1)]
    measures = interval_measures(log_probs, radius)
    assert measures.shape == (4, 3)
    np.testing.assert_allclose(measures, np.stack(expected, -1), rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_radius", [True, False])
def test_measures_on_numpy_and_torch_agree(seed: int, one_radius: bool) -> None:
    log_probs, radius = case(seed, vocabulary=400)
    radius = radius[:, :1] if one_radius else radius
    ours = interval_measures(log_probs, radius)
    theirs = interval_measures(torch.from_numpy(log_probs), torch.from_numpy(radius))
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [2, 50, 4096])
@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
def test_a_uniform_row_with_one_radius_has_no_uncertainty_by_definition(vocabulary: int, radius: float) -> None:
    log_probs = np.full((1, vocabulary), -np.log(vocabulary), np.float32)
    measures = interval_measures(log_probs, np.full((1, 1), radius, np.float32))
    assert measures[0, 0] > 0.0
    assert score("interval", measures, vocabulary)[0] < 1e-4 * measures[0, 0]
    np.testing.assert_allclose(measures[0, 2], np.log(vocabulary), rtol=1e-5)


def test_the_sum_of_widths_grows_with_the_radius_and_the_entropy_does_not_see_it() -> None:
    log_probs, radius = case(5)
    measures = np.stack([interval_measures(log_probs, radius * factor) for factor in (0.0, 0.5, 1.0, 2.0, 4.0)])
    np.testing.assert_allclose(measures[0, :, :2], 0.0, atol=1e-6)
    assert (np.diff(measures[..., 0], axis=0) > 0.01).all()
    np.testing.assert_array_equal(measures[0, :, 2], measures[-1, :, 2])


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_excluded_tokens_leave_the_measures_finite(library: Any) -> None:
    log_probs = np.array([[np.log(0.5), np.log(0.5), -np.inf, -np.inf]], np.float32)
    measures = np.asarray(interval_measures(library(log_probs), library(np.ones((1, 4), np.float32))))
    assert np.isfinite(measures).all()
    np.testing.assert_allclose(measures[0, 2], np.log(2.0), rtol=1e-5)


def test_scores_are_named_parts_of_the_measures() -> None:
    measures = np.array([[2.0, 0.25, 1.5], [0.5, 0.125, 3.0]])
    assert score("interval", measures, 16).tolist() == [2.0 * 0.25 * 4.0, 0.5 * 0.125 * 4.0]
    assert score("width", measures, 16).tolist() == [2.0, 0.5]
    assert score("entropy", measures, 16).tolist() == [1.5, 3.0]


@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_interval_score_does_not_shrink_with_the_vocabulary(radius: float, spread: float) -> None:
    """The same ten likely tokens among 500 and among 32,000: the bare U is eight times smaller there."""
    shape = np.random.default_rng(6).normal(size=10) * spread
    scores = []
    for vocabulary in (500, 4000, 32000):
        logits = np.concatenate([shape, np.full(vocabulary - 10, -25.0)])[None]
        measures = interval_measures(log_softmax(logits), np.full((1, 1), radius, np.float32))
        scores.append(float(score("interval", measures, vocabulary)[0]))
    assert max(scores) < 1.05 * min(scores)
    assert 0.01 < scores[0] < 100.0


@pytest.mark.parametrize("name", ["random", "", "Interval", "confidence"])
def test_a_score_that_no_row_tells_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"score: {name!r} cannot be computed .* interval, width, entropy"):
        score(name, np.ones((1, 3)), 4)


def test_every_score_but_the_random_one_is_computed_from_a_row() -> None:
    log_probs, radius = case(7)
    measures = interval_measures(log_probs, radius)
    assert [name for name in SCORES if name != "random"] == ["interval", "width", "entropy"]
    for name in SCORES[:3]:
        assert (score(name, measures, 50) > 0.0).all()
