"""Trains the image codec: `python -m training.image_codec --config configs/image_codec.toml`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from cloud.models.image_codec import ImageCodec, ImageCodecConfig
from training.batches import step_batches
from training.checkpoint import load_trained
from training.checks import above_zero, not_negative
from training.codec_report import CodecReport, measure
from training.data.images import open_images
from training.data.settings import DataSettings
from training.loop import Hook, LoopSettings, TrainingLoop
from training.perceptual import DEFAULT_BLOCKS, PerceptualLoss, channels_last
from training.tables import read_tables, settings_from


@dataclass(frozen=True, slots=True)
class CodecLossSettings:
    """Weights of the terms of the codec's loss; zero leaves a term out. Raises ValueError naming the bad field.

    `detail` weights the L1 term by the local contrast of the original: eyes and outlines are few pixels,
    and a plain mean over a picture that is mostly background hardly counts them.
    """

    l1: float = 1.0
    mse: float = 1.0
    gradient: float = 1.0
    perceptual: float = 0.5
    commitment: float = 0.25
    detail: float = 2.0
    perceptual_blocks: tuple[int, ...] = DEFAULT_BLOCKS

    def __post_init__(self) -> None:
        not_negative(self, "l1", "mse", "gradient", "perceptual", "commitment", "detail")


@dataclass(frozen=True, slots=True)
class CodecTrainingSettings:
    """All of a codec training. `decoder_only` keeps the tokens of the weights it starts from (`loop.init_from`)."""

    data: DataSettings
    loop: LoopSettings
    codec: ImageCodecConfig = field(default_factory=ImageCodecConfig)
    loss: CodecLossSettings = field(default_factory=CodecLossSettings)
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    decoder_only: bool = False
    validation_minutes: float = 4.0
    validation_images: int = 256
    report_images: int = 1000

    def __post_init__(self) -> None:
        above_zero(self, "learning_rate", "validation_minutes", "validation_images", "report_images")
        if self.weight_decay < 0.0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.data.size != self.codec.size:
            raise ValueError(f"data.size {self.data.size} and codec.size {self.codec.size} must be equal")
        if self.decoder_only and self.loop.init_from is None:
            raise ValueError("decoder_only needs loop.init_from: the weights whose tokens it keeps")

    @classmethod
    def load(cls, path: Path) -> CodecTrainingSettings:
        """Settings from a TOML file with the tables data, loop, codec, loss and training."""
        tables = read_tables(path, ("data", "loop", "codec", "loss", "training"))
        return settings_from(
            cls,
            path,
            "training",
            tables.get("training", {}),
            data=DataSettings.load(path),
            loop=settings_from(LoopSettings, path, "loop", tables.get("loop", {})),
            codec=settings_from(ImageCodecConfig, path, "codec", tables.get("codec", {})),
            loss=settings_from(CodecLossSettings, path, "loss", tables.get("loss", {})),
        )


class CodecLoss(nn.Module):
    """The codec's training loss and its terms."""

    def __init__(self, settings: CodecLossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.perceptual = PerceptualLoss(settings.perceptual_blocks) if settings.perceptual else None

    def forward(self, images: Tensor, reconstruction: Tensor, commitment: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (scalar) and its unweighted terms, of pictures and reconstructions (B, 3, H, W)."""
        error = reconstruction.float() - images
        terms = {
            "l1": (error.abs() * detail_weight(images, self.settings.detail)).mean(),
            "mse": error.square().mean(),
            "gradient": error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean(),
            "commitment": commitment,
        }
        if self.perceptual is not None:
            terms["perceptual"] = self.perceptual(reconstruction, images)
        loss = torch.stack([getattr(self.settings, name) * term for name, term in terms.items()]).sum()
        return loss, {name: term.detach() for name, term in terms.items()}


def detail_weight(images: Tensor, strength: float) -> Tensor:
    """Weights (B, 1, H, W) of mean 1 over the batch, up to 1 + `strength` times larger at details of (B, 3, H, W)."""
    across = F.pad(images.diff(dim=3).abs().mean(dim=1, keepdim=True), (0, 1, 0, 0))
    down = F.pad(images.diff(dim=2).abs().mean(dim=1, keepdim=True), (0, 0, 0, 1))
    contrast = F.avg_pool2d(across + down, 5, stride=1, padding=2)
    weight = 1.0 + strength * (contrast / 0.2).clamp(max=1.0)
    return weight / weight.mean()


def run_image_codec(settings: CodecTrainingSettings) -> CodecReport | None:
    """Train a codec into `settings.loop.folder / "final"`; its report on the test split, None when stopped early."""
    folder = settings.loop.folder
    torch.manual_seed(settings.loop.seed)
    codec = channels_last(ImageCodec(settings.codec))
    if settings.decoder_only:
        codec.freeze_tokens()
    loss = CodecLoss(settings.loss)
    validation = open_images(settings.data, "val")

    def step_loss(model: nn.Module, batch: Any, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        images = batch[0].contiguous(memory_format=torch.channels_last)
        reconstruction, ids, commitment = model(images)
        total, terms = loss.to(images.device)(images, reconstruction, commitment)
        return total, {**terms, "codes_in_batch": float(ids.unique().numel())}

    def validate(step: int) -> None:
        trained = _trained(loop, settings.codec)
        report = measure(trained, _pictures(validation, settings.validation_images))
        _append(folder / "validation.jsonl", {"step": step, **report.as_dict()})
        print(f"step {step}: {report.summary()}", flush=True)
        _save_strip(trained, _pictures(validation, 24), folder / "reconstructions.png")

    loop = TrainingLoop(
        settings.loop,
        codec,
        [_optimizer(codec, settings)],
        step_batches(open_images(settings.data, "train")),
        step_loss,
        hooks=[Hook(settings.validation_minutes, validate)],
        compiled=[codec.encoder, codec.decoder],
    )
    if not loop.run().finished or not loop.accelerator.is_main_process:
        return None
    return _finish(_trained(loop, settings.codec), settings)


def _optimizer(codec: ImageCodec, settings: CodecTrainingSettings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in codec.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True
    )


def _trained(loop: TrainingLoop, config: ImageCodecConfig) -> ImageCodec:
    codec = channels_last(ImageCodec(config))
    load_trained(codec, loop.weights())
    return codec.eval()


def _finish(codec: ImageCodec, settings: CodecTrainingSettings) -> CodecReport:
    final = settings.loop.folder / "final"
    codec.save(final)
    test = open_images(settings.data, "test")
    report = measure(codec, _pictures(test, settings.report_images))
    (final / "report.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    _save_strip(codec, _pictures(test, 24), final / "reconstructions.png")
    print(f"test split: {report.summary()}\nimage codec written to {final}")
    return report


def _pictures(data: Dataset[Any], count: int) -> Tensor:
    """The first `count` pictures of a data set, (count, 3, H, W)."""
    return torch.stack([data[index][0] for index in range(min(count, len(data)))])  # type: ignore[arg-type]


@torch.no_grad()
def _save_strip(codec: ImageCodec, originals: Tensor, path: Path, columns: int = 8) -> None:
    """Originals above their reconstructions, `columns` a row."""
    device = next(codec.parameters()).device
    decoded = codec.decode(codec.encode(originals.to(device))).cpu()
    rows = []
    for start in range(0, len(originals), columns):
        for pictures in (originals, decoded):
            rows.append(torch.cat(list(pictures[start : start + columns]), dim=2))
    width = max(row.shape[2] for row in rows)
    sheet = torch.cat([F.pad(row, (0, width - row.shape[2])) for row in rows], dim=1)
    pixels = ((sheet + 1.0) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)


def _append(path: Path, values: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/image_codec.toml"), help="TOML file of settings")
    run_image_codec(CodecTrainingSettings.load(parser.parse_args(arguments).config))


if __name__ == "__main__":
    main()
