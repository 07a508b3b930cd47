"""Draws the pictures of a list of prompts with the real programs, and keeps them so that a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from device.client import DeviceClient
from device.link import LinkSettings
from device.picture import save_picture
from shared.bundle import Bundle
from shared.errors import CiarError
from training.evaluation.prompts import Pixels, PromptList
from training.evaluation.settings import EvaluationSettings, Way
from training.evaluation.verifier import VerifierProcess, running_verifier

__all__ = ["DrawnPicture", "PictureStore", "Studio"]

_NOTE = "evaluation"
# A slot of the verifier is free a moment after its picture is done: a spare one saves the next picture a wait.
_SPARE_SESSIONS = 2
# Patient: many pictures share few cores here, and a slow answer is no lost link.
_PATIENCE = LinkSettings(connect_seconds=60.0, silence_seconds=300.0, retry_seconds=60.0)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnPicture:
    """A picture, uint8 (H, W, 3), the device's report of it, and how many were drawn at once."""

    pixels: Pixels
    report: dict[str, Any]
    concurrency: int


class PictureStore:
    """The pictures of one way to draw and one list: a PNG each, with its report inside.

    Only pictures whose prompt and seed are those asked for count as there. Delete the folder to draw them again,
    after a change of the programs, say.
    """

    def __init__(self, folder: Path, prompts: PromptList) -> None:
        self._folder, self._prompts = folder / prompts.name, prompts

    def read(self, index: int) -> DrawnPicture | None:
        """Picture `index`, drawn with seed `index`; None if it is not there."""
        try:
            with Image.open(self._path(index)) as image:
                image.load()
                note = json.loads(image.text[_NOTE])  # type: ignore[attr-defined]
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, KeyError, ValueError):
            return None
        report: dict[str, Any] = note["report"]
        if (report["prompt"], report["seed"]) != (self._prompts.captions[index], index):
            return None
        return DrawnPicture(pixels, report, note["concurrency"])

    def write(self, index: int, picture: DrawnPicture) -> None:
        """Keeps a picture, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        note = {"report": picture.report, "concurrency": picture.concurrency}
        save_picture(picture.pixels, self._path(index), {_NOTE: json.dumps(note)})

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:05d}.png"


class Studio:
    """Draws pictures with `DeviceClient`, and with a `cloud-verifier` once a method needs one. A context manager.

    Args:
        bundle: the opened bundle.
        settings: concurrency, threads, and where pictures are kept.
    """

    def __init__(self, bundle: Bundle, settings: EvaluationSettings) -> None:
        self._bundle, self._settings = bundle, settings
        self._stack = ExitStack()
        self._verifier: VerifierProcess | None = None

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def draw(self, way: Way, prompts: PromptList) -> list[DrawnPicture]:
        """The pictures of a list, picture i with seed i; those kept from an earlier run are not drawn again.

        Raises:
            CiarError: a picture cannot be drawn.
        """
        store = PictureStore(self.folder(way), prompts)
        kept = {index: store.read(index) for index in range(len(prompts.captions))}
        pictures = {index: picture for index, picture in kept.items() if picture is not None}
        missing = [index for index in kept if index not in pictures]
        if missing:
            pictures |= self._draw_missing(way, prompts.captions, missing, store)
        return [pictures[index] for index in kept]

    def folder(self, way: Way) -> Path:
        """Where the pictures of a way are kept."""
        warp = "-".join(f"{name}{value:g}" for name, value in asdict(way.sampling).items())
        return self._settings.folder / self._bundle.manifest.digest[:12] / way.name / warp

    def _draw_missing(
        self, way: Way, captions: Sequence[str], missing: Sequence[int], store: PictureStore
    ) -> dict[int, DrawnPicture]:
        client, count = self._client(way), self._settings.concurrency

        def draw(index: int) -> tuple[int, DrawnPicture]:
            generated = client.generate(captions[index], way.generate_settings(index))
            picture = DrawnPicture(generated.pixels, generated.report.to_dict(), count)
            store.write(index, picture)
            return index, picture

        with client, ThreadPoolExecutor(count, "draw") as pool:
            futures = [pool.submit(draw, index) for index in missing]
            try:
                finished = tqdm(as_completed(futures), way.name, len(missing), unit="picture")
                return dict(future.result() for future in finished)
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                if self._verifier is not None and isinstance(error, CiarError):
                    self._verifier.check()  # if it died, its last words say more than the broken link
                raise

    def _client(self, way: Way) -> DeviceClient:
        if way.method.cloud_role == "-":
            return DeviceClient(bundle=self._bundle.folder, link=_PATIENCE)
        if self._verifier is None:
            settings = self._settings
            self._verifier = self._stack.enter_context(
                running_verifier(
                    self._bundle.folder,
                    settings.folder / "verifier.log",
                    settings.device,
                    settings.verifier_threads,
                    settings.concurrency + _SPARE_SESSIONS,
                )
            )
        return DeviceClient(self._verifier.address, bundle=self._bundle.folder, link=_PATIENCE)
