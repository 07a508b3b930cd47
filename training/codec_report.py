"""What a codec does to pictures it was not trained on: how close it gets, and how easy its tokens are to predict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cloud.models.image_codec import ImageCodec
from training.perceptual import ssim


@dataclass(frozen=True, slots=True)
class CodecReport:
    """Figures of a codec on a set of pictures. Entropies are in nats a token.

    `mse` on [-1, 1] and `ssim` are means over pictures. `token_entropy` is that of the tokens' frequencies,
    `perplexity` its exponential, `codes_used` the share of the codebook that occurs. `equal_left`, `equal_above` and
    `equal_either` are the shares of tokens that repeat a neighbour. `copy_entropy` is the mean code length of a model
    that knows only how often a token repeats its left or its upper neighbour and else draws by frequency: any useful
    target stays below it.
    """

    images: int
    mse: float
    ssim: float
    codes_used: float
    perplexity: float
    token_entropy: float
    copy_entropy: float
    equal_left: float
    equal_above: float
    equal_either: float

    def as_dict(self) -> dict[str, Any]:
        return {name: round(value, 5) for name, value in asdict(self).items()}

    def summary(self) -> str:
        return (
            f"MSE {self.mse:.5f} · SSIM {self.ssim:.4f} · codes used {self.codes_used:.0%} · "
            f"entropy {self.token_entropy:.2f} nats, {self.copy_entropy:.2f} with neighbours · "
            f"equal to a neighbour {self.equal_either:.0%}"
        )


@torch.no_grad()
def measure(codec: ImageCodec, images: Tensor, batch_size: int = 32) -> CodecReport:
    """Report of a codec on pictures (N, 3, H, W) in [-1, 1]."""
    device = next(codec.parameters()).device
    all_ids, errors, similarities = [], [], []
    for batch in images.split(batch_size):
        ids = codec.encode(batch.to(device))
        decoded = codec.decode(ids).cpu()
        all_ids.append(ids.cpu())
        errors.append((decoded - batch).square().mean(dim=(1, 2, 3)))
        similarities.append(ssim(decoded, batch))
    grids = torch.cat(all_ids)
    entropy = frequency_entropy(grids.flatten(), codec.config.codebook_size)
    left, above = _neighbours(grids)
    return CodecReport(
        images=len(images),
        mse=float(torch.cat(errors).mean()),
        ssim=float(torch.cat(similarities).mean()),
        codes_used=grids.unique().numel() / codec.config.codebook_size,
        perplexity=float(torch.tensor(entropy).exp()),
        token_entropy=entropy,
        copy_entropy=copy_entropy(grids, codec.config.codebook_size),
        equal_left=float((grids == left).float().mean()),
        equal_above=float((grids == above).float().mean()),
        equal_either=float(((grids == left) | (grids == above)).float().mean()),
    )


def frequency_entropy(ids: Tensor, codebook_size: int) -> float:
    """Entropy in nats of the frequencies of ids (N,)."""
    counts = torch.bincount(ids, minlength=codebook_size).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def copy_entropy(grids: Tensor, codebook_size: int) -> float:
    """Mean code length in nats of grids (N, rows, cols): first "left, above or new", then the new token."""
    left, above = _neighbours(grids)
    kinds = torch.where(grids == left, 0, torch.where(grids == above, 1, 2))
    fresh = grids[kinds == 2]
    novelty = frequency_entropy(fresh, codebook_size) if fresh.numel() else 0.0
    return frequency_entropy(kinds.flatten(), 3) + fresh.numel() / grids.numel() * novelty


def _neighbours(grids: Tensor) -> tuple[Tensor, Tensor]:
    """Left and upper neighbours of grids (N, rows, cols); -1 outside."""
    left, above = torch.full_like(grids, -1), torch.full_like(grids, -1)
    left[:, :, 1:], above[:, 1:] = grids[:, :, :-1], grids[:, :-1]
    return left, above
