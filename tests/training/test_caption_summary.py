"""A caption summary starts with captions that are told apart, in a decoder that has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from cloud.models.transformer import Transformer, caption_means
from tests.training.interval_toys import CONFIG
from training.caption_summary import start_summary
from training.captioned_tokens import first_items
from training.data.shards import Shard, claim_folder, save_shard, shard_path
from training.data.tokens import TokenCache

PICTURES, WIDTH = 200, 12


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    """Captions of one row that lie close together and differ mostly in one direction, as a text encoder's do."""
    random = np.random.default_rng(0)
    features = 3.0 + random.normal(size=(PICTURES, WIDTH)) * np.array([2.0] + [0.2] * (WIDTH - 1))
    claim_folder(tmp_path, {"made_with": "toy", "shard_size": PICTURES})
    tokens = np.zeros((PICTURES, CONFIG.rows * CONFIG.cols), np.uint16)
    shard = Shard(tokens, features.astype(np.float16), np.arange(PICTURES + 1, dtype=np.int64))
    save_shard(shard_path(tmp_path, 0), shard, ["caption"] * PICTURES)
    return TokenCache(tmp_path)


def likeness(vectors: torch.Tensor) -> float:
    """Mean squared cosine between the rows of (n, dim): 1 where all point one way."""
    rows = functional.normalize(vectors, dim=1)
    return float(((rows @ rows.T) ** 2).mean())


def test_captions_that_lie_close_together_start_apart(cache: TokenCache) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(CONFIG, caption_dim=WIDTH, summary_dim=64, dim=32))
    means = caption_means(*first_items(cache, PICTURES)[:2])
    with torch.no_grad():
        before = likeness(model.summary(means))
        start_summary(model, cache)
        after = model.summary(means)
    assert before > 0.5
    assert likeness(after) < 0.25
    assert after.square().mean().sqrt() == pytest.approx(0.25, rel=1e-3)


def test_captions_that_are_all_the_same_do_no_harm(tmp_path: Path) -> None:
    claim_folder(tmp_path, {"made_with": "toy", "shard_size": 4})
    tokens = np.zeros((4, CONFIG.rows * CONFIG.cols), np.uint16)
    shard = Shard(tokens, np.ones((4, CONFIG.caption_dim), np.float16), np.arange(5, dtype=np.int64))
    save_shard(shard_path(tmp_path, 0), shard, ["caption"] * 4)
    model = Transformer(replace(CONFIG, summary_dim=8))
    start_summary(model, TokenCache(tmp_path))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_decoder_without_a_summary_stays_as_it_is(cache: TokenCache) -> None:
    model = Transformer(replace(CONFIG, caption_dim=WIDTH, summary_dim=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_summary(model, cache)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
