"""One forward for every method: rows of all waiting generations go through the target together.

The linear layers see the rows of all generations packed into one matrix, so a one-token step never pays for another's
block; attention runs for each generation over its own slot of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from cloud.kv_cache import KVCache, Sequence
from cloud.models.prepared import fold_norms, pack_linears
from cloud.models.transformer import Rows, Transformer, caption_means, rotary_table

__all__ = ["Caption", "Engine", "Feed"]


@dataclass(frozen=True, slots=True, eq=False)
class Caption:
    """Caption features (length, caption_dim), at most `prefix_rows` rows."""

    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Rows that one generation feeds in a pass, behind what its sequence holds.

    Args:
        sequence: the generation's place in the cache.
        tokens: visual tokens to feed.
        caption: fed before the tokens, when the sequence is empty.
        added: vectors (len(tokens), dim) added to the tokens' embeddings, in both branches; None for none.
        wanted: number of last rows whose output is needed.
    """

    sequence: Sequence
    tokens: List[int] = ()
    caption: Caption | None = None
    added: Tensor | None = None
    wanted: int = 1


@dataclass(slots=True)
class _Span:
    """Where a feed's rows lie in the packed matrix, and the mask of its attention."""

    sequence: Sequence
    start: int
    rows: int
    length: int
    mask: Tensor | None = field(default=None)

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.sequence.branches


class _SlotAttention:
    """Writes the new keys and values, then attends within each generation's slot."""

    def __init__(self, cache: KVCache, spans: List[_Span], flat_rows: Tensor) -> None:
        self.cache, self.spans, self.flat_rows = cache, spans, flat_rows
        self.grouped = cache.config.kv_heads != cache.config.heads

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        self.cache.write(layer, self.flat_rows, keys_values)
        outputs = [self._attend(layer, span, queries[span.start : span.stop]) for span in self.spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, span: _Span, queries: Tensor) -> Tensor:
        keys, values = self.cache.read(layer, span.sequence, span.length)
        branches = queries.view(span.sequence.branches, span.rows, *queries.shape[1:]).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            branches, keys, values, attn_mask=span.mask, enable_gqa=self.grouped
        )
        return attended.transpose(1, 2).reshape(len(queries), -1)


class Engine:
    """Runs the target for all generations.

    Args:
        model: the target; moved to `device` and `dtype`.
        slots: generations that fit at once.
        device, dtype: where and in what precision it computes.

    Not thread-safe: one thread calls it (see `cloud.scheduler`).
    """

    def __init__(
        self,
        model: Transformer,
        slots: int = 8,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.model = model.to(self.device).eval().requires_grad_(False)
        if model.config.norm_place == "pre":
            # Before the weights lose digits: folded afterwards they would be rounded twice.
            fold_norms(self.model, dtype)
        self.model.to(dtype)
        self._stream_dtype = torch.float32 if model.config.norm_place == "pre" else dtype
        # Angles stay in float32: in bfloat16 far columns would share one angle.
        self.model.table = rotary_table(model.config).to(self.device)
        if self.device.type == "cpu" and dtype == torch.bfloat16:
            pack_linears(self.model)
        self.config = model.config
        self.cache = KVCache(model.config, slots, dtype, self.device)

    @torch.inference_mode()
    def forward(self, feeds: List[Feed]) -> list[Rows]:
        """Feeds rows and returns the outputs of each feed's last `wanted` rows.

        Each sequence grows by the rows fed. Returned shapes: hidden (branches, wanted, dim) and logits (branches,
        wanted, V), both float32 (hidden in the engine's dtype for a post-norm decoder).

        Raises:
            ValueError: a feed without rows, or more rows than a picture has.
        """
        spans, indices = self._spans(feeds)
        x = torch.cat([self._embed(feed, index) for feed, index in zip(feeds, indices, strict=True)])
        flat = [self.cache.flat_rows(feed.sequence, index) for feed, index in zip(feeds, indices, strict=True)]
        flat_rows = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.device)
        packed = torch.cat([i.repeat(s.sequence.branches) for i, s in zip(indices, spans, strict=True)])
        hidden = self.model.run(x, packed.to(self.device), _SlotAttention(self.cache, spans, flat_rows))
        last = [
            hidden[span.start : span.stop].unflatten(0, (-1, span.rows))[:, span.rows - feed.wanted :]
            for span, feed in zip(spans, feeds, strict=True)
        ]
        logits = self.model.logits(torch.cat([rows.flatten(0, 1) for rows in last])).float()
        for span in spans:
            span.sequence.length = span.length
        sizes = [rows.shape[0] * rows.shape[1] for rows in last]
        return [
            Rows(rows, part.unflatten(0, rows.shape[:2])) for rows, part in zip(last, logits.split(sizes), strict=True)
        ]

    def _spans(self, feeds: List[Feed]) -> tuple[list[_Span], list[Tensor]]:
        if len({id(feed.sequence) for feed in feeds}) < len(feeds):
            raise ValueError("a feed of a sequence that another feed of the same pass grows")
        spans, indices, start = [], [], 0
        for feed in feeds:
            rows = len(feed.tokens) + (self.config.prefix_rows if feed.caption is not None else 0)
            past = feed.sequence.length
            if not rows or past + rows > self.config.length or not 1 <= feed.wanted <= rows:
                raise ValueError(f"a feed of {rows} rows behind {past}, {feed.wanted} wanted, of {self.config.length}")
            if (feed.caption is None) == (past == 0):
                raise ValueError(
                    f"a feed of {rows} rows behind {past}: a caption begins a sequence, and nothing else does"
                )
            span = _Span(feed.sequence, start, rows, past + rows)
            if rows > 1:
                span.mask = torch.ones(rows, span.length, dtype=torch.bool, device=self.device).tril(past)
            spans.append(span)
            indices.append(torch.arange(past, past + rows))
            start = span.stop
        return spans, indices

    def _embed(self, feed: Feed, indices: Tensor) -> Tensor:
        """Embedded rows of all branches, branch after branch: (branches * rows, dim)."""
        branches, prefix_rows = feed.sequence.branches, 0
        parts = []
        if feed.caption is not None:
            prefix_rows = self.config.prefix_rows
            parts.append(self._prefix(feed.caption, feed.sequence))
        if len(feed.tokens):
            tokens = torch.tensor(feed.tokens, device=self.device)
            rows = self.model.embed(tokens, indices[prefix_rows:].to(self.device))
            if feed.added is not None:
                rows = rows + feed.added.to(self.device, rows.dtype)
            parts.append(rows.expand(branches, -1, -1))
        embedded = torch.cat(parts, dim=1).to(self._stream_dtype)
        if feed.sequence.summary is not None:
            embedded = embedded + feed.sequence.summary
        return embedded.flatten(0, 1)

    def _prefix(self, caption: Caption, sequence: Sequence) -> Tensor:
        """Embedded caption of each branch (branches, prefix_rows, dim); its summary is kept in the sequence."""
        branches, length = sequence.branches, caption.features.shape[0]
        features = torch.zeros(branches, self.config.prefix_rows, self.config.caption_dim, dtype=self.dtype)
        features[0, :length] = caption.features
        # The unconditional branch is a caption of length 0.
        lengths = torch.tensor([length, 0][:branches]).to(self.device)
        features = features.to(self.device)
        if self.config.summary_dim:
            summary = self.model.summary(caption_means(features, lengths))
            sequence.summary = summary.to(self._stream_dtype).unsqueeze(1)
        return self.model.prefix(features, lengths)
