"""Probability intervals of the Inter-Head: log-odds shifted by the radius (InterFuse, CIAR 2603.25463).

The Interval SoftMax of Credal Deep Ensembles, low = e^(c-r) / (e^(c-r) + S - e^c) and its mirror image, is a shift of
the log-odds: low = sigmoid(logit(p) - r), high = sigmoid(logit(p) + r). So for any r >= 0, elementwise and without
another sum over the vocabulary, 0 < low <= p <= high < 1 and sum(low) <= 1 <= sum(high).

The functions take numpy arrays and torch tensors alike: the device, training and the exported graph share them.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

__all__ = ["SCORES", "interval_measures", "log_odds", "probability_bounds", "score"]

SCORES = ("interval", "width", "entropy", "random")
"""What can decide which tokens are uncertain: U = Omega * Sigma, Omega alone, and two to compare them with."""

_LARGEST = 1.0 - 1e-6


def log_odds(log_probs: Any) -> Any:
    """logit(p) of log-probabilities (..., V), in float32; p is clamped to 1 - 1e-6."""
    xp = array_api_compat.array_namespace(log_probs)
    wide = xp.astype(log_probs, xp.float32)
    return wide - xp.log1p(-xp.clip(xp.exp(wide), max=_LARGEST))


def probability_bounds(log_probs: Any, radius: Any) -> tuple[Any, Any]:
    """Lower and upper probabilities (..., V).

    Args:
        log_probs: log-probabilities (..., V).
        radius: half-width of the logit interval, (..., V) or (..., 1), at least 0.
    """
    xp = array_api_compat.array_namespace(log_probs)
    odds = log_odds(log_probs)
    return _sigmoid(xp, odds - radius), _sigmoid(xp, odds + radius)


def interval_measures(log_probs: Any, radius: Any) -> Any:
    """What the scores are made of: (..., 3) with Omega, Sigma and the entropy in nats.

    Omega is the sum over the vocabulary of the widths of the intervals, Sigma their population standard deviation
    (CIAR 2603.25463; methods.md 5.1).

    Args:
        log_probs: log-probabilities (..., V).
        radius: (..., V) or (..., 1).
    """
    xp = array_api_compat.array_namespace(log_probs)
    low, high = probability_bounds(log_probs, radius)
    width = high - low
    mean = xp.mean(width, axis=-1, keepdims=True)
    # The square root has no slope at 0, which training would need.
    spread = xp.sqrt(xp.clip(xp.mean((width - mean) ** 2, axis=-1), min=1e-24))
    wide = xp.astype(log_probs, xp.float32)
    entropy = -xp.sum(xp.exp(wide) * xp.clip(wide, min=-100.0), axis=-1)
    return xp.stack([xp.sum(width, axis=-1), spread, entropy], axis=-1)


def score(name: str, measures: Any, vocabulary: int) -> Any:
    """The uncertainty (...) that `interval_measures` (..., 3) tell; the larger, the less sure.

    `interval` is U * sqrt(V): Sigma alone shrinks with the vocabulary, this is of the order of one. A uniform row has
    U = 0, by the published definition. `random` is not a measure: the caller draws it.

    Raises:
        ValueError: no such score.
    """
    if name == "interval":
        return measures[..., 0] * measures[..., 1] * vocabulary**0.5
    if name == "width":
        return measures[..., 0]
    if name == "entropy":
        return measures[..., 2]
    raise ValueError(f"score: {name!r} cannot be computed from a row; there are {', '.join(SCORES[:3])}")


def _sigmoid(xp: Any, x: Any) -> Any:
    # From the small side: 1 + tanh would lose all digits of a small probability.
    power = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1.0 / (1.0 + power), power / (1.0 + power))
