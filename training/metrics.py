"""The training log: one JSON object a line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class MetricsLog:
    """Appends figures to a file; lines beyond the step a run resumes from are dropped, so no step appears twice."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _line_step(line) <= step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)

    def write(self, step: int, values: dict[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 1), **{name: round(v, 6) for name, v in values.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _line_step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):  # a line cut short by a kill
        return float("inf")
