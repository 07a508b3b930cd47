"""Exports modules to ONNX through optimum, checks them against torch, and opens what was written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime
import torch
from optimum.exporters.onnx import OnnxConfig, export, validate_model_outputs
from optimum.exporters.onnx.model_patcher import PatchingSpec
from optimum.utils import NormalizedConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

__all__ = ["OPSET", "GraphConfig", "export_module", "open_graph"]

OPSET = 20  # the first with Gelu; onnxruntime 1.17 reads it

Axes = dict[int, str]
DummyInputs = dict[str, Tensor | list[Tensor]]


class GraphConfig(OnnxConfig):
    """Describes a module of ours to optimum.

    A list among the inputs, such as `past`, becomes inputs `past_0`, `past_1`, ... of the graph.

    Args:
        inputs: dynamic axes of each argument of `forward`; the list inputs under their numbered names.
        outputs: dynamic axes of each value `forward` returns, in order.
        dummy: makes inputs to trace and to validate with.
        patches: functions to swap while the module is traced, see optimum's `PatchingSpec`.
    """

    NORMALIZED_CONFIG_CLASS = NormalizedConfig

    def __init__(
        self,
        inputs: dict[str, Axes],
        outputs: dict[str, Axes],
        dummy: Callable[[], DummyInputs],
        patches: Sequence[PatchingSpec] = (),
    ) -> None:
        super().__init__(PretrainedConfig())
        self._inputs, self._outputs, self._dummy = inputs, outputs, dummy
        self.PATCHING_SPECS = list(patches)

    @property
    def inputs(self) -> dict[str, Axes]:
        # optimum finds the members of a list argument by a dot, which is no good in the graph's own names.
        return {name.replace("_", ".") if name[-1].isdigit() else name: axes for name, axes in self._inputs.items()}

    @property
    def torch_to_onnx_input_map(self) -> dict[str, str]:
        return {name: renamed for name, renamed in zip(self.inputs, self._inputs, strict=True) if name != renamed}

    @property
    def outputs(self) -> dict[str, Axes]:
        return self._outputs

    @classmethod
    def flatten_output_collection_property(cls, name: str, field: Sequence[Any]) -> dict[str, Any]:
        return {f"{name}_{index}": item for index, item in enumerate(field)}

    def generate_dummy_inputs(self, framework: str = "pt", **kwargs: Any) -> dict[str, Any]:
        tensors = self._dummy()
        if framework == "pt":
            return tensors
        return {k: [x.numpy() for x in v] if isinstance(v, list) else v.numpy() for k, v in tensors.items()}


def export_module(
    module: nn.Module,
    config: OnnxConfig,
    path: Path,
    tolerance: float = 1e-4,
    tolerances: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Writes a module as ONNX, and has optimum compare both on dummy inputs.

    Args:
        module: in evaluation mode, float32, on the CPU.
        config: optimum's description of inputs, outputs and dynamic axes.
        path: file to write.
        tolerance: largest absolute difference of an output.
        tolerances: those of single outputs, by name.

    Raises:
        ValueError: the graph's outputs differ from the module's by more (optimum's message says which and by how much).
    """
    if not hasattr(module, "config"):
        module.config = PretrainedConfig()  # optimum sets fields of it
    with _quiet(), torch.no_grad():
        _, outputs = export(module, config, path, opset=OPSET)
        for allowed in {tolerance, *tolerances.values()}:
            alike = [name for name in outputs if tolerances.get(name, tolerance) == allowed]
            validate_model_outputs(config, module, path, alike, atol=allowed, use_subprocess=False)


def open_graph(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """An inference session on the CPU with a fixed number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Mutes the tracer's warnings about shapes that are constant on purpose, and of its own deprecation."""
    with warnings.catch_warnings():
        for category in (torch.jit._trace.TracerWarning, UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield
