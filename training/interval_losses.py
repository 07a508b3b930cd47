"""Losses of the Inter-Head: containment, the published CIAR loss, and distributionally robust weights of rows.

Published (CIAR 2603.25463; methods.md 5.1): anchors and an alignment on the middle, an anchor on each end, and a robust
cross-entropy on the lower end. Its terms can only shrink the radius. Calibrated (methods.md 5.4): the radius learns
from containment alone, and robustness is a weight of rows. Both are one formula with other coefficients:

    mean_n W_n [ anchor(middle) + align + containment * pinball ] + bounds * ( anchor(high) + anchor(low) + robust )

with W = (1 - mix) + mix * w, w the robust weights of the rows' cross-entropy on the lower end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.intervals import interval_measures, log_odds, score
from training.checks import not_negative

__all__ = [
    "IntervalLossSettings",
    "containment_loss",
    "containment_rows",
    "distance_rows",
    "interval_loss",
    "ranking_loss",
    "robust_weights",
]

DROS = ("kl", "cvar", "none")
_PRESETS = {  # containment, bounds, mix, ranking
    "paper": (0.0, 1.0, 0.0, 0.0),
    "calibrated": (1.0, 0.0, 0.5, 1.0),
}


@dataclass(frozen=True, slots=True)
class IntervalLossSettings:
    """Coefficients of the loss. Raises ValueError naming the field that cannot be.

    Args:
        loss: `calibrated`, or `paper` as published; decides what is None of `containment`, `bounds`, `mix` and
            `ranking`.
        dro: weights of rows: `kl` (exponential), `cvar` (the worst share alone) or `none`.
        strength: a of w ~ exp(a * cross-entropy), for `kl`; 0 weighs all rows alike.
        cap: largest weight of a row, for `kl`, where the mean weight is 1.
        worst: share of the rows that `cvar` looks at.
        anchor_distance, anchor_entropy: coefficients of L1 distance and cross-entropy in an anchor.
        align: coefficient of KL(target || middle).
        containment: coefficient of the pinball loss of the ends.
        bounds: coefficient of the anchors and the robust loss on the ends.
        mix: how much of the robust weights the middle's terms take, 0..1.
        ranking: coefficient of the listwise loss of the score.
        lowest, highest: quantiles of the target's log-odds that the ends learn.
    """

    loss: str = "calibrated"
    dro: str = "kl"
    strength: float = 0.1
    cap: float = 20.0
    worst: float = 0.5
    anchor_distance: float = 1.0
    anchor_entropy: float = 1.0
    align: float = 1.0
    containment: float | None = None
    bounds: float | None = None
    mix: float | None = None
    ranking: float | None = None
    lowest: float = 0.05
    highest: float = 0.95

    def __post_init__(self) -> None:
        for name, choices in (("loss", tuple(_PRESETS)), ("dro", DROS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        not_negative(self, "strength", "anchor_distance", "anchor_entropy", "align")
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name, value in zip(("containment", "bounds", "mix", "ranking"), self.coefficients, strict=True):
            if not value >= 0.0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if not self.coefficients[2] <= 1.0:
            raise ValueError(f"mix must lie in [0, 1], got {self.mix}")
        if not self.cap >= 1.0:
            raise ValueError(f"cap must be at least 1, the mean weight, got {self.cap}")
        if not 0.0 < self.worst <= 1.0:
            raise ValueError(f"worst must lie in (0, 1], got {self.worst}")
        if not 0.0 < self.lowest < 0.5 < self.highest < 1.0:
            raise ValueError(f"0 < lowest < 0.5 < highest < 1 is needed, got {self.lowest} and {self.highest}")

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Containment, bounds, mix and ranking: as set, else those of `loss`."""
        chosen = (self.containment, self.bounds, self.mix, self.ranking)
        containment, bounds, mix, ranking = (
            preset if own is None else own for own, preset in zip(chosen, _PRESETS[self.loss], strict=True)
        )
        return containment, bounds, mix, ranking


def containment_rows(centre: Tensor, radius: Tensor, target: Tensor, lowest: float, highest: float) -> Tensor:
    """Pinball loss that makes [centre - radius, centre + radius] hold the target's log-odds; gradient to radius only.

    Args:
        centre: draft log-probabilities (..., V).
        radius: (..., V) or (..., 1).
        target: target log-probabilities (..., V).
        lowest, highest: quantiles of the two ends.

    Returns:
        mass-weighted loss of each row (...).
    """
    draft, truth = centre.detach(), target.detach()
    weight = 0.5 * (draft.exp() + truth.exp())
    error = log_odds(truth) - log_odds(draft)
    below, above = error + radius, error - radius
    pinball = torch.maximum(lowest * below, (lowest - 1.0) * below)
    pinball = pinball + torch.maximum(highest * above, (highest - 1.0) * above)
    return (weight * pinball).sum(-1)


def containment_loss(centre: Tensor, radius: Tensor, target: Tensor, lowest: float, highest: float) -> Tensor:
    """Mean over rows of `containment_rows`, a scalar."""
    return containment_rows(centre, radius, target, lowest, highest).mean()


def distance_rows(centre: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """TV of each row (...) between draft and target at a temperature: how often exact sampling rejects a draft.

    Args:
        centre, target: log-probabilities (..., V) at temperature 1.
    """
    draft, truth = ((rows / temperature).softmax(-1) for rows in (centre, target))
    return 0.5 * (truth - draft).abs().sum(-1)


def ranking_loss(centre: Tensor, radius: Tensor, distance: Tensor, temperature: float = 1.0) -> Tensor:
    """Makes the score U of rows proportional to their distance to the target, a scalar; gradient to radius only.

    The cross-entropy from the share that each row has of all rows' distance to the share it has of their U, less its
    minimum. The scale of U has no part in it, and at the minimum U ranks the rows as the distance expected of them.

    Args:
        centre: draft log-probabilities (..., V) at temperature 1.
        radius: (..., V) or (..., 1).
        distance: (...), at the temperature that tokens are drawn at.
        temperature: that temperature; U is of the rows at it, too.
    """
    measures = interval_measures((centre.detach() / temperature).log_softmax(-1), radius)
    uncertainty = score("interval", measures, centre.shape[-1]).flatten().clamp(min=1e-6).log()
    shares = distance.detach().flatten().clamp(min=1e-6)
    shares = shares / shares.sum()
    return (shares * (shares.log() - uncertainty.log_softmax(0))).sum()


def robust_weights(losses: Tensor, settings: IntervalLossSettings) -> Tensor:
    """Weights of rows, of mean 1 and without gradient, that make the mean of weight * loss the robust loss.

    `kl`: the maximum of mean(w * loss) - KL(w) / a has w ~ exp(a * loss) (methods.md 5.5); the cap is part of that
    problem, so what it cuts off goes to the other rows in the same proportions. `cvar`: the mean of the worst share.

    Args:
        losses: (n,).
    """
    values = losses.detach()
    if settings.dro == "cvar":
        count = max(1, int(settings.worst * len(values)))
        weights = torch.zeros_like(values)
        weights[values.topk(count).indices] = len(values) / count
        return weights
    if settings.dro == "none" or settings.strength == 0.0:
        return torch.ones_like(values)
    return _capped_weights(settings.strength * values.double(), settings.cap).to(values.dtype)


def _capped_weights(exponents: Tensor, cap: float) -> Tensor:
    """min(cap, c * exp(exponents)) with the c that makes the mean 1."""
    exponents, count = exponents - exponents.max(), len(exponents)
    falling = exponents.sort(descending=True).values
    # With the k largest at the cap, the rest shares count - k * cap. The last k fits always, but for rounding.
    capped = torch.arange(math.ceil(count / cap), device=exponents.device, dtype=exponents.dtype)
    rest = falling.flip(0).logcumsumexp(0).flip(0)[: len(capped)]
    scale = torch.log(count - capped * cap) - rest
    fits = scale + falling[: len(capped)] <= math.log(cap)
    fits[-1] = True
    first = int(fits.nonzero()[0])
    return (exponents + scale[first]).exp().clamp(max=cap)


def interval_loss(
    centre: Tensor, radius: Tensor, target: Tensor, settings: IntervalLossSettings, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch of rows, a scalar, with figures for the log.

    Args:
        centre: draft log-probabilities (..., V).
        radius: (..., V) or (..., 1).
        target: target log-probabilities (..., V), without gradient.
        temperature: at which tokens will be drawn; what the score is ranked by.
    """
    centre, target = centre.flatten(0, -2), target.flatten(0, -2)
    radius, odds, mass = radius.flatten(0, -2), log_odds(centre), target.exp()
    containment, bounds, mix, ranking = settings.coefficients
    low = functional.logsigmoid(odds - radius)
    low_entropy = -(mass * low).sum(-1)
    weights = robust_weights(low_entropy, settings)

    divergence = (mass * (target - centre)).sum(-1)
    contained = containment_rows(centre, radius, target, settings.lowest, settings.highest)
    middle = _anchor(centre, mass, settings) + settings.align * divergence + containment * contained
    loss = ((1.0 - mix + mix * weights) * middle).mean()
    if bounds:
        high = functional.logsigmoid(odds + radius)
        ends = _anchor(high, mass, settings) + _anchor(low, mass, settings) + weights * low_entropy
        loss = loss + bounds * ends.mean()
    distance = distance_rows(centre.detach(), target, temperature)
    listwise = ranking_loss(centre, radius, distance, temperature)
    if ranking:
        loss = loss + ranking * listwise
    with torch.no_grad():
        figures = {
            "kl": divergence.mean(),
            "pinball": contained.mean(),
            "tv": distance.mean(),
            "ranking": listwise.detach(),
            "robust": (weights * low_entropy).mean(),
            "radius": radius.mean(),
        }
    return loss, figures


def _anchor(log_probs: Tensor, mass: Tensor, settings: IntervalLossSettings) -> Tensor:
    """L1 distance and cross-entropy to the target, of each row."""
    distance = (log_probs.exp() - mass).abs().sum(-1)
    return settings.anchor_distance * distance - settings.anchor_entropy * (mass * log_probs).sum(-1)
