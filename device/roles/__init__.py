"""What the device does in each method, one file a role."""

from __future__ import annotations

from collections.abc import Callable

from device.generation import Generation
from device.roles.drafter import draft
from device.roles.selective import draft_selectively
from device.roles.solo import draw_alone
from device.roles.viewer import view

__all__ = ["DEVICE_ROLES"]

DEVICE_ROLES: dict[str, Callable[[Generation], None]] = {
    "viewer": view,
    "solo": draw_alone,
    "drafter": draft,
    "selective drafter": draft_selectively,
}
"""The device's role in a method, by the name that the table of methods gives it."""
