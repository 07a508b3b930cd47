"""Optimizers of the decoders: Muon on the block matrices, AdamW on embeddings, heads and vectors.

At a budget of hours on a CPU updates count more than batch size, and Muon makes more of each (Keller Jordan, "Muon: an
optimizer for hidden layers in neural networks", 2024).
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["decoder_optimizers"]


def decoder_optimizers(
    model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside blocks, AdamW for everything else that is trained."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (matrices if "blocks." in name and parameter.dim() == 2 else others).append(parameter)
    # Four Newton-Schulz steps, not five: a fifth of an optimizer that takes a quarter of a step's time on a CPU.
    return [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=weight_decay, momentum=0.95, ns_steps=4),
        torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True),
    ]
