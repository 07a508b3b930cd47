"""Cheaper graph operations for the drafter's step: what a step costs on a CPU is mostly the number of its nodes.

Each function here stands for one of the decoder's while that is traced. Torch computes what it always does, and the
graph gets one of onnxruntime's nodes instead of a dozen. Optimum puts `specs()` in place for the time of an export.
"""

from __future__ import annotations

from typing import Any

import torch
from optimum.exporters.onnx.model_patcher import PatchingSpec
from torch import Tensor

from cloud.models import transformer
from cloud.models.transformer import Transformer

__all__ = ["specs"]

_rms_norm, _rotate = transformer.RMSNorm.forward, transformer.rotate
_flatten, _unflatten, _chunk = Tensor.flatten, Tensor.unflatten, Tensor.chunk


def specs() -> list[PatchingSpec]:
    """What optimum swaps while it traces a decoder."""
    return [
        PatchingSpec(transformer.RMSNorm, "forward", _norm, _rms_norm),
        PatchingSpec(transformer.HeadNorm, "forward", _head_norm, transformer.HeadNorm.forward),
        PatchingSpec(transformer, "rotate", _turn, _rotate),
        PatchingSpec(Transformer, "_with_position", _with_position, Transformer._with_position),
        PatchingSpec(Tensor, "flatten", _flat, _flatten),
        PatchingSpec(Tensor, "unflatten", _unflat, _unflatten),
        PatchingSpec(Tensor, "chunk", _parts, _chunk),
    ]


class _Norm(torch.autograd.Function):
    """RMSNorm in one node; SimplifiedLayerNormalization is onnxruntime's name for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # x (rows, dim)
        return torch.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def symbolic(g: Any, x: Any, weight: Any, eps: float) -> Any:
        node = g.op("SimplifiedLayerNormalization", x, weight, axis_i=-1, epsilon_f=eps, stash_type_i=1)
        node.setType(x.type().with_sizes([None, *weight.type().sizes()]))
        return node


class _Turn(torch.autograd.Function):
    """Rotary positions of (rows, heads, head_dim) in one node; it counts from 0, so it gets cosines of these rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, shape: list[int]) -> Tensor:
        return _rotate(x, torch.stack([cos, sin], dim=-1), "interleaved" if interleaved else "half")

    @staticmethod
    def symbolic(g: Any, x: Any, cos: Any, sin: Any, interleaved: bool, shape: list[int]) -> Any:
        rows = _reshape(g, x, [1, -1, shape[0] * shape[1]])
        start = g.op("Constant", value_t=torch.zeros(1, dtype=torch.int64))
        turned = g.op("com.microsoft::RotaryEmbedding", rows, start, cos, sin, interleaved_i=int(interleaved))
        turned.setType(rows.type())
        return _reshape(g, turned, [-1, *shape])


class _Reshape(torch.autograd.Function):
    """Reshape to a constant shape, whose zeros keep a dimension: the tracer would compute shapes from shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int]) -> Tensor:
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])

    @staticmethod
    def symbolic(g: Any, x: Any, shape: list[int]) -> Any:
        return _reshape(g, x, shape)


def _reshape(g: Any, x: Any, shape: list[int]) -> Any:
    # Behind an identity, torch does not look at the constant: it rejects zeros without a -1, which empty rows forbid.
    node = g.op("Reshape", x, g.op("Identity", g.op("Constant", value_t=torch.tensor(shape))))
    node.setType(x.type().with_sizes([size if size > 0 else None for size in shape]))
    return node


def _norm(self: transformer.RMSNorm, x: Tensor) -> Tensor:
    return _Norm.apply(x, self.weight, self.eps)


def _head_norm(self: transformer.HeadNorm, x: Tensor) -> Tensor:
    # The tracer wants the normalised shape as a constant: a parameter's shape is one, an activation's is not.
    return torch.layer_norm(x, self.weight.shape[-1:]) * self.weight + self.bias


def _turn(x: Tensor, table: Tensor, layout: str) -> Tensor:
    cos, sin = table.unbind(-1)
    return _Turn.apply(x, cos, sin, layout == "interleaved", [int(size) for size in x.shape[-2:]])


def _with_position(self: Transformer, rows: Tensor, indices: Tensor) -> Tensor:
    """A lookup in a table with zeros for the rows that predict no position, instead of clamping and masking."""
    if self.config.position_embedding == "none":
        return rows
    table = torch.nn.functional.pad(self.position_embedding, (0, 0, self.config.prefix_rows - 1, 1))
    return rows + table[indices]


def _unflat(self: Tensor, dim: int, sizes: Any) -> Tensor:
    if dim != -1:
        return _unflatten(self, dim, sizes)
    return _Reshape.apply(self, [0] * (self.dim() - 1) + [int(size) for size in sizes])


def _flat(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if start_dim >= 0 or end_dim != -1:
        return _flatten(self, start_dim, end_dim)
    width = 1
    for size in self.shape[start_dim:]:
        width *= int(size)
    return _Reshape.apply(self, [0] * (self.dim() + start_dim) + [width])


def _parts(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return self.split(int(self.shape[dim]) // chunks, dim)
