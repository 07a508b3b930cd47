"""The caption encoder and the drafter's cache: what was fed before is what counts, however it was fed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.bundle import Bundle
from shared.errors import BundleError, SettingsError
from shared.graphs import MAX_PROMPT_CHARACTERS, CaptionEncoder, DrafterCache, DraftRows

PROMPT = "a red apple"
ONE = np.array([1.0], np.float32)
FIELDS = ("centre", "radius", "hidden", "measures")


def session(bundle: Bundle, name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(bundle.path(name)), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def captions(toy_bundle: Bundle) -> CaptionEncoder:
    tokenizer = Tokenizer.from_file(str(toy_bundle.path("tokenizer.json")))
    return CaptionEncoder(session(toy_bundle, "text_encoder.onnx"), tokenizer, toy_bundle.manifest.prefix_rows)


@pytest.fixture(scope="module")
def graph(toy_bundle: Bundle) -> onnxruntime.InferenceSession:
    return session(toy_bundle, "drafter.onnx")


@pytest.fixture(scope="module")
def features(captions: CaptionEncoder) -> NDArray[np.float32]:
    return captions.encode(PROMPT)


@pytest.fixture
def cache(graph: onnxruntime.InferenceSession, toy_bundle: Bundle) -> DrafterCache:
    return DrafterCache(graph, toy_bundle.manifest.prefix_rows, toy_bundle.manifest.grid.size, detail=True)


def assert_same(rows: DraftRows, expected: DraftRows) -> None:
    for name in FIELDS:
        np.testing.assert_allclose(getattr(rows, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def part(rows: DraftRows, start: int, stop: int | None = None) -> DraftRows:
    return DraftRows(*(getattr(rows, name)[start:stop] for name in FIELDS))


# -- captions -------------------------------------------------------------------------------------------------------


def test_a_prompt_gives_a_row_for_each_text_token_and_its_two_ends(captions: CaptionEncoder) -> None:
    encoded = captions.encode(PROMPT)
    assert encoded.shape == (5, 16)
    assert encoded.dtype == np.float32
    assert encoded.flags.c_contiguous
    np.testing.assert_array_equal(captions.encode(PROMPT), encoded)
    assert not np.allclose(captions.encode("a blue apple"), encoded)


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_an_empty_prompt_is_refused(captions: CaptionEncoder, prompt: str) -> None:
    with pytest.raises(SettingsError, match="prompt: it is empty"):
        captions.encode(prompt)


def test_the_longest_prompt_fits_and_one_token_more_is_refused_with_both_numbers(captions: CaptionEncoder) -> None:
    assert len(captions.encode(" ".join(["apple"] * 10))) == captions.max_rows == 12
    with pytest.raises(SettingsError, match="prompt: 11 text tokens; this bundle's models read at most 10"):
        captions.encode(" ".join(["apple"] * 11))


def test_too_many_characters_are_refused_before_they_are_read(captions: CaptionEncoder) -> None:
    with pytest.raises(SettingsError, match=f"prompt: 2001 characters; at most {MAX_PROMPT_CHARACTERS}"):
        captions.encode("a" * 2001)


@pytest.mark.parametrize("prompt", ["", "apple " * 11, "b" * 2001])
def test_check_refuses_what_encode_refuses(captions: CaptionEncoder, prompt: str) -> None:
    with pytest.raises(SettingsError, match="prompt: "):
        captions.check(prompt)


@pytest.mark.parametrize("prompt", [PROMPT, "\u732b", "\U0001f408 cat", "caf\u00e9"])
def test_check_takes_what_encode_takes_in_any_script(captions: CaptionEncoder, prompt: str) -> None:
    captions.check(prompt)
    assert np.isfinite(captions.encode(prompt)).all()


# -- the drafter ----------------------------------------------------------------------------------------------------


def test_tokens_fed_one_by_one_or_at_once_give_the_same_rows(
    cache: DrafterCache, features: NDArray[np.float32]
) -> None:
    tokens = [4, 0, 3, 3, 1, 2, 0]
    whole = cache.prefill(features, tokens)
    assert whole.centre.shape == (8, 5)
    assert whole.hidden.shape == (8, 16)
    assert (whole.radius >= 0).all()
    assert cache.length == 7
    assert_same(cache.prefill(features), part(whole, 0, 1))
    assert cache.length == 0
    for index, token in enumerate(tokens):
        assert_same(cache.feed([token]), part(whole, index + 1, index + 2))
        assert cache.length == index + 1
    cache.truncate(2)
    assert_same(cache.feed(tokens[2:]), part(whole, 3))


@pytest.mark.parametrize("seed", range(8))
def test_after_any_feeds_and_rollbacks_rows_equal_those_of_a_fresh_prefill(
    cache: DrafterCache, features: NDArray[np.float32], seed: int
) -> None:
    chance, held = random.Random(seed), list[int]()
    cache.prefill(features)
    for _ in range(10):
        held = held[: chance.randint(0, min(len(held), 10))]
        cache.truncate(len(held))
        new = [chance.randrange(5) for _ in range(chance.randint(1, 11 - len(held)))]
        rows = cache.feed(new)
        held += new
        fresh = DrafterCache(cache._graph, cache._prefix_rows, cache._size, detail=True)
        expected = fresh.prefill(features, held)
        assert_same(rows, part(expected, len(held) - len(new) + 1))
        for past, other in zip(cache._past, fresh._past, strict=True):
            filled = cache._prefix_rows + len(held)
            np.testing.assert_allclose(past[:, :filled], other[:, :filled], rtol=1e-4, atol=1e-5)


def test_without_detail_rows_have_a_centre_alone_and_width_0_for_the_rest(
    cache: DrafterCache, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    bare = DrafterCache(graph, 12, 12)
    for rows, expected in (
        (bare.prefill(features, [1, 2]), cache.prefill(features, [1, 2])),
        (bare.feed([3, 0]), cache.feed([3, 0])),
    ):
        np.testing.assert_allclose(rows.centre, expected.centre, atol=1e-6)
        assert {getattr(rows, name).shape for name in FIELDS[1:]} == {(len(rows.centre), 0)}
        assert expected.measures.shape == (len(rows.centre), 3)


class OlderGraph:
    """A drafter as it was exported before there were interval measures, or a temperature of theirs."""

    def __init__(self, graph: onnxruntime.InferenceSession) -> None:
        self.graph = graph

    def get_inputs(self) -> list[Any]:
        return [item for item in self.graph.get_inputs() if item.name not in ("detail_rows", "temperature")]

    def get_outputs(self) -> list[Any]:
        return [item for item in self.graph.get_outputs() if item.name != "measures"]

    def run(self, output_names: Any, input_feed: dict[str, Any]) -> list[Any]:
        assert set(input_feed) == {item.name for item in self.get_inputs()}
        return self.graph.run(output_names, input_feed | {"detail_rows": np.array([0]), "temperature": ONE})


def test_a_graph_without_measures_drafts_but_cannot_give_detail(
    cache: DrafterCache, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    older = OlderGraph(graph)
    rows = DrafterCache(older, 12, 12).prefill(features, [1, 2])
    np.testing.assert_allclose(rows.centre, cache.prefill(features, [1, 2]).centre, atol=1e-6)
    with pytest.raises(BundleError, match=r"this bundle's drafter has no interval measures.*export the bundle again"):
        DrafterCache(older, 12, 12, detail=True)


def test_another_caption_starts_from_scratch(
    cache: DrafterCache, captions: CaptionEncoder, features: NDArray[np.float32]
) -> None:
    first = cache.prefill(features, [1, 2])
    other = cache.prefill(captions.encode("two blue cats"), [1, 2])
    assert not np.allclose(first.centre, other.centre, atol=1e-3)
    assert_same(cache.prefill(features, [1, 2]), first)


def test_two_caches_on_one_graph_do_not_meet(
    cache: DrafterCache, graph: onnxruntime.InferenceSession, features: NDArray[np.float32]
) -> None:
    other = DrafterCache(graph, 12, 12, detail=True)
    cache.prefill(features, [1, 2, 3])
    expected = cache.feed([4])
    cache.truncate(3)
    other.prefill(features, [0, 0, 0, 0])
    assert_same(cache.feed([4]), expected)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_rollback_to_more_than_was_fed_is_refused(
    cache: DrafterCache, features: NDArray[np.float32], length: int
) -> None:
    cache.prefill(features, [1, 2, 3])
    with pytest.raises(ValueError, match=f"cannot roll the drafter back to {length} of 3 tokens"):
        cache.truncate(length)
    cache.truncate(3)
    assert cache.length == 3
