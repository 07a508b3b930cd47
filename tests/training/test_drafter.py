"""The drafter stage imitates the guided target, can be broken off, and refuses settings that cannot be."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cloud.models.drafter import DrafterConfig, DrafterRows
from cloud.models.loading import load_transformer
from cloud.models.transformer import UNREAD
from shared.errors import BundleError
from tests.training.interval_toys import CONFIG, save_cache, save_models
from training import drafter
from training.captioned_tokens import first_items
from training.data.tokens import TokenCache
from training.drafter import DrafterSettings, distillation_loss, guided_log_probs, load_drafter, run_drafter
from training.loop import LoopSettings

STEPS = 150


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target and a token cache."""
    folder = tmp_path_factory.mktemp("drafter")
    save_models(folder)
    save_cache(folder / "tokens", train=20)
    return folder


def settings(made: Path, folder: Path, **changes: object) -> DrafterSettings:
    loop = LoopSettings(folder, STEPS, batch_size=8, precision="fp32", warmup_steps=0, log_every=1, threads=1)
    values = {"target": made / "target.safetensors", "tokens": (str(made / "tokens"),), "validation_pictures": 4}
    return DrafterSettings(DrafterConfig(replace(CONFIG, summary_dim=8)), loop, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that ran to its end."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_drafter(settings(made, folder))
    return folder


def test_guidance_weighs_the_rows_with_and_without_the_caption(made: Path) -> None:
    model = load_transformer(made / "target.safetensors")
    features, lengths, tokens = first_items(TokenCache(made / "tokens" / "val"), 4)
    with torch.no_grad():
        told = model(features, lengths, tokens).logits.log_softmax(-1)
        untold = model(features, torch.zeros_like(lengths), tokens).logits.log_softmax(-1)
        guided = guided_log_probs(model, (features, lengths, tokens), 3.0)
        plain = guided_log_probs(model, (features, lengths, tokens), 1.0)
    assert torch.allclose(guided, (untold + 3.0 * (told - untold)).log_softmax(-1), atol=1e-5)
    assert torch.allclose(plain, told, atol=1e-5)


def test_a_trained_drafter_is_near_the_guided_target(made: Path, finished: Path) -> None:
    target = load_transformer(made / "target.safetensors")
    batch = first_items(TokenCache(made / "tokens" / "train"), 8)
    with torch.no_grad():
        truth = guided_log_probs(target, batch, 3.0).exp()
        drafted = load_drafter(finished / "final" / "drafter.safetensors")(*batch).centre.softmax(-1)
    untold = torch.full_like(truth, 1.0 / CONFIG.vocabulary)
    assert (truth - drafted).abs().sum(-1).mean() < 0.6 * (truth - untold).abs().sum(-1).mean()
    quality = json.loads((finished / "validation.jsonl").read_text().splitlines()[-1])
    assert quality["step"] == STEPS
    assert 0.0 < quality["tv"] < 1.0
    assert 0.0 < quality["coverage"] <= 1.0


def test_a_drafter_learns_from_all_its_caches(made: Path, finished: Path, tmp_path: Path) -> None:
    other = save_cache(tmp_path / "other", train=6, seed=1)
    caches = (str(made / "tokens"), str(other))
    assert run_drafter(settings(made, tmp_path / "both", tokens=caches, shares=(0.5, 0.5)))
    target = load_transformer(made / "target.safetensors")
    batch = first_items(TokenCache(other / "train"), 6)
    with torch.no_grad():
        truth = guided_log_probs(target, batch, 3.0).exp()
        both, one = (
            load_drafter(folder / "final" / "drafter.safetensors")(*batch).centre.softmax(-1)
            for folder in (tmp_path / "both", finished)
        )
    assert (truth - both).abs().sum(-1).mean() < 0.9 * (truth - one).abs().sum(-1).mean()


@pytest.mark.parametrize("share", ["corrupt_context", "drop_context"])
def test_a_drafter_can_learn_from_contexts_that_are_no_drawing(
    made: Path, finished: Path, tmp_path: Path, share: str
) -> None:
    assert run_drafter(settings(made, tmp_path, **{share: 1.0}))
    target = load_transformer(made / "target.safetensors")
    features, lengths, tokens = first_items(TokenCache(made / "tokens" / "train"), 20)
    fed = torch.full_like(tokens, UNREAD)
    if share == "corrupt_context":
        fed = torch.randint(CONFIG.vocabulary, tokens.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = guided_log_probs(target, (features, lengths, fed), 3.0).exp()
        seen, unseen = (
            load_drafter(folder / "final" / "drafter.safetensors")(features, lengths, fed).centre.softmax(-1)
            for folder in (tmp_path, finished)
        )
    assert (truth - seen).abs().sum(-1).mean() < 0.95 * (truth - unseen).abs().sum(-1).mean()


def test_half_of_the_divergence_is_that_of_what_is_drawn(made: Path, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    target = torch.randn(5, 3, CONFIG.vocabulary, generator=random).log_softmax(-1)
    centre = torch.randn(5, 3, CONFIG.vocabulary, generator=random)
    rows = DrafterRows(centre, torch.ones_like(centre), centre)
    plain, mixed = (
        float(distillation_loss(rows, target, settings(made, tmp_path, temperature=temperature))[1]["kl"])
        for temperature in (1.0, 0.5)
    )
    laws = [torch.distributions.Categorical(logits=2.0 * logits) for logits in (target, centre)]
    sharp = float(torch.distributions.kl_divergence(*laws).mean())
    assert mixed == pytest.approx(0.5 * (plain + sharp))
    assert abs(sharp - plain) > 0.1


def test_a_training_stopped_midway_ends_in_the_same_bits(
    made: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stopping(rows: DrafterRows, target: Tensor, settings: DrafterSettings) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal calls
        calls += 1
        if calls == STEPS // 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return distillation_loss(rows, target, settings)

    monkeypatch.setattr(drafter, "distillation_loss", stopping)
    assert not run_drafter(settings(made, tmp_path))
    assert not (tmp_path / "final").exists()
    assert run_drafter(settings(made, tmp_path))
    assert calls == STEPS
    ours, theirs = (load_file(folder / "final" / "drafter.safetensors") for folder in (tmp_path, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"guidance": 0.5}, "guidance"),
        ({"corrupt_context": -0.1}, "corrupt_context"),
        ({"drop_context": 2.0}, "drop_context"),
        ({"lowest": 0.6}, "lowest"),
        ({"temperature": 0.0}, "temperature"),
        ({"adam_rate": 0.0}, "adam_rate"),
        ({"shares": (0.5, 0.5)}, "shares"),
    ],
)
def test_settings_that_cannot_be_name_their_field(
    made: Path, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        settings(made, tmp_path, **changes)


def test_what_is_no_drafter_is_refused(made: Path) -> None:
    with pytest.raises(BundleError, match="not a drafter's description"):
        load_drafter(made / "target.safetensors")


def test_the_default_settings_load() -> None:
    assert DrafterSettings.load(Path("configs/drafter.toml")).model.transformer.vocabulary == 1024


@pytest.mark.parametrize("name", ["drafter", "drafter_prompts"])
def test_both_trainings_of_the_recipe_open(name: str) -> None:
    loaded = DrafterSettings.load(Path("configs") / f"{name}.toml")
    assert loaded.loop.folder == Path("work") / name
    assert loaded.model.transformer.summary_dim == 512
