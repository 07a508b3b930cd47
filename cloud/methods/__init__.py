"""The cloud's side of each method: one generator a file, driven by the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from cloud.methods.interval_verifier import verify_uncertain
from cloud.methods.jacobi import decode_window
from cloud.methods.sampler import sample
from cloud.methods.verifier import verify
from cloud.session import Session, Work

__all__ = ["CLOUD_ROLES"]

CLOUD_ROLES: dict[str, Callable[[Session], Work]] = {
    "sampler": sample,
    "verifier": verify,
    "interval verifier": verify_uncertain,
    "window decoder": decode_window,
}
"""The cloud role of a method, by the name that the table of methods gives it."""
