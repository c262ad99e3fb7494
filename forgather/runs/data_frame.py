"""`forgather.runs(folder)`: the runs below a folder as a pandas DataFrame."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from forgather.errors import ProjectError
from forgather.runs.condition import parse_condition
from forgather.runs.run_table import read_table


def data_frame(
    folder: str | os.PathLike[str] = ".", *, where: str | Sequence[str] = (), sort: str | None = None
) -> Any:
    """Returns the runs below a folder as a `pandas.DataFrame`, with the columns of `fgcli runs --csv`.

    The columns are the facts of a run, the last value of each metric by its name, and the values of the config that
    differ between the runs, by path.

    Args:
        folder: the folder.
        where: a condition such as "optimizer.lr<1e-3", or several, which all must be fulfilled.
        sort: the name of a value to sort by, after a minus sign for the greatest first; None for the newest first.

    Raises:
        ProjectError: FG500 if the folder does not exist; FG501 if no run has a value of a name; FG502 if a text is no
            condition; FG505 if pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise ProjectError(
            "forgather.runs() needs pandas, which is not installed",
            code="FG505",
            hint="pip install pandas; or 'fgcli runs --csv' without it",
        ) from None
    table = read_table([os.fspath(folder)])
    table.where([parse_condition(text) for text in ([where] if isinstance(where, str) else where)])
    if sort is not None:
        table.sort(sort)
    rows = table.rows()
    table.save()
    frame = pandas.DataFrame(rows)
    if rows:
        frame["started"] = pandas.to_datetime(frame["started"], utc=True)
    return frame
