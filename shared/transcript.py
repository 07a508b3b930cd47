"""The transcript: the committed tokens of a picture and where each came from. It is the whole state of a generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from shared.errors import ProtocolError
from shared.grid import Grid

__all__ = ["Provenance", "Transcript", "check_ids"]


class Provenance(IntEnum):
    """Where a committed token came from."""

    SAMPLED = 0
    """Sampled by the cloud without a draft: the prefix, `ar`, and bonus tokens."""
    KEPT = 1
    """Drafted and kept on the device."""
    VERIFIED = 2
    """Drafted on the device and accepted by the cloud."""
    CORRECTED = 3
    """Drafted on the device and replaced by the cloud."""
    DEGRADED = 4
    """Kept on the device because the link was lost, not because the device was sure."""
    RELAXED = 5
    """Accepted by a relaxed rule where the lossless one would have rejected."""


class Transcript:
    """Committed tokens in raster order, from position 0 without gaps.

    Args:
        grid: the picture's token grid.
        vocabulary: number of visual tokens; ids are 0..vocabulary-1.
    """

    __slots__ = ("_provenance", "_tokens", "grid", "vocabulary")

    def __init__(self, grid: Grid, vocabulary: int) -> None:
        self.grid = grid
        self.vocabulary = vocabulary
        self._tokens: list[int] = []
        self._provenance: list[Provenance] = []

    @classmethod
    def restore(cls, grid: Grid, vocabulary: int, tokens: Sequence[int], provenance: bytes) -> Transcript:
        """Builds a transcript from its wire form: ids, and one provenance byte a token.

        Raises:
            ProtocolError: the lengths differ, or an id or a provenance byte is out of range.
        """
        if len(tokens) != len(provenance):
            raise ProtocolError(f"transcript: {len(tokens)} tokens but {len(provenance)} provenance bytes")
        known = {int(kind) for kind in Provenance}
        for position, byte in enumerate(provenance):
            if byte not in known:
                raise ProtocolError(f"transcript: provenance {byte} at position {position} is unknown")
        transcript = cls(grid, vocabulary)
        transcript.extend(tokens, [Provenance(byte) for byte in provenance])
        return transcript

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """A copy of the committed ids."""
        return list(self._tokens)

    @property
    def provenance(self) -> list[Provenance]:
        """A copy of the provenance of each committed token."""
        return list(self._provenance)

    @property
    def complete(self) -> bool:
        return len(self) == self.grid.size

    def since(self, position: int) -> list[int]:
        """Committed ids from `position` on."""
        return self._tokens[position:]

    def append(self, token: int, provenance: Provenance) -> None:
        """Commits one token; see `extend`."""
        self.extend([token], [provenance])

    def extend(self, tokens: Iterable[int], provenance: Iterable[Provenance] | Provenance) -> None:
        """Commits tokens at the next positions.

        Args:
            tokens: ids.
            provenance: one for all, or one for each.

        Raises:
            ProtocolError: an id is out of range, the grid has no room, or lengths differ; nothing is committed then.
        """
        new = [int(token) for token in tokens]
        kinds = [provenance] * len(new) if isinstance(provenance, Provenance) else list(provenance)
        if len(kinds) != len(new):
            raise ProtocolError(f"transcript: {len(new)} tokens but {len(kinds)} provenances")
        if len(self) + len(new) > self.grid.size:
            raise ProtocolError(f"transcript: {len(self)} + {len(new)} tokens exceed the {self.grid} grid")
        check_ids(new, len(self), self.vocabulary)
        self._tokens += new
        self._provenance += kinds

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on.

        Raises:
            ValueError: `length` is negative.
        """
        if length < 0:
            raise ValueError(f"length: at least 0 is needed, not {length}")
        del self._tokens[length:], self._provenance[length:]

    def count(self, provenance: Provenance) -> int:
        return self._provenance.count(provenance)

    def provenance_bytes(self) -> bytes:
        """The wire form of the provenance: one byte a token."""
        return bytes(self._provenance)


def check_ids(ids: Sequence[int], start: int, vocabulary: int) -> None:
    """Raises ProtocolError when an id lies outside 0..vocabulary-1; the message names id and position."""
    for offset, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            where = f"token id {token} at position {start + offset}"
            raise ProtocolError(f"{where} is outside the vocabulary 0..{vocabulary - 1}")
