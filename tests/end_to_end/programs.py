"""The two programs as processes, and a device that speaks the protocol by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos import PROTOCOL, ciar_pb2_grpc
from protos import ciar_pb2 as pb
from shared.bundle import Manifest

__all__ = [
    "GENERATE",
    "Client",
    "Result",
    "Verifier",
    "channel_to",
    "converse",
    "finish",
    "opening",
    "wait_until",
]

PATIENCE = 30.0
GENERATE = "/ciar.v1.Verifier/Generate"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Waits for something that sends no event of its own."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


class Verifier:
    """A `cloud-verifier` process.

    Args:
        bundle: its bundle.
        flags: further flags.
        port: where it listens; 0 for a free port.
    """

    def __init__(self, bundle: Path, *flags: str, port: int = 0) -> None:
        self.port = port
        command = [sys.executable, "-m", "cloud.cli", "--bundle", str(bundle), "--port", str(port)]
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32", "--threads", "1", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self._reader = threading.Thread(target=self._read, name="log", daemon=True)
        self._reader.start()

    def ready(self) -> Verifier:
        """Waits until it serves."""
        self.port = int(self.logged(r"serving bundle .* on [^ ]*:(\d+)$")[1])
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        with self._news:
            return "".join(self._lines)

    def logged(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Waits for a line of the log; fails when the process ends without it."""
        found: list[re.Match[str]] = []

        def seen() -> bool:
            found.extend(match for line in self._lines if (match := re.search(pattern, line.rstrip())))
            return bool(found) or self._ended

        with self._news:
            self._news.wait_for(seen, seconds)
        assert found, f"no line like {pattern!r} in the verifier's log:\n{self.log}"
        return found[0]

    def active(self) -> int:
        """Pictures in progress, as `Describe` says."""
        with channel_to(self.address) as channel:
            description: pb.Description = ciar_pb2_grpc.VerifierStub(channel).Describe(pb.DescribeRequest(), timeout=10)
        return description.active

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """Sends a signal, waits for the end and returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@dataclass
class Client:
    """Runs `device-client` in a folder.

    Args:
        folder: where it works; pictures, and its cache of bundles, lie there.
        flags: flags of every run.
        shell: a shell command that prepares the process, such as a limit.
        python: the interpreter.
    """

    folder: Path
    flags: list[str] = field(default_factory=list)
    shell: str = ""
    python: str = sys.executable
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def close(self) -> None:
        """Ends what a failed test left running."""
        for process in self.started:
            if process.returncode is None:
                process.kill()
                process.communicate()

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(self, *flags: str, prompt: str | bytes = "a red cat", **streams: Any) -> subprocess.Popen[str]:
        """Starts it with stdout and stderr piped."""
        command = [self.python, "-m", "device.cli", "--prompt", prompt, *self.flags, *flags]
        if self.shell:
            command = ["/bin/sh", "-c", f'{self.shell} && exec "$@"', "sh", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        environment = ENVIRONMENT | {"CIAR_CACHE": str(self.cache), "HOME": str(self.folder)}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env=environment, text=True, **pipes))
        return self.started[-1]

    def run(self, *flags: str, prompt: str | bytes = "a red cat", seconds: float = PATIENCE) -> Result:
        """Runs it to its end."""
        return finish(self.start(*flags, prompt=prompt), seconds)

    def draw(self, *flags: str, **options: Any) -> dict[str, Any]:
        """Draws a picture and returns the report."""
        result = self.run("--json", *flags, **options)
        assert result.code == 0, result.stderr
        report: dict[str, Any] = json.loads(result.stdout)
        return report


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str

    def failed(self, code: int, *words: str) -> None:
        """Asserts that it ended with a code and one message, which holds the words, and without a traceback."""
        assert self.code == code, f"exit code {self.code}, not {code}: {self.stderr}"
        assert "Traceback" not in self.stderr
        assert self.stdout == ""
        message = self.stderr.strip().splitlines()[-1]
        assert re.match(r"(device-client|cloud-verifier): (error: )?", message), self.stderr
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"


def finish(process: subprocess.Popen[str], seconds: float = PATIENCE) -> Result:
    """Waits for the end of a program; fails and ends it when it does not come in time."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Result(process.returncode, stdout, stderr)


@contextlib.contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    """A channel of its own, past any proxy."""
    with grpc.insecure_channel(
        address, options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield channel


def opening(manifest: Manifest, **changes: Any) -> pb.DeviceMessage:
    """A sound opening message of `ar`, with changes."""
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "bundle_digest": manifest.digest,
        "codebook_digest": manifest.codebook_digest,
        "rows": manifest.grid.rows,
        "cols": manifest.grid.cols,
        "vocabulary": manifest.vocabulary,
        "generation": "by-hand",
        "prompt": "a red cat",
        "seed": 1,
        "method": "ar",
        "sampling": pb.Sampling(temperature=1.0, top_p=1.0, guidance=1.0),
    }
    return pb.DeviceMessage(open=pb.Open(**fields | changes))


def converse(channel: grpc.Channel, messages: Iterable[Any], seconds: float = 20.0) -> list[pb.CloudMessage]:
    """Sends messages (or raw bytes) on one stream, keeps it open, and returns the replies up to its end.

    Raises:
        grpc.RpcError: the verifier ended the stream with an error.
    """
    ended = threading.Event()

    def requests() -> Iterator[bytes]:
        for message in messages:
            yield message if isinstance(message, bytes) else message.SerializeToString()
        ended.wait(seconds)

    generate: Any = channel.stream_stream(GENERATE, response_deserializer=pb.CloudMessage.FromString)
    call = generate(requests(), timeout=seconds)
    try:
        return list(call)
    finally:
        ended.set()
        call.cancel()
