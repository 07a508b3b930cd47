"""The one warp both sides use: guidance -> temperature -> top-k -> top-p -> softmax.

Every speculative quantity (ratio, residual, total variation, entropy) is computed on warped distributions: to warp one
side only, or to leave the residual unwarped, changes the output law without any visible failure. The code is written
against the array API, so the same lines serve numpy on the device and torch on the cloud.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat

from shared.errors import SettingsError

__all__ = ["SamplingSettings", "guide", "probabilities", "warp"]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; above 0.
        top_k: keep the k most probable tokens (ties with the k-th are kept); 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
        guidance: classifier-free guidance scale; 1 is unguided.

    Raises:
        SettingsError: a value is out of its range; the message names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.01 <= self.temperature <= 100.0):
            raise SettingsError(f"temperature: a number from 0.01 to 100 is needed, not {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise SettingsError(f"top_k: a whole number of at least 0 is needed (0 keeps all), not {self.top_k}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise SettingsError(f"top_p: a number above 0 and up to 1 is needed, not {self.top_p}")
        if not (math.isfinite(self.guidance) and 1.0 <= self.guidance <= 100.0):
            raise SettingsError(f"guidance: a number from 1 (unguided) to 100 is needed, not {self.guidance}")

    def unguided(self) -> SamplingSettings:
        """The same settings for a drafter whose rows already imitate the guided target."""
        return replace(self, guidance=1.0)


def guide(cond_logits: Any, uncond_logits: Any, guidance: float) -> Any:
    """Classifier-free guidance: uncond + guidance * (cond - uncond). Shapes (..., V)."""
    return uncond_logits + guidance * (cond_logits - uncond_logits)


def warp(logits: Any, settings: SamplingSettings) -> Any:
    """Log-probabilities of the warped distribution; excluded tokens are -inf.

    Args:
        logits: float array (..., V), guidance already applied (see `guide`).
        settings: temperature, top_k and top_p; guidance is not read.

    Returns:
        float32 array (..., V) whose exponentials sum to 1.
    """
    xp = array_api_compat.array_namespace(logits)
    scaled = xp.astype(logits, xp.float32)
    if settings.temperature != 1.0:
        scaled = scaled / settings.temperature
    if settings.top_k and settings.top_k < scaled.shape[-1]:
        scaled = _keep_top_k(xp, scaled, settings.top_k)
    if settings.top_p < 1.0:
        scaled = _keep_top_p(xp, scaled, settings.top_p)
    return _log_softmax(xp, scaled)


def probabilities(log_probs: Any) -> Any:
    """Exponentials of `warp`'s result."""
    return array_api_compat.array_namespace(log_probs).exp(log_probs)


def _log_softmax(xp: Any, logits: Any) -> Any:
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def _keep_top_k(xp: Any, logits: Any, k: int) -> Any:
    smallest_kept = xp.sort(logits, axis=-1)[..., -k][..., None]
    return _masked(xp, logits, logits < smallest_kept)


def _keep_top_p(xp: Any, logits: Any, top_p: float) -> Any:
    ascending = xp.sort(logits, axis=-1)
    # float64: a float32 running sum over 16,384 entries is off by more than a token's own mass.
    mass = xp.exp(xp.astype(_log_softmax(xp, ascending), xp.float64))
    below = xp.cumulative_sum(mass, axis=-1) if hasattr(xp, "cumulative_sum") else xp.cumsum(mass, axis=-1)
    # A token goes when the mass up to and including it, from the small end, stays within 1 - top_p.
    dropped = xp.sum(xp.astype(below <= 1.0 - top_p, xp.int64), axis=-1, keepdims=True)
    dropped = xp.clip(dropped, max=logits.shape[-1] - 1)
    smallest_kept = xp.take_along_axis(ascending, dropped, axis=-1)
    return _masked(xp, logits, logits < smallest_kept)


def _masked(xp: Any, logits: Any, excluded: Any) -> Any:
    return xp.where(excluded, xp.full_like(logits, -xp.inf), logits)
