"""Checkpoints of the training loop: whole or absent, two kept. Weights as safetensors, no pickled objects."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

KEPT = 2
MODEL, EMA, OPTIMIZERS, STATE = "model.safetensors", "ema.safetensors", "optimizers.pt", "state.json"


class EmaWeights:
    """Moving averages of a model's parameters, by name; young averages follow faster so that the start is forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        weight = 1.0 - min(self.decay, (1.0 + step) / (10.0 + step))
        theirs = [value.detach() for _, value in model.named_parameters()]
        torch._foreach_lerp_(list(self.values.values()), theirs, weight)


class CheckpointFolder:
    """The checkpoints of one run, `step_00001234` each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first. A folder gets its name only when everything in it is on disk."""
        return sorted(self.folder.glob("step_*"))

    def newest(self) -> Path | None:
        found = self.all()
        return found[-1] if found else None

    def save(
        self,
        step: int,
        identity: dict[str, int],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ema: EmaWeights | None,
    ) -> Path:
        """Write the state before `step`; a kill at any moment leaves the earlier checkpoints as they were."""
        path = self.folder / f"step_{step:08d}"
        if path.exists():
            return path
        temporary = self.folder / f"writing_{step:08d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_model(model, str(temporary / MODEL))
        if ema is not None:
            save_file({name: value.contiguous() for name, value in ema.values.items()}, temporary / EMA)
        torch.save([optimizer.state_dict() for optimizer in optimizers], temporary / OPTIMIZERS)
        (temporary / STATE).write_text(json.dumps({"step": step, **identity}) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            _flush(file)
        os.replace(temporary, path)
        _flush(self.folder)
        self._prune()
        return path

    def restore(
        self,
        identity: dict[str, int],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ema: EmaWeights | None,
    ) -> int:
        """Load the newest checkpoint in place; the step to do next, 0 without a checkpoint.

        Raises ValueError where the checkpoint was made with another `identity` (batch size, seed) or another model.
        """
        path = self.newest()
        if path is None:
            return 0
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, value in identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint {path} was made with {name} {state[name]}, the settings say {value}: "
                    f"set it back, or train in another folder"
                )
        load_weights(model, path / MODEL)
        if ema is not None:
            self._restore_ema(path, ema)
        states = torch.load(path / OPTIMIZERS, map_location="cpu", weights_only=True)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])

    @staticmethod
    def _restore_ema(path: Path, ema: EmaWeights) -> None:
        if not (path / EMA).is_file():
            raise ValueError(f"the checkpoint {path} holds no averaged weights: set ema_decay to 0")
        for name, value in load_file(path / EMA).items():
            ema.values[name].copy_(value)

    def _prune(self) -> None:
        for old in self.all()[:-KEPT]:
            doomed = old.with_name(f"writing_{old.name}")  # no half-deleted folder may pass for a checkpoint
            os.replace(old, doomed)
        for leftover in self.folder.glob("writing_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load_weights(model: nn.Module, source: Path) -> None:
    """Load a safetensors file, or a folder's `model.safetensors`, into `model`; errors name file and tensors."""
    file = source / MODEL if source.is_dir() else source
    if not file.is_file():
        raise FileNotFoundError(f"no weights to start from: {file} does not exist")
    try:
        load_model(model, str(file))
    except RuntimeError as error:
        raise ValueError(f"the weights in {file} do not fit the model of the settings: {error}") from error


def load_trained(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put the weights of `TrainingLoop.weights` into a plain model."""
    model.load_state_dict(weights)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
