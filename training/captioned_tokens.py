"""Batches of the token cache, as target and drafter take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from cloud.models.transformer import UNREAD

__all__ = ["CaptionedTokens", "collate", "corrupt_context", "drop_captions", "drop_context", "first_items"]

CaptionedTokens = tuple[Tensor, Tensor, Tensor]
"""Caption features (batch, rows, width), caption lengths (batch,), tokens (batch, T)."""


def collate(items: list[tuple[Tensor, Tensor, int]]) -> CaptionedTokens:
    """Stacks items of a `TokenCache`."""
    tokens, features, lengths = default_collate(items)
    return features, lengths, tokens


def drop_captions(lengths: Tensor, share: float) -> Tensor:
    """Lengths (batch,) with a random share set to 0: the unconditional branch of guidance."""
    return torch.where(torch.rand(lengths.shape, device=lengths.device) < share, 0, lengths)


def corrupt_context(tokens: Tensor, share: float, vocabulary: int) -> Tensor:
    """Tokens (batch, T) to feed, some replaced by random ones, in a random share of the pictures.

    Of a touched picture a part between none and all is replaced, drawn anew for each. A decoder that always reads true
    tokens has never seen an error such as its own samples hold.
    """
    touched = torch.rand(len(tokens), 1, device=tokens.device) < share
    part = torch.rand(len(tokens), 1, device=tokens.device) * touched
    replaced = torch.rand(tokens.shape, device=tokens.device) < part
    return torch.where(replaced, torch.randint_like(tokens, vocabulary), tokens)


def drop_context(tokens: Tensor, share: float) -> Tensor:
    """Tokens (batch, T) to feed, with all of a random share of the pictures `UNREAD`: the caption has to be enough.

    True tokens tell a decoder which drawing it is in, so that it learns to continue drawings long before it learns
    which one a caption asks for.
    """
    dropped = torch.rand(len(tokens), 1, device=tokens.device) < share
    return torch.where(dropped, UNREAD, tokens)


def first_items(cache: Dataset[tuple[Tensor, Tensor, int]], count: int) -> CaptionedTokens:
    """The first items of a cache as one batch."""
    part = Subset(cache, range(min(count, len(cache))))  # type: ignore[arg-type]
    return collate([part[index] for index in range(len(part))])
