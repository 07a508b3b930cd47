"""The Frechet distance between two sets of feature vectors (arXiv 1706.08500, equation 6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["frechet_distance"]


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of the sets' means and covariances, feature rows (n, d).

    With fewer rows than features the covariances are singular and the root of their product is not to be had
    reliably. But C = A^T A with the centred rows A, and the trace of (C1 C2)^(1/2) is the sum of the singular values
    of A1 A2^T: exact whatever the ranks are.

    Raises:
        ValueError: a set has fewer than two rows, or they differ in width.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"two sets of rows of one width are needed, got shapes {first.shape} and {second.shape}")
    if min(len(first), len(second)) < 2:
        raise ValueError(f"at least two rows a set are needed, got {len(first)} and {len(second)}")
    gap = first.mean(axis=0, dtype=np.float64) - second.mean(axis=0, dtype=np.float64)
    ours, theirs = _factor(first), _factor(second)
    shared = np.linalg.svd(ours @ theirs.T, compute_uv=False).sum()
    return max(0.0, float(gap @ gap + np.square(ours).sum() + np.square(theirs).sum() - 2.0 * shared))


def _factor(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """A (at most min(n, d) rows, d) with A^T A the rows' covariance."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    centred /= np.sqrt(len(rows) - 1)
    return np.asarray(np.linalg.qr(centred, mode="r")) if len(rows) > rows.shape[1] else centred
