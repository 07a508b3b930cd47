"""Smaller and faster ONNX graphs: int8 with activations quantised as they come, or 8-bit weights only.

`dynamic` is onnxruntime's dynamic quantisation: one activation scale for a whole tensor, so a row's product depends on
the rows it is computed with. `weights` rewrites matrix products as MatMulNBits: a scale belongs to a block of one row,
so a product does not, and its error is smaller. `half` stores matrices as float16 and computes in float32: half the
file, the same time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

__all__ = ["Precision", "quantise"]

_KINDS = ("fp32", "half", "dynamic", "weights")
_BLOCKS = (16, 32, 64, 128, 256)
_SMALLEST_TABLE = 1 << 20  # rows of small lookup tables are not worth three nodes a lookup
_SMALLEST_HALF = 1 << 10


@dataclass(frozen=True, slots=True)
class Precision:
    """How the matrices of a graph are stored and multiplied.

    Args:
        kind: `fp32`, `half` (float16 weights, float32 arithmetic), `dynamic` (int8 weights per channel, activations to
            8 bits as they come) or `weights` (8-bit weights in blocks).
        block: weights that share a scale, for `weights`.
        accuracy_level: least precision of the product, for `weights`: 0 the runtime's choice, 1 float32, 4 int8.

    Raises:
        ValueError: a field is out of range.
    """

    kind: str = "weights"
    block: int = 32
    accuracy_level: int = 4

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind: one of {', '.join(_KINDS)} is needed, not {self.kind!r}")
        if self.block not in _BLOCKS:
            raise ValueError(f"block: one of {', '.join(map(str, _BLOCKS))} is needed, not {self.block}")
        if self.accuracy_level not in range(5):
            raise ValueError(f"accuracy_level: 0 to 4 is needed, not {self.accuracy_level}")

    def __str__(self) -> str:
        return self.kind if self.kind != "weights" else f"weights/{self.block}/{self.accuracy_level}"


def quantise(source: Path, target: Path, precision: Precision) -> None:
    """Writes the graph `source` to `target` in another precision; large lookup tables become int8 rows."""
    if precision.kind == "dynamic":
        _quantise_dynamic(source, target)
        return
    model = onnx.load(source)
    if precision.kind == "weights":
        _quantise_matrices(model, precision)
        _quantise_tables(model)
    elif precision.kind == "half":
        _halve(model)
    onnx.save(model, target)


def _quantise_dynamic(source: Path, target: Path) -> None:
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it advises on the root logger to preprocess graphs that need none
    try:
        quantize_dynamic(
            source,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    finally:
        logger.setLevel(level)


def _halve(model: ModelProto) -> None:
    """Stores large float32 constants as float16 behind a cast, which the runtime folds when it opens the graph."""
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and np.prod(tensor.dims) >= _SMALLEST_HALF:
            half = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{tensor.name}_half")
            casts.append(helper.make_node("Cast", [half.name], [tensor.name], to=TensorProto.FLOAT))
            tensor.CopyFrom(half)
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _quantise_matrices(model: ModelProto, precision: Precision) -> None:
    """Rewrites each product with a constant matrix as com.microsoft.MatMulNBits of 8 bits."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        matrix = constants.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if matrix is None or len(matrix.dims) != 2:
            continue
        weights = numpy_helper.to_array(matrix)
        weights = weights if _is_linear(node) else weights.T
        codes, scales = _blocks(weights, precision.block)
        _add(model, {f"{matrix.name}_codes": codes, f"{matrix.name}_scales": scales.reshape(-1)})
        _become_nbits(node, matrix.name, weights.shape, precision)
    _drop_unused(model)
    if all(opset.domain != "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _is_linear(node: NodeProto) -> bool:
    """Whether a node multiplies with a matrix (N, K), as the tracer writes a linear layer with a bias."""
    fields = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "MatMul":
        return False
    if fields.get("transA", 0) or fields.get("alpha", 1.0) != 1.0 or fields.get("beta", 1.0) != 1.0:
        raise ValueError(f"{node.name}: only plain linear layers can be stored in 8 bits, not {fields}")
    return bool(fields.get("transB", 0))


def _blocks(weights: NDArray[np.float32], block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes (N, blocks, block) around 128 and scales (N, blocks) of weights (N, K)."""
    outputs, inputs = weights.shape
    padded = np.pad(weights, ((0, 0), (0, -inputs % block))).reshape(outputs, -1, block)
    scales = np.abs(padded).max(axis=-1) / 127.0
    scales[scales == 0.0] = 1.0
    codes = np.rint(padded / scales[..., None]) + 128.0
    return codes.astype(np.uint8), scales.astype(np.float32)


def _become_nbits(node: NodeProto, name: str, shape: tuple[int, ...], precision: Precision) -> None:
    bias = node.input[2:]
    node.op_type, node.domain = "MatMulNBits", "com.microsoft"
    del node.input[1:], node.attribute[:]
    node.input.extend([f"{name}_codes", f"{name}_scales"] + (["", "", *bias] if bias else []))
    fields = {"K": shape[1], "N": shape[0], "bits": 8, "block_size": precision.block}
    fields["accuracy_level"] = precision.accuracy_level
    node.attribute.extend(helper.make_attribute(key, value) for key, value in fields.items())


def _quantise_tables(model: ModelProto) -> None:
    """Stores the rows of large lookup tables as int8 with a scale each."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        table = constants.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or table.data_type != TensorProto.FLOAT or np.prod(table.dims) < _SMALLEST_TABLE:
            nodes.append(node)
        else:
            nodes.extend(_lookup(model, node, numpy_helper.to_array(table)))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    _drop_unused(model)


def _lookup(model: ModelProto, node: NodeProto, table: NDArray[np.float32]) -> list[NodeProto]:
    scales = np.abs(table).max(axis=1, keepdims=True) / 127.0
    scales[scales == 0.0] = 1.0
    codes = np.rint(table / scales).astype(np.int8)
    name, ids, out = node.input[0], node.input[1], node.output[0]
    _add(model, {f"{name}_codes": codes, f"{name}_scales": scales.astype(np.float32)})
    return [
        helper.make_node("Gather", [f"{name}_codes", ids], [f"{out}_codes"], axis=0),
        helper.make_node("Gather", [f"{name}_scales", ids], [f"{out}_scales"], axis=0),
        helper.make_node("Cast", [f"{out}_codes"], [f"{out}_wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{out}_wide", f"{out}_scales"], [out]),
    ]


def _add(model: ModelProto, arrays: dict[str, NDArray[Any]]) -> None:
    """Adds constants; a matrix that two nodes share is added once."""
    present = {tensor.name for tensor in model.graph.initializer}
    for name, array in arrays.items():
        if name not in present:
            model.graph.initializer.append(numpy_helper.from_array(array, name))


def _drop_unused(model: ModelProto) -> None:
    used = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
