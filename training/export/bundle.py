"""Assembles a bundle: exports every model into a temporary folder, describes it, and moves it into place whole."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cloud.models.drafter import Drafter
from cloud.models.image_codec import ImageCodec
from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.loading import save_weights
from cloud.models.transformer import Transformer
from shared.bundle import MANIFEST, Bundle, BundleFile, Manifest, file_digest
from shared.calibration import CALIBRATION, Calibration
from shared.errors import BundleError
from shared.features import FEATURE_MODES, encoder_graph
from shared.sampling import SamplingSettings
from training import text_encoder
from training.export import image_codec
from training.export.drafter import export_drafter
from training.export.interval_encoder import export_interval_encoders
from training.graphs import open_graph
from training.quantise import Precision, quantise

__all__ = [
    "DRAFTER",
    "DTYPES",
    "OPTIONAL",
    "PARTS",
    "BundleModels",
    "BundleSettings",
    "check_dtypes",
    "stored_as",
    "write_bundle",
]

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
"""Part of each file every bundle has."""
OPTIONAL = {
    CALIBRATION: "both",
    "interval_features.safetensors": "cloud",
    "interval_features.json": "cloud",
    **{name: "device" for name in map(encoder_graph, FEATURE_MODES) if name is not None},
}
"""Part of each file that only bundles with a calibration or with interval features have."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Inspect = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class BundleModels:
    """The models of a bundle.

    Args:
        target, drafter, codec: trained models.
        text_encoder: folder with `text_encoder.onnx` and `tokenizer.json`.
        features: trained interval features; without, tokens kept on the device go to the cloud bare.
        calibration: what `calibration.json` will say (see `shared.calibration`); without, thresholds have no start.

    Raises:
        BundleError: two of them do not fit, or the calibration is none; the message names both values.
    """

    target: Transformer
    drafter: Drafter
    codec: ImageCodec
    text_encoder: Path
    features: IntervalFeatures | None = None
    calibration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        target, drafter = self.target.config, self.drafter.config.transformer
        for name in ("vocabulary", "rows", "cols", "prefix_rows", "caption_dim"):
            _same(f"{name} of the drafter", getattr(drafter, name), f"{name} of the target", getattr(target, name))
        codec = self.codec.config
        _same("codebook_size of the image codec", codec.codebook_size, "vocabulary of the target", target.vocabulary)
        _same("rows of the image codec", codec.rows, "longer side of the target's grid", max(target.rows, target.cols))
        width = open_graph(self.text_encoder / text_encoder.GRAPH).get_outputs()[0].shape[-1]
        _same("width of the text encoder", width, "caption_dim of the target", target.caption_dim)
        if self.features is not None:
            fields = self.features.to_dict()
            _same("dim of the interval features", fields["dim"], "dim of the target", target.dim)
            _same("draft_dim of the interval features", fields["draft_dim"], "dim of the drafter", drafter.dim)
        if self.calibration is not None:
            calibrated = Calibration.from_dict(self.calibration).grid_rows
            _same("rows of the calibration", calibrated, "rows of the target", target.rows)


def _same(name: str, value: int, other: str, wanted: int) -> None:
    if value != wanted:
        raise BundleError(f"{name} is {value}, {other} is {wanted}: these models do not belong together")


@dataclass(frozen=True, slots=True)
class BundleSettings:
    """How a bundle is written.

    Args:
        name: a short name for people.
        defaults: sampling settings the models were trained for.
        drafter, codec: precision of the graphs of the drafter and of the image decoder; the encoder's is float32.
        target_dtype, drafter_dtype, codec_dtype: of their stored matrices: float32, or float16 or bfloat16 at half the
            size. A loaded model computes in float32 all the same; float16 rounds eight times finer.
        recommended_features: feature mode that devices take when their user names none.
        facts: more for people, kept in the manifest.
    """

    name: str
    defaults: SamplingSettings = field(default_factory=SamplingSettings)
    drafter: Precision = field(default_factory=Precision)
    codec: Precision = field(default_factory=lambda: Precision("fp32"))
    target_dtype: str = "float32"
    drafter_dtype: str = "float32"
    codec_dtype: str = "float32"
    recommended_features: str = "none"
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name: it is empty; give the bundle a short name")
        check_dtypes(self)


def check_dtypes(settings: Any) -> None:
    """Raises ValueError naming a field `target_dtype`, `drafter_dtype` or `codec_dtype` that is not in `DTYPES`."""
    for name in ("target_dtype", "drafter_dtype", "codec_dtype"):
        if getattr(settings, name) not in DTYPES:
            raise ValueError(f"{name}: one of {', '.join(DTYPES)} is needed, not {getattr(settings, name)!r}")


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
        facts = settings.facts | _facts(models, settings) | (inspect(staging) if inspect else {})
        manifest = _manifest(models, settings, staging, facts)
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        for path in staging.iterdir():  # some writers leave files that only their owner may read
            path.chmod(0o644)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        staging.rename(folder)
    return Bundle.open(folder)


def _export(models: BundleModels, settings: BundleSettings, folder: Path) -> None:
    """Writes all files of the bundle but the manifest."""
    export_drafter(models.drafter, folder / DRAFTER)
    image_codec.export_image_codec(models.codec, folder)
    _store(folder / DRAFTER, settings.drafter)
    _store(folder / image_codec.DECODER, settings.codec)  # rounding would tip the encoder between near codes
    for name in (text_encoder.GRAPH, text_encoder.TOKENIZER):
        shutil.copyfile(models.text_encoder / name, folder / name)
    _export_weights(models, settings, folder)
    _export_optional(models, folder)


def _export_weights(models: BundleModels, settings: BundleSettings, folder: Path) -> None:
    """Writes the models as the cloud and further training read them."""
    described = {
        "target": (models.target, models.target.config.to_dict(), settings.target_dtype),
        "drafter": (models.drafter, models.drafter.config.to_dict(), settings.drafter_dtype),
        "image_codec": (models.codec, asdict(models.codec.config), settings.codec_dtype),
    }
    for name, (model, description, dtype) in described.items():
        save_weights(stored_as(model, DTYPES[dtype]), folder / f"{name}.safetensors", description)


def _export_optional(models: BundleModels, folder: Path) -> None:
    if models.calibration is not None:
        (folder / CALIBRATION).write_text(json.dumps(models.calibration, indent=1) + "\n", encoding="utf-8")
    if models.features is not None:
        export_interval_encoders(models.features, folder)
        save_weights(models.features, folder / "interval_features.safetensors", models.features.to_dict())


def _store(graph: Path, precision: Precision) -> None:
    """Brings a graph to a precision in place."""
    if precision.kind != "fp32":
        quantised = graph.with_suffix(".quantised")
        quantise(graph, quantised, precision)
        quantised.replace(graph)


def stored_as(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model with its matrices in another precision. Vectors are small and stay as they are, and so do buffers: the
    codebook's digest is that of its float32 numbers."""
    if dtype == torch.float32:
        return model
    stored = copy.deepcopy(model)
    for parameter in stored.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    return stored


def _facts(models: BundleModels, settings: BundleSettings) -> dict[str, Any]:
    """Facts about the models.

    Raises:
        BundleError: a feature mode is recommended that the models do not know.
    """
    named = {"target": models.target, "drafter": models.drafter, "image_codec": models.codec}
    if models.features is not None:
        named["interval_features"] = models.features
    modes = [] if models.features is None else models.features.modes
    if settings.recommended_features not in ("none", *modes):
        known = ", ".join(("none", *modes))
        raise BundleError(f"recommended_features: the bundle knows {known}, not {settings.recommended_features!r}")
    return {
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in named.items()},
        "interval": {
            "calibrated": models.calibration is not None,
            "feature_modes": modes,
            "recommended_features": settings.recommended_features,
        },
    }


def _manifest(models: BundleModels, settings: BundleSettings, folder: Path, facts: dict[str, Any]) -> Manifest:
    config, codec = models.target.config, models.codec
    codebook = np.ascontiguousarray(codec.codebook.codes.cpu().numpy(), dtype="<f4")
    present = PARTS | {name: part for name, part in OPTIONAL.items() if (folder / name).exists()}
    return Manifest(
        name=settings.name,
        grid=config.grid,
        vocabulary=config.vocabulary,
        image_size=codec.config.size,
        prefix_rows=config.prefix_rows,
        codebook_digest=hashlib.sha256(codebook.tobytes()).hexdigest(),
        defaults=settings.defaults,
        files=tuple(_described(folder / name, part) for name, part in present.items()),
        models=facts,
    )


def _described(path: Path, part: str) -> BundleFile:
    return BundleFile(path.name, file_digest(path), path.stat().st_size, part)
