"""How well a drafter knows what it does not know: scores against true rejections, coverage, and the calibration.

The truth of a row is TV(draft, target): the probability that exact speculative sampling rejects its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from cloud.models.drafter import Drafter
from cloud.models.transformer import Transformer
from shared.calibration import ROW_QUANTILES, quantiles_of
from shared.intervals import SCORES as ALL_SCORES
from shared.intervals import interval_measures, log_odds, score
from shared.sampling import SamplingSettings
from training.captioned_tokens import CaptionedTokens
from training.drafter import guided_log_probs
from training.drawing import open_engine
from training.interval_losses import distance_rows
from training.sampling import sample_tokens

__all__ = [
    "SCORES",
    "MeasuredRows",
    "ScoreQuality",
    "UncertaintyReport",
    "calibrate",
    "kept_distance",
    "measure_rows",
    "report_on",
    "row_scores",
    "spearman",
]

SCORES = ("interval", "width", "sigma", "entropy", "1-maxp", "random")
KEPT = 0.7

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRows:
    """Figures of n rows, (n,) each.

    Args:
        distance: TV(draft, target), at the temperature that tokens are drawn at.
        inside: mass of the target whose interval holds its log-odds.
        radius: radius, weighted by the target.
        scores: of each name in `SCORES`; the larger, the less sure.
    """

    distance: Floats
    inside: Floats
    radius: Floats
    scores: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class ScoreQuality:
    """Rank correlation of a score with the truth, and the mean TV of the rows it would keep on the device."""

    spearman: float
    kept: float


@dataclass(frozen=True, slots=True)
class UncertaintyReport:
    """Figures of many rows.

    Args:
        rows: how many.
        distance: mean TV(draft, target).
        coverage: mean mass of the target inside the intervals.
        radius: median over rows.
        oracle: mean TV of the rows that the truth itself would keep.
        scores: quality of each score.
    """

    rows: int
    distance: float
    coverage: float
    radius: float
    oracle: float
    scores: dict[str, ScoreQuality]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        interval = self.scores["interval"]
        return (
            f"TV {self.distance:.4f}, coverage {self.coverage:.4f}, radius {self.radius:.3f}, "
            f"Spearman {interval.spearman:.3f}, kept TV {interval.kept:.4f}"
        )


def row_scores(log_probs: Tensor, radius: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Every score that a row itself tells: all of `SCORES` but `random`.

    Args:
        log_probs: draft log-probabilities (..., V) at temperature 1.
        radius: (..., V) or (..., 1).
        temperature: at which tokens are drawn: the scores are those of the law that a token really has.
    """
    log_probs = (log_probs / temperature).log_softmax(-1)
    measures = interval_measures(log_probs, radius)
    scores = {name: score(name, measures, log_probs.shape[-1]) for name in ("interval", "width", "entropy")}
    return scores | {"sigma": measures[..., 1], "1-maxp": 1.0 - log_probs.amax(-1).exp()}


@torch.no_grad()
def measure_rows(
    drafter: Drafter,
    target: Transformer,
    batch: CaptionedTokens,
    guidance: float,
    temperature: float = 1.0,
    size: int = 16,
    bf16: bool = False,
) -> MeasuredRows:
    """Measures every row of pictures under teacher forcing.

    Args:
        guidance: scale of the target's guidance.
        temperature: at which tokens are drawn: of the distance and the scores.
        size: pictures a pass.
        bf16: compute the two models under autocast.
    """
    device = next(drafter.parameters()).device
    parts: dict[str, list[Tensor]] = {}
    for part in zip(*(items.split(size) for items in batch), strict=True):
        moved = tuple(item.to(device) for item in part)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            truth, rows = guided_log_probs(target, moved, guidance), drafter(*moved)
        draft, radius = rows.centre.float().log_softmax(-1), rows.radius.float()
        mass = truth.exp()
        figures = {
            "distance": distance_rows(draft, truth, temperature),
            "inside": (mass * ((log_odds(truth) - log_odds(draft)).abs() <= radius)).sum(-1),
            "radius": (mass * radius).sum(-1),
            **row_scores(draft, radius, temperature),
        }
        for name, value in figures.items():
            parts.setdefault(name, []).append(value.flatten().cpu())
    whole = {name: torch.cat(values).numpy().astype(np.float64) for name, values in parts.items()}
    whole["random"] = np.random.default_rng(0).random(len(whole["distance"]))
    return MeasuredRows(whole["distance"], whole["inside"], whole["radius"], {name: whole[name] for name in SCORES})


def report_on(rows: MeasuredRows, kept: float = KEPT) -> UncertaintyReport:
    """Sums up measured rows; `kept` is the share of the rows that stay on the device."""
    return UncertaintyReport(
        len(rows.distance),
        float(rows.distance.mean()),
        float(rows.inside.mean()),
        float(np.median(rows.radius)),
        kept_distance(rows.distance, rows.distance, kept),
        {
            name: ScoreQuality(spearman(values, rows.distance), kept_distance(values, rows.distance, kept))
            for name, values in rows.scores.items()
        },
    )


def spearman(score: Floats, truth: Floats) -> float:
    """Spearman's rank correlation of (n,) and (n,); equal values share a rank, and a constant score has 0."""
    ranks = rankdata(score), rankdata(truth)
    if any(rank.std() == 0.0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def kept_distance(score: Floats, distance: Floats, kept: float) -> float:
    """Mean distance of the share `kept` of the rows with the lowest score; equal scores are kept in a random order."""
    shuffled = np.random.default_rng(0).permutation(len(score))
    order = shuffled[np.argsort(score[shuffled], kind="stable")]
    return float(distance[order[: max(1, round(kept * len(score)))]].mean())


@torch.no_grad()
def calibrate(
    drafter: Drafter,
    captions: Sequence[Tensor],
    sampling: SamplingSettings,
    at_once: int = 40,
    precision: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """The content of `calibration.json` (see `shared.calibration`), from pictures that the drafter draws.

    Args:
        captions: caption features (length, width), one for each picture.
        sampling: as the bundle's; its guidance is what the drafter imitates, recorded but not applied.
        at_once: pictures drawn together.
    """
    device = next(drafter.parameters()).device
    engine = open_engine(drafter.transformer, at_once, device, precision)
    scores: dict[str, list[Tensor]] = {}
    for start in range(0, len(captions), at_once):
        part = captions[start : start + at_once]
        seeds = [seed + index for index in range(start, start + len(part))]
        tokens = sample_tokens(engine, part, sampling.unguided(), seeds)
        rows = drafter(*_padded(part, drafter.config.transformer.prefix_rows, device), tokens.to(device))
        found = row_scores(rows.centre.float().log_softmax(-1), rows.radius.float(), sampling.temperature)
        for name in ALL_SCORES[:3]:
            scores.setdefault(name, []).append(found[name].cpu())
    whole = {name: torch.cat(values).numpy() for name, values in scores.items()}
    grid_rows = drafter.config.transformer.rows
    return {
        "scores": {name: quantiles_of(values) for name, values in whole.items()},
        "rows": {
            name: [quantiles_of(row, ROW_QUANTILES) for row in np.split(values, grid_rows, axis=1)]
            for name, values in whole.items()
        },
        "pictures": len(captions),
        "seed": seed,
        **asdict(sampling),
    }


def _padded(captions: Sequence[Tensor], rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features (pictures, rows, width) and lengths (pictures,)."""
    features = torch.zeros(len(captions), rows, captions[0].shape[-1], device=device)
    for row, caption in zip(features, captions, strict=True):
        row[: len(caption)] = caption
    return features, torch.tensor([len(caption) for caption in captions], device=device)
