"""The training loop all stages share: resumable after a kill at any moment, on accelerate, several optimizers at once.

A resumed run computes what an unbroken one would: the data of a step depend on the step alone (`StepSampler`), and all
random generators are seeded anew at every step, so no generator state has to be saved, on however many processes.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from training.batches import BatchPlan
from training.checkpoint import CheckpointFolder, EmaWeights, load_weights
from training.checks import above_zero, at_least_one, not_negative
from training.machine import compile_parts, keep_memory, seed_all, to_device, wants_bf16
from training.metrics import MetricsLog

PRECISIONS = ("auto", "bf16", "fp32")
COMPILE_MODES = ("off", "auto", "on")
DECAYS = ("linear", "cosine")


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long and how a stage trains. Raises ValueError naming the field that cannot be.

    `batch_size` counts all processes together. `warmup_steps` and `decay_fraction` shape the learning rate: up from
    zero, constant, then down to zero over the last fraction of the steps. `ema_decay` 0 keeps no averaged weights.
    `threads` 0 leaves torch's own choice. `init_from`: a safetensors file, or a checkpoint's folder, to start from
    when the stage's folder holds no checkpoint.
    """

    folder: Path
    steps: int
    batch_size: int
    seed: int = 0
    precision: str = "auto"
    checkpoint_minutes: float = 3.0
    log_every: int = 20
    grad_clip: float = 1.0
    threads: int = 0
    workers: int = 0
    warmup_steps: int = 100
    decay_fraction: float = 0.5
    decay: str = "linear"
    ema_decay: float = 0.0
    compile: str = "off"
    init_from: Path | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, choices in (("precision", PRECISIONS), ("compile", COMPILE_MODES), ("decay", DECAYS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("folder", "init_from"):
            if isinstance(getattr(self, name), str):  # TOML knows no paths
                object.__setattr__(self, name, Path(getattr(self, name)))

    def _check_numbers(self) -> None:
        at_least_one(self, "steps", "batch_size", "log_every")
        not_negative(self, "threads", "workers", "warmup_steps", "seed")
        above_zero(self, "checkpoint_minutes", "grad_clip")
        if not 0.0 <= self.decay_fraction <= 1.0:
            raise ValueError(f"decay_fraction must lie between 0 and 1, got {self.decay_fraction}")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")

    def rate(self, step: int) -> float:
        """Factor on every learning rate at `step` (0-based): warm-up, constant, decay to zero at `steps`."""
        rising = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = (self.steps - step) / max(self.decay_fraction * self.steps, 1.0)
        falling = min(1.0, left)
        if self.decay == "cosine":
            falling = 0.5 - 0.5 * float(np.cos(np.pi * falling))
        return rising * falling


@dataclass(frozen=True, slots=True)
class Hook:
    """Something to do now and then (validation, a preview): `run(step)` every `minutes` on the main process.

    It may use random generators and evaluation mode freely: the loop seeds and sets training mode before each step.
    """

    minutes: float
    run: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Where a run ended: `finished` is false when a signal stopped it."""

    step: int
    finished: bool


@dataclass
class TrainingLoop:
    """Trains `model` until `settings.steps`, starting from the newest checkpoint in `settings.folder`.

    `loss(model, batch, step)` returns the loss and figures for the log; `batches(plan)` yields the batches of
    the steps from `plan.first` on. `settings` of the optimizers are peak rates: `LoopSettings.rate` scales them.
    `compiled` are the parts that `compile` applies to. After `run`, `weights()` copies the averaged weights.
    """

    settings: LoopSettings
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batches: Callable[[BatchPlan], Iterator[Any]]
    loss: Callable[[nn.Module, Any, int], tuple[Tensor, dict[str, float | Tensor]]]
    hooks: Sequence[Hook] = ()
    compiled: Sequence[nn.Module] = ()
    accelerator: Accelerator = field(init=False)
    ema: EmaWeights | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        settings = self.settings
        keep_memory()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.accelerator = Accelerator(mixed_precision="no", step_scheduler_with_optimizer=False)
        self.checkpoints = CheckpointFolder(settings.folder / "checkpoints")
        self.bf16 = wants_bf16(settings.precision, self.accelerator.device.type)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self._stop: int | None = None

    def run(self) -> LoopResult:
        """Train to the end or to a SIGINT/SIGTERM, which saves a checkpoint first."""
        step = self._start()
        step = self._steps(step)
        self._save(step)
        finished = step >= self.settings.steps
        if not finished:
            self.accelerator.print(
                f"stopped at step {step} of {self.settings.steps}; saved in {self.checkpoints.folder}: "
                "run the same command again to go on"
            )
        return LoopResult(step, finished)

    def weights(self) -> dict[str, Tensor]:
        """The weights to use: averaged where the settings ask for it, the last ones otherwise; buffers as they are."""
        state = dict(self.plain.state_dict())
        if self.ema is not None:
            state.update(self.ema.values)
        return {name: value.detach().clone() for name, value in state.items()}

    def _start(self) -> int:
        """Bring model, optimizers and averages to where the run shall start; the step to do next."""
        self.plain = self.model
        if self.settings.init_from is not None and self.checkpoints.newest() is None:
            load_weights(self.plain, self.settings.init_from)
        self.plain.to(self.accelerator.device)
        if self.settings.ema_decay:
            self.ema = EmaWeights(self.plain, self.settings.ema_decay)
        step = self.checkpoints.restore(self._identity(), self.plain, self.optimizers, self.ema)
        compile_parts(self.compiled, self.settings.compile)
        self.model = self.accelerator.prepare_model(self.plain)
        if self.accelerator.is_main_process:
            self.metrics = MetricsLog(self.settings.folder / "metrics.jsonl", step)
        return step

    def _identity(self) -> dict[str, int]:
        return {"batch_size": self.settings.batch_size, "seed": self.settings.seed}

    def _steps(self, step: int) -> int:
        self.accelerator.wait_for_everyone()
        batches = self.batches(self._plan(step))
        saved = time.monotonic()
        due = [saved + 60.0 * hook.minutes for hook in self.hooks]
        with self._progress(step) as bar, _SignalFlag() as flag:
            while step < self.settings.steps and not self._stopped(flag):
                figures = self._step(next(batches), step)
                step += 1
                bar.update()
                self._log(step, figures, bar)
                if time.monotonic() - saved >= 60.0 * self.settings.checkpoint_minutes:
                    _check_finite(figures["loss"], step)  # a checkpoint of broken weights would be resumed for ever
                    self._save(step)
                    saved = time.monotonic()
                self._run_hooks(step, due)
        return step

    def _plan(self, first: int) -> BatchPlan:
        settings, accelerator = self.settings, self.accelerator
        return BatchPlan(
            first,
            settings.steps,
            settings.batch_size,
            settings.seed,
            settings.workers,
            accelerator.process_index,
            accelerator.num_processes,
        )

    def _progress(self, step: int) -> tqdm[Any]:
        return tqdm(
            total=self.settings.steps,
            initial=step,
            disable=not self.accelerator.is_main_process,
            smoothing=0.05,
            mininterval=0.2 if sys.stderr.isatty() else 30.0,  # a log file wants a line now and then
        )

    def _step(self, batch: Any, step: int) -> dict[str, float | Tensor]:
        seed_all(self.settings.seed, step, self.accelerator.process_index)
        device = self.accelerator.device
        self.model.train()
        rate = self.settings.rate(step)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            loss, figures = self.loss(self.model, to_device(batch, device), step)
        self.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.settings.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.ema is not None:
            self.ema.update(self.plain, step)
        figures = {"loss": loss, **figures, "grad_norm": norm, "rate": rate}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in figures.items()}

    def _log(self, step: int, figures: dict[str, float | Tensor], bar: tqdm[Any]) -> None:
        if not self.accelerator.is_main_process or (step % self.settings.log_every and step < self.settings.steps):
            return
        _check_finite(figures["loss"], step)
        values = {name: float(value) for name, value in figures.items()}
        bar.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)
        self.metrics.write(step, values)

    def _save(self, step: int) -> None:
        if self.accelerator.is_main_process:
            self.checkpoints.save(step, self._identity(), self.plain, self.optimizers, self.ema)

    def _run_hooks(self, step: int, due: list[float]) -> None:
        if not self.accelerator.is_main_process:
            return
        for number, hook in enumerate(self.hooks):
            if time.monotonic() >= due[number]:
                hook.run(step)
                due[number] = time.monotonic() + 60.0 * hook.minutes

    def _stopped(self, flag: _SignalFlag) -> bool:
        if self.accelerator.num_processes == 1:
            return flag.raised
        votes = self.accelerator.reduce(torch.tensor(int(flag.raised), device=self.accelerator.device), "sum")
        return bool(votes.item())  # all leave after the same step, whoever got the signal


def _check_finite(loss: float | Tensor, step: int) -> None:
    value = float(loss)
    if not np.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}: lower the learning rate, or use precision fp32")


class _SignalFlag:
    """While entered, SIGINT and SIGTERM raise a flag; a second one takes its usual course."""

    def __init__(self) -> None:
        self.raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        signal.signal(number, self._before[number])

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
