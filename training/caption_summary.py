"""How the caption summary of a decoder starts: with captions that are already told apart.

Mean rows of a text encoder lie close together and mostly differ in a few directions, so a plain start lets a decoder
learn what captions have in common, and colours, long before it learns what each one asks for.
"""

from __future__ import annotations

import torch
from torch import nn

from cloud.models.transformer import Transformer, caption_means
from training.captioned_tokens import first_items
from training.data.tokens import TokenCache

__all__ = ["start_summary"]

_CAPTIONS = 4000
_SHRINK = 0.02  # of the strongest direction: what varies less than that is noise and is not blown up
_SCALE = 0.25  # of the summaries: well above the embeddings' start, so that rows begin as combinations of both


@torch.no_grad()
def start_summary(model: Transformer, cache: TokenCache) -> None:
    """Makes the summary's first layer whiten the captions of a cache, and its output `_SCALE` long in each dimension.

    Draws from torch's generator. Does nothing for a decoder without a summary.
    """
    if not model.config.summary_dim:
        return
    features, lengths, _ = first_items(cache, _CAPTIONS)
    means = caption_means(features, lengths)
    centre = means.mean(0)
    _, spread, directions = torch.linalg.svd((means - centre) / len(means) ** 0.5, full_matrices=False)
    whitening = directions.T / (spread + _SHRINK * spread[0]).clamp_min(torch.finfo(spread.dtype).tiny)
    first, last = model.caption_summary[0], model.caption_summary[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    mixed = torch.randn(model.config.summary_dim, whitening.shape[1]) * whitening.shape[1] ** -0.5
    first.weight.copy_(mixed @ whitening.T)
    first.bias.copy_(-first.weight @ centre)
    last.weight.normal_()
    last.weight.mul_(_SCALE / model.summary(means).square().mean().sqrt())
