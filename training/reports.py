"""What validations leave behind: a line of JSON a step, and tables for people. Files are whole or as they were."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["add_step", "markdown_table", "write_text"]


def add_step(path: Path, step: int, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Adds a line {"step": step, **values} and returns all lines; lines of this step on, from before a kill, go."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    lines = [*(line for line in lines if line["step"] < step), {"step": step, **values}]
    write_text(path, "".join(f"{json.dumps(line)}\n" for line in lines))
    return lines


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose columns but the first hold numbers."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_text(path: Path, text: str) -> None:
    """Replaces a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
