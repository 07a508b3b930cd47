"""The warp: what each setting keeps, the same on both sides, and never a NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.errors import SettingsError
from shared.sampling import SamplingSettings, guide, probabilities, warp

SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.3),
    SamplingSettings(temperature=2.5),
    SamplingSettings(top_k=1),
    SamplingSettings(top_k=5),
    SamplingSettings(top_p=0.05),
    SamplingSettings(top_p=0.9),
    SamplingSettings(temperature=0.7, top_k=20, top_p=0.8),
]


def rows(seed: int, shape: tuple[int, ...] = (6, 40), spread: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=shape) * spread).astype(np.float32)


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def slow_warp(logits: NDArray[np.float32], settings: SamplingSettings) -> NDArray[np.float64]:
    """The definition, one row, one token at a time."""
    scaled = logits.astype(np.float64) / settings.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if settings.top_k:
        smallest = scaled[order[min(settings.top_k, len(order)) - 1]]
        order = [token for token in order if scaled[token] >= smallest]
    probs = softmax(scaled[order])
    kept, mass = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if settings.top_p == 1.0 or mass < settings.top_p:
            kept.append(token)
        mass += prob
    result = np.zeros(len(scaled))
    result[kept] = softmax(scaled[kept])
    return result


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_warp_equals_a_slow_reference(settings: SamplingSettings, seed: int) -> None:
    logits = rows(seed)
    warped = np.exp(warp(logits, settings))
    expected = np.stack([slow_warp(row, settings) for row in logits])
    np.testing.assert_allclose(warped, expected, rtol=2e-5, atol=1e-7)
    assert ((warped > 0) == (expected > 0)).all()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_numpy_and_torch_keep_the_same_tokens_and_give_the_same_numbers(settings: SamplingSettings) -> None:
    logits = rows(9, (3, 4, 300))
    ours, theirs = warp(logits, settings), warp(torch.from_numpy(logits), settings)
    assert theirs.dtype == torch.float32
    assert ours.dtype == np.float32
    assert ours.shape == logits.shape
    assert (np.isneginf(ours) == np.isneginf(theirs.numpy())).all()
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(probabilities(theirs).numpy(), probabilities(ours), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_sum_to_one_and_do_not_depend_on_their_neighbours_or_on_a_shift(settings: SamplingSettings) -> None:
    logits = rows(2)
    warped = warp(logits, settings)
    np.testing.assert_allclose(np.exp(warped).sum(-1), 1.0, rtol=1e-5)
    for row, alone in zip(warped, logits, strict=True):
        np.testing.assert_array_equal(row, warp(alone, settings))
        np.testing.assert_allclose(np.exp(warp(alone + 8.0, settings)), np.exp(row), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("k", [1, 2, 7, 39])
def test_top_k_keeps_exactly_the_k_most_probable_tokens(k: int) -> None:
    logits = rows(3)
    kept = np.isfinite(warp(logits, SamplingSettings(top_k=k)))
    assert (kept.sum(-1) == k).all()
    for row, mask in zip(logits, kept, strict=True):
        assert row[mask].min() > row[~mask].max()


@pytest.mark.parametrize("k", [40, 41, 10000])
def test_top_k_of_the_whole_vocabulary_or_more_keeps_all(k: int) -> None:
    np.testing.assert_array_equal(warp(rows(3), SamplingSettings(top_k=k)), warp(rows(3), SamplingSettings()))


def test_top_k_keeps_all_tokens_that_tie_with_the_last_kept() -> None:
    logits = np.array([3.0, 1.0, 2.0, 2.0, 2.0, -5.0], np.float32)
    kept = np.isfinite(warp(logits, SamplingSettings(top_k=2)))
    assert kept.tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize("top_p", [0.01, 0.2, 0.5, 0.77, 0.95, 0.999])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_keeps_the_smallest_set_of_most_probable_tokens_with_that_mass(top_p: float, seed: int) -> None:
    logits = rows(seed, spread=1.5)
    kept = np.isfinite(warp(logits, SamplingSettings(top_p=top_p)))
    for probs, mask in zip(softmax(logits), kept, strict=True):
        assert probs[mask].sum() >= top_p - 1e-6
        assert probs[mask].sum() - probs[mask].min() < top_p + 1e-6
        assert mask.all() or probs[mask].min() > probs[~mask].max()


def test_top_p_is_the_mass_after_temperature_and_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the best two, 4/7 is enough for 0.5, although 0.4 of all four is not.
    kept = np.isfinite(warp(logits, SamplingSettings(top_k=2, top_p=0.5)))
    assert kept.tolist() == [True, False, False, False]
    # Temperature 0.5 squares: 0.16 of 0.30 is enough for 0.5.
    kept = np.isfinite(warp(logits, SamplingSettings(temperature=0.5, top_p=0.5)))
    assert kept.tolist() == [True, False, False, False]


def test_top_p_of_next_to_nothing_keeps_the_best_token_of_every_row() -> None:
    """The masses of a row may sum to a rounding less than one: then every token would be dropped."""
    logits = rows(8, (500, 40))
    kept = np.isfinite(warp(logits, SamplingSettings(top_p=1e-9)))
    assert (kept.sum(-1) == 1).all()
    assert (kept.argmax(-1) == logits.argmax(-1)).all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_top_p_holds_over_a_large_vocabulary(top_p: float, library: Any) -> None:
    """60,000 nearly equal tokens: a float32 running sum would be off by several."""
    logits = rows(5, (60000,), spread=0.01)
    kept = np.isfinite(np.asarray(warp(library(logits), SamplingSettings(top_p=top_p))))
    probs = np.sort(softmax(logits))[::-1]
    smallest = int(np.searchsorted(np.cumsum(probs), top_p)) + 1
    assert abs(int(kept.sum()) - smallest) <= 1


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 3.0, 100.0])
def test_temperature_divides_the_differences_of_log_probabilities(temperature: float) -> None:
    logits = rows(6, (5,), spread=1.0)
    warped = warp(logits, SamplingSettings(temperature=temperature))
    np.testing.assert_allclose(warped - warped[0], (logits - logits[0]) / temperature, rtol=1e-4, atol=1e-5)


def test_guidance_of_one_is_the_conditional_row_and_more_moves_away_from_the_unconditional() -> None:
    cond, uncond = rows(1), rows(2)
    np.testing.assert_allclose(guide(cond, uncond, 1.0), cond, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(guide(cond, uncond, 0.0), uncond)
    np.testing.assert_allclose(guide(cond, uncond, 3.0), cond + 2.0 * (cond - uncond), rtol=1e-5, atol=1e-5)
    as_torch = guide(torch.from_numpy(cond), torch.from_numpy(uncond), 3.0)
    np.testing.assert_allclose(as_torch.numpy(), guide(cond, uncond, 3.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_masked_and_one_hot_rows_give_no_nan(settings: SamplingSettings, library: Any) -> None:
    masked, one_hot, huge = rows(4, (40,)), np.full(40, -np.inf, np.float32), np.zeros(40, np.float32)
    masked[::3] = -np.inf
    one_hot[7] = 5.0
    huge[3] = 1e30
    probs = np.asarray(probabilities(warp(library(np.stack([masked, one_hot, huge])), settings)))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-5)
    assert (probs[0, ::3] == 0).all()
    assert probs[1, 7] == 1.0
    assert probs[2, 3] == 1.0


def test_half_precision_logits_are_warped_in_float32() -> None:
    logits = torch.from_numpy(rows(7)).bfloat16()
    warped = warp(logits, SamplingSettings(temperature=0.9))
    assert warped.dtype == torch.float32
    assert torch.equal(warped, warp(logits.float(), SamplingSettings(temperature=0.9)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (0.0, -1.0, 0.009, 101.0, math.nan, math.inf)],
        *[("top_k", value) for value in (-1, 2.5)],
        *[("top_p", value) for value in (0.0, -0.1, 1.01, math.nan)],
        *[("guidance", value) for value in (0.99, -1.0, 101.0, math.nan, math.inf)],
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"^{field}: .*{value}"):
        SamplingSettings(**{field: value})


def test_unguided_settings_differ_in_guidance_alone() -> None:
    settings = SamplingSettings(temperature=0.7, top_k=9, top_p=0.8, guidance=4.0)
    assert settings.unguided() == SamplingSettings(temperature=0.7, top_k=9, top_p=0.8, guidance=1.0)
