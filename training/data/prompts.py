"""Prompts that no picture exists of: known things in new styles, and new things in known styles. `ciar-train prompts`.

A drafter that saw only the training captions imitates its target well on those alone. What the target makes of other
captions it can show without any picture (`ciar-train drawn`), and a prompt costs nothing. What a split holds out is
never asked for: no known thing in a style of the data, no held-out colour behind one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.checks import a_share, at_least_one, not_negative
from training.data.backgrounds import COLOURS
from training.data.captions import caption_of, drop_words
from training.data.claims import BACKGROUNDS, KINDS, Background, Claims, ObjectClaim, Relation
from training.data.concepts import Concept, load_concepts, select_concepts
from training.data.settings import DataSettings
from training.data.sources import fetch_package
from training.data.splits import background_held_out
from training.data.styles import LABELS, STYLES
from training.tables import read_tables, settings_from

__all__ = ["PromptSettings", "PromptWriter", "read_prompts", "run_prompts"]

SPLITS = ("val", "train")


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What to ask for. Raises ValueError naming the field that cannot be.

    Args:
        data: what is known: its concepts and styles; also the shares of kinds and backgrounds.
        folder: train.txt and val.txt go here, a prompt a line.
        train, val: prompts of each.
        new_things: share of prompts that name things the data have no drawing of, in the data's styles; the others
            name things of the data in other styles.
        groups: emojibase's groups that new things come from.
    """

    data: DataSettings
    folder: Path = Path("work/prompts")
    train: int = 4000
    val: int = 200
    new_things: float = 0.6
    groups: tuple[str, ...] = ("animals-nature", "food-drink", "travel-places", "activities", "objects")
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "train", "val")
        a_share(self, "new_things")
        not_negative(self, "seed")
        if self.data.source != "scenes":
            raise ValueError('prompts are made of the drawings\' labels: data.source must be "scenes"')
        object.__setattr__(self, "folder", Path(self.folder))

    @classmethod
    def load(cls, path: Path) -> PromptSettings:
        """Settings from a TOML file with the tables data and prompts."""
        tables = read_tables(path, ("data", "prompts"))
        return settings_from(cls, path, "prompts", tables.get("prompts", {}), data=DataSettings.load(path))


class PromptWriter:
    """Prompts for the concepts of a set of labels. `write(split, index)` depends on seed, split and index alone.

    Raises:
        ValueError: nothing is left to ask for: the data have all styles, or all things of the groups.
    """

    def __init__(self, concepts: Sequence[Concept], settings: PromptSettings) -> None:
        self._settings = settings
        self._known = select_concepts(list(concepts), settings.data.concepts)
        taken = {word for concept in self._known for word in (concept.name, *concept.synonyms)}
        codes = {concept.code for concept in self._known}
        self._new = [
            concept
            for concept in concepts
            if concept.group in settings.groups and concept.code not in codes and concept.name not in taken
        ]
        self._by_code = {concept.code: concept for concept in concepts}
        self._new_styles = [name for name in STYLES if name not in settings.data.styles]
        if settings.new_things > 0.0 and not self._new:
            raise ValueError(f"the data know everything in {', '.join(settings.groups)}: set new_things to 0")
        if settings.new_things < 1.0 and not self._new_styles:
            raise ValueError("the data have every style: set new_things to 1")

    def write(self, split: str, index: int) -> str:
        """Prompt number `index` of a split."""
        rng = np.random.default_rng((self._settings.seed, SPLITS.index(split), index))
        scenes = self._settings.data.scenes
        kind = KINDS[int(rng.choice(len(KINDS), p=[getattr(scenes, name) for name in KINDS]))]
        new = rng.random() < self._settings.new_things
        things, styles = (self._new, self._settings.data.styles) if new else (self._known, self._new_styles)
        style = STYLES[styles[int(rng.integers(len(styles)))]]
        count = min(2 if kind == "pair" else 1, len(things))
        chosen = [things[int(place)] for place in rng.choice(len(things), count, replace=False)]
        objects = tuple(ObjectClaim(c.code, c.label, c.name, style.name, style.family) for c in chosen)
        relation: Relation | None = ("left of" if rng.random() < 0.5 else "above") if len(objects) == 2 else None
        copies = int(rng.integers(2, 5)) if kind == "count" else 1
        claims = Claims(kind, objects, copies, relation, self._background(chosen, rng))
        return caption_of(drop_words(claims, self._by_code, scenes, rng) if new else claims)

    def _background(self, chosen: Sequence[Concept], rng: np.random.Generator) -> Background:
        free = [name for name in COLOURS if not any(background_held_out(concept.code, name) for concept in chosen)]
        shares = [getattr(self._settings.data.scenes, name) for name in BACKGROUNDS]
        kind = BACKGROUNDS[int(rng.choice(len(BACKGROUNDS), p=shares))]
        count = min(1 if kind == "solid" else 2, len(free))
        colours = tuple(free[int(place)] for place in rng.choice(len(free), count, replace=False))
        return Background(kind if count == 2 else "solid", colours)


def run_prompts(settings: PromptSettings) -> None:
    """Writes train.txt and val.txt; no prompt of val is one of train."""
    concepts = load_concepts(fetch_package(LABELS, settings.data.folder / "packages"))
    writer = PromptWriter(concepts, settings)
    settings.folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for split in SPLITS:
        prompts = [writer.write(split, index) for index in range(getattr(settings, split))]
        left = [prompt for prompt in prompts if prompt not in taken]
        taken.update(left)
        (settings.folder / f"{split}.txt").write_text("\n".join(left) + "\n", encoding="utf-8")
        print(f"{len(left)} prompts in {settings.folder / f'{split}.txt'}, for instance: {left[0]}")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, a line each; empty lines are skipped.

    Raises:
        ValueError: there is none, or the file is not UTF-8.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    prompts = [line for line in lines if line]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one a line")
    return prompts
