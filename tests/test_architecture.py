"""The rooms keep to themselves, the stubs match the contract, and what a module offers is what it declares."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cloud.methods import CLOUD_ROLES
from cloud.methods.verifier import JUDGES
from cloud.relaxation import make_rule
from device.roles import DEVICE_ROLES
from protos import generate
from shared.methods import METHODS, RULES

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("shared", "device", "cloud", "training", "protos")
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"


# -- imports between rooms ------------------------------------------------------------------------------------------


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the contracts of pyproject.toml over the rooms in a folder."""
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True)


def test_rooms_import_only_what_they_may() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("shared/grid.py", "import torch", "shared needs numpy"),
        ("shared/graphs.py", "import onnxruntime", "shared needs numpy"),
        ("shared/bundle.py", "from training import toy", "shared needs numpy"),
        ("device/picture.py", "from cloud import engine", "the device never imports"),
        ("device/retry.py", "import torch", "the device never imports"),
        ("device/pacing.py", "def late() -> None:\n    import training.toy", "the device never imports"),
        ("cloud/engine.py", "from device.retry import Retry", "the cloud never imports"),
        ("cloud/admission.py", "import training", "the cloud never imports"),
        ("training/target.py", "import cloud.server", "training builds on models"),
    ],
)
def test_an_import_that_crosses_a_wall_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(tmp_path)
    assert result.returncode == 1
    assert any(contract in row and "BROKEN" in row for row in result.stdout.splitlines()), result.stdout


# -- stubs ----------------------------------------------------------------------------------------------------------


def test_stubs_are_what_the_generator_writes_now() -> None:
    assert generate.stale() == []


@pytest.mark.parametrize("stub", generate.STUBS)
def test_a_stub_changed_by_hand_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: str) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "protos" / stub).open("a") as file:
        file.write("# by hand\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.stale() == [stub]


def test_a_changed_contract_makes_its_stubs_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("__pycache__"))
    contract = tmp_path / "protos" / "ciar.proto"
    contract.write_text(contract.read_text().replace("uint32 accepted = 3;", "uint32 accepted = 33;"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert "ciar_pb2.py" in generate.stale()


# -- what modules offer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A module's text, read without running it."""

    name: str
    tree: ast.Module

    @property
    def declared(self) -> list[str] | None:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                return list(ast.literal_eval(node.value))
        return None

    def imported(self) -> Iterator[tuple[str, str]]:
        """Pairs of module and name, for every `from module import name`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)


def read(path: Path) -> Source:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return Source(name, ast.parse(path.read_text(encoding="utf-8")))


SOURCES = {
    source.name: source
    for room in ROOMS
    for source in map(read, sorted((ROOT / room).rglob("*.py")))
    if not source.name.endswith(("_pb2", "_pb2_grpc"))
}
IMPORTED = {pair for source in SOURCES.values() for pair in source.imported()}
DECLARING = [name for name, source in SOURCES.items() if source.declared is not None]
RUNTIME = [name for name in DECLARING if name.split(".")[0] in ("shared", "device", "cloud")]


def test_the_modules_are_found() -> None:
    assert {"shared.grid", "device.client", "cloud.engine", "cloud.methods"} <= set(RUNTIME)


@pytest.mark.parametrize("name", RUNTIME)
def test_all_lists_names_that_exist_once_each(name: str) -> None:
    declared, module = SOURCES[name].declared, importlib.import_module(name)
    assert declared is not None
    assert len(set(declared)) == len(declared)
    assert [listed for listed in declared if not hasattr(module, listed)] == []


@pytest.mark.parametrize("name", RUNTIME)
def test_all_lists_every_name_that_another_module_imports(name: str) -> None:
    used = {imported for module, imported in IMPORTED if module == name and f"{name}.{imported}" not in SOURCES}
    assert used - set(SOURCES[name].declared or ()) == set()


# -- the table of methods and the code ------------------------------------------------------------------------------


def test_every_role_in_the_table_has_its_code_and_no_code_is_left_out() -> None:
    assert {method.device_role for method in METHODS.values()} - {"-"} == set(DEVICE_ROLES)
    assert {method.cloud_role for method in METHODS.values()} - {"-"} == set(CLOUD_ROLES)


def test_every_rule_in_the_table_has_its_judge_and_no_judge_is_left_out() -> None:
    assert set(JUDGES) < set(RULES)
    for name in set(RULES) - set(JUDGES):
        assert make_rule(name, RULES[name].settings({}), lambda: torch.eye(4)) is not None
    with pytest.raises(ValueError, match="not one of single tokens"):
        make_rule("gumbel", {}, lambda: torch.eye(4))
