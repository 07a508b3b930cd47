"""Several token caches as one data set, each with its share of the items whatever its size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from training.data.tokens import TokenCache

__all__ = ["MixedTokens", "check_shares"]


def check_shares(tokens: Sequence[object], shares: Sequence[float]) -> None:
    """Raises ValueError where there is not one positive share for each of the `tokens`."""
    if not tokens or len(shares) != len(tokens) or not all(share > 0.0 for share in shares):
        raise ValueError(f"shares must be above zero, one for each of {len(tokens)} tokens, got {list(shares)}")


class MixedTokens(Dataset[tuple[Tensor, Tensor, int]]):
    """Items of all caches; a round holds every item at least once, and those of a small cache several times.

    Args:
        caches: the caches.
        shares: share of the items that each gives; they need not sum to 1.

    Raises:
        ValueError: not one positive share for each cache, or caches of different shapes.
    """

    def __init__(self, caches: Sequence[TokenCache], shares: Sequence[float]) -> None:
        check_shares(caches, shares)
        shapes = {cache.folder: tuple(part.shape for part in cache[0][:2]) for cache in caches}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"caches of different shapes cannot be mixed: {shapes}")
        self._caches = list(caches)
        rounds = max(len(cache) / share for cache, share in zip(caches, shares, strict=True))
        self._ends = np.cumsum([round(share * rounds) for share in shares]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        cache = self._caches[number]
        return cache[(index - (self._ends[number - 1] if number else 0)) % len(cache)]
