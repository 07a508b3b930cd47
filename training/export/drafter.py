"""The drafter as one ONNX graph with its key/value cache as inputs and outputs (see `shared.graphs.DrafterCache`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cloud.models.drafter import Drafter
from cloud.models.transformer import TransformerConfig
from training.export.graphs import DummyInputs, GraphConfig, export_module

__all__ = ["DrafterStep", "export_drafter"]

_DUMMY_PAST, _DUMMY_TOKENS = 5, 3


class CachedAttention:
    """Attends to the past rows of a layer and, causally, to the new ones; collects the new rows as `present`.

    Args:
        past: rows (batch, past, 2*kv_heads*head_dim) of each layer.
        new_rows: how many rows are fed.
    """

    def __init__(self, past: Sequence[Tensor], new_rows: int) -> None:
        self._past = past
        past_rows = past[0].shape[1]
        ahead = torch.arange(past_rows + new_rows) > (past_rows + torch.arange(new_rows)).unsqueeze(1)
        self._mask = torch.zeros(()).masked_fill(ahead, -torch.inf)
        self.present: list[Tensor] = []

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        new = keys_values.flatten(-3)
        self.present.append(new)
        shape = keys_values.shape[-3:]
        keys, values = torch.cat([self._past[layer], new], dim=1).unflatten(-1, shape).unbind(-3)
        group = queries.shape[-2] // keys.shape[-2]
        # (batch, kv_heads, group, rows, head_dim): the query heads of a group share the keys without copying them.
        q = queries.unflatten(-2, (keys.shape[-2], group)).permute(0, 2, 3, 1, 4)
        k, v = keys.permute(0, 2, 3, 1).unsqueeze(2), values.permute(0, 2, 1, 3).unsqueeze(2)
        scores = (q * queries.shape[-1] ** -0.5) @ k + self._mask
        return (scores.softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(-3)


class DrafterStep(nn.Module):
    """One call of the exported drafter: caption rows if there are any, then tokens, behind the past rows.

    Args:
        drafter: trained drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, caption: Tensor, caption_length: Tensor, tokens: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Rows of p caption rows and n tokens that follow the past rows.

        Args:
            caption: features (batch, p, caption_dim); p is `prefix_rows` to begin a picture, else 0.
            caption_length: caption lengths (batch,); features past them are ignored.
            tokens: visual tokens (batch, n).
            past: cache (batch, past, 2*kv_heads*head_dim) of each layer.

        Returns:
            centre (batch, p+n, V), radius (batch, p+n, V or 1), hidden (batch, p+n, dim), and for each layer the new
            rows of the cache (batch, p+n, 2*kv_heads*head_dim).
        """
        model = self.drafter.transformer
        prefix_rows, new_rows = caption.shape[1], caption.shape[1] + tokens.shape[1]
        indices = past[0].shape[1] + torch.arange(new_rows)
        prefix = model.prefix(caption, caption_length)
        x = torch.cat([prefix, model.embed(tokens, indices[prefix_rows:])], dim=1)
        attention = CachedAttention(past, new_rows)
        rows = self.drafter.rows(model.run(x, indices, attention))
        return rows.centre, rows.radius, rows.hidden, *attention.present


def export_drafter(drafter: Drafter, path: Path, tolerance: float = 1e-4) -> None:
    """Writes a drafter as a float32 graph, validated against torch on random inputs.

    Raises:
        ValueError: an output of the graph differs from torch's by more than `tolerance`.
    """
    config = drafter.config.transformer
    rows = {0: "batch", 1: "rows"}
    inputs = {"caption": {0: "batch", 1: "caption_rows"}, "caption_length": {0: "batch"}}
    inputs |= {"tokens": {0: "batch", 1: "token_rows"}}
    inputs |= {f"past_{layer}": {0: "batch", 1: "past_rows"} for layer in range(config.layers)}
    outputs = dict.fromkeys(("centre", "radius", "hidden"), rows)
    outputs |= {f"present_{layer}": rows for layer in range(config.layers)}
    step = DrafterStep(drafter.float().cpu().eval())
    export_module(step, GraphConfig(inputs, outputs, lambda: _dummy(config)), path, tolerance)


def _dummy(config: TransformerConfig) -> DummyInputs:
    """Inputs where every dynamic axis has a length of its own, so that none is mistaken for a constant or another."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * config.kv_heads * config.head_dim
    tokens = min(_DUMMY_TOKENS, config.rows * config.cols - 1)
    past = min(_DUMMY_PAST, config.rows * config.cols - tokens)
    return {
        "caption": torch.randn(2, config.prefix_rows, config.caption_dim, generator=generator),
        "caption_length": torch.tensor([max(1, config.prefix_rows - 1), 1]),
        "tokens": torch.randint(config.vocabulary, (2, tokens), generator=generator),
        "past": [torch.randn(2, past, width, generator=generator) for _ in range(config.layers)],
    }
