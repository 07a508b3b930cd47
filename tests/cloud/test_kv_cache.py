"""The key-value cache: rows of a branch lie where they were put, slots do not overlap, and there is an end to them."""

from __future__ import annotations

import pytest
import torch

from cloud.kv_cache import KVCache, Sequence
from cloud.models.transformer import TransformerConfig
from shared.errors import BusyError

CONFIG = TransformerConfig(5, 2, 3, dim=16, layers=2, heads=4, kv_heads=2, prefix_rows=2, caption_dim=4)
SLOTS = 3


@pytest.fixture
def cache() -> KVCache:
    return KVCache(CONFIG, SLOTS, torch.float32, torch.device("cpu"))


def drawn(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 2, CONFIG.kv_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(seed))


def test_what_is_written_is_read_by_branch_and_row(cache: KVCache) -> None:
    cache.allocate(guided=True)
    sequence = cache.allocate(guided=True)
    where = cache.flat_rows(sequence, torch.tensor([0, 2, 5]))
    for layer in range(CONFIG.layers):
        written = drawn(6, layer)
        cache.write(layer, where, written)
        keys, values = cache.read(layer, sequence, 6)
        assert keys.shape == values.shape == (2, CONFIG.kv_heads, 6, CONFIG.head_dim)
        for branch in range(2):
            for index, row in enumerate((0, 2, 5)):
                assert torch.equal(keys[branch, :, row], written[branch * 3 + index, 0])
                assert torch.equal(values[branch, :, row], written[branch * 3 + index, 1])
        assert not keys[:, :, [1, 3, 4]].any()


def test_no_row_belongs_to_two_branches_or_slots(cache: KVCache) -> None:
    sequences = [cache.allocate(guided=True) for _ in range(SLOTS)]
    rows = torch.cat([cache.flat_rows(sequence, torch.arange(CONFIG.length)) for sequence in sequences])
    assert sorted(rows.tolist()) == list(range(SLOTS * 2 * CONFIG.length))


def test_an_unguided_sequence_is_the_first_branch_alone(cache: KVCache) -> None:
    guided = cache.allocate(guided=True)
    rows = cache.flat_rows(guided, torch.arange(CONFIG.length))
    cache.release(guided)
    unguided = cache.allocate(guided=False)
    assert unguided.slot == guided.slot
    assert (guided.branches, unguided.branches) == (2, 1)
    assert torch.equal(cache.flat_rows(unguided, torch.arange(CONFIG.length)), rows[: CONFIG.length])
    assert cache.read(0, unguided, 3)[0].shape == (1, CONFIG.kv_heads, 3, CONFIG.head_dim)


def test_reading_copies_nothing(cache: KVCache) -> None:
    sequence = cache.allocate(guided=False)
    keys, _ = cache.read(0, sequence, 4)
    cache.write(0, cache.flat_rows(sequence, torch.tensor([3])), drawn(1, 0))
    assert keys[0, :, 3].any()


def test_layers_are_apart(cache: KVCache) -> None:
    sequence = cache.allocate(guided=False)
    cache.write(1, cache.flat_rows(sequence, torch.arange(4)), drawn(4, 0))
    assert not cache.read(0, sequence, 4)[0].any()


def test_every_slot_is_given_once_and_then_the_cache_is_busy(cache: KVCache) -> None:
    sequences = [cache.allocate(guided=bool(index % 2)) for index in range(SLOTS)]
    assert {sequence.slot for sequence in sequences} == set(range(SLOTS))
    assert cache.free_slots == 0
    with pytest.raises(BusyError, match="every slot of the verifier is taken"):
        cache.allocate(guided=False)
    cache.release(sequences[1])
    assert cache.free_slots == 1
    again = cache.allocate(guided=True)
    assert (again.slot, again.length) == (sequences[1].slot, 0)


def test_truncation_shortens_and_never_lengthens() -> None:
    sequence = Sequence(0, 2, length=5)
    for length in (5, 3, 3, 0):
        sequence.truncate(length)
        assert sequence.length == length
    for length in (1, -1):
        with pytest.raises(ValueError, match=f"cannot truncate 0 rows to {length}"):
            sequence.truncate(length)
    assert sequence.length == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unwritten_row_is_zero_so_that_a_mask_can_hide_it(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, 1, dtype, torch.device("cpu"))
    keys, values = cache.read(0, cache.allocate(guided=True), CONFIG.length)
    assert keys.dtype == dtype
    assert not keys.any()
    assert not values.any()
