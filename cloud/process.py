"""`cloud-verifier` as a child process on a free port: for the demo, benchmarks, evaluation and tests."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import LinkError

__all__ = ["VerifierProcess", "running_verifier"]

_SERVING = re.compile(r"serving bundle .* on .*:(\d+)$")


@dataclass
class VerifierProcess:
    """A running verifier.

    Args:
        process: the child.
        log: its log lines so far.
        port: where it listens.
    """

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    port: int = 0
    _ready: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def follow(self) -> None:
        """Reads the log until the child ends; runs on a thread of its own."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := _SERVING.search(self.log[-1]):
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()

    def wait_until_serving(self, seconds: float) -> None:
        """Raises LinkError, with the child's last words, when it does not serve in time."""
        if not self._ready.wait(seconds) or not self.port:
            raise LinkError("the verifier did not start: " + " / ".join(self.log[-3:]))


@contextlib.contextmanager
def running_verifier(
    bundle: Path | None = None, arguments: Sequence[str] = (), seconds: float = 120.0, **options: Any
) -> Iterator[VerifierProcess]:
    """Runs a verifier on a free port of this host and stops it at the end.

    Args:
        bundle: its bundle; None for the embedded one.
        arguments: further flags of `cloud-verifier`.
        seconds: time it may take to start, and then to stop.
        options: for `subprocess.Popen`.

    Raises:
        LinkError: it did not start.
    """
    command = [sys.executable, "-m", "cloud.cli", "--port", "0", *arguments]
    command += ["--bundle", str(bundle)] if bundle else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
    verifier = VerifierProcess(process)
    reader = threading.Thread(target=verifier.follow, name="verifier log", daemon=True)
    reader.start()
    try:
        verifier.wait_until_serving(seconds)
        yield verifier
    finally:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        assert process.stderr is not None
        process.stderr.close()
