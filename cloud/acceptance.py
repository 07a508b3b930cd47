"""Acceptance rules: which drafted tokens stand, and what replaces the first that does not.

Draft rows are the distributions the tokens were drawn from, target rows the target's, both warped. Rules of one token
share `AcceptanceRule`; `judge_chain` walks a draft with any of them, `judge_block` judges it as a whole. Both return a
`Judgement`. Gumbel coupling needs no draft rows: `judge_coupled`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "AcceptanceRule",
    "Judgement",
    "Lossless",
    "block_acceptance",
    "coupled_sample",
    "inverse_sample",
    "inverse_samples",
    "judge_block",
    "judge_chain",
    "judge_coupled",
    "residual",
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a draft.

    Args:
        accepted: number of drafted tokens that stand, from the first on.
        token: the token behind them: a correction when accepted < drafted, else a bonus, or None without one.
        relaxed: places of accepted tokens that the lossless rule would have rejected.
        tv_cost: total variation to the target that relaxing may have cost the judged tokens, summed; None when unknown.
    """

    accepted: int
    token: int | None
    relaxed: tuple[int, ...] = ()
    tv_cost: float | None = 0.0


class AcceptanceRule(Protocol):
    """A rule of one token. Shapes: probabilities (..., V), tokens (...)."""

    def __call__(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        """Probability (...) that the drafted token is accepted."""
        ...

    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        """Distribution (..., V) of the replacement of a rejected token."""
        ...


class Lossless:
    """Modified rejection sampling: accept with min(1, target/draft), else draw from norm((target - draft)+).

    The output is a sample of the target (Leviathan et al., 2211.17192; methods.md 1.1).
    """

    def __call__(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        drawn = tokens.unsqueeze(-1)
        draft = draft_probs.gather(-1, drawn).squeeze(-1)
        target = target_probs.gather(-1, drawn).squeeze(-1)
        # A token that both rows exclude (the device's kernels round unlike the shadow drafter's) is not accepted.
        return torch.where(target >= draft, (target > 0.0).to(target.dtype), target / draft)

    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return residual(draft_probs, target_probs)


def residual(draft_probs: Tensor, target_probs: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """norm((weight * target - draft)+), shape (..., V).

    Where nothing is left (identical distributions) the target itself is returned: the case has probability zero, but
    rounding reaches it, and 0/0 would be NaN.
    """
    left = (weight * target_probs - draft_probs).clamp_min(0.0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0.0, left / mass.clamp_min(torch.finfo(left.dtype).tiny), target_probs)


def inverse_sample(probs: Tensor, uniform: float) -> int:
    """Token at quantile `uniform` of probs (V,), computed in float64."""
    cumulative = probs.double().cumsum(-1)
    # side="right" never returns a token of probability zero, even for a uniform that falls on a step.
    token = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    return min(token, int(probs.nonzero()[-1]))


def inverse_samples(probs: Tensor, uniforms: Sequence[float]) -> list[int]:
    """`inverse_sample` of each row of probs (n, V)."""
    cumulative = probs.double().cumsum(-1)
    levels = cumulative[:, -1] * torch.tensor(uniforms, dtype=torch.float64, device=probs.device)
    tokens = torch.searchsorted(cumulative, levels.unsqueeze(-1), right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs > 0.0).flip(-1).long().argmax(-1)
    result: list[int] = torch.minimum(tokens, last).tolist()
    return result


def coupled_sample(log_probs: Tensor, gumbel: Tensor) -> Tensor:
    """Gumbel-max samples argmax(log probs + gumbel): shapes (..., V) -> (...)."""
    return (log_probs + gumbel).argmax(-1)


def judge_coupled(target_log_probs: Tensor, gumbel: Tensor, tokens: Sequence[int], bonus: bool) -> Judgement:
    """Gumbel coupling: the cloud draws with the noise the device drafted with; equal tokens stand.

    The output is the cloud's own sample whatever the draft was, so it equals `ar` of the same seed
    (methods.md 1.1; Daliri et al. 2408.07978).

    Args:
        target_log_probs, gumbel: rows (n + 1, V) of the drafted positions and the one behind; (n, V) without bonus.
        tokens: the n drafted ids.
        bonus: whether a fully accepted draft gets the token behind it.
    """
    own = coupled_sample(target_log_probs, gumbel).tolist()
    accepted = next((i for i, token in enumerate(tokens) if token != own[i]), len(tokens))
    if accepted == len(tokens) and not bonus:
        return Judgement(accepted, None)
    return Judgement(accepted, own[accepted])


def judge_chain(
    rule: AcceptanceRule,
    draft_probs: Tensor,
    target_probs: Tensor,
    tokens: Sequence[int],
    accept: Sequence[float],
    resample: Sequence[float],
    bonus: bool,
) -> Judgement:
    """Judges token by token and stops at the first rejection.

    Args:
        draft_probs: (n, V).
        target_probs: (n + 1, V), or (n, V) without bonus.
        tokens: the n drafted ids.
        accept, resample: uniforms for each row of target_probs; fresh at every attempt.
        bonus: whether a fully accepted draft gets the token behind it, drawn from the last target row.
    """
    count = len(tokens)
    if count:
        drawn = torch.tensor(tokens, device=target_probs.device)
        chances = rule(draft_probs, target_probs[:count], drawn).tolist()
        for i, chance in enumerate(chances):
            if accept[i] >= chance:
                replacement = rule.resample(draft_probs[i], target_probs[i], drawn[i])
                return Judgement(i, inverse_sample(replacement, resample[i]))
    return Judgement(count, inverse_sample(target_probs[count], resample[count]) if bonus else None)


def block_acceptance(draft_probs: Tensor, target_probs: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Weights a_0..a_n and thresholds h_1..h_n of block verification (Sun et al., 2403.10444; methods.md 1.4).

    Args:
        draft_probs, target_probs: (n, V) rows of the drafted positions.
        tokens: the n drafted ids.

    Returns:
        a (n + 1,) and h (n,), float64.
    """
    count = len(tokens)
    draft, target = draft_probs.double(), target_probs[:count].double()
    index = torch.arange(count, device=draft.device), torch.tensor(tokens, device=draft.device)
    log_ratio = torch.where(target[index] > 0.0, target[index].log() - draft[index].log(), -torch.inf)
    weights = [0.0]
    for step in log_ratio.tolist():
        # What was excluded once stays so: -inf + inf would be NaN, and min() would take 0 for it.
        weights.append(-math.inf if weights[-1] == -math.inf else min(0.0, weights[-1] + step))
    a = torch.tensor(weights, dtype=torch.float64, device=draft.device).exp()
    left = (a[1:count].unsqueeze(-1) * target[1:] - draft[1:]).clamp_min(0.0).sum(-1)
    denominator = left + 1.0 - a[1:count]
    inner = torch.where(denominator > 0.0, left / denominator.clamp_min(1e-300), 1.0)
    return a, torch.cat([inner, a[count:]])


def judge_block(
    draft_probs: Tensor,
    target_probs: Tensor,
    tokens: Sequence[int],
    accept: Sequence[float],
    resample: Sequence[float],
    bonus: bool,
) -> Judgement:
    """Block verification: keeps the longest prefix whose test succeeds (the last success, not up to the first failure).

    Arguments as for `judge_chain`.
    """
    count = len(tokens)
    a, thresholds = block_acceptance(draft_probs, target_probs, tokens) if count else (torch.ones(1), torch.empty(0))
    passed = [i + 1 for i, threshold in enumerate(thresholds.tolist()) if accept[i] < threshold]
    accepted = passed[-1] if passed else 0
    if accepted == count:
        return Judgement(count, inverse_sample(target_probs[count], resample[count]) if bonus else None)
    left = residual(draft_probs[accepted].double(), target_probs[accepted].double(), a[accepted])
    return Judgement(accepted, inverse_sample(left, resample[accepted]))
