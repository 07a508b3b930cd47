"""A calibration is what its file says, whole and in order, or an error that names file and score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.bundle import Bundle
from shared.calibration import CALIBRATION, QUANTILES, ROW_QUANTILES, Calibration, quantiles_of, read_calibration
from shared.errors import BundleError, SettingsError
from shared.intervals import SCORES
from shared.thresholds import make_threshold

RISING = np.linspace(0.0, 3.0, QUANTILES).tolist()
GOOD: dict[str, Any] = dict.fromkeys(("interval", "width", "entropy"), RISING)
ROWS = [np.linspace(0.0, end, ROW_QUANTILES).tolist() for end in (2.0, 4.0)]
GOOD_ROWS: dict[str, Any] = dict.fromkeys(GOOD, ROWS)


def written(folder: Path, scores: Any, rows: Any = GOOD_ROWS) -> Path:
    path = folder / CALIBRATION
    path.write_text(json.dumps({"scores": scores, "rows": rows, "pictures": 64}))
    return path


def test_quantiles_are_those_of_the_file_and_more_is_kept_for_people(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD | {"width": [0] * 64 + [5]})
    calibration = Calibration.load(path)
    assert calibration.quantiles("interval") == tuple(RISING)
    assert calibration.quantiles("width") == (0.0,) * 64 + (5.0,)
    assert calibration.row_quantiles("entropy") == tuple(tuple(row) for row in ROWS)
    assert calibration.grid_rows == 2
    assert read_calibration(path)["pictures"] == 64


def test_random_scores_need_no_measuring(tmp_path: Path) -> None:
    calibration = Calibration.load(written(tmp_path, GOOD))
    quantiles = calibration.quantiles("random")
    assert (quantiles[0], quantiles[32], quantiles[-1], len(quantiles)) == (0.0, 0.5, 1.0, QUANTILES)
    rows = calibration.row_quantiles("random")
    assert len(rows) == 2
    assert {(row[0], row[16], row[-1], len(row)) for row in rows} == {(0.0, 0.5, 1.0, ROW_QUANTILES)}


def test_an_unknown_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"score: one of interval, .* not 'vibes'"):
        Calibration.load(written(tmp_path, GOOD)).quantiles("vibes")
    with pytest.raises(SettingsError, match=r"score: one of interval, .* not 'vibes'"):
        Calibration.load(written(tmp_path, GOOD)).row_quantiles("vibes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": RISING[:-1]}, r"scores\.width: 65 quantiles are needed, there are 64"),
        ({"entropy": None}, r"scores\.entropy: 65 quantiles are needed, there are none"),
        ({"interval": RISING[::-1]}, r"scores\.interval: its quantiles are not finite and ascending"),
        ({"interval": [*RISING[:-1], float("inf")]}, r"scores\.interval: its quantiles are not finite"),
        ({"interval": [float("nan"), *RISING[1:]]}, r"scores\.interval: its quantiles are not finite"),
        ({"interval": ["0.0", *RISING[1:]]}, r"scores\.interval: '0\.0' is not a number"),
        ({"interval": [False, *RISING[1:]]}, r"scores\.interval: False is not a number"),
    ],
)
def test_what_is_not_65_finite_ascending_numbers_is_refused_with_file_and_score(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, GOOD | change)
    with pytest.raises(BundleError, match=rf"{CALIBRATION}: {message}"):
        Calibration.load(path)
    with pytest.raises(BundleError, match=message):
        read_calibration(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": [ROWS[0], ROWS[1][:-1]]}, r"rows\.width\[1\]: 33 quantiles are needed, there are 32"),
        ({"interval": [None, ROWS[1]]}, r"rows\.interval\[0\]: 33 quantiles are needed, there are none"),
        ({"entropy": [ROWS[0][::-1], ROWS[1]]}, r"rows\.entropy\[0\]: its quantiles are not finite and ascending"),
        ({"interval": None}, r"rows\.interval: quantiles of each row of tokens are needed"),
        ({"interval": []}, r"rows\.interval: quantiles of each row of tokens are needed"),
        ({"entropy": ROWS[:1]}, r"rows: its scores do not have the same number of rows \(.*'entropy': 1"),
    ],
)
def test_rows_that_are_not_quantiles_or_not_there_are_refused_with_file_score_and_row(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, GOOD, GOOD_ROWS | change)
    with pytest.raises(BundleError, match=rf"{CALIBRATION}: {message}"):
        Calibration.load(path)


def test_a_calibration_from_before_rows_were_kept_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / CALIBRATION
    path.write_text(json.dumps({"scores": GOOD, "pictures": 64}))
    with pytest.raises(BundleError, match=rf"{CALIBRATION}: .*no table 'rows'.*export the bundle again"):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"scores": []}', "{}", "\xff"])
def test_what_is_no_calibration_at_all_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / CALIBRATION
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=rf"{CALIBRATION}: not a calibration"):
        Calibration.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"absent\.json: not a calibration .*No such file"):
        Calibration.load(tmp_path / "absent.json")


def test_quantiles_of_values_are_equidistant_and_survive_the_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).exponential(size=5000).astype(np.float32)
    quantiles = quantiles_of(values)
    assert (len(quantiles), quantiles[0], quantiles[-1]) == (QUANTILES, values.min(), values.max())
    assert abs((values <= quantiles[48]).mean() - 0.75) < 1e-3
    loaded = Calibration.load(written(tmp_path, GOOD | {"interval": quantiles}))
    assert loaded.quantiles("interval") == tuple(quantiles)
    assert quantiles_of(values, 5) == quantiles[::16]


@pytest.mark.parametrize("score", SCORES)
def test_a_threshold_starts_from_a_bundles_quantiles_at_the_budget(toy_bundle: Bundle, score: str) -> None:
    calibration = Calibration.load(toy_bundle.path(CALIBRATION))
    pooled, rows = calibration.quantiles(score), calibration.row_quantiles(score)
    for share, expected in ((0.6, False), (0.8, True)):
        for mode, quantiles in (("quantile", rows[-1]), ("average", pooled)):
            value = float(np.interp(share, np.linspace(0.0, 1.0, len(quantiles)), quantiles))
            counts = [0] * (len(rows) - 1) + [100]
            assert make_threshold(mode, 0.3, None, pooled, rows, counts).uncertain(value) is expected
