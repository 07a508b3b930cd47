"""Concepts: what can be drawn, with the label and the tags that captions use, read from emojibase."""

import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.errors import DataError
from training.data.nouns import NAMES, SYNONYMS
from training.data.settings import ConceptSettings

_NEVER_DRAWN = frozenset({"flags", "component"})
_CLOCK_FACE = re.compile(r"(o.clock|-thirty)$")


@dataclass(frozen=True, slots=True)
class Concept:
    """One drawable thing. code: hexcode in lower case without fe0f, the key that joins the packages.

    label: emojibase's own, by which settings name it. name: the noun of captions. synonyms: other nouns
    for it. tags: emojibase's loosely related words, for searching.
    """

    code: str
    label: str
    name: str
    group: str
    subgroup: str
    synonyms: tuple[str, ...]
    tags: tuple[str, ...]


def normal_code(hexcode: str) -> str:
    """The join key: lower case, variation selector fe0f removed."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def slug(label: str) -> str:
    """The icon name that Iconify makes of a label: "piñata" -> "pinata", "man's shoe" -> "mans-shoe"."""
    plain = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode().lower().replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def load_concepts(labels: Path) -> list[Concept]:
    """All concepts of an unpacked emojibase-data package but flags, skin tones and clock faces, in its order."""
    entries = _read_json(labels / "en" / "data.json")
    names = _read_json(labels / "meta" / "groups.json")
    drawable = [entry for entry in entries if _is_drawable(entry, names)]
    return [
        Concept(
            code=normal_code(entry["hexcode"]),
            label=entry["label"],
            name=NAMES.get(entry["label"], entry["label"]),
            group=names["groups"][str(entry["group"])],
            subgroup=names["subgroups"][str(entry["subgroup"])],
            synonyms=SYNONYMS.get(entry["label"], ()),
            tags=tuple(entry.get("tags", ())),
        )
        for entry in drawable
    ]


def select_concepts(concepts: list[Concept], settings: ConceptSettings) -> list[Concept]:
    """The concepts the settings ask for. ValueError names a group, subgroup or label that does not exist."""
    _check_known("groups", settings.groups, {concept.group for concept in concepts})
    subgroups = {concept.subgroup for concept in concepts}
    _check_known("subgroups", settings.subgroups, subgroups)
    _check_known("exclude_subgroups", settings.exclude_subgroups, subgroups)
    labels = {concept.label for concept in concepts}
    _check_known("labels", settings.labels, labels)
    _check_known("exclude", settings.exclude, labels)
    return [concept for concept in concepts if _is_selected(concept, settings)]


def _is_selected(concept: Concept, settings: ConceptSettings) -> bool:
    if concept.label in settings.exclude:
        return False
    if concept.label in settings.labels:
        return True
    if concept.subgroup in settings.exclude_subgroups:
        return False
    return concept.group in settings.groups or concept.subgroup in settings.subgroups


def _check_known(setting: str, wanted: tuple[str, ...], known: set[str]) -> None:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        hint = f"; known: {', '.join(sorted(known))}" if len(known) < 120 else " (spelled as in emojibase-data)"
        raise ValueError(f"data.concepts.{setting} names what does not exist: {', '.join(unknown)}{hint}")


def _is_drawable(entry: dict[str, Any], names: dict[str, Any]) -> bool:
    if "group" not in entry or "subgroup" not in entry or _CLOCK_FACE.search(entry["label"]):
        return False
    return names["groups"][str(entry["group"])] not in _NEVER_DRAWN


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): delete its package folder and run again") from error
