"""Probability intervals: bounds around the probability, sums around one, and the Interval SoftMax they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.intervals import log_odds, probability_bounds

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
