"""Interval features start as nothing, touch kept tokens alone, and bring the target nearer to its clean self."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.loading import load_interval_features
from shared.features import interval_scalars
from tests.training.interval_toys import CONFIG, SIZE, save_cache, save_models, toy_models
from training import interval_adapter
from training.captioned_tokens import CaptionedTokens, first_items
from training.data.tokens import TokenCache
from training.drafter import guided_log_probs
from training.interval_adapter import AdapterSettings, feature_quality, quality_table, run_interval_adapter
from training.interval_context import KeptDrafts, SplitModes, feature_vectors, keep_drafts
from training.loop import LoopSettings
from training.uncertainty import row_scores

MODES = ["scalars", "code64", "full"]
PREFIX_RATE = 0.25  # two of nine tokens
STEPS = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy models and a token cache."""
    folder = tmp_path_factory.mktemp("adapter")
    save_models(folder)
    save_cache(folder / "drawn", train=24, val=8)
    return folder


@pytest.fixture(scope="module")
def batch(made: Path) -> CaptionedTokens:
    return first_items(TokenCache(made / "drawn" / "val"), 8)


@pytest.fixture
def context(batch: CaptionedTokens) -> KeptDrafts:
    torch.manual_seed(4)
    return keep_drafts(toy_models()[1], batch, "interval", 0.3, PREFIX_RATE)


@pytest.fixture
def features() -> IntervalFeatures:
    torch.manual_seed(5)
    return IntervalFeatures(MODES, CONFIG.dim, CONFIG.dim, inner=8)


def _settings(made: Path, folder: Path, **changes: object) -> AdapterSettings:
    loop = LoopSettings(folder, steps=STEPS, batch_size=6, precision="fp32", warmup_steps=0, log_every=1, threads=1)
    values = {
        "target": made / "target.safetensors",
        "drafter": made / "drafter.safetensors",
        "tokens": (str(made / "drawn"),),
        "shares": (1.0,),
        "prefix_rate": PREFIX_RATE,
        "inner": 16,
        "rate": 0.02,
        "validation_pictures": 8,
    }
    return AdapterSettings(loop, **{**values, **changes})  # type: ignore[arg-type]


def test_the_least_uncertain_tokens_behind_the_prefix_are_kept(batch: CaptionedTokens, context: KeptDrafts) -> None:
    with torch.no_grad():
        rows = toy_models()[1](*batch)
    scores = row_scores(rows.centre.log_softmax(-1), rows.radius)["interval"]
    assert not context.kept[:, :2].any()
    assert (context.kept.sum(1) == 5).all()  # 70 % of seven, rounded up: the quantile lies between two tokens
    for row, kept in zip(scores[:, 2:], context.kept[:, 2:], strict=True):
        assert row[kept].max() < row[~kept].min()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_kept_tokens_are_drafts_and_the_others_clean(batch: CaptionedTokens, temperature: float) -> None:
    _, drafter = toy_models()
    torch.manual_seed(0)
    many = [keep_drafts(drafter, batch, "width", 0.3, PREFIX_RATE, temperature) for _ in range(400)]
    drafts = torch.stack([one.tokens for one in many])
    kept = many[0].kept
    assert torch.equal(drafts[:, ~kept], batch[2][~kept].expand(400, -1))
    with torch.no_grad():
        probs = (drafter(*batch).centre / temperature).softmax(-1)[kept]
    share = torch.nn.functional.one_hot(drafts[:, kept], CONFIG.vocabulary).double().mean(0)
    assert float((share - probs).abs().max()) < 4.5 * (0.25 / 400) ** 0.5


def test_scalars_describe_the_drafts_that_are_sent(batch: CaptionedTokens, context: KeptDrafts) -> None:
    with torch.no_grad():
        rows = toy_models()[1](*batch)
    expected = interval_scalars(rows.centre.log_softmax(-1), rows.radius, context.tokens)
    assert torch.allclose(context.scalars[context.kept], expected[context.kept], atol=1e-5)
    assert torch.allclose(context.hidden, rows.hidden)


def test_untrained_features_change_nothing(
    batch: CaptionedTokens, context: KeptDrafts, features: IntervalFeatures
) -> None:
    target, _ = toy_models()
    with torch.no_grad():
        plain = guided_log_probs(target, batch, 2.0)
        added = SplitModes(features)(context)
        assert torch.equal(guided_log_probs(target, batch, 2.0, added), plain)


def test_features_reach_only_what_follows_the_kept_token(batch: CaptionedTokens) -> None:
    target, _ = toy_models()
    added = torch.zeros(8, SIZE, CONFIG.dim)
    added[:, 4] = 1.0
    with torch.no_grad():
        plain, changed = guided_log_probs(target, batch, 2.0), guided_log_probs(target, batch, 2.0, added)
    assert torch.equal(plain[:, :5], changed[:, :5])
    assert (plain[:, 5:] != changed[:, 5:]).any(-1).all()


def test_an_added_vector_is_the_embedding_of_another_token(batch: CaptionedTokens) -> None:
    """Added in place of its token's embedding, another token's embedding makes it that token."""
    target, _ = toy_models()
    tokens, others = batch[2], batch[2].roll(1, 0)
    with torch.no_grad():
        added = target.token_embedding(others) - target.token_embedding(tokens)
        turned = guided_log_probs(target, batch, 2.0, added)
        expected = guided_log_probs(target, (*batch[:2], others), 2.0)
    assert torch.allclose(turned, expected, atol=1e-4)


def test_a_batch_is_split_among_the_modes_and_kept_tokens_alone_get_vectors(
    context: KeptDrafts, features: IntervalFeatures
) -> None:
    for parameter in features.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    features.eval()
    with torch.no_grad():
        added = SplitModes(features)(context)
        for picture in range(8):
            mode = MODES[picture % 3]
            own = feature_vectors(features, mode, context.hidden[picture], context.scalars[picture])
            kept = context.kept[picture]
            assert torch.allclose(added[picture][kept], own[kept], atol=1e-6)
            assert own.abs().sum() > 0.0
    assert not added[~context.kept].any()


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that ran to its end."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_interval_adapter(_settings(made, folder))
    return folder


def test_some_steps_bring_every_mode_nearer_to_the_teacher(made: Path, finished: Path, batch: CaptionedTokens) -> None:
    features = load_interval_features(finished / "final" / "interval_features.safetensors")
    target, drafter = toy_models()
    learnt = first_items(TokenCache(made / "drawn" / "train"), 24)
    quality = feature_quality(features, drafter, target, learnt, _settings(made, finished))
    assert list(quality) == ["none", *MODES]
    for mode in MODES:
        assert quality[mode]["all"] < 0.98 * quality["none"]["all"], quality


def test_the_report_compares_modes_on_the_same_drafts(made: Path, finished: Path, features: IntervalFeatures) -> None:
    lines = [json.loads(line) for line in (finished / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [STEPS]
    quality = {name: values for name, values in lines[0].items() if name != "step"}
    table = (finished / "validation.md").read_text()
    assert quality_table(quality, CONFIG.dim) in table
    assert f"| code64 | 64 | {quality['code64']['all']:.4f} |" in table
    target, drafter = toy_models()
    learnt = first_items(TokenCache(made / "drawn" / "val"), 8)
    untrained = feature_quality(features.eval(), drafter, target, learnt, _settings(made, finished))
    assert all(untrained[mode] == untrained["none"] for mode in MODES)
    assert untrained["none"] == quality["none"]


def test_a_training_stopped_midway_ends_in_the_same_bits(
    made: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    divergence = interval_adapter._divergence

    def stopping(teacher: Tensor, student: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 25:
            os.kill(os.getpid(), signal.SIGTERM)
        return divergence(teacher, student)

    monkeypatch.setattr(interval_adapter, "_divergence", stopping)
    assert not run_interval_adapter(_settings(made, tmp_path))
    assert calls == 25
    assert run_interval_adapter(_settings(made, tmp_path))
    ours, theirs = (load_file(folder / "final" / "interval_features.safetensors") for folder in (tmp_path, finished))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "changes",
    [{"modes": ("none",)}, {"modes": ()}, {"score": "random"}, {"budget": 1.0}, {"shares": ()}, {"rate": 0.0}],
)
def test_settings_that_cannot_be_name_their_field(made: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        _settings(made, tmp_path, **changes)


def test_a_batch_too_small_to_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 3"):
        AdapterSettings(LoopSettings(Path("unused"), steps=1, batch_size=2))
