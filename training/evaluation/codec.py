"""Real pictures through the bundle's image codec: the ceiling of anything that draws with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from device.graphs import DeviceModels
from shared.bundle import Bundle
from training.evaluation.prompts import Pixels
from training.export.image_codec import ENCODER
from training.graphs import open_graph

__all__ = ["through_codec"]


def through_codec(bundle: Bundle, pictures: Sequence[Pixels], threads: int = 1) -> list[Pixels]:
    """Each picture, uint8 (H, W, 3), encoded and decoded with the graphs that devices run."""
    encoder, decoder = open_graph(bundle.path(ENCODER), threads), DeviceModels(bundle, threads).decoder
    decoded = []
    for pixels in tqdm(pictures, "codec", unit="picture", leave=False):
        images = (pixels.astype(np.float32) / 127.5 - 1.0).transpose(2, 0, 1)[None]
        (ids,) = encoder.run(None, {"images": images})
        decoded.append(decoder.decode(ids[0]))
    return decoded
