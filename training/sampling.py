"""Samples pictures from a target with the verifier's own engine, many at once: for previews and for distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cloud.acceptance import coupled_sample
from cloud.engine import Caption, Engine, Feed
from shared import noise
from shared.noise import Purpose
from shared.sampling import SamplingSettings, guide, warp

__all__ = ["sample_tokens"]


def sample_tokens(
    engine: Engine, features: Sequence[Tensor], sampling: SamplingSettings, seeds: Sequence[int]
) -> Tensor:
    """Draws one picture for each caption, as `ar` would with the same seed.

    Args:
        engine: runs the target; needs a slot for each caption.
        features: caption features (length, width) of each picture.
        sampling: the warp.
        seeds: one for each picture.

    Returns:
        tokens (pictures, T), int64.
    """
    size, vocabulary = engine.config.grid.size, engine.config.vocabulary
    sequences = [engine.cache.allocate(guided=sampling.guidance != 1.0) for _ in features]
    tokens = torch.empty(len(features), size, dtype=torch.int64)
    try:
        feeds = [Feed(s, caption=Caption(f)) for s, f in zip(sequences, features, strict=True)]
        for position in range(size):
            logits = torch.stack([rows.logits[:, -1] for rows in engine.forward(feeds)])
            guided = guide(logits[:, 0], logits[:, -1], sampling.guidance)
            draws = [noise.gumbel(seed, Purpose.TOKEN, [position], vocabulary, xp=torch) for seed in seeds]
            tokens[:, position] = coupled_sample(warp(guided.cpu(), sampling), torch.cat(draws))
            feeds = [Feed(s, [int(t)]) for s, t in zip(sequences, tokens[:, position], strict=True)]
    finally:
        for sequence in sequences:
            engine.cache.release(sequence)
    return tokens
