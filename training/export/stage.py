"""The export stage: reads trained models from their work folders, and writes the bundle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cloud.models.drafter import Drafter, DrafterConfig
from cloud.models.image_codec import ImageCodec
from cloud.models.loading import load_transformer, load_weights
from shared.bundle import Bundle, default_bundle_folder
from shared.errors import BundleError
from shared.sampling import SamplingSettings
from training import text_encoder
from training.captioned_tokens import first_items
from training.data.tokens import TokenCache
from training.export import image_codec
from training.export.bundle import DRAFTER, DTYPES, BundleModels, BundleSettings, write_bundle
from training.graphs import open_graph
from training.parity import (
    ParityFloors,
    ParityReport,
    check_floors,
    codec_parity,
    drafter_parity,
    target_parity,
    write_report,
)
from training.quantise import Precision
from training.tables import read_tables, settings_from

__all__ = ["ExportSettings", "load_drafter", "run_export"]

_TARGET_SEQUENCES = 16  # each takes four passes of the target: enough for a mean over thousands of rows


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What goes into a bundle, from where, and how faithful it must be. Raises ValueError naming the bad field.

    Args:
        name: a short name for people.
        folder: where the bundle is written.
        report: file of the parity report.
        target, drafter: safetensors of trained models, their JSON beside them.
        codec: folder of the trained image codec.
        text_encoder: folder with text_encoder.onnx, tokenizer.json and its report.
        tokens: token cache of the pictures that parity is measured on.
        sequences: how many of them.
        target_dtype: of the target's stored matrices; float16 and bfloat16 halve the largest file.
        sampling: default sampling settings of the bundle; those the models were trained for.
        drafter_precision, codec_precision: of the exported graphs.
        floors: how faithful the export must be.
    """

    name: str = "default"
    folder: Path = field(default_factory=default_bundle_folder)
    report: Path = Path("work/export/parity.json")
    target: Path = Path("work/target/final/target.safetensors")
    drafter: Path = Path("work/drafter/final/drafter.safetensors")
    codec: Path = Path("work/image_codec/final")
    text_encoder: Path = Path("work/text_encoder")
    tokens: Path = Path("work/tokens/val")
    sequences: int = 64
    target_dtype: str = "float16"
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    drafter_precision: Precision = field(default_factory=Precision)
    codec_precision: Precision = field(default_factory=lambda: Precision("half"))
    floors: ParityFloors = field(default_factory=ParityFloors)

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences must be at least 1, got {self.sequences}")
        if self.target_dtype not in DTYPES:
            raise ValueError(f"target_dtype: one of {', '.join(DTYPES)} is needed, not {self.target_dtype!r}")
        for name in ("folder", "report", "target", "drafter", "codec", "text_encoder", "tokens"):
            object.__setattr__(self, name, Path(getattr(self, name)))

    @classmethod
    def load(cls, path: Path) -> ExportSettings:
        """Settings from a TOML file with the tables export, sampling, drafter, image_codec and parity."""
        tables = read_tables(path, text_encoder.TABLES)

        def part(kind: type, table: str) -> Any:
            return settings_from(kind, path, table, tables.get(table, {}))

        return settings_from(
            cls,
            path,
            "export",
            tables.get("export", {}),
            sampling=part(SamplingSettings, "sampling"),
            drafter_precision=part(Precision, "drafter"),
            codec_precision=part(Precision, "image_codec"),
            floors=part(ParityFloors, "parity"),
        )


def run_export(settings: ExportSettings) -> Bundle:
    """Exports the models, measures them against the trained ones, and writes the bundle if the floors are met.

    Raises:
        BundleError: a model is missing or does not fit the others; ParityError if the export is not faithful enough.
    """
    models = BundleModels(
        target=load_transformer(settings.target).eval(),
        drafter=load_drafter(settings.drafter),
        codec=ImageCodec.load(settings.codec),
        text_encoder=settings.text_encoder,
    )

    def inspect(folder: Path) -> dict[str, Any]:
        report = measure_parity(folder, models, settings)
        write_report(report, settings.report)
        check_floors(report, settings.floors)
        return {"parity": asdict(report)}

    bundle = write_bundle(settings.folder, models, _bundle_settings(settings), inspect)
    size = sum(file.bytes for file in bundle.manifest.files)
    print(f"bundle {bundle.manifest.digest[:12]} written to {settings.folder}: {size / 1e6:.1f} MB")
    return bundle


def _bundle_settings(settings: ExportSettings) -> BundleSettings:
    return BundleSettings(
        name=settings.name,
        defaults=settings.sampling,
        drafter=settings.drafter_precision,
        codec=settings.codec_precision,
        target_dtype=settings.target_dtype,
        facts={
            "drafter_precision": asdict(settings.drafter_precision),
            "precision": {
                "drafter": str(settings.drafter_precision),
                "codec": str(settings.codec_precision),
                "target": settings.target_dtype,
            },
        },
    )


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


def measure_parity(folder: Path, models: BundleModels, settings: ExportSettings) -> ParityReport:
    """Measures the files that were exported into a folder against the models they came from."""
    features, lengths, tokens = first_items(TokenCache(settings.tokens), settings.sequences)
    batch = features[:, : models.target.config.prefix_rows], lengths, tokens
    top1, tv = drafter_parity(open_graph(folder / DRAFTER), models.drafter, batch, settings.sampling.unguided())
    encoder, decoder = (open_graph(folder / name) for name in (image_codec.ENCODER, image_codec.DECODER))
    grid = models.target.config
    psnr, equal = codec_parity(encoder, decoder, models.codec, tokens.unflatten(1, (grid.rows, grid.cols)))
    few = batch[0][:_TARGET_SEQUENCES], lengths[:_TARGET_SEQUENCES], tokens[:_TARGET_SEQUENCES]
    return ParityReport(
        drafter_top1=top1,
        drafter_tv=tv,
        codec_psnr=psnr,
        codec_ids=equal,
        text_cosine=text_encoder.read_report(settings.text_encoder).least_cosine,
        target_tv=target_parity(folder / "target.safetensors", models.target, few, settings.sampling),
        sequences=len(tokens),
    )
