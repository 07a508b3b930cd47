"""The drafter as one ONNX graph with its key/value cache as inputs and outputs (see `shared.graphs.DrafterCache`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from cloud.models.drafter import Drafter
from cloud.models.transformer import TransformerConfig
from shared.intervals import interval_measures
from training.export.fused import specs
from training.graphs import DummyInputs, GraphConfig, export_module

__all__ = ["DrafterStep", "export_drafter"]

_DUMMY_PAST, _DUMMY_TOKENS = 5, 3


class CachedAttention:
    """Attends to the past rows of a layer and, causally, to the new ones; collects the new rows as `present`.

    Past and new rows are multiplied apart and only the scores are joined: to join the rows would copy the cache.

    Args:
        past: keys and values of the layers in turn, each (past, kv_heads*head_dim).
        new_rows: how many rows are fed.
    """

    def __init__(self, past: Sequence[Tensor], new_rows: int) -> None:
        self._past = past
        rows = torch.arange(new_rows)
        self._mask = torch.zeros(()).masked_fill(rows > rows.unsqueeze(1), -torch.inf)
        self.present: list[Tensor] = []

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """queries (m, heads, head_dim), keys_values (m, 2, kv_heads, head_dim); returns (m, heads*head_dim)."""
        keys, values = keys_values[:, 0], keys_values[:, 1]
        self.present += [keys.flatten(-2), values.flatten(-2)]
        kv_heads, head_dim = (int(size) for size in keys.shape[-2:])
        past = [rows.unflatten(-1, (kv_heads, head_dim)) for rows in self._past[2 * layer : 2 * layer + 2]]
        old_keys, old_values, keys, values = (x.transpose(0, 1) for x in (*past, keys, values))
        group = int(queries.shape[-2]) // kv_heads
        # (kv_heads, group * m, head_dim): the query heads of a group share keys without copying them.
        q = _group(queries, kv_heads, group) * head_dim**-0.5
        mask = self._mask if group == 1 else self._mask.repeat(group, 1)
        scores = torch.cat([q @ old_keys.transpose(1, 2), q @ keys.transpose(1, 2) + mask], dim=-1).softmax(-1)
        past_rows = past[0].shape[0]
        mixed = scores[..., :past_rows] @ old_values + scores[..., past_rows:] @ values
        return _ungroup(mixed, group)


def _group(queries: Tensor, kv_heads: int, group: int) -> Tensor:
    """(m, heads, head_dim) to (kv_heads, group * m, head_dim)."""
    if group == 1:
        return queries.transpose(0, 1)
    return queries.unflatten(-2, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)


def _ungroup(mixed: Tensor, group: int) -> Tensor:
    """(kv_heads, group * m, head_dim) to (m, heads * head_dim)."""
    if group == 1:
        return mixed.transpose(0, 1).flatten(-2)
    return mixed.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(-3)


class DrafterStep(nn.Module):
    """One call of the exported drafter: caption rows if there are any, then tokens, behind the past rows.

    A call serves one picture, as the device does: without a batch axis inside, the cache is read where it lies.

    Args:
        drafter: trained drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        caption: Tensor,
        caption_length: Tensor,
        tokens: Tensor,
        past: list[Tensor],
        detail_rows: Tensor,
        temperature: Tensor,
        caption_mean: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Rows of p caption rows and n tokens that follow the past rows.

        Args:
            caption: features (1, p, caption_dim); p is `prefix_rows` to begin a picture, else 0.
            caption_length: caption length (1,); features past it are ignored.
            tokens: visual tokens (1, n).
            past: keys and values of the layers in turn, each (1, past, kv_heads*head_dim).
            detail_rows: d (1,), for how many of the last rows radius, hidden states and measures are wanted: a runtime
                computes a whole graph, whichever outputs it is asked for.
            temperature: (1,), at which tokens are drawn: the measures are of rows at that temperature.
            caption_mean: mean feature row of the picture's caption (1, caption_dim), in every call: an input of
                drafters with a caption summary only.

        Returns:
            centre (1, p+n, V), radius (1, d, V or 1), hidden (1, d, dim), measures (1, d, 3), and the new rows of the
            cache, each (1, p+n, kv_heads*head_dim).
        """
        model = self.drafter.transformer
        cache = [rows.squeeze(0) for rows in past]
        prefix_rows, new_rows = caption.shape[1], caption.shape[1] + tokens.shape[1]
        indices = cache[0].shape[0] + torch.arange(new_rows)
        prefix = model.prefix(caption.squeeze(0), caption_length.squeeze(0))
        x = torch.cat([prefix, model.embed(tokens.squeeze(0), indices[prefix_rows:])])
        if caption_mean is not None:
            x = x + model.summary(caption_mean)
        attention = CachedAttention(cache, new_rows)
        rows = self._inter_head(model.run(x, indices, attention), detail_rows, temperature)
        return tuple(value.unsqueeze(0) for value in (*rows, *attention.present))

    def _inter_head(
        self, hidden: Tensor, detail_rows: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Drafter.rows` computes, with everything but the centre for the last rows only."""
        normed = self.drafter.transformer.norm(hidden)
        centre = self.drafter.transformer.head(normed)
        start = hidden.shape[0] - detail_rows[0]
        radius = functional.softplus(self.drafter.radius(normed[start:]))
        measures = interval_measures((centre[start:].float() / temperature).log_softmax(-1), radius)
        return centre, radius, hidden[start:], measures


def export_drafter(drafter: Drafter, path: Path, tolerance: float = 1e-4) -> None:
    """Writes a drafter as a float32 graph, validated against torch on random inputs.

    Raises:
        ValueError: an output of the graph differs from torch's by more than `tolerance`, hidden states by more than
            that share of the largest: trained decoders have a few channels in the thousands, whose rounding alone is
            more.
    """
    config = drafter.config.transformer
    inputs = {"caption": {1: "caption_rows"}, "caption_length": {}, "tokens": {1: "token_rows"}}
    inputs |= {f"past_{index}": {1: "past_rows"} for index in range(2 * config.layers)}
    inputs |= {"detail_rows": {}, "temperature": {}}
    if config.summary_dim:
        inputs["caption_mean"] = {}
    outputs = {"centre": {1: "rows"}} | {name: {1: "detailed"} for name in ("radius", "hidden", "measures")}
    outputs |= {f"present_{index}": {1: "rows"} for index in range(2 * config.layers)}
    step = DrafterStep(drafter.float().cpu().eval())
    with torch.no_grad():
        largest = float(step(**_dummy(config))[2].abs().max())
    graph = GraphConfig(inputs, outputs, lambda: _dummy(config), specs())
    export_module(step, graph, path, tolerance, {"hidden": tolerance * max(1.0, largest)})


def _dummy(config: TransformerConfig) -> DummyInputs:
    """Inputs where every dynamic axis has a length of its own, so that none is mistaken for a constant or another."""
    generator = torch.Generator().manual_seed(0)
    width = config.kv_heads * config.head_dim
    tokens = min(_DUMMY_TOKENS, config.rows * config.cols - 1)
    past = min(_DUMMY_PAST, config.rows * config.cols - tokens)
    inputs: DummyInputs = {
        "caption": torch.randn(1, config.prefix_rows, config.caption_dim, generator=generator),
        "caption_length": torch.tensor([max(1, config.prefix_rows - 1)]),
        "tokens": torch.randint(config.vocabulary, (1, tokens), generator=generator),
        "past": [torch.randn(1, past, width, generator=generator) for _ in range(2 * config.layers)],
        "detail_rows": torch.tensor([tokens]),
        "temperature": torch.tensor([0.7]),
    }
    if config.summary_dim:
        inputs["caption_mean"] = torch.randn(1, config.caption_dim, generator=generator)
    return inputs
