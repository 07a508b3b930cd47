"""The evaluation draws with the real programs, keeps what it drew, and measures what was drawn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import training.evaluation.pictures as pictures
from device.link import LinkSettings
from shared.bundle import Bundle
from shared.errors import LinkError
from tests.training.evaluation_sprites import sprite_set
from training import toy
from training.data.settings import DataSettings, SceneSettings
from training.data.stage import sprite_key
from training.evaluation import EvaluationSettings, run_evaluation
from training.evaluation.codec import through_codec
from training.evaluation.pictures import DrawnPicture, PictureStore, Studio
from training.evaluation.prompts import PromptList, scene_prompts
from training.evaluation.settings import RecogniserSettings, SamplingOverrides, SweepSettings, Way
from training.evaluation.verifier import VerifierProcess, running_verifier

COUNT, EXTRA = 6, 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """A toy bundle that reads captions as long as those of scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "PREFIX_ROWS", 60)
        yield toy.write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", vocabulary=8, rows=4, cols=4)


@pytest.fixture(scope="module")
def settings(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> EvaluationSettings:
    """Settings of a small evaluation, with the drawings in place."""
    folder = tmp_path_factory.mktemp("evaluation")
    data = DataSettings(folder=folder / "data", size=32, scenes=SceneSettings(floor=0.0, solid=0.7, gradient=0.3))
    sprite_set().save(data.folder / "sprites", sprite_key(data))
    return EvaluationSettings(
        data,
        recogniser=RecogniserSettings(draws=1, side=32),
        bundle=bundle.folder,
        methods=("ar", "sd", "device"),
        count=COUNT,
        extra=("composition",),
        extra_count=EXTRA,
        concurrency=3,
        device="cpu",
        threads=1,
        verifier_threads=1,
        folder=folder / "kept",
        report=folder / "out" / "evaluation.json",
        contact_sheet=str(folder / "out" / "samples-{method}.png"),
    )


@pytest.fixture(scope="module")
def report(settings: EvaluationSettings) -> dict:
    """What the evaluation of the toy bundle reports."""
    run_evaluation(settings)
    return json.loads(settings.report.read_text(encoding="utf-8"))


@pytest.fixture
def no_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a verifier was started")

    monkeypatch.setattr(pictures, "running_verifier", refuse)


def prompts_of(settings: EvaluationSettings, count: int = COUNT) -> PromptList:
    return scene_prompts(sprite_set(), settings.data, count, settings.seed)


# -- the whole stage -------------------------------------------------------------------------------------------------


def test_every_list_has_real_pictures_their_codec_and_each_method(report: dict, bundle: Bundle):
    assert report["bundle"]["digest"] == bundle.manifest.digest
    assert {name: len(rows) for name, rows in report["lists"].items()} == {"test-single": 5, "composition": 5}
    for rows, count in zip(report["lists"].values(), (COUNT, EXTRA), strict=True):
        assert list(rows) == ["real", "real through codec", "ar", "sd-gumbel", "device"]
        assert {row["pictures"] for row in rows.values()} == {count}
        assert all(row["retrieval"]["median_rank"] >= 1 for row in rows.values())


def test_real_pictures_have_their_backgrounds_and_random_weights_do_not(report: dict):
    for rows in report["lists"].values():
        assert all(share["right"] == share["total"] for share in rows["real"]["background"].values())
        assert sum(share["right"] for share in rows["ar"]["background"].values()) < rows["ar"]["pictures"]


def test_the_exact_rule_scores_as_the_target_alone_and_saves_passes(report: dict):
    rows = report["lists"]["test-single"]
    for figure in ("frechet", "retrieval", "background"):
        assert rows["sd-gumbel"][figure] == rows["ar"][figure]
    assert rows["sd-gumbel"]["cost"]["cloud_forwards"] < rows["ar"]["cost"]["cloud_forwards"]
    assert rows["sd-gumbel"]["cost"]["cloud_call_rate"] == rows["ar"]["cost"]["cloud_call_rate"] == 1.0
    assert 0.0 < rows["sd-gumbel"]["cost"]["accepted"] < 1.0
    assert rows["device"]["cost"]["cloud_forwards"] == rows["device"]["cost"]["cloud_call_rate"] == 0.0


def test_samples_of_real_pictures_and_of_each_method_are_saved(report: dict, settings: EvaluationSettings):
    names = {path.name for path in settings.report.parent.glob("samples-*.png")}
    assert names == {f"samples-{name}.png" for name in ("real", "ar", "sd-gumbel", "device")}


def test_a_second_run_draws_nothing_and_reports_the_same(
    report: dict, settings: EvaluationSettings, no_verifier: None, capsys: pytest.CaptureFixture[str]
):
    run_evaluation(settings)
    assert json.loads(settings.report.read_text(encoding="utf-8")) == report
    printed = capsys.readouterr().out
    assert "### test-single" in printed
    assert "| sd-gumbel | 6 |" in printed
    assert "new to it" in printed


def test_a_sweep_measures_every_combination(
    settings: EvaluationSettings, no_verifier: None, capsys: pytest.CaptureFixture[str]
):
    sweep = SweepSettings("device", count=2, temperature=(0.5, 1.0), top_k=(1,))
    swept = replace(settings, split="val", sweep=sweep, report=settings.report.with_name("sweep.json"))
    run_evaluation(swept)
    rows = json.loads(swept.report.read_text(encoding="utf-8"))["sweep"]["device"]
    warm, cold = "temperature 1, top_k 1", "temperature 0.5, top_k 1"
    assert list(rows) == ["real", "real through codec", cold, warm]
    assert rows[warm]["frechet"] == rows[cold]["frechet"]  # of one token, temperature changes nothing
    assert f"| {warm} | 2 |" in capsys.readouterr().out


def test_own_pictures_get_the_frechet_distance_and_a_word_why_no_more(
    settings: EvaluationSettings, tmp_path: Path, no_verifier: None, capsys: pytest.CaptureFixture[str]
):
    own = tmp_path / "test"
    own.mkdir()
    for number in range(6):
        Image.fromarray(np.full((40, 40, 3), 40 * number, np.uint8)).save(own / f"{number}.png")
    lines = [json.dumps({"file_name": f"{number}.png", "text": "a red cat"}) for number in range(6)]
    (own / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = DataSettings(source="folder", pictures=tmp_path, size=32)
    report = tmp_path / "report.json"
    run_evaluation(replace(settings, data=data, methods=("device",), extra=(), report=report, contact_sheet=""))
    rows = json.loads(report.read_text(encoding="utf-8"))["lists"]["test-pictures"]
    assert {row["pictures"] for row in rows.values()} == {3}
    assert all(row["retrieval"] is None and row["background"] == {} for row in rows.values())
    printed = capsys.readouterr().out
    assert "R@1" not in printed
    assert "your own pictures do not" in printed


def test_pictures_of_another_size_than_the_bundle_draws_are_refused(settings: EvaluationSettings):
    with pytest.raises(ValueError, match=r"data\.size is 64, but the bundle .* draws 32 pixels"):
        run_evaluation(replace(settings, data=replace(settings.data, size=64)))


# -- pictures --------------------------------------------------------------------------------------------------------


def test_a_lost_picture_is_drawn_again_and_is_the_same(
    report: dict, settings: EvaluationSettings, bundle: Bundle, no_verifier: None
):
    prompts = prompts_of(settings)
    with Studio(bundle, settings) as studio:
        way = Way.named("device", bundle.manifest.defaults)
        before = studio.draw(way, prompts)
        path = studio.folder(way) / prompts.name / "00002.png"
        path.unlink()
        (path.parent / "00003.png").write_bytes(b"half a pic")
        after = studio.draw(way, prompts)
    assert path.is_file()
    assert all(np.array_equal(old.pixels, new.pixels) for old, new in zip(before, after, strict=True))
    assert [picture.report["seed"] for picture in after] == list(range(COUNT))
    assert [picture.report["prompt"] for picture in after] == prompts.captions


def test_a_kept_picture_of_another_prompt_or_seed_does_not_count(settings: EvaluationSettings, tmp_path: Path):
    prompts = prompts_of(settings)
    store = PictureStore(tmp_path, prompts)
    for index, (prompt, seed) in enumerate([(prompts.captions[0], 0), ("another", 1), (prompts.captions[2], 7)]):
        store.write(index, DrawnPicture(np.zeros((8, 8, 3), np.uint8), {"prompt": prompt, "seed": seed}, 1))
    assert [store.read(index) is not None for index in range(4)] == [True, False, False, False]


def test_every_warp_has_its_own_pictures(settings: EvaluationSettings, bundle: Bundle):
    defaults = bundle.manifest.defaults
    ways = [Way.named("sd", replace(defaults, top_k=top_k)) for top_k in (0, 5)] + [Way.named("sd-mrs", defaults)]
    studio = Studio(bundle, settings)
    assert len({studio.folder(way) for way in ways}) == 3


def test_the_codec_gives_what_its_tokens_can_say(bundle: Bundle, settings: EvaluationSettings):
    originals = prompts_of(settings).pictures
    decoded = through_codec(bundle, originals)
    assert len(decoded) == len(originals)
    assert {picture.shape for picture in decoded} == {(32, 32, 3)}
    assert all(np.array_equal(a, b) for a, b in zip(through_codec(bundle, originals[:2]), decoded[:2], strict=True))


# -- the verifier ----------------------------------------------------------------------------------------------------


def test_a_verifier_that_cannot_start_says_why(tmp_path: Path):
    with (
        pytest.raises(LinkError, match=r"exit code 3: cloud-verifier: .*no bundle there.*verifier\.log"),
        running_verifier(tmp_path / "none", tmp_path / "verifier.log", "cpu", 1, 1),
    ):
        pass


def test_a_verifier_that_died_is_named_rather_than_the_broken_link(
    bundle: Bundle, settings: EvaluationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pictures, "_PATIENCE", LinkSettings(connect_seconds=2.0, retry_seconds=0.2))
    log = tmp_path / "verifier.log"
    log.write_text("killed: out of memory\n", encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"]) as process:
        process.wait()
    with Studio(bundle, replace(settings, folder=tmp_path)) as studio:
        studio._verifier = VerifierProcess(process, log)
        studio._verifier.address = "127.0.0.1:9"  # nobody listens there
        with pytest.raises(LinkError, match=r"ended with exit code 9: killed: out of memory"):
            studio.draw(Way.named("ar", bundle.manifest.defaults), prompts_of(settings))


def test_sigterm_ends_the_evaluation_and_its_verifier_and_keeps_what_was_drawn(
    bundle: Bundle, settings: EvaluationSettings, monkeypatch: pytest.MonkeyPatch
):
    write = PictureStore.write

    def write_then_signal(store: PictureStore, index: int, picture: DrawnPicture) -> None:
        write(store, index, picture)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PictureStore, "write", write_then_signal)
    handler = signal.getsignal(signal.SIGTERM)
    sampling = SamplingOverrides(top_k=3)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(replace(settings, sampling=sampling, methods=("ar",), count=60, contact_sheet=""))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "stopping" in (settings.folder / "verifier.log").read_text(encoding="utf-8")
    folder = Studio(bundle, settings).folder(Way.named("ar", sampling.over(bundle.manifest.defaults)))
    assert 1 <= len(list(folder.rglob("*.png"))) < 60
