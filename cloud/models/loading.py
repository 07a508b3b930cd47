"""Loading decoders from safetensors with a JSON description beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.transformer import Transformer, TransformerConfig
from shared.errors import BundleError

__all__ = ["load_interval_features", "load_transformer", "load_weights", "save_weights"]


def load_transformer(weights: Path) -> Transformer:
    """Loads a decoder from `NAME.safetensors` and `NAME.json`.

    Raises:
        BundleError: a file is missing or does not hold such a decoder; the message names file and field.
    """
    description = weights.with_suffix(".json")
    try:
        model = Transformer(TransformerConfig(**json.loads(description.read_text(encoding="utf-8"))))
    except (OSError, TypeError, ValueError) as error:
        raise BundleError(f"{description}: not a decoder's description ({error})") from error
    load_weights(model, weights)
    return model


def load_interval_features(weights: Path) -> IntervalFeatures:
    """Loads encoders and adapters of interval features from `NAME.safetensors` and `NAME.json`, for use.

    Raises:
        BundleError: a file is missing or does not hold interval features; the message names file and field.
    """
    description = weights.with_suffix(".json")
    try:
        features = IntervalFeatures(**json.loads(description.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise BundleError(f"{description}: not a description of interval features ({error})") from error
    load_weights(features, weights)
    return features.eval()


def load_weights(model: nn.Module, weights: Path) -> None:
    """Loads safetensors into a module.

    Raises:
        BundleError: the file is missing, damaged, or its tensors do not fit.
    """
    try:
        model.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BundleError(f"{weights}: its weights cannot be loaded ({error})") from error


def save_weights(model: nn.Module, weights: Path, description: dict[str, Any]) -> None:
    """Writes `NAME.safetensors` and `NAME.json`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, weights)
    weights.with_suffix(".json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
