"""Saving pictures: complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shared.errors import OutputError
from shared.grid import Grid

__all__ = ["check_output", "partial_ids", "save_picture"]


def check_output(path: Path) -> None:
    """Fails early when a picture could not be saved at `path`.

    Raises:
        OutputError: the folder is missing or not writable, or the file type is unknown.
    """
    # Some formats can be read only.
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise OutputError(f"{path}: no picture format has the ending {path.suffix!r}; use .png")
    if path.is_dir() or not path.parent.is_dir():
        raise OutputError(f"{path}: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: the folder {path.parent} is not writable")


def save_picture(pixels: NDArray[np.uint8], path: Path, notes: dict[str, str] | None = None) -> None:
    """Saves pixels (H, W, 3) under a temporary name and renames the file, so that no half picture is ever seen.

    Args:
        notes: stored as text in a PNG.

    Raises:
        OutputError: the file could not be written (disk full, no permission).
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=path.suffix)
        with os.fdopen(handle, "wb") as file:
            Image.fromarray(pixels).save(file, **_options(path, notes or {}))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path}: the picture could not be saved ({error.strerror or error})") from error
    finally:
        # Renamed after success; an interrupt must not leave it either.
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def partial_ids(tokens: list[int], grid: Grid) -> NDArray[np.int64]:
    """A full token grid for a preview: rows not yet there repeat the last one."""
    ids = np.zeros(grid.size, np.int64)
    ids[: len(tokens)] = tokens
    for position in range(len(tokens), grid.size):
        above = grid.above(position)
        ids[position] = ids[above] if above is not None else tokens[-1] if tokens else 0
    return ids.reshape(grid.rows, grid.cols)


def _options(path: Path, notes: dict[str, str]) -> dict[str, Any]:
    kind = Image.registered_extensions()[path.suffix.lower()]
    if kind != "PNG":
        return {"format": kind}
    texts = PngInfo()
    for name, value in notes.items():
        texts.add_itxt(name, value)
    return {"format": kind, "pnginfo": texts}


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
