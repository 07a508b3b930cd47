"""Settings of the training data, read from the [data] table of a TOML file."""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from training.data.styles import PERMISSIVE_STYLES, STYLES


def _share(owner: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{owner}.{name} must lie in [0, 1], got {value}")


def _shares_sum_to_one(owner: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        _share(owner, name, value)
    if abs(sum(values.values()) - 1.0) > 1e-6:
        raise ValueError(f"{owner}: {', '.join(values)} must sum to 1, got {sum(values.values()):g}")


@dataclass(frozen=True, slots=True)
class ConceptSettings:
    """Which concepts to draw: whole emojibase groups, plus subgroups, plus labels, less what is excluded.

    Names are emojibase's (`animals-nature`, `transport-ground`, `red apple`). `exclude` wins over everything.
    """

    groups: tuple[str, ...] = ("animals-nature", "food-drink", "activities")
    subgroups: tuple[str, ...] = ("heart",)
    labels: tuple[str, ...] = ()
    exclude_subgroups: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.groups or self.subgroups or self.labels):
            raise ValueError("data.concepts: groups, subgroups and labels are all empty, so no concept is chosen")


@dataclass(frozen=True, slots=True)
class SceneSettings:
    """How scenes are composed: shares of kinds, backgrounds and word drop-out; sizes as fractions of a cell's side.

    step: positions are multiples of so many pixels, sizes of twice as many; see `layout.place`.
    """

    single: float = 0.60
    pair: float = 0.25
    count: float = 0.15
    solid: float = 0.55
    gradient: float = 0.30
    floor: float = 0.15
    omit: float = 0.30
    swap_label: float = 0.15
    smallest: float = 0.70
    largest: float = 0.92
    contrast: float = 70.0
    step: int = 1
    colour_jitter: int = 6

    def __post_init__(self) -> None:
        _shares_sum_to_one("data.scenes", {"single": self.single, "pair": self.pair, "count": self.count})
        _shares_sum_to_one("data.scenes", {"solid": self.solid, "gradient": self.gradient, "floor": self.floor})
        _share("data.scenes", "omit", self.omit)
        _share("data.scenes", "swap_label", self.swap_label)
        if not 0.1 <= self.smallest <= self.largest <= 1.0:
            raise ValueError(
                f"data.scenes: need 0.1 <= smallest <= largest <= 1, got {self.smallest} and {self.largest}"
            )
        if not 1 <= self.step <= 32:
            raise ValueError(f"data.scenes.step must lie in 1..32 pixels, got {self.step}")
        if not 0.0 <= self.contrast < 128.0:
            raise ValueError(f"data.scenes.contrast must lie in [0, 128), got {self.contrast}")
        if not 0 <= self.colour_jitter <= 10:
            raise ValueError(
                f"data.scenes.colour_jitter must lie in 0..10 (names would overlap), got {self.colour_jitter}"
            )


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Everything the data stage needs.

    source: "scenes" (composed from drawings) or "folder" (your own pictures under `pictures`).
    folder: where downloads, sprites and the preview live. size: side of a picture in pixels.
    length: how many train scenes the scene dataset holds. seed: which scenes; what is held out never changes.
    """

    source: str = "scenes"
    folder: Path = Path("work/data")
    pictures: Path | None = None
    size: int = 128
    length: int = 150_000
    seed: int = 0
    styles: tuple[str, ...] = PERMISSIVE_STYLES
    concepts: ConceptSettings = field(default_factory=ConceptSettings)
    scenes: SceneSettings = field(default_factory=SceneSettings)

    def __post_init__(self) -> None:
        if self.source not in ("scenes", "folder"):
            raise ValueError(f'data.source must be "scenes" or "folder", got {self.source!r}')
        if self.source == "folder" and self.pictures is None:
            raise ValueError('data.pictures must name your picture folder when data.source is "folder"')
        if self.size < 16:
            raise ValueError(f"data.size must be at least 16 pixels, got {self.size}")
        if self.length < 1:
            raise ValueError(f"data.length must be positive, got {self.length}")
        unknown = [name for name in self.styles if name not in STYLES]
        if unknown or not self.styles or len(set(self.styles)) != len(self.styles):
            raise ValueError(f"data.styles must be distinct names out of {', '.join(STYLES)}; got {list(self.styles)}")

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "DataSettings":
        """Settings from a parsed [data] table; ValueError names an unknown key or a value of the wrong type."""
        values = _checked(cls, "data", table)
        if "concepts" in values:
            values["concepts"] = ConceptSettings(**_checked(ConceptSettings, "data.concepts", values["concepts"]))
        if "scenes" in values:
            values["scenes"] = SceneSettings(**_checked(SceneSettings, "data.scenes", values["scenes"]))
        for name in ("folder", "pictures"):
            if name in values:
                values[name] = Path(values[name])
        return cls(**values)

    @classmethod
    def load(cls, path: Path) -> "DataSettings":
        """Settings from the [data] table of a TOML file. `data = "other.toml"` points to a file beside it."""
        return cls._load(path, followed=False)

    @classmethod
    def _load(cls, path: Path, followed: bool) -> "DataSettings":
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        table = document.get("data")
        if isinstance(table, str) and not followed:
            return cls._load(path.parent / table, followed=True)
        if not isinstance(table, dict):
            raise ValueError(f'{path}: needs a [data] table, or data = "FILE" pointing to the file that has it')
        try:
            return cls.from_table(table)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _checked(cls: type, owner: str, table: Any) -> dict[str, Any]:
    """The table with lists as tuples, after naming unknown keys and values of another type than the default's."""
    if not isinstance(table, dict):
        raise ValueError(f"{owner} must be a table, got {type(table).__name__}")
    types = {item.name: str(item.type) for item in fields(cls)}
    for name, value in table.items():
        if name not in types:
            raise ValueError(f"{owner} has no setting {name!r}; known: {', '.join(types)}")
        _check_type(f"{owner}.{name}", types[name], value)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _check_type(name: str, declared: str, value: Any) -> None:
    if "tuple" in declared:
        good, wanted = isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of strings"
    elif "float" in declared:
        good, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif "int" in declared:
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif "Settings" in declared:
        good, wanted = isinstance(value, dict), "a table"
    else:
        good, wanted = isinstance(value, str), "a string"
    if not good:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
