"""Trains the target: a decoder over caption rows and visual tokens, with dropped captions for guidance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from cloud.engine import Engine
from cloud.models.image_codec import ImageCodec
from cloud.models.loading import save_weights
from cloud.models.transformer import UNREAD, Transformer, TransformerConfig
from shared.sampling import SamplingSettings
from training.batches import step_batches
from training.caption_summary import start_summary
from training.captioned_tokens import (
    CaptionedTokens,
    collate,
    corrupt_context,
    drop_captions,
    drop_context,
    first_items,
)
from training.checkpoint import load_trained
from training.checks import a_share, above_zero
from training.contact_sheet import save_contact_sheet
from training.data.tokens import TokenCache
from training.loop import Hook, LoopSettings, TrainingLoop
from training.optimizers import decoder_optimizers
from training.sampling import sample_tokens
from training.tables import read_tables, settings_from

__all__ = ["TargetSettings", "run_target"]

_PREVIEW_PICTURES = 16


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """A target training. Raises ValueError naming the field that cannot be.

    Args:
        model: shape of the decoder.
        loop: length and pace; the result goes to `loop.folder / "final"`.
        tokens: the token cache, with the folders train and val.
        codec: folder of the image codec that made the tokens, for previews.
        drop_captions: share of captions dropped, so that the model learns the unconditional branch.
        corrupt_context: share of pictures that are fed with random tokens among the true ones.
        drop_context: share of pictures that are to be drawn from the caption alone, without reading a token.
        muon_rate, adam_rate, weight_decay: see `decoder_optimizers`.
        validation_minutes, validation_pictures: how often, on how many pictures the loss is measured.
        guidance, top_k: of the previews.
    """

    model: TransformerConfig
    loop: LoopSettings
    tokens: Path = Path("work/tokens")
    codec: Path = Path("work/image_codec/final")
    drop_captions: float = 0.1
    corrupt_context: float = 0.0
    drop_context: float = 0.0
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.0
    validation_minutes: float = 10.0
    validation_pictures: int = 128
    guidance: float = 3.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop_captions < 1.0:
            raise ValueError(f"drop_captions must lie in [0, 1), got {self.drop_captions}")
        a_share(self, "corrupt_context", "drop_context")
        above_zero(self, "muon_rate", "adam_rate", "validation_minutes", "validation_pictures")
        for name in ("tokens", "codec"):
            object.__setattr__(self, name, Path(getattr(self, name)))

    @classmethod
    def load(cls, path: Path) -> TargetSettings:
        """Settings from a TOML file with the tables model, loop and training."""
        tables = read_tables(path, ("model", "loop", "training"))
        return settings_from(
            cls,
            path,
            "training",
            tables.get("training", {}),
            model=settings_from(TransformerConfig, path, "model", tables.get("model", {})),
            loop=settings_from(LoopSettings, path, "loop", tables.get("loop", {})),
        )


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits (batch, T, V) and tokens (batch, T)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def run_target(settings: TargetSettings) -> bool:
    """Trains into `loop.folder / "final"`; False when a signal stopped it before the end."""
    folder = settings.loop.folder
    torch.manual_seed(settings.loop.seed)
    model = Transformer(settings.model)
    start_summary(model, TokenCache(settings.tokens / "train"))
    validation = first_items(TokenCache(settings.tokens / "val"), settings.validation_pictures)

    def step_loss(model: nn.Module, batch: CaptionedTokens, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        features, lengths, tokens = batch
        fed = corrupt_context(tokens, settings.corrupt_context, settings.model.vocabulary)
        fed = drop_context(fed, settings.drop_context)
        rows = model(features, drop_captions(lengths, settings.drop_captions), fed)
        return token_loss(rows.logits, tokens), {}

    def validate(step: int) -> None:
        trained = _trained(loop, settings.model)
        losses = validation_losses(trained, validation)
        with (folder / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **losses}) + "\n")
        print(f"step {step}: validation", ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()), flush=True)
        _preview(trained, validation, settings, folder / "samples.png")

    loop = TrainingLoop(
        settings.loop,
        model,
        decoder_optimizers(model, settings.muon_rate, settings.adam_rate, settings.weight_decay),
        step_batches(TokenCache(settings.tokens / "train"), collate),
        step_loss,
        hooks=[Hook(settings.validation_minutes, validate)],
        compiled=[model],
    )
    if not loop.run().finished or not loop.accelerator.is_main_process:
        return False
    validate(settings.loop.steps)
    final = folder / "final"
    final.mkdir(exist_ok=True)
    save_weights(_trained(loop, settings.model), final / "target.safetensors", settings.model.to_dict())
    print(f"target written to {final}")
    return True


def validation_losses(model: Transformer, batch: CaptionedTokens) -> dict[str, float]:
    """Losses in nats a token of what a picture is drawn from: caption and context, the context, the caption.

    The one to watch is `loss_without_context`: a low `loss` hides that a decoder cannot start what a caption asks for.
    """
    features, lengths, tokens = batch
    return {
        "loss": validation_loss(model, batch),
        "loss_without_caption": validation_loss(model, (features, torch.zeros_like(lengths), tokens)),
        "loss_without_context": validation_loss(model, batch, fed=torch.full_like(tokens, UNREAD)),
    }


@torch.no_grad()
def validation_loss(model: Transformer, batch: CaptionedTokens, size: int = 16, fed: Tensor | None = None) -> float:
    """Mean loss in nats a token over a batch, read `size` pictures at a time.

    Args:
        model: the decoder.
        batch: caption features, caption lengths (0 for no caption) and the tokens to predict.
        size: pictures a pass.
        fed: tokens (batch, T) to read in place of the true ones.
    """
    device = next(model.parameters()).device
    losses = []
    parts = zip(*(part.split(size) for part in (*batch, batch[2] if fed is None else fed)), strict=True)
    for features, lengths, tokens, read in parts:
        logits = model(features.to(device), lengths.to(device), read.to(device)).logits
        losses.append(float(token_loss(logits, tokens.to(device))) * len(tokens))
    return sum(losses) / len(batch[2])


def _trained(loop: TrainingLoop, config: TransformerConfig) -> Transformer:
    model = Transformer(config).to(loop.accelerator.device)
    load_trained(model, loop.weights())
    return model.eval()


def _preview(model: Transformer, batch: CaptionedTokens, settings: TargetSettings, path: Path) -> None:
    """Real validation pictures above what the model draws for their captions."""
    features, lengths, tokens = (part[:_PREVIEW_PICTURES] for part in batch)
    engine = Engine(model, len(tokens), next(model.parameters()).device)
    captions = [rows[: int(length)] for rows, length in zip(features, lengths, strict=True)]
    sampling = SamplingSettings(guidance=settings.guidance, top_k=settings.top_k)
    drawn = sample_tokens(engine, captions, sampling, list(range(len(tokens))))
    codec = ImageCodec.load(settings.codec).eval()
    save_contact_sheet(codec, settings.model.grid, [tokens, drawn], path)
