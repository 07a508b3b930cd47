"""The one decoder: LlamaGen-style, driven by its configuration, shared by training, engine and export.

The blocks do not know how keys and values are kept: `Transformer.run` takes an attention function, so that training
(dense causal), the engine (slots of a cache) and the export (past rows as graph inputs) use the same layers.

Sequence layout: `prefix_rows` conditioning rows, then the image tokens in raster order. The last prefix row predicts
token 0, and the row of token i predicts token i + 1; the last token is never fed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.grid import Grid

__all__ = [
    "UNREAD",
    "Attention",
    "Block",
    "CausalAttention",
    "RMSNorm",
    "Rows",
    "Transformer",
    "TransformerConfig",
    "caption_means",
    "rotary_table",
    "rotate",
    "swiglu_width",
]

UNREAD = -1
"""Stands for a token that a decoder in training must do without, see `Transformer.teacher_forced`."""

_CHOICES = {
    "rope_kind": ("1d", "2d"),
    "rope_layout": ("interleaved", "half"),
    "rope_prefix": ("none", "zero"),
    "qk_norm": ("none", "layernorm_per_head"),
    "norm_place": ("pre", "post"),
    "position_embedding": ("none", "learned"),
}


def swiglu_width(dim: int, multiple: int = 128) -> int:
    """Hidden width of a SwiGLU layer: 8/3 of `dim`, rounded up to a multiple."""
    return multiple * math.ceil(8 * dim / 3 / multiple)


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Shape of a decoder.

    Args:
        vocabulary: number of visual tokens V.
        rows, cols: token grid.
        dim, layers, heads: width, depth and attention heads.
        kv_heads: key/value heads (grouped-query attention); 0 means `heads`.
        head_dim: width of a head; 0 means dim / heads.
        ffn_dim: SwiGLU hidden width; 0 means 8/3 dim rounded up to 128.
        norm_eps: epsilon of RMSNorm.
        rope_kind: `2d` (half of the pairs turn with the row, half with the column) or `1d`.
        rope_layout: `interleaved` pairs (2i, 2i+1) or `half` pairs (i, i + head_dim/2).
        rope_prefix: prefix rows are not turned (`none`), or get zero queries and keys (`zero`, LlamaGen).
        rope_base: base of the rotary frequencies.
        qk_norm: normalisation of queries and keys before rotary.
        norm_place: `pre`, or `post` (norm of the sub-layer's output, Chameleon 34B).
        qkv_bias: bias in the joint query/key/value projection.
        position_embedding: `learned` adds a vector for the position that a row predicts.
        prefix_rows: conditioning rows before the first token.
        caption_dim: width of the caption features that fill the prefix.
        summary_dim: hidden width of the caption's summary, a vector that is added to every row; 0 for no summary.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    vocabulary: int
    rows: int = 16
    cols: int = 16
    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 0
    head_dim: int = 0
    ffn_dim: int = 0
    norm_eps: float = 1e-5
    rope_kind: str = "2d"
    rope_layout: str = "interleaved"
    rope_prefix: str = "none"
    rope_base: float = 10000.0
    qk_norm: str = "none"
    norm_place: str = "pre"
    qkv_bias: bool = False
    position_embedding: str = "learned"
    prefix_rows: int = 32
    caption_dim: int = 384
    summary_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "rows", "cols", "dim", "layers", "heads", "prefix_rows", "caption_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1 is needed, not {getattr(self, name)}")
        if self.summary_dim < 0:
            raise ValueError(f"summary_dim: at least 0 is needed, not {self.summary_dim}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: one of {', '.join(choices)} is needed, not {getattr(self, name)!r}")
        if not self.head_dim and self.dim % self.heads:
            raise ValueError(f"dim: {self.dim} does not divide by heads {self.heads}; set head_dim")
        for name, value in (
            ("kv_heads", self.kv_heads or self.heads),
            ("head_dim", self.head_dim or self.dim // self.heads),
            ("ffn_dim", self.ffn_dim or swiglu_width(self.dim)),
        ):
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % (4 if self.rope_kind == "2d" else 2):
            raise ValueError(f"head_dim: {self.head_dim} does not fit {self.rope_kind} rotary positions")

    @property
    def grid(self) -> Grid:
        return Grid(self.rows, self.cols)

    @property
    def length(self) -> int:
        """Rows a full sequence feeds: the prefix and all tokens."""
        return self.prefix_rows + self.rows * self.cols

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Attention(Protocol):
    """Keeps keys and values of a layer and attends: the part that training, engine and export do differently."""

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """queries (..., heads, head_dim); keys_values (..., 2, kv_heads, head_dim); returns (..., heads*head_dim)."""
        ...


class CausalAttention:
    """Dense causal attention over whole sequences (batch, length, ...), as training wants it.

    Written as two matrix products and a softmax: the fused kernel's backward is the slowest part of a step on a CPU.
    """

    def __init__(self, length: int, device: torch.device | str = "cpu") -> None:
        self.mask = torch.full((length, length), -torch.inf, device=device).triu(1)

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        keys, values = keys_values.unbind(-3)
        q, k, v = (x.transpose(-3, -2) for x in (queries, keys, values))
        if k.shape[-3] != q.shape[-3]:
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
        if q.is_cuda:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + self.mask.to(q.dtype)
        return (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class HeadNorm(nn.Module):
    """LayerNorm over each head with its own weight and bias per head (Chameleon family)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape[-1:], eps=1e-5) * self.weight + self.bias


def rotary_table(config: TransformerConfig) -> Tensor:
    """Cosines and sines of every sequence row, float32 (length, head_dim/2, 2).

    Image tokens turn with their own place in the grid; prefix rows as `rope_prefix` says.
    """
    pairs = config.head_dim // 2
    places = torch.arange(config.rows * config.cols, dtype=torch.float32)
    if config.rope_kind == "2d":
        frequencies = config.rope_base ** -(torch.arange(pairs // 2, dtype=torch.float32) / (pairs // 2))
        row, col = torch.div(places, config.cols, rounding_mode="floor"), places % config.cols
        angles = torch.cat([torch.outer(row, frequencies), torch.outer(col, frequencies)], dim=1)
    else:
        frequencies = config.rope_base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
        angles = torch.outer(places + config.prefix_rows, frequencies)
    image = torch.stack([angles.cos(), angles.sin()], dim=-1)
    prefix = torch.zeros(config.prefix_rows, pairs, 2)
    if config.rope_kind == "1d" and config.rope_prefix == "none":
        turned = torch.outer(torch.arange(config.prefix_rows, dtype=torch.float32), frequencies)
        prefix = torch.stack([turned.cos(), turned.sin()], dim=-1)
    elif config.rope_prefix == "none":
        prefix[..., 0] = 1.0
    return torch.cat([prefix, image])


def rotate(x: Tensor, table: Tensor, layout: str) -> Tensor:
    """Turns the pairs of each head. x (..., heads, head_dim), table (..., head_dim/2, 2); computed in float32."""
    wide = x.float()
    cos, sin = table.unsqueeze(-3).unbind(-1)
    if layout == "half":
        a, b = wide.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


def caption_means(features: Tensor, lengths: Tensor) -> Tensor:
    """Mean feature rows (batch, caption_dim) of captions (batch, rows, caption_dim); zeros where the length is 0."""
    present = torch.arange(features.shape[-2], device=features.device) < lengths.unsqueeze(-1)
    return features.where(present.unsqueeze(-1), 0.0).sum(-2) / lengths.clamp(min=1).unsqueeze(-1).to(features.dtype)


def _is_decoding() -> bool:
    """Whether to take the paths of fewest operations: in the engine, but not where a compiler fuses them anyway."""
    return torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()


def _rotate_in_place(x: Tensor, table: Tensor) -> None:
    """Turns interleaved pairs by complex numbers `table` (..., 1, head_dim/2).

    One product instead of eight small operations: in a decoding step those cost more than the matrices.
    """
    wide = x if x.dtype == torch.float32 else x.float()
    torch.view_as_complex(wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2)).mul_(table)
    if wide is not x:
        x.copy_(wide)


class Block(nn.Module):
    """Attention and SwiGLU with residual connections."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self.attention_norm: nn.Module = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, (heads + 2 * kv_heads) * head_dim, bias=config.qkv_bias)
        self.attention_out = nn.Linear(heads * head_dim, config.dim, bias=False)
        self.mlp_norm: nn.Module = RMSNorm(config.dim, config.norm_eps)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)
        if config.qk_norm == "layernorm_per_head":
            self.query_norm, self.key_norm = HeadNorm(heads, head_dim), HeadNorm(kv_heads, head_dim)

    def forward(self, x: Tensor, table: Tensor, attention: Attention) -> Tensor:
        if self.config.norm_place == "post":
            x = x + self.attention_norm(self._attend(x, table, attention))
            return x + self.mlp_norm(self._mlp(x))
        x = x + self._attend(self.attention_norm(x), table, attention)
        return x + self._mlp(self.mlp_norm(x))

    def _attend(self, x: Tensor, table: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        states = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim))
        if self.config.qk_norm != "none":
            queries, keys, values = states.split([heads, kv_heads, kv_heads], dim=-2)
            states = torch.cat([self.query_norm(queries), self.key_norm(keys), values], dim=-2)
        if table.is_complex():
            _rotate_in_place(states[..., : heads + kv_heads, :], table)
            keys_values = states[..., heads:, :].view(*states.shape[:-2], 2, kv_heads, self.config.head_dim)
            return self.attention_out(attention(self.index, states[..., :heads, :], keys_values))
        turned = rotate(states[..., : heads + kv_heads, :], table, self.config.rope_layout)
        keys_values = torch.stack([turned[..., heads:, :], states[..., heads + kv_heads :, :]], dim=-3)
        return self.attention_out(attention(self.index, turned[..., :heads, :], keys_values))

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if _is_decoding():
            return self.down(functional.silu(gate).mul_(up))
        return self.down(functional.silu(gate) * up)


@dataclass(frozen=True, slots=True)
class Rows:
    """Output of a pass: hidden states before the last norm, and logits. Shapes (..., dim) and (..., V)."""

    hidden: Tensor
    logits: Tensor = field(repr=False)


class Transformer(nn.Module):
    """Decoder over caption rows and visual tokens (LlamaGen, arXiv 2406.06525)."""

    table: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.dim)
        self.caption_projection = nn.Sequential(
            nn.Linear(config.caption_dim, config.dim), nn.GELU(approximate="tanh"), nn.Linear(config.dim, config.dim)
        )
        if config.summary_dim:
            self.caption_summary = nn.Sequential(
                nn.Linear(config.caption_dim, config.summary_dim),
                nn.GELU(approximate="tanh"),
                nn.Linear(config.summary_dim, config.dim),
            )
        self.absent_rows = nn.Parameter(torch.zeros(config.prefix_rows, config.dim))
        if config.position_embedding == "learned":
            self.position_embedding = nn.Parameter(torch.zeros(config.rows * config.cols, config.dim))
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm: nn.Module = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.register_buffer("table", rotary_table(config), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        deep = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "norm" not in name:
                shrink = deep if name.endswith(("attention_out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def prefix(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Embeds captions. Rows past a caption's length hold learned vectors, so no mask is needed.

        Args:
            features: caption features (batch, prefix_rows, caption_dim); rows past the length are ignored.
            lengths: caption lengths (batch,), 0 for the unconditional branch of guidance.

        Returns:
            (batch, prefix_rows, dim).
        """
        present = torch.arange(features.shape[-2], device=features.device) < lengths.unsqueeze(-1)
        rows = self.caption_projection(features)
        rows = torch.where(present.unsqueeze(-1), rows, self.absent_rows[: features.shape[-2]].to(rows.dtype))
        return self._with_position(rows, torch.arange(features.shape[-2], device=features.device))

    def summary(self, means: Tensor) -> Tensor:
        """The vectors that are added to all rows of sequences, prefix and tokens alike; needs `summary_dim` above 0.

        Attention must find a caption before it can use it, and learns to late. What stands in a row itself, all layers
        combine with the row's position from the first step on.

        Args:
            means: `caption_means` of the captions (batch, caption_dim).

        Returns:
            (batch, dim).
        """
        return self.caption_summary(means)

    def embed(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """Embeds tokens (...,) that stand at sequence rows `indices` (...,): (..., dim)."""
        return self._with_position(self.token_embedding(tokens), indices)

    def _with_position(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Adds the vector of the position that each row predicts; prefix rows but the last predict none."""
        if self.config.position_embedding == "none":
            return rows
        predicted = indices - (self.config.prefix_rows - 1)
        inside = (predicted >= 0) & (predicted < self.config.rows * self.config.cols)
        vectors = self.position_embedding[predicted.clamp(0, self.config.rows * self.config.cols - 1)]
        return rows + (vectors * inside.unsqueeze(-1)).to(rows.dtype)

    def run(self, x: Tensor, indices: Tensor, attention: Attention) -> Tensor:
        """Runs the blocks on embedded rows x (..., dim) at sequence rows `indices`; returns hidden (..., dim)."""
        table = self.table[indices]
        if self.config.rope_layout == "interleaved" and _is_decoding():
            table = torch.view_as_complex(table).unsqueeze(-2)
        for block in self.blocks:
            x = block(x, table, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states before the last norm (..., dim)."""
        return self.head(self.norm(hidden))

    def teacher_forced(self, features: Tensor, lengths: Tensor, tokens: Tensor, added: Tensor | None = None) -> Tensor:
        """Hidden states (batch, T, dim) of the rows that predict tokens 0..T-1.

        Args:
            features, lengths: captions, see `prefix`.
            tokens: visual tokens (batch, T) with T at most rows*cols; all but the last are fed. `UNREAD` feeds a row
                that knows its position, but not its token.
            added: vectors (batch, T, dim) to add to the tokens' embeddings; that of token t is seen from t+1 on.
        """
        prefix = self.prefix(features, lengths)
        start = prefix.shape[-2]
        indices = torch.arange(start + tokens.shape[-1] - 1, device=tokens.device)
        read = tokens[..., :-1]
        known = self.token_embedding(read.clamp(min=0)) * (read != UNREAD).unsqueeze(-1)
        embedded = self._with_position(known, indices[start:])
        if added is not None:
            embedded = embedded + added[..., :-1, :]
        x = torch.cat([prefix, embedded.to(prefix.dtype)], dim=-2)
        if self.config.summary_dim:
            x = x + self.summary(caption_means(features, lengths)).unsqueeze(-2)
        return self.run(x, indices, CausalAttention(len(indices), tokens.device))[..., start - 1 :, :]

    def forward(self, features: Tensor, lengths: Tensor, tokens: Tensor, added: Tensor | None = None) -> Rows:
        """Rows of whole pictures: hidden (batch, T, dim) and logits (batch, T, V); see `teacher_forced`."""
        hidden = self.teacher_forced(features, lengths, tokens, added)
        return Rows(hidden, self.logits(hidden))
