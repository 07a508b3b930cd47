"""Relaxed acceptance rules: drafted tokens stand more often than the target's law allows, each rule for its own reason.

All share `AcceptanceRule`. For any acceptance b with min(1, target/draft) <= b <= 1 the replacement that keeps the
output nearest to the target is still norm((target - draft)+), and P(reject) + TV(output, target) = TV(draft, target)
(CSD, Thm 3.1 and 3.2; methods.md 1.2): `tv_cost` uses the identity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cloud.acceptance import AcceptanceRule, Lossless, residual

__all__ = [
    "Addition",
    "Amplify",
    "Cool",
    "Csd",
    "ElementwiseRule",
    "Gsd",
    "Lantern",
    "entropy",
    "make_rule",
    "total_variation",
    "tv_cost",
]

_LOSSLESS = Lossless()


def total_variation(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Half the L1 distance of rows (..., V): (...)."""
    return 0.5 * (draft_probs - target_probs).abs().sum(-1)


def entropy(probs: Tensor) -> Tensor:
    """Entropy in nats of rows (..., V): (...)."""
    return torch.special.entr(probs).sum(-1)


class ElementwiseRule(ABC):
    """A rule that knows the acceptance of every token of a row at once, never below the lossless one.

    Replacements are drawn from norm((target - draft)+), which is the best choice for all of these.
    """

    @abstractmethod
    def chances(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        """Probability (..., V) that each token is accepted, given rows (..., V)."""

    def accepted(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        """Mass (..., V) of each token that is drafted and accepted: chances * draft."""
        return self.chances(draft_probs, target_probs) * draft_probs

    def __call__(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return self.chances(draft_probs, target_probs).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return residual(draft_probs, target_probs)


def tv_cost(rule: AcceptanceRule, draft_probs: Tensor, target_probs: Tensor) -> Tensor | None:
    """Total variation (...) of a rule's output to the target, for rows (..., V): TV(draft, target) - P(reject).

    None for rules the identity does not hold for, since their acceptance may lie below the lossless one.
    """
    if isinstance(rule, Lossless):
        return torch.zeros(draft_probs.shape[:-1], device=draft_probs.device)
    if not isinstance(rule, ElementwiseRule):
        return None
    accepted = rule.accepted(draft_probs, target_probs)
    # The same difference, since TV = 1 - sum of minima and P(reject) = 1 - sum of what is accepted.
    return (accepted - torch.minimum(draft_probs, target_probs)).sum(-1).clamp_min(0.0)


@dataclass(frozen=True, slots=True)
class Addition(ElementwiseRule):
    """min(1, target/draft + epsilon) (Yin et al.; methods.md 1.2)."""

    epsilon: float

    def chances(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        return (_ratio(target_probs, draft_probs) + self.epsilon).clamp_max(1.0)


@dataclass(frozen=True, slots=True)
class Amplify(ElementwiseRule):
    """min(1, factor * target/draft)."""

    factor: float

    def chances(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        return _ratio(self.factor * target_probs, draft_probs)


@dataclass(frozen=True, slots=True)
class Cool(ElementwiseRule):
    """min(1, w_i * target/draft) with w_i = max(1, delta * e^(-nu i)): the first tokens are relaxed most (COOL-SD).

    Rows are those of a draft in order: i is the index along their second last axis.
    """

    delta: float
    nu: float

    def chances(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        places = torch.arange(draft_probs.shape[-2] if draft_probs.dim() > 1 else 1, device=draft_probs.device)
        weights = (self.delta * torch.exp(-self.nu * places)).clamp_min(1.0)
        return _ratio((weights.unsqueeze(-1) if draft_probs.dim() > 1 else weights) * target_probs, draft_probs)


@dataclass(frozen=True, slots=True)
class Csd(ElementwiseRule):
    """min(1, target/draft + scale * H(target)) where TV(draft, target) < delta, else lossless (CSD, Alg. 1).

    High entropy is redundancy: where many tokens do, it matters little which stands. A fresh uniform draft is far from
    the target, so the gate is closed for it.

    Args:
        scale: lambda of the paper.
        delta: of the gate; a cap on the total variation of a token.
        normalised: entropy as a share of ln V instead of nats.
    """

    scale: float
    delta: float
    normalised: bool = False

    def chances(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        return (_ratio(target_probs, draft_probs) + self._bonus(draft_probs, target_probs)).clamp_max(1.0)

    def accepted(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        # The same mass without a division: this is computed for every settled token, and must not be felt.
        return torch.minimum(draft_probs, target_probs + self._bonus(draft_probs, target_probs) * draft_probs)

    def _bonus(self, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        unit = math.log(target_probs.shape[-1]) if self.normalised else 1.0
        gate = total_variation(draft_probs, target_probs) < self.delta
        return torch.where(gate, self.scale / unit * entropy(target_probs), 0.0).unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class Gsd:
    """min(1, target(C)/draft(C)) with C the tokens of like rank and probability that look alike (GSD; methods.md 7.2).

    Args:
        group: tokens considered, half on either side in the target's ranking.
        similar: (V, V) booleans: whose codes look alike.
        spread: largest difference of target probability to the drafted token's.
    """

    group: int
    similar: Tensor
    spread: float = 0.15

    def __call__(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        drawn = tokens.unsqueeze(-1)
        rank = target_probs.argsort(-1).argsort(-1)
        near = (rank - rank.gather(-1, drawn)).abs() <= self.group // 2
        near &= (target_probs - target_probs.gather(-1, drawn)).abs() < self.spread
        near &= self.similar[tokens]
        near = near.scatter(-1, drawn, True)
        return _ratio((target_probs * near).sum(-1), (draft_probs * near).sum(-1))

    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return residual(draft_probs, target_probs)


@dataclass(frozen=True, slots=True)
class Lantern:
    """min(1, (target(x) + target of its nearest codes, up to mass delta) / draft(x)) (LANTERN; methods.md 7.6).

    Args:
        neighbours: (V, k) the nearest codes of each token, nearest first, itself excluded.
        delta: mass that may be moved onto the drafted token, a cap on the total variation.
    """

    neighbours: Tensor
    delta: float

    def __call__(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        drawn = tokens.unsqueeze(-1)
        pooled = (target_probs.gather(-1, self.neighbours[tokens]) * self._within(target_probs, tokens)).sum(-1)
        target = target_probs.gather(-1, drawn).squeeze(-1) + pooled
        return _ratio(target, draft_probs.gather(-1, drawn).squeeze(-1))

    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        """norm((target - draft without the neighbours)+), as published."""
        within = self._within(target_probs, tokens)
        kept = torch.ones_like(draft_probs).scatter(-1, self.neighbours[tokens], (~within).to(draft_probs.dtype))
        return residual(draft_probs * kept, target_probs)

    def _within(self, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return target_probs.gather(-1, self.neighbours[tokens]).cumsum(-1) <= self.delta


def _ratio(target: Tensor, draft: Tensor) -> Tensor:
    """min(1, target/draft), 0 where the target has nothing."""
    return torch.where(target >= draft, (target > 0.0).to(target.dtype), target / draft)


def make_rule(name: str, options: Mapping[str, float], codes: Callable[[], Tensor]) -> AcceptanceRule:
    """The rule of a name.

    Args:
        name: of `shared.methods.RULES`.
        options: value of every option of the rule.
        codes: gives the codebook (V, width), for rules that know which tokens look alike.
    """
    if name in ("mrs", "exact"):
        return _LOSSLESS
    if name == "csd":
        return Csd(options["lambda"], options["delta"], bool(options["normalised"]))
    if name == "addition":
        return Addition(options["epsilon"])
    if name == "amplify":
        return Amplify(options["factor"])
    if name == "cool":
        return Cool(options["delta"], options["nu"])
    if name == "gsd":
        return Gsd(int(options["group"]), _similar(codes(), options["similarity"]), options["spread"])
    if name == "lantern":
        return Lantern(_nearest(codes(), int(options["neighbours"])), options["delta"])
    raise ValueError(f"rule {name} is not one of single tokens")


def _similar(codes: Tensor, least: float) -> Tensor:
    unit = torch.nn.functional.normalize(codes.float(), dim=-1)
    return unit @ unit.T > least


def _nearest(codes: Tensor, count: int) -> Tensor:
    distances = torch.cdist(codes.float(), codes.float())
    distances.fill_diagonal_(torch.inf)
    return distances.argsort(-1)[:, : min(count, len(codes) - 1)]
