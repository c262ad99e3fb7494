"""Errors of the data modules. Each also is the builtin that a caller would catch."""

from __future__ import annotations

from collections.abc import Sequence

from forgather.errors import ForgatherError, TrainingError, nearest


class DataError(TrainingError, ValueError):
    """Data that cannot be used as it stands."""

    code = "FG832"


class DataFileError(TrainingError, OSError):
    """A data file that is missing or cannot be read."""

    code = "FG830"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


def missing_column(name: str, columns: Sequence[str]) -> DataError:
    """Returns the error for a column that a data set does not have; it names those that exist."""
    return DataError(
        f"the data set has no column {name!r}",
        code="FG831",
        hint=nearest(name, list(columns)) or "columns: " + ", ".join(columns),
        expected=list(columns),
        found=name,
    )
