"""The public API of the device: `DeviceClient(...).generate(prompt, ...)` returns the picture and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device.bundle_cache import find_bundle, local_bundle
from device.generation import Generation
from device.graphs import DeviceModels
from device.link import Link, LinkSettings
from device.picture import partial_ids
from device.report import Report
from device.roles import DEVICE_ROLES
from device.selection import SelectionSettings
from shared.bundle import Bundle
from shared.errors import BundleError, LinkError, SettingsError
from shared.methods import Method, find_method, find_rule, law
from shared.noise import fresh_seed
from shared.sampling import SamplingSettings
from shared.transcript import Transcript
from shared.windows import WindowSettings

__all__ = ["DEFAULT_SERVER", "LOST_LINK", "DeviceClient", "GenerateSettings", "Picture"]

DEFAULT_SERVER = "127.0.0.1:50051"
LOST_LINK = ("resume", "fail", "finish-alone")
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """How a picture is drawn. None means the bundle's default.

    Args:
        method: name of a method, see `shared.methods.METHODS`.
        rule: acceptance rule of the method; empty for its default.
        seed: 0..2**64-1; the same seed, bundle and settings give the same picture. None takes one from the OS.
        temperature, top_k, top_p, guidance: the warp, see `SamplingSettings`.
        draft_length: tokens a draft, 1..64; 0 adapts it to acceptance and link.
        in_flight: drafts on their way at once, 1..8; above 1 the device drafts on while verdicts fly. 0 leaves it to
            the method.
        selection: what a device of method `ciar` keeps.
        rule_options: numbers of the rule, see `shared.methods.RULES`.
        window: of methods that refine a window of tokens (`sjd`, `csd`).
        on_lost_link: `resume` tries again and goes on where the picture was, `fail` ends with an error, `finish-alone`
            draws the rest on the device and marks it.
        verdict_seconds: with `finish-alone`, how long an answer may take before the link counts as lost.

    Raises:
        SettingsError: a value is not acceptable; the message names it.
    """

    method: str = "sd"
    rule: str = ""
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    guidance: float | None = None
    draft_length: int = 0
    in_flight: int = 0
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    rule_options: Mapping[str, float] = field(default_factory=dict)
    window: WindowSettings = field(default_factory=WindowSettings)
    on_lost_link: str = "resume"
    verdict_seconds: float = 2.0

    def __post_init__(self) -> None:
        rule = find_rule(find_method(self.method), self.rule)
        if find_method(self.method).device_role == "selective drafter":
            self.selection.check_rule(rule)
        if rule is not None:
            rule.settings(self.rule_options)
        elif self.rule_options:
            raise SettingsError(f"rule option {min(self.rule_options)}: method {self.method} judges nothing")
        if self.on_lost_link not in LOST_LINK:
            raise SettingsError(f"on_lost_link: one of {', '.join(LOST_LINK)} is needed, not {self.on_lost_link!r}")
        if not 0.0 < self.verdict_seconds <= 3600.0:
            raise SettingsError(f"verdict_seconds: above 0 and up to 3600 is needed, not {self.verdict_seconds}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise SettingsError(f"seed: 0 to 2**64-1 is needed, not {self.seed}")
        if not 0 <= self.draft_length <= 64:
            raise SettingsError(f"draft_length: 1 to 64 is needed (0 adapts it), not {self.draft_length}")
        if not 0 <= self.in_flight <= 8:
            raise SettingsError(f"in_flight: 1 to 8 is needed (0 leaves it to the method), not {self.in_flight}")
        self.sampling(SamplingSettings())

    def sampling(self, defaults: SamplingSettings) -> SamplingSettings:
        """The warp, with the bundle's defaults where nothing was set."""
        names = [field.name for field in fields(SamplingSettings)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(defaults, **given)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A finished picture.

    Args:
        pixels: (H, W, 3) uint8.
        transcript: its tokens and where each came from.
        report: where time, bytes and tokens went.
        scores: (rows, cols) a number of each token to be shown as a heat map, NaN where there is none: how unsure the
            device was of it (`ciar`), or the target's entropy as a share of ln V (`sjd`, `csd`).
    """

    pixels: Pixels
    transcript: Transcript
    report: Report
    scores: NDArray[np.float64]


class DeviceClient:
    """Draws pictures on this device, alone or together with a verifier. Use it as a context manager, or `close` it.

    Args:
        server: HOST:PORT of a verifier; it is contacted when a method needs it, or when no bundle is at hand.
        bundle: folder of a bundle; None takes the verifier's (embedded, cached, or fetched).
        cache: folder for fetched bundles; None for the user's cache folder.
        threads: threads of the device's models.
        link: patience with the link.

    Raises:
        SettingsError: the address or the number of threads is not acceptable.
        BundleError: `bundle` names no sound bundle.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        bundle: Path | str | None = None,
        cache: Path | None = None,
        threads: int = 1,
        link: LinkSettings | None = None,
    ) -> None:
        if threads < 1:
            raise SettingsError(f"threads: at least 1 is needed, not {threads}")
        self._threads, self._cache = threads, cache
        self._models = DeviceModels(Bundle.open(bundle, "device"), threads) if bundle else None
        self._link = Link(server, link)
        self._compared = False

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the link."""
        self._link.close()

    def generate(
        self,
        prompt: str,
        settings: GenerateSettings | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_preview: Callable[[Pixels, int], None] | None = None,
    ) -> Picture:
        """Draws one picture.

        Args:
            prompt: what to draw.
            settings: how to draw it.
            on_progress: called with (tokens done, tokens in all) as tokens are committed.
            on_preview: called with (pixels, rows done) whenever another row of tokens is complete; rows that are not
                there yet repeat the last one.

        Raises:
            CiarError: any of `shared.errors`, each with a message for the user.
        """
        settings = settings or GenerateSettings()
        method = find_method(settings.method)
        models = self._ready_models(method, alone=settings.on_lost_link == "finish-alone")
        models.open()
        models.captions.check(prompt)
        begun = time.perf_counter()
        manifest = models.bundle.manifest
        rule = find_rule(method, settings.rule)
        seed = fresh_seed() if settings.seed is None else settings.seed
        report = Report(method.name, rule.name if rule else None, law(method, rule), seed, prompt)
        generation = Generation(
            models,
            method,
            rule,
            prompt,
            seed,
            settings.sampling(manifest.defaults),
            report,
            self._link,
            settings.draft_length,
            settings.in_flight,
            settings.selection,
            _feature_mode(settings.selection, models) if method.device_role == "selective drafter" else "none",
            settings.rule_options,
            settings.window,
            settings.on_lost_link,
            settings.verdict_seconds,
        )
        generation.on_progress = _Watcher(generation, on_progress, on_preview)
        DEVICE_ROLES[method.device_role](generation)
        with generation.clock("codec"):
            pixels = models.decoder.decode(np.array(generation.transcript.tokens).reshape(manifest.grid.shape))
        report.count_tokens(generation.transcript)
        report.count_wire(generation.counters)
        report.seconds.total = time.perf_counter() - begun
        return Picture(pixels, generation.transcript, report, generation.scores.reshape(manifest.grid.shape))

    def _ready_models(self, method: Method, alone: bool) -> DeviceModels:
        """The models, after comparing bundles with the verifier when it has a part in the method.

        Args:
            alone: whether a picture may be drawn without a verifier that should have a part in it.
        """
        if method.cloud_role == "-" and (models := self._local_models()) is not None:
            return models
        if self._models is not None and self._compared:
            return self._models  # a verifier that changed its bundle since says so when the picture begins
        try:
            digest = self._link.describe().bundle_digest
        except LinkError:
            if alone and (models := self._local_models()) is not None:
                return models
            raise
        if self._models is None:
            self._models = DeviceModels(find_bundle(self._link, digest, self._cache), self._threads)
        if self._models.bundle.manifest.digest != digest:
            raise BundleError(
                f"{self._models.bundle.folder}: this is bundle {self._models.bundle.manifest.digest:.12}, but "
                f"the verifier at {self._link.address} runs {digest:.12}; leave the bundle out to fetch the verifier's"
            )
        self._compared = True
        return self._models

    def _local_models(self) -> DeviceModels | None:
        """Models that are at hand without asking a verifier."""
        if self._models is None and (bundle := local_bundle(self._cache)) is not None:
            self._models = DeviceModels(bundle, self._threads)
        return self._models


def _feature_mode(selection: SelectionSettings, models: DeviceModels) -> str:
    """The interval features to send: what was asked for, or what the bundle recommends.

    Raises:
        SettingsError: the bundle was not trained for that mode.
    """
    facts = models.bundle.manifest.models.get("interval", {})
    known = ["none", *facts.get("feature_modes", [])]
    mode = selection.features or facts.get("recommended_features", "none")
    if mode not in known:
        raise SettingsError(f"features: this bundle knows {', '.join(known)}, not {mode!r}")
    return str(mode)


class _Watcher:
    """Turns commits into calls of the user's callbacks."""

    def __init__(
        self,
        generation: Generation,
        on_progress: Callable[[int, int], None] | None,
        on_preview: Callable[[Pixels, int], None] | None,
    ) -> None:
        self._generation, self._on_progress, self._on_preview = generation, on_progress, on_preview
        self._rows = 0

    def __call__(self, transcript: Transcript) -> None:
        if self._on_progress:
            self._on_progress(len(transcript), transcript.grid.size)
        rows = len(transcript) // transcript.grid.cols
        if self._on_preview and rows > self._rows:
            with self._generation.clock("codec"):
                pixels = self._generation.models.decoder.decode(partial_ids(transcript.tokens, transcript.grid))
            self._on_preview(pixels, rows)
        self._rows = rows
