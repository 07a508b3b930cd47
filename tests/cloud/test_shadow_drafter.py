"""The shadow drafter: bit for bit the rows that a device drafted from, whatever was rejected in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from cloud.shadow_drafter import ShadowDrafter
from shared.bundle import Bundle
from shared.graphs import DrafterCache, DraftRows
from shared.sampling import SamplingSettings, probabilities, warp

SIZE, VOCABULARY = 6, 5
SAMPLING = SamplingSettings(temperature=0.7, top_k=3, guidance=4.0)


@pytest.fixture(scope="module", params=["fp32", "dynamic"])
def graph(
    toy_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> onnxruntime.InferenceSession:
    """The drafter, also with int8 products, whose rows depend on the rows they are computed with."""
    path = toy_bundle.path("drafter.onnx")
    if request.param != "fp32":
        from training.quantise import Precision, quantise

        quantised = tmp_path_factory.mktemp("quantised") / "drafter.onnx"
        quantise(path, quantised, Precision(request.param))
        path = quantised
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.fixture
def features() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)


@pytest.fixture
def shadow(graph: onnxruntime.InferenceSession, features: NDArray[np.float32]) -> ShadowDrafter:
    return ShadowDrafter(DrafterCache(graph, 12, SIZE), features, SAMPLING)


class Device:
    """What a device computes: a caption, then one token at a time, warped without guidance."""

    def __init__(self, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]) -> None:
        self.cache = DrafterCache(graph, 12, SIZE)
        self.features = features

    def probs(self, committed: list[int], draft: list[int]) -> NDArray[np.float32]:
        tokens = [*committed, *draft]
        logits = [self.cache.prefill(self.features).centre[0]]
        logits += [self.cache.feed([token]).centre[0] for token in tokens[:-1]]
        return np.stack([probabilities(warp(row, SAMPLING.unguided())) for row in logits[len(committed) :]])


@pytest.mark.parametrize("committed", range(SIZE))
def test_rows_are_the_devices_bit_for_bit(
    shadow: ShadowDrafter,
    graph: onnxruntime.InferenceSession,
    features: NDArray[np.float32],
    committed: int,
) -> None:
    tokens = [4, 0, 3, 1, 2, 2]
    for count in range(1, SIZE - committed + 1):
        prefix, draft = tokens[:committed], tokens[committed : committed + count]
        rows = shadow.probs(prefix, draft)
        assert rows.shape == (count, VOCABULARY)
        np.testing.assert_array_equal(rows, Device(graph, features).probs(prefix, draft))


@pytest.mark.parametrize("seed", range(6))
def test_rows_stay_the_devices_through_rejections_bonuses_and_repeats(
    shadow: ShadowDrafter, graph: onnxruntime.InferenceSession, features: NDArray[np.float32], seed: int
) -> None:
    chance, committed, device = random.Random(seed), list[int](), Device(graph, features)
    while len(committed) < SIZE:
        draft = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, SIZE - len(committed)))]
        for _ in range(chance.randint(1, 2)):
            np.testing.assert_array_equal(shadow.probs(committed, draft), device.probs(committed, draft))
        committed += draft[: chance.randint(0, len(draft))]
        committed += [chance.randrange(VOCABULARY)] if len(committed) < SIZE else []


def test_a_transcript_may_become_shorter_or_another(
    shadow: ShadowDrafter, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    device = Device(graph, features)
    for committed in ([1, 2, 3, 4], [1, 2], [], [0, 2, 3]):
        np.testing.assert_array_equal(shadow.probs(committed, [1, 1]), device.probs(committed, [1, 1]))


def test_rows_are_warped_as_the_device_warps_without_guidance(
    graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    warped = [
        ShadowDrafter(DrafterCache(graph, 12, SIZE), features, settings).probs([1], [2, 3])
        for settings in (SAMPLING, SAMPLING.unguided(), SamplingSettings())
    ]
    np.testing.assert_array_equal(warped[0], warped[1])
    assert ((warped[0] > 0).sum(-1) == 3).all()
    assert (warped[2] > 0).all()
    np.testing.assert_allclose(warped[0].sum(-1), 1.0, rtol=1e-5)


def test_rows_depend_on_the_caption_and_on_every_earlier_token(
    shadow: ShadowDrafter, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    rows = shadow.probs([1, 2], [3])
    other_caption = ShadowDrafter(DrafterCache(graph, 12, SIZE), features + 1, SAMPLING).probs([1, 2], [3])
    assert not np.allclose(rows, other_caption, atol=1e-3)
    for committed in ([0, 2], [1, 0]):
        assert not np.allclose(rows, shadow.probs(committed, [3]), atol=1e-3)


def test_nothing_is_fed_twice(shadow: ShadowDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    feed = shadow._cache.feed

    def watched(tokens: Sequence[int]) -> DraftRows:
        fed.extend(tokens)
        return feed(tokens)

    monkeypatch.setattr(shadow._cache, "feed", watched)
    shadow.probs([], [1, 2, 3])
    shadow.probs([1, 2], [4])
    shadow.probs([1, 2, 4], [0, 0])
    assert fed == [1, 2, 4, 0]
