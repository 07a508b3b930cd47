"""The main job on the embedded bundle: a verifier, one prompt, a picture and its report. `make demo`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from cloud.process import running_verifier
from shared.errors import CiarError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="a 3d render of a red apple on a blue background")
    parser.add_argument("--output", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with running_verifier() as verifier:
            print(f"cloud-verifier listens on {verifier.address}; the device draws: {options.prompt}", flush=True)
            command = [sys.executable, "-m", "device.cli", "--server", verifier.address, "--prompt", options.prompt]
            status = subprocess.call([*command, "--seed", options.seed, "--output", str(options.output)])
    except CiarError as error:
        sys.exit(f"demo: {error}")
    print("the verifier stopped" if status == 0 else f"device-client failed with exit code {status}")
    sys.exit(status)


if __name__ == "__main__":
    main()
