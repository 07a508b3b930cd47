"""The window of a Jacobi decoder: how long it is, how tokens enter it, and what a rejection does to the rest."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import SettingsError

__all__ = ["AFTER", "INITS", "WindowSettings"]

AFTER = ("continue", "stop")
INITS = ("uniform", "left", "above", "mix", "drafter")


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """A window of tokens that the target refines in every pass (SJD; methods.md 1.3).

    Args:
        size: tokens fed in a pass, the last committed one included.
        after: what becomes of the tokens behind a rejection: `continue` tests them too and keeps those that pass as
            drafts (SCD), `stop` draws them anew.
        init: how a token enters the window: `uniform` at random, a copy of its neighbour `left` or `above`, a `mix` by
            a coin, or drawn by the device's `drafter`, which the cloud runs.

    Raises:
        SettingsError: a value is not acceptable; the message names it.
    """

    size: int = 32
    after: str = "continue"
    init: str = "above"

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 256:
            raise SettingsError(f"window: 2 to 256 tokens are needed, not {self.size}")
        for name, choices in (("after", AFTER), ("init", INITS)):
            if getattr(self, name) not in choices:
                raise SettingsError(
                    f"window {name}: one of {', '.join(choices)} is needed, not {getattr(self, name)!r}"
                )
