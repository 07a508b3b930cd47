"""Opens the device's ONNX graphs: the drafter, the caption encoder and the image codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.bundle import Bundle
from shared.calibration import CALIBRATION, Calibration
from shared.errors import BundleError
from shared.features import encoder_graph
from shared.graphs import CaptionEncoder, DrafterCache

__all__ = ["DeviceModels", "ImageDecoder", "IntervalEncoder"]


class ImageDecoder:
    """Turns tokens into pixels.

    Args:
        graph: codec decoder: ids (n, rows, cols) -> images (n, 3, H, W) in [-1, 1].
    """

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph
        self._input = graph.get_inputs()[0].name

    def decode(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Pixels (H, W, 3) of a token grid (rows, cols)."""
        (images,) = self._graph.run(None, {self._input: ids[None]})
        pixels = np.clip((images[0].transpose(1, 2, 0) + 1.0) * 127.5, 0.0, 255.0)
        return np.asarray(np.rint(pixels), dtype=np.uint8)


class IntervalEncoder:
    """Makes the code of a kept token that travels to the cloud.

    Args:
        graph: hidden (n, draft_dim), scalars (n, 7) -> code (n, width).
    """

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def __call__(self, hidden: NDArray[np.float32], scalars: NDArray[np.float32]) -> NDArray[np.float32]:
        """Codes (n, width) of hidden states (n, draft_dim) and `shared.features.interval_scalars` (n, 7)."""
        (code,) = self._graph.run(["code"], {"hidden": hidden, "scalars": scalars})
        return np.asarray(code, np.float32)


@dataclass
class DeviceModels:
    """The device's models, each opened when it is first needed, or all by `open`.

    Args:
        bundle: an opened bundle.
        threads: threads of a graph; one is best for a small drafter on most machines.
    """

    bundle: Bundle
    threads: int = 1
    _encoders: dict[str, IntervalEncoder | None] = field(default_factory=dict)

    def open(self) -> None:
        """Opens every model now, so that no picture's time contains it.

        Raises:
            BundleError: a file is not what it should be.
        """
        _ = self.captions, self.decoder, self._drafter

    @cached_property
    def captions(self) -> CaptionEncoder:
        try:
            tokenizer = Tokenizer.from_file(str(self.bundle.path("tokenizer.json")))
        except Exception as error:  # the library raises plain Exception
            raise BundleError(f"{self.bundle.path('tokenizer.json')}: not a tokenizer ({error})") from error
        return CaptionEncoder(self._open("text_encoder.onnx"), tokenizer, self.bundle.manifest.prefix_rows)

    @cached_property
    def decoder(self) -> ImageDecoder:
        return ImageDecoder(self._open("codec_decoder.onnx"))

    @cached_property
    def _drafter(self) -> ort.InferenceSession:
        return self._open("drafter.onnx")

    def drafter(self, detail: bool = False, temperature: float = 1.0) -> DrafterCache:
        """A drafter with an empty cache for one picture.

        Args:
            detail: whether rows come with radius, hidden state and interval measures.
            temperature: at which tokens are drawn, for the measures.

        Raises:
            BundleError: detail is wanted, but the bundle's drafter has no interval measures.
        """
        manifest = self.bundle.manifest
        return DrafterCache(self._drafter, manifest.prefix_rows, manifest.grid.size, detail, temperature)

    @cached_property
    def calibration(self) -> Calibration:
        """What the drafter's scores look like, for thresholds.

        Raises:
            BundleError: the bundle was exported without one, or with one for another grid.
        """
        if not self.bundle.has(CALIBRATION):
            raise BundleError(
                f"{self.bundle.folder}: this bundle has no {CALIBRATION}, which thresholds start from; "
                "use --threshold-mode absolute, or a bundle trained for method ciar"
            )
        path, grid = self.bundle.path(CALIBRATION), self.bundle.manifest.grid
        calibration = Calibration.load(path)
        if calibration.grid_rows != grid.rows:
            raise BundleError(
                f"{path}: it is of {calibration.grid_rows} rows of tokens, the bundle's grid is {grid}; "
                "export the bundle again"
            )
        return calibration

    def interval_encoder(self, mode: str) -> IntervalEncoder | None:
        """Makes the features of kept tokens; None in modes that send no code."""
        if mode not in self._encoders:
            graph = encoder_graph(mode)
            self._encoders[mode] = IntervalEncoder(self._open(graph)) if graph else None
        return self._encoders[mode]

    def _open(self, name: str) -> ort.InferenceSession:
        options: Any = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        try:
            return ort.InferenceSession(str(self.bundle.path(name)), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no common base of its errors
            raise BundleError(f"{self.bundle.path(name)}: cannot be opened ({error})") from error
