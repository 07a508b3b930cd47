"""What an export changed: exported graphs against the torch models on real token sequences, with floors.

The drafter is fed one token at a time through the cache that device and cloud use, so the report holds for what runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud.models.drafter import Drafter
from cloud.models.image_codec import ImageCodec
from cloud.models.loading import load_transformer
from cloud.models.transformer import Transformer
from shared.errors import BundleError
from shared.graphs import DrafterCache, Graph
from shared.sampling import SamplingSettings, guide, probabilities, warp
from training.captioned_tokens import CaptionedTokens

__all__ = [
    "ParityError",
    "ParityFloors",
    "ParityReport",
    "check_floors",
    "codec_parity",
    "drafter_parity",
    "target_parity",
    "write_report",
]


class ParityError(BundleError):
    """An exported model is less faithful to the trained one than the floors allow; the message names the figure."""


@dataclass(frozen=True, slots=True)
class ParityFloors:
    """How faithful an export must be.

    Args:
        drafter_top1: least share of rows whose most probable token is the same.
        drafter_tv: largest mean total variation of the drafter's warped rows.
        codec_psnr: least PSNR of decoded pictures in dB, for a range of 2.
        codec_ids: least share of equal ids of encoded pictures.
        text_cosine: least cosine of a token feature of the text encoder.
        target_tv: largest mean total variation of the target's warped guided rows, as it is stored.
    """

    drafter_top1: float = 0.9
    drafter_tv: float = 0.03
    codec_psnr: float = 50.0
    codec_ids: float = 0.995
    text_cosine: float = 0.998
    target_tv: float = 0.003

    def __post_init__(self) -> None:
        for name in ("drafter_top1", "drafter_tv", "codec_ids", "text_cosine", "target_tv"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: a number from 0 to 1 is needed, not {getattr(self, name)}")
        if not self.codec_psnr > 0.0:
            raise ValueError(f"codec_psnr: a number above 0 is needed, not {self.codec_psnr}")


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The measured figures, named as in `ParityFloors`, over how many sequences."""

    drafter_top1: float
    drafter_tv: float
    codec_psnr: float
    codec_ids: float
    text_cosine: float
    target_tv: float
    sequences: int


_AT_MOST = ("drafter_tv", "target_tv")


def check_floors(report: ParityReport, floors: ParityFloors) -> None:
    """Raises ParityError naming every figure that misses its floor."""
    missed = []
    for name, floor in asdict(floors).items():
        value = getattr(report, name)
        if name in _AT_MOST and not value <= floor:
            missed.append(f"{name} is {value:.4f}, at most {floor} is allowed")
        elif name not in _AT_MOST and not value >= floor:
            missed.append(f"{name} is {value:.4f}, at least {floor} is needed")
    if missed:
        raise ParityError(
            f"the export is not faithful enough: {'; '.join(missed)}. Choose another precision or change the floor"
        )


def write_report(report: ParityReport, path: Path) -> None:
    """Writes the figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def drafter_parity(
    graph: Graph, drafter: Drafter, batch: CaptionedTokens, sampling: SamplingSettings
) -> tuple[float, float]:
    """Top-1 agreement and mean total variation of the exported drafter's warped rows with torch's.

    Args:
        graph: the exported drafter.
        drafter: the trained one, on the CPU.
        batch: captions and pictures (see `CaptionedTokens`).
        sampling: the warp; guidance is left out, as in drafting.
    """
    agreement, distance = [], []
    cache = DrafterCache(graph, drafter.config.transformer.prefix_rows, batch[2].shape[-1])
    for features, length, tokens in zip(*batch, strict=True):
        truth = drafter(features[None], length[None], tokens[None]).centre[0].float().numpy()
        rows = _fed_singly(cache, features[: int(length)].numpy(), tokens.tolist())
        agreement.append((rows.argmax(-1) == truth.argmax(-1)).mean())
        distance.append(total_variation(rows, truth, sampling))
    return float(np.mean(agreement)), float(np.mean(distance))


def _fed_singly(cache: DrafterCache, features: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Centres (T, V) of the rows that predict each of T tokens."""
    rows = [cache.prefill(features).centre]
    rows += [cache.feed([token]).centre for token in tokens[:-1]]
    return np.concatenate(rows)


def total_variation(logits: NDArray[np.float32], others: NDArray[np.float32], sampling: SamplingSettings) -> float:
    """Mean total variation between the warped rows of logits (n, V)."""
    first, second = (probabilities(warp(x, sampling)) for x in (logits, others))
    return float(0.5 * np.abs(first - second).sum(axis=-1).mean())


@torch.no_grad()
def target_parity(stored: Path, target: Transformer, batch: CaptionedTokens, sampling: SamplingSettings) -> float:
    """Mean total variation of the stored target's warped guided rows with the trained one's."""
    loaded = load_transformer(stored).eval()
    if all(torch.equal(value, target.state_dict()[name]) for name, value in loaded.state_dict().items()):
        return 0.0
    distances = []
    for item in zip(*(part.split(1) for part in batch), strict=True):
        rows, truth = (_guided(model, item, sampling.guidance) for model in (loaded, target))
        distances.append(total_variation(rows, truth, sampling))
    return float(np.mean(distances))


def _guided(target: Transformer, item: tuple[Tensor, ...], guidance: float) -> NDArray[np.float32]:
    features, lengths, tokens = item
    logits = target(features, lengths, tokens).logits[0].float()
    if guidance != 1.0:
        uncond = target(features, torch.zeros_like(lengths), tokens).logits[0].float()
        logits = guide(logits, uncond, guidance)
    return np.asarray(logits.numpy())


@torch.no_grad()
def codec_parity(encoder: Graph, decoder: Graph, codec: ImageCodec, ids: Tensor) -> tuple[float, float]:
    """PSNR in dB of decoded pictures (range 2), and share of equal ids of those pictures encoded again.

    Args:
        encoder, decoder: the exported codec.
        codec: the trained one, on the CPU.
        ids: token grids (n, rows, cols).
    """
    errors, equal = [], []
    for grid in ids.split(1):
        truth = codec.decode(grid)
        (pictures,) = decoder.run(["images"], {"ids": grid.numpy()})
        errors.append(np.square(pictures - truth.numpy()).mean())
        (encoded,) = encoder.run(["ids"], {"images": truth.numpy()})
        equal.append((encoded == codec.encode(truth).numpy()).mean())
    error = float(np.mean(errors))
    return (10.0 * math.log10(4.0 / error) if error > 0.0 else math.inf), float(np.mean(equal))
