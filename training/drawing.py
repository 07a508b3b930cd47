"""Pictures drawn by the target itself, for drafters to learn on what they will meet: `ciar-train drawn`.

A share of the pictures begins with tokens of the drafter, as a generation does whose device keeps its drafts; the rest
of such a picture covers where the drafter's own choices lead (methods.md 5.5). The result is a token cache like others.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from cloud.engine import Engine
from cloud.models.drafter import Drafter
from cloud.models.loading import load_transformer
from cloud.models.transformer import Transformer
from shared.bundle import file_digest
from shared.graphs import CaptionEncoder
from shared.sampling import SamplingSettings
from training.checks import a_share, at_least_one, not_negative
from training.data.prompts import read_prompts
from training.data.shards import Shard, claim_folder, load_shard, save_shard, shard_path
from training.data.tokens import TokenCache
from training.drafter import load_drafter
from training.encoding import open_caption_encoder
from training.machine import wants_bf16
from training.sampling import sample_tokens
from training.tables import read_tables, settings_from

__all__ = ["Artist", "DrawingSettings", "caption_of", "draw_split", "open_engine", "run_drawn"]

SPLITS = ("val", "train")


@dataclass(frozen=True, slots=True)
class DrawingSettings:
    """What to draw, and where to. Raises ValueError naming the field that cannot be.

    Args:
        sampling: how tokens are drawn; the drafter draws its own unguided.
        target, drafter: safetensors of the models, their JSON beside them.
        tokens: the cache with the captions, with the folders train and val.
        prompts: a folder with train.txt and val.txt, a prompt a line; "" takes the captions of `tokens`.
        text_encoder: folder with text_encoder.onnx and tokenizer.json, for `prompts`.
        folder: the drawn cache, likewise.
        train, val: pictures to draw of each split; more can be asked for later.
        prefix_share: share of the pictures that begin with tokens of the drafter, of a random number.
        at_once: pictures drawn together; a picture of the default target takes 10 MB.
        shard_size: pictures a shard, at most the work that a kill loses.
        precision: see `LoopSettings`.
        threads: 0 leaves torch's own choice.
    """

    sampling: SamplingSettings
    target: Path = Path("work/target/final/target.safetensors")
    drafter: Path = Path("work/drafter/final/drafter.safetensors")
    tokens: Path = Path("work/tokens")
    prompts: str = ""
    text_encoder: Path = Path("work/text_encoder")
    folder: Path = Path("work/drawn")
    train: int = 2000
    val: int = 200
    prefix_share: float = 0.25
    at_once: int = 40
    shard_size: int = 200
    seed: int = 0
    precision: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "train", "val", "at_once", "shard_size")
        not_negative(self, "seed", "threads")
        a_share(self, "prefix_share")
        for name in ("target", "drafter", "tokens", "text_encoder", "folder"):
            object.__setattr__(self, name, Path(getattr(self, name)))

    @classmethod
    def load(cls, path: Path) -> DrawingSettings:
        """Settings from a TOML file with the tables drawn and sampling."""
        tables = read_tables(path, ("drawn", "sampling"))
        sampling = settings_from(SamplingSettings, path, "sampling", tables.get("sampling", {}))
        return settings_from(cls, path, "drawn", tables.get("drawn", {}), sampling=sampling)

    def captions(self, split: str, rows: int) -> Captions:
        """The captions of a split, for a decoder that takes `rows` rows of each."""
        if not self.prompts:
            return CachedCaptions(TokenCache(self.tokens / split), rows)
        return PromptCaptions(Path(self.prompts) / f"{split}.txt", open_caption_encoder(self.text_encoder, rows))

    def made_with(self) -> str:
        """Names all that decides what is drawn, but for the number of pictures."""
        files = [file_digest(path) for path in (self.target, self.drafter)]
        if self.prompts:
            texts = [Path(self.prompts) / f"{split}.txt" for split in SPLITS]
            sources = [file_digest(path) for path in (*texts, self.text_encoder / "text_encoder.onnx")]
        else:
            sources = [(self.tokens / split / "cache.json").read_text(encoding="utf-8") for split in SPLITS]
        content = [*files, *sources, asdict(self.sampling), self.prefix_share, self.seed, self.precision]
        return hashlib.sha256(repr(content).encode()).hexdigest()


class Captions(Protocol):
    """Captions to draw: `texts`, and the features (length, width) of item i as `captions[i]`."""

    @property
    def texts(self) -> list[str]: ...

    def __getitem__(self, item: int) -> Tensor: ...


class CachedCaptions:
    """The captions of a token cache, of which a decoder takes `rows` rows at most."""

    def __init__(self, cache: TokenCache, rows: int) -> None:
        self._cache, self._rows, self.texts = cache, rows, cache.captions()

    def __getitem__(self, item: int) -> Tensor:
        """Raises ValueError where a caption is longer than the decoder takes."""
        return caption_of(self._cache, item, self._rows)


class PromptCaptions:
    """The prompts of a text file, a line each, encoded when asked for."""

    def __init__(self, path: Path, encoder: CaptionEncoder) -> None:
        self.texts, self._encoder = read_prompts(path), encoder

    def __getitem__(self, item: int) -> Tensor:
        return torch.from_numpy(self._encoder.encode(self.texts[item]))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the pictures of a split begin: a seed each, and how many tokens the drafter draws."""

    seeds: list[int]
    prefixes: list[int]

    @classmethod
    def of(cls, items: Sequence[int], split: str, size: int, settings: DrawingSettings) -> _Plan:
        """The plan of items of a split: a picture's does not depend on how many are drawn, or together with which."""
        seeds, prefixes = [], []
        for item in items:
            random = np.random.default_rng((settings.seed, SPLITS.index(split), item))
            seeds.append(int(random.integers(2**32)))
            length = int(random.integers(1, size)) if size > 1 else 0
            prefixes.append(length if random.random() < settings.prefix_share else 0)
        return cls(seeds, prefixes)


def open_engine(model: Transformer, slots: int, device: torch.device, precision: str = "auto") -> Engine:
    """An engine on a copy of a decoder: an engine folds norms into matrices, and the original is still needed."""
    dtype = torch.bfloat16 if wants_bf16(precision, device.type) else torch.float32
    return Engine(copy.deepcopy(model), slots, device, dtype)


class Artist:
    """Draws many pictures at once, with the target or, up to a place, with the drafter.

    Args:
        target, drafter: the models.
        sampling: the warp; the drafter's rows imitate guided ones, so its own guidance is 1.
        at_once: pictures that fit in the cache of an engine.

    Raises:
        ValueError: the two models do not draw the same tokens.
    """

    def __init__(
        self,
        target: Transformer,
        drafter: Drafter,
        sampling: SamplingSettings,
        at_once: int,
        device: torch.device,
        precision: str = "auto",
    ) -> None:
        ours, theirs = target.config, drafter.config.transformer
        for name in ("vocabulary", "rows", "cols", "caption_dim"):
            if getattr(ours, name) != getattr(theirs, name):
                raise ValueError(
                    f"{name} of the target is {getattr(ours, name)}, of the drafter {getattr(theirs, name)}: "
                    "use a drafter that was trained on this target"
                )
        self.size, self.sampling, self.at_once = ours.grid.size, sampling, at_once
        self.target = open_engine(target, at_once, device, precision)
        self.drafter = open_engine(drafter.transformer, at_once, device, precision)

    def draw(self, captions: Sequence[Tensor], seeds: Sequence[int], prefixes: Sequence[int]) -> Tensor:
        """Tokens (pictures, T).

        Args:
            captions: caption features (length, width), at most `at_once`.
            seeds: of each picture; drafter and target share its noise, as device and cloud do.
            prefixes: how many of its first tokens the drafter draws.
        """
        begun = [torch.empty(0, dtype=torch.int64)] * len(captions)
        begins = [index for index, count in enumerate(prefixes) if count]
        if begins:
            own = [captions[index] for index in begins]
            drafts = sample_tokens(self.drafter, own, self.sampling.unguided(), [seeds[index] for index in begins])
            for index, draft in zip(begins, drafts, strict=True):
                begun[index] = draft[: prefixes[index]]
        return sample_tokens(self.target, captions, self.sampling, seeds, begun)


def caption_of(cache: TokenCache, item: int, rows: int) -> Tensor:
    """Caption features (length, width) of an item of a cache.

    Raises:
        ValueError: the caption is longer than the `rows` that a decoder has for it.
    """
    _, features, length = cache[item]
    if length > rows:
        raise ValueError(f"caption {item} of {cache.folder} has {length} rows, the decoder takes {rows}")
    return features[:length]


def run_drawn(settings: DrawingSettings) -> None:
    """Draws both splits; finished shards are kept, so it can be stopped and run again, also for more pictures.

    Processes of one launcher share the shards. On a CPU a process a core draws the most (`torchrun`: accelerate's
    launcher starts one process there).
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    state = PartialState(cpu=not torch.cuda.is_available())
    target, drafter = load_transformer(settings.target), load_drafter(settings.drafter)
    artist = Artist(target, drafter, settings.sampling, settings.at_once, state.device, settings.precision)
    rows = target.config.prefix_rows
    sources = [(split, settings.captions(split, rows), getattr(settings, split)) for split in SPLITS]
    for split, captions, count in sources:
        if len(captions.texts) < count:
            where = settings.prompts or settings.tokens
            raise ValueError(f"{split}: {count} pictures are asked for, but {where} has {len(captions.texts)} captions")
    made_with = settings.made_with()
    with state.main_process_first():  # all at once would race for the file that claims it
        for split in SPLITS:
            claim_folder(settings.folder / split, {"made_with": made_with, "shard_size": settings.shard_size})
    for split, captions, count in sources:
        draw_split(artist, captions, split, count, settings, state.process_index, state.num_processes)
    state.wait_for_everyone()


def draw_split(
    artist: Artist,
    source: Captions,
    split: str,
    count: int,
    settings: DrawingSettings,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Draws every `world`-th shard of a split from number `rank` on, but for those that are finished."""
    folder = settings.folder / split
    starts = list(enumerate(range(0, count, settings.shard_size)))[rank::world]
    parts = {shard_path(folder, number): range(s, min(s + settings.shard_size, count)) for number, s in starts}
    open_parts = {path: items for path, items in parts.items() if not _is_finished(path, len(items))}
    total, left = (sum(map(len, chosen.values())) for chosen in (parts, open_parts))
    with tqdm(total=total, initial=total - left, desc=f"drawing {split}", unit="picture", disable=rank > 0) as bar:
        for path, items in open_parts.items():
            captions = [source[item] for item in items]
            plan = _Plan.of(items, split, artist.size, settings)
            shard = _shard(_draw(artist, captions, plan, bar), captions)
            save_shard(path, shard, source.texts[items.start : items.stop])


def _is_finished(path: Path, count: int) -> bool:
    return path.is_dir() and len(load_shard(path)) >= count


def _draw(artist: Artist, captions: list[Tensor], plan: _Plan, bar: tqdm[Any]) -> NDArray[np.uint16]:
    drawn = []
    for start in range(0, len(captions), artist.at_once):
        part = slice(start, start + artist.at_once)
        drawn.append(artist.draw(captions[part], plan.seeds[part], plan.prefixes[part]))
        bar.update(len(drawn[-1]))
    return torch.cat(drawn).numpy().astype(np.uint16)


def _shard(tokens: NDArray[np.uint16], captions: list[Tensor]) -> Shard:
    offsets = np.cumsum([0, *(len(caption) for caption in captions)], dtype=np.int64)
    return Shard(tokens, torch.cat(captions).numpy().astype(np.float16), offsets)
