"""The export stage: reads trained models from their work folders, and writes the bundle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cloud.models.image_codec import ImageCodec
from cloud.models.loading import load_interval_features, load_transformer
from shared.bundle import Bundle, default_bundle_folder
from shared.calibration import read_calibration
from shared.sampling import SamplingSettings
from training import text_encoder
from training.captioned_tokens import first_items
from training.data.tokens import TokenCache
from training.drafter import load_drafter
from training.export import image_codec
from training.export.bundle import DRAFTER, BundleModels, BundleSettings, check_dtypes, write_bundle
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

__all__ = ["ExportSettings", "load_models", "run_export"]

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
        features: safetensors of trained interval features, their JSON beside them; None, or "" in a file, for a bundle
            without.
        calibration: calibration.json of this drafter's scores; None, or "" in a file, for a bundle without.
        tokens: token cache of the pictures that parity is measured on.
        sequences: how many of them.
        target_dtype, drafter_dtype, codec_dtype: of their stored matrices; float16 and bfloat16 halve a file.
        recommended_features: feature mode that devices take when their user names none.
        sampling: default sampling settings of the bundle; those the models were trained for.
        drafter_precision, codec_precision: of the exported graphs.
        floors: how faithful the export must be.
    """

    name: str = "default"
    folder: Path = field(default_factory=default_bundle_folder)
    report: Path = Path("work/export/parity.json")
    target: Path = Path("work/target/final/target.safetensors")
    drafter: Path = Path("work/inter_dro/final/drafter.safetensors")
    codec: Path = Path("work/image_codec/final")
    text_encoder: Path = Path("work/text_encoder")
    features: Path | None = Path("work/interval_adapter/final/interval_features.safetensors")
    calibration: Path | None = Path("work/inter_dro/final/calibration.json")
    tokens: Path = Path("work/tokens/val")
    sequences: int = 64
    target_dtype: str = "float16"
    drafter_dtype: str = "float16"
    codec_dtype: str = "float16"
    recommended_features: str = "none"
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    drafter_precision: Precision = field(default_factory=Precision)
    codec_precision: Precision = field(default_factory=lambda: Precision("half"))
    floors: ParityFloors = field(default_factory=ParityFloors)

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences must be at least 1, got {self.sequences}")
        check_dtypes(self)
        for name in ("folder", "report", "target", "drafter", "codec", "text_encoder", "tokens"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("features", "calibration"):  # TOML has no word for None
            object.__setattr__(self, name, Path(getattr(self, name)) if getattr(self, name) else None)

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
    models = load_models(settings)

    def inspect(folder: Path) -> dict[str, Any]:
        report = measure_parity(folder, models, settings)
        write_report(report, settings.report)
        check_floors(report, settings.floors)
        return {"parity": asdict(report)}

    bundle = write_bundle(settings.folder, models, _bundle_settings(settings), inspect)
    size = sum(file.bytes for file in bundle.manifest.files)
    print(f"bundle {bundle.manifest.digest[:12]} written to {settings.folder}: {size / 1e6:.1f} MB")
    return bundle


def load_models(settings: ExportSettings) -> BundleModels:
    """The models that settings name.

    Raises:
        BundleError: one is missing, is something else, or does not fit the others.
    """
    return BundleModels(
        target=load_transformer(settings.target).eval(),
        drafter=load_drafter(settings.drafter),
        codec=ImageCodec.load(settings.codec),
        text_encoder=settings.text_encoder,
        features=None if settings.features is None else load_interval_features(settings.features),
        calibration=None if settings.calibration is None else read_calibration(settings.calibration),
    )


def _bundle_settings(settings: ExportSettings) -> BundleSettings:
    return BundleSettings(
        name=settings.name,
        defaults=settings.sampling,
        drafter=settings.drafter_precision,
        codec=settings.codec_precision,
        target_dtype=settings.target_dtype,
        drafter_dtype=settings.drafter_dtype,
        codec_dtype=settings.codec_dtype,
        recommended_features=settings.recommended_features,
        facts={
            "drafter_precision": asdict(settings.drafter_precision),
            "precision": {
                "drafter": str(settings.drafter_precision),
                "codec": str(settings.codec_precision),
                "target": settings.target_dtype,
            },
        },
    )


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
