"""Feature vectors of pictures, and those of the train scenes that the recogniser is fitted on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tqdm import tqdm

from training.data.scenes import SceneComposer
from training.data.settings import DataSettings
from training.data.sprites import SpriteSet
from training.data.stage import sprite_key
from training.data.tensors import to_tensor
from training.evaluation.prompts import Pixels
from training.perceptual import FEATURES, PooledFeatures

__all__ = ["FeatureExtractor", "TrainFeatures"]

Floats = NDArray[np.float32]

_BATCH = 25
# Raise when features or the train scenes of the recogniser change, so that stored ones are made again.
_VERSION = 1
# Scenes that no model was trained on show the recogniser the same drawings on other backgrounds.
_SEED = 1_000


class FeatureExtractor:
    """Pooled EfficientNet-lite0 features of pictures that are first resized to `side` pixels."""

    def __init__(self, side: int, device: str = "cpu") -> None:
        self.side, self._device = side, torch.device(device)
        self._network = PooledFeatures().to(self._device)

    def __call__(self, pictures: Iterable[Pixels], title: str = "features") -> Floats:
        """Rows (n, 1280) of pictures uint8 (H, W, 3)."""
        remaining, rows = iter(pictures), []
        with tqdm(desc=title, unit="picture", leave=False) as bar:
            while batch := list(islice(remaining, _BATCH)):
                rows.append(self._features(torch.stack([to_tensor(picture) for picture in batch])))
                bar.update(len(batch))
        return np.concatenate(rows) if rows else np.empty((0, FEATURES), np.float32)

    def _features(self, images: torch.Tensor) -> Floats:
        size = (self.side, self.side)
        resized = F.interpolate(images.to(self._device), size, mode="bilinear", antialias=True, align_corners=False)
        features: Floats = self._network(resized).cpu().numpy()
        return features


class TrainFeatures:
    """Features and concepts of single-object train scenes, computed once and kept in a folder.

    Args:
        sprites: the drawings.
        data: how scenes are composed.
        extractor: makes the features.
        folder: where parts are kept, below a folder named after everything they depend on.
    """

    def __init__(self, sprites: SpriteSet, data: DataSettings, extractor: FeatureExtractor, folder: Path) -> None:
        scenes = replace(data.scenes, single=1.0, pair=0.0, count=0.0)
        self._composer = SceneComposer(sprites, "train", _SEED, data.size, scenes, vary_words=False)
        self._extractor = extractor
        self._rows = {concept.code: row for row, concept in enumerate(sprites.concepts)}
        parts = [_VERSION, _SEED, sprite_key(data), data.size, asdict(scenes), extractor.side]
        self._folder = folder / hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    @property
    def sprites(self) -> int:
        """Drawings that train scenes show."""
        return len(self._composer.pool.sprites)

    def load(self, draws: int) -> tuple[Floats, NDArray[np.int64]]:
        """Features (n, 1280), and the shown concepts (n,) as rows of `sprites.concepts`; n = draws x train sprites."""
        parts = [self._part(number) for number in tqdm(range(draws), desc="recogniser", unit="draw")]
        return np.concatenate([features for features, _ in parts]), np.concatenate([concepts for _, concepts in parts])

    def _part(self, number: int) -> tuple[Floats, NDArray[np.int64]]:
        path = self._folder / f"train-{number:03d}.npz"
        if not path.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            concepts: list[int] = []
            features = self._extractor(self._pictures(number, concepts), f"train scenes {number}")
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                np.savez(file, features=features, concepts=np.array(concepts, np.int64))
            os.replace(temporary, path)
        with np.load(path, allow_pickle=False) as stored:
            return stored["features"], stored["concepts"]

    def _pictures(self, number: int, concepts: list[int]) -> Iterator[Pixels]:
        for index in range(number * self.sprites, (number + 1) * self.sprites):
            scene = self._composer.compose(index)
            concepts.append(self._rows[scene.claims.objects[0].code])
            yield scene.image
