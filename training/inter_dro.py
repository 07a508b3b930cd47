"""Trains the intervals of a drafter further, on what the target draws: Inter-DRO of CIAR (2603.25463; methods.md 5.5).

Starts from a trained drafter and learns the guided target's distributions under teacher forcing, on a mixture of token
caches: pictures that the target drew itself, some of which begin with the drafter's own tokens, and real ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from cloud.models.drafter import Drafter
from cloud.models.loading import load_transformer, save_weights
from shared.calibration import CALIBRATION
from shared.sampling import SamplingSettings
from training.batches import step_batches
from training.captioned_tokens import CaptionedTokens, collate, first_items
from training.checks import above_zero
from training.data.tokens import TokenCache
from training.drafter import guided_log_probs, load_drafter, trained_drafter
from training.drawing import caption_of
from training.interval_losses import IntervalLossSettings, interval_loss
from training.loop import Hook, LoopSettings, TrainingLoop
from training.mixed_tokens import MixedTokens, check_shares
from training.optimizers import decoder_optimizers
from training.tables import read_tables, settings_from
from training.uncertainty import calibrate, measure_rows
from training.uncertainty_report import UncertaintyHistory

__all__ = ["InterDroSettings", "run_inter_dro"]


@dataclass(frozen=True, slots=True)
class InterDroSettings:
    """An Inter-DRO training. Raises ValueError naming the field that cannot be.

    Args:
        loop: length and pace; the result goes to `loop.folder / "final"`; it starts from `drafter`.
        loss: which loss, with what coefficients.
        target, drafter: safetensors of the trained models, their JSON beside them.
        tokens: token caches to learn on, with the folders train and val.
        shares: share of the pictures that each of them gives.
        guidance: scale of the guided distribution that is imitated.
        temperature: of the bundle's defaults, which the score is ranked and calibrated for.
        muon_rate, adam_rate, weight_decay: see `decoder_optimizers`.
        validation_minutes, validation_pictures: how often, on how many pictures of each cache.
        calibration_pictures: pictures drawn for the calibration of the scores.
    """

    loop: LoopSettings
    loss: IntervalLossSettings = field(default_factory=IntervalLossSettings)
    target: Path = Path("work/target/final/target.safetensors")
    drafter: Path = Path("work/drafter/final/drafter.safetensors")
    tokens: tuple[str, ...] = ("work/drawn", "work/tokens")
    shares: tuple[float, ...] = (0.5, 0.5)
    guidance: float = 3.0
    temperature: float = 1.0
    muon_rate: float = 0.005
    adam_rate: float = 1e-3
    weight_decay: float = 0.0
    validation_minutes: float = 5.0
    validation_pictures: int = 128
    calibration_pictures: int = 256

    def __post_init__(self) -> None:
        if not self.guidance >= 1.0:
            raise ValueError(f"guidance must be at least 1, got {self.guidance}")
        check_shares(self.tokens, self.shares)
        above_zero(self, "temperature", "muon_rate", "adam_rate")
        above_zero(self, "validation_minutes", "validation_pictures", "calibration_pictures")
        for name in ("target", "drafter"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        if self.loop.init_from not in (None, self.drafter):
            raise ValueError(f"init_from must stay unset: the training starts from drafter, {self.drafter}")
        object.__setattr__(self, "loop", replace(self.loop, init_from=self.drafter))

    @classmethod
    def load(cls, path: Path) -> InterDroSettings:
        """Settings from a TOML file with the tables loop, loss and training."""
        tables = read_tables(path, ("loop", "loss", "training"))
        return settings_from(
            cls,
            path,
            "training",
            tables.get("training", {}),
            loop=settings_from(LoopSettings, path, "loop", tables.get("loop", {})),
            loss=settings_from(IntervalLossSettings, path, "loss", tables.get("loss", {})),
        )

    def caches(self, split: str) -> dict[str, TokenCache]:
        """The token caches of a split, by the name of their folder."""
        return {Path(folder).name: TokenCache(Path(folder) / split) for folder in self.tokens}


def run_inter_dro(settings: InterDroSettings) -> bool:
    """Trains into `loop.folder / "final"`; False when a signal stopped it before the end."""
    torch.manual_seed(settings.loop.seed)
    model = load_drafter(settings.drafter)
    target = load_transformer(settings.target).eval().requires_grad_(False)
    history = UncertaintyHistory(settings.loop.folder)
    validation = {
        name: first_items(cache, settings.validation_pictures) for name, cache in settings.caches("val").items()
    }

    def step_loss(model: nn.Module, batch: CaptionedTokens, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        target.to(batch[0].device)
        with torch.no_grad():
            truth = guided_log_probs(target, batch, settings.guidance)
        rows = model(*batch)
        draft = rows.centre.float().log_softmax(-1)
        loss, figures = interval_loss(draft, rows.radius.float(), truth, settings.loss, settings.temperature)
        return loss, dict(figures)

    def validate(drafter: Drafter, step: int) -> None:
        target.to(loop.accelerator.device)
        size = max(1, settings.loop.batch_size // loop.accelerator.num_processes)  # a shape that is compiled already
        measured = {
            name: measure_rows(drafter, target, batch, settings.guidance, settings.temperature, size, loop.bf16)
            for name, batch in validation.items()
        }
        for name, report in history.add(step, measured).items():
            print(f"step {step}: {name}: {report}", flush=True)

    loop = TrainingLoop(
        settings.loop,
        model,
        decoder_optimizers(model, settings.muon_rate, settings.adam_rate, settings.weight_decay),
        step_batches(MixedTokens(list(settings.caches("train").values()), settings.shares), collate),
        step_loss,
        hooks=[Hook(settings.validation_minutes, lambda step: validate(trained_drafter(loop, model.config), step))],
        compiled=[model, target],
    )
    if loop.accelerator.is_main_process and loop.checkpoints.newest() is None:
        validate(model.to(loop.accelerator.device), 0)
    if not loop.run().finished or not loop.accelerator.is_main_process:
        return False
    drafter = trained_drafter(loop, model.config)
    validate(drafter, settings.loop.steps)
    _write_final(drafter, settings)
    return True


def _write_final(drafter: Drafter, settings: InterDroSettings) -> None:
    """The drafter, and the calibration of its scores on pictures it draws for validation captions."""
    final = settings.loop.folder / "final"
    final.mkdir(exist_ok=True)
    cache = next(iter(settings.caches("val").values()))
    rows, count = drafter.config.transformer.prefix_rows, min(settings.calibration_pictures, len(cache))
    captions = [caption_of(cache, item, rows) for item in range(count)]
    calibration = calibrate(drafter, captions, SamplingSettings(settings.temperature, guidance=settings.guidance))
    (final / CALIBRATION).write_text(json.dumps(calibration, indent=1) + "\n", encoding="utf-8")
    save_weights(drafter, final / "drafter.safetensors", drafter.config.to_dict())
    print(f"drafter and calibration written to {final}")
