"""Interval features: what the device tells of a token it kept, and the code they travel in (methods.md 5.6).

| mode | a token costs | what it holds |
|---|---|---|
| none | 0 B | nothing |
| scalars | 6 B | float16: log-probability and radius of the token, log of the row's U * sqrt(V) |
| code64 | 64 B | int8: the interval encoder's code of hidden state and interval |
| full | 2 B a number of the target's width | float16: the interval encoder's vector |
"""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from shared.errors import ProtocolError
from shared.intervals import interval_measures, probability_bounds, score

__all__ = [
    "CODE_WIDTH",
    "FEATURE_MODES",
    "SCALARS",
    "encoder_graph",
    "feature_width",
    "interval_scalars",
    "pack",
    "unpack",
]

FEATURE_MODES = ("none", "scalars", "code64", "full")
CODE_WIDTH = 64
SCALARS = 7
"""Numbers that `interval_scalars` gives; the encoder's input beside the hidden state."""

_SHORT = 3
_TYPES: dict[str, Any] = {"scalars": np.dtype("<f2"), "code64": np.dtype("i1"), "full": np.dtype("<f2")}


def feature_width(mode: str, dim: int) -> int:
    """Numbers a token's feature has in a mode; `dim` is the target's width."""
    return {"none": 0, "scalars": _SHORT, "code64": CODE_WIDTH, "full": dim}[mode]


def encoder_graph(mode: str) -> str | None:
    """File of a bundle that holds the interval encoder of a mode; None for modes without one."""
    return f"interval_encoder_{mode}.onnx" if mode in ("code64", "full") else None


def interval_scalars(log_probs: Any, radius: Any, tokens: Any) -> Any:
    """What an interval says of the drawn tokens, (..., 7) float32, all of the order of one.

    Log-probability, radius, log U * sqrt(V), lower and upper log-odds, Omega, entropy. The first three are what mode
    `scalars` sends.

    Args:
        log_probs: draft log-probabilities (..., V).
        radius: (..., V) or (..., 1).
        tokens: the drawn tokens (...).
    """
    xp = array_api_compat.array_namespace(log_probs)
    vocabulary = log_probs.shape[-1]
    measures = interval_measures(log_probs, radius)
    place = xp.expand_dims(tokens, axis=-1)
    own = xp.take_along_axis(log_probs, place, axis=-1)
    width = xp.take_along_axis(radius, place, axis=-1) if radius.shape[-1] == vocabulary else radius
    low, high = probability_bounds(own, width)
    uncertainty = xp.log(score("interval", measures, vocabulary) + 1e-6)
    columns = [
        own[..., 0],
        width[..., 0],
        uncertainty,
        xp.log(low[..., 0] + 1e-9),
        xp.log(high[..., 0] + 1e-9),
        measures[..., 0],
        measures[..., 2],
    ]
    return xp.stack([xp.astype(column, xp.float32) for column in columns], axis=-1)


def pack(mode: str, values: NDArray[Any]) -> bytes:
    """The wire form of features (n, width). `code64` takes integers -127..127."""
    if mode == "none":
        return b""
    kind = _TYPES[mode]
    if kind.kind == "f":
        values = np.clip(values, -6e4, 6e4)
    return np.ascontiguousarray(values, dtype=kind).tobytes()


def unpack(mode: str, data: bytes, count: int, dim: int) -> NDArray[np.float32]:
    """Features (count, width) of their wire form, float32.

    Raises:
        ProtocolError: the number of bytes is not that of `count` features, or a number is not finite.
    """
    width = feature_width(mode, dim)
    size = width * _TYPES[mode].itemsize if width else 0
    if len(data) != count * size:
        raise ProtocolError(f"features: {count} tokens in mode {mode} take {count * size} bytes, {len(data)} came")
    if not width:
        return np.zeros((count, 0), np.float32)
    values = np.frombuffer(data, _TYPES[mode]).astype(np.float32).reshape(count, width)
    if not np.isfinite(values).all():
        raise ProtocolError("features: a number is not finite")
    return values
