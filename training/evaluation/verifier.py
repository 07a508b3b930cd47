"""A `cloud-verifier` of this machine, for as long as pictures are drawn with it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import LinkError

__all__ = ["VerifierProcess", "running_verifier"]

_START_S = 120.0
_STOP_S = 40.0
_SERVING = re.compile(r"serving bundle .* on [^ ]*:(\d+)$", re.MULTILINE)


class VerifierProcess:
    """A started process.

    Args:
        process: the process.
        log: file with what it said.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self.address = ""

    def wait_ready(self, seconds: float = _START_S) -> None:
        """Waits until it serves.

        Raises:
            LinkError: it ended, or does not serve in time; the message has its last words.
        """
        deadline = time.monotonic() + seconds
        while not (match := _SERVING.search(self._log.read_text(encoding="utf-8", errors="replace"))):
            self.check()
            if time.monotonic() > deadline:
                raise LinkError(f"cloud-verifier does not serve after {seconds:g} s: {self._last_words()}")
            time.sleep(0.05)
        self.address = f"127.0.0.1:{match[1]}"

    def check(self) -> None:
        """Raises LinkError with its last words if it ended."""
        if (code := self._process.poll()) is not None:
            raise LinkError(f"cloud-verifier ended with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """Ends it: in order, or by force when it does not listen."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{said[-1] if said else 'it said nothing'} (log: {self._log})"


@contextmanager
def running_verifier(bundle: Path, log: Path, device: str, threads: int, sessions: int) -> Iterator[VerifierProcess]:
    """Starts the real program on a free port of this machine, and ends it with the block.

    Args:
        bundle: its bundle.
        log: file for what it says, written anew.
        device, threads: see `cloud-verifier --help`.
        sessions: pictures at once.

    Raises:
        LinkError: it does not start.
    """
    command = [sys.executable, "-m", "cloud.cli", "--bundle", str(bundle), "--port", "0", "--device", device]
    command += ["--threads", str(threads), "--max-sessions", str(sessions)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    verifier = VerifierProcess(process, log)
    try:
        verifier.wait_ready()
        yield verifier
    finally:
        verifier.stop()
