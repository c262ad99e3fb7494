"""Many runs: lists, filters, labels and removes run folders. `forgather.runs(folder)` returns them as a DataFrame.

The modules of this package read run folders and write nothing into them but `labels.json`. What they keep is derived
from the folders, is in the user's cache folder and may be deleted at any time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def runs(folder: str = ".", **settings: Any) -> Any:
    """Returns the runs below a folder as a DataFrame: `forgather.runs.data_frame.data_frame(folder, **settings)`.

    Args:
        folder: the folder.
        settings: `where` and `sort`, as described there.
    """
    return import_module("forgather.runs.data_frame").data_frame(folder, **settings)


class _Runs(ModuleType):
    """This package, which can be called: once it is imported, `forgather.runs` is the package and not the function."""

    __call__ = staticmethod(runs)


sys.modules[__name__].__class__ = _Runs
