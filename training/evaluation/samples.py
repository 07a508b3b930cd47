"""Sample sheets small enough for a repository."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from training.data.preview import contact_sheet
from training.evaluation.prompts import Pixels

__all__ = ["save_samples"]

_LIMIT = 300_000
_COLOURS = (256, 128, 64, 32)


def save_samples(pictures: Sequence[Pixels], captions: Sequence[str], path: Path, limit: int = _LIMIT) -> None:
    """Pictures over their captions as a palette PNG: the most of 256 to 32 colours with which it has `limit` bytes."""
    sheet = contact_sheet(list(zip(pictures, captions, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(_smallest(sheet, limit))
    os.replace(temporary, path)


def _smallest(sheet: Image.Image, limit: int) -> bytes:
    content = b""
    for colours in _COLOURS:
        buffer = io.BytesIO()
        sheet.quantize(colours, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        content = buffer.getvalue()
        if len(content) <= limit:
            break
    return content
