"""Opens the device's ONNX graphs: the drafter, the caption encoder and the image codec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.bundle import Bundle
from shared.errors import BundleError
from shared.graphs import CaptionEncoder, DrafterCache

__all__ = ["DeviceModels", "ImageDecoder"]


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


@dataclass
class DeviceModels:
    """The device's models, each opened when it is first needed, or all by `open`.

    Args:
        bundle: an opened bundle.
        threads: threads of a graph; one is best for a small drafter on most machines.
    """

    bundle: Bundle
    threads: int = 1

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

    def drafter(self) -> DrafterCache:
        """A drafter with an empty cache for one picture."""
        return DrafterCache(self._drafter, self.bundle.manifest.prefix_rows, self.bundle.manifest.grid.size)

    def _open(self, name: str) -> ort.InferenceSession:
        options: Any = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        try:
            return ort.InferenceSession(str(self.bundle.path(name)), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no common base of its errors
            raise BundleError(f"{self.bundle.path(name)}: cannot be opened ({error})") from error
