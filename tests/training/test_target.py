"""The target stage learns what captions say, can be broken off, and refuses settings that cannot be."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cloud.models.loading import load_transformer
from tests.training.interval_toys import CONFIG, SIZE
from training import target
from training.captioned_tokens import first_items
from training.data.shards import Shard, claim_folder, save_shard, shard_path
from training.data.tokens import TokenCache
from training.loop import LoopSettings
from training.target import TargetSettings, run_target, token_loss, validation_loss, validation_losses
from training.toy import toy_codec

STEPS, PICTURES = 80, 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A codec, and token caches in which each of two captions has one picture."""
    folder = tmp_path_factory.mktemp("target")
    toy_codec(CONFIG.vocabulary, CONFIG.rows).save(folder / "codec")
    random = np.random.default_rng(0)
    pictures = random.integers(0, CONFIG.vocabulary, (2, SIZE)).astype(np.uint16)
    features = random.normal(size=(2, CONFIG.caption_dim)).astype(np.float16)
    which = np.arange(PICTURES) % 2
    for split in ("train", "val"):
        claim_folder(folder / "tokens" / split, {"made_with": "toy", "shard_size": PICTURES})
        shard = Shard(pictures[which], features[which], np.arange(PICTURES + 1, dtype=np.int64))
        save_shard(shard_path(folder / "tokens" / split, 0), shard, [f"caption {number}" for number in which])
    return folder


def settings(made: Path, folder: Path, **changes: object) -> TargetSettings:
    loop = LoopSettings(folder, STEPS, batch_size=8, precision="fp32", warmup_steps=0, log_every=1, threads=1)
    values = {"tokens": made / "tokens", "codec": made / "codec", "validation_pictures": 8}
    values |= {"drop_context": 0.5, "corrupt_context": 0.3}
    return TargetSettings(replace(CONFIG, summary_dim=8), loop, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that ran to its end."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_target(settings(made, folder))
    return folder


def test_a_trained_target_draws_what_the_caption_says(made: Path, finished: Path) -> None:
    model = load_transformer(finished / "final" / "target.safetensors")
    features, lengths, tokens = first_items(TokenCache(made / "tokens" / "val"), 8)
    right, wrong = (validation_loss(model, (rows, lengths, tokens)) for rows in (features, features.roll(1, 0)))
    assert right < 0.3 * math.log(CONFIG.vocabulary)
    assert wrong > 2 * right
    written = json.loads((finished / "validation.jsonl").read_text().splitlines()[-1])
    assert written == {"step": STEPS, **validation_losses(model, (features, lengths, tokens))}
    assert written["loss"] == pytest.approx(right)
    assert written["loss_without_context"] < 0.6 * math.log(CONFIG.vocabulary)  # the caption alone is enough
    assert written["loss_without_caption"] > 2 * right  # two pictures: nothing but the caption tells which
    assert (finished / "samples.png").is_file()


def test_a_training_stopped_midway_ends_in_the_same_bits(
    made: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stopping(logits: Tensor, tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == STEPS // 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return token_loss(logits, tokens)

    monkeypatch.setattr(target, "token_loss", stopping)
    assert not run_target(settings(made, tmp_path))
    assert not (tmp_path / "final").exists()
    assert run_target(settings(made, tmp_path))
    ours, theirs = (load_file(folder / "final" / "target.safetensors") for folder in (tmp_path, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_captions": 1.0},
        {"corrupt_context": 1.5},
        {"drop_context": -0.5},
        {"muon_rate": 0.0},
        {"validation_pictures": 0},
    ],
)
def test_settings_that_cannot_be_name_their_field(made: Path, tmp_path: Path, changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        settings(made, tmp_path, **changes)


def test_the_default_settings_load() -> None:
    assert TargetSettings.load(Path("configs/target.toml")).model.vocabulary == 1024
