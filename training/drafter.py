"""Trains the drafter: distilled from the target's guided distribution, so that the device needs no second pass.

The Inter-Head's radius learns to contain the target (the `calibrated` loss in its simplest form, methods.md 5.4).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cloud.models.drafter import Drafter, DrafterConfig, DrafterRows
from cloud.models.loading import load_transformer, load_weights, save_weights
from cloud.models.transformer import Transformer, TransformerConfig
from shared.errors import BundleError
from shared.intervals import log_odds
from shared.sampling import guide
from training.batches import step_batches
from training.caption_summary import start_summary
from training.captioned_tokens import CaptionedTokens, collate, corrupt_context, drop_context, first_items
from training.checkpoint import load_trained
from training.checks import a_share, above_zero
from training.data.tokens import TokenCache
from training.interval_losses import containment_loss
from training.loop import Hook, LoopSettings, TrainingLoop
from training.mixed_tokens import MixedTokens, check_shares
from training.optimizers import decoder_optimizers
from training.tables import read_tables, settings_from

__all__ = [
    "DrafterSettings",
    "containment_loss",
    "draft_quality",
    "guided_log_probs",
    "load_drafter",
    "run_drafter",
    "trained_drafter",
]


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """A drafter training. Raises ValueError naming the field that cannot be.

    Args:
        model: shape of the drafter.
        loop: length and pace; the result goes to `loop.folder / "final"`.
        target: safetensors of the trained target, its JSON beside it.
        tokens: token caches to learn on, with the folder train; the first also has val.
        shares: share of the pictures that each of them gives.
        guidance: scale of the guided distribution that is imitated.
        temperature: of the bundle's defaults; what is drawn at it is imitated as much as the rows themselves.
        corrupt_context, drop_context: shares of pictures that both read with random tokens among the true ones, or
            without any token; see `TargetSettings`.
        radius_weight: weight of the containment loss.
        lowest, highest: quantiles that the interval's ends learn.
    """

    model: DrafterConfig
    loop: LoopSettings
    target: Path = Path("work/target/final/target.safetensors")
    tokens: tuple[str, ...] = ("work/tokens",)
    shares: tuple[float, ...] = (1.0,)
    guidance: float = 3.0
    temperature: float = 1.0
    radius_weight: float = 0.1
    corrupt_context: float = 0.0
    drop_context: float = 0.0
    lowest: float = 0.05
    highest: float = 0.95
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.0
    validation_minutes: float = 5.0
    validation_pictures: int = 128

    def __post_init__(self) -> None:
        if not self.guidance >= 1.0:
            raise ValueError(f"guidance must be at least 1, got {self.guidance}")
        check_shares(self.tokens, self.shares)
        a_share(self, "corrupt_context", "drop_context")
        if not 0.0 < self.lowest < 0.5 < self.highest < 1.0:
            raise ValueError(f"0 < lowest < 0.5 < highest < 1 is needed, got {self.lowest} and {self.highest}")
        above_zero(self, "temperature", "muon_rate", "adam_rate", "validation_minutes", "validation_pictures")
        object.__setattr__(self, "target", Path(self.target))

    @classmethod
    def load(cls, path: Path) -> DrafterSettings:
        """Settings from a TOML file with the tables model, inter_head, loop and training."""
        tables = read_tables(path, ("model", "inter_head", "loop", "training"))
        transformer = settings_from(TransformerConfig, path, "model", tables.get("model", {}))
        head = tables.get("inter_head", {})
        return settings_from(
            cls,
            path,
            "training",
            tables.get("training", {}),
            model=settings_from(DrafterConfig, path, "inter_head", head, transformer=transformer),
            loop=settings_from(LoopSettings, path, "loop", tables.get("loop", {})),
        )


def guided_log_probs(
    target: Transformer, batch: CaptionedTokens, guidance: float, added: Tensor | None = None
) -> Tensor:
    """The target's guided log-probabilities (batch, T, V) under teacher forcing.

    Args:
        added: vectors (batch, T, dim) for the embeddings of the tokens, in both branches; see `Transformer`.
    """
    features, lengths, tokens = batch
    cond = target(features, lengths, tokens, added).logits.float()
    if guidance == 1.0:
        return cond.log_softmax(-1)
    uncond = target(features, torch.zeros_like(lengths), tokens, added).logits.float()
    return guide(cond, uncond, guidance).log_softmax(-1)


def load_drafter(weights: Path) -> Drafter:
    """Loads a drafter from `NAME.safetensors` and `NAME.json`, in evaluation mode.

    Raises:
        BundleError: a file is missing or does not hold a drafter.
    """
    description = weights.with_suffix(".json")
    try:
        drafter = Drafter(DrafterConfig.from_dict(json.loads(description.read_text(encoding="utf-8"))))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{description}: not a drafter's description ({error})") from error
    load_weights(drafter, weights)
    return drafter.eval()


def distillation_loss(rows: DrafterRows, target: Tensor, settings: DrafterSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(target || draft), half of it at the temperature of use, and the containment loss, with figures for the log."""
    draft = rows.centre.float().log_softmax(-1)
    divergence = _divergence(target, draft)
    if settings.temperature != 1.0:
        sharp = [(log_probs / settings.temperature).log_softmax(-1) for log_probs in (target, draft)]
        divergence = 0.5 * (divergence + _divergence(*sharp))
    contained = containment_loss(draft, rows.radius.float(), target, settings.lowest, settings.highest)
    with torch.no_grad():
        distance = 0.5 * (target.exp() - draft.exp()).abs().sum(-1).mean()
    return divergence + settings.radius_weight * contained, {"kl": divergence, "pinball": contained, "tv": distance}


def _divergence(target: Tensor, draft: Tensor) -> Tensor:
    return (target.exp() * (target - draft)).sum(-1).mean()


def run_drafter(settings: DrafterSettings) -> bool:
    """Trains into `loop.folder / "final"`; False when a signal stopped it before the end."""
    folder = settings.loop.folder
    torch.manual_seed(settings.loop.seed)
    model = Drafter(settings.model)
    caches = [TokenCache(Path(folder) / "train") for folder in settings.tokens]
    start_summary(model.transformer, caches[0])
    target = load_transformer(settings.target).eval().requires_grad_(False)
    validation = first_items(TokenCache(Path(settings.tokens[0]) / "val"), settings.validation_pictures)

    def step_loss(model: nn.Module, batch: CaptionedTokens, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        features, lengths, tokens = batch
        target.to(tokens.device)
        fed = corrupt_context(tokens, settings.corrupt_context, settings.model.transformer.vocabulary)
        fed = drop_context(fed, settings.drop_context)
        with torch.no_grad():
            truth = guided_log_probs(target, (features, lengths, fed), settings.guidance)
        loss, figures = distillation_loss(model(features, lengths, fed), truth, settings)
        return loss, dict(figures)

    def validate(step: int) -> None:
        quality = draft_quality(trained_drafter(loop, settings.model), target, validation, settings)
        with (folder / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **quality}) + "\n")
        print(f"step {step}: {', '.join(f'{name} {value:.4f}' for name, value in quality.items())}", flush=True)

    loop = TrainingLoop(
        settings.loop,
        model,
        decoder_optimizers(model, settings.muon_rate, settings.adam_rate, settings.weight_decay),
        step_batches(MixedTokens(caches, settings.shares), collate),
        step_loss,
        hooks=[Hook(settings.validation_minutes, validate)],
        compiled=[model, target],
    )
    if not loop.run().finished or not loop.accelerator.is_main_process:
        return False
    validate(settings.loop.steps)
    final = folder / "final"
    final.mkdir(exist_ok=True)
    save_weights(trained_drafter(loop, settings.model), final / "drafter.safetensors", settings.model.to_dict())
    print(f"drafter written to {final}")
    return True


@torch.no_grad()
def draft_quality(
    drafter: Drafter, target: Transformer, batch: CaptionedTokens, settings: DrafterSettings, size: int = 16
) -> dict[str, float]:
    """How well drafts fit the guided target on real pictures: mean TV, top-1 agreement, mass inside the intervals."""
    device = next(drafter.parameters()).device
    sums = dict.fromkeys(("tv", "top1", "coverage", "radius"), 0.0)
    for part in zip(*(items.split(size) for items in batch), strict=True):
        moved = tuple(item.to(device) for item in part)
        truth, rows = guided_log_probs(target, moved, settings.guidance), drafter(*moved)
        draft = rows.centre.float().log_softmax(-1)
        inside = (log_odds(truth) - log_odds(draft)).abs() <= rows.radius.float()
        figures = {
            "tv": 0.5 * (truth.exp() - draft.exp()).abs().sum(-1).mean(),
            "top1": (truth.argmax(-1) == draft.argmax(-1)).float().mean(),
            "coverage": (truth.exp() * inside).sum(-1).mean(),
            "radius": rows.radius.float().mean(),
        }
        for name, value in figures.items():
            sums[name] += float(value) * len(moved[2]) / len(batch[2])
    return sums


def trained_drafter(loop: TrainingLoop, config: DrafterConfig) -> Drafter:
    """The drafter a loop has trained so far, in evaluation mode."""
    model = Drafter(config).to(loop.accelerator.device)
    load_trained(model, loop.weights())
    return model.eval()
