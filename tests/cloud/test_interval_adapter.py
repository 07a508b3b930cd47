"""Interval features begin as nothing, are learnt as they are sent, and have the widths that the wire expects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloud.models.interval_adapter import IntervalAdapter, IntervalAdapterConfig, IntervalEncoder, IntervalFeatures
from cloud.models.loading import load_interval_features, save_weights
from shared.errors import BundleError
from shared.features import FEATURE_MODES, SCALARS, feature_width, pack, unpack

DIM, DRAFT_DIM = 12, 9
MODES = FEATURE_MODES[1:]
ENCODED = MODES[1:]


def config(mode: str) -> IntervalAdapterConfig:
    return IntervalAdapterConfig(mode, DIM, DRAFT_DIM, inner=16)


def inputs(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape, DRAFT_DIM), torch.randn(*shape, SCALARS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("mode", MODES)
def test_an_untrained_feature_path_adds_nothing_and_can_learn(mode: str) -> None:
    adapter = IntervalAdapter(config(mode))
    hidden, scalars = inputs(4)
    sent = IntervalEncoder(config(mode))(hidden, scalars) if mode in ENCODED else scalars[:, :3]
    vectors = adapter(sent)
    assert torch.equal(vectors, torch.zeros(4, DIM))
    vectors.sum().backward()
    trained = [p for p in adapter.parameters() if p.grad is not None and p.grad.abs().max() > 0.0]
    assert trained or mode == "full"  # whose encoder holds everything


def test_the_encoder_of_full_features_begins_at_zero_and_can_learn() -> None:
    encoder = IntervalEncoder(config("full"))
    vectors = encoder(*inputs(4))
    assert torch.equal(vectors, torch.zeros(4, DIM))
    vectors.sum().backward()
    assert encoder.layers[2].weight.grad.abs().max() > 0.0


@pytest.mark.parametrize("mode", MODES)
def test_widths_are_those_of_the_wire(mode: str) -> None:
    width = feature_width(mode, DIM)
    assert IntervalAdapter(config(mode))(torch.randn(2, 3, width)).shape == (2, 3, DIM)
    if mode in ENCODED:
        assert IntervalEncoder(config(mode))(*inputs(2, 3)).shape == (2, 3, width)


@pytest.mark.parametrize("training", [True, False])
def test_a_code_is_whole_numbers_that_survive_the_wire(training: bool) -> None:
    encoder = IntervalEncoder(config("code64")).train(training)
    with torch.no_grad():
        encoder.layers[2].weight.mul_(20.0)  # so that codes reach both ends
        code = encoder(*inputs(50)).numpy()
    np.testing.assert_allclose(code, np.rint(code), atol=1e-4)
    assert np.abs(code).max() == pytest.approx(127.0)
    np.testing.assert_allclose(unpack("code64", pack("code64", np.rint(code)), 50, DIM), code, atol=1e-4)


def test_a_code_is_the_same_in_training_and_in_use() -> None:
    encoder = IntervalEncoder(config("code64"))
    with torch.no_grad():
        torch.testing.assert_close(encoder.train()(*inputs(6)), encoder.eval()(*inputs(6)))


def test_rounding_passes_the_gradient_of_the_unrounded_code() -> None:
    encoder = IntervalEncoder(config("code64")).train()
    outs: list[torch.Tensor] = []
    encoder.layers.register_forward_hook(lambda module, args, out: outs.append(out))
    code = encoder(*inputs(6))
    weights = torch.randn(6, 64)
    (gradient,) = torch.autograd.grad((code * weights).sum(), outs)
    assert (code.detach() != 127.0 * torch.tanh(outs[0])).any()
    torch.testing.assert_close(gradient, 127.0 * weights / torch.cosh(outs[0]) ** 2)


def test_scalars_are_sent_as_they_are() -> None:
    with pytest.raises(ValueError, match="it has no encoder"):
        IntervalEncoder(config("scalars"))
    features = IntervalFeatures(list(MODES), DIM, DRAFT_DIM)
    assert features.modes == list(MODES)
    assert list(features.encoders) == list(ENCODED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"mode": "none"}, "mode"), ({"mode": "code65"}, "mode"), ({"dim": 0}, "dim"), ({"inner": 0}, "inner")],
)
def test_a_shape_that_cannot_be_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}: "):
        replace(config("full"), **fields)


def saved(folder: Path) -> tuple[Path, IntervalFeatures]:
    features = IntervalFeatures(list(MODES), DIM, DRAFT_DIM, inner=16)
    for parameter in features.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = folder / "interval_features.safetensors"
    save_weights(features, path, features.to_dict())
    return path, features


def test_loaded_features_are_those_that_were_saved_ready_for_use(tmp_path: Path) -> None:
    path, features = saved(tmp_path)
    loaded = load_interval_features(path)
    assert not loaded.training
    assert loaded.to_dict() == features.to_dict()
    for name, value in features.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("interval_features.json", None, r"interval_features\.json: not a description of interval features"),
        ("interval_features.json", b"[]", r"interval_features\.json: not a description"),
        ("interval_features.json", b'{"modes": ["none"], "dim": 2, "draft_dim": 2}', r"\.json: .*mode: one of scalars"),
        ("interval_features.json", b'{"modes": ["full"], "dim": 2}', r"\.json: .*draft_dim"),
        ("interval_features.json", b'{"modes": ["full"], "dim": 2, "draft_dim": 2}', r"safetensors: its weights"),
        ("interval_features.safetensors", None, r"interval_features\.safetensors: its weights cannot be loaded"),
        ("interval_features.safetensors", b"damaged", r"interval_features\.safetensors: its weights cannot be loaded"),
    ],
)
def test_missing_or_damaged_features_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path, _ = saved(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        load_interval_features(path)
