"""The device's interval encoders as ONNX graphs: what is sent of a kept token in the modes `code64` and `full`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from optimum.exporters.onnx.model_patcher import PatchingSpec
from torch import Tensor, nn

from cloud.models.interval_adapter import IntervalEncoder, IntervalFeatures
from shared.features import SCALARS, encoder_graph
from training.graphs import GraphConfig, export_module

__all__ = ["export_interval_encoder", "export_interval_encoders"]

_ROWS = {0: "rows"}
_DUMMY_ROWS = 5
_asinh = torch.asinh


class _Encode(nn.Module):
    def __init__(self, encoder: IntervalEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, hidden: Tensor, scalars: Tensor) -> Tensor:
        code: Tensor = self.encoder(hidden, scalars)
        return code


class _Asinh(torch.autograd.Function):
    """A node of ONNX that torch's tracer does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _asinh(x)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        node = g.op("Asinh", x)
        node.setType(x.type())
        return node


def export_interval_encoders(features: IntervalFeatures, folder: Path) -> None:
    """Writes a graph for each mode that has an encoder, under the name that `shared.features` gives it."""
    for mode, encoder in features.encoders.items():
        name = encoder_graph(mode)
        assert isinstance(encoder, IntervalEncoder)
        assert name is not None
        export_interval_encoder(encoder, folder / name)


def export_interval_encoder(encoder: IntervalEncoder, path: Path) -> None:
    """Writes an encoder as a float32 graph: hidden (n, draft_dim), scalars (n, 7) -> code (n, width), for any n.

    Raises:
        ValueError: the graph's code differs from torch's (optimum's message says by how much).
    """
    config = encoder.config
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_DUMMY_ROWS, config.draft_dim, generator=generator)
    scalars = torch.randn(_DUMMY_ROWS, SCALARS, generator=generator)
    graph = GraphConfig(
        {"hidden": _ROWS, "scalars": _ROWS},
        {"code": _ROWS},
        lambda: {"hidden": hidden, "scalars": scalars},
        [PatchingSpec(torch, "asinh", _Asinh.apply, _asinh)],
    )
    # A code that lies between two integers may be rounded to either.
    export_module(_Encode(encoder.float().cpu().eval()), graph, path, 1e-4 if config.mode == "full" else 1.0)
