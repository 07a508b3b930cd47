"""Scenes as a torch dataset, and the lists of scenes that evaluation asks for."""

from dataclasses import replace

import torch
from torch.utils.data import Dataset

from training.data.claims import Scene, SceneKind
from training.data.scenes import SceneComposer
from training.data.settings import SceneSettings
from training.data.splits import Split
from training.data.sprites import SpriteSet
from training.data.tensors import to_tensor


class SceneSplitDataset(Dataset[tuple[torch.Tensor, str]]):
    """`length` scenes of a composer. Item: (image float32 (3, size, size) in [-1, 1], caption)."""

    def __init__(self, composer: SceneComposer, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be positive, got {length}")
        self.composer, self.length = composer, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        scene = self.composer.compose(index)
        return to_tensor(scene.image), scene.caption


def evaluation_scenes(
    sprites: SpriteSet,
    n: int,
    seed: int = 0,
    kind: SceneKind = "single",
    split: Split = "test",
    size: int = 128,
    settings: SceneSettings | None = None,
) -> list[Scene]:
    """`n` scenes of one kind with their full captions: prompts (`.caption`), reference pictures and claims."""
    mix = replace(
        settings or SceneSettings(),
        single=float(kind == "single"),
        pair=float(kind == "pair"),
        count=float(kind == "count"),
    )
    composer = SceneComposer(sprites, split, seed, size, mix, vary_words=False)
    return [composer.compose(index) for index in range(n)]
