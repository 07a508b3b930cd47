"""Generates the stubs from `ciar.proto`: `python -m protos.generate`, or `--check` to fail when they are stale."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUBS = ("ciar_pb2.py", "ciar_pb2.pyi", "ciar_pb2_grpc.py")


def generate(folder: Path) -> None:
    """Writes the stubs below `folder`/protos."""
    from grpc_tools import protoc

    arguments = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *arguments, "protos/ciar.proto"]):
        raise SystemExit("protoc failed")


def stale() -> list[str]:
    """Names of checked-in stubs that differ from what the generator writes now."""
    with tempfile.TemporaryDirectory() as temporary:
        generate(Path(temporary))
        fresh = Path(temporary) / "protos"
        return [name for name in STUBS if (fresh / name).read_bytes() != (ROOT / "protos" / name).read_bytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the stubs are stale")
    if not parser.parse_args().check:
        return generate(ROOT)
    if names := stale():
        sys.exit(f"stale stubs: {', '.join(names)}; run `make protos`")


if __name__ == "__main__":
    main()
