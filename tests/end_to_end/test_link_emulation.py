"""The emulated link is what it says: calibrated delay and rate, a queue that pushes back, faults on command.

A loaded machine makes everything later, never earlier. So the arithmetic is checked on a clock of the test, and on real
sockets lower bounds are exact, and upper bounds loose and for the best of several tries.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.link import EmulatedLink, LinkSettings
from benchmarks.link.__main__ import main
from benchmarks.link.line import Line
from shared.errors import LinkError, SettingsError
from tests.end_to_end.programs import ENVIRONMENT, finish, wait_until

PATIENCE = 20.0
RESET = struct.pack("ii", 1, 0)


# -- arithmetic -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Timer:
    action: Callable[[], None] | None

    def cancel(self) -> None:
        self.action = None


@dataclass
class ManualClock:
    """Time that passes when the test says so."""

    time: float = 100.0
    stopped: bool = False
    timers: list[tuple[float, int, Timer]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def call_at(self, moment: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        heapq.heappush(self.timers, (moment, id(timer), timer))
        return timer

    def run(self, seconds: float = math.inf) -> None:
        """Lets so much time pass, or until nothing more happens."""
        end = self.time + seconds
        while self.timers and self.timers[0][0] <= end:
            moment, _, timer = heapq.heappop(self.timers)
            if timer.action:
                self.time = max(self.time, moment)
                timer.action()
        if end < math.inf:
            self.time = end


class Wire:
    """A line on such a clock, and what arrived: milliseconds since the start, and bytes."""

    def __init__(self, settings: LinkSettings, up: bool = True) -> None:
        clock: Any = ManualClock()
        self.clock, self.begun, self.arrivals = clock, clock.time, list[tuple[float, bytes]]()
        self.changes: list[bool] = []
        self.line = Line(clock, settings, up, lambda: self.changes.append(self.line.full))

    def send(self, data: bytes) -> None:
        self.line.put(memoryview(data), lambda piece: self.arrivals.append((self.milliseconds(), piece)))

    def milliseconds(self) -> float:
        return (self.clock.now() - self.begun) * 1e3

    def times(self) -> list[float]:
        return [moment for moment, _ in self.arrivals]


def test_a_byte_leaves_after_those_before_it_and_arrives_a_delay_later() -> None:
    wire = Wire(LinkSettings(20, rate_mbit=12))  # 1,500 bytes a millisecond
    wire.send(bytes(4500))
    wire.clock.run(0.001)
    wire.send(bytes(750))
    wire.clock.run()
    assert wire.times() == pytest.approx([21, 22, 23, 23.5])


def test_an_idle_line_saves_no_time_up() -> None:
    wire = Wire(LinkSettings(1, rate_mbit=12))
    wire.clock.run(5)
    wire.send(bytes(3000))
    wire.clock.run()
    assert wire.times() == pytest.approx([5002, 5003])


def test_each_direction_has_its_rate() -> None:
    for up, milliseconds in ((True, 1), (False, 0.5)):
        wire = Wire(LinkSettings(rate_mbit=(12, 24)), up)
        wire.send(bytes(1500))
        wire.clock.run()
        assert wire.times() == pytest.approx([milliseconds])


def test_a_line_without_a_limit_only_delays() -> None:
    wire = Wire(LinkSettings(7))
    wire.send(bytes(50_000))
    wire.clock.run()
    assert wire.times() == pytest.approx([7])


def test_the_queue_fills_and_has_room_again_before_anything_arrives() -> None:
    wire = Wire(LinkSettings(1000, rate_mbit=12, queue_bytes=6000))
    wire.send(bytes(3000))
    assert (wire.line.full, wire.line.room()) == (False, pytest.approx(3000, abs=1))
    wire.send(bytes(3000))
    assert (wire.line.full, wire.line.room()) == (True, 0)
    wire.clock.run(0.00099)
    assert wire.line.full
    wire.clock.run(0.0001)
    assert not wire.line.full
    assert wire.line.room() >= 1500
    assert (wire.changes, wire.arrivals) == ([True, False], [])


def test_what_is_on_its_way_is_bounded_where_no_rate_bounds_it() -> None:
    wire, sent = Wire(LinkSettings(30_000)), 0
    while not wire.line.full:
        wire.send(bytes(1 << 20))
        sent += 1
    assert sent == 16
    wire.clock.run(29.9)
    assert wire.line.full
    wire.clock.run(0.2)
    assert not wire.line.full


def test_jitter_varies_the_delay_evenly_and_lets_nothing_overtake() -> None:
    wire = Wire(LinkSettings(20, jitter_ms=15, seed=3))
    sent = []
    for gap in [1.0] * 400 + [0.001] * 400:
        sent.append(wire.milliseconds())
        wire.send(len(sent).to_bytes(2, "big"))
        wire.clock.run(gap)
    wire.clock.run()
    assert [int.from_bytes(data, "big") for _, data in wire.arrivals] == list(range(1, 801))
    delays = [arrived - begun for arrived, begun in zip(wire.times(), sent, strict=True)]
    assert 5 <= min(delays) < 7
    assert 33 < max(delays) <= 35 + 1e-6
    assert statistics.mean(delays[:400]) == pytest.approx(20, abs=1.5)
    assert statistics.mean(delays[400:]) > 25


def test_other_settings_count_from_then_on() -> None:
    wire = Wire(LinkSettings(20, rate_mbit=12))
    wire.send(bytes(1500))
    wire.line.settings = LinkSettings(5, rate_mbit=1.2)
    wire.send(bytes(1500))
    wire.clock.run(1)
    wire.send(bytes(1500))
    wire.clock.run()
    assert wire.times() == pytest.approx([21, 21, 1015])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"delay_ms": -1}, "delay_ms"),
        ({"delay_ms": math.nan}, "delay_ms"),
        ({"delay_ms": 1e6}, "delay_ms"),
        ({"delay_ms": 5, "jitter_ms": 6}, "jitter_ms"),
        ({"rate_mbit": 0}, "rate_mbit"),
        ({"rate_mbit": math.inf}, "rate_mbit"),
        ({"rate_mbit": (1, -1)}, "rate_mbit"),
        ({"rate_mbit": (1, 2, 3)}, "rate_mbit"),
        ({"queue_bytes": 1499}, "queue_bytes"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=f"^{field}: "):
        LinkSettings(**values)


# -- calibration on sockets -----------------------------------------------------------------------------------------

Ends = tuple[socket.socket, socket.socket]
Dial = Callable[[EmulatedLink], Ends]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Where the link leads."""
    with socket.create_server(("127.0.0.1", 0)) as result:
        result.settimeout(PATIENCE)
        yield result


@pytest.fixture
def target(server: socket.socket) -> int:
    """The port of it."""
    port: int = server.getsockname()[1]
    return port


@pytest.fixture
def dial(server: socket.socket) -> Iterator[Dial]:
    """Makes a connection over a link; gives the ends, near and far."""
    ends: list[socket.socket] = []

    def connect(link: EmulatedLink) -> Ends:
        ends.append(call(link))
        ends.append(server.accept()[0])
        for end in ends[-2:]:
            end.settimeout(PATIENCE)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ends[-2], ends[-1]

    yield connect
    for end in ends:
        end.close()


def call(link: EmulatedLink) -> socket.socket:
    return socket.create_connection((link.host, link.port), timeout=PATIENCE)


def receive(end: socket.socket, count: int) -> bytes:
    """So many bytes, or those before the end."""
    data = bytearray()
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return bytes(data)


def cross(sender: socket.socket, receiver: socket.socket, count: int = 1) -> float:
    """Seconds that some bytes take."""
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        if count > 1000:  # more than buffers are sure to take
            pool.submit(sender.sendall, bytes(count))
        else:
            sender.sendall(bytes(count))
        assert len(receive(receiver, count)) == count
        return time.monotonic() - begun


def silent(end: socket.socket, seconds: float = 0.15) -> bool:
    """Nothing comes, not even an end."""
    end.settimeout(seconds)
    try:
        end.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE)
    return False


def push(end: socket.socket, most: int, seconds: float = 0.2) -> int:
    """Sends until it blocks for a while; gives the bytes that went away."""
    end.settimeout(seconds)
    sent = 0
    while sent < most:
        try:
            sent += end.send(bytes(1 << 16))
        except TimeoutError:
            break
    end.settimeout(PATIENCE)
    return sent


@pytest.mark.parametrize("delay_ms", [0.0, 3.0, 20.0])
def test_a_round_trip_takes_twice_the_delay(target: int, dial: Dial, delay_ms: float) -> None:
    with EmulatedLink(target, LinkSettings(delay_ms)) as link:
        near, far = dial(link)
        trips = [1e3 * (cross(near, far) + cross(far, near)) for _ in range(12)]
    assert min(trips) >= 2 * delay_ms
    assert min(trips) <= 2 * delay_ms + 30
    assert statistics.median(trips) <= 2 * delay_ms + 120


def test_the_first_byte_waits_for_the_handshake_too(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(30)) as link:
        begun = time.monotonic()
        near, far = dial(link)
        near.sendall(b"n")
        far.sendall(b"f")
        receive(far, 1)
        assert 0.09 <= time.monotonic() - begun <= 1
        receive(near, 1)
        assert 0.12 <= time.monotonic() - begun <= 1


@pytest.mark.parametrize(("up", "size"), [(True, 300_000), (False, 150_000)])
def test_throughput_is_the_rate(target: int, dial: Dial, up: bool, size: int) -> None:
    with EmulatedLink(target, LinkSettings(5, rate_mbit=(4, 2), queue_bytes=100_000)) as link:
        near, far = dial(link)
        cross(near, far)
        ends = (near, far) if up else (far, near)
        ideal = size * 8e-6 / (4 if up else 2) + 5e-3
        seconds = [cross(*ends, size)]
        while min(seconds) > 1.1 * ideal and len(seconds) < 6:
            seconds.append(cross(*ends, size))
    assert min(seconds) >= ideal
    assert min(seconds) <= 1.1 * ideal, seconds


def test_connections_share_the_rate(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(rate_mbit=8)) as link, ThreadPoolExecutor(2) as pool:
        pairs = [dial(link), dial(link)]
        begun = time.monotonic()
        list(pool.map(lambda pair: cross(*pair, 100_000), pairs))
        assert time.monotonic() - begun >= 0.2


# -- nothing is lost or made up -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [LinkSettings(), LinkSettings(4, rate_mbit=(40, 60), queue_bytes=40_000), LinkSettings(5, jitter_ms=5)],
    ids=["plain", "narrow", "jitter"],
)
def test_a_megabyte_each_way_at_once_arrives_as_it_was_sent(target: int, dial: Dial, settings: LinkSettings) -> None:
    size = 1_000_000
    payloads = [random.Random(seed).randbytes(size) for seed in (1, 2)]
    with EmulatedLink(target, settings) as link, ThreadPoolExecutor(4) as pool:
        near, far = dial(link)
        sending = [pool.submit(end.sendall, data) for end, data in zip((near, far), payloads, strict=True)]
        there, back = pool.submit(receive, far, size), pool.submit(receive, near, size)
        received = [hashlib.sha256(data.result()).digest() for data in (there, back)]
        assert [future.result() for future in sending] == [None, None]
        assert received == [hashlib.sha256(data).digest() for data in payloads]
        assert link.counters() == {"bytes_up": size, "bytes_down": size, "connections": 1}


def test_an_end_that_has_sent_all_may_still_receive(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(5, rate_mbit=20)) as link:
        near, far = dial(link)
        near.sendall(bytes(50_000))
        near.shutdown(socket.SHUT_WR)
        assert len(receive(far, 60_000)) == 50_000
        far.sendall(bytes(50_000))
        far.close()
        assert len(receive(near, 60_000)) == 50_000


def test_an_end_that_resets_resets_the_other_a_delay_later(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(30)) as link:
        near, far = dial(link)
        cross(near, far)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        begun = time.monotonic()
        near.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        assert time.monotonic() - begun >= 0.03


def test_an_end_that_was_reset_unnoticed_hinders_nobody(
    target: int, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    with EmulatedLink(target, LinkSettings(rate_mbit=(10, 0.1), queue_bytes=20_000)) as link:
        near, far = dial(link)
        push(far, 10_000_000)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        far.close()
        near.shutdown(socket.SHUT_WR)
        cross(*dial(link))
    assert caplog.text == ""


# -- back pressure --------------------------------------------------------------------------------------------------


def test_a_full_queue_stops_the_sender(target: int, dial: Dial) -> None:
    settings = LinkSettings(rate_mbit=1, queue_bytes=20_000)
    with EmulatedLink(target, settings) as link:
        near, _ = dial(link)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        begun = time.monotonic()
        sent = push(near, 10_000_000)
        taken, most = link.bytes_up, 20_000 + 125_000 * (time.monotonic() - begun)
    assert taken <= most
    assert taken >= 20_000 - 1500
    assert sent < 1_000_000, "the kernel's buffers take some more"


def test_a_receiver_that_does_not_read_stops_the_sender_and_nobody_else(target: int, dial: Dial) -> None:
    with EmulatedLink(target) as link:
        near, far = dial(link)
        sent = push(near, 100_000_000)
        assert sent < 30_000_000
        assert cross(*dial(link), 100_000) < 10
        assert len(receive(far, sent)) == sent


# -- faults ---------------------------------------------------------------------------------------------------------


def test_cut_resets_what_is_there_and_what_comes_until_it_is_restored(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(50)) as link:
        ends = dial(link)
        cross(*ends)
        ends[0].sendall(b"never seen")
        wait_until(lambda: link.bytes_up == 11, "the link has it")
        link.cut()
        for end in ends:
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        with pytest.raises(ConnectionResetError), call(link) as refused:
            refused.recv(1)
        link.restore()
        cross(*dial(link))
        assert link.counters() == {"bytes_up": 12, "bytes_down": 0, "connections": 3}


def test_reset_lets_new_connections_through(target: int, dial: Dial) -> None:
    with EmulatedLink(target) as link:
        near, _ = dial(link)
        link.reset()
        with pytest.raises(ConnectionResetError):
            near.recv(1)
        cross(*dial(link))


def test_a_stalled_link_holds_everything_and_then_goes_on_at_its_rate(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(5, rate_mbit=4)) as link:
        near, far = dial(link)
        cross(near, far)
        link.stall()
        near.sendall(b"held" + bytes(99_996))
        near.close()
        assert silent(far)
        begun = time.monotonic()
        link.restore()
        assert receive(far, 200_000) == b"held" + bytes(99_996)
        assert time.monotonic() - begun >= 0.2


def test_a_stall_in_the_middle_delays_by_its_length(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(150)) as link:
        near, far = dial(link)
        cross(near, far)
        begun = time.monotonic()
        near.sendall(b"x")
        wait_until(lambda: link.bytes_up == 2, "it is on its way")
        link.stall()
        stalled = time.monotonic()
        assert silent(far, 0.3)
        stalled = time.monotonic() - stalled
        link.restore()
        receive(far, 1)
        assert time.monotonic() - begun >= 0.15 + stalled


def test_a_stall_may_let_closings_through(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(5)) as link:
        (near, far), (calling, called) = dial(link), dial(link)
        link.stall(hold_closing=False)
        near.sendall(b"gone")
        near.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        link.restore()
        cross(calling, called)


def test_a_lost_connection_swallows_all_and_a_new_one_does_not(target: int, dial: Dial) -> None:
    with EmulatedLink(target) as link:
        near, far = dial(link)
        cross(near, far)
        link.lose()
        near.sendall(bytes(1000))
        near.close()
        assert silent(far)
        link.restore()
        assert silent(far)
        cross(*dial(link))


def test_a_verifier_that_is_not_there_resets_and_is_said(
    deaf_port: int, target: int, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    with EmulatedLink(deaf_port) as link:
        with pytest.raises(ConnectionResetError), call(link) as refused:
            refused.recv(1)
        assert f"127.0.0.1:{deaf_port}: " in caplog.text
        link.target = target
        cross(*dial(link))


def test_the_link_may_become_another(target: int, dial: Dial) -> None:
    with EmulatedLink(target, LinkSettings(2)) as link:
        near, far = dial(link)
        cross(near, far)
        link.settings = replace(link.settings, delay_ms=100)
        assert cross(near, far) >= 0.1
        link.settings = LinkSettings()
        assert min(cross(near, far) for _ in range(5)) < 0.05


def test_a_port_in_use_is_said(target: int) -> None:
    with pytest.raises(LinkError, match=f"127.0.0.1:{target}: "), EmulatedLink(target, listen=("127.0.0.1", target)):
        pass


def test_a_link_that_would_lead_to_itself_is_refused(target: int, dial: Dial, deaf_port: int) -> None:
    with EmulatedLink(target) as link:
        for host in ("127.0.0.1", "localhost"):
            link.target_host = host
            with pytest.raises(LinkError, match=f"^{host}:{link.port}: "):
                link.target = link.port
        cross(*dial(link))
    with socket.socket() as taken:  # so that nobody has the port but a listener that asks for it
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        listen = taken.getsockname()
        with pytest.raises(LinkError, match=f"^127.0.0.1:{listen[1]}: "), EmulatedLink(listen[1], listen=listen):
            pass
        with EmulatedLink(deaf_port, listen=listen):
            pass
    with EmulatedLink(target, listen=("0.0.0.0", 0)) as link, pytest.raises(LinkError, match=r"^127\.0\.0\.1:"):
        link.target = link.port


# -- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(target: int) -> Iterator[subprocess.Popen[str]]:
    """The link as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.link", "--to", f"127.0.0.1:{target}", "--delay-ms", "30"]
    process = subprocess.Popen(
        [*command, "--rate-mbit", "10/20", "--queue-kib", "64"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def answer(program: subprocess.Popen[str], command: str) -> str:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{command}\n")
    program.stdin.flush()
    return program.stdout.readline().strip()


def test_the_program_obeys(program: subprocess.Popen[str], server: socket.socket) -> None:
    assert program.stdout is not None
    said = program.stdout.readline()
    assert "delay_ms=30.0, rate_mbit=(10.0, 20.0), queue_bytes=65536" in said
    port = int(said.split(",")[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as near, server.accept()[0] as far:
        assert cross(near, far, 1000) >= 0.03
        assert json.loads(answer(program, "counters")) == {"bytes_up": 1000, "bytes_down": 0, "connections": 1}
        assert answer(program, "cut") == "cut: done"
        with pytest.raises(ConnectionResetError):
            near.recv(1)
    assert answer(program, "mend\nrestore") == "restore: done"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as near, server.accept()[0] as far:
        cross(near, far)
        assert answer(program, "stall") == "stall: done"
        near.sendall(b"x")
        assert silent(far)
    assert answer(program, "quit") == ""
    result = finish(program)
    assert (result.code, result.stdout) == (0, "")
    assert result.stderr == "link: no command 'mend'; there are cut, reset, stall, lose, restore, counters, quit\n"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--to", "7"], 2, "argument --to: HOST:PORT is needed, not '7'"),
        (["--to", "h:70000"], 2, "argument --to: HOST:PORT is needed"),
        ([], 2, "required: --to"),
        (["--to", "h:1", "--rate-mbit", "fast"], 2, "argument --rate-mbit: a number or UP/DOWN is needed, not 'fast'"),
        (["--to", "h:1", "--rate-mbit", "1/2/3"], 2, "argument --rate-mbit: "),
        (["--to", "h:1", "--rate-mbit", "0"], 2, "link: rate_mbit: above 0 is needed"),
        (["--to", "h:1", "--delay-ms", "-5"], 2, "link: delay_ms: "),
        (["--to", "h:1", "--queue-kib", "1"], 2, "link: queue_bytes: "),
    ],
)
def test_flags_that_make_no_sense_are_named(
    flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == code
    assert said in capsys.readouterr().err


def test_the_program_says_when_its_address_is_taken(target: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--to", "127.0.0.1:1", "--listen", f"127.0.0.1:{target}"])
    assert caught.value.code == LinkError.exit_code
    assert f"link: 127.0.0.1:{target}: the link cannot listen there" in capsys.readouterr().err
