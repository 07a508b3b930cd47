"""The uncertainty report measures what it says, on cases whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from shared.calibration import QUANTILES, Calibration
from shared.intervals import probability_bounds
from shared.sampling import SamplingSettings
from tests.training.interval_toys import CONFIG, SIZE, save_cache, toy_models
from training.captioned_tokens import CaptionedTokens, first_items
from training.data.tokens import TokenCache
from training.drafter import guided_log_probs
from training.drawing import caption_of, open_engine
from training.sampling import sample_tokens
from training.uncertainty import (
    SCORES,
    MeasuredRows,
    calibrate,
    kept_distance,
    measure_rows,
    report_on,
    row_scores,
    spearman,
)
from training.uncertainty_report import UncertaintyHistory, score_table

GUIDANCE = 2.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return TokenCache(save_cache(tmp_path_factory.mktemp("uncertainty"), val=6) / "val")


@pytest.fixture(scope="module")
def batch(cache: TokenCache) -> CaptionedTokens:
    return first_items(cache, 6)


@pytest.fixture(scope="module")
def measured(batch: CaptionedTokens) -> MeasuredRows:
    target, drafter = toy_models()
    return measure_rows(drafter, target, batch, GUIDANCE, size=4)


@pytest.fixture
def distance() -> np.ndarray:
    return np.random.default_rng(0).random(1000)


def test_spearman_is_that_of_scipy_with_ties() -> None:
    random = np.random.default_rng(1)
    one, other = random.integers(0, 5, 200).astype(float), random.integers(0, 7, 200).astype(float)
    other += one
    assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert spearman(one, np.exp(one)) == pytest.approx(1.0)
    assert spearman(one, -one) == pytest.approx(-1.0)


def test_a_constant_score_ranks_nothing_and_keeps_at_random(distance: np.ndarray) -> None:
    constant, rising = np.ones(1000), np.sort(distance)
    assert spearman(constant, distance) == 0.0
    assert kept_distance(constant, rising, 0.7) == pytest.approx(rising.mean(), abs=0.03)


def test_the_truth_keeps_the_best_rows_and_its_opposite_the_worst(distance: np.ndarray) -> None:
    ordered = np.sort(distance)
    assert kept_distance(distance, distance, 0.7) == pytest.approx(ordered[:700].mean())
    assert kept_distance(-distance, distance, 0.7) == pytest.approx(ordered[300:].mean())
    assert kept_distance(np.exp(3 * distance), distance, 0.7) == pytest.approx(ordered[:700].mean())
    assert kept_distance(distance[::-1].copy(), distance, 1.0) == pytest.approx(distance.mean())


def test_measured_rows_are_those_of_the_definitions(measured: MeasuredRows, batch: CaptionedTokens) -> None:
    target, drafter = toy_models()
    with torch.no_grad():
        truth, rows = guided_log_probs(target, batch, GUIDANCE).exp().double(), drafter(*batch)
    draft, radius = rows.centre.log_softmax(-1), rows.radius
    low, high = probability_bounds(draft, radius)
    overlap = torch.minimum(truth, draft.exp().double()).sum(-1).flatten().numpy()
    inside = (truth * ((low <= truth) & (truth <= high))).sum(-1).flatten().numpy()
    width = (high - low).double()
    spread = width.std(-1, correction=0).flatten().numpy()
    assert np.allclose(measured.distance, 1.0 - overlap, atol=1e-5)
    assert np.allclose(measured.inside, inside, atol=1e-5)
    assert np.allclose(measured.scores["width"], width.sum(-1).flatten(), rtol=1e-4)
    assert np.allclose(measured.scores["sigma"], spread, rtol=1e-3)
    product = width.sum(-1).flatten().numpy() * spread * CONFIG.vocabulary**0.5
    assert np.allclose(measured.scores["interval"], product, rtol=1e-3)
    assert np.allclose(measured.scores["1-maxp"], 1.0 - draft.exp().amax(-1).flatten(), atol=1e-5)
    assert 0.0 < measured.inside.mean() < 1.0


def test_a_drafter_that_is_the_target_is_never_wrong(batch: CaptionedTokens) -> None:
    target, drafter = toy_models()
    drafter.transformer.load_state_dict(target.state_dict())
    rows = measure_rows(drafter, target, batch, 1.0)
    assert rows.distance.max() < 1e-5
    assert rows.inside.min() > 1.0 - 1e-5


def test_the_report_sums_up_each_score_beside_oracle_and_chance(measured: MeasuredRows) -> None:
    report = report_on(measured)
    assert report.rows == 6 * SIZE
    assert set(report.scores) == set(SCORES)
    assert report.distance == pytest.approx(measured.distance.mean())
    assert report.oracle == pytest.approx(np.sort(measured.distance)[: round(0.7 * report.rows)].mean())
    assert all(quality.kept >= report.oracle for quality in report.scores.values())
    truth = {**measured.scores, "interval": np.sqrt(measured.distance)}
    perfect = report_on(MeasuredRows(measured.distance, measured.inside, measured.radius, truth))
    assert perfect.scores["interval"].spearman == pytest.approx(1.0)
    assert perfect.scores["interval"].kept == pytest.approx(report.oracle)


def test_history_table_and_plot_follow_the_validations(measured: MeasuredRows, tmp_path: Path) -> None:
    history = UncertaintyHistory(tmp_path)
    for step in (0, 10, 20, 10):  # the run broke off behind 20 and was resumed before 10
        reports = history.add(step, {"drawn": measured, "tokens": measured})
    lines = [json.loads(line) for line in (tmp_path / "uncertainty.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10]
    assert lines[0]["sets"]["drawn"]["scores"]["width"] == {
        "spearman": reports["drawn"].scores["width"].spearman,
        "kept": reports["drawn"].scores["width"].kept,
    }
    text = (tmp_path / "uncertainty.md").read_text()
    assert score_table(reports) in text
    assert f"| width | {reports['drawn'].scores['width'].spearman:.3f} |" in text
    assert (tmp_path / "uncertainty.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def captions(cache: TokenCache) -> list[Tensor]:
    return [caption_of(cache, item, CONFIG.prefix_rows) for item in range(6)]


def test_scores_are_those_of_the_law_at_the_temperature(batch: CaptionedTokens) -> None:
    with torch.no_grad():
        rows = toy_models()[1](*batch)
    cold = (rows.centre / 0.5).log_softmax(-1)
    scores = row_scores(rows.centre.log_softmax(-1), rows.radius, 0.5)
    torch.testing.assert_close(scores["entropy"], -(cold.exp() * cold).sum(-1))
    torch.testing.assert_close(scores["1-maxp"], 1.0 - cold.exp().amax(-1))
    assert (scores["entropy"] < row_scores(rows.centre.log_softmax(-1), rows.radius)["entropy"]).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_calibration_holds_the_scores_of_what_the_drafter_draws(
    captions: list[Tensor], batch: CaptionedTokens, temperature: float
) -> None:
    _, drafter = toy_models()
    sampling = SamplingSettings(temperature, guidance=GUIDANCE)
    content = calibrate(drafter, captions, sampling, at_once=4, precision="fp32", seed=5)
    calibration = Calibration.from_dict(json.loads(json.dumps(content)))
    assert content["pictures"] == 6
    assert content["guidance"] == GUIDANCE
    engine = open_engine(drafter.transformer, 6, torch.device("cpu"), "fp32")
    tokens = sample_tokens(engine, captions, SamplingSettings(temperature), [5, 6, 7, 8, 9, 10])
    with torch.no_grad():
        rows = drafter(batch[0], batch[1], tokens)
    scores = row_scores(rows.centre.log_softmax(-1), rows.radius, temperature)
    for name in ("interval", "width", "entropy"):
        values = np.sort(scores[name].flatten().numpy())
        quantiles = calibration.quantiles(name)
        assert len(quantiles) == QUANTILES
        assert quantiles[0] == pytest.approx(values[0], rel=1e-3)
        assert quantiles[32] == pytest.approx(float(np.median(values)), rel=1e-3)
        assert quantiles[-1] == pytest.approx(values[-1], rel=1e-3)
        by_row = scores[name].unflatten(1, (calibration.grid_rows, -1))
        for index, row in enumerate(calibration.row_quantiles(name)):
            in_row = by_row[:, index].numpy()
            expected = [in_row.min(), np.median(in_row), in_row.max()]
            assert [row[0], row[16], row[-1]] == pytest.approx(expected, rel=1e-3)
