"""The bundle: its digest names exactly its contents, damage is found and named, and no path leads out of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.bundle import MANIFEST, Bundle, BundleFile, Manifest, default_bundle_folder, file_digest
from shared.errors import BundleError
from shared.grid import Grid
from shared.sampling import SamplingSettings

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def copy(toy_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the toy bundle that a test may damage."""
    return Path(shutil.copytree(toy_bundle.folder, tmp_path / "copy"))


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        name="small",
        grid=Grid(2, 3),
        vocabulary=7,
        image_size=24,
        prefix_rows=4,
        codebook_digest="c" * 64,
        defaults=SamplingSettings(temperature=0.9, top_k=5, guidance=2.0),
        files=(BundleFile("a.onnx", "a" * 64, 10, "device"), BundleFile("sub/b.bin", "b" * 64, 20, "cloud")),
        models={"parameters": {"target": 3}},
    )


def test_the_manifest_survives_its_text(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json()).digest == manifest.digest


def test_the_toy_bundle_opens_whole_and_by_part(toy_bundle: Bundle) -> None:
    assert Bundle.open(toy_bundle.folder).manifest == toy_bundle.manifest
    assert Bundle.open(str(toy_bundle.folder), "device").folder == toy_bundle.folder
    assert toy_bundle.damaged() == []


def test_file_digests_are_sha256(toy_bundle: Bundle) -> None:
    for file in toy_bundle.manifest.files:
        content = toy_bundle.path(file.path).read_bytes()
        assert file.sha256 == hashlib.sha256(content).hexdigest() == file_digest(toy_bundle.path(file.path))
        assert file.bytes == len(content)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": Grid(3, 2)},
        {"vocabulary": 8},
        {"prefix_rows": 5},
        {"codebook_digest": "d" * 64},
        {"files": (BundleFile("a.onnx", "e" * 64, 10, "device"), BundleFile("sub/b.bin", "b" * 64, 20, "cloud"))},
        {"files": (BundleFile("z.onnx", "a" * 64, 10, "device"), BundleFile("sub/b.bin", "b" * 64, 20, "cloud"))},
        {"files": (BundleFile("a.onnx", "a" * 64, 10, "device"),)},
    ],
    ids=["grid", "vocabulary", "prefix rows", "codebook", "a file's content", "a file's name", "a file less"],
)
def test_the_digest_changes_with_everything_both_sides_must_share(manifest: Manifest, change: dict[str, Any]) -> None:
    assert dataclasses.replace(manifest, **change).digest != manifest.digest


def test_the_digest_ignores_order_and_what_is_for_people(manifest: Manifest) -> None:
    other = dataclasses.replace(manifest, name="other", models={}, files=manifest.files[::-1])
    assert other.digest == manifest.digest


def test_parts_are_what_each_side_needs(toy_bundle: Bundle) -> None:
    parts = {part: {file.path for file in toy_bundle.manifest.part(part)} for part in ("device", "cloud")}
    both = {file.path for file in toy_bundle.manifest.part("both")}
    assert both == parts["device"] & parts["cloud"]
    assert {"drafter.onnx", "text_encoder.onnx", "tokenizer.json", "calibration.json"} == both
    assert {"target.safetensors", "interval_features.safetensors"} <= parts["cloud"] - parts["device"]
    assert {"codec_decoder.onnx", "interval_encoder_code64.onnx"} <= parts["device"] - parts["cloud"]
    assert parts["device"] | parts["cloud"] == {file.path for file in toy_bundle.manifest.files}


@pytest.mark.parametrize("name", ["codec_decoder.onnx", "drafter.onnx", "target.safetensors", "target.json"])
@pytest.mark.parametrize("damage", ["missing", "changed byte", "cut", "longer", "a folder"])
def test_a_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    file = copy / name
    content = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        spoiled = {
            "cut": content[:-1],
            "longer": content + b"\0",
            "changed byte": bytes([content[0] ^ 1]) + content[1:],
        }
        file.write_bytes(spoiled[damage])
    with pytest.raises(BundleError, match=f"{file}: missing or damaged"):
        Bundle.open(copy)


def test_a_side_does_not_mind_damage_in_the_other_sides_files(copy: Path) -> None:
    (copy / "target.safetensors").unlink()
    device = Bundle.open(copy, "device")
    assert [file.path for file in device.damaged()] == ["target.safetensors"]
    with pytest.raises(BundleError, match=r"target\.safetensors"):
        Bundle.open(copy, "cloud")


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BundleError, match=f"{folder}: no bundle there"):
            Bundle.open(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00broken", b"", b"[1]", b"7", b'"text"', b"{"])
def test_a_manifest_that_is_no_json_object_is_refused_by_its_path(copy: Path, content: bytes) -> None:
    (copy / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=MANIFEST):
        Bundle.open(copy)


def _set(**fields: Any) -> Change:
    return lambda content: content.update(fields)


def _file(**fields: Any) -> Change:
    return lambda content: content["files"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(format=2), "only bundles of format 1"),
        (_set(format=None), "only bundles of format 1"),
        (lambda content: content.pop("format"), "format"),
        (lambda content: content.pop("digest"), "digest"),
        (lambda content: content.pop("grid"), "grid"),
        (lambda content: content.pop("vocabulary"), "vocabulary"),
        (lambda content: content["files"][0].pop("sha256"), "sha256"),
        (lambda content: content["grid"].update(depth=2), "depth"),
        (_set(grid={"rows": 0, "cols": 3}), "rows"),
        (_set(defaults={"temperature": -1}), "temperature"),
        (_set(files=3), "int"),
        (_set(colour="red"), "colour"),
        (_set(vocabulary=9), "digest"),
        (_set(digest="0" * 64), "fetch the bundle again"),
        (_file(sha256="0" * 64), "digest"),
        (_file(part="nowhere"), "part is one of device, cloud, both"),
    ],
)
def test_a_wrong_manifest_is_refused_with_what_is_wrong(manifest: Manifest, change: Change, message: str) -> None:
    content = json.loads(manifest.to_json())
    change(content)
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(json.dumps(content))


@pytest.mark.parametrize("field", ["image_size", "name"])
def test_a_field_of_the_wrong_kind_is_refused_though_the_digest_does_not_cover_it(
    manifest: Manifest, field: str
) -> None:
    content = json.loads(manifest.to_json()) | {field: ["big"]}
    with pytest.raises(BundleError, match=field):
        Manifest.from_json(json.dumps(content))


ESCAPES = ["/etc/passwd", "../x", "sub/../../x", "..", "", ".", "a\\..\\..\\x", "C:\\x", "C:/x", "C:x"]


@pytest.mark.parametrize("path", ESCAPES)
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        BundleFile(path, "a" * 64, 1, "device")


@pytest.mark.parametrize("path", ESCAPES)
def test_a_manifest_that_names_such_a_path_is_refused(manifest: Manifest, path: str) -> None:
    content = json.loads(manifest.to_json())
    content["files"][0]["path"] = path
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        Manifest.from_json(json.dumps(content))


@pytest.mark.parametrize("path", ["a.onnx", "sub/a.onnx", "sub/..a", "a..b"])
def test_a_path_below_the_folder_is_taken(path: str) -> None:
    assert BundleFile(path, "a" * 64, 1, "both").path == path


@pytest.mark.parametrize("name", ["absent.onnx", "../toy/bundle.json", MANIFEST, ""])
def test_only_files_of_the_manifest_have_a_path(toy_bundle: Bundle, name: str) -> None:
    with pytest.raises(BundleError, match=f"the bundle has no {name}"):
        toy_bundle.path(name)


def test_the_default_bundle_lies_beside_the_rooms() -> None:
    folder = default_bundle_folder()
    assert folder.parts[-2:] == ("bundles", "default")
    assert (folder.parents[1] / "shared" / "bundle.py").exists()
