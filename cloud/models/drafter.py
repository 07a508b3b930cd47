"""The drafter: a small decoder whose head gives an interval of logits, centre and radius (the Inter-Head of CIAR)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from cloud.models.transformer import Transformer, TransformerConfig

__all__ = ["Drafter", "DrafterConfig", "DrafterRows"]

_RADIUS_MODES = ("full", "lowrank", "scalar")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a drafter.

    Args:
        transformer: the decoder.
        radius_mode: `full` (one linear map to V, the paper), `lowrank` (through `radius_rank`), or `scalar` (one radius
            a token).
        radius_rank: inner width of `lowrank`.

    Raises:
        ValueError: a field is out of range.
    """

    transformer: TransformerConfig
    radius_mode: str = "full"
    radius_rank: int = 32

    def __post_init__(self) -> None:
        if self.radius_mode not in _RADIUS_MODES:
            raise ValueError(f"radius_mode: one of {', '.join(_RADIUS_MODES)} is needed, not {self.radius_mode!r}")
        if self.radius_rank < 1:
            raise ValueError(f"radius_rank: at least 1 is needed, not {self.radius_rank}")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DrafterConfig:
        return cls(**fields | {"transformer": TransformerConfig(**fields["transformer"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DrafterRows:
    """Outputs for n rows: centre (..., V), radius (..., V) or (..., 1), hidden (..., dim)."""

    centre: Tensor
    radius: Tensor
    hidden: Tensor


class Drafter(nn.Module):
    """Decoder with an Inter-Head: logit interval [centre - radius, centre + radius] (CIAR 2603.25463; methods.md 5.1).

    The centre is the decoder's own head; the radius is a second head on the same normalised hidden state.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config.transformer)
        dim, vocabulary = config.transformer.dim, config.transformer.vocabulary
        self.radius: nn.Module = {
            "full": lambda: nn.Linear(dim, vocabulary),
            "lowrank": lambda: nn.Sequential(
                nn.Linear(dim, config.radius_rank, bias=False), nn.Linear(config.radius_rank, vocabulary)
            ),
            "scalar": lambda: nn.Linear(dim, 1),
        }[config.radius_mode]()

    def rows(self, hidden: Tensor) -> DrafterRows:
        """The Inter-Head on hidden states before the last norm (..., dim)."""
        normed = self.transformer.norm(hidden)
        return DrafterRows(self.transformer.head(normed), functional.softplus(self.radius(normed)), hidden)

    def forward(self, features: Tensor, lengths: Tensor, tokens: Tensor) -> DrafterRows:
        """Teacher forcing over whole pictures; arguments as for `Transformer.forward`."""
        return self.rows(self.transformer.teacher_forced(features, lengths, tokens))
