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
    engine: Engine,
    features: Sequence[Tensor],
    sampling: SamplingSettings,
    seeds: Sequence[int],
    begun: Sequence[Tensor] | None = None,
) -> Tensor:
    """Draws one picture for each caption, as `ar` would with the same seed.

    Args:
        engine: runs the target; needs a slot for each caption.
        features: caption features (length, width) of each picture.
        sampling: the warp.
        seeds: one for each picture.
        begun: tokens (any length,) that each picture begins with instead of drawn ones.

    Returns:
        tokens (pictures, T), int64.
    """
    size, cols, vocabulary = engine.config.grid.size, engine.config.cols, engine.config.vocabulary
    sequences = [engine.cache.allocate(guided=sampling.guidance != 1.0) for _ in features]
    tokens = torch.empty(len(features), size, dtype=torch.int64)
    known = _known(begun or [], tokens)
    try:
        feeds = [Feed(s, caption=Caption(f)) for s, f in zip(sequences, features, strict=True)]
        for position in range(size):
            logits = torch.stack([rows.logits[:, -1] for rows in engine.forward(feeds)])
            guided = guide(logits[:, 0], logits[:, -1], sampling.guidance)
            if position % cols == 0:  # a row of the grid in one call: many small calls would cost more than the target
                places = range(position, position + cols)
                draws = torch.stack([noise.gumbel(s, Purpose.TOKEN, places, vocabulary, xp=torch) for s in seeds])
            drawn = coupled_sample(warp(guided.cpu(), sampling), draws[:, position % cols])
            tokens[:, position] = torch.where(known[:, position] < 0, drawn, known[:, position])
            feeds = [Feed(s, [int(t)]) for s, t in zip(sequences, tokens[:, position], strict=True)]
    finally:
        for sequence in sequences:
            engine.cache.release(sequence)
    return tokens


def _known(begun: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The tokens that pictures begin with, in the shape of all tokens; -1 where a token is to be drawn."""
    known = torch.full_like(tokens, -1)
    for row, first in enumerate(begun):
        known[row, : len(first)] = first
    return known
