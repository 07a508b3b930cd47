"""The figures of one set of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.data.claims import BACKGROUNDS, BackgroundKind
from training.evaluation.background import shows_background
from training.evaluation.features import FeatureExtractor
from training.evaluation.frechet import frechet_distance
from training.evaluation.pictures import DrawnPicture
from training.evaluation.prompts import Pixels, PromptList
from training.evaluation.recogniser import Recogniser, Retrieval, retrieval

__all__ = ["Cost", "Figures", "Judge", "Share", "cost_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """`right` of `total`."""

    right: int
    total: int

    @property
    def value(self) -> float | None:
        """None of nothing."""
        return self.right / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Cost:
    """Means over the reports of pictures.

    Args:
        seconds: wall time of a picture, while `concurrency` (all values that occur) were drawn at once.
        cloud_forwards: passes of the target a picture took part in.
        accepted: share of the judged tokens that the cloud left standing; None where nothing was judged.
        cloud_call_rate: share of the tokens that the cloud sampled or judged.
    """

    seconds: float
    cloud_forwards: float
    accepted: float | None
    cloud_call_rate: float
    concurrency: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a set of pictures; None, or nothing, where the list's pictures claim nothing of the kind.

    Args:
        pictures: how many.
        frechet: distance of their features to the reference's.
        retrieval: of the asked concept, by the recogniser.
        background: how many have the claimed colours behind, by kind of background.
        cost: of drawn pictures.
    """

    pictures: int
    frechet: float
    retrieval: Retrieval | None = None
    background: dict[BackgroundKind, Share] = field(default_factory=dict)
    cost: Cost | None = None


class Judge:
    """Measures sets of pictures of one list against the list's reference.

    Args:
        prompts: the list.
        extractor: makes features.
        recogniser: names objects; None for lists without claims.
        concepts: row of each concept code in the recogniser's names.
    """

    def __init__(
        self, prompts: PromptList, extractor: FeatureExtractor, recogniser: Recogniser | None, concepts: dict[str, int]
    ) -> None:
        self._prompts, self._extractor = prompts, extractor
        self._recogniser = recogniser if prompts.single else None
        self._reference = extractor(prompts.reference, "reference")
        codes = [claims.objects[0].code for claims in prompts.claims or ()] if self._recogniser else []
        self._asked = np.array([concepts[code] for code in codes], np.int64)

    def figures(self, pictures: Sequence[Pixels], cost: Cost | None = None) -> Figures:
        """Figures of one picture a prompt, in the prompts' order, from the first prompt on."""
        features = self._extractor(pictures)
        return Figures(
            len(pictures),
            frechet_distance(features, self._reference),
            self._retrieval(features),
            self._background(pictures),
            cost,
        )

    def _retrieval(self, features: NDArray[np.float32]) -> Retrieval | None:
        if self._recogniser is None:
            return None
        return retrieval(self._recogniser.ranks(features, self._asked[: len(features)]))

    def _background(self, pictures: Sequence[Pixels]) -> dict[BackgroundKind, Share]:
        if self._prompts.claims is None:
            return {}
        hits: dict[BackgroundKind, list[bool]] = {kind: [] for kind in BACKGROUNDS}
        for pixels, claims in zip(pictures, self._prompts.claims, strict=False):
            hits[claims.background.kind].append(shows_background(pixels, claims.background))
        return {kind: Share(sum(found), len(found)) for kind, found in hits.items()}


def cost_of(pictures: Sequence[DrawnPicture]) -> Cost:
    """What drawing the pictures took, by their reports."""
    reports = [picture.report for picture in pictures]
    accepted = sum(report["draft"]["accepted"] for report in reports)
    judged = accepted + sum(report["draft"]["corrected"] for report in reports)
    return Cost(
        seconds=_mean(reports, "seconds", "total"),
        cloud_forwards=_mean(reports, "cloud", "forwards"),
        accepted=accepted / judged if judged else None,
        cloud_call_rate=_mean(reports, "cloud_call_rate"),
        concurrency=tuple(sorted({picture.concurrency for picture in pictures})),
    )


def _mean(reports: Sequence[dict[str, Any]], *path: str) -> float:
    values: list[Any] = list(reports)
    for name in path:
        values = [value[name] for value in values]
    return float(np.mean(values))
