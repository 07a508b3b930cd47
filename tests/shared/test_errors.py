"""Every error a user can meet is one family, and each ends the programs with an exit code of its own."""

from __future__ import annotations

import pytest

from shared import errors
from shared.errors import EXIT_DEFECT, EXIT_INTERRUPTED, CiarError, SettingsError

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_as_the_base_and_keeps_its_message(kind: type[CiarError]) -> None:
    with pytest.raises(CiarError, match="what is wrong"):
        raise kind("what is wrong")


def test_exit_codes_differ_from_each_other_and_from_success_interrupt_and_defect() -> None:
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {0, EXIT_DEFECT, EXIT_INTERRUPTED}
    assert all(0 < code < 128 for code in codes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_modules_tree_names_every_error_with_its_exit_code(kind: type[CiarError]) -> None:
    assert f"{kind.__name__} ({kind.exit_code})" in str(errors.__doc__)


def test_a_settings_error_is_a_value_error_so_that_plain_python_callers_catch_it() -> None:
    assert issubclass(SettingsError, ValueError)
    assert not any(issubclass(kind, ValueError) for kind in KINDS if kind is not SettingsError)
