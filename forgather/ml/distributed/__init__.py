"""Distributed environment: the rank and world size of the current process, and the device on which it computes.

Each public name imports its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.launcher_env import ProcessFacts
    from forgather.ml.distributed.env import DistributedEnvironment, process_facts

__all__ = ["DistributedEnvironment", "ProcessFacts", "process_facts"]

_LAZY = {
    "DistributedEnvironment": "forgather.ml.distributed.env",
    "ProcessFacts": "forgather.launcher_env",
    "process_facts": "forgather.ml.distributed.env",
}


# PEP 562: importing this package must not import torch.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
