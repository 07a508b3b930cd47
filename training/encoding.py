"""Encodes pictures and captions once to the token cache that target and drafter train from: `ciar-train tokens`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloud.models.image_codec import ImageCodec
from shared.bundle import file_digest
from shared.graphs import CaptionEncoder
from training.checks import at_least_one
from training.data.images import open_images
from training.data.settings import DataSettings
from training.data.splits import Split
from training.data.tokens import MAX_CAPTION_TOKENS, write_token_shards
from training.machine import wants_bf16
from training.tables import read_tables, settings_from

__all__ = ["EncodingSettings", "open_caption_encoder", "run_tokens"]


@dataclass(frozen=True, slots=True)
class EncodingSettings:
    """What to encode, with what, and where to.

    Args:
        data: the pictures.
        codec: folder of a trained image codec.
        text_encoder: folder with text_encoder.onnx and tokenizer.json.
        folder: the cache; a folder below it for each split.
        train, val: pictures to encode of each split.
        shard_size: pictures a shard.
        slack: see `ImageCodec.encode_smooth`. For a codec whose tokens see beyond their own pixels 0.02 costs 3 % of
            squared error and takes 0.7 nats off a token's entropy given its neighbours; one without reach needs none,
            and its tokens stay independent of their neighbours.
    """

    data: DataSettings
    codec: Path = Path("work/image_codec/final")
    text_encoder: Path = Path("work/text_encoder")
    folder: Path = Path("work/tokens")
    train: int = 150_000
    val: int = 2_000
    shard_size: int = 10_000
    slack: float = 0.0

    def __post_init__(self) -> None:
        at_least_one(self, "train", "val", "shard_size")
        if not 0.0 <= self.slack < 1.0:
            raise ValueError(f"slack must lie in [0, 1), got {self.slack}")
        for name in ("codec", "text_encoder", "folder"):
            object.__setattr__(self, name, Path(getattr(self, name)))

    @classmethod
    def load(cls, path: Path) -> EncodingSettings:
        """Settings from a TOML file with the tables data and tokens."""
        tables = read_tables(path, ("data", "tokens"))
        return settings_from(cls, path, "tokens", tables.get("tokens", {}), data=DataSettings.load(path))


def open_caption_encoder(folder: Path, max_rows: int = MAX_CAPTION_TOKENS) -> CaptionEncoder:
    """The text encoder of a folder, as the runtime uses it: one caption at a time, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    graph = ort.InferenceSession(str(folder / "text_encoder.onnx"), options, providers=["CPUExecutionProvider"])
    return CaptionEncoder(graph, Tokenizer.from_file(str(folder / "tokenizer.json")), max_rows)


def run_tokens(settings: EncodingSettings) -> None:
    """Encodes the train and validation splits; finished shards are kept, so it can be stopped and run again."""
    codec = ImageCodec.load(settings.codec).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec.to(device)
    captions = open_caption_encoder(settings.text_encoder)
    bf16 = wants_bf16("auto", device.type)

    @torch.no_grad()
    def encode_images(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return codec.encode_smooth(images.to(device), settings.slack).flatten(1).cpu()

    def encode_captions(texts: list[str]) -> list[NDArray[np.float32]]:
        return [captions.encode(text) for text in texts]

    made_with = _digest(settings)
    counts: dict[Split, int] = {"val": settings.val, "train": settings.train}
    for split, count in counts.items():
        images = open_images(replace(settings.data, length=count), split)
        if len(images) < count:  # type: ignore[arg-type]
            print(f"{split}: only {len(images)} pictures are there, {count} were asked for")  # type: ignore[arg-type]
        folder = settings.folder / split
        size = min(settings.shard_size, count)
        write_token_shards(images, encode_images, encode_captions, folder, size, workers=1, made_with=made_with)


def _digest(settings: EncodingSettings) -> str:
    """Names codec encoder, text encoder and data: a cache made with others must not be mixed in."""
    state = ImageCodec.load(settings.codec).state_dict()
    content = hashlib.sha256()
    for name in sorted(state):
        # The decoder may be trained further without changing a token.
        if not name.startswith("decoder."):
            content.update(state[name].numpy().tobytes())
    content.update(file_digest(settings.text_encoder / "text_encoder.onnx").encode())
    content.update(f"slack {settings.slack}".encode())
    content.update(repr(replace(settings.data, length=1)).encode())
    return content.hexdigest()
