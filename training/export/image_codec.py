"""The image codec as two ONNX graphs: pictures to ids, and ids to pictures."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from cloud.models.image_codec import ImageCodec
from training.graphs import GraphConfig, export_module

__all__ = ["DECODER", "ENCODER", "export_image_codec"]

ENCODER = "codec_encoder.onnx"
DECODER = "codec_decoder.onnx"

_IMAGES = {0: "batch", 2: "height", 3: "width"}
_IDS = {0: "batch", 1: "rows", 2: "cols"}


class _Encode(nn.Module):
    def __init__(self, codec: ImageCodec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, images: Tensor) -> Tensor:
        return self.codec.codebook.nearest(self.codec.encoder(images))


class _Decode(nn.Module):
    def __init__(self, codec: ImageCodec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, ids: Tensor) -> Tensor:
        return self.codec.decode(ids)


def export_image_codec(codec: ImageCodec, folder: Path) -> None:
    """Writes `codec_encoder.onnx` and `codec_decoder.onnx`, float32, for any batch and any grid.

    The encoder maps `images` (n, 3, H, W) in [-1, 1] to `ids` (n, rows, cols), int64; the decoder maps back.

    Raises:
        ValueError: a graph differs from torch (optimum's message says by how much).
    """
    codec = codec.float().cpu().eval()
    side = codec.config.factor
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 2 * side, 3 * side, generator=generator) * 2.0 - 1.0
    ids = torch.randint(codec.config.codebook_size, (2, 2, 3), generator=generator)
    encode = GraphConfig({"images": _IMAGES}, {"ids": _IDS}, lambda: {"images": images})
    export_module(_Encode(codec), encode, folder / ENCODER)
    decode = GraphConfig({"ids": _IDS}, {"images": _IMAGES}, lambda: {"ids": ids})
    export_module(_Decode(codec), decode, folder / DECODER)
