"""Signatures of constructors, read from source code without importing it.

The input is the name of a constructor as a config writes it ("torch.optim:AdamW"); the output is a list of signatures,
one of which a call has to match. No module is imported and no code runs. If the source does not determine the signature
of a constructor, the result is `Unknown`, and calls of that constructor are not checked.
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
