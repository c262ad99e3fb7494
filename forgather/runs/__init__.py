"""Many runs: lists, filters, labels and removes run folders. `forgather.runs(folder)` returns them as a DataFrame.

The modules of this package read run folders and write nothing into them but `labels.json`. What they keep is derived
from the folders, lies in the user's cache folder and may be deleted at any time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Runs(ModuleType):
    """This package, which can be called like the function that it is named after."""

    def __call__(self, folder: str = ".", **settings: Any) -> Any:
        """Returns `forgather.runs.data_frame.data_frame(folder, **settings)`."""
        return import_module("forgather.runs.data_frame").data_frame(folder, **settings)


sys.modules[__name__].__class__ = _Runs
