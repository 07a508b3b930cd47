"""Which drawings and which combinations training may see, decided by hashes so that no list has to be kept.

- A (concept, family) unit is the drawing of one concept by one family of styles. 90 % train, 5 % val, 5 % test.
  Going by style instead would leak: the same drawing would sit in train with other shading.
- At most one family of a concept leaves train, and the only family of a concept never does, so no concept is
  asked for that training never showed.
- 10 % of (concept, background colour) and 10 % of unordered concept pairs are held out from train: the split
  `composition` asks for exactly those, with drawings that training saw alone.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from training.data.styles import FAMILIES

Split = Literal["train", "val", "test", "composition"]
SPLITS: tuple[Split, ...] = ("train", "val", "test", "composition")

_HELD_OUT = 0.10
# One family at most leaves train, so to hold out 5 % of the units a concept goes to val with 5 % x number of families.
_VAL = 0.05 * len(FAMILIES)
_TEST = 0.05 * len(FAMILIES)


def hash_share(*parts: object) -> float:
    """A number in [0, 1) fixed by `parts`: the same on every machine and in every run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


def assign_units(units: Iterable[tuple[str, str]], seed: int = 0) -> dict[tuple[str, str], Split]:
    """The split (train, val or test) of each (concept code, family) unit."""
    families: dict[str, set[str]] = defaultdict(set)
    for code, family in units:
        families[code].add(family)
    return {
        (code, family): "train" if len(owned) == 1 else _unit_split(code, family, seed)
        for code, owned in families.items()
        for family in sorted(owned)
    }


def _unit_split(code: str, family: str, seed: int) -> Split:
    leaving = FAMILIES[int(hash_share(seed, "family", code) * len(FAMILIES))]
    if family != leaving:
        return "train"
    share = hash_share(seed, "unit", code)
    if share < _VAL:
        return "val"
    return "test" if share < _VAL + _TEST else "train"


def background_held_out(code: str, colour: str, seed: int = 0) -> bool:
    """Whether train never shows this concept with this colour behind it."""
    return hash_share(seed, "background", code, colour) < _HELD_OUT


def pair_held_out(first: str, second: str, seed: int = 0) -> bool:
    """Whether train never shows these two concepts together, in either order."""
    return hash_share(seed, "pair", *sorted((first, second))) < _HELD_OUT
