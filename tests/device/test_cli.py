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
from device.picture import save_picture
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
    for method in METHODS.values():
        assert f"{method.summary} (" in out
    for rule in RULES.values():
        assert f"--rule {rule.name}" in out
        assert rule.summary in out
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
        (["--in-flight", "0"], 2, "in_flight"),
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


def test_prompt_is_needed(run: Run) -> None:
    code, _, err = run("--method", "device")
    assert code == 2
    assert "--prompt" in err
