"""The device's models say what a bundle lacks, or what in it belongs to another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from device.graphs import DeviceModels
from shared.bundle import Bundle
from shared.calibration import CALIBRATION, read_calibration
from shared.errors import BundleError
from training.toy import write_toy_bundle


def test_a_bundle_without_calibration_says_what_to_do_without(tmp_path: Path) -> None:
    models = DeviceModels(write_toy_bundle(tmp_path / "plain", features=False))
    with pytest.raises(BundleError, match=r"plain: this bundle has no calibration\.json.*--threshold-mode absolute"):
        _ = models.calibration


def test_a_calibration_of_another_grid_than_its_bundles_is_refused(tmp_path: Path, toy: Bundle) -> None:
    bundle = Bundle.open(shutil.copytree(toy.folder, tmp_path / "copy"))
    content = read_calibration(bundle.path(CALIBRATION))
    content["rows"] = {name: rows[:3] for name, rows in content["rows"].items()}
    bundle.path(CALIBRATION).write_text(json.dumps(content))
    with pytest.raises(BundleError, match=rf"copy/{CALIBRATION}: it is of 3 rows of tokens, the bundle's grid is 4x4"):
        _ = DeviceModels(bundle).calibration
