"""The losses of intervals have the properties they are chosen for, and their training can be broken off."""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from shared.calibration import Calibration
from shared.intervals import interval_measures, log_odds, score
from tests.training.interval_toys import save_cache, save_models
from training import inter_dro
from training.drafter import load_drafter
from training.inter_dro import InterDroSettings, run_inter_dro
from training.interval_losses import (
    IntervalLossSettings,
    containment_loss,
    containment_rows,
    distance_rows,
    interval_loss,
    ranking_loss,
    robust_weights,
)
from training.loop import LoopSettings
from training.uncertainty import spearman

VOCABULARY, ROWS = 12, 300
UNCAPPED = 1e9


def _kl(strength: float, cap: float = UNCAPPED) -> IntervalLossSettings:
    return IntervalLossSettings(dro="kl", strength=strength, cap=cap)


@pytest.fixture
def losses() -> Tensor:
    return 3.0 * torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    """Log-probabilities (ROWS, VOCABULARY) of a draft, and of a target that scatters around it."""
    generator = torch.Generator().manual_seed(2)
    centre = torch.randn(ROWS, VOCABULARY, generator=generator)
    target = centre + 0.7 * torch.randn(ROWS, VOCABULARY, generator=generator)
    return centre.log_softmax(-1), target.log_softmax(-1)


def test_kl_weights_give_the_gradient_of_the_robust_loss(losses: Tensor) -> None:
    strength = 0.7
    ours, theirs = losses.clone().requires_grad_(), losses.clone().requires_grad_()
    (robust_weights(ours, _kl(strength)) * ours).mean().backward()
    ((torch.logsumexp(strength * theirs, 0) - math.log(len(theirs))) / strength).backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(ours.grad, (strength * losses).softmax(0), atol=1e-12)  # type: ignore[arg-type]


def test_kl_weights_go_from_the_mean_to_the_worst_row(losses: Tensor) -> None:
    robust = [(robust_weights(losses, _kl(strength)) * losses).mean() for strength in (1e-9, 0.1, 1.0, 10.0, 1e6)]
    assert robust[0] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert robust[-1] == pytest.approx(float(losses.max()), abs=1e-6)
    assert robust == sorted(robust)
    assert torch.equal(robust_weights(losses, _kl(0.0)), torch.ones_like(losses))


@pytest.mark.parametrize(
    ("strength", "cap"), [(0.1, 20.0), (2.0, 3.0), (10.0, 7.0), (1e6, 20.0), (1e6, 5.0), (1.0, 1.0)]
)
def test_capped_weights_hold_cap_and_mean_and_keep_the_other_proportions(
    losses: Tensor, strength: float, cap: float
) -> None:
    weights = robust_weights(losses, _kl(strength, cap))
    assert float(weights.max()) <= cap * (1.0 + 1e-9)
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-9)
    below = weights < cap * (1.0 - 1e-9)
    free = torch.log(weights[below]) - strength * losses[below]
    if strength < 100.0:
        assert torch.allclose(free, free.mean(), atol=1e-6)
    else:  # what is left when each of the worst rows holds the cap goes to the next one
        worst = losses.sort(descending=True).values
        full, count = int(len(losses) / cap), len(losses)
        expected = (cap * worst[:full].sum() + (count - full * cap) * worst[full]) / count
        assert float((weights * losses).mean()) == pytest.approx(float(expected), abs=1e-6)


def test_kl_weights_survive_any_scale() -> None:
    for scale in (1e-6, 1e4, 1e8):
        weights = robust_weights(scale * torch.arange(3072.0), _kl(1.0, 20.0))
        assert torch.isfinite(weights).all()
        assert float(weights.mean()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_cvar_is_the_mean_of_the_worst_share(losses: Tensor, share: float) -> None:
    weights = robust_weights(losses, IntervalLossSettings(dro="cvar", worst=share))
    worst = losses.sort(descending=True).values[: max(1, int(share * len(losses)))].mean()
    assert (weights * losses).mean() == pytest.approx(float(worst), abs=1e-9)


def test_without_dro_all_rows_weigh_alike(losses: Tensor) -> None:
    assert torch.equal(robust_weights(losses, IntervalLossSettings(dro="none")), torch.ones_like(losses))


def test_weights_carry_no_gradient(losses: Tensor) -> None:
    for dro in ("kl", "cvar", "none"):
        assert not robust_weights(losses.requires_grad_(), IntervalLossSettings(dro=dro)).requires_grad


def _trained_radius(rows: tuple[Tensor, Tensor], settings: IntervalLossSettings, steps: int = 150) -> list[Tensor]:
    """Radii (VOCABULARY,) that all rows share, step by step, as a loss trains them from 1.3 on."""
    raw = torch.ones(VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.05)
    course = []
    for _ in range(steps):
        radius = functional.softplus(raw)
        course.append(radius.detach().clone())
        optimizer.zero_grad()
        interval_loss(rows[0], radius.expand(ROWS, -1), rows[1], settings)[0].backward()
        optimizer.step()
    return course


def _coverage(rows: tuple[Tensor, Tensor], radius: Tensor) -> float:
    inside = (log_odds(rows[1]) - log_odds(rows[0])).abs() <= radius
    return float((rows[1].exp() * inside).sum(-1).mean())


def test_the_published_loss_collapses_the_radius(rows: tuple[Tensor, Tensor]) -> None:
    course = _trained_radius(rows, IntervalLossSettings(loss="paper"))
    assert all(float(after.mean()) < float(before.mean()) for before, after in pairwise(course))
    assert float(course[-1].median()) < 0.3
    assert _coverage(rows, course[-1]) < 0.2


def test_the_calibrated_loss_makes_intervals_that_hold_the_target(rows: tuple[Tensor, Tensor]) -> None:
    course = _trained_radius(rows, IntervalLossSettings(loss="calibrated", mix=0.0))
    assert 0.85 < _coverage(rows, course[-1]) < 0.95
    raised = _trained_radius(rows, IntervalLossSettings(mix=0.0, lowest=0.01, highest=0.99))
    assert _coverage(rows, raised[-1]) > _coverage(rows, course[-1]) + 0.03


def _slow_paper_loss(centre: Tensor, radius: Tensor, target: Tensor, strength: float) -> Tensor:
    """The published loss, written row by row in probabilities (methods.md 5.1)."""
    odds = log_odds(centre.double())
    ends = [torch.sigmoid(odds + sign * radius) for sign in (0.0, 1.0, -1.0)]
    mass, low = target.double().exp(), ends[2]
    total = torch.zeros((), dtype=torch.float64)
    entropies = torch.stack([-(t * p.log()).sum() for t, p in zip(mass, low, strict=True)])
    for probs in ends:
        for t, p in zip(mass, probs, strict=True):
            total = total + ((p - t).abs().sum() - (t * p.log()).sum()) / len(mass)
    total = total + (mass * (mass.log() - ends[0].log())).sum() / len(mass)
    return total + ((strength * entropies).softmax(0) * entropies).sum()


def test_the_published_loss_is_the_published_formula(rows: tuple[Tensor, Tensor]) -> None:
    centre, target = rows[0][:20], rows[1][:20]
    radius = torch.rand(20, VOCABULARY, generator=torch.Generator().manual_seed(3))
    settings = IntervalLossSettings(loss="paper", strength=0.3)
    shaped = (values.unflatten(0, (4, 5)) for values in (centre, radius, target))
    loss, _ = interval_loss(*shaped, settings)
    assert float(loss) == pytest.approx(float(_slow_paper_loss(centre, radius, target, 0.3)), rel=1e-5)


def test_containment_alone_moves_the_radius_where_nothing_ranks(rows: tuple[Tensor, Tensor]) -> None:
    """The centre's terms and the weights of rows leave the radius alone; the radius' terms leave the centre alone."""
    centre, target = rows
    radius = torch.full((ROWS, VOCABULARY), 0.8, requires_grad=True)
    settings = IntervalLossSettings(mix=0.0, ranking=0.0)
    interval_loss(centre, radius, target, settings)[0].backward()
    alone = torch.full((ROWS, VOCABULARY), 0.8, requires_grad=True)
    containment_loss(centre, alone, target, settings.lowest, settings.highest).backward()
    assert torch.allclose(radius.grad, alone.grad, atol=1e-9)  # type: ignore[arg-type]
    centres = [centre.clone().requires_grad_() for _ in range(2)]
    for leaf, weight in zip(centres, (0.0, 5.0), strict=True):
        interval_loss(leaf, radius.detach(), target, IntervalLossSettings(mix=0.0, containment=weight, ranking=weight))[
            0
        ].backward()
    assert torch.equal(centres[0].grad, centres[1].grad)  # type: ignore[arg-type]


def test_mixing_weighs_every_term_of_the_middle(rows: tuple[Tensor, Tensor]) -> None:
    centre, target = rows
    radius = torch.full((ROWS, VOCABULARY), 0.8)
    settings = IntervalLossSettings(dro="cvar", worst=0.25, mix=1.0, ranking=0.0)
    low = functional.logsigmoid(log_odds(centre) - radius)
    worst = (-(target.exp() * low).sum(-1)).topk(ROWS // 4).indices
    whole, _ = interval_loss(centre, radius, target, settings)
    plain, _ = interval_loss(centre[worst], radius[worst], target[worst], IntervalLossSettings(mix=0.0, ranking=0.0))
    assert float(whole) == pytest.approx(float(plain), rel=1e-5)
    half, _ = interval_loss(centre, radius, target, IntervalLossSettings(dro="cvar", worst=0.25, mix=0.5, ranking=0.0))
    unweighted, _ = interval_loss(centre, radius, target, IntervalLossSettings(mix=0.0, ranking=0.0))
    assert float(half) == pytest.approx(0.5 * float(whole + unweighted), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_ranking_makes_the_score_follow_the_distance(rows: tuple[Tensor, Tensor], temperature: float) -> None:
    """A radius that knows nothing but how far each row is off learns the order; the scale of all scores has no part."""
    centre, target = rows
    distance = distance_rows(centre, target, 0.5)
    assert torch.allclose(distance_rows(centre, target), 0.5 * (target.exp() - centre.exp()).abs().sum(-1), atol=1e-6)
    raw = torch.zeros(ROWS, 1, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    course = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = ranking_loss(centre, functional.softplus(raw), distance, temperature)
        course.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert course[0] > 0.05
    assert 0.0 <= course[-1] < 0.02
    warped = (centre / temperature).log_softmax(-1)
    measures = interval_measures(warped, functional.softplus(raw.detach()))
    assert spearman(score("interval", measures, VOCABULARY).numpy(), distance.numpy()) > 0.98
    again = ranking_loss(centre, functional.softplus(raw.detach()), 0.3 * distance, temperature)
    assert float(again) == pytest.approx(course[-1], abs=5e-3)


def test_rows_without_distance_or_uncertainty_rank_without_nan(rows: tuple[Tensor, Tensor]) -> None:
    flat = torch.full((4, VOCABULARY), 1.0 / VOCABULARY).log()
    radius = torch.zeros(4, VOCABULARY, requires_grad=True)
    ranking_loss(flat, radius, torch.zeros(4)).backward()
    assert torch.isfinite(radius.grad).all()  # type: ignore[arg-type]


def test_containment_asks_more_of_a_target_outside_than_inside(rows: tuple[Tensor, Tensor]) -> None:
    centre, target = rows
    error = (log_odds(target) - log_odds(centre)).abs().amax(-1, keepdim=True)
    outside, inside = torch.zeros_like(error).requires_grad_(), (error + 1.0).requires_grad_()
    for radius in (outside, inside):
        containment_rows(centre, radius, target, 0.05, 0.95).sum().backward()
    assert (outside.grad < 0.0).all()  # type: ignore[operator]
    assert (inside.grad > 0.0).all()  # type: ignore[operator]


def test_presets_fill_only_what_is_not_set() -> None:
    paper, own = IntervalLossSettings(loss="paper"), IntervalLossSettings(loss="paper", mix=0.25)
    assert paper.coefficients == (0.0, 1.0, 0.0, 0.0)
    assert own.coefficients == (0.0, 1.0, 0.25, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "best"},
        {"dro": "max"},
        {"cap": 0.5},
        {"worst": 0.0},
        {"mix": 1.5},
        {"ranking": -1.0},
        {"strength": -1.0},
        {"align": -1.0},
    ],
)
def test_coefficients_that_cannot_be_name_their_field(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        IntervalLossSettings(**changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy models and two token caches."""
    folder = tmp_path_factory.mktemp("inter_dro")
    save_models(folder)
    save_cache(folder / "drawn", seed=1)
    save_cache(folder / "tokens", train=20, seed=2)
    return folder


def _settings(made: Path, folder: Path, **changes: object) -> InterDroSettings:
    loop = LoopSettings(folder, steps=6, batch_size=4, precision="fp32", warmup_steps=0, log_every=1, threads=1)
    values = {
        "target": made / "target.safetensors",
        "drafter": made / "drafter.safetensors",
        "tokens": (str(made / "drawn"), str(made / "tokens")),
        "validation_pictures": 4,
        "calibration_pictures": 4,
    }
    return InterDroSettings(loop, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that ran to its end."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_inter_dro(_settings(made, folder))
    return folder


def test_a_training_leaves_a_better_drafter_its_calibration_and_the_report(made: Path, finished: Path) -> None:
    before, after = load_drafter(made / "drafter.safetensors"), load_drafter(finished / "final" / "drafter.safetensors")
    assert any(not torch.equal(one, other) for one, other in zip(before.parameters(), after.parameters(), strict=True))
    Calibration.load(finished / "final" / "calibration.json")
    lines = [json.loads(line) for line in (finished / "uncertainty.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 6]
    assert set(lines[0]["sets"]) == {"drawn", "tokens"}
    assert all(last["distance"] < first["distance"] for first, last in _pairs(lines))
    assert (finished / "uncertainty.md").is_file()
    assert (finished / "uncertainty.png").is_file()


def _pairs(lines: list[dict]) -> list[tuple[dict, dict]]:
    return [(lines[0]["sets"][name], lines[-1]["sets"][name]) for name in lines[0]["sets"]]


def test_a_training_stopped_midway_ends_in_the_same_bits(
    made: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stopping(*arguments: Tensor | IntervalLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return interval_loss(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(inter_dro, "interval_loss", stopping)
    assert not run_inter_dro(_settings(made, tmp_path))
    assert not (tmp_path / "final").exists()
    assert run_inter_dro(_settings(made, tmp_path))
    assert calls == 6
    ours, theirs = (load_file(folder / "final" / "drafter.safetensors") for folder in (tmp_path, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    steps = [json.loads(line)["step"] for line in (tmp_path / "uncertainty.jsonl").read_text().splitlines()]
    assert steps == [0, 6]


def test_another_start_than_the_drafter_and_odd_shares_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shares"):
        _settings(made, tmp_path, shares=(1.0,))
    other = LoopSettings(tmp_path, steps=1, batch_size=1, init_from=tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="init_from"):
        InterDroSettings(other, drafter=made / "drafter.safetensors")
