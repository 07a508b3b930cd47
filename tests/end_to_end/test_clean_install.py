"""What a user installs is enough: the base install draws pictures, and holds no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.bundle import Bundle
from tests.end_to_end.programs import ENVIRONMENT, Client, Verifier, finish

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("cloud", "device", "protos", "shared", "training")
FILES = ("LICENSE", "NOTICE", "README.md", "pyproject.toml")
# The tree under test must not be importable in the new environment.
CLEAN = {name: value for name, value in ENVIRONMENT.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def pip(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", *arguments]
    return subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the base install, made from a copy of the sources."""
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, source)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], env=CLEAN, check=True, timeout=60)
    python = folder / "venv" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    pinned = ["-c", str(constraints)] if constraints.exists() else []
    result = pip(python, "install", "--quiet", *pinned, ".", folder=source)
    if result.returncode and pip(python, "download", "--no-deps", "setuptools", folder=folder).returncode:
        pytest.skip("pip reaches no index, so nothing can be installed")
    assert result.returncode == 0, result.stderr
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_base_install_draws_pictures_without_torch(
    installed: Path, tmp_path: Path, toy: Bundle, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    absent = subprocess.run([installed, "-c", "import torch"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert "No module named 'torch'" in absent.stderr
    client = Client(tmp_path, python=str(installed))
    alone = client.draw("--method", "device", "--bundle", str(toy.folder), "--seed", "1")
    assert alone["tokens"] == 64
    together = client.draw("--server", verifier.address, "--seed", "1")
    assert (together["method"], together["tokens"], together["cloud_call_rate"]) == ("sd", 64, 1.0)
    assert (client.cache / toy.manifest.digest).is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_base_install_has_the_commands_and_their_help(installed: Path, tmp_path: Path) -> None:
    program = installed.with_name("device-client")
    process = subprocess.Popen(
        [program, "--help"], cwd=tmp_path, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    result = finish(process)
    assert (result.code, result.stderr) == (0, "")
    assert "exit codes:" in result.stdout
    assert os.access(installed.with_name("cloud-verifier"), os.X_OK)
