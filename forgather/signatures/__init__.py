"""Signatures of constructors, read from source.

Takes what a config names ("torch.optim:AdamW"), gives how it may be called. Keeps true: nothing is imported and nothing
runs; what source cannot tell for sure is `Unknown`, and what is unknown is not checked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader
    from forgather.signatures.results import UNKNOWN, Annotation, Callee, Default, Unknown

__all__ = ["UNKNOWN", "Annotation", "Callee", "Default", "Reader", "Unknown"]

_LAZY = {
    "Reader": "forgather.signatures.reader",
    "Annotation": "forgather.signatures.results",
    "Callee": "forgather.signatures.results",
    "Default": "forgather.signatures.results",
    "UNKNOWN": "forgather.signatures.results",
    "Unknown": "forgather.signatures.results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
