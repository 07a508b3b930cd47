"""The decoder: equal to a slow reference in every configuration, causal, and the same however it is run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud.engine import Caption, Engine, Feed
from cloud.models.transformer import (
    UNREAD,
    CausalAttention,
    Transformer,
    TransformerConfig,
    rotary_table,
    rotate,
    swiglu_width,
)

Array = NDArray[np.float64]
MakeModel = Callable[..., Transformer]

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "half pairs": {"rope_layout": "half"},
    "1d": {"rope_kind": "1d"},
    "1d half pairs": {"rope_kind": "1d", "rope_layout": "half"},
    "zero prefix": {"rope_prefix": "zero"},
    "1d zero prefix": {"rope_kind": "1d", "rope_prefix": "zero"},
    "grouped queries": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "qk norm": {"qk_norm": "layernorm_per_head"},
    "qk norm, grouped": {"qk_norm": "layernorm_per_head", "kv_heads": 2, "rope_layout": "half"},
    "post norm": {"norm_place": "post"},
    "bias": {"qkv_bias": True},
    "no positions": {"position_embedding": "none"},
    "wide heads": {"head_dim": 8},
    "low base": {"rope_base": 10.0},
    "caption summary": {"summary_dim": 5},
}
TOKENS = torch.tensor([[4, 0, 3, 6, 1, 2, 2, 5, 0, 6, 3, 1], [1, 1, 5, 0, 2, 6, 4, 3, 0, 0, 6, 2]])
LENGTHS = torch.tensor([3, 0])
TOLERANCE = 1e-5


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, make_model: MakeModel) -> Transformer:
    """A model of each configuration in turn."""
    return make_model(**VARIANTS[request.param])


@pytest.fixture
def padded(model: Transformer) -> Tensor:
    """Caption features (2, prefix_rows, caption_dim) for a batch of two."""
    return torch.randn(
        2, model.config.prefix_rows, model.config.caption_dim, generator=torch.Generator().manual_seed(7)
    )


# -- a slow reference -----------------------------------------------------------------------------------------------


class Reference:
    """The decoder's definition for one sequence in float64, row by row, head by head."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.weights = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def logits(self, features: Array, length: int, tokens: list[int]) -> Array:
        rows = self._embedded(features, length, tokens)
        for layer in range(self.config.layers):
            rows = self._block(rows, f"blocks.{layer}.")
        normed = np.stack([self._rms(row, "norm.weight") for row in rows])
        return normed[self.config.prefix_rows - 1 :] @ self.weights["head.weight"].T

    def _embedded(self, features: Array, length: int, tokens: list[int]) -> Array:
        w, prefix_rows = self.weights, self.config.prefix_rows
        rows = []
        for index in range(prefix_rows):
            row = w["absent_rows"][index]
            if index < length:
                row = self._two_layers(features[index], "caption_projection")
            rows.append(row)
        rows += [w["token_embedding.weight"][token] for token in tokens[:-1]]
        if self.config.position_embedding == "learned":
            predicting = range(prefix_rows - 1, len(rows))
            for position, index in enumerate(predicting):
                rows[index] = rows[index] + w["position_embedding"][position]
        embedded = np.stack(rows)
        if self.config.summary_dim:
            mean = features[:length].mean(0) if length else np.zeros(self.config.caption_dim)
            embedded = embedded + self._two_layers(mean, "caption_summary")
        return embedded

    def _two_layers(self, x: Array, name: str) -> Array:
        x = self.weights[f"{name}.0.weight"] @ x + self.weights[f"{name}.0.bias"]
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return np.asarray(self.weights[f"{name}.2.weight"] @ x + self.weights[f"{name}.2.bias"])

    def _block(self, rows: Array, name: str) -> Array:
        pre = self.config.norm_place == "pre"

        def norm(x: Array, which: str) -> Array:
            return np.stack([self._rms(row, f"{name}{which}.weight") for row in x])

        attended = self._attend(norm(rows, "attention_norm") if pre else rows, name)
        rows = rows + (attended if pre else norm(attended, "attention_norm"))
        gate, up = np.split(
            (norm(rows, "mlp_norm") if pre else rows) @ self.weights[f"{name}gate_up.weight"].T, 2, axis=-1
        )
        fed = (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{name}down.weight"].T
        return rows + (fed if pre else norm(fed, "mlp_norm"))

    def _attend(self, rows: Array, name: str) -> Array:
        c, w = self.config, self.weights
        states = rows @ w[f"{name}qkv.weight"].T + (w[f"{name}qkv.bias"] if c.qkv_bias else 0.0)
        states = states.reshape(len(rows), c.heads + 2 * c.kv_heads, c.head_dim)
        queries, keys, values = np.split(states, [c.heads, c.heads + c.kv_heads], axis=1)
        if c.qk_norm != "none":
            queries, keys = self._head_norm(queries, f"{name}query_norm"), self._head_norm(keys, f"{name}key_norm")
        result = np.zeros((len(rows), c.heads, c.head_dim))
        for head in range(c.heads):
            shared = head * c.kv_heads // c.heads
            q = [self._turned(row[head], index) for index, row in enumerate(queries)]
            k = [self._turned(row[shared], index) for index, row in enumerate(keys)]
            for index in range(len(rows)):
                scores = np.array([q[index] @ k[other] / math.sqrt(c.head_dim) for other in range(index + 1)])
                shares = np.exp(scores - scores.max())
                result[index, head] = shares / shares.sum() @ values[: index + 1, shared]
        return result.reshape(len(rows), -1) @ w[f"{name}attention_out.weight"].T

    def _turned(self, x: Array, index: int) -> Array:
        """Turns each pair of a head as a complex number."""
        c, pairs = self.config, self.config.head_dim // 2
        image = index >= c.prefix_rows
        if not image and c.rope_prefix == "zero":
            return np.zeros_like(x)
        if c.rope_kind == "1d":
            angles = [index * c.rope_base ** (-i / pairs) for i in range(pairs)]
        else:
            row, col = divmod(index - c.prefix_rows, c.cols) if image else (0, 0)
            half = pairs // 2
            angles = [(row if i < half else col) * c.rope_base ** (-(i % half) / half) for i in range(pairs)]
        result = np.empty_like(x)
        for i, angle in enumerate(angles):
            first, second = (i, i + pairs) if c.rope_layout == "half" else (2 * i, 2 * i + 1)
            turned = complex(x[first], x[second]) * complex(math.cos(angle), math.sin(angle))
            result[first], result[second] = turned.real, turned.imag
        return result

    def _head_norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return np.asarray(scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def _rms(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean() + self.config.norm_eps) * self.weights[name])


def test_logits_equal_a_slow_reference(variant: Transformer, padded: Tensor) -> None:
    rows = variant(padded, LENGTHS, TOKENS)
    assert rows.hidden.shape == (2, 12, 16)
    for index in range(2):
        expected = Reference(variant).logits(
            padded[index].double().numpy(), int(LENGTHS[index]), TOKENS[index].tolist()
        )
        np.testing.assert_allclose(rows.logits[index].numpy(), expected, rtol=1e-3, atol=2e-4)


# -- causality ------------------------------------------------------------------------------------------------------


def test_a_token_changes_every_later_row_and_none_up_to_its_own(variant: Transformer, padded: Tensor) -> None:
    before = variant(padded, LENGTHS, TOKENS).logits
    for position in range(TOKENS.shape[1]):
        changed = TOKENS.clone()
        changed[:, position] = (changed[:, position] + 1) % variant.config.vocabulary
        after = variant(padded, LENGTHS, changed).logits
        assert torch.equal(after[:, : position + 1], before[:, : position + 1])
        assert ((after - before).abs().amax(-1)[:, position + 1 :] > 1e-4).all()


@pytest.mark.parametrize("summary_dim", [0, 5])
def test_a_caption_changes_every_row_but_only_up_to_its_length(
    make_model: MakeModel, padded: Tensor, summary_dim: int
) -> None:
    model = make_model(summary_dim=summary_dim)
    before = model(padded, LENGTHS, TOKENS).logits
    inside, outside = padded.clone(), padded.clone()
    inside[0, 2] += 1.0
    outside[0, 3] += torch.nan
    outside[1] += 100.0
    assert torch.equal(model(outside, LENGTHS, TOKENS).logits, before)
    after = model(inside, LENGTHS, TOKENS).logits
    assert ((after[0] - before[0]).abs().amax(-1) > 1e-4).all()
    assert torch.equal(after[1], before[1])


def test_pictures_of_a_batch_do_not_meet(variant: Transformer, padded: Tensor) -> None:
    together = variant(padded, LENGTHS, TOKENS).logits
    for index in range(2):
        alone = variant(padded[index : index + 1], LENGTHS[index : index + 1], TOKENS[index : index + 1]).logits
        torch.testing.assert_close(alone[0], together[index], rtol=TOLERANCE, atol=TOLERANCE)


# -- the same however it is run -------------------------------------------------------------------------------------


def test_inference_mode_computes_what_training_computes(variant: Transformer, padded: Tensor) -> None:
    variant.requires_grad_(True)
    training = variant(padded, LENGTHS, TOKENS)
    assert training.logits.requires_grad
    with torch.inference_mode():
        fast = variant(padded, LENGTHS, TOKENS)
    torch.testing.assert_close(fast.logits, training.logits.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(fast.hidden, training.hidden.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [3, 1, 5, 2, 1]])
def test_the_cached_engine_gives_the_rows_of_teacher_forcing(
    variant: Transformer, padded: Tensor, chunks: list[int]
) -> None:
    """Both branches: the conditional with its caption, the unconditional as a caption of length 0."""
    tokens, lengths = TOKENS[:1].expand(2, -1), torch.tensor([3, 0])
    expected = variant(padded[:1].expand(2, -1, -1), lengths, tokens)
    engine = Engine(variant, slots=1)
    sequence = engine.cache.allocate(guided=True)
    (rows,) = engine.forward([Feed(sequence, caption=Caption(padded[0, :3]))])
    logits, hidden, fed = [rows.logits], [rows.hidden], 0
    for count in chunks:
        feed = TOKENS[0, fed : min(fed + count, 11)].tolist()
        if feed:
            (rows,) = engine.forward([Feed(sequence, feed, wanted=len(feed))])
            logits.append(rows.logits)
            hidden.append(rows.hidden)
        fed += count
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(torch.cat(hidden, 1), expected.hidden, rtol=TOLERANCE, atol=TOLERANCE)


def test_teacher_forcing_of_a_part_of_a_picture_gives_the_first_rows_of_the_whole(
    model: Transformer, padded: Tensor
) -> None:
    whole = model.teacher_forced(padded, LENGTHS, TOKENS)
    for count in (1, 5, 12):
        part = model.teacher_forced(padded, LENGTHS, TOKENS[:, :count])
        torch.testing.assert_close(part, whole[:, :count], rtol=TOLERANCE, atol=TOLERANCE)


def test_an_unread_token_feeds_its_position_alone(make_model: MakeModel, padded: Tensor) -> None:
    model, unread, expected = make_model(), TOKENS.clone(), TOKENS.clone()
    unread[:, [2, 5]] = UNREAD
    expected[:, [2, 5]] = 0
    vector = model.token_embedding.weight[0].clone()
    model.token_embedding.weight[0] = 0.0  # a token whose vector is nothing
    blind = model.teacher_forced(padded, LENGTHS, expected)
    assert torch.equal(model.teacher_forced(padded, LENGTHS, unread), blind)
    model.token_embedding.weight[0] = vector
    assert not torch.allclose(model.teacher_forced(padded, LENGTHS, TOKENS), blind)


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values(
    make_model: MakeModel, padded: Tensor
) -> None:
    grouped, full = make_model(kv_heads=2), make_model(kv_heads=4)
    state = grouped.state_dict()
    for layer in range(2):
        name = f"blocks.{layer}.qkv.weight"
        queries, keys, values = state[name].unflatten(0, (8, 4)).split([4, 2, 2])
        state[name] = torch.cat([queries, *(x.repeat_interleave(2, 0) for x in (keys, values))]).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(
        full(padded, LENGTHS, TOKENS).logits, grouped(padded, LENGTHS, TOKENS).logits, rtol=TOLERANCE, atol=TOLERANCE
    )


def test_bfloat16_runs_close_to_float32(model: Transformer, padded: Tensor) -> None:
    expected = model(padded, LENGTHS, TOKENS).logits
    narrow = model.to(torch.bfloat16)(padded.bfloat16(), LENGTHS, TOKENS)
    assert narrow.logits.dtype == torch.bfloat16
    assert (narrow.logits.float() - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_causal_attention_is_dense_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, 5, 3, 4, generator=generator) for _ in range(3))
    attended = CausalAttention(5)(0, queries, torch.stack([keys, values], -3))
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attended, expected.transpose(1, 2).flatten(-2), rtol=TOLERANCE, atol=TOLERANCE)


# -- rotary positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_turned_products_depend_on_the_distance_alone(kind: str, layout: str) -> None:
    config = TransformerConfig(5, 6, 6, dim=16, heads=2, prefix_rows=2, rope_kind=kind, rope_layout=layout)
    table = rotary_table(config)[config.prefix_rows :]
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 8, generator=generator)
    turned = [rotate(x.expand(36, 1, 8), table, layout)[:, 0].unflatten(0, (6, 6)) for x in (q, k)]
    torch.testing.assert_close(turned[0].norm(dim=-1), q.norm().expand(6, 6))
    for offset in [(0, 1), (1, 0), (2, 3)]:
        rows, cols = 6 - offset[0], 6 - offset[1]
        products = (turned[0][:rows, :cols] * turned[1][offset[0] :, offset[1] :]).sum(-1)
        torch.testing.assert_close(products, products[0, 0].expand(rows, cols), rtol=1e-4, atol=1e-4)
    here = (turned[0] * turned[1]).sum(-1)
    torch.testing.assert_close(here, (q @ k).expand(6, 6), rtol=1e-4, atol=1e-4)


def test_the_two_layouts_are_one_rotation_of_reordered_pairs() -> None:
    config = TransformerConfig(5, 3, 4, dim=16, heads=2, prefix_rows=2)
    table = rotary_table(config)
    x = torch.randn(len(table), 2, 8, generator=torch.Generator().manual_seed(4))
    reordered = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    turned = rotate(x, table, "interleaved")
    half = rotate(reordered, table, "half")
    torch.testing.assert_close(torch.cat([turned[..., 0::2], turned[..., 1::2]], -1), half)


def test_rotation_is_computed_in_float32_and_returned_as_it_came() -> None:
    table = rotary_table(TransformerConfig(5, 3, 4, dim=16, heads=2, prefix_rows=2))
    x = torch.randn(len(table), 2, 8).bfloat16()
    for layout in ("interleaved", "half"):
        turned = rotate(x, table, layout)
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned, rotate(x.float(), table, layout).bfloat16())


# -- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("vocabulary", "rows", "cols", "dim", "layers", "heads", "prefix_rows", "caption_dim")],
        ("dim", 18),
        ("kv_heads", 3),
        ("head_dim", 6),
        ("rope_kind", "3d"),
        ("rope_layout", "pairs"),
        ("rope_prefix", "one"),
        ("qk_norm", "rms"),
        ("norm_place", "between"),
        ("position_embedding", "sine"),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        TransformerConfig(**{"vocabulary": 5, "dim": 16, "heads": 4} | {field: value})


def test_fields_left_out_are_filled_in_and_survive_their_description() -> None:
    config = TransformerConfig(5, dim=48, heads=6)
    assert (config.kv_heads, config.head_dim, config.ffn_dim) == (6, 8, 128)
    assert config.length == 32 + 256
    assert config.grid.size == 256
    assert TransformerConfig(**config.to_dict()) == config


@pytest.mark.parametrize("dim", [48, 512, 1280])
def test_swiglu_width_is_at_least_eight_thirds_and_less_than_a_multiple_above(dim: int) -> None:
    width = swiglu_width(dim)
    assert width % 128 == 0
    assert 0 <= width - 8 * dim / 3 < 128


def test_weights_hold_no_table_so_that_a_bundle_does_not_fix_it(make_model: MakeModel) -> None:
    assert "table" not in make_model().state_dict()
    assert "position_embedding" not in make_model(position_embedding="none").state_dict()
