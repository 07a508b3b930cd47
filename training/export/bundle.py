"""Assembles a bundle: exports every model into a temporary folder, describes it, and moves it into place whole."""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud.models.drafter import Drafter
from cloud.models.image_codec import ImageCodec
from cloud.models.loading import save_weights
from cloud.models.transformer import Transformer
from shared.bundle import MANIFEST, Bundle, BundleFile, Manifest, file_digest
from shared.errors import BundleError
from shared.sampling import SamplingSettings
from training import text_encoder
from training.export import image_codec
from training.export.drafter import export_drafter
from training.graphs import open_graph
from training.quantise import Precision, quantise

__all__ = ["DRAFTER", "DTYPES", "PARTS", "BundleModels", "BundleSettings", "stored_as", "write_bundle"]

DRAFTER = "drafter.onnx"
PARTS = {
    image_codec.ENCODER: "device",
    image_codec.DECODER: "device",
    DRAFTER: "both",
    text_encoder.GRAPH: "both",
    text_encoder.TOKENIZER: "both",
    "target.safetensors": "cloud",
    "target.json": "cloud",
    "image_codec.safetensors": "cloud",
    "image_codec.json": "cloud",
    "drafter.safetensors": "cloud",
    "drafter.json": "cloud",
}

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Inspect = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class BundleModels:
    """The models of a bundle.

    Args:
        target, drafter, codec: trained models.
        text_encoder: folder with `text_encoder.onnx` and `tokenizer.json`.

    Raises:
        BundleError: two of them do not fit; the message names both values.
    """

    target: Transformer
    drafter: Drafter
    codec: ImageCodec
    text_encoder: Path

    def __post_init__(self) -> None:
        target, drafter = self.target.config, self.drafter.config.transformer
        for name in ("vocabulary", "rows", "cols", "prefix_rows", "caption_dim"):
            _same(f"{name} of the drafter", getattr(drafter, name), f"{name} of the target", getattr(target, name))
        codec = self.codec.config
        _same("codebook_size of the image codec", codec.codebook_size, "vocabulary of the target", target.vocabulary)
        _same("rows of the image codec", codec.rows, "longer side of the target's grid", max(target.rows, target.cols))
        width = open_graph(self.text_encoder / text_encoder.GRAPH).get_outputs()[0].shape[-1]
        _same("width of the text encoder", width, "caption_dim of the target", target.caption_dim)


def _same(name: str, value: int, other: str, wanted: int) -> None:
    if value != wanted:
        raise BundleError(f"{name} is {value}, {other} is {wanted}: these models do not belong together")


@dataclass(frozen=True, slots=True)
class BundleSettings:
    """How a bundle is written.

    Args:
        name: a short name for people.
        defaults: sampling settings the models were trained for.
        drafter, codec: precision of their graphs.
        target_dtype: of the target's stored matrices: float32, or float16 or bfloat16 at half the size. A loaded target
            computes in float32 all the same; float16 rounds eight times finer.
        facts: more for people, kept in the manifest.
    """

    name: str
    defaults: SamplingSettings = field(default_factory=SamplingSettings)
    drafter: Precision = field(default_factory=Precision)
    codec: Precision = field(default_factory=lambda: Precision("fp32"))
    target_dtype: str = "float32"
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name: it is empty; give the bundle a short name")
        if self.target_dtype not in DTYPES:
            raise ValueError(f"target_dtype: one of {', '.join(DTYPES)} is needed, not {self.target_dtype!r}")


def write_bundle(
    folder: Path, models: BundleModels, settings: BundleSettings, inspect: Inspect | None = None
) -> Bundle:
    """Writes a bundle; a folder that was there is replaced only once the new one is complete.

    Args:
        folder: where the bundle will lie.
        models: what goes in.
        settings: how.
        inspect: looks at the exported files before they are sealed; what it returns goes into the manifest's
            `models`, and what it raises leaves the old bundle as it was.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        staging = Path(temporary) / "new"
        staging.mkdir()
        _export(models, settings, staging)
        facts = settings.facts | _sizes(models) | (inspect(staging) if inspect else {})
        manifest = _manifest(models, settings, staging, facts)
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        staging.rename(folder)
    return Bundle.open(folder)


def _export(models: BundleModels, settings: BundleSettings, folder: Path) -> None:
    """Writes all files of the bundle but the manifest."""
    export_drafter(models.drafter, folder / DRAFTER)
    image_codec.export_image_codec(models.codec, folder)
    _store(folder / DRAFTER, settings.drafter)
    for name in (image_codec.ENCODER, image_codec.DECODER):
        _store(folder / name, settings.codec)
    for name in (text_encoder.GRAPH, text_encoder.TOKENIZER):
        shutil.copyfile(models.text_encoder / name, folder / name)
    save_weights(
        stored_as(models.target, DTYPES[settings.target_dtype]),
        folder / "target.safetensors",
        models.target.config.to_dict(),
    )
    save_weights(models.codec, folder / "image_codec.safetensors", asdict(models.codec.config))
    save_weights(models.drafter, folder / "drafter.safetensors", models.drafter.config.to_dict())


def _store(graph: Path, precision: Precision) -> None:
    """Brings a graph to a precision in place."""
    if precision.kind != "fp32":
        quantised = graph.with_suffix(".quantised")
        quantise(graph, quantised, precision)
        quantised.replace(graph)


def stored_as(target: Transformer, dtype: torch.dtype) -> Transformer:
    """The target with its matrices in another precision; vectors are small and stay as they are."""
    stored = copy.deepcopy(target)
    for parameter in stored.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    return stored


def _sizes(models: BundleModels) -> dict[str, Any]:
    named = {"target": models.target, "drafter": models.drafter, "image_codec": models.codec}
    return {"parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in named.items()}}


def _manifest(models: BundleModels, settings: BundleSettings, folder: Path, facts: dict[str, Any]) -> Manifest:
    config, codec = models.target.config, models.codec
    codebook = np.ascontiguousarray(codec.codebook.codes.cpu().numpy(), dtype="<f4")
    return Manifest(
        name=settings.name,
        grid=config.grid,
        vocabulary=config.vocabulary,
        image_size=codec.config.size,
        prefix_rows=config.prefix_rows,
        codebook_digest=hashlib.sha256(codebook.tobytes()).hexdigest(),
        defaults=settings.defaults,
        files=tuple(_described(folder / name, part) for name, part in PARTS.items()),
        models=facts,
    )


def _described(path: Path, part: str) -> BundleFile:
    return BundleFile(path.name, file_digest(path), path.stat().st_size, part)
