"""What goes wrong with training data: a source that cannot be had, a file that cannot be used."""

from shared.errors import CiarError


class DataError(CiarError):
    """Training data is missing or unusable. The message says what, where, and what to do."""

    exit_code = 2
