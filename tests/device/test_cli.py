"""`device-client` on the command line: help from the table of methods, one message and exit code for each failure."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from device import cli
from device.cli import main
from device.client import DeviceClient, GenerateSettings
from device.picture import save_picture
from device.selection import SelectionSettings
from shared import errors
from shared.bundle import Bundle
from shared.errors import CiarError
from shared.methods import METHODS, RULES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the program in this process, in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    before = signal.getsignal(signal.SIGTERM)

    def run(*flags: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(list(flags))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def alone(toy: Bundle) -> list[str]:
    """Flags of a picture that needs no verifier."""
    return ["--prompt", "a red cat", "--method", "device", "--bundle", str(toy.folder), "--seed", "7"]


def test_picture_is_saved_where_it_is_wanted(run: Run, alone: list[str], tmp_path: Path) -> None:
    code, out, err = run(*alone, "--output", "cat.png")
    assert (code, err) == (0, "")
    assert out.startswith("device (lossy), seed 7\n")
    assert out.endswith("saved   cat.png\n")
    with Image.open(tmp_path / "cat.png") as image:
        assert image.size == (32, 32)
        assert image.info == {"prompt": "a red cat", "seed": "7", "method": "device", "rule": "-"}
    assert [path.name for path in tmp_path.iterdir()] == ["cat.png"]


def test_json_is_all_there_is_on_the_output(run: Run, alone: list[str]) -> None:
    code, out, err = run(*alone, "--json", "--preview")
    assert (code, err) == (0, "")
    assert json.loads(out)["output"] == "picture.png"


def test_preview_is_saved_as_it_grows_and_removed(
    run: Run, alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    plain = save_picture

    def save(pixels: Any, path: Path, *notes: Any) -> None:
        plain(pixels, path, *notes)
        seen.append((path.name, (tmp_path / "cat.preview.png").exists()))

    monkeypatch.setattr(cli, "save_picture", save)
    assert run(*alone, "--preview", "--output", "cat.jpg")[0] == 0
    assert seen == [("cat.preview.png", True)] * 4 + [("cat.jpg", False)]
    assert [path.name for path in tmp_path.iterdir()] == ["cat.jpg"]


def test_help_tells_methods_rules_laws_and_exit_codes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    methods = [(method.name, method.summary) for method in METHODS.values()]
    for name, summary in [*methods, *[(rule.name, rule.summary) for rule in RULES.values()]]:
        assert f"  {name:<10}{summary} (loss" in out
    for number in {getattr(errors, name).exit_code for name in errors.__all__ if name.endswith("Error")} - {1}:
        assert f"  {number} " in out, f"exit code {number}"


def test_version_is_the_distributions(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("device-client 0.")


@pytest.mark.parametrize(
    "kind", [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")], ids=lambda kind: kind.__name__
)
def test_each_error_is_one_message_with_its_own_code(
    run: Run, alone: list[str], kind: type[CiarError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: Any) -> None:
        raise kind("the cat ran away")

    monkeypatch.setattr(cli, "_draw", fail)
    assert run(*alone) == (kind.exit_code, "", "device-client: the cat ran away\n")


def test_interrupt_has_its_own_code_and_leaves_no_files(
    run: Run, alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_picture

    def save(pixels: Any, path: Path, *notes: Any) -> None:
        plain(pixels, path, *notes)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli, "save_picture", save)
    assert run(*alone, "--preview") == (130, "", "device-client: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_defect_has_a_code_of_its_own(
    run: Run, alone: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(options: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(cli, "_draw", fail)
    assert run(*alone)[0] == errors.EXIT_DEFECT


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--top-k", "-1"], 2, "top_k"),
        (["--top-p", "2"], 2, "top_p"),
        (["--temperature", "0"], 2, "temperature"),
        (["--guidance", "inf"], 2, "guidance"),
        (["--seed", "-1"], 2, "seed"),
        (["--seed", "seven"], 2, "--seed"),
        (["--method", "magic"], 2, "method: 'magic' is unknown"),
        (["--method", "ar", "--rule", "mrs"], 2, "takes no rule"),
        (["--draft-length", "99"], 2, "draft_length"),
        (["--in-flight", "9"], 2, "in_flight"),
        (["--cloud-budget", "1.5"], 2, "cloud_budget"),
        (["--cloud-budget", "much"], 2, "--cloud-budget"),
        (["--mode", "offline"], 2, "mode: one of sync, batched, pipelined"),
        (["--repair", "pray"], 2, "repair: one of truncate, local"),
        (["--score", "vibes"], 2, "score: one of interval, width, entropy, random"),
        (["--threshold-mode", "median"], 2, "threshold_mode: one of quantile, average, maxnorm, absolute"),
        (["--threshold-mode", "absolute"], 2, "threshold: mode absolute needs a level"),
        (["--threshold", "0.3"], 2, "threshold: mode quantile takes the budget"),
        (["--threshold-mode", "absolute", "--threshold", "nan"], 2, "threshold: a number of at least 0"),
        (["--batch", "65"], 2, "batch"),
        (["--batch", "few"], 2, "--batch"),
        (["--features", "code32"], 2, "features: one of none, scalars, code64, full"),
        (["--prefix-rate", "-1"], 2, "prefix_rate"),
        (["--audit", "nan"], 2, "audit"),
        (["--on-lost-link", "panic"], 2, "on_lost_link: one of resume, fail, finish-alone"),
        (["--verdict-deadline", "0"], 2, "verdict_seconds"),
        (["--method", "ciar", "--rule", "block"], 2, "repair: rule block"),
        (["--method", "ciar", "--rule", "mrs", "--mode", "pipelined"], 2, "repair: with rule mrs"),
        (["--threads", "0"], 2, "threads"),
        (["--silence-timeout", "0"], 2, "silence_seconds"),
        (["--retry-timeout", "nan"], 2, "retry_seconds"),
        (["--server", "here"], 2, "HOST:PORT"),
        (["--prompt", ""], 2, "prompt: it is empty"),
        (["--bundle", "nowhere"], 3, "no bundle there"),
        (["--output", "nowhere/cat.png"], 7, "there is no folder"),
        (["--output", "cat"], 7, "use .png"),
        (["--magic"], 2, "--magic"),
    ],
)
def test_bad_flag_is_named_and_nothing_is_drawn(
    run: Run, alone: list[str], tmp_path: Path, flags: list[str], code: int, words: str
) -> None:
    ended, out, err = run(*alone, *flags)
    assert (ended, out) == (code, "")
    assert words in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


class StoppedError(CiarError):
    """Raised by a device that a test only wants to be asked."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GenerateSettings]:
    """The settings that reach a device, which then stops."""
    found: list[GenerateSettings] = []

    def generate(self: Any, prompt: str, settings: GenerateSettings, **callbacks: Any) -> None:
        found.append(settings)
        raise StoppedError("enough")

    monkeypatch.setattr(DeviceClient, "generate", generate)
    return found


def test_flags_of_the_selection_reach_the_settings(run: Run, asked: list[GenerateSettings]) -> None:
    flags = {
        "method": "ciar",
        "rule": "mrs",
        "cloud-budget": "0.4",
        "score": "width",
        "threshold-mode": "maxnorm",
        "threshold": "0.25",
        "mode": "batched",
        "repair": "truncate",
        "batch": "7",
        "draft-rows": "2",
        "features": "scalars",
        "prefix-rate": "0.1",
        "audit": "0.05",
        "in-flight": "3",
        "on-lost-link": "finish-alone",
        "verdict-deadline": "1.5",
    }
    run("--prompt", "a cat", *[word for name, value in flags.items() for word in (f"--{name}", value)])
    (settings,) = asked
    assert settings.selection == SelectionSettings(
        cloud_budget=0.4,
        score="width",
        threshold_mode="maxnorm",
        threshold=0.25,
        mode="batched",
        repair="truncate",
        batch=7,
        draft_rows=2,
        features="scalars",
        prefix_rate=0.1,
        audit=0.05,
    )
    assert (settings.method, settings.rule, settings.in_flight) == ("ciar", "mrs", 3)
    assert (settings.on_lost_link, settings.verdict_seconds) == ("finish-alone", 1.5)


def test_without_flags_the_settings_are_the_apis_defaults(run: Run, asked: list[GenerateSettings]) -> None:
    run("--prompt", "a cat")
    assert asked == [GenerateSettings()]


def test_overlay_is_saved_beside_the_picture(run: Run, alone: list[str], tmp_path: Path) -> None:
    assert run(*alone, "--overlay", "--output", "cat.png")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.overlay.png", "cat.png"]


def test_prompt_is_needed(run: Run) -> None:
    code, _, err = run("--method", "device")
    assert code == 2
    assert "--prompt" in err
