"""Contact sheets: many pictures with their captions in one PNG, to look at data and results."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_MARGIN = 6
_LINE = 12
_LINES = 6


def contact_sheet(pictures: Sequence[tuple[NDArray[np.uint8], str]], columns: int = 8) -> Image.Image:
    """Pictures, uint8 (H, W, 3) of one size, in rows of `columns`, each over its caption."""
    if not pictures:
        raise ValueError("pictures is empty: a contact sheet needs at least one")
    height, width = pictures[0][0].shape[:2]
    step_x, step_y = width + _MARGIN, height + _LINES * _LINE + _MARGIN
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (min(columns, len(pictures)) * step_x + _MARGIN, rows * step_y + _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=10)
    for number, (pixels, caption) in enumerate(pictures):
        left, top = _MARGIN + number % columns * step_x, _MARGIN + number // columns * step_y
        sheet.paste(Image.fromarray(pixels), (left, top))
        wrapped = textwrap.wrap(caption, max(8, width // 6))[:_LINES]
        draw.multiline_text((left, top + height + 1), "\n".join(wrapped), fill="black", font=font, spacing=2)
    return sheet


def save_contact_sheet(pictures: Sequence[tuple[NDArray[np.uint8], str]], path: Path, columns: int = 8) -> None:
    """Write the contact sheet of `pictures` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, columns).save(path)
