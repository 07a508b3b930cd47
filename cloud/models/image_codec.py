"""The image codec: pictures to a grid of visual tokens and back (VQ, l2-normalised codes).

The codebook follows LlamaGen (arXiv 2406.06525, section 3.1): low-dimensional codes on the unit sphere, found by
cosine. It is kept by exponential moving averages with dead-code revival (VQ-VAE-2; Jukebox): buffers, not parameters.

Every normalisation is per pixel, and the encoder looks about two tokens far, or, with `encoder_reach` 0, not beyond
the token's own pixels: a flat background then gets the same code wherever it lies and whatever is drawn beside it, and
a drawing's inside the same codes on every background, which makes the tokens easier to predict.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

WEIGHTS_FILE = "image_codec.safetensors"
CONFIG_FILE = "image_codec.json"
PATCH = 4  # the convolutions start on a map of 4 x 4 pixel patches: full resolution costs four times as much on a CPU


@dataclass(frozen=True, slots=True)
class ImageCodecConfig:
    """Shape of an image codec. `size` is the picture the codec is made for; any multiple of `factor` works.

    `encoder_reach` is how far a block of the encoder sees around itself: 0 for tokens that depend on their own pixels
    alone.

    Raises ValueError naming the field that cannot be.
    """

    size: int = 128
    factor: int = 8
    codebook_size: int = 1024
    code_dim: int = 8
    encoder_width: int = 128
    decoder_width: int = 256
    encoder_blocks: int = 2
    decoder_blocks: int = 3
    encoder_reach: int = 1
    usage_decay: float = 0.99
    dead_below: float = 0.03

    def __post_init__(self) -> None:
        for name in ("size", "codebook_size", "code_dim", "encoder_blocks", "decoder_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.factor < 2 * PATCH or self.factor & (self.factor - 1):
            raise ValueError(f"factor must be a power of two of at least {2 * PATCH}, got {self.factor}")
        if self.size % self.factor:
            raise ValueError(f"size must be a multiple of factor {self.factor}, got {self.size}")
        for name in ("encoder_width", "decoder_width"):
            if getattr(self, name) < 16 or getattr(self, name) % 8:
                raise ValueError(f"{name} must be a multiple of 8 of at least 16, got {getattr(self, name)}")
        if self.encoder_reach not in (0, 1):
            raise ValueError(f"encoder_reach must be 0 or 1, got {self.encoder_reach}")
        if not 0.0 < self.usage_decay < 1.0:
            raise ValueError(f"usage_decay must lie between 0 and 1, got {self.usage_decay}")
        if self.dead_below < 0.0:
            raise ValueError(f"dead_below must not be negative, got {self.dead_below}")

    @property
    def rows(self) -> int:
        """Tokens along one side of a picture of `size`."""
        return self.size // self.factor


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each pixel of (B, C, H, W): local, unlike a group norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: Tensor) -> Tensor:
        rows = F.layer_norm(maps.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias)
        return rows.permute(0, 3, 1, 2)


class RepeatEdge(nn.Module):
    """Pad (B, C, H, W) by its own border: a flat picture stays flat up to its edge, which zeros would spoil.

    Written with `cat`: the compiler's replication padding fails on channels-last maps.
    """

    def forward(self, maps: Tensor) -> Tensor:
        maps = torch.cat([maps[:, :, :1], maps, maps[:, :, -1:]], dim=2)
        return torch.cat([maps[:, :, :, :1], maps, maps[:, :, :, -1:]], dim=3)


class LocalBlock(nn.Module):
    """Pre-norm residual block that sees `reach` pixels around itself, 0 or 1."""

    def __init__(self, channels: int, reach: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.pad = RepeatEdge() if reach else nn.Identity()
        self.first = nn.Conv2d(channels, channels, 1 + 2 * reach)
        self.second = nn.Conv2d(channels, channels, 1)
        _start_at_zero(self.second)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.second(F.silu(self.first(self.pad(F.silu(self.norm(maps))))))


class ResidualBlock(nn.Module):
    """Pre-norm residual block of two 3 x 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        _start_at_zero(self.second)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.second(F.silu(self.first(F.silu(self.norm(maps)))))


def _start_at_zero(layer: nn.Conv2d) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


class Encoder(nn.Module):
    """Pictures (B, 3, H, W) to unit vectors (B, code_dim, H / factor, W / factor)."""

    def __init__(self, config: ImageCodecConfig) -> None:
        super().__init__()
        width, reach = config.encoder_width, config.encoder_reach
        layers: list[nn.Module] = [nn.Conv2d(3, width, PATCH, stride=PATCH)]
        layers += [LocalBlock(width, reach) for _ in range(config.encoder_blocks)]
        for _ in range(int(math.log2(config.factor // PATCH))):
            layers += [nn.Conv2d(width, 2 * width, 2, stride=2), LocalBlock(2 * width, reach)]
            width *= 2
        layers += [ChannelNorm(width), nn.Conv2d(width, config.code_dim, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.layers(images).float(), dim=1)


class Decoder(nn.Module):
    """Unit vectors (B, code_dim, rows, cols) to pictures (B, 3, H, W), not clamped."""

    def __init__(self, config: ImageCodecConfig) -> None:
        super().__init__()
        width = config.decoder_width
        layers: list[nn.Module] = [nn.Conv2d(config.code_dim, width, 3, padding=1)]
        layers += [ResidualBlock(width) for _ in range(config.decoder_blocks)]
        for _ in range(int(math.log2(config.factor // PATCH))):
            layers += [nn.Conv2d(width, 2 * width, 1), nn.PixelShuffle(2)]
            width //= 2
            layers += [ResidualBlock(width) for _ in range(config.decoder_blocks)]
        half = max(width // 4, 8)
        layers += [ChannelNorm(width), nn.Conv2d(width, 4 * half, 1), nn.PixelShuffle(2), ResidualBlock(half)]
        layers += [ChannelNorm(half), nn.Conv2d(half, 4 * (half // 2), 3, padding=1), nn.PixelShuffle(2), nn.SiLU()]
        layers += [nn.Conv2d(half // 2, 3, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, codes: Tensor) -> Tensor:
        return self.layers(codes)


class Codebook(nn.Module):
    """Unit vectors kept by moving averages: `codes` (K, D), `usage` (K,) tokens a step, `sums` (K, D)."""

    codes: Tensor
    usage: Tensor
    sums: Tensor

    def __init__(self, config: ImageCodecConfig) -> None:
        super().__init__()
        self.decay, self.dead_below = config.usage_decay, config.dead_below
        start = F.normalize(torch.randn(config.codebook_size, config.code_dim), dim=1)
        self.register_buffer("codes", start)
        self.register_buffer("usage", torch.zeros(config.codebook_size))  # all dead: the first update fills them
        self.register_buffer("sums", torch.zeros_like(start))

    def closeness(self, vectors: Tensor) -> Tensor:
        """Cosines (B, rows, cols, K) of unit vectors (B, D, rows, cols) with all codes.

        In float32 even under autocast: bfloat16 tells cosines near 1 apart in steps of 0.004 only.
        """
        with torch.autocast(vectors.device.type, enabled=False):
            return vectors.float().permute(0, 2, 3, 1) @ self.codes.t()

    def nearest(self, vectors: Tensor) -> Tensor:
        """Ids (B, rows, cols) of the codes nearest in angle to unit vectors (B, D, rows, cols)."""
        return self.closeness(vectors).argmax(dim=-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Codes (B, D, rows, cols) of ids (B, rows, cols)."""
        return F.embedding(ids, self.codes).permute(0, 3, 1, 2)

    @torch.no_grad()
    def update(self, vectors: Tensor, ids: Tensor) -> None:
        """Move the codes towards the unit vectors (N, D) that chose them (ids (N,)), and revive dead codes.

        A dead code restarts at a vector drawn in proportion to its error: rare details are what the codebook lacks,
        and a uniform draw would mostly return the background once more.
        """
        counts = torch.zeros_like(self.usage).index_add_(0, ids, torch.ones_like(ids, dtype=self.usage.dtype))
        sums = torch.zeros_like(self.sums).index_add_(0, ids, vectors)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
            torch.distributed.all_reduce(sums)
        self.usage.lerp_(counts, 1.0 - self.decay)
        self.sums.lerp_(sums, 1.0 - self.decay)
        alive = self.usage >= self.dead_below
        self.codes[alive] = F.normalize(self.sums[alive], dim=1)
        self._revive(torch.nonzero(~alive).flatten(), vectors, ids)

    def _revive(self, dead: Tensor, vectors: Tensor, ids: Tensor) -> None:
        if not len(dead):
            return
        errors = (1.0 - (vectors * self.codes[ids]).sum(dim=1)).clamp_min(1e-6)
        chosen = vectors[torch.multinomial(errors, len(dead), replacement=len(dead) > len(vectors))]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(chosen, 0)
        self.codes[dead] = chosen
        self.usage[dead] = 1.0  # long enough to be found: it falls under dead_below after some hundred idle steps
        self.sums[dead] = chosen


def _repeat_neighbours(closeness: Tensor, slack: float) -> Tensor:
    """Ids (B, rows, cols) from cosines (B, rows, cols, K), repeating a neighbour that is within `slack` of the best."""
    best, ids = closeness.max(dim=-1)
    enough = best - slack
    for row in range(ids.shape[1]):
        for col in range(ids.shape[2]):
            choice = ids[:, row, col]
            for near_row, near_col in ((row, col - 1), (row - 1, col)):
                if near_row < 0 or near_col < 0:
                    continue
                neighbour = ids[:, near_row, near_col]
                cosine = closeness[:, row, col].gather(1, neighbour[:, None])[:, 0]
                choice = torch.where(cosine >= enough[:, row, col], neighbour, choice)
            ids[:, row, col] = choice
    return ids


class ImageCodec(nn.Module):
    """Encoder, codebook and decoder. Pictures are (B, 3, H, W) in [-1, 1], H and W multiples of `config.factor`."""

    def __init__(self, config: ImageCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.codebook = Codebook(config)
        self.decoder = Decoder(config)
        self.tokens_frozen = False

    def freeze_tokens(self) -> None:
        """From now on train the decoder only: ids and codes stay what they are, so models of the tokens stay valid."""
        self.tokens_frozen = True
        self.encoder.requires_grad_(False)

    def encode(self, images: Tensor) -> Tensor:
        """Token ids (B, rows, cols), int64, of pictures (B, 3, H, W) in [-1, 1]."""
        if not torch.jit.is_tracing():  # type: ignore[attr-defined]  # an export would freeze the answer
            self._check(images)
        return self.codebook.nearest(self.encoder(images))

    def encode_smooth(self, images: Tensor, slack: float = 0.02) -> Tensor:
        """As `encode`, but a token repeats its upper or else its left neighbour where that code is nearly as near.

        `slack` is the cosine that may be lost. Smooth regions then use fewer codes, so a model of the tokens has less
        to guess; the picture changes hardly. Meant for preparing training tokens: the scan is serial, not for export.
        """
        if slack < 0.0:
            raise ValueError(f"slack must not be negative, got {slack}")
        self._check(images)
        return _repeat_neighbours(self.codebook.closeness(self.encoder(images)), slack)

    def _check(self, images: Tensor) -> None:
        factor = self.config.factor
        if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] % factor or images.shape[3] % factor:
            raise ValueError(f"images must be (B, 3, H, W), sides multiples of {factor}, got {tuple(images.shape)}")

    def decode(self, ids: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [-1, 1] of token ids (B, rows, cols)."""
        return self.decoder(self.codebook.lookup(ids)).float().clamp(-1.0, 1.0)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Training pass: reconstruction (B, 3, H, W), ids (B, rows, cols), commitment loss (scalar).

        In training mode it also updates the codebook. The gradient passes straight through the choice of code.
        """
        vectors = self.encoder(images)
        with torch.autocast(images.device.type, enabled=False):
            ids = self.codebook.nearest(vectors.detach())
            codes = self.codebook.lookup(ids)
            commitment = (vectors - codes.detach()).square().sum(dim=1).mean()
            straight_through = vectors + (codes - vectors).detach()
        reconstruction = self.decoder(straight_through)
        if self.training and not self.tokens_frozen:
            self.codebook.update(vectors.detach().permute(0, 2, 3, 1).flatten(0, 2), ids.flatten())
        return reconstruction, ids, commitment

    def save(self, folder: Path) -> None:
        """Write `image_codec.safetensors` and `image_codec.json` into `folder`, named as in a bundle."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, str(folder / WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ImageCodec:
        """Read a codec written by `save`, or a bundle's, in evaluation mode; errors name the folder."""
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise FileNotFoundError(f"no image codec in {folder}: {CONFIG_FILE} is missing; train one first")
        try:
            codec = cls(ImageCodecConfig(**json.loads(path.read_text(encoding="utf-8"))))
            load_model(codec, str(folder / WEIGHTS_FILE))
        except (TypeError, RuntimeError, json.JSONDecodeError) as error:
            raise ValueError(f"the image codec in {folder} does not match this code: {error}") from error
        return codec.eval()
