"""Measures precisions of the exported drafter against each other: `python -m training.export.variants`.

The figures behind the default of the export settings; run it on the processor that matters to you.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloud.models.drafter import Drafter, DrafterConfig
from cloud.models.transformer import TransformerConfig
from shared.graphs import DrafterCache
from training.export.drafter import export_drafter
from training.graphs import open_graph
from training.quantise import Precision, quantise

__all__ = ["PRECISIONS", "SHAPES", "Variant", "measure_variants", "table"]

PRECISIONS = (
    Precision("fp32"),
    Precision("dynamic"),
    *(Precision("weights", block, level) for level in (4, 1, 0) for block in (32, 64, 128)),
)
SHAPES = {
    "384x2": TransformerConfig(vocabulary=1024, dim=384, layers=2, heads=6),
    "256x4": TransformerConfig(vocabulary=1024, dim=256, layers=4, heads=4),
    "512x1": TransformerConfig(vocabulary=1024, dim=512, layers=1, heads=8),
}
_AT = 128  # tokens fed before the step that is timed: half of a picture
_TOGETHER = 8
_CAPTION_ROWS = 9


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table.

    Args:
        shape, precision: what was measured.
        megabytes: size of the graph's file.
        one_thread_ms, two_threads_ms: median time of a step of one token.
        top1: share of rows whose most probable token is torch's.
        tv: mean total variation to torch's rows.
        together: largest difference of a logit between rows fed together and one by one; 0 means that a row does not
            depend on which rows it is computed with.
    """

    shape: str
    precision: str
    megabytes: float
    one_thread_ms: float
    two_threads_ms: float
    top1: float
    tv: float
    together: float


def measure_variants(
    shapes: dict[str, TransformerConfig] | None = None,
    precisions: Iterable[Precision] = PRECISIONS,
    steps: int = 300,
    seed: int = 0,
) -> list[Variant]:
    """Measures drafters of random weights.

    Args:
        shapes: their decoders; `SHAPES` when None.
        precisions: how each is stored.
        steps: steps that are timed, after a tenth as many to warm up.
        seed: of weights, caption and tokens.
    """
    variants = []
    for name, config in (SHAPES if shapes is None else shapes).items():
        torch.manual_seed(seed)
        drafter = random_drafter(config)
        with tempfile.TemporaryDirectory() as folder:
            full, graph = Path(folder) / "full.onnx", Path(folder) / "graph.onnx"
            export_drafter(drafter, full)
            for precision in precisions:
                quantise(full, graph, precision)
                variants.append(_measure(name, drafter, graph, precision, steps, seed))
    return variants


def random_drafter(config: TransformerConfig) -> Drafter:
    """A drafter with weights wide enough that its rows differ, as a trained one's do."""
    drafter = Drafter(DrafterConfig(config))
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15 if "head" in name else 0.05)
    return drafter.eval()


def _measure(shape: str, drafter: Drafter, graph: Path, precision: Precision, steps: int, seed: int) -> Variant:
    config = drafter.config.transformer
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((_CAPTION_ROWS, config.caption_dim)).astype(np.float32)
    tokens: list[int] = rng.integers(config.vocabulary, size=config.rows * config.cols).tolist()
    cache = DrafterCache(open_graph(graph), config.prefix_rows, len(tokens))
    singly = _one_by_one(cache, features, tokens[:-1])
    cache.prefill(features, tokens[:_AT])
    together = cache.feed(tokens[_AT : _AT + _TOGETHER]).centre
    truth = _torch_rows(drafter, features, tokens)
    return Variant(
        shape=shape,
        precision=str(precision),
        megabytes=round(graph.stat().st_size / 1e6, 2),
        one_thread_ms=_step_ms(graph, 1, features, tokens, config, steps),
        two_threads_ms=_step_ms(graph, 2, features, tokens, config, steps),
        top1=round(float((singly.argmax(-1) == truth.argmax(-1)).mean()), 4),
        tv=round(float(0.5 * np.abs(_softmax(singly) - _softmax(truth)).sum(-1).mean()), 5),
        together=float(np.abs(together - singly[_AT + 1 : _AT + 1 + _TOGETHER]).max()),
    )


def _one_by_one(cache: DrafterCache, features: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Centres (n + 1, V) of rows fed one at a time, as the device does."""
    rows = [cache.prefill(features).centre]
    rows += [cache.feed([token]).centre for token in tokens]
    return np.concatenate(rows)


def _torch_rows(drafter: Drafter, features: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
    padded = torch.zeros(1, drafter.config.transformer.prefix_rows, features.shape[1])
    padded[0, : len(features)] = torch.from_numpy(features)
    with torch.no_grad():
        rows = drafter(padded, torch.tensor([len(features)]), torch.tensor([list(tokens)]))
    return np.asarray(rows.centre[0].numpy())


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _step_ms(
    graph: Path, threads: int, features: NDArray[np.float32], tokens: list[int], config: TransformerConfig, steps: int
) -> float:
    """Median time of a step near the middle of a picture, in milliseconds."""
    cache = DrafterCache(open_graph(graph, threads), config.prefix_rows, len(tokens))
    cache.prefill(features, tokens[:_AT])
    times = []
    for step in range(steps + steps // 10):
        if cache.length >= _AT + 16:
            cache.truncate(_AT)
        start = time.perf_counter()
        cache.feed([tokens[step % len(tokens)]])
        times.append(time.perf_counter() - start)
    return round(float(np.median(times[steps // 10 :])) * 1e3, 3)


def table(variants: Sequence[Variant]) -> str:
    """The rows as Markdown."""
    names = [item.name for item in fields(Variant)]
    lines = [names, ["---"] * len(names), *([f"{value}" for value in astuple(variant)] for variant in variants)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(measure_variants()))
