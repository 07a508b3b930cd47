"""Settings dataclasses from the tables of a TOML file, with errors that name file, table and key."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_KINDS: dict[str, tuple[type, ...]] = {  # what TOML gives for an annotation; a float may be written without its point
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "Path": (str,),
    "tuple": (list,),
}


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
    types = {item.name: str(item.type) for item in fields(cls) if item.name not in extra}  # type: ignore[arg-type]
    for name, value in table.items():
        if name not in types:
            raise ValueError(f"{path}: [{owner}] has no setting {name!r}; known: {', '.join(types)}")
        _check_type(f"{path}: [{owner}] {name}", types[name], value)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    try:
        return cls(**values, **extra)
    except (TypeError, ValueError) as error:  # TypeError: a setting without a default is missing
        raise ValueError(f"{path}: [{owner}] {error}") from error


def _check_type(name: str, annotation: str, value: Any) -> None:
    kind = annotation.split("[")[0].split(" ")[0].removeprefix("<class '").rstrip("'>")
    wanted = _KINDS.get(kind.rsplit(".", 1)[-1])
    if wanted is None:
        raise ValueError(f"{name} cannot be set in a file")
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ValueError(f"{name} must be of type {wanted[-1].__name__}, got {value!r}")
