"""Describes, checks and runs model training from configuration.

`Project`, `from_project`, `ForgatherError` and `runs` are imported on first access, so that `import forgather` stays
cheap.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Project": "forgather.project",
    "from_project": "forgather.project",
    "ForgatherError": "forgather.errors",
    "runs": "forgather.runs",
}

__all__ = ["ForgatherError", "Project", "__version__", "from_project", "runs"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # PEP 562: the import runs on the first access only; `import forgather` must not load jinja2 or ruamel.yaml.
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
