"""Settings dataclasses from the tables of a TOML file, with errors that name file, table and key."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_tables(path: Path, known: tuple[str, ...]) -> dict[str, Any]:
    """The document at `path`. Raises ValueError where it is not TOML or has a key outside `known`."""
    if not path.is_file():
        raise FileNotFoundError(f"no settings file {path}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    for name in document:
        if name not in known:
            raise ValueError(f"{path}: unknown table or setting {name!r}; known: {', '.join(known)}")
    return document


def settings_from(cls: type[T], path: Path, owner: str, table: Any, **extra: Any) -> T:
    """`cls(**table, **extra)` for a dataclass; lists become tuples. Raises ValueError naming file, table and key."""
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {owner} must be a table, got {table!r}")
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise ValueError(f"{path}: [{owner}] has no setting {name!r}; known: {', '.join(known)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    try:
        return cls(**values, **extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: [{owner}] {error}") from error
