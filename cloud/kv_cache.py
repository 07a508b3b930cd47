"""Keys and values of all generations: static slots, a row of the slot for each guidance branch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cloud.models.transformer import TransformerConfig
from shared.errors import BusyError

__all__ = ["KVCache", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """A generation's place in the cache.

    Args:
        slot: index of the slot.
        branches: 2 when guided (conditional first, then unconditional), else 1.
        length: rows that hold keys and values. Rolling back is setting it: both branches roll back together, and what
            lies behind is overwritten before it is read.
        summary: what the decoder adds to all of its rows (branches, 1, dim); None where the decoder has no summaries.
    """

    slot: int
    branches: int
    length: int = 0
    summary: Tensor | None = None

    def truncate(self, length: int) -> None:
        """Rolls back to `length` rows.

        Raises:
            ValueError: the sequence does not hold that many rows.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} rows to {length}")
        self.length = length


class KVCache:
    """Slots indexed by sequence row.

    Args:
        config: shape of the decoder.
        slots: generations that fit at once.
        dtype, device: of keys and values.
    """

    def __init__(self, config: TransformerConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.branches = 2
        shape = (slots * self.branches * config.length, 2, config.kv_heads, config.head_dim)
        # Zeros, not uninitialised memory: a masked NaN would still poison a softmax.
        self._flat = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self._by_row = [flat.unflatten(0, (slots * self.branches, config.length)) for flat in self._flat]
        self._free = list(range(slots))[::-1]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self, guided: bool) -> Sequence:
        """Takes a slot.

        Raises:
            BusyError: every slot is taken.
        """
        if not self._free:
            raise BusyError("every slot of the verifier is taken; try again later or raise --max-sessions")
        return Sequence(self._free.pop(), 2 if guided else 1)

    def release(self, sequence: Sequence) -> None:
        """Gives the slot back.

        Raises:
            ValueError: it was given back already.
        """
        if sequence.slot in self._free:
            raise ValueError(f"slot {sequence.slot} was released already")
        self._free.append(sequence.slot)

    def flat_rows(self, sequence: Sequence, indices: Tensor) -> Tensor:
        """Where the rows `indices` of each branch lie in the flat cache, branch after branch."""
        first = torch.arange(sequence.branches).unsqueeze(1) + sequence.slot * self.branches
        return (first * self.config.length + indices).flatten()

    def write(self, layer: int, flat_rows: Tensor, keys_values: Tensor) -> None:
        """Writes keys and values (rows, 2, kv_heads, head_dim) of several sequences at once."""
        self._flat[layer].index_copy_(0, flat_rows, keys_values)

    def read(self, layer: int, sequence: Sequence, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` rows: views (branches, kv_heads, length, head_dim)."""
        first = sequence.slot * self.branches
        rows = self._by_row[layer].narrow(0, first, sequence.branches).narrow(1, 0, length)
        keys, values = rows.transpose(1, 3).unbind(2)
        return keys, values
