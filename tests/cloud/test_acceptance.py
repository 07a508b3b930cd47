"""Acceptance rules: exact output laws by full enumeration, which planted bugs must fail.

A draft of n tokens from toy models over three tokens is judged in every way it can fall out: every draft, every
pattern of accept tests, every replacement. The tests measure no frequencies: laws are sums of products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud import acceptance
from cloud.acceptance import (
    Judgement,
    Lossless,
    block_acceptance,
    coupled_sample,
    inverse_sample,
    judge_block,
    judge_chain,
    judge_coupled,
    residual,
)
from shared import noise
from shared.noise import Purpose
from shared.sampling import SamplingSettings, warp

V = 3
EXACT = 1e-12
Law = NDArray[np.float64]
Path = tuple[int, ...]
Judge = Callable[[Tensor, Tensor, Sequence[int], Sequence[float], Sequence[float], bool], Judgement]
Thresholds = Callable[[Tensor, Tensor, Sequence[int]], Sequence[float]]


def draw_rows(generator: np.random.Generator, *shape: int, sharpness: float = 0.6) -> Tensor:
    """Random distributions (*shape, V), float64."""
    return torch.from_numpy(generator.dirichlet(np.full(shape[-1], sharpness), size=shape[:-1]))


@dataclass(frozen=True)
class Models:
    """Random draft and target: a distribution for every context of up to `length` tokens."""

    draft: dict[Path, Tensor]
    target: dict[Path, Tensor]
    length: int
    shown: dict[Path, Tensor] = field(default_factory=dict)
    """What the judge takes for the draft's rows where it is not the truth: a planted bug."""

    @classmethod
    def draw(cls, seed: int, length: int, vocabulary: int = V, likeness: float = 0.0) -> Models:
        generator = np.random.default_rng(seed)
        contexts = [path for n in range(length + 1) for path in itertools.product(range(vocabulary), repeat=n)]
        target = dict(zip(contexts, draw_rows(generator, len(contexts), vocabulary), strict=True))
        other = dict(zip(contexts, draw_rows(generator, len(contexts), vocabulary), strict=True))
        draft = {path: likeness * target[path] + (1 - likeness) * other[path] for path in contexts}
        return cls(draft, target, length)

    def rows(self, of: dict[Path, Tensor], drafted: Path, count: int) -> Tensor:
        return torch.stack([of[drafted[:n]] for n in range(count)])

    def chance(self, of: dict[Path, Tensor], path: Path) -> float:
        """Probability of a path under one of the two."""
        return float(np.prod([float(of[path[:n]][token]) for n, token in enumerate(path)]))

    def law(self, steps: int, start: Path = ()) -> Law:
        """The target's law of the `steps` tokens behind a context, (V,) * steps."""
        vocabulary = len(self.target[()])
        result = np.ones((vocabulary,) * steps)
        for path in itertools.product(range(vocabulary), repeat=steps):
            for n, token in enumerate(path):
                result[path] *= float(self.target[start + path[:n]][token])
        return result


@dataclass
class Outcome:
    """Exact consequences of a judge.

    Args:
        law: of the first length + 1 tokens when the target goes on behind the judgement.
        survival: P(accepted >= i | first i drafted tokens), by those tokens.
        accepted: expected number of accepted drafted tokens.
    """

    law: Law
    survival: dict[Path, float] = field(default_factory=dict)
    accepted: float = 0.0


@pytest.fixture
def replacements(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects the distributions that judges draw replacements and bonus tokens from, instead of drawing."""
    seen: list[Tensor] = []

    def record(probs: Tensor, uniform: float) -> int:
        seen.append(probs)
        return 0

    monkeypatch.setattr(acceptance, "inverse_sample", record)
    return seen


def enumerate_judge(
    judge: Judge, thresholds: Thresholds, models: Models, replacements: list[Tensor], bonus: bool = True
) -> Outcome:
    """Sums over every draft and every pattern of accept tests.

    The uniform of a passed test lies a hair below its threshold and that of a failed test a hair above: a judge that
    compared with other thresholds than those the pattern is weighed with would give another law.
    """
    n, vocabulary = models.length, len(models.target[()])
    outcome = Outcome(np.zeros((vocabulary,) * (n + 1)))
    tails = {
        path: models.law(n + 1 - len(path), path)
        for path in itertools.chain.from_iterable(itertools.product(range(vocabulary), repeat=k) for k in range(n + 1))
    }
    for drafted in itertools.product(range(vocabulary), repeat=n):
        drawn = models.chance(models.draft, drafted)
        if drawn == 0.0:
            continue
        draft, target = (
            models.rows(models.shown or models.draft, drafted, n),
            models.rows(models.target, drafted, n + bonus),
        )
        limits = thresholds(draft, target, drafted)
        for pattern in itertools.product((True, False), repeat=n):
            weight = float(np.prod([h if passed else 1 - h for h, passed in zip(limits, pattern, strict=True)]))
            if weight == 0.0:
                continue
            accept = [h - 1e-9 if passed else h + 1e-9 for h, passed in zip(limits, pattern, strict=True)]
            replacements.clear()
            judgement = judge(draft, target, drafted, [*accept, 0.5], [0.5] * (n + 1), bonus)
            kept = drafted[: judgement.accepted]
            outcome.accepted += drawn * weight * len(kept)
            for i in range(1, len(kept) + 1):
                share = weight * drawn / models.chance(models.draft, drafted[:i])
                outcome.survival[drafted[:i]] = outcome.survival.get(drafted[:i], 0.0) + share
            if judgement.token is None:
                assert not replacements
                outcome.law[kept] += drawn * weight * tails[kept]
                continue
            (probs,) = replacements
            for token in range(vocabulary):
                rest = tails[(*kept, token)] if len(kept) < n else 1.0
                outcome.law[(*kept, token)] += drawn * weight * float(probs[token]) * rest
    return outcome


def chain_thresholds(draft: Tensor, target: Tensor, tokens: Sequence[int]) -> list[float]:
    return [min(1.0, float(target[i][x] / draft[i][x])) for i, x in enumerate(tokens)]


def block_thresholds(draft: Tensor, target: Tensor, tokens: Sequence[int]) -> list[float]:
    return block_acceptance(draft, target, tokens)[1].tolist()


chain: Judge = partial(judge_chain, Lossless())

CASES = [(3, seed, likeness) for seed in range(4) for likeness in (0.0, 0.6)] + [(4, 0, 0.3)]
JUDGES: dict[str, tuple[Judge, Thresholds]] = {
    "chain": (chain, chain_thresholds),
    "block": (judge_block, block_thresholds),
}


# -- a token --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("vocabulary", [2, 3, 8])
def test_lossless_acceptance_and_residual_give_exactly_the_target(seed: int, vocabulary: int) -> None:
    draft, target = draw_rows(np.random.default_rng(seed), 2, vocabulary)
    rule, tokens = Lossless(), torch.arange(vocabulary)
    accept = rule(draft.expand(vocabulary, -1), target.expand(vocabulary, -1), tokens)
    rejected = float((draft * (1 - accept)).sum())
    law = draft * accept + rejected * rule.resample(draft, target, tokens[0])
    assert torch.allclose(law, target, rtol=0, atol=EXACT)
    assert rejected == pytest.approx(float((draft - target).abs().sum() / 2), abs=EXACT)


@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_residual_is_the_normalised_positive_part_and_keeps_leading_shapes(weight: float) -> None:
    draft, target = draw_rows(np.random.default_rng(1), 2, 4, 5, 30)
    left = np.maximum(0.0, weight * target.numpy() - draft.numpy())
    expected = left / left.sum(-1, keepdims=True)
    np.testing.assert_allclose(residual(draft, target, weight).numpy(), expected, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residual_of_identical_distributions_is_the_target_not_nan(dtype: torch.dtype) -> None:
    rows = draw_rows(np.random.default_rng(2), 3, V).to(dtype)
    rows[0] = torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(residual(rows, rows.clone()), rows)


def test_identical_distributions_are_always_accepted() -> None:
    rows = draw_rows(np.random.default_rng(3), 5, V)
    tokens = [0, 1, 2, 0, 1]
    nearly_one = [1 - 1e-12] * 5
    for judge in (chain, judge_block):
        assert judge(rows, rows, tokens, nearly_one, nearly_one, False) == Judgement(5, None)
    assert all(bool((weights == 1.0).all()) for weights in block_acceptance(rows, rows, tokens))


@pytest.mark.parametrize("judge", [chain, judge_block], ids=["chain", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_the_target_excludes_is_never_accepted_whatever_the_draft_row_says(
    judge: Judge, dtype: torch.dtype
) -> None:
    """Top-k may exclude a drafted token on both sides, when the device's kernels round unlike the shadow drafter's."""
    target = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]], dtype=dtype)
    for drafted_row in ([0.0, 0.6, 0.4], [0.5, 0.2, 0.3]):
        draft = torch.tensor([drafted_row, [0.0, 0.5, 0.5]], dtype=dtype)
        for second in range(V):
            judgement = judge(draft, target, [0, second], [1e-9] * 3, [0.5] * 3, True)
            assert judgement.accepted == 0
            assert judgement.token != 0


# -- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_inverse_sample_gives_each_token_a_share_of_the_uniforms_equal_to_its_probability(seed: int) -> None:
    probs = draw_rows(np.random.default_rng(seed), 9)
    edges = [0.0, *probs.cumsum(0).tolist()]
    for token in range(9):
        width = edges[token + 1] - edges[token]
        for uniform in (edges[token] + 1e-9 * width, edges[token] + width / 2, edges[token + 1] - 1e-9 * width):
            assert inverse_sample(probs, uniform) == token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_sample_never_returns_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0], dtype=dtype)
    uniforms = [0.0, 1e-300, 0.25, 0.5, 1.0 - 2**-53, 1.0, *np.linspace(0, 1, 41, endpoint=False)]
    assert {inverse_sample(probs, float(uniform)) for uniform in uniforms} == {1, 3, 4}


def test_inverse_sample_reaches_the_rarest_tokens_of_a_float32_row() -> None:
    """A hundred tokens of 1e-8 at the end: steps that a float32 running sum near one cannot tell apart."""
    probs = torch.tensor([1 - 1e-6, *[1e-8] * 100], dtype=torch.float32)
    edges = probs.double().cumsum(0)
    for token in range(1, 101):
        middle = float((edges[token - 1] + edges[token]) / 2 / edges[-1])
        assert inverse_sample(probs, middle) == token


def test_inverse_sample_takes_rows_whose_sum_is_a_rounding_off_one() -> None:
    probs = torch.full((16384,), 1 / 16383, dtype=torch.float32)
    assert inverse_sample(probs, 1.0 - 2**-33) == 16383
    assert inverse_sample(probs * 0.999, 1.0 - 2**-33) == 16383


# -- exact laws -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize(("length", "seed", "likeness"), CASES)
def test_the_joint_law_is_exactly_the_targets(
    replacements: list[Tensor], name: str, length: int, seed: int, likeness: float, bonus: bool
) -> None:
    models = Models.draw(seed, length, likeness=likeness)
    outcome = enumerate_judge(*JUDGES[name], models, replacements, bonus)
    assert np.abs(outcome.law - models.law(length + 1)).max() < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_of_the_draft_survives_block_verification_with_probability_a(
    replacements: list[Tensor], seed: int
) -> None:
    models = Models.draw(seed, 3)
    outcome = enumerate_judge(judge_block, block_thresholds, models, replacements)
    for drafted in itertools.product(range(V), repeat=3):
        a, _ = block_acceptance(models.rows(models.draft, drafted, 3), models.rows(models.target, drafted, 3), drafted)
        assert a[0] == 1.0
        for i in range(1, 4):
            assert outcome.survival.get(drafted[:i], 0.0) == pytest.approx(float(a[i]), abs=EXACT)


@pytest.mark.parametrize(("length", "seed", "likeness"), CASES)
def test_block_verification_accepts_at_least_as_much_as_the_chain_and_more_for_some(
    replacements: list[Tensor], length: int, seed: int, likeness: float
) -> None:
    models = Models.draw(seed, length, likeness=likeness)
    by_chain = enumerate_judge(*JUDGES["chain"], models, replacements).accepted
    by_block = enumerate_judge(*JUDGES["block"], models, replacements).accepted
    assert by_block > by_chain + 1e-6


def test_the_example_of_sun_et_al_accepts_10_9_by_chain_and_11_9_by_block(replacements: list[Tensor]) -> None:
    """Two tokens; the draft is (2/3, 1/3) and the target (1/3, 2/3) in every context; two tokens are drafted.

    By chain: E = 2/3 + (2/3)^2 = 10/9. By block: E[a_1] + E[a_2] = 2/3 + (1 + 2 + 1 + 1)/9 = 11/9.
    """
    contexts = [path for n in range(3) for path in itertools.product(range(2), repeat=n)]
    draft, target = torch.tensor([2 / 3, 1 / 3]).double(), torch.tensor([1 / 3, 2 / 3]).double()
    draft, target = draft / draft.sum(), target / target.sum()
    models = Models(dict.fromkeys(contexts, draft), dict.fromkeys(contexts, target), 2)
    accepted = {name: enumerate_judge(*judge, models, replacements).accepted for name, judge in JUDGES.items()}
    assert accepted["chain"] == pytest.approx(10 / 9, abs=1e-7)
    assert accepted["block"] == pytest.approx(11 / 9, abs=1e-7)


# -- planted bugs: each must be caught by the enumeration -----------------------------------------------------------


def _block(
    draft: Tensor,
    target: Tensor,
    tokens: Sequence[int],
    accept: Sequence[float],
    resample: Sequence[float],
    bonus: bool,
    left: Callable[[Tensor, Tensor, Tensor], Tensor] = residual,
    first_failure: bool = False,
) -> Judgement:
    """Block verification with parts to be exchanged."""
    count = len(tokens)
    a, thresholds = block_acceptance(draft, target, tokens)
    passed = [u < h for u, h in zip(accept, thresholds.tolist(), strict=False)]
    failures = [i for i, ok in enumerate(passed) if not ok]
    accepted = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
    if first_failure:
        accepted = failures[0] if failures else count
    if accepted == count:
        return Judgement(count, acceptance.inverse_sample(target[count], resample[count]))
    return Judgement(accepted, acceptance.inverse_sample(left(draft[accepted], target[accepted], a[accepted]), 0.5))


def _residual_without_weight(draft: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return residual(draft, target)


def _weight_on_the_draft(draft: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return residual(weight * draft, target)


class _SoftmaxOfTheDifference(Lossless):
    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return (target_probs - draft_probs).softmax(-1)


class _ResampleFromTheTarget(Lossless):
    def resample(self, draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
        return target_probs


MUTANTS: dict[str, tuple[Judge, Thresholds]] = {
    "block stops at the first failure": (partial(_block, first_failure=True), block_thresholds),
    "block with the plain residual": (partial(_block, left=_residual_without_weight), block_thresholds),
    "block with the weight on the draft": (partial(_block, left=_weight_on_the_draft), block_thresholds),
    "softmax of the difference": (partial(judge_chain, _SoftmaxOfTheDifference()), chain_thresholds),
    "replacement from the target": (partial(judge_chain, _ResampleFromTheTarget()), chain_thresholds),
}


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_enumeration_catches(replacements: list[Tensor], mutant: str, length: int) -> None:
    models = Models.draw(1, length)
    law = enumerate_judge(*MUTANTS[mutant], models, replacements).law
    assert law.sum() == pytest.approx(1.0)
    assert np.abs(law - models.law(length + 1)).sum() / 2 > 1e-3


def test_the_exchangeable_block_judge_is_right_when_nothing_is_exchanged(replacements: list[Tensor]) -> None:
    """Else the mutants above might be caught for another reason than the planted one."""
    models = Models.draw(0, 3)
    outcome = enumerate_judge(_block, block_thresholds, models, replacements)
    assert np.abs(outcome.law - models.law(4)).max() < EXACT


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("side", ["draft", "target"])
def test_the_enumeration_catches_a_warp_on_one_side_only(replacements: list[Tensor], name: str, side: str) -> None:
    """Tokens come from the warped draft and the law wanted is the warped target's; the judge sees one side unwarped."""
    plain = Models.draw(5, 3)
    settings = SamplingSettings(temperature=0.6, top_k=2)

    def warped(of: dict[Path, Tensor]) -> dict[Path, Tensor]:
        rows = {path: warp(row.log(), settings).double().exp() for path, row in of.items()}
        return {path: row / row.sum() for path, row in rows.items()}

    both = Models(warped(plain.draft), warped(plain.target), 3)
    right = enumerate_judge(*JUDGES[name], both, replacements).law
    assert np.abs(right - both.law(4)).max() < EXACT
    if side == "draft":
        wrong = enumerate_judge(*JUDGES[name], Models(both.draft, both.target, 3, shown=plain.draft), replacements).law
    else:
        wrong = enumerate_judge(*JUDGES[name], Models(both.draft, plain.target, 3), replacements).law
    assert np.abs(wrong - both.law(4)).sum() / 2 > 1e-2


# -- edges of the judges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judge", [chain, judge_block], ids=["chain", "block"])
def test_an_empty_draft_gets_a_bonus_or_nothing(judge: Judge) -> None:
    target = torch.tensor([[0.0, 1.0, 0.0]])
    empty = torch.empty(0, V)
    assert judge(empty, target, [], [0.5], [0.5], True) == Judgement(0, 1)
    assert judge(empty, target[:0], [], [], [], False) == Judgement(0, None)


@pytest.mark.parametrize("judge", [chain, judge_block], ids=["chain", "block"])
def test_the_uniforms_and_the_row_of_its_own_position_decide(judge: Judge) -> None:
    draft = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
    target = torch.tensor([[0.25, 0.0, 0.375, 0.375]] * 4)
    resample = [0.2, 0.8, 0.2, 0.9]
    for rejected in range(3):
        accept = [0.1] * rejected + [0.99] * (4 - rejected)
        assert judge(draft, target, [0, 0, 0], accept, resample, True) == Judgement(rejected, [2, 3, 2][rejected])
    assert judge(draft, target, [0, 0, 0], [0.1] * 4, resample, True) == Judgement(3, 3)
    assert judge(draft, target[:3], [0, 0, 0], [0.1] * 3, resample[:3], False) == Judgement(3, None)


@pytest.mark.parametrize("judge", [chain, judge_block], ids=["chain", "block"])
def test_float32_rows_are_judged_like_float64_rows(judge: Judge) -> None:
    generator = np.random.default_rng(4)
    for _ in range(50):
        draft, target = draw_rows(generator, 5, 40), draw_rows(generator, 6, 40)
        tokens = [int(row.argmax()) for row in draft]
        accept, resample = generator.random((2, 6)).tolist()
        narrow = judge(draft.float(), target.float(), tokens, accept, resample, True)
        assert narrow == judge(draft, target, tokens, accept, resample, True)


def test_block_thresholds_stay_in_range_over_long_drafts_far_from_the_target() -> None:
    generator = np.random.default_rng(0)
    draft, target = draw_rows(generator, 64, 500, sharpness=0.02), draw_rows(generator, 64, 500, sharpness=0.02)
    a, thresholds = block_acceptance(draft, target, [int(row.argmax()) for row in draft])
    assert a.shape == (65,)
    assert thresholds.shape == (64,)
    assert ((a >= 0) & (a <= 1)).all()
    assert ((thresholds >= 0) & (thresholds <= 1)).all()


# -- Gumbel coupling ------------------------------------------------------------------------------------------------


def gumbel_rows(seed: int, count: int, vocabulary: int) -> Tensor:
    return torch.from_numpy(noise.gumbel(seed, Purpose.TOKEN, range(count), vocabulary))


@pytest.mark.parametrize("bonus", [True, False])
def test_coupling_commits_the_targets_own_sample_whatever_the_draft(bonus: bool) -> None:
    count = 3
    rows, shared = draw_rows(np.random.default_rng(1), count + bonus, V).log(), gumbel_rows(1, count + bonus, V)
    own = coupled_sample(rows, shared).tolist()
    for drafted in itertools.product(range(V), repeat=count):
        judgement = judge_coupled(rows, shared, drafted, bonus)
        committed = [*drafted[: judgement.accepted], *([] if judgement.token is None else [judgement.token])]
        assert committed == own[: len(committed)]
        agreeing = next((i for i in range(count) if drafted[i] != own[i]), count)
        assert judgement.accepted == agreeing
        assert (judgement.token is None) == (agreeing == count and not bonus)


def test_coupling_without_a_draft_gives_the_sample_itself() -> None:
    rows, shared = draw_rows(np.random.default_rng(2), 1, V).log(), gumbel_rows(2, 1, V)
    assert judge_coupled(rows, shared, [], True) == Judgement(0, int(coupled_sample(rows[0], shared[0])))


def test_a_coupled_sample_never_is_an_excluded_token() -> None:
    log_probs = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert set(coupled_sample(log_probs.expand(1000, -1), gumbel_rows(0, 1000, 3)).tolist()) == {1}


@pytest.mark.parametrize(("likeness", "seed"), [(0.0, 0), (0.5, 1), (0.9, 2), (0.97, 3)])
def test_coupled_drafts_agree_at_a_rate_between_the_bounds_of_the_total_variation(likeness: float, seed: int) -> None:
    """(1 - TV) / (1 + TV) <= P(equal) <= 1 - TV (Daliri et al., 2408.07978)."""
    target, other = draw_rows(np.random.default_rng(seed), 2, 16, sharpness=1.0)
    draft, trials = likeness * target + (1 - likeness) * other, 20000
    shared = gumbel_rows(seed, trials, 16)
    rate = float((coupled_sample(draft.log(), shared) == coupled_sample(target.log(), shared)).double().mean())
    tv = float((draft - target).abs().sum() / 2)
    slack = 4 * (0.25 / trials) ** 0.5
    assert (1 - tv) / (1 + tv) - slack <= rate <= 1 - tv + slack
    alone = float(
        (coupled_sample(draft.log(), gumbel_rows(seed + 50, trials, 16)) == coupled_sample(target.log(), shared))
        .double()
        .mean()
    )
    assert rate > alone + 0.1
