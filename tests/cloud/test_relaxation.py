"""Relaxed rules: each is what its page says, and the identity that prices relaxation holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cloud.acceptance import AcceptanceRule, Lossless, residual
from cloud.relaxation import (
    Addition,
    Amplify,
    Cool,
    Csd,
    ElementwiseRule,
    Gsd,
    Lantern,
    entropy,
    make_rule,
    total_variation,
    tv_cost,
)
from shared.errors import SettingsError
from shared.methods import RULES

ELEMENTWISE: dict[str, ElementwiseRule] = {
    "addition": Addition(0.2),
    "amplify": Amplify(1.7),
    "cool": Cool(3.0, 0.7),
    "csd": Csd(0.5, 0.6),
    "csd normalised": Csd(0.8, 0.9, normalised=True),
}


def rows(seed: int, count: int = 6, vocabulary: int = 9, nearness: float = 0.0) -> tuple[Tensor, Tensor]:
    """Draft and target rows (count, V), the nearer the alike."""
    generator = np.random.default_rng(seed)
    draft, other = (torch.from_numpy(generator.dirichlet(np.full(vocabulary, 0.7), count)) for _ in range(2))
    return draft, nearness * draft + (1.0 - nearness) * other


def law(rule: AcceptanceRule, draft: Tensor, target: Tensor) -> Tensor:
    """What a rule generates from one row of each, by enumeration over the drafted token."""
    result = torch.zeros_like(target)
    for token in range(len(draft)):
        drawn = torch.tensor([token])
        chance = rule(draft.unsqueeze(0), target.unsqueeze(0), drawn)[0]
        result[token] += draft[token] * chance
        result += draft[token] * (1.0 - chance) * rule.resample(draft, target, drawn[0])
    return result


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("nearness", [0.0, 0.5, 0.9])
def test_rejection_and_distance_to_the_target_add_up_to_the_drafts_distance(name: str, nearness: float) -> None:
    draft, target = rows(1, nearness=nearness)
    rule = ELEMENTWISE[name]
    cost = tv_cost(rule, draft, target)
    assert cost is not None
    assert (cost >= 0).all()
    for place in range(len(draft)):
        one = slice(place, place + 1)
        if name == "cool" and place:
            continue  # its weight depends on the place, and a row alone stands in front
        generated = law(rule, draft[place], target[place])
        assert float(generated.sum()) == pytest.approx(1.0)
        own = tv_cost(rule, draft[one], target[one])
        assert own is not None
        assert float(total_variation(generated, target[place])) == pytest.approx(float(own[0]), abs=1e-9)
        rejected = float(((1.0 - rule.chances(draft[one], target[one])) * draft[one]).sum())
        assert rejected + float(own[0]) == pytest.approx(float(total_variation(draft[place], target[place])), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_residual_does_not_change_under_any_acceptance_above_the_lossless_one(seed: int) -> None:
    draft, target = rows(seed)
    for rule in ELEMENTWISE.values():
        relaxed = (target - rule.chances(draft, target) * draft).clamp_min(0.0)
        torch.testing.assert_close(relaxed, (target - draft).clamp_min(0.0))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_relaxed_acceptance_lies_between_the_lossless_one_and_one(name: str) -> None:
    draft, target = rows(2)
    chances = ELEMENTWISE[name].chances(draft, target)
    lossless = torch.minimum(torch.ones(()), target / draft)
    assert (chances >= lossless - 1e-12).all()
    assert (chances <= 1.0).all()
    assert (chances > lossless + 1e-6).any()


def test_csd_is_the_lossless_rule_where_the_gate_is_closed_or_the_entropy_weighs_nothing() -> None:
    draft, target = rows(3, nearness=0.3)
    tokens = torch.arange(len(draft))
    expected = Lossless()(draft, target, tokens)
    assert torch.equal(Csd(0.0, 0.9)(draft, target, tokens), expected)
    assert torch.equal(Csd(0.5, 0.0)(draft, target, tokens), expected)


def test_csd_gate_is_strict() -> None:
    draft, target = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    at = float(total_variation(draft, target))
    token = torch.tensor([0])
    assert float(Csd(10.0, at)(draft, target, token)) == 0.5
    assert float(Csd(10.0, at + 1e-6)(draft, target, token)) == 1.0


@pytest.mark.parametrize("vocabulary", [64, 1024])
def test_fresh_uniform_draft_never_passes_the_gate_of_a_peaked_row(vocabulary: int) -> None:
    target = torch.softmax(torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0)) * 4, -1)
    uniform = torch.full_like(target, 1.0 / vocabulary)
    tokens = torch.zeros(8, dtype=torch.long)
    assert torch.equal(Csd(0.5, 0.65)(uniform, target, tokens), Lossless()(uniform, target, tokens))


def test_every_draft_is_accepted_once_the_entropy_outweighs_one_over_lambda() -> None:
    target = torch.full((1, 16), 1.0 / 16)
    draft = target.clone()
    draft[0, 0], draft[0, 1] = draft[0, 0] * 1.5, draft[0, 1] * 0.5
    assert float(entropy(target)) >= 1 / 0.5
    assert torch.equal(Csd(0.5, 0.35).chances(draft, target), torch.ones(1, 16))
    assert (Csd(0.5 / math.log(16), 0.35, normalised=True).chances(draft, target) < 1.0).any()


def test_cool_relaxes_the_first_tokens_most() -> None:
    draft, target = rows(4, count=1)
    many = draft.expand(8, -1), target.expand(8, -1)
    chances = Cool(3.0, 0.7).chances(*many).sum(-1)
    assert (chances.diff() <= 0).all()
    assert chances[0] > chances[-1]
    lossless = torch.minimum(torch.ones(()), target / draft)[0]
    torch.testing.assert_close(Cool(3.0, 0.7).chances(*many)[-1], lossless)


def codes() -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(1))


def test_gsd_pools_tokens_of_like_probability_and_look() -> None:
    target = torch.tensor([[0.30, 0.28, 0.25, 0.10, 0.07]])
    draft = torch.tensor([[0.60, 0.05, 0.15, 0.10, 0.10]])
    alike = torch.ones(5, 5, dtype=torch.bool)
    token = torch.tensor([0])
    assert float(Gsd(2, alike)(draft, target, token)) == pytest.approx((0.30 + 0.28) / (0.60 + 0.05))
    assert float(Gsd(4, alike)(draft, target, token)) == pytest.approx(min(1.0, 0.83 / 0.80))
    assert float(Gsd(4, alike, spread=0.03)(draft, target, token)) == pytest.approx((0.30 + 0.28) / 0.65)
    assert float(Gsd(4, torch.eye(5, dtype=torch.bool))(draft, target, token)) == pytest.approx(0.5)


def test_lantern_moves_at_most_delta_onto_the_drafted_token() -> None:
    target = torch.tensor([[0.30, 0.28, 0.25, 0.10, 0.07]])
    draft = torch.tensor([[0.10, 0.05, 0.15, 0.10, 0.60]])
    neighbours = torch.tensor([[1, 2], [0, 2], [1, 3], [4, 2], [3, 2]])
    token = torch.tensor([4])
    assert float(Lantern(neighbours, 0.2)(draft, target, token)) == pytest.approx(0.17 / 0.60)
    assert float(Lantern(neighbours, 0.4)(draft, target, token)) == pytest.approx(0.42 / 0.60)
    assert float(Lantern(neighbours, 0.0)(draft, target, token)) == pytest.approx(0.07 / 0.60)
    left = Lantern(neighbours, 0.2).resample(draft, target, token)
    expected = (target - torch.tensor([[0.10, 0.05, 0.15, 0.0, 0.60]])).clamp_min(0.0)
    torch.testing.assert_close(left, expected / expected.sum())


@pytest.mark.parametrize("name", sorted({*RULES} - {"gumbel", "block"}))
@pytest.mark.parametrize("kind", ["identical", "one-hot", "disjoint", "zero"])
def test_degenerate_rows_give_numbers(name: str, kind: str) -> None:
    one_hot = torch.eye(9)[:3]
    draft, target = {
        "identical": (rows(5, 3)[0], rows(5, 3)[0]),
        "one-hot": (one_hot, one_hot),
        "disjoint": (one_hot, one_hot.roll(1, -1)),
        "zero": (torch.zeros(3, 9), one_hot),
    }[kind]
    rule = make_rule(name, RULES[name].settings({}), codes)
    tokens = torch.arange(3)
    chances, replaced = rule(draft, target, tokens), rule.resample(draft, target, tokens)
    assert ((chances >= 0) & (chances <= 1)).all()
    torch.testing.assert_close(replaced.sum(-1), torch.ones(3, dtype=replaced.dtype))
    assert torch.isfinite(residual(draft, target)).all()


def test_options_are_checked_by_name_and_range() -> None:
    assert RULES["csd"].settings({"delta": 0.65}) == {"lambda": 0.5, "delta": 0.65, "normalised": 0.0}
    with pytest.raises(SettingsError, match=r"delta: 0 to 1 is needed, not 1\.5"):
        RULES["csd"].settings({"delta": 1.5})
    with pytest.raises(SettingsError, match="rule csd does not know it; it takes lambda, delta"):
        RULES["csd"].settings({"epsilon": 0.1})
    with pytest.raises(SettingsError, match="it takes none"):
        RULES["gumbel"].settings({"x": 1.0})
