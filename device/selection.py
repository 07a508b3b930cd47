"""How a device that keeps tokens chooses them, and how the rest travels: the settings of method `ciar`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import SettingsError
from shared.features import FEATURE_MODES
from shared.grid import Grid
from shared.intervals import SCORES
from shared.methods import Rule
from shared.thresholds import THRESHOLDS

__all__ = ["MODES", "REPAIRS", "SelectionSettings"]

MODES = ("sync", "batched", "pipelined")
REPAIRS = ("truncate", "local")


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """What the device keeps and when it asks.

    Args:
        cloud_budget: share of the picture's tokens that the cloud samples or judges, the prefix included.
        score: what tells how unsure a row is, one of `SCORES`; `random` is there to compare with.
        threshold_mode: `quantile` holds each picture to the budget, `average` lets hard pictures have more and easy
            ones less, `maxnorm` compares with the largest score of late, `absolute` with a fixed level.
        threshold: level of `maxnorm` and `absolute`; level 0 makes everything uncertain, infinity nothing.
        mode: `sync` asks at every uncertain token and waits (the paper), `batched` asks at the end of `draft_rows`
            rows of tokens or after some uncertain ones, and waits; `pipelined` drafts on while verdicts fly, and draws
            again what they change. All three draw the same picture, but for `local` repair in `sync`, where a draft is
            one token long.
        repair: `truncate` drops a draft behind its first failure (every uncertain token is then exactly the cloud's);
            `local` corrects failures in place and keeps the rest (one round trip a row, approximate).
        batch: uncertain tokens a message; 0 lets a controller choose.
        draft_rows: rows of tokens a draft may span. More rows, fewer round trips; with `local` repair also more kept
            tokens that were drawn before a correction above them was known.
        features: what comes with kept tokens, one of `FEATURE_MODES`; empty for what the bundle recommends.
        prefix_rate: share of the picture that the cloud samples first.
        audit: share of the kept tokens that are judged after the fact, to estimate what keeping them cost.

    Raises:
        SettingsError: a value is not acceptable; the message names it.
    """

    cloud_budget: float = 0.30
    score: str = "interval"
    threshold_mode: str = "quantile"
    threshold: float | None = None
    mode: str = "batched"
    repair: str = "local"
    batch: int = 0
    draft_rows: int = 1
    features: str = ""
    prefix_rate: float = 0.06
    audit: float = 0.01

    def __post_init__(self) -> None:
        for name, choices in (
            ("score", SCORES),
            ("threshold_mode", THRESHOLDS),
            ("mode", MODES),
            ("repair", REPAIRS),
            ("features", ("", *FEATURE_MODES)),
        ):
            if getattr(self, name) not in choices:
                wanted = ", ".join(choice for choice in choices if choice)
                raise SettingsError(f"{name}: one of {wanted} is needed, not {getattr(self, name)!r}")
        for name in ("cloud_budget", "prefix_rate", "audit"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise SettingsError(f"{name}: a share from 0 to 1 is needed, not {getattr(self, name)}")
        if not 0 <= self.batch <= 64:
            raise SettingsError(f"batch: 1 to 64 is needed (0 lets a controller choose), not {self.batch}")
        if not 1 <= self.draft_rows <= 64:
            raise SettingsError(f"draft_rows: 1 to 64 is needed, not {self.draft_rows}")
        self._check_threshold()

    def _check_threshold(self) -> None:
        if self.threshold is not None and (math.isnan(self.threshold) or self.threshold < 0.0):
            raise SettingsError(f"threshold: a number of at least 0 is needed, not {self.threshold}")
        if self.threshold_mode == "absolute" and self.threshold is None:
            raise SettingsError("threshold: mode absolute needs a level; give one (0 sends everything)")
        if self.threshold_mode in ("quantile", "average") and self.threshold is not None:
            raise SettingsError(
                f"threshold: mode {self.threshold_mode} takes the budget, not a level; use maxnorm or absolute"
            )

    def check_rule(self, rule: Rule | None) -> None:
        """Raises SettingsError when rule, repair and mode do not go together."""
        if self.repair != "local" or rule is None or rule.name == "gumbel":
            return
        if rule.name == "block":
            raise SettingsError("repair: rule block judges a draft as a whole; use truncate")
        if self.mode == "pipelined":
            raise SettingsError(
                f"repair: with rule {rule.name}, local repair would judge drafts by rows that an earlier repair "
                "changed; use truncate, or mode sync or batched"
            )

    def prefix(self, grid: Grid) -> int:
        """Tokens that the cloud samples first."""
        # Rounded first: 0.29 of 100 tokens are 29, not 28.999999999999996.
        return math.floor(round(self.prefix_rate * grid.size, 6))

    def drafted_budget(self, grid: Grid) -> float:
        """The share of the drafted tokens, those behind the prefix, that the cloud may judge."""
        prefix = self.prefix(grid)
        if prefix >= grid.size:
            return 0.0
        return min(1.0, max(0.0, (self.cloud_budget * grid.size - prefix) / (grid.size - prefix)))
