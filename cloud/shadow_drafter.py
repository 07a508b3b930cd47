"""The shadow drafter: the cloud recomputes the rows a device drafted from, instead of receiving 4,096 floats a token.

It makes `mrs` and `block` exact as far as both ends compute the same rows: the same ONNX file, fed token by token as
the device does. Kernels of other processors may differ in the last bits; `gumbel` has no such condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.graphs import DrafterCache
from shared.sampling import SamplingSettings, probabilities, warp

__all__ = ["ShadowDrafter"]


class ShadowDrafter:
    """Draft rows of one generation.

    Args:
        cache: the drafter's graph with a cache of its own.
        features: caption features (length, width).
        sampling: the picture's warp; guidance is left out, since the drafter imitates guided rows.
    """

    def __init__(self, cache: DrafterCache, features: NDArray[np.float32], sampling: SamplingSettings) -> None:
        self._cache, self._features = cache, features
        self._sampling = sampling.unguided()
        self._fed: list[int] = []
        self._rows: list[NDArray[np.float32]] = []

    def probs(self, committed: Sequence[int], draft: Sequence[int]) -> NDArray[Any]:
        """Warped draft probabilities (n, V) of n drafted tokens behind the committed ones.

        Whatever was fed before and differs now (a rejected draft) is rolled back first.
        """
        wanted = [*committed, *draft]
        if not self._rows:
            self._rows = [self._cache.prefill(self._features).centre[0]]
        shared = next((i for i, pair in enumerate(zip(self._fed, wanted, strict=False)) if pair[0] != pair[1]), None)
        self._roll_back(min(len(self._fed), len(wanted)) if shared is None else shared)
        # One token at a time, as the device does: int8 kernels scale activations over all the rows they are given, so
        # rows computed together differ from rows computed one by one.
        for token in wanted[len(self._fed) : -1]:
            self._rows.append(self._cache.feed([token]).centre[0])
            self._fed.append(token)
        logits = np.stack(self._rows[len(committed) : len(wanted)])
        return np.asarray(probabilities(warp(logits, self._sampling)))

    def _roll_back(self, length: int) -> None:
        del self._fed[length:], self._rows[length + 1 :]
        self._cache.truncate(length)
