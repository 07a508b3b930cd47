"""Interval features: an encoder on the device makes a code of a kept token, an adapter in the cloud expands it.

The vector that comes out is added to the token's embedding (CIAR 2603.25463, interval feature injection; methods.md
5.6). Adapters begin at zero, so an untrained one changes nothing. Only kept tokens get a feature: what the cloud
sampled or judged is certain.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.features import CODE_WIDTH, FEATURE_MODES, SCALARS, feature_width

__all__ = ["IntervalAdapter", "IntervalAdapterConfig", "IntervalEncoder", "IntervalFeatures"]

_LEVELS = 127.0


@dataclass(frozen=True, slots=True)
class IntervalAdapterConfig:
    """Shape of the feature path of one mode.

    Args:
        mode: one of `FEATURE_MODES`, but not `none`.
        dim: width of the target.
        draft_dim: width of the drafter.
        inner: width of the hidden layers.

    Raises:
        ValueError: a field is out of range.
    """

    mode: str
    dim: int
    draft_dim: int
    inner: int = 128

    def __post_init__(self) -> None:
        if self.mode not in FEATURE_MODES[1:]:
            raise ValueError(f"mode: one of {', '.join(FEATURE_MODES[1:])} is needed, not {self.mode!r}")
        for name in ("dim", "draft_dim", "inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1 is needed, not {getattr(self, name)}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class IntervalEncoder(nn.Module):
    """The device's part, phi: hidden state and interval scalars of a kept token to what is sent. `scalars` has none.

    In training the code is rounded with a straight-through gradient, so that what is learnt is what is sent.
    """

    def __init__(self, config: IntervalAdapterConfig) -> None:
        super().__init__()
        if config.mode == "scalars":
            raise ValueError("mode scalars sends the scalars as they are; it has no encoder")
        self.config = config
        width = feature_width(config.mode, config.dim)
        last = nn.Linear(config.inner, width)
        if config.mode == "full":
            _clear(last)
        self.layers = nn.Sequential(nn.Linear(config.draft_dim + SCALARS, config.inner), nn.SiLU(), last)

    def forward(self, hidden: Tensor, scalars: Tensor) -> Tensor:
        """hidden (..., draft_dim) and `interval_scalars` (..., 7) to (..., width): numbers as they are sent."""
        # Hidden states before the last norm are tens of times too large for a fresh layer, and Omega reaches V / 2.
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5)
        out: Tensor = self.layers(torch.cat([normed, scalars.sign() * scalars.abs().log1p()], dim=-1))
        if self.config.mode == "full":
            return out
        code = torch.tanh(out) * _LEVELS
        return code + (code.round() - code).detach() if self.training else code.round()


class IntervalAdapter(nn.Module):
    """The cloud's part: features as received (..., width) to vectors (..., dim) that are added to embeddings."""

    def __init__(self, config: IntervalAdapterConfig) -> None:
        super().__init__()
        self.config = config
        if config.mode == "scalars":
            first, last = nn.Linear(feature_width("scalars", 0), config.inner), nn.Linear(config.inner, config.dim)
            _clear(last)
            self.layers: nn.Module = nn.Sequential(first, nn.SiLU(), last)
        elif config.mode == "code64":
            last = nn.Linear(CODE_WIDTH, config.dim, bias=False)
            _clear(last)
            self.layers = last
        else:
            self.layers = nn.Identity()  # `full` sends the vector itself

    def forward(self, features: Tensor) -> Tensor:
        if self.config.mode == "code64":
            features = features / _LEVELS
        result: Tensor = self.layers(features)
        return result


def _clear(linear: nn.Linear) -> None:
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)


class IntervalFeatures(nn.Module):
    """Encoder and adapter of each mode a bundle knows, by mode; trained together, stored together."""

    def __init__(self, modes: list[str], dim: int, draft_dim: int, inner: int = 128) -> None:
        super().__init__()
        configs = {mode: IntervalAdapterConfig(mode, dim, draft_dim, inner) for mode in modes}
        self.fields = {"modes": list(modes), "dim": dim, "draft_dim": draft_dim, "inner": inner}
        self.adapters = nn.ModuleDict({mode: IntervalAdapter(config) for mode, config in configs.items()})
        self.encoders = nn.ModuleDict(
            {mode: IntervalEncoder(config) for mode, config in configs.items() if mode != "scalars"}
        )

    @property
    def modes(self) -> list[str]:
        """Modes the bundle can use beside `none`."""
        return list(self.adapters)

    def to_dict(self) -> dict[str, Any]:
        """Arguments that build this module again."""
        return dict(self.fields)
