"""`cloud-verifier`: serves a bundle's target to devices."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from cloud.server import Server, ServerSettings
from cloud.verifier import Verifier, VerifierSettings
from shared.bundle import Bundle, default_bundle_folder
from shared.errors import EXIT_DEFECT, EXIT_INTERRUPTED, CiarError

__all__ = ["main"]

log = logging.getLogger("cloud")

_EPILOG = """exit codes: 0 stopped on request, 2 a flag is not acceptable, 3 the bundle is missing or damaged,
4 the address cannot be had (port in use)"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="cloud-verifier",
        description="Serves a bundle's target model to devices: samples, verifies and corrects visual tokens.",
        epilog=_EPILOG,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--bundle", type=Path, default=default_bundle_folder(), metavar="DIR", help="folder with the models")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (there is no encryption yet)")
    add("--port", type=int, default=50051, help="port to listen on; 0 takes a free one")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where the target computes")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="precision of the target")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of the target; 0 leaves it to torch")
    add("--max-sessions", type=int, default=8, metavar="N", help="pictures at once")
    add("--idle-timeout", type=float, default=60.0, metavar="S", help="a device silent for so long loses its slot")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="time for pictures in progress after SIGTERM")
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="prompts are never logged")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `cloud-verifier`."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(options))
    except CiarError as error:
        print(f"cloud-verifier: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception:
        log.exception("this is a defect of the program; please report it")
        sys.exit(EXIT_DEFECT)


async def _serve(options: argparse.Namespace) -> None:
    settings = ServerSettings(options.host, options.port, options.idle_timeout, options.drain_timeout)
    computing = VerifierSettings(options.device, options.dtype, options.threads, options.max_sessions)
    verifier = Verifier(Bundle.open(options.bundle), computing)
    stop = _stop_on_signal()
    try:
        server = Server(verifier, settings)
        port = await server.start()
        manifest, engine = verifier.bundle.manifest, verifier.scheduler.engine
        log.info("serving bundle %s (%.12s) on %s:%d", manifest.name, manifest.digest, options.host, port)
        log.info("target on %s in %s, %d sessions at most", engine.device, engine.dtype, computing.max_sessions)
        await stop.wait()
        _restore_signals()
        log.info("stopping: pictures in progress may end within %g s", settings.drain_seconds)
        await server.stop()
    finally:
        verifier.close()


def _stop_on_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _restore_signals() -> None:
    """From now on a signal ends the process at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


if __name__ == "__main__":
    main()
