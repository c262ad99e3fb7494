"""Callbacks: transformers' events, dispatched by us; one file per callback.

Names are looked up lazily: a callback's own requirements (rich, tensorboard) are met when it is named.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "TrainerCallback": "base",
    "TrainerControl": "base",
    "TrainerState": "base",
    "CallbackDispatcher": "dispatch",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
