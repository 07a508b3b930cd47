"""The evaluation stage: draws, measures, prints the tables and writes the report."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from device.graphs import DeviceModels
from shared.bundle import Bundle
from training.data.sprites import SpriteSet
from training.data.stage import prepare_sprites
from training.evaluation.codec import through_codec
from training.evaluation.features import FeatureExtractor, TrainFeatures
from training.evaluation.measures import Figures, Judge, cost_of
from training.evaluation.notes import notes_on
from training.evaluation.pictures import Studio
from training.evaluation.prompts import PromptList, folder_prompts, scene_prompts
from training.evaluation.recogniser import Recogniser, name_embeddings
from training.evaluation.samples import save_samples
from training.evaluation.settings import EvaluationSettings, Way
from training.evaluation.tables import as_json, markdown_table, write_json

__all__ = ["run_evaluation"]

REAL, CODEC = "real", "real through codec"
SAMPLES = 24


def run_evaluation(settings: EvaluationSettings) -> None:
    """Evaluates a bundle's methods, or compares sampling values; prints tables and writes `settings.report`.

    Raises:
        CiarError: the bundle is not sound, or a picture cannot be drawn.
        ValueError: bundle and data do not fit.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    bundle = Bundle.open(settings.bundle)
    if (side := bundle.manifest.image_size) != settings.data.size:
        raise ValueError(f"data.size is {settings.data.size}, but the bundle {settings.bundle} draws {side} pixels")
    with _ended_by_sigterm(), Studio(bundle, settings) as studio:
        evaluation = _Evaluation(settings, bundle, studio)
        evaluation.sweep() if settings.sweeps else evaluation.run()


@dataclass(slots=True)
class _Drawings:
    """What composed scenes add: the drawings, and a recogniser of them."""

    sprites: SpriteSet
    recogniser: Recogniser
    concepts: dict[str, int]


class _Evaluation:
    """One run.

    Args:
        settings: what to do.
        bundle: the opened bundle.
        studio: draws.
    """

    def __init__(self, settings: EvaluationSettings, bundle: Bundle, studio: Studio) -> None:
        self._settings, self._bundle, self._studio = settings, bundle, studio
        cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
        self._extractor = FeatureExtractor(settings.recogniser.side, "cuda" if cuda else "cpu")
        self._drawings = self._open_drawings() if settings.data.source == "scenes" else None

    def run(self) -> None:
        """Every list, every method."""
        settings = self._settings
        ways = {way.name: way for way in (self._way(name) for name in settings.methods)}
        report = self._report()
        for extra in ("", *settings.extra):
            prompts = self._prompts(settings.extra_count if extra else settings.count, extra)
            rows = self._rows(prompts, ways, sheets=not extra)
            report["lists"][prompts.name] = as_json(rows)
            write_json(report, settings.report)
            self._print(prompts, rows)

    def sweep(self) -> None:
        """The single objects with every combination of the swept sampling values."""
        sweep, sampling = self._settings.sweep, self._settings.sampling
        ways = {_changes(chosen): self._way(sweep.method, chosen) for chosen in sweep.combinations(sampling)}
        prompts = self._prompts(sweep.count)
        rows = self._rows(prompts, ways, sheets=False)
        write_json(self._report() | {"sweep": {sweep.method: as_json(rows)}}, self._settings.report)
        self._print(prompts, rows)

    def _way(self, name: str, sampling: Any = None) -> Way:
        return Way.named(name, (sampling or self._settings.sampling).over(self._bundle.manifest.defaults))

    def _open_drawings(self) -> _Drawings:
        settings = self._settings
        sprites = prepare_sprites(settings.data)
        concepts = sprites.concepts
        names = name_embeddings(DeviceModels(self._bundle).captions, [concept.name for concept in concepts])
        features = TrainFeatures(sprites, settings.data, self._extractor, settings.folder / "features")
        recogniser = Recogniser.fit(*features.load(settings.recogniser.draws), names, settings.recogniser.ridge)
        return _Drawings(sprites, recogniser, {concept.code: row for row, concept in enumerate(concepts)})

    def _prompts(self, count: int, extra: str = "") -> PromptList:
        settings = self._settings
        if self._drawings is None:
            return folder_prompts(settings.data, count, settings.split)
        return scene_prompts(self._drawings.sprites, settings.data, count, settings.seed, settings.split, extra)

    def _rows(self, prompts: PromptList, ways: dict[str, Way], sheets: bool) -> dict[str, Figures]:
        drawings = self._drawings
        judge = Judge(
            prompts,
            self._extractor,
            drawings.recogniser if drawings else None,
            drawings.concepts if drawings else {},
        )
        decoded = through_codec(self._bundle, prompts.pictures, max(1, self._settings.threads))
        rows = {REAL: judge.figures(prompts.pictures), CODEC: judge.figures(decoded)}
        if sheets:
            self._save_samples(prompts.pictures, prompts, REAL)
        for name, way in ways.items():
            drawn = self._studio.draw(way, prompts)
            pictures = [picture.pixels for picture in drawn]
            rows[name] = judge.figures(pictures, cost_of(drawn))
            if sheets:
                self._save_samples(pictures, prompts, name)
        return rows

    def _save_samples(self, pictures: Any, prompts: PromptList, name: str) -> None:
        if self._settings.contact_sheet:
            path = Path(self._settings.contact_sheet.replace("{method}", name))
            save_samples(pictures[:SAMPLES], prompts.captions[:SAMPLES], path)

    def _report(self) -> dict[str, Any]:
        settings, manifest = self._settings, self._bundle.manifest
        return {
            "bundle": {"name": manifest.name, "digest": manifest.digest},
            "split": settings.split,
            "seed": settings.seed,
            "sampling": asdict(settings.sampling.over(manifest.defaults)),
            "recogniser": asdict(settings.recogniser) if self._drawings else None,
            "lists": {},
        }

    def _print(self, prompts: PromptList, rows: dict[str, Figures]) -> None:
        recogniser = self._drawings.recogniser if self._drawings else None
        print(f"\n### {prompts.name}\n\n{markdown_table(rows)}\n")
        for note in notes_on(prompts, rows, recogniser):
            print(f"- {note}")
        print(f"\nreport: {self._settings.report}", flush=True)


def _changes(sampling: Any) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(sampling).items() if value is not None)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does, so that the verifier ends too. The first one is enough."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
