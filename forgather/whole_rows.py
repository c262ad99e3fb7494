"""Functions that prepare rows and need all of them, so that streamed rows cannot go through them (FG982).

The table is `ml/whole_rows.json`, which the check before a run and the functions themselves read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).parent / "ml" / "whole_rows.json"


@cache
def whole_row_hints() -> Mapping[str, str]:
    """Returns the hint about what to do in place of each function, by its name in `forgather.ml.data`."""
    found: Mapping[str, str] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return found
