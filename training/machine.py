"""What the machine can do, and how the loop asks for it: seeds, precision, compiling, moving batches."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seed python, numpy and torch as a function of (seed, step, rank)."""
    state = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)


def keep_memory() -> None:
    """Lets glibc's allocator keep what large tensors free, where there is a glibc.

    By default each goes back to the kernel, and its pages are mapped and zeroed again at the next step: a fifth of the
    time of a forward on a CPU.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28)):
        mallopt(option, value)


def wants_bf16(precision: str, device: str) -> bool:
    """Whether to compute in bfloat16; "auto" does where the machine has the instructions for it."""
    if precision != "auto":
        return precision == "bf16"
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    if device != "cpu":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compile_parts(parts: Sequence[nn.Module], mode: str) -> None:
    """Compile modules in place. "auto" goes on uncompiled, with a message, where the machine cannot; "on" raises."""
    if mode == "off" or not parts:
        return
    try:
        torch.compile(lambda x: torch.sin(x) + 1.0)(torch.ones(8))  # needs a working C++ compiler
    except Exception as error:
        if mode == "on":
            raise RuntimeError(f"compile is 'on' but torch.compile does not work here: {error}") from error
        print(f"compile: torch.compile does not work here, going on without it ({type(error).__name__}: {error})")
        return
    for part in parts:
        part.compile()


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
