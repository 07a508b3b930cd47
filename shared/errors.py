"""The errors a user can meet, each with the exit code of the programs that end because of it.

    CiarError (1)
    |-- SettingsError (2)      a setting, flag or prompt is not acceptable; also a ValueError
    |-- BundleError (3)        a bundle is missing, damaged or does not fit
    |-- LinkError (4)          the verifier cannot be reached, fell silent, or the link was lost for good
    |-- RefusedError (5)       the verifier answered, and refused what was asked
    |-- BusyError (6)          the verifier has no room for another generation
    |-- OutputError (7)        the picture or a file could not be written
    `-- ProtocolError (8)      the other side sent what the protocol does not allow

Exit code 0 is success, 130 an interrupt (Ctrl-C), and 70 a defect of this software.
"""

from __future__ import annotations

__all__ = [
    "EXIT_DEFECT",
    "EXIT_INTERRUPTED",
    "BundleError",
    "BusyError",
    "CiarError",
    "LinkError",
    "OutputError",
    "ProtocolError",
    "RefusedError",
    "SettingsError",
]

EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130


class CiarError(Exception):
    """Base of all errors that are reported to a user as one message."""

    exit_code = 1


class SettingsError(CiarError, ValueError):
    """A setting, flag, file of settings or prompt is not acceptable; the message names it."""

    exit_code = 2


class BundleError(CiarError):
    """A bundle is missing, damaged (a digest does not match) or does not fit the other side."""

    exit_code = 3


class LinkError(CiarError):
    """The verifier cannot be reached, fell silent, or the link was lost for good."""

    exit_code = 4


class RefusedError(CiarError):
    """The verifier answered and refused the request; the message is the verifier's."""

    exit_code = 5


class BusyError(CiarError):
    """The verifier has no room for another generation now."""

    exit_code = 6


class OutputError(CiarError):
    """The picture, the report or a cache file could not be written."""

    exit_code = 7


class ProtocolError(CiarError):
    """The other side sent what the protocol does not allow; also raised for damaged messages."""

    exit_code = 8
