"""Names the concept in a picture: a linear map from image features to the text embeddings of the concepts' names.

It knows the drawings it was fitted on and little else: a measure of "is the asked concept recognisable" for models
that were trained on the same drawings, not a general text-image score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.graphs import CaptionEncoder

__all__ = ["Recogniser", "Retrieval", "name_embeddings", "retrieval"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recogniser:
    """A fitted recogniser.

    Args:
        names: embeddings of the concepts' names less their mean, unit rows (concepts, width).
        weights: features to embeddings, (features, width).
        feature_mean, name_mean: what was subtracted before the fit.
    """

    names: Floats
    weights: Floats
    feature_mean: Floats
    name_mean: Floats

    @classmethod
    def fit(
        cls, features: NDArray[np.floating], concepts: NDArray[np.integer], names: Floats, ridge: float
    ) -> Recogniser:
        """Ridge regression of the shown concepts' embeddings on the features.

        Args:
            features: (n, features).
            concepts: row of `names` that each picture shows, (n,).
            names: unit rows (concepts, width), at least two.
            ridge: added to the diagonal of the features' Gram matrix.
        """
        if len(names) < 2:
            raise ValueError(f"a recogniser needs at least two concepts, got {len(names)}")
        # What all names share says nothing of a concept, yet takes up most of every cosine.
        names = _unit(names - names.mean(axis=0))
        rows, wanted = features.astype(np.float64), names[concepts]
        feature_mean, name_mean = rows.mean(axis=0), wanted.mean(axis=0)
        rows -= feature_mean
        gram = rows.T @ rows + ridge * np.eye(rows.shape[1])
        return cls(names, np.linalg.solve(gram, rows.T @ (wanted - name_mean)), feature_mean, name_mean)

    def ranks(self, features: NDArray[np.floating], concepts: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rank of the asked concept among all, 1 is best; names that score the same count as better ones.

        Args:
            features: (n, features).
            concepts: rows of `names` that were asked for, (n,).
        """
        guesses = (features.astype(np.float64) - self.feature_mean) @ self.weights + self.name_mean
        scores = guesses @ self.names.T
        asked = np.take_along_axis(scores, concepts[:, None], axis=1)
        ranks: NDArray[np.int64] = (scores >= asked).sum(axis=1)
        return ranks


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Shares of pictures whose concept is the first, among the first five, the first ten; and its median rank."""

    recall_1: float
    recall_5: float
    recall_10: float
    median_rank: float


def retrieval(ranks: NDArray[np.int64]) -> Retrieval:
    """Summary of ranks (n,)."""
    first, five, ten = (float((ranks <= limit).mean()) for limit in (1, 5, 10))
    return Retrieval(first, five, ten, float(np.median(ranks)))


def name_embeddings(encoder: CaptionEncoder, names: Sequence[str]) -> Floats:
    """Unit rows (names, width): the mean token features of each name, as all-MiniLM-L6-v2 is meant to be used."""
    return _unit(np.stack([encoder.encode(name).mean(axis=0, dtype=np.float64) for name in names]))


def _unit(rows: Floats) -> Floats:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
