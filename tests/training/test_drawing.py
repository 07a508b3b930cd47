"""Drawn pictures follow the target, begin as planned, and are drawn once, whatever interrupts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cloud.models.drafter import Drafter, DrafterConfig
from shared import noise
from shared.noise import Purpose
from shared.sampling import SamplingSettings, warp
from tests.training.interval_toys import CONFIG, SIZE, save_cache, save_models, toy_models
from training import drawing
from training.captioned_tokens import first_items
from training.cli import STAGES
from training.data.errors import DataError
from training.data.shards import finished_shards
from training.data.tokens import TokenCache
from training.drafter import guided_log_probs
from training.drawing import Artist, DrawingSettings, caption_of, draw_split, run_drawn
from training.encoding import open_caption_encoder
from training.mixed_tokens import MixedTokens
from training.sampling import sample_tokens
from training.toy import toy_text_encoder

SAMPLING = SamplingSettings(temperature=0.9, guidance=2.0)
SEEDS = [11, 12, 13, 14]
PROMPTS = {"train": ["a fox", "a red fox", "two foxes", "a fox above a crab"], "val": ["a crab"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy models and a cache of captions."""
    folder = tmp_path_factory.mktemp("drawing")
    save_models(folder)
    save_cache(folder / "tokens", train=9, val=4)
    return folder


@pytest.fixture(scope="module")
def captions(folder: Path) -> list[Tensor]:
    cache = TokenCache(folder / "tokens" / "val")
    return [caption_of(cache, item, CONFIG.prefix_rows) for item in range(4)]


@pytest.fixture(scope="module")
def artist() -> Artist:
    return Artist(*toy_models(), SAMPLING, 4, torch.device("cpu"), "fp32")


def _settings(made: Path, **changes: object) -> DrawingSettings:
    values: dict[str, object] = {"train": 7, "val": 3, "shard_size": 2, "at_once": 2, "precision": "fp32"}
    paths = {name: made / f"{name}.safetensors" for name in ("target", "drafter")}
    return DrawingSettings(SAMPLING, **{**paths, "tokens": made / "tokens", **values, **changes})  # type: ignore[arg-type]


def _own_choices(tokens: Tensor, folder: Path) -> Tensor:
    """What the target itself draws at each position, given the tokens before it and the pictures' noise."""
    features, lengths, _ = first_items(TokenCache(folder / "tokens" / "val"), 4)
    target, _ = toy_models()
    with torch.no_grad():
        rows = warp(guided_log_probs(target, (features, lengths, tokens), SAMPLING.guidance), SAMPLING)
    draws = [noise.gumbel(seed, Purpose.TOKEN, range(SIZE), CONFIG.vocabulary, xp=torch) for seed in SEEDS]
    return (rows + torch.stack(draws)).argmax(-1)


def test_every_token_behind_the_drafters_prefix_is_the_targets_own_choice(
    artist: Artist, captions: list[Tensor], folder: Path
) -> None:
    prefixes = [0, 3, 8, 0]
    drawn = artist.draw(captions, SEEDS, prefixes)
    chosen = _own_choices(drawn, folder)
    for tokens, own, count in zip(drawn, chosen, prefixes, strict=True):
        assert torch.equal(tokens[count:], own[count:])
    assert not torch.equal(drawn[2, :8], chosen[2, :8])  # the drafter's choices are others


def test_the_prefix_is_what_the_device_would_draw_alone_with_the_same_seed(
    artist: Artist, captions: list[Tensor]
) -> None:
    alone = sample_tokens(artist.drafter, captions, SAMPLING.unguided(), SEEDS)
    drawn = artist.draw(captions, SEEDS, [5, 0, 8, 1])
    for row, count in enumerate((5, 0, 8, 1)):
        assert torch.equal(drawn[row, :count], alone[row, :count])


def test_a_model_that_draws_other_tokens_is_refused() -> None:
    target, _ = toy_models()
    other = Drafter(DrafterConfig(replace(CONFIG, vocabulary=9)))
    with pytest.raises(ValueError, match="vocabulary of the target is 8, of the drafter 9"):
        Artist(target, other, SAMPLING, 2, torch.device("cpu"))


def test_the_drawn_cache_keeps_captions_and_begins_the_wanted_share_with_drafts(folder: Path, tmp_path: Path) -> None:
    run_drawn(_settings(folder, folder=tmp_path, prefix_share=0.0))
    run_drawn(_settings(folder, folder=tmp_path / "all", prefix_share=1.0))
    source, plain, mixed = (TokenCache(path / "train") for path in (folder / "tokens", tmp_path, tmp_path / "all"))
    assert len(plain) == 7
    assert plain.captions() == source.captions()[:7]
    for item in range(7):
        assert torch.equal(plain[item][1], source[item][1])
        assert plain[item][2] == source[item][2]
    assert any(not torch.equal(plain[item][0], mixed[item][0]) for item in range(7))


def test_plans_begin_about_the_wanted_share_and_depend_on_the_item_alone() -> None:
    settings = DrawingSettings(SAMPLING, prefix_share=0.25)
    plan = drawing._Plan.of(range(2000), "train", SIZE, settings)
    begun = [count for count in plan.prefixes if count]
    assert abs(len(begun) / 2000 - 0.25) < 0.03
    assert set(begun) == set(range(1, SIZE))
    assert len(set(plan.seeds)) == 2000
    alone = drawing._Plan.of([1234], "train", SIZE, settings)
    assert (alone.seeds[0], alone.prefixes[0]) == (plan.seeds[1234], plan.prefixes[1234])
    assert drawing._Plan.of([1234], "val", SIZE, settings).seeds != alone.seeds


def test_a_run_broken_off_goes_on_behind_its_finished_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_drawn(_settings(folder, folder=tmp_path / "unbroken"))
    broken = _settings(folder, folder=tmp_path / "broken")
    drawn: list[int] = []
    draw = Artist.draw

    def counted(self: Artist, *arguments: object) -> Tensor:
        if len(drawn) == 4:  # in the third shard of the training split
            raise KeyboardInterrupt
        drawn.append(len(arguments[0]))  # type: ignore[arg-type]
        return draw(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Artist, "draw", counted)
    with pytest.raises(KeyboardInterrupt):
        run_drawn(broken)
    assert len(TokenCache(broken.folder / "train")) == 4
    drawn[:] = [0] * 5
    run_drawn(broken)
    assert sum(drawn) == 3
    for split in ("train", "val"):
        whole, resumed = (TokenCache(tmp_path / name / split) for name in ("unbroken", "broken"))
        assert len(whole) == len(resumed)
        assert all(torch.equal(whole[item][0], resumed[item][0]) for item in range(len(whole)))


def test_processes_share_the_shards_and_draw_what_one_would(folder: Path, tmp_path: Path) -> None:
    whole, shared = _settings(folder, folder=tmp_path / "whole"), _settings(folder, folder=tmp_path / "shared")
    cache = whole.captions("train", CONFIG.prefix_rows)
    artist = Artist(*toy_models(), SAMPLING, 2, torch.device("cpu"), "fp32")
    draw_split(artist, cache, "train", 7, whole)
    draw_split(artist, cache, "train", 7, shared, rank=1, world=2)
    assert [path.name for path in finished_shards(shared.folder / "train")] == ["shard-00001", "shard-00003"]
    draw_split(artist, cache, "train", 7, shared, rank=0, world=2)
    one, other = (TokenCache(settings.folder / "train") for settings in (whole, shared))
    assert len(one) == len(other) == 7
    assert all(torch.equal(one[item][0], other[item][0]) for item in range(7))


def test_more_pictures_can_be_drawn_later(folder: Path, tmp_path: Path) -> None:
    run_drawn(_settings(folder, folder=tmp_path, train=3))
    before = [TokenCache(tmp_path / "train")[item][0] for item in range(3)]
    run_drawn(_settings(folder, folder=tmp_path, train=8))
    after = TokenCache(tmp_path / "train")
    assert len(after) == 8
    assert all(torch.equal(tokens, after[item][0]) for item, tokens in enumerate(before))


def test_a_folder_drawn_by_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    run_drawn(_settings(folder, folder=tmp_path))
    save_models(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="use another folder, or delete this one"):
        run_drawn(_settings(folder, folder=tmp_path, target=tmp_path / "other" / "target.safetensors"))


def test_more_pictures_than_captions_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train: 10 pictures are asked for, but .* has 9 captions"):
        run_drawn(_settings(folder, folder=tmp_path, train=10))


@pytest.fixture
def prompted(folder: Path, tmp_path: Path) -> DrawingSettings:
    """Settings that draw the prompts of text files."""
    (tmp_path / "prompts").mkdir()
    for split, prompts in PROMPTS.items():
        (tmp_path / "prompts" / f"{split}.txt").write_text("\n".join(prompts), encoding="utf-8")
    toy_text_encoder(tmp_path / "text_encoder", CONFIG.caption_dim)
    places = {"prompts": str(tmp_path / "prompts"), "text_encoder": tmp_path / "text_encoder"}
    return _settings(folder, folder=tmp_path / "drawn", train=3, val=1, prefix_share=0.0, **places)


def test_prompts_of_a_text_file_are_drawn_without_a_cache_of_pictures(prompted: DrawingSettings) -> None:
    run_drawn(replace(prompted, tokens=Path("missing")))
    encoder = open_caption_encoder(prompted.text_encoder, CONFIG.prefix_rows)
    for split, count in (("train", 3), ("val", 1)):
        drawn = TokenCache(prompted.folder / split)
        assert drawn.captions() == PROMPTS[split][:count]
        for item, prompt in enumerate(PROMPTS[split][:count]):
            assert np.allclose(drawn[item][1][: drawn[item][2]], encoder.encode(prompt), atol=1e-3)  # a float16 cache


def test_other_prompts_need_another_folder(prompted: DrawingSettings) -> None:
    run_drawn(prompted)
    (Path(prompted.prompts) / "train.txt").write_text("other\n" * 3, encoding="utf-8")
    with pytest.raises(DataError, match="use another folder, or delete this one"):
        run_drawn(prompted)


def test_more_pictures_than_prompts_are_refused(prompted: DrawingSettings) -> None:
    with pytest.raises(ValueError, match=r"train: 5 pictures are asked for, but .*prompts has 4 captions"):
        run_drawn(replace(prompted, train=5))


def test_settings_that_cannot_be_name_their_field() -> None:
    for changes in ({"train": 0}, {"at_once": 0}, {"prefix_share": 1.5}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            DrawingSettings(SAMPLING, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["drawn", "inter-dro", "interval-adapter"])
def test_the_stages_open_with_their_default_settings(name: str) -> None:
    settings, run = STAGES[name].open()
    assert callable(run)
    assert settings.load(Path("configs") / f"{name.replace('-', '_')}.toml")


@pytest.fixture
def caches(tmp_path: Path) -> list[TokenCache]:
    """Two caches of different sizes."""
    folders = [save_cache(tmp_path / name, train, seed=train) for name, train in (("small", 3), ("large", 12))]
    return [TokenCache(folder / "train") for folder in folders]


def test_mixed_caches_keep_their_shares_and_miss_no_item(caches: list[TokenCache]) -> None:
    mixed = MixedTokens(caches, [0.25, 0.75])
    seen = [tuple(mixed[index][0].tolist()) for index in range(len(mixed))]
    small, large = ({tuple(cache[item][0].tolist()) for item in range(len(cache))} for cache in caches)
    assert set(seen) == small | large
    assert np.isclose(sum(tokens in small for tokens in seen) / len(seen), 0.25)
    with pytest.raises(IndexError):
        mixed[len(mixed)]


def test_shares_must_be_positive_and_one_for_each_cache(caches: list[TokenCache]) -> None:
    for shares in ([1.0], [1.0, 0.0], [0.5, 0.3, 0.2]):
        with pytest.raises(ValueError, match="one for each of 2 tokens"):
            MixedTokens(caches, shares)
