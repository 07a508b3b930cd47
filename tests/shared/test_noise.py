"""The noise: Philox exactly, the same on both sides, one independent number for each name, and the right laws."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from shared import noise
from shared.noise import Purpose

# Philox4x32-10 in the known-answer tests of the authors' Random123 library: counter, key, output.
KNOWN = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
NAME: dict[str, Any] = {"seed": 0x1234567_89ABCDEF, "purpose": 1, "positions": [7], "round": 3}


def words(**changes: Any) -> list[int]:
    arguments = NAME | {"lanes": 8} | changes
    seed, purpose, positions, lanes = (arguments.pop(k) for k in ("seed", "purpose", "positions", "lanes"))
    drawn: list[int] = noise.bits(seed, purpose, positions, lanes, **arguments)[0].tolist()
    return drawn


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_philox_gives_the_known_answers(counter: list[int], key: tuple[int, int], expected: Any, library: Any) -> None:
    drawn = noise._philox([library([word]) for word in counter], key)
    assert [int(word[0]) for word in drawn] == expected


def test_a_name_is_laid_out_as_block_position_round_purpose_under_the_seeds_two_words() -> None:
    """Fixes the layout: another one would change every picture of every seed."""
    assert noise.bits(0, 0, [0], 4)[0].tolist() == KNOWN[0][2]
    for lane in range(8):
        counter = [np.array([value]) for value in (lane // 4, 7, 3, 1)]
        assert words()[lane] == noise._philox(counter, (0x89ABCDEF, 0x1234567))[lane % 4][0]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("lanes", [1, 3, 4, 1001])
def test_numpy_and_torch_give_the_same_integers(seed: int, lanes: int) -> None:
    positions = [0, 5, 255, 2**31, 2**32 - 1]
    ours = noise.bits(seed, Purpose.TOKEN, positions, lanes, round=2**24 - 1)
    theirs = noise.bits(seed, Purpose.TOKEN, positions, lanes, round=2**24 - 1, xp=torch, device="cpu")
    assert ours.dtype == np.int64
    assert theirs.dtype == torch.int64
    assert ours.shape == (5, lanes)
    assert (theirs.numpy() == ours).all()
    assert ours.min() >= 0
    assert ours.max() < 2**32


def test_numpy_and_torch_give_the_same_floats_up_to_the_last_bit() -> None:
    ours, theirs = (noise.gumbel(9, Purpose.TOKEN, range(64), 512, xp=xp) for xp in (np, torch))
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=3e-7, atol=3e-7)
    assert (noise.uniform(9, 0, range(8), 5, xp=torch).numpy() == noise.uniform(9, 0, range(8), 5)).all()


def test_a_position_gets_the_same_numbers_alone_or_among_others_in_any_order() -> None:
    positions = [3, 200, 17, 0]
    together = noise.bits(5, Purpose.TOKEN, positions, 6)
    for row, position in zip(together, positions, strict=True):
        assert row.tolist() == noise.bits(5, Purpose.TOKEN, [position], 6)[0].tolist()


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 31])
def test_a_lane_does_not_depend_on_how_many_lanes_are_asked_for(lanes: int) -> None:
    assert words(lanes=lanes) == words(lanes=32)[:lanes]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": NAME["seed"] ^ 1},
        {"seed": NAME["seed"] ^ (1 << 32)},
        {"seed": NAME["seed"] ^ (1 << 63)},
        {"purpose": 2},
        {"positions": [8]},
        {"positions": [7 + 2**31]},
        {"round": 4},
        {"round": 3 + 2**23},
    ],
    ids=["seed low", "seed high", "seed top bit", "purpose", "position", "position top bit", "round", "round top bit"],
)
def test_every_part_of_the_name_changes_every_number(change: dict[str, Any]) -> None:
    assert not set(words(**change)) & set(words())


def test_lanes_and_names_do_not_repeat() -> None:
    drawn = [
        noise.bits(seed, purpose, range(8), 16, round=attempt)
        for seed, purpose, attempt in itertools.product((0, 1, 1 << 32), Purpose, range(3))
    ]
    pairs = np.concatenate(drawn).reshape(-1, 2)  # two words: a single one may well come twice among thousands
    assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_uniforms_are_uniform_and_never_reach_either_end() -> None:
    draws = noise.uniform(3, Purpose.ACCEPT, range(500), 40)
    assert draws.dtype == np.float64
    assert 0.0 < draws.min() < draws.max() < 1.0
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_extreme_words_give_finite_numbers(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_philox", lambda counter, key: [part * 0 + word for part in counter])
    assert 0.0 < noise.uniform(0, 0, [0], 1)[0, 0] < 1.0
    assert np.isfinite(noise.gumbel(0, 0, [0], 1)).all()


def test_neighbouring_names_are_uncorrelated() -> None:
    base = noise.uniform(1, Purpose.TOKEN, range(4000), 8)
    others = {
        "position": base[1:],
        "lane": np.roll(base, 1, axis=1),
        "purpose": noise.uniform(1, Purpose.DRAFT, range(4000), 8),
        "round": noise.uniform(1, Purpose.TOKEN, range(4000), 8, round=1),
        "seed": noise.uniform(2, Purpose.TOKEN, range(4000), 8),
    }
    for name, other in others.items():
        pairs = base[: len(other)].ravel(), other.ravel()
        assert abs(stats.pearsonr(*pairs).statistic) < 4 / len(pairs[0]) ** 0.5, name


def test_gumbel_numbers_follow_the_gumbel_law() -> None:
    draws = noise.gumbel(4, Purpose.TOKEN, range(400), 50)
    assert draws.dtype == np.float32
    assert stats.kstest(draws.ravel(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_gumbel_max_draws_tokens_with_their_probabilities(seed: int) -> None:
    probs = np.random.default_rng(seed).dirichlet(np.full(12, 0.7))
    drawn = (np.log(probs) + noise.gumbel(seed, Purpose.TOKEN, range(20000), 12)).argmax(1)
    counts = np.bincount(drawn, minlength=12)
    assert stats.chisquare(counts, probs * counts.sum()).pvalue > 1e-3


def test_no_positions_give_no_rows() -> None:
    assert noise.bits(1, 0, [], 5).shape == (0, 5)
    assert noise.bits(1, 0, [], 5, xp=torch).shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"purpose": -1}, "purpose"),
        ({"purpose": 256}, "purpose"),
        ({"round": -1}, "round"),
        ({"round": 2**24}, "round"),
        ({"lanes": 0}, "lanes"),
        ({"lanes": -4}, "lanes"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        words(**change)


def test_fresh_seeds_are_valid_short_and_not_repeated() -> None:
    seeds = {noise.fresh_seed() for _ in range(50)}
    assert len(seeds) > 45
    assert all(0 <= seed < 2**32 for seed in seeds)
