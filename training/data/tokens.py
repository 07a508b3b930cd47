"""The token cache: pictures and captions encoded once, read many times, also while it is still being written."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from training.data.errors import DataError
from training.data.shards import Shard, claim_folder, finished_shards, load_captions, load_shard, save_shard, shard_path

MAX_CAPTION_TOKENS = 32

EncodeImages = Callable[[torch.Tensor], torch.Tensor | NDArray[np.integer]]
EncodeCaptions = Callable[[list[str]], Sequence[NDArray[np.floating]]]


def write_token_shards(
    images: Dataset[tuple[torch.Tensor, str]],
    encode_images: EncodeImages,
    encode_captions: EncodeCaptions,
    folder: Path,
    shard_size: int = 10_000,
    batch_size: int = 64,
    workers: int = 0,
    made_with: str = "",
) -> int:
    """Encode `images` into shards under `folder`, skipping the finished ones. Returns how many were written.

    encode_images: float (n, 3, H, W) in [-1, 1] -> integers (n, T) below 65,536.
    encode_captions: n captions -> n arrays (L_i, D), 1 <= L_i <= 32.
    made_with: names codec, text encoder and data (their digests, say); a folder made with others is refused.
    Killed in the middle, at most the shard in work is lost. Run again with more images, it goes on where it ended.
    """
    if shard_size < 1 or batch_size < 1:
        raise ValueError(f"shard_size and batch_size must be positive, got {shard_size} and {batch_size}")
    total = len(images)  # type: ignore[arg-type]
    claim_folder(folder, {"made_with": made_with, "shard_size": shard_size})
    written = 0
    for number, start in enumerate(range(0, total, shard_size)):
        part = Subset(images, range(start, min(start + shard_size, total)))
        if _is_finished(shard_path(folder, number), len(part)):
            continue
        loader = DataLoader(part, batch_size, num_workers=workers, collate_fn=_collate)
        batches = tqdm(loader, desc=f"shard {number + 1} of {-(-total // shard_size)}", unit="batch")
        shard, captions = _encode(batches, encode_images, encode_captions)
        save_shard(shard_path(folder, number), shard, captions)
        written += 1
    return written


def _is_finished(path: Path, count: int) -> bool:
    return path.is_dir() and len(load_shard(path)) == count


def _collate(items: list[tuple[torch.Tensor, str]]) -> tuple[torch.Tensor, list[str]]:
    return torch.stack([image for image, _ in items]), [caption for _, caption in items]


def _encode(
    batches: "tqdm[tuple[torch.Tensor, list[str]]]", encode_images: EncodeImages, encode_captions: EncodeCaptions
) -> tuple[Shard, list[str]]:
    tokens: list[NDArray[np.uint16]] = []
    features: list[NDArray[np.float16]] = []
    captions: list[str] = []
    for pictures, texts in batches:
        tokens.append(_checked_tokens(encode_images(pictures), len(texts)))
        features.extend(_checked_features(encode_captions(texts), texts))
        captions.extend(texts)
    offsets = np.cumsum([0, *(len(row) for row in features)], dtype=np.int64)
    return Shard(np.concatenate(tokens), np.concatenate(features), offsets), captions


def _checked_tokens(encoded: torch.Tensor | NDArray[np.integer], count: int) -> NDArray[np.uint16]:
    tokens = encoded.detach().cpu().numpy() if isinstance(encoded, torch.Tensor) else np.asarray(encoded)
    if tokens.ndim != 2 or len(tokens) != count or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"encode_images must give integers ({count}, T), got {tokens.dtype} {tokens.shape}")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.uint16).max:
        raise DataError(f"encode_images gave tokens {tokens.min()}..{tokens.max()}, a shard holds 0..65535")
    return tokens.astype(np.uint16)


def _checked_features(encoded: Sequence[NDArray[np.floating]], texts: list[str]) -> list[NDArray[np.float16]]:
    if len(encoded) != len(texts):
        raise DataError(f"encode_captions gave {len(encoded)} arrays for {len(texts)} captions")
    for row, text in zip(encoded, texts, strict=True):
        if row.ndim != 2 or not 1 <= len(row) <= MAX_CAPTION_TOKENS:
            raise DataError(
                f"encode_captions must give (L, D) with 1 <= L <= {MAX_CAPTION_TOKENS}, got {row.shape} for {text!r}"
            )
    return [np.asarray(row, dtype=np.float16) for row in encoded]


class TokenCache(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """The shards of a folder that are finished now. `refresh()` takes in those finished since.

    Item: (tokens int64 (T,), caption features float32 (32, D) padded with zeros, caption length).
    A loader with workers keeps the shards it started with: refresh between epochs and make a new iterator.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[Shard] = []
        self._paths: list[Path] = []
        self._ends: list[int] = []
        if self.refresh() == 0:
            raise DataError(f"{folder} has no finished token shard yet: encode first, or wait for the first one")

    def refresh(self) -> int:
        """Open the shards that were finished since; returns the number of new items."""
        before = len(self)
        for path in finished_shards(self.folder)[len(self._shards) :]:
            shard = load_shard(path)
            self._check_alike(path, shard)
            self._shards.append(shard)
            self._paths.append(path)
            self._ends.append(len(self) + len(shard))
        return len(self) - before

    def _check_alike(self, path: Path, shard: Shard) -> None:
        if not self._shards:
            return
        first, this = ((item.tokens.shape[1], item.features.shape[1]) for item in (self._shards[0], shard))
        if this != first:
            raise DataError(
                f"{path} has rows of {this[0]} tokens and {this[1]} features, "
                f"{self._paths[0]} of {first[0]} and {first[1]}: use one folder for each encoder"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        shard, row = self._locate(index)
        start, stop = int(shard.offsets[row]), int(shard.offsets[row + 1])
        padded = np.zeros((MAX_CAPTION_TOKENS, shard.features.shape[1]), dtype=np.float32)
        padded[: stop - start] = shard.features[start:stop]
        return torch.from_numpy(shard.tokens[row].astype(np.int64)), torch.from_numpy(padded), stop - start

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._shards[number], index - (self._ends[number - 1] if number else 0)

    def captions(self) -> list[str]:
        """All captions, in item order."""
        return [caption for path in self._paths for caption in load_captions(path)]
