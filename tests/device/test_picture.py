"""Pictures are saved whole or not at all, and what cannot be saved is refused early."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from device.picture import check_output, partial_ids, save_picture
from shared.errors import OutputError
from shared.grid import Grid

PIXELS = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)


def test_png_holds_the_pixels_and_the_notes(tmp_path: Path) -> None:
    save_picture(PIXELS, tmp_path / "cat.png", {"prompt": "eine Katze, 猫", "seed": "7"})
    with Image.open(tmp_path / "cat.png") as image:
        assert np.array_equal(np.asarray(image), PIXELS)
        assert image.info["prompt"] == "eine Katze, 猫"
        assert image.info["seed"] == "7"


@pytest.mark.parametrize("name", ["cat.jpg", "cat.webp", "cat.bmp", "CAT.PNG"])
def test_other_formats_are_saved_too(tmp_path: Path, name: str) -> None:
    check_output(tmp_path / name)
    save_picture(PIXELS, tmp_path / name, {"seed": "7"})
    with Image.open(tmp_path / name) as image:
        assert image.size == (6, 8)


def test_full_disk_leaves_the_old_picture_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cat.png"
    save_picture(PIXELS, path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cat\.png: the picture could not be saved \(No space left on device\)"):
        save_picture(255 - PIXELS, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_interrupt_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_picture(PIXELS, tmp_path / "cat.png")
    assert not list(tmp_path.iterdir())


def test_saved_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_picture(PIXELS, tmp_path / "cat.png")
    finally:
        assert os.umask(before) == 0o027
    assert (tmp_path / "cat.png").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cat", "no picture format has the ending ''"),
        ("cat.txt", "no picture format has the ending '.txt'"),
        ("cat.psd", "cat.psd"),  # can be read, not written
        ("nowhere/cat.png", "there is no folder"),
        ("folder.png", "it is a folder"),
    ],
)
def test_output_that_cannot_be_is_refused_early(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OutputError, match=words):
        check_output(tmp_path / name)


def test_folder_without_the_right_to_write_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(OutputError, match="is not writable"):
        check_output(tmp_path / "cat.png")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], [[0, 0, 0]] * 3),
        ([1, 2], [[1, 2, 2]] * 3),
        ([1, 2, 3, 4], [[1, 2, 3], [4, 2, 3], [4, 2, 3]]),
        ([1, 2, 3, 4, 5, 6, 7, 0, 1], [[1, 2, 3], [4, 5, 6], [7, 0, 1]]),
    ],
)
def test_preview_repeats_the_last_row_where_nothing_is_yet(tokens: list[int], expected: list[list[int]]) -> None:
    assert partial_ids(tokens, Grid(3, 3)).tolist() == expected
