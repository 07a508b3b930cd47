"""Tiny trained-looking models and token caches on disk, for the stages that train intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from cloud.models.drafter import Drafter, DrafterConfig
from cloud.models.loading import save_weights
from cloud.models.transformer import Transformer, TransformerConfig
from training.data.shards import Shard, claim_folder, save_shard, shard_path
from training.data.tokens import MAX_CAPTION_TOKENS

CONFIG = TransformerConfig(
    vocabulary=8, rows=3, cols=3, dim=16, layers=1, heads=2, ffn_dim=32, prefix_rows=MAX_CAPTION_TOKENS, caption_dim=4
)
SIZE = CONFIG.rows * CONFIG.cols


def toy_models(seed: int = 0) -> tuple[Transformer, Drafter]:
    """A target and a drafter whose rows are far from uniform and differ from one another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, drafter = Transformer(CONFIG), Drafter(DrafterConfig(CONFIG))
        for model in (target, drafter):
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.5)
    return target.eval(), drafter.eval()


def save_models(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Writes the models of `toy_models`; the paths of target and drafter."""
    target, drafter = toy_models(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "target.safetensors", folder / "drafter.safetensors"
    save_weights(target, paths[0], target.config.to_dict())
    save_weights(drafter, paths[1], drafter.config.to_dict())
    return paths


def save_cache(folder: Path, train: int = 8, val: int = 4, seed: int = 0) -> Path:
    """Writes a token cache of random pictures and captions of one to four rows."""
    random = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        claim_folder(folder / split, {"made_with": f"toy {seed}", "shard_size": count})
        lengths = random.integers(1, 5, count)
        tokens = random.integers(0, CONFIG.vocabulary, (count, SIZE)).astype(np.uint16)
        features = random.normal(size=(lengths.sum(), CONFIG.caption_dim)).astype(np.float16)
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        captions = [f"{split} {number}" for number in range(count)]
        save_shard(shard_path(folder / split, 0), Shard(tokens, features, offsets), captions)
    return folder
