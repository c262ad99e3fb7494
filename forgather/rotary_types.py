"""Rotary positions whose frequencies depend on the length of the rows that a model is called with.

The input is the settings of a model's configuration; the output is the name of such a type, or None. transformers
computes the frequencies of these types from the largest position of each call, so a call with part of a row, or with
rows beside a longer one, rotates by other angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_LENGTH = frozenset({"dynamic", "longrope"})


def rotary_type_by_length(config: Mapping[str, Any]) -> str | None:
    """Returns the type of a model's rotary positions if their frequencies depend on the length of rows; else None.

    Args:
        config: the settings of the model's configuration, as far as they are given.

    Example:
        >>> rotary_type_by_length({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
        'dynamic'
        >>> rotary_type_by_length({"rope_scaling": {"type": "linear", "factor": 2.0}})
    """
    facts = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(facts, Mapping):
        return None
    # Models with several kinds of layers have the facts of each kind.
    kinds = [facts, *(one for one in facts.values() if isinstance(one, Mapping))]
    types = [one.get("rope_type", one.get("type")) for one in kinds]
    return next((str(one) for one in types if isinstance(one, str) and one in _BY_LENGTH), None)
