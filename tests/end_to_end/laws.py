"""The law of whole pictures of a tiny bundle, enumerated, and how well drawn pictures fit it."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from cloud.models.loading import load_transformer
from device.graphs import DeviceModels
from shared.bundle import Bundle
from shared.intervals import interval_measures, score
from shared.sampling import SamplingSettings, guide, warp
from training.drafter import load_drafter

PROMPT = "a red apple"
SAMPLING = SamplingSettings(temperature=0.7, top_k=2, guidance=1.5)
Law = dict[tuple[int, ...], float]


def joint_law(bundle: Bundle) -> Law:
    """Probability of every picture under the warped, guided target."""
    tokens = _pictures(bundle)
    return _law(_target_rows(bundle, tokens), tokens)


def mixed_law(bundle: Bundle, prefix: int) -> tuple[Law, float]:
    """Probability of every picture when uncertain tokens are the target's and the others the drafter's.

    Returns the law and the threshold on score `interval` that it holds for: in the widest gap between scores near the
    middle, so that the last bits of a score decide nothing.
    """
    tokens = _pictures(bundle)
    padded, lengths = _captions(bundle, len(tokens))
    drafter = load_drafter(bundle.path("drafter.safetensors"))
    with torch.no_grad():
        rows = drafter(padded, lengths, tokens)
    measures = interval_measures((rows.centre / SAMPLING.temperature).log_softmax(-1), rows.radius)
    scores: Tensor = score("interval", measures, bundle.manifest.vocabulary)
    levels = torch.unique(scores[:, prefix:])
    middle = levels[len(levels) // 3 : -(len(levels) // 3)]
    place = int((middle[1:] - middle[:-1]).argmax())
    threshold = float(middle[place : place + 2].mean())
    judged = scores > threshold
    judged[:, :prefix] = True
    draft = warp(rows.centre, SAMPLING.unguided()).double()
    return _law(torch.where(judged.unsqueeze(-1), _target_rows(bundle, tokens), draft), tokens), threshold


def _pictures(bundle: Bundle) -> Tensor:
    manifest = bundle.manifest
    return torch.tensor(list(itertools.product(range(manifest.vocabulary), repeat=manifest.grid.size)))


def _captions(bundle: Bundle, count: int) -> tuple[Tensor, Tensor]:
    features = torch.from_numpy(DeviceModels(bundle).captions.encode(PROMPT))
    padded = torch.zeros(count, bundle.manifest.prefix_rows, features.shape[1])
    padded[:, : len(features)] = features
    return padded, torch.full((count,), len(features))


def _target_rows(bundle: Bundle, tokens: Tensor) -> Tensor:
    target = load_transformer(bundle.path("target.safetensors")).eval()
    padded, lengths = _captions(bundle, len(tokens))
    with torch.no_grad():
        cond = target(padded, lengths, tokens).logits
        uncond = target(padded, torch.zeros_like(lengths), tokens).logits
    rows: Tensor = warp(guide(cond, uncond, SAMPLING.guidance), SAMPLING).double()
    return rows


def _law(rows: Tensor, tokens: Tensor) -> Law:
    joint = rows.gather(-1, tokens.unsqueeze(-1)).sum((1, 2)).exp()
    assert abs(float(joint.sum()) - 1.0) < 1e-5
    return {tuple(picture): chance for picture, chance in zip(tokens.tolist(), joint.tolist(), strict=True)}


def fit(drawn: Counter[tuple[int, ...]], law: Law) -> float:
    """p-value of the G-test of drawn pictures against the law; rare pictures are pooled."""
    total = drawn.total()
    expected = np.array([law[picture] * total for picture in law])
    observed = np.array([drawn[picture] for picture in law], float)
    if observed[expected < 1e-6 * total].any():
        return 0.0
    order = np.argsort(expected)
    expected, observed = expected[order], observed[order]
    rare = max(1, int(np.searchsorted(np.cumsum(expected), 10.0)) + 1)
    expected = np.append(expected[rare:], expected[:rare].sum())
    observed = np.append(observed[rare:], observed[:rare].sum())
    expected *= observed.sum() / expected.sum()
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)
