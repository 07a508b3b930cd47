"""Finds the drawing of a concept in an unpacked package and renders it to RGBA."""

import io
import json
from pathlib import Path
from typing import Any, Protocol

import resvg_py
from PIL import Image

from training.data.concepts import Concept, slug
from training.data.errors import DataError
from training.data.styles import Style

RENDER_SIZE = 256


class Drawings(Protocol):
    """A package's drawings: `render` gives an RGBA picture of about RENDER_SIZE pixels, or None if it has none."""

    def render(self, concept: Concept) -> Image.Image | None: ...


def open_drawings(style: Style, package: Path) -> Drawings:
    """The drawings of an unpacked package, read as its style's format says. DataError if the package lacks them."""
    if style.format == "iconify":
        return IconifyDrawings(package)
    if style.format == "webp":
        return FileDrawings(package / "assets", ".webp")
    return FileDrawings(package, ".svg")


class IconifyDrawings:
    """SVG bodies of an @iconify-json package, found by chars.json where it has one, else by the label's slug."""

    def __init__(self, package: Path) -> None:
        icons = _load(package / "icons.json")
        self._icons: dict[str, dict[str, Any]] = icons["icons"]
        self._aliases: dict[str, dict[str, Any]] = icons.get("aliases", {})
        self._defaults = {"left": 0, "top": 0, "width": icons.get("width", 16), "height": icons.get("height", 16)}
        chars = _load(package / "chars.json") if (package / "chars.json").is_file() else {}
        self._by_code = {_without_selector(code): name for code, name in chars.items()}

    def render(self, concept: Concept) -> Image.Image | None:
        icon = self._find(concept)
        if icon is None:
            return None
        box = {key: icon.get(key, default) for key, default in self._defaults.items()}
        view = f"{box['left']} {box['top']} {box['width']} {box['height']}"
        return render_svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{box["width"]}" height="{box["height"]}" viewBox="{view}">{icon["body"]}</svg>'
        )

    def _find(self, concept: Concept) -> dict[str, Any] | None:
        for name in (self._by_code.get(concept.code), slug(concept.label)):
            if name in self._icons:
                return self._icons[name]
            alias = self._aliases.get(name or "")
            # An alias with a flip or a turn is another drawing than its parent; those are few and left out.
            if alias is not None and set(alias) == {"parent"}:
                return self._icons.get(alias["parent"])
        return None


class FileDrawings:
    """One file a drawing, named by hexcode, as in the 3D renders (.webp) and Twemoji (.svg)."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self._files = {_without_selector(path.stem): path for path in sorted(folder.glob(f"*{suffix}"))}
        if not self._files:
            raise DataError(f"{folder} holds no {suffix} drawings: delete its package folder and run again")

    def render(self, concept: Concept) -> Image.Image | None:
        path = self._files.get(concept.code)
        if path is None:
            return None
        if path.suffix == ".svg":
            return render_svg(path.read_text(encoding="utf-8"))
        try:
            with Image.open(path) as image:
                return image.convert("RGBA")
        except OSError as error:
            raise DataError(f"{path} is not a readable picture ({error})") from error


def render_svg(svg: str) -> Image.Image:
    """The SVG at RENDER_SIZE pixels, RGBA. System fonts are off, so every machine renders the same."""
    try:
        png = resvg_py.svg_to_bytes(svg_string=svg, width=RENDER_SIZE, height=RENDER_SIZE, skip_system_fonts=True)
    except ValueError as error:
        raise DataError(f"an SVG drawing cannot be rendered: {error}") from error
    with Image.open(io.BytesIO(bytes(png))) as image:
        return image.convert("RGBA")


def _without_selector(code: str) -> str:
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete its package folder and run again") from error
    return content
