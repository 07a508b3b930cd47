"""Counter-based noise: the same numbers on every machine, in numpy and in torch, without any state.

A draw is named by (seed, purpose, position, round, lane). The generator is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011). Its integers are computed in wrapping 64-bit signed arithmetic, which
numpy and torch share, so both libraries give the same integers; floats may differ in the last bit of a logarithm.

Rules that draw afresh at every attempt (mrs, block, relaxed rules) pass the attempt as `round`: a key without it
re-uses a number the outcome already depends on, which biases block verification silently.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import array_api_compat
import numpy as np

__all__ = ["Purpose", "bits", "fresh_seed", "gumbel", "uniform"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0
    """The Gumbel noise shared by device and cloud: a token of the picture."""
    DRAFT = 1
    """The device's own draws under rules that need an independent draft."""
    ACCEPT = 2
    """Accept-or-reject uniforms."""
    RESIDUAL = 3
    """Replacements of rejected tokens, and bonus tokens."""
    AUDIT = 4
    """Choice of the kept tokens that are judged after the fact."""
    SCORE = 5
    """Uncertainty scores of the baseline that chooses tokens at random."""


def fresh_seed() -> int:
    """A seed from the operating system, 0..2**32-1, short enough to be read and typed again."""
    return secrets.randbits(32)


def _philox(counter: Sequence[Any], key: tuple[int, int]) -> list[Any]:
    """Ten rounds of Philox4x32 on int64 arrays that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def bits(
    seed: int, purpose: int, positions: Sequence[int], lanes: int, *, round: int = 0, xp: Any = np, device: Any = None
) -> Any:
    """32-bit words, independent for each (seed, purpose, position, round, lane).

    Args:
        seed: 0..2**64-1.
        purpose: a `Purpose` (any integer 0..255).
        positions: positions in the grid, each 0..2**32-1.
        lanes: numbers wanted at each position, usually the vocabulary size.
        round: attempt number, for rules that draw afresh at each attempt.
        xp: array namespace (numpy or torch).
        device: device of the result, for torch.

    Returns:
        int64 array (len(positions), lanes) of words 0..2**32-1.

    Raises:
        ValueError: seed, purpose, round or lanes out of range.
    """
    _check("seed", seed, 2**64)
    _check("purpose", purpose, 2**8)
    _check("round", round, 2**24)
    if lanes < 1:
        raise ValueError(f"lanes: at least 1 is needed, not {lanes}")
    xp = array_api_compat.array_namespace(xp.zeros(1)) if xp is not np else np
    blocks = -(-lanes // 4)
    kind = {"dtype": xp.int64} | ({"device": device} if device is not None else {})
    where = xp.reshape(xp.asarray(list(positions), **kind), (-1, 1))
    block = xp.reshape(xp.arange(blocks, **kind), (1, -1))
    flat = where * 0 + block * 0
    words = _philox(
        (block + where * 0, where + block * 0, flat + int(round), flat + int(purpose)), (seed & _WORD, seed >> 32)
    )
    stacked = xp.stack(words, axis=-1)
    return xp.reshape(stacked, (stacked.shape[0], blocks * 4))[:, :lanes]


def uniform(
    seed: int, purpose: int, positions: Sequence[int], lanes: int, *, round: int = 0, xp: Any = np, device: Any = None
) -> Any:
    """Uniform numbers in the open interval (0, 1), float64 array (len(positions), lanes). See `bits`."""
    words = bits(seed, purpose, positions, lanes, round=round, xp=xp, device=device)
    space = array_api_compat.array_namespace(words)
    return (space.astype(words, space.float64) + 0.5) * (1.0 / 2**32)


def gumbel(
    seed: int, purpose: int, positions: Sequence[int], lanes: int, *, round: int = 0, xp: Any = np, device: Any = None
) -> Any:
    """Standard Gumbel numbers, float32 array (len(positions), lanes): argmax(log probs + gumbel) is a sample.

    See `bits` for the arguments.
    """
    draws = uniform(seed, purpose, positions, lanes, round=round, xp=xp, device=device)
    space = array_api_compat.array_namespace(draws)
    return space.astype(-space.log(-space.log(draws)), space.float32)


def _check(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise ValueError(f"{name}: 0..2**{int(math.log2(limit))}-1 is needed, not {value}")
