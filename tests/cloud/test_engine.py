"""The engine: rolling back is as if nothing had been fed, and generations in one pass do not notice each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cloud.engine import Caption, Engine, Feed
from cloud.kv_cache import Sequence as Place
from cloud.models.transformer import Rows, Transformer, rotary_table

MakeModel = Callable[..., Transformer]

TOLERANCE = 1e-5
SIZE, PREFIX = 12, 4
VARIANTS = [{}, {"kv_heads": 2, "rope_layout": "half"}, {"rope_kind": "1d", "qk_norm": "layernorm_per_head"}]


def caption(seed: int, rows: int = 3) -> Caption:
    return Caption(torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)))


def feed(engine: Engine, place: Place, tokens: Sequence[int], first: Caption | None = None) -> Rows:
    """Feeds one generation alone and returns all rows that predict tokens."""
    (rows,) = engine.forward([Feed(place, tokens, first, wanted=len(tokens) + (first is not None))])
    return rows


def fresh(model: Transformer, tokens: Sequence[int], first: Caption, guided: bool) -> tuple[Engine, Place, Rows]:
    """An engine of its own that was fed everything in one pass."""
    engine = Engine(model, slots=1)
    place = engine.cache.allocate(guided)
    return engine, place, feed(engine, place, tokens, first)


def assert_same_rows(rows: Rows, expected: Rows) -> None:
    torch.testing.assert_close(rows.logits, expected.logits, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(rows.hidden, expected.hidden, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_cache(engine: Engine, place: Place, other: Engine, other_place: Place) -> None:
    assert place.length == other_place.length
    for layer in range(engine.config.layers):
        held, expected = (e.cache.read(layer, p, p.length) for e, p in ((engine, place), (other, other_place)))
        for one, another in zip(held, expected, strict=True):
            torch.testing.assert_close(one, another, rtol=TOLERANCE, atol=TOLERANCE)


def last(rows: Rows, count: int) -> Rows:
    return Rows(rows.hidden[:, -count:], rows.logits[:, -count:])


# -- rolling back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_after_any_feeds_and_rollbacks_rows_and_cache_equal_a_fresh_prefill(
    make_model: MakeModel, fields: dict[str, object], guided: bool, seed: int
) -> None:
    model, chance, held = make_model(**fields), random.Random(seed), list[int]()
    engine = Engine(model, slots=2)
    place = engine.cache.allocate(guided)
    feed(engine, place, [], caption(1))
    for _ in range(8):
        held = held[: chance.randint(0, min(len(held), SIZE - 1))]
        place.truncate(PREFIX + len(held))
        new = [chance.randrange(7) for _ in range(chance.randint(1, SIZE - len(held)))]
        rows = feed(engine, place, new)
        held += new
        other, other_place, expected = fresh(model, held, caption(1), guided)
        assert_same_rows(rows, last(expected, len(new)))
        assert_same_cache(engine, place, other, other_place)


def test_a_rollback_that_is_left_out_is_noticed(model: Transformer) -> None:
    """The comparison above is not blind: a token that should have been forgotten changes rows and cache."""
    engine = Engine(model, slots=1)
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [1, 2], caption(1))
    rows = feed(engine, place, [3])
    other, other_place, expected = fresh(model, [1, 3], caption(1), True)
    with pytest.raises(AssertionError):
        assert_same_rows(rows, last(expected, 1))
    place.length -= 1
    with pytest.raises(AssertionError):
        assert_same_cache(engine, place, other, other_place)


def test_both_guidance_branches_roll_back_together(model: Transformer) -> None:
    engine = Engine(model, slots=1)
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [1, 2, 3, 4], caption(1))
    place.truncate(PREFIX + 1)
    rows = feed(engine, place, [5])
    conditional = last(fresh(model, [1, 5], caption(1), guided=False)[2], 1)
    unconditional = last(fresh(model, [1, 5], caption(1, rows=0), guided=False)[2], 1)
    torch.testing.assert_close(rows.logits[:1], conditional.logits, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(rows.logits[1:], unconditional.logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert (conditional.logits - unconditional.logits).abs().max() > 0.1


def test_one_branch_equals_the_conditional_of_two(model: Transformer) -> None:
    guided = fresh(model, [1, 2, 3], caption(1), guided=True)[2]
    alone = fresh(model, [1, 2, 3], caption(1), guided=False)[2]
    assert guided.logits.shape == (2, 4, 7)
    assert alone.logits.shape == (1, 4, 7)
    torch.testing.assert_close(alone.logits, guided.logits[:1], rtol=TOLERANCE, atol=TOLERANCE)


def test_rolled_back_to_nothing_a_sequence_takes_another_caption(model: Transformer) -> None:
    engine = Engine(model, slots=1)
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [1, 2, 3], caption(1))
    place.truncate(0)
    rows = feed(engine, place, [4], caption(2))
    assert_same_rows(rows, fresh(model, [4], caption(2), True)[2])


# -- many generations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_generations_of_different_lengths_in_one_pass_equal_each_alone(
    make_model: MakeModel, fields: dict[str, object]
) -> None:
    model = make_model(**fields)
    fed = [([], [1]), ([1, 2, 3], [4, 5, 6, 0]), ([6] * 5, [2]), (list(range(7)), [3, 3]), ([2], [1] * 7)]
    guided = [True, False, True, True, False]
    engine = Engine(model, slots=5)
    places = [engine.cache.allocate(g) for g in guided]
    for index, (place, (before, _)) in enumerate(zip(places, fed, strict=True)):
        feed(engine, place, before, caption(index))
    packed = engine.forward(
        [Feed(place, after, wanted=len(after)) for place, (_, after) in zip(places, fed, strict=True)]
    )
    for index, (rows, place, (before, after)) in enumerate(zip(packed, places, fed, strict=True)):
        other, other_place, expected = fresh(model, before + after, caption(index), guided[index])
        assert_same_rows(rows, last(expected, len(after)))
        assert_same_cache(engine, place, other, other_place)


def test_captions_and_single_tokens_share_a_pass(model: Transformer) -> None:
    engine = Engine(model, slots=3)
    places = [engine.cache.allocate(guided=True) for _ in range(3)]
    feed(engine, places[1], [1, 2], caption(1))
    feeds = [
        Feed(places[0], [3, 4, 5], caption(0), wanted=4),
        Feed(places[1], [6]),
        Feed(places[2], [], caption(2, rows=4)),
    ]
    packed = engine.forward(feeds)
    assert_same_rows(packed[0], fresh(model, [3, 4, 5], caption(0), True)[2])
    assert_same_rows(packed[1], last(fresh(model, [1, 2, 6], caption(1), True)[2], 1))
    assert_same_rows(packed[2], fresh(model, [], caption(2, rows=4), True)[2])


def test_a_pass_leaves_other_slots_as_they_were(model: Transformer) -> None:
    engine = Engine(model, slots=3)
    places = [engine.cache.allocate(guided=True) for _ in range(3)]
    for place in places:
        feed(engine, place, [1, 2, 3], caption(1))
    untouched = [[x.clone() for x in engine.cache.read(0, places[i], places[i].length)] for i in (0, 2)]
    feed(engine, places[1], [4, 5, 6])
    for i, before in zip((0, 2), untouched, strict=True):
        for x, y in zip(engine.cache.read(0, places[i], places[i].length), before, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("guided", [True, False])
def test_a_slot_keeps_nothing_of_an_earlier_tenant(model: Transformer, guided: bool) -> None:
    engine = Engine(model, slots=1)
    earlier = engine.cache.allocate(guided=True)
    feed(engine, earlier, [6] * SIZE, caption(9, rows=4))
    engine.cache.release(earlier)
    later = engine.cache.allocate(guided)
    rows = feed(engine, later, [1, 2], caption(1, rows=1))
    expected = fresh(model, [1, 2], caption(1, rows=1), guided)[2]
    assert torch.equal(rows.logits, expected.logits)


# -- what a pass returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_wanted_are_the_last_rows(model: Transformer, wanted: int) -> None:
    expected = fresh(model, [1, 2, 3], caption(1), True)[2]
    engine = Engine(model, slots=1)
    (rows,) = engine.forward([Feed(engine.cache.allocate(guided=True), [1, 2, 3], caption(1), wanted=wanted)])
    assert rows.logits.shape == (2, wanted, 7)
    assert rows.hidden.shape == (2, wanted, 16)
    assert rows.logits.dtype == torch.float32
    assert_same_rows(rows, last(expected, wanted))


def test_a_sequence_grows_by_the_rows_fed(engine: Engine) -> None:
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [1], caption(1))
    assert place.length == PREFIX + 1
    feed(engine, place, [2, 3, 4])
    assert place.length == PREFIX + 4


def test_a_whole_picture_fits_and_not_a_token_more(engine: Engine) -> None:
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [0] * SIZE, caption(1))
    with pytest.raises(ValueError, match="a feed of 1 rows behind 16"):
        feed(engine, place, [0])


# -- bad feeds ------------------------------------------------------------------------------------------------------


def held(engine: Engine) -> Place:
    place = engine.cache.allocate(guided=True)
    feed(engine, place, [1, 2], caption(1))
    return place


@pytest.mark.parametrize(
    "bad",
    [
        lambda place: Feed(place, []),
        lambda place: Feed(place, [0] * (SIZE - 1)),
        lambda place: Feed(place, [1, 2], wanted=3),
        lambda place: Feed(place, [1, 2], wanted=0),
        lambda place: Feed(place, [1], caption(2)),
    ],
    ids=["no rows", "more than a picture", "more wanted than fed", "none wanted", "a caption behind tokens"],
)
def test_a_bad_feed_raises_and_changes_nothing(engine: Engine, bad: Callable[[Place], Feed]) -> None:
    place, other = held(engine), held(engine)
    before = [[x.clone() for x in engine.cache.read(layer, place, place.length)] for layer in range(2)]
    with pytest.raises(ValueError, match="a feed of"):
        engine.forward([Feed(other, [1]), bad(place)])
    assert (place.length, other.length) == (PREFIX + 2, PREFIX + 2)
    for layer in range(2):
        for x, y in zip(engine.cache.read(layer, place, place.length), before[layer], strict=True):
            assert torch.equal(x, y)


def test_tokens_without_a_caption_before_them_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="caption"):
        feed(engine, engine.cache.allocate(guided=True), [1, 2, 3, 4])


def test_one_sequence_twice_in_a_pass_is_refused(engine: Engine) -> None:
    place = held(engine)
    with pytest.raises(ValueError):
        engine.forward([Feed(place, [1]), Feed(place, [2])])


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_outside_the_vocabulary_raises_and_changes_nothing(engine: Engine, token: int) -> None:
    place = held(engine)
    with pytest.raises((IndexError, ValueError)):
        feed(engine, place, [1, token])
    assert place.length == PREFIX + 2


def test_a_caption_longer_than_the_prefix_is_refused(engine: Engine) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        feed(engine, engine.cache.allocate(guided=True), [], caption(1, rows=PREFIX + 1))


# -- precision ------------------------------------------------------------------------------------------------------


def test_angles_keep_their_float32_precision_whatever_the_engine_computes_in(make_model: MakeModel) -> None:
    model = make_model()
    engine = Engine(model, slots=1, dtype=torch.bfloat16)
    assert engine.model.table.dtype == torch.float32
    assert torch.equal(engine.model.table, rotary_table(model.config))


def test_a_bfloat16_engine_answers_in_float32_close_to_a_float32_engine(make_model: MakeModel) -> None:
    expected = fresh(make_model(), [1, 2, 3], caption(1), True)[2]
    engine = Engine(make_model(), slots=1, dtype=torch.bfloat16)
    rows = feed(engine, engine.cache.allocate(guided=True), [1, 2, 3], caption(1))
    assert rows.logits.dtype == torch.float32
    assert rows.hidden.dtype == torch.float32
    difference: Tensor = rows.logits - expected.logits
    assert difference.square().mean().sqrt() < 0.1 * expected.logits.std()


def test_the_engine_keeps_no_gradients(engine: Engine) -> None:
    rows = feed(engine, engine.cache.allocate(guided=True), [1], caption(1))
    assert not rows.logits.requires_grad
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
