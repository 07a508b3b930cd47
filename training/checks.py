"""Range checks that settings share; each raises ValueError naming the field."""

from __future__ import annotations

from typing import Any

__all__ = ["a_share", "above_zero", "at_least_one", "not_negative"]


def above_zero(settings: Any, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name} must be above zero, got {getattr(settings, name)}")


def at_least_one(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")


def not_negative(settings: Any, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ValueError(f"{name} must not be negative, got {getattr(settings, name)}")


def a_share(settings: Any, *names: str) -> None:
    for name in names:
        if not 0.0 <= getattr(settings, name) <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {getattr(settings, name)}")
