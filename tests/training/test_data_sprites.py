"""Packages are fetched once and unpacked safely; drawings become sprites; the stage leaves what it promises."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training.data import sources, stage
from training.data.concepts import load_concepts, normal_code, select_concepts, slug
from training.data.drawings import IconifyDrawings, open_drawings, render_svg
from training.data.errors import DataError
from training.data.images import open_images
from training.data.settings import ConceptSettings, DataSettings
from training.data.sources import fetch_package
from training.data.sprites import SPRITE_SIZE, SpriteSet, fit_square, render_sprites
from training.data.styles import LABELS, STYLES, Package

GROUPS = {
    "groups": {"3": "animals-nature", "4": "food-drink", "9": "flags"},
    "subgroups": {"34": "animal-mammal", "35": "animal-bird", "42": "food-fruit", "98": "country-flag"},
}
# (hexcode, label, group, subgroup): the fields of emojibase's data.json that are read.
ENTRIES = [
    ("1F98A", "fox", 3, 34),
    ("1F989", "owl", 3, 35),
    ("1F427", "penguin", 3, 35),
    ("1F34E", "red apple", 4, 42),
    ("1F352", "cherries", 4, 42),
    ("1F34B", "lemon", 4, 42),
    ("1F1EB-1F1F7", "flag: France", 9, 98),
]
COLOURS = ["#d33", "#a63", "#333", "#e00", "#b03", "#ee0", "#00f"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_labels(cache):
    folder = cache / LABELS.slug
    entries = [
        {"hexcode": code, "label": label, "group": group, "subgroup": subgroup, "tags": ["word"]}
        for code, label, group, subgroup in ENTRIES
    ]
    write(folder / "en" / "data.json", json.dumps([*entries, {"hexcode": "1F1E6", "label": "regional indicator A"}]))
    write(folder / "meta" / "groups.json", json.dumps(GROUPS))


def write_packages(cache):
    """The labels, an Iconify set and a set of .webp files, in the layout of the real packages."""
    write_labels(cache)
    icons = {
        slug(label): {"body": f'<circle cx="8" cy="8" r="{4 + number / 4}" fill="{colour}"/>'}
        for number, ((_, label, *_), colour) in enumerate(zip(ENTRIES, COLOURS, strict=True))
    }
    folder = cache / STYLES["cartoon"].package.slug
    write(folder / "icons.json", json.dumps({"width": 16, "height": 16, "icons": icons}))
    write(folder / "chars.json", json.dumps({}))
    assets = cache / STYLES["3d render"].package.slug / "assets"
    assets.mkdir(parents=True)
    for number, (code, *_) in enumerate(ENTRIES):
        picture = Image.new("RGBA", (64, 64))
        picture.paste((20 * number, 90, 200, 255), (10, 20, 50, 40))
        picture.save(assets / f"{code.lower()}-fe0f.webp", lossless=True)


@pytest.fixture
def settings(tmp_path):
    write_packages(tmp_path / "packages")
    return DataSettings(
        folder=tmp_path,
        size=32,
        length=10,
        styles=("3d render", "cartoon"),
        concepts=ConceptSettings(groups=("animals-nature", "food-drink"), subgroups=()),
    )


# -- fetching --------------------------------------------------------------------------------------------------------


def archive_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def install_npm(tmp_path, monkeypatch, script):
    """Put a stand-in `npm` first on the path."""
    npm = tmp_path / "bin" / "npm"
    write(npm, f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")


THING = Package("@scope/thing", "1.2.3")


def test_a_package_is_downloaded_once_and_unpacked(tmp_path, monkeypatch):
    (tmp_path / "made.tgz").write_bytes(archive_of({"package/package.json": b"{}", "package/a/b.txt": b"hello"}))
    install_npm(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/calls; cp {tmp_path}/made.tgz scope-thing-1.2.3.tgz')
    folder = fetch_package(THING, tmp_path / "cache")
    assert (folder / "a" / "b.txt").read_text() == "hello"
    assert fetch_package(THING, tmp_path / "cache") == folder
    assert (tmp_path / "calls").read_text() == "pack --silent @scope/thing@1.2.3\n"


def test_what_npm_says_is_passed_on(tmp_path, monkeypatch):
    install_npm(tmp_path, monkeypatch, 'echo "404 no such package" >&2; exit 1')
    with pytest.raises(DataError, match=r"@scope/thing@1\.2\.3 failed \(exit 1\): 404 no such package"):
        fetch_package(THING, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_npm_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not installed.*data.source"):
        fetch_package(THING, tmp_path / "cache")


def test_a_download_that_hangs_is_given_up(tmp_path, monkeypatch):
    install_npm(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(sources, "PACK_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match="did not finish"):
        fetch_package(THING, tmp_path / "cache")


@pytest.mark.parametrize(
    "content",
    [
        b"not an archive",
        archive_of({"package/package.json": b"{}", "../../outside.txt": b"x"}),
        archive_of({"package/readme.md": b"no package.json"}),
    ],
)
def test_a_damaged_or_hostile_archive_leaves_nothing_behind(tmp_path, content):
    cache = tmp_path / "deep" / "cache"
    cache.mkdir(parents=True)
    (cache / f"{THING.slug}.tgz").write_bytes(content)
    with pytest.raises(DataError, match="delete it and run again"):
        fetch_package(THING, cache)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{THING.slug}.tgz"]


# -- concepts --------------------------------------------------------------------------------------------------------


def test_join_keys_ignore_case_and_the_variation_selector():
    assert normal_code("1F5FF-FE0F") == normal_code("1f5ff") == "1f5ff"
    assert normal_code("0023-FE0F-20E3") == "0023-20e3"


@pytest.mark.parametrize(
    ("label", "name"),
    [("piñata", "pinata"), ("woman’s hat", "womans-hat"), ("T-Rex", "t-rex"), ("pool 8 ball", "pool-8-ball")],
)
def test_slugs_are_iconify_names(label, name):
    assert slug(label) == name


def test_flags_are_never_concepts_and_selection_goes_by_group_subgroup_and_label(tmp_path):
    write_labels(tmp_path)
    concepts = load_concepts(tmp_path / LABELS.slug)
    assert "flag: France" not in {concept.label for concept in concepts}

    def chosen(**fields):
        empty = {"groups": (), "subgroups": ()}
        return [concept.label for concept in select_concepts(concepts, ConceptSettings(**{**empty, **fields}))]

    assert chosen(groups=("animals-nature",)) == ["fox", "owl", "penguin"]
    assert chosen(subgroups=("animal-bird",), labels=("lemon",)) == ["owl", "penguin", "lemon"]
    assert chosen(groups=("animals-nature",), exclude=("owl",), exclude_subgroups=("animal-mammal",)) == ["penguin"]
    with pytest.raises(ValueError, match=r"data\.concepts\.exclude names what does not exist: owll"):
        chosen(groups=("animals-nature",), exclude=("owll",))


# -- rendering -------------------------------------------------------------------------------------------------------


def test_a_drawing_fills_its_square_and_keeps_its_shape():
    picture = Image.new("RGBA", (200, 200))
    picture.paste((255, 0, 0, 255), (20, 60, 120, 110))  # 100 x 50
    pixels, width, height = fit_square(picture)
    assert (width, height) == (SPRITE_SIZE, SPRITE_SIZE // 2)
    rows, cols = np.nonzero(pixels[..., 3])
    assert (rows.min(), rows.max(), cols.min(), cols.max()) == (32, 95, 0, 127)


def test_drawings_are_found_by_code_then_by_label_then_by_alias(tmp_path, settings):
    concepts = {concept.label: concept for concept in load_concepts(tmp_path / "packages" / LABELS.slug)}

    def circle(colour):
        return {"body": f'<rect width="16" height="16" fill="{colour}"/>'}

    package = tmp_path / "icons"
    write(
        package / "icons.json",
        json.dumps(
            {
                "width": 16,
                "height": 16,
                "icons": {"vulpes": circle("#f00"), "owl": circle("#0f0"), "bird": circle("#00f")},
                "aliases": {"penguin": {"parent": "bird"}, "lemon": {"parent": "bird", "hFlip": True}},
            }
        ),
    )
    write(package / "chars.json", json.dumps({"1F98A-FE0F": "vulpes"}))
    drawings = IconifyDrawings(package)
    found = {label: drawings.render(concepts[label]) for label in ("fox", "owl", "penguin", "lemon", "cherries")}
    centres = {label: picture.getpixel((100, 100))[:3] for label, picture in found.items() if picture}
    assert centres == {"fox": (255, 0, 0), "owl": (0, 255, 0), "penguin": (0, 0, 255)}


def test_a_broken_svg_is_reported():
    with pytest.raises(DataError, match="cannot be rendered"):
        render_svg("<svg")


def test_identical_and_invisible_drawings_are_dropped(settings):
    class Drawings:
        def render(self, concept):
            if concept.label == "owl":
                return Image.new("RGBA", (16, 16))
            colour = (9, 9, 9, 255) if concept.label in ("fox", "penguin") else (200, 9, len(concept.label), 255)
            return Image.new("RGBA", (16, 16), colour)

    concepts = load_concepts(settings.folder / "packages" / LABELS.slug)
    sprites = render_sprites(concepts, [(STYLES["cartoon"], Drawings())])
    assert [row.concept.label for row in sprites.table] == ["fox", "red apple", "cherries", "lemon"]


def test_a_package_without_drawings_is_reported(tmp_path):
    (tmp_path / "assets").mkdir()
    with pytest.raises(DataError, match=r"holds no \.webp drawings"):
        open_drawings(STYLES["3d render"], tmp_path)


# -- the stage -------------------------------------------------------------------------------------------------------


def test_the_stage_leaves_sprites_and_a_preview_and_does_nothing_twice(settings, monkeypatch):
    sprites = stage.run_data(settings)
    assert len(sprites) == 12
    assert {row.style for row in sprites.table} == {"3d render", "cartoon"}
    assert sprites.pixels.shape == (12, SPRITE_SIZE, SPRITE_SIZE, 4)
    with Image.open(settings.folder / "preview.png") as preview:
        assert preview.width > 32 * 8
    monkeypatch.setattr(stage, "render_sprites", lambda *_: pytest.fail("rendered again"))
    again = stage.run_data(settings)
    assert again.table == sprites.table
    assert np.array_equal(again.pixels, sprites.pixels)


def test_other_concepts_or_styles_are_rendered_anew(settings):
    keys = {
        stage.sprite_key(settings),
        stage.sprite_key(DataSettings(styles=("cartoon",), concepts=settings.concepts)),
        stage.sprite_key(DataSettings(styles=settings.styles)),
    }
    assert len(keys) == 3
    stage.run_data(settings)
    with pytest.raises(DataError, match="made with other settings"):
        SpriteSet.load(settings.folder / "sprites", "another")


def test_opened_sprites_do_not_sit_in_memory(settings):
    assert isinstance(stage.prepare_sprites(settings).pixels, np.memmap)


def test_missing_and_damaged_sprites_are_reported_and_repaired(settings):
    folder = settings.folder / "sprites"
    with pytest.raises(DataError, match="no sprites yet"):
        SpriteSet.load(folder)
    stage.run_data(settings)
    (folder / "sprites.npy").write_bytes(b"short")
    with pytest.raises(DataError, match="damaged"):
        SpriteSet.load(folder)
    assert len(stage.prepare_sprites(settings)) == 12


def test_scenes_open_by_config(settings):
    images = open_images(settings, "train")
    assert len(images) == settings.length
    image, caption = images[0]
    assert image.shape == (3, 32, 32)
    assert caption


def test_the_command_says_what_was_made(settings, tmp_path, capsys):
    config = tmp_path / "data.toml"
    write(
        config,
        f'[data]\nfolder = "{Path(settings.folder).as_posix()}"\nstyles = ["cartoon", "3d render"]\n'
        '[data.concepts]\ngroups = ["animals-nature"]\nsubgroups = []\n',
    )
    stage.main(["--config", str(config)])
    assert "6 sprites of 3 concepts" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"data: .*gone.toml"):
        stage.main(["--config", str(tmp_path / "gone.toml")])
