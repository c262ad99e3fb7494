"""Projects: `Project` builds the objects of one config, and configs call `from_project` to use another project."""

from __future__ import annotations

from typing import Any

_LAZY = {"Project": "forgather.project.project", "from_project": "forgather.project.project"}

__all__ = ["Project", "from_project"]  # noqa: F822 - resolved by __getattr__, so that `ls` need not load the stages


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
