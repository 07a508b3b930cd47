"""Settings of the evaluation, read from the tables of a TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from device.client import GenerateSettings
from device.selection import SelectionSettings
from shared.errors import SettingsError
from shared.methods import Method, Rule, find_method, find_rule
from shared.sampling import SamplingSettings
from shared.windows import WindowSettings
from training.data.settings import DataSettings
from training.evaluation.prompts import EXTRA_LISTS
from training.tables import read_tables, settings_from

__all__ = ["EvaluationSettings", "RecogniserSettings", "SamplingOverrides", "SweepSettings", "Way"]


Settings = TypeVar("Settings", SelectionSettings, WindowSettings)


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """The warp of the pictures, see `SamplingSettings`; None leaves a value to the bundle."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    guidance: float | None = None

    def __post_init__(self) -> None:
        self.over(SamplingSettings())

    def over(self, defaults: SamplingSettings) -> SamplingSettings:
        """The bundle's defaults with these in place of theirs."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(defaults, **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """Sampling values to compare, every combination; an empty list leaves a value as it is.

    Args:
        method: what draws, as in `EvaluationSettings.methods`.
        count: pictures for each combination.
        temperature, top_k, top_p, guidance: the values.
    """

    method: str = "sd"
    count: int = 100
    temperature: tuple[float, ...] = ()
    top_k: tuple[int, ...] = ()
    top_p: tuple[float, ...] = ()
    guidance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        Way.named(self.method, SamplingSettings())
        if self.count < 2:
            raise ValueError(f"count must be at least 2, got {self.count}")
        for _ in self.combinations(SamplingOverrides()):
            pass

    def combinations(self, base: SamplingOverrides) -> Iterator[SamplingOverrides]:
        """Each combination laid over `base`; none when every list is empty."""
        lists = {item.name: getattr(self, item.name) for item in fields(SamplingOverrides)}
        swept = {name: values for name, values in lists.items() if values}
        if swept:
            for chosen in product(*swept.values()):
                yield replace(base, **dict(zip(swept, chosen, strict=True)))


@dataclass(frozen=True, slots=True)
class RecogniserSettings:
    """The recogniser that says which concept a picture shows.

    Args:
        draws: train scenes it is fitted on, as a multiple of the train sprites.
        ridge: strength of its regulariser.
        side: pictures are resized to this many pixels before their features are taken.
    """

    draws: int = 3
    ridge: float = 100.0
    side: int = 160

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}")
        if not self.ridge > 0.0:
            raise ValueError(f"ridge must be above 0, got {self.ridge}")
        if self.side < 32:
            raise ValueError(f"side must be at least 32 pixels, got {self.side}")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draw: a method, its rule, the warp, and what else was asked of the method.

    Args:
        options: the text that `selection`, `window`, `rule_options` and `in_flight` were read from.
    """

    method: Method
    rule: Rule | None
    sampling: SamplingSettings
    options: str = ""
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    window: WindowSettings = field(default_factory=WindowSettings)
    rule_options: Mapping[str, float] = field(default_factory=dict)
    in_flight: int = 0

    @classmethod
    def named(cls, name: str, sampling: SamplingSettings) -> Way:
        """The way of that name: a method, perhaps a rule and options, such as "sd", "sd-mrs",
        "ciar:cloud_budget=0.2,score=entropy" or "csd:size=64,delta=0.5".

        Raises:
            SettingsError: no such method, rule or option; the message lists those there are.
        """
        words, _, options = name.partition(":")
        method_name, _, rule_name = words.partition("-")
        method = find_method(method_name)
        rule = find_rule(method, rule_name)
        given = dict(_pair(option) for option in options.split(",") if option)
        selection, window, in_flight = SelectionSettings(), WindowSettings(), 0
        if method.device_role in ("drafter", "selective drafter"):
            in_flight = int(_number("in_flight", given.pop("in_flight", "0")))
        if method.device_role == "selective drafter":
            selection = _taken(selection, given)
            selection.check_rule(rule)
        if method.cloud_role == "window decoder":
            window = _taken(window, given)
        numbers = {key: _number(key, text) for key, text in given.items()}
        if numbers and rule is None:
            raise SettingsError(f"{name}: method {method_name} knows no option {min(numbers)}")
        rule_options = rule.settings(numbers) if rule else {}
        return cls(method, rule, sampling, options, selection, window, rule_options, in_flight)

    @property
    def name(self) -> str:
        """Also a folder's name."""
        words = f"{self.method.name}-{self.rule.name}" if self.rule else self.method.name
        return f"{words}:{self.options}" if self.options else words

    def generate_settings(self, seed: int) -> GenerateSettings:
        """What a device is asked for."""
        return GenerateSettings(
            self.method.name,
            self.rule.name if self.rule else "",
            seed,
            **asdict(self.sampling),
            selection=self.selection,
            rule_options=self.rule_options,
            window=self.window,
            in_flight=self.in_flight,
        )


def _pair(option: str) -> tuple[str, str]:
    key, _, text = option.partition("=")
    return key, text


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"option {key}: {text!r} is no number") from None


def _taken(defaults: Settings, given: dict[str, str]) -> Settings:
    """Settings with the options they know, which are taken out of `given`; values are read as the field's own kind."""
    values: dict[str, Any] = {}
    for item in fields(defaults):
        if item.name in given:
            kind, text = type(getattr(defaults, item.name)), given.pop(item.name)
            values[item.name] = text if kind is str else _number(item.name, text)
            if kind is int:
                values[item.name] = int(values[item.name])
    return replace(defaults, **values)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """An evaluation. Raises ValueError naming the field that cannot be.

    Args:
        data: scenes (all figures), or your own picture folder (Frechet distance only).
        sampling: warp of the pictures where it is not the bundle's.
        recogniser: see `RecogniserSettings`.
        sweep: sampling values to compare instead of evaluating.
        bundle: folder of the bundle.
        methods: what to evaluate: a method, a method and a rule ("sd-mrs"), or with options ("ciar:cloud_budget=0.2").
        split: "test", or "val" for choosing settings.
        count: single-object prompts, and pictures a method.
        extra: further lists: "pair", "count", "composition", "train".
        extra_count: prompts of each further list.
        seed: which prompts. Picture i is always drawn with seed i.
        concurrency: pictures drawn at once.
        device: "auto", "cpu" or "cuda", for the target and for features.
        threads: CPU threads of the features; 0 leaves them to torch.
        verifier_threads: CPU threads of the target; 0 leaves them to torch.
        folder: drawn pictures and features, kept so that a stopped run goes on.
        report: the figures as JSON.
        contact_sheet: where samples of each method go, with {method} for its name; empty for none.
    """

    data: DataSettings
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    recogniser: RecogniserSettings = field(default_factory=RecogniserSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    bundle: Path = Path("bundles/default")
    methods: tuple[str, ...] = ("sd", "device")
    split: str = "test"
    count: int = 500
    extra: tuple[str, ...] = ()
    extra_count: int = 200
    seed: int = 0
    concurrency: int = 8
    device: str = "auto"
    threads: int = 0
    verifier_threads: int = 0
    folder: Path = Path("work/evaluation")
    report: Path = Path("work/evaluation/evaluation.json")
    contact_sheet: str = "docs/samples-{method}.png"

    def __post_init__(self) -> None:
        for name in ("bundle", "folder", "report"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        for name, least in {"count": 2, "extra_count": 2, "concurrency": 1, "seed": 0, "threads": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        self._check_choices()
        if not self.methods:
            raise ValueError("methods must name at least one method")
        for name in self.methods:
            Way.named(name, SamplingSettings())
        if self.contact_sheet and "{method}" not in self.contact_sheet:
            raise ValueError(f"contact_sheet must hold {{method}}, or be empty, got {self.contact_sheet!r}")
        if self.sweeps and self.split == "test":
            raise ValueError('split must be "val" for a sweep: what is chosen on test cannot be tested on it')

    def _check_choices(self) -> None:
        if self.split not in ("val", "test"):
            raise ValueError(f'split must be "val" or "test", got {self.split!r}')
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f'device must be "auto", "cpu" or "cuda", got {self.device!r}')
        if unknown := [name for name in self.extra if name not in EXTRA_LISTS]:
            raise ValueError(f"extra must be out of {', '.join(EXTRA_LISTS)}, got {', '.join(unknown)}")
        if self.extra and self.data.source == "folder":
            raise ValueError("extra must be empty for a picture folder: its lists are composed from drawings")

    @property
    def sweeps(self) -> bool:
        """Whether this compares sampling values instead of evaluating."""
        return any(True for _ in self.sweep.combinations(self.sampling))

    @classmethod
    def load(cls, path: Path) -> EvaluationSettings:
        """Settings from a TOML file with the tables data, evaluation, sampling, recogniser and sweep."""
        tables = read_tables(path, ("data", "evaluation", "sampling", "recogniser", "sweep"))
        return settings_from(
            cls,
            path,
            "evaluation",
            tables.get("evaluation", {}),
            data=DataSettings.load(path),
            sampling=settings_from(SamplingOverrides, path, "sampling", tables.get("sampling", {})),
            recogniser=settings_from(RecogniserSettings, path, "recogniser", tables.get("recogniser", {})),
            sweep=settings_from(SweepSettings, path, "sweep", tables.get("sweep", {})),
        )
