"""Interval features: what is sent comes back as precise as its type, in exactly the bytes that the table promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.errors import ProtocolError
from shared.features import (
    CODE_WIDTH,
    FEATURE_MODES,
    SCALARS,
    encoder_graph,
    feature_width,
    interval_scalars,
    pack,
    unpack,
)
from shared.intervals import interval_measures, probability_bounds
from shared.sampling import SamplingSettings, warp

DIM = 24
BYTES = {"none": 0, "scalars": 6, "code64": 64, "full": 2 * DIM}
SENDING = [mode for mode in FEATURE_MODES if mode != "none"]


def values(mode: str, count: int, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    if mode == "code64":
        return generator.integers(-127, 128, size=(count, CODE_WIDTH)).astype(np.float32)
    return (generator.normal(size=(count, feature_width(mode, DIM))) * 5.0).astype(np.float32)


# -- the code they travel in ----------------------------------------------------------------------------------------


def test_the_table_names_every_mode() -> None:
    assert set(BYTES) == set(FEATURE_MODES)
    assert [feature_width(mode, DIM) for mode in FEATURE_MODES] == [0, 3, 64, DIM]
    assert {mode: encoder_graph(mode) for mode in FEATURE_MODES} == {
        "none": None,
        "scalars": None,
        "code64": "interval_encoder_code64.onnx",
        "full": "interval_encoder_full.onnx",
    }


@pytest.mark.parametrize("mode", SENDING)
@pytest.mark.parametrize("count", [0, 1, 17])
def test_what_is_packed_comes_back_within_the_precision_of_its_type(mode: str, count: int) -> None:
    sent = values(mode, count)
    data = pack(mode, sent)
    assert len(data) == count * BYTES[mode]
    back = unpack(mode, data, count, DIM)
    assert back.shape == (count, feature_width(mode, DIM))
    assert back.dtype == np.float32
    # float16 has 11 binary digits; codes are whole numbers.
    tolerance = 0.0 if mode == "code64" else 2.0**-11
    np.testing.assert_allclose(back, sent, rtol=tolerance, atol=tolerance * 1e-4)


def test_features_of_several_tokens_are_those_of_each_in_a_row() -> None:
    for mode in SENDING:
        sent = values(mode, 3)
        assert b"".join(pack(mode, sent[i : i + 1]) for i in range(3)) == pack(mode, sent)


def test_the_wire_is_little_endian() -> None:
    assert pack("scalars", np.array([[1.0, 0.0, -2.0]])) == b"\x00\x3c\x00\x00\x00\xc0"
    assert pack("code64", np.array([[-1.0, 127.0, -127.0]])) == b"\xff\x7f\x81"


def test_mode_none_sends_nothing() -> None:
    assert pack("none", np.zeros((4, 0))) == b""
    assert unpack("none", b"", 4, DIM).shape == (4, 0)


@pytest.mark.parametrize("mode", ["scalars", "full"])
def test_numbers_beyond_float16_are_clipped_not_infinite(mode: str) -> None:
    sent = values(mode, 1)
    sent[0, :3] = [np.inf, -np.inf, 1e9]
    back = unpack(mode, pack(mode, sent), 1, DIM)
    assert back[0, :3].tolist() == pytest.approx([6e4, -6e4, 6e4], rel=1e-3)
    np.testing.assert_allclose(back[0, 3:], sent[0, 3:], rtol=1e-3)


@pytest.mark.parametrize("mode", FEATURE_MODES)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused_with_both_numbers(mode: str, wrong: int) -> None:
    right = 3 * BYTES[mode]
    data = bytes(abs(right + wrong))
    with pytest.raises(ProtocolError, match=f"3 tokens in mode {mode} take {right} bytes, {len(data)} came"):
        unpack(mode, data, 3, DIM)


@pytest.mark.parametrize("mode", ["scalars", "full"])
@pytest.mark.parametrize("word", [b"\x00\x7c", b"\x00\xfc", b"\x00\x7e"], ids=["inf", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused(mode: str, word: bytes) -> None:
    data = pack(mode, values(mode, 2))
    with pytest.raises(ProtocolError, match="features: a number is not finite"):
        unpack(mode, data[:-2] + word, 2, DIM)


# -- the scalars ----------------------------------------------------------------------------------------------------


def rows(seed: int, one_radius: bool, count: int = 5, vocabulary: int = 40) -> tuple[Any, Any, Any]:
    """Log-probabilities, radius and drawn tokens."""
    generator = np.random.default_rng(seed)
    log_probs = warp(generator.normal(size=(count, vocabulary)).astype(np.float32) * 2.0, SamplingSettings())
    radius = generator.exponential(1.0, size=(count, 1 if one_radius else vocabulary)).astype(np.float32)
    return log_probs, radius, generator.integers(0, vocabulary, size=count)


@pytest.mark.parametrize("one_radius", [True, False])
def test_scalars_are_what_their_docstring_says(one_radius: bool) -> None:
    log_probs, radius, tokens = rows(1, one_radius)
    scalars = interval_scalars(log_probs, radius, tokens)
    assert scalars.shape == (5, SCALARS)
    assert scalars.dtype == np.float32
    measures = interval_measures(log_probs, radius)
    low, high = probability_bounds(log_probs, radius)
    for i, token in enumerate(tokens):
        expected = [
            log_probs[i, token],
            radius[i, 0 if one_radius else token],
            np.log(measures[i, 0] * measures[i, 1] * 40**0.5),
            np.log(low[i, token]),
            np.log(high[i, token]),
            measures[i, 0],
            measures[i, 2],
        ]
        np.testing.assert_allclose(scalars[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("one_radius", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_scalars_on_numpy_and_torch_agree(seed: int, one_radius: bool) -> None:
    given = rows(seed, one_radius)
    ours = interval_scalars(*given)
    theirs = interval_scalars(*(torch.from_numpy(x) for x in given))
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-4, atol=1e-4)


def test_scalars_take_any_leading_shape() -> None:
    log_probs, radius, tokens = rows(2, one_radius=False, count=6)
    flat = interval_scalars(log_probs, radius, tokens)
    grid = interval_scalars(log_probs.reshape(2, 3, -1), radius.reshape(2, 3, -1), tokens.reshape(2, 3))
    np.testing.assert_allclose(grid.reshape(6, SCALARS), flat, rtol=1e-6)


def test_mode_scalars_sends_the_first_three_in_six_bytes() -> None:
    scalars = interval_scalars(*rows(3, one_radius=True))
    data = pack("scalars", scalars[:, :3])
    assert len(data) == 5 * 6
    np.testing.assert_allclose(unpack("scalars", data, 5, DIM), scalars[:, :3], rtol=2e-3, atol=1e-3)


def test_a_certain_and_an_excluded_token_give_finite_scalars_but_for_the_log_probability() -> None:
    log_probs = np.array([[0.0, -np.inf, -np.inf]], np.float32)
    for token in (0, 1):
        scalars = interval_scalars(log_probs, np.ones((1, 1), np.float32), np.array([token]))
        assert np.isfinite(scalars[0, 1:]).all()
