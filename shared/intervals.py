"""Probability intervals of the Inter-Head: log-odds shifted by the radius (InterFuse, CIAR 2603.25463).

The Interval SoftMax of Credal Deep Ensembles, low = e^(c-r) / (e^(c-r) + S - e^c) and its mirror image, is a shift of
the log-odds: low = sigmoid(logit(p) - r), high = sigmoid(logit(p) + r). So for any r >= 0, elementwise and without
another sum over the vocabulary, 0 < low <= p <= high < 1 and sum(low) <= 1 <= sum(high).
"""

from __future__ import annotations

from typing import Any

import array_api_compat

__all__ = ["log_odds", "probability_bounds"]

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


def _sigmoid(xp: Any, x: Any) -> Any:
    # From the small side: 1 + tanh would lose all digits of a small probability.
    power = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1.0 / (1.0 + power), power / (1.0 + power))
