"""Whether the attention of a model is the one that a ring computes: causal, over whole rows, without dropout.

The input is the family of a model and the settings of its configuration; the output is why a ring does not compute its
attention, or None. `ml/context_models.json` lists the families that were compared with one process, with the settings
that must be zero, false or null, and the values that transformers gives them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

ATTENTION = "sdpa"
"""The attention implementation of transformers whose place the ring takes."""
INSTEAD = "write context_parallel_method: ulysses"
_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "context_models.json")
_NOTHING = {"sliding_window": "null", "use_sliding_window": "false"}


def ring_obstacle(family: str, config: Mapping[str, Any], attention: str = ATTENTION) -> tuple[str, str] | None:
    """Returns why a ring does not compute the attention of a model, and what to write; None if it does.

    Args:
        family: the family of the model, as transformers names its module.
        config: the settings of its configuration, as far as they are given.
        attention: the attention implementation.

    Example:
        >>> ring_obstacle("mistral", {"sliding_window": 1024})
        ('the model has sliding_window 1024', 'set sliding_window: null, or write context_parallel_method: ulysses')
        >>> ring_obstacle("mistral", {"sliding_window": None})
    """
    known = _families()
    if family not in known:
        return f"models of the family {family!r} have attention of another kind", INSTEAD
    for name, usual in known[family].items():
        if value := config.get(name, usual):
            return f"the model has {name} {value!r}", f"set {name}: {_NOTHING.get(name, '0.0')}, or {INSTEAD}"
    if attention != ATTENTION:
        return f"its attn_implementation is {attention!r}", f"set attn_implementation: {ATTENTION}, or {INSTEAD}"
    return None


def ring_families() -> frozenset[str]:
    """Returns the families whose attention a ring computes."""
    return frozenset(_families())


@cache
def _families() -> dict[str, dict[str, Any]]:
    with open(_TABLE, encoding="utf-8") as stream:
        found: dict[str, dict[str, Any]] = json.load(stream)["ring"]
    return found
