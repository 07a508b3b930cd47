"""A user's own pictures load as they are described, and what is wrong names its file and line."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from training.data.errors import DataError
from training.data.folder import ImageFolderDataset
from training.data.images import open_images
from training.data.settings import DataSettings


def add(folder, name, caption="a thing", size=(40, 30), colour="red", mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(folder / name)
    with (folder / "metadata.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"file_name": name, "text": caption}) + "\n")


def test_split_folders_give_their_own_pictures(tmp_path):
    for name in ("train", "validation", "test"):
        add(tmp_path / name, "0.png", f"from {name}")
    captions = {split: ImageFolderDataset(tmp_path, split)[0][1] for split in ("train", "val", "test")}
    assert captions == {"train": "from train", "val": "from validation", "test": "from test"}


def test_without_split_folders_every_picture_lands_in_one_split_and_stays_there(tmp_path):
    for number in range(200):
        add(tmp_path, f"{number}.png", f"number {number}", size=(2, 2))
    found = {
        split: {picture.caption for picture in ImageFolderDataset(tmp_path, split).pictures}
        for split in ("train", "val", "test")
    }
    assert sum(len(captions) for captions in found.values()) == 200
    assert len(set.union(*found.values())) == 200
    assert 160 < len(found["train"]) < 195
    add(tmp_path, "new.png", "number 200", size=(2, 2))
    assert found["val"] <= {picture.caption for picture in ImageFolderDataset(tmp_path, "val").pictures}


def test_pictures_are_centre_cropped_and_resized(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 16:44] = (0, 255, 0)  # the middle third, and a margin for the resampling filter
    (tmp_path / "train").mkdir()
    Image.fromarray(wide).save(tmp_path / "train" / "wide.png")
    (tmp_path / "train" / "metadata.jsonl").write_text('{"file_name": "wide.png", "text": " green "}\n\n')
    image, caption = ImageFolderDataset(tmp_path, "train", size=16)[0]
    assert caption == "green"
    assert image.shape == (3, 16, 16)
    assert image.dtype == torch.float32
    assert torch.allclose(image, torch.tensor([-1.0, 1.0, -1.0])[:, None, None].expand(3, 16, 16), atol=0.01)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [("RGBA", (0, 0, 0, 0), 1.0), ("L", 255, 1.0), ("LA", (0, 0), 1.0), ("P", 0, -1.0), ("CMYK", (0, 0, 0, 255), -1.0)],
)
def test_every_colour_mode_becomes_rgb_on_white(tmp_path, mode, colour, expected):
    name = "0.tiff" if mode == "CMYK" else "0.png"
    add(tmp_path / "train", name, mode=mode, colour=colour)
    image, _ = ImageFolderDataset(tmp_path, "train", size=8)[0]
    assert torch.allclose(image, torch.full((3, 8, 8), expected), atol=0.02)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object but a list"),
        ('{"text": "x"}', 'non-empty string "file_name"'),
        ('{"file_name": "0.png"}', 'non-empty string "text"'),
        ('{"file_name": "0.png", "text": "  "}', 'non-empty string "text"'),
        ('{"file_name": "0.png", "text": 3}', 'non-empty string "text"'),
        ('{"file_name": "gone.png", "text": "x"}', "gone.png does not exist"),
        ('{"file_name": "../0.png", "text": "x"}', "points outside"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    add(tmp_path / "train", "0.png")
    with (tmp_path / "train" / "metadata.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=rf"metadata\.jsonl:2: .*{said}"):
        ImageFolderDataset(tmp_path, "train")


def test_a_file_that_is_no_picture_is_named_by_its_line(tmp_path):
    add(tmp_path / "train", "0.png")
    (tmp_path / "train" / "0.png").write_text("text")
    with pytest.raises(DataError, match=r"metadata\.jsonl:1: .*0\.png is not a readable picture"):
        ImageFolderDataset(tmp_path, "train")[0]


def test_missing_folder_metadata_and_split_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        ImageFolderDataset(tmp_path / "gone", "train")
    with pytest.raises(DataError, match=r"metadata\.jsonl is missing"):
        ImageFolderDataset(tmp_path, "train")
    add(tmp_path / "train", "0.png")
    with pytest.raises(DataError, match="no validation/"):
        ImageFolderDataset(tmp_path, "val")
    with pytest.raises(ValueError, match="split must be one of"):
        ImageFolderDataset(tmp_path, "composition")


def test_an_empty_split_is_reported(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metadata.jsonl").write_text("")
    with pytest.raises(DataError, match="no picture for the split train"):
        ImageFolderDataset(tmp_path, "train")


def test_the_folder_opens_by_config(tmp_path):
    add(tmp_path / "train", "0.png", "a red thing")
    settings = DataSettings(source="folder", pictures=tmp_path, size=24)
    image, caption = open_images(settings, "train")[0]
    assert image.shape == (3, 24, 24)
    assert caption == "a red thing"
