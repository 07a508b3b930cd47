"""The link as a program: `python -m benchmarks.link --to 127.0.0.1:50051 --delay-ms 20 --rate-mbit 10`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from benchmarks.link.emulated import EmulatedLink
from benchmarks.link.settings import LinkSettings
from shared.errors import EXIT_INTERRUPTED, CiarError

_EPILOG = """commands, one a line of standard input:
  cut       reset all connections, and all that come until restore
  reset     reset all connections; new ones are served
  stall     hold everything back, without a word, until restore
  lose      swallow what is sent on the present connections, for good; new ones are served
  restore   end cut and stall
  counters  print bytes of TCP payload that came from either side, and connections, as JSON
  quit      end; the end of standard input does not end the link"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.link",
        description="A TCP relay with the delay, rate and bounded queue of a link, for kernels without netem.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, defaults = result.add_argument, LinkSettings()
    add("--listen", type=_address, default=("127.0.0.1", 0), metavar="H:P", help="for devices; default: a free port")
    add("--to", type=_address, required=True, metavar="H:P", help="the verifier")
    add("--delay-ms", type=float, default=defaults.delay_ms, metavar="X", help="one way; default: %(default)g")
    add("--jitter-ms", type=float, default=defaults.jitter_ms, metavar="X", help="evenly, up and down; default: none")
    add("--rate-mbit", type=_rate, metavar="R", help="10^6 bits a second, or UP/DOWN; default: no limit")
    add("--queue-kib", type=float, default=defaults.queue_bytes / 1024, metavar="N", help="what may wait for the line, "
        "in each direction; default: %(default)g")  # fmt: skip
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of the jitter; default: %(default)s")
    return result


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"HOST:PORT is needed, not {text!r}")
    return host.strip("[]"), int(port)


def _rate(text: str) -> float | tuple[float, float]:
    try:
        up, *down = map(float, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or UP/DOWN is needed, not {text!r}") from None
    if len(down) > 1:
        raise argparse.ArgumentTypeError(f"one number or two are needed, not {text!r}")
    return (up, down[0]) if down else up


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the program."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        settings = LinkSettings(
            options.delay_ms, options.rate_mbit, round(options.queue_kib * 1024), options.jitter_ms, options.seed
        )
        with EmulatedLink(options.to[1], settings, options.to[0], options.listen) as link:
            _say(f"listening on {link.address}, to {options.to[0]}:{options.to[1]}, {settings}")
            obey(link, sys.stdin)
    except CiarError as error:
        print(f"link: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def obey(link: EmulatedLink, lines: TextIO) -> None:
    """Carries out commands until `quit`; each is answered by a line."""
    commands: dict[str, Callable[[], None]] = {
        "cut": link.cut,
        "reset": link.reset,
        "stall": link.stall,
        "lose": link.lose,
        "restore": link.restore,
        "counters": lambda: _say(json.dumps(link.counters())),
    }
    for line in lines:
        word = line.strip()
        if word == "quit":
            return
        if word in commands:
            commands[word]()
            if word != "counters":
                _say(f"{word}: done")
        elif word:
            print(f"link: no command {word!r}; there are {', '.join(commands)}, quit", file=sys.stderr, flush=True)
    threading.Event().wait()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
