"""Token shards are complete or absent, go on where they ended, and can be read while more are written."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from training.data import shards
from training.data.errors import DataError
from training.data.shards import finished_shards, load_captions
from training.data.tokens import MAX_CAPTION_TOKENS, TokenCache, write_token_shards

TOKENS, WIDTH = 6, 5


class Numbers(Dataset):
    """Image i is filled with i / 1000; its caption is `i` repeated (i % 4 + 1) times."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3, 2, 2), index / 1000), " ".join([str(index)] * (index % 4 + 1))


def encode_images(images):
    return (images[:, 0, 0, :1] * 1000).round().long() + torch.arange(TOKENS)


def encode_captions(captions):
    return [np.array([[float(word)] * WIDTH for word in caption.split()]) for caption in captions]


def write(folder, count, **options):
    return write_token_shards(
        Numbers(count),
        options.pop("images", encode_images),
        options.pop("captions", encode_captions),
        folder,
        **{"shard_size": 10, "batch_size": 4, **options},
    )


def check_item(cache, index):
    tokens, features, length = cache[index]
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [index + step for step in range(TOKENS)]
    assert features.shape == (MAX_CAPTION_TOKENS, WIDTH)
    assert features.dtype == torch.float32
    assert length == index % 4 + 1
    assert (features[:length] == index).all()
    assert not features[length:].any()


def test_every_item_comes_back_with_its_own_tokens_and_features(tmp_path):
    assert write(tmp_path, 25) == 3
    cache = TokenCache(tmp_path)
    assert len(cache) == 25
    for index in range(25):
        check_item(cache, index)
    assert cache.captions() == [Numbers(25)[index][1] for index in range(25)]
    with pytest.raises(IndexError):
        cache[25]
    with pytest.raises(IndexError):
        cache[-1]


def test_items_batch_in_a_loader_with_workers(tmp_path):
    write(tmp_path, 12)
    batches = list(torch.utils.data.DataLoader(TokenCache(tmp_path), batch_size=6, num_workers=2))
    tokens, features, lengths = batches[1]
    assert tokens.shape == (6, TOKENS)
    assert features.shape == (6, MAX_CAPTION_TOKENS, WIDTH)
    assert lengths.tolist() == [index % 4 + 1 for index in range(6, 12)]


def test_finished_shards_are_not_encoded_again(tmp_path):
    write(tmp_path, 25)

    def refuse(_):
        pytest.fail("encoded again")

    assert write(tmp_path, 25, images=refuse, captions=refuse) == 0


def test_more_images_extend_the_cache_and_complete_its_short_last_shard(tmp_path):
    write(tmp_path, 15)
    assert write(tmp_path, 32) == 3
    cache = TokenCache(tmp_path)
    assert len(cache) == 32
    for index in range(32):
        check_item(cache, index)


def test_an_encoder_killed_in_the_middle_of_a_shard_leaves_no_part_of_it(tmp_path):
    calls = []

    def killed(images):
        calls.append(len(images))
        if len(calls) == 5:  # in the second shard
            raise KeyboardInterrupt
        return encode_images(images)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 25, images=killed)
    assert [path.name for path in finished_shards(tmp_path)] == ["shard-00000"]
    assert len(TokenCache(tmp_path)) == 10


@pytest.mark.parametrize("files_before", [0, 1, 2])
def test_a_writer_killed_between_the_files_of_a_shard_leaves_no_shard(tmp_path, monkeypatch, files_before):
    save, saved = np.save, []

    def killed(file, array):
        if len(saved) == files_before:
            raise KeyboardInterrupt
        saved.append(array)
        save(file, array)

    with monkeypatch.context() as patch:
        patch.setattr(shards.np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 10)
    assert finished_shards(tmp_path) == []
    with pytest.raises(DataError, match="no finished token shard yet"):
        TokenCache(tmp_path)
    write(tmp_path, 10)
    check_item(TokenCache(tmp_path), 9)


def test_refresh_takes_in_the_shards_finished_since(tmp_path):
    cache = None
    counts = []

    def encode(images):
        nonlocal cache
        if finished_shards(tmp_path):
            cache = cache or TokenCache(tmp_path)
            cache.refresh()
            counts.append(len(cache))
        return encode_images(images)

    write(tmp_path, 30, images=encode)
    assert counts == [10, 10, 10, 20, 20, 20]
    assert cache.refresh() == 10
    assert cache.refresh() == 0
    check_item(cache, 29)


def test_tokens_of_two_encoders_are_never_mixed(tmp_path):
    write(tmp_path, 10, made_with="codec 1")
    with pytest.raises(DataError, match=r"codec 1.*codec 2"):
        write(tmp_path, 20, made_with="codec 2")
    with pytest.raises(DataError, match="shard_size"):
        write(tmp_path, 20, made_with="codec 1", shard_size=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"images": lambda images: encode_images(images).float()}, "must give integers"),
        ({"images": lambda images: encode_images(images)[:-1]}, "must give integers"),
        ({"images": lambda images: encode_images(images) + 65_535}, "a shard holds"),
        ({"images": lambda images: encode_images(images) - 1}, "a shard holds"),
        ({"captions": lambda texts: encode_captions(texts)[1:]}, "arrays for 4 captions"),
        ({"captions": lambda texts: [np.zeros((33, WIDTH)) for _ in texts]}, "1 <= L <= 32"),
        ({"captions": lambda texts: [np.zeros((0, WIDTH)) for _ in texts]}, "1 <= L <= 32"),
    ],
)
def test_what_an_encoder_gives_is_checked_before_it_is_stored(tmp_path, options, said):
    with pytest.raises(DataError, match=said):
        write(tmp_path, 8, **options)
    assert finished_shards(tmp_path) == []


def test_a_damaged_shard_is_named(tmp_path):
    write(tmp_path, 20)
    broken = finished_shards(tmp_path)[1]
    np.save(broken / "offsets.npy", np.arange(4))
    with pytest.raises(DataError, match="shard-00001 is damaged"):
        TokenCache(tmp_path)
    (broken / "offsets.npy").unlink()
    with pytest.raises(DataError, match="shard-00001 is damaged"):
        TokenCache(tmp_path)


def test_shards_are_memory_mapped_and_compact(tmp_path):
    write(tmp_path, 10)
    shard = shards.load_shard(finished_shards(tmp_path)[0])
    assert all(isinstance(array, np.memmap) for array in (shard.tokens, shard.features, shard.offsets))
    assert (shard.tokens.dtype, shard.features.dtype) == (np.uint16, np.float16)
    assert shard.tokens.shape == (10, TOKENS)
    assert shard.features.shape == (sum(index % 4 + 1 for index in range(10)), WIDTH)
    assert load_captions(finished_shards(tmp_path)[0])[3] == "3 3 3 3"
