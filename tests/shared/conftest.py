"""A tiny bundle, written by the real export code, that all tests of this folder read."""

from __future__ import annotations

import pytest

from shared.bundle import Bundle


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Five visual tokens on a 3x4 grid. Read only: tests that damage files copy it first."""
    # The export code takes seconds to import: only the tests that need a bundle pay for it.
    from training.toy import write_toy_bundle

    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", vocabulary=5, rows=3, cols=4, seed=1)
