"""Contact sheets: rows of pictures to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cloud.models.image_codec import ImageCodec
from shared.grid import Grid

__all__ = ["save_contact_sheet", "tile"]


@torch.no_grad()
def save_contact_sheet(codec: ImageCodec, grid: Grid, groups: Sequence[Tensor], path: Path, columns: int = 8) -> None:
    """Decodes groups of tokens (pictures, T) and saves them, a row of each group in turn."""
    device = next(codec.parameters()).device
    decoded = [codec.decode(tokens.to(device).unflatten(1, grid.shape)).cpu() for tokens in groups]
    pixels = [((images + 1.0) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy() for images in decoded]
    rows = [part[start : start + columns] for start in range(0, len(pixels[0]), columns) for part in pixels]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tile([picture for row in rows for picture in row], columns)).save(path)


def tile(pictures: Sequence[NDArray[np.uint8]], columns: int, gap: int = 2) -> NDArray[np.uint8]:
    """Pictures (H, W, 3) of one size on one white sheet."""
    height, width, _ = pictures[0].shape
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = picture
    return sheet
