"""A prepared decoder computes what the plain one does: norms folded into matrices, weights packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cloud.engine import Caption, Engine, Feed
from cloud.models.prepared import PackedLinear, UnitNorm, fold_norms, pack_linears
from cloud.models.transformer import Block, RMSNorm, Rows, Transformer

MakeModel = Callable[..., Transformer]

TOKENS = [1, 2, 3, 4, 5, 6, 0]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"rope_layout": "half"},
    {"kv_heads": 2},
    {"kv_heads": 1, "rope_layout": "half", "rope_kind": "1d"},
    {"qk_norm": "layernorm_per_head", "qkv_bias": True},
    {"norm_eps": 0.5},
]
packs = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="this torch cannot pack weights for the CPU"
)


def features() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100))


def dense(model: Transformer) -> Rows:
    """Rows that predict positions 0..len(TOKENS), of a run without any cache: (1, 8, ...)."""
    padded = torch.zeros(1, 4, 6)
    padded[0, :3] = features()
    rows = model(padded, torch.tensor([3]), torch.tensor([[*TOKENS, 0]]))
    return Rows(rows.hidden.detach(), rows.logits.detach())


def served(engine: Engine, steps: int = 1) -> Tensor:
    """The same rows' logits from an engine, fed in some passes: (1, 8, V)."""
    place = engine.cache.allocate(guided=False)
    (first,) = engine.forward([Feed(place, [], Caption(features()))])
    parts, size = [first.logits], -(-len(TOKENS) // steps)
    for start in range(0, len(TOKENS), size):
        tokens = TOKENS[start : start + size]
        parts.append(engine.forward([Feed(place, tokens, wanted=len(tokens))])[0].logits)
    engine.cache.release(place)
    return torch.cat(parts, dim=1)


# -- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_a_folded_decoder_is_the_plain_one(make_model: MakeModel, fields: dict[str, Any]) -> None:
    plain, folded = make_model(**fields), make_model(**fields)
    fold_norms(folded, torch.float32)
    assert not any(isinstance(module, RMSNorm) for module in folded.modules())
    ours, theirs = dense(folded), dense(plain)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_what_an_engine_serves_are_the_plain_decoders_rows(
    make_model: MakeModel, fields: dict[str, Any], steps: int
) -> None:
    """With cache and in inference mode, which takes other paths through the layers."""
    expected = dense(make_model(**fields)).logits
    torch.testing.assert_close(served(Engine(make_model(**fields), 1), steps), expected, rtol=1e-5, atol=1e-5)


def test_folding_counts_each_norms_own_weight(make_model: MakeModel) -> None:
    """The comparison above is not blind: every norm's weights matter."""
    expected = dense(make_model()).logits
    for name, parameter in make_model().named_parameters():
        if name.endswith("norm.weight"):
            other = make_model()
            other.get_parameter(name).data = parameter.data.flip(0)
            fold_norms(other, torch.float32)
            assert (dense(other).logits - expected).abs().max() > 1e-3, name


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_a_unit_norm_and_the_folded_scale_are_the_norm(eps: float, size: float) -> None:
    """Also where the epsilon outweighs the row."""
    norm = RMSNorm(32, eps)
    norm.weight.data = torch.randn(32, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)) * size
    ours = UnitNorm(norm, torch.float32)(x) * norm.weight * 32**0.5
    torch.testing.assert_close(ours, norm(x), rtol=1e-5, atol=1e-6)


def test_a_unit_norm_of_nothing_is_nothing() -> None:
    assert torch.equal(UnitNorm(RMSNorm(8, 1e-5), torch.float32)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_an_engines_weights_were_folded_before_they_lost_digits(make_model: MakeModel) -> None:
    """Scaled afterwards they would be rounded twice, which costs a tenth of bfloat16's precision."""
    plain, engine = make_model(), Engine(make_model(), 1, dtype=torch.float16)
    expected = plain.get_parameter("head.weight") * plain.get_parameter("norm.weight") * 16**0.5
    assert torch.equal(engine.model.head.weight, expected.half())


def test_folding_twice_changes_nothing(make_model: MakeModel) -> None:
    model = make_model()
    fold_norms(model, torch.float32)
    weights, rows = {name: p.clone() for name, p in model.named_parameters()}, dense(model)
    fold_norms(model, torch.float32)
    assert {name: torch.equal(p, weights[name]) for name, p in model.named_parameters()} == dict.fromkeys(weights, True)
    assert torch.equal(dense(model).logits, rows.logits)


def test_a_model_may_be_served_by_one_engine_after_another_and_in_another_precision(make_model: MakeModel) -> None:
    model, expected = make_model(), dense(make_model()).logits
    for _ in range(2):
        torch.testing.assert_close(served(Engine(model, 1)), expected, rtol=1e-5, atol=1e-5)
    rows = served(Engine(model, 1, dtype=torch.bfloat16))
    assert (rows - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_a_post_norm_decoder_cannot_be_folded_and_is_served_all_the_same(make_model: MakeModel) -> None:
    model, expected = make_model(norm_place="post"), dense(make_model(norm_place="post")).logits
    with pytest.raises(ValueError, match="only the norms of a pre-norm decoder"):
        fold_norms(model, torch.float32)
    torch.testing.assert_close(served(Engine(model, 1), steps=3), expected, rtol=1e-5, atol=1e-5)
    rows = served(Engine(make_model(norm_place="post"), 1, dtype=torch.bfloat16))
    assert (rows - expected).square().mean().sqrt() < 0.1 * expected.std()


# -- packed weights -------------------------------------------------------------------------------------------------


@packs
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64])
def test_a_packed_layer_is_the_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(48, 80, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(rows, 48).bfloat16()
    ours, exact = PackedLinear(linear)(x), linear.float()(x.float())
    assert ours.dtype == torch.bfloat16
    # One rounding of the result: eight binary digits.
    torch.testing.assert_close(ours.float(), exact, rtol=2.0**-7, atol=2.0**-7)


@packs
def test_a_packed_layer_takes_rows_of_any_shape() -> None:
    linear = nn.Linear(16, 24).bfloat16().requires_grad_(False)
    x = torch.randn(2, 3, 16).bfloat16()
    packed = PackedLinear(linear)(x)
    assert packed.shape == (2, 3, 24)
    assert torch.equal(packed, PackedLinear(linear)(x.flatten(0, 1)).view(2, 3, 24))


@packs
def test_every_linear_layer_of_a_decoder_is_packed(make_model: MakeModel) -> None:
    model = make_model().bfloat16()
    count = sum(type(module) is nn.Linear for module in model.modules())
    pack_linears(model)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == count
    assert not any(type(module) is nn.Linear for module in model.modules())
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert isinstance(block.qkv, PackedLinear)


@packs
@pytest.mark.parametrize("fields", VARIANTS[:4], ids=str)
def test_a_packed_bfloat16_decoder_is_close_to_a_float32_one(make_model: MakeModel, fields: dict[str, Any]) -> None:
    expected = dense(make_model(**fields)).logits
    engine = Engine(make_model(**fields), 1, dtype=torch.bfloat16)
    assert isinstance(engine.model.head, PackedLinear)
    rows = served(engine, steps=3)
    assert rows.dtype == torch.float32
    assert (rows - expected).square().mean().sqrt() < 0.05 * expected.std()


def test_where_weights_cannot_be_packed_the_layers_stay(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = make_model().bfloat16()
    pack_linears(model)
    assert type(model.head) is nn.Linear
    assert "cannot pack weights" in caplog.text
