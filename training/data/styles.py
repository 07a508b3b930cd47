"""The drawing styles: which package draws them, how a caption names them, and which of them share a drawing."""

from dataclasses import dataclass
from typing import Literal

SpriteFormat = Literal["iconify", "webp", "svg"]


@dataclass(frozen=True, slots=True)
class Package:
    """An npm package, pinned: `name` as the registry spells it, exact `version`."""

    name: str
    version: str

    @property
    def slug(self) -> str:
        """The stem that `npm pack` gives the archive, e.g. `iconify-json-noto-1.2.9`."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"


@dataclass(frozen=True, slots=True)
class Style:
    """One drawing style.

    name: what settings and claims call it. phrase: the noun of the caption ("a {phrase} of a fox").
    family: styles of one family shade or redraw the same drawing, so splits go by family (data splits, splits.py).
    """

    name: str
    phrase: str
    family: str
    package: Package
    format: SpriteFormat
    licence: str


LABELS = Package("emojibase-data", "17.0.0")

_FLUENT = "MIT (Fluent Emoji, Copyright Microsoft Corporation)"
_NOTO = "Apache-2.0 (Noto Emoji, Copyright Google LLC)"

STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("3d render", "3d render", "fluent", Package("@lobehub/fluent-emoji-3d", "1.1.0"), "webp", _FLUENT),
        Style(
            "soft gradient",
            "soft gradient drawing",
            "fluent",
            Package("@iconify-json/fluent-emoji", "1.2.7"),
            "iconify",
            _FLUENT,
        ),
        Style(
            "flat drawing",
            "flat drawing",
            "fluent",
            Package("@iconify-json/fluent-emoji-flat", "1.2.6"),
            "iconify",
            _FLUENT,
        ),
        Style("cartoon", "cartoon", "noto", Package("@iconify-json/noto", "1.2.9"), "iconify", _NOTO),
        Style("old cartoon", "old cartoon", "noto", Package("@iconify-json/noto-v1", "1.2.5"), "iconify", _NOTO),
        Style(
            "simple flat icon",
            "simple flat icon",
            "twemoji",
            Package("@twemoji/svg", "15.0.0"),
            "svg",
            "CC-BY-4.0 (Twemoji, Copyright Twitter, Inc and other contributors)",
        ),
        Style(
            "bright icon",
            "bright icon",
            "emojione",
            Package("@iconify-json/emojione", "1.2.3"),
            "iconify",
            "CC-BY-4.0 (EmojiOne 2)",
        ),
    )
}

FAMILIES = tuple(dict.fromkeys(style.family for style in STYLES.values()))
PERMISSIVE_STYLES = ("3d render", "soft gradient", "flat drawing", "cartoon", "old cartoon")
