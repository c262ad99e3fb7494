"""The functions that tags call by a name without a module, such as `!call:getitem`, in addition to Python's builtins.

Invariant: `tags.SHORT_NAMES` lists exactly these names, so a tag can be read without importing this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the key and value pairs of a mapping."""
    return list(mapping.items())


def keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys of a mapping."""
    return list(mapping.keys())


def values(mapping: Mapping[Any, Any]) -> list[Any]:
    """Returns the values of a mapping."""
    return list(mapping.values())


def getitem(container: Any, key: Any) -> Any:
    """Returns `container[key]`."""
    return container[key]


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`."""
    return function(*args, **kwargs)


def named_list(*members: Any) -> list[Any]:
    """Returns the arguments as a list."""
    return list(members)


def named_tuple(*members: Any) -> tuple[Any, ...]:
    """Returns the arguments as a tuple."""
    return members


def named_dict(*pairs: Any, **members: Any) -> dict[Any, Any]:
    """Returns a dict of the positional arguments, which are (key, value) pairs, and the keyword arguments."""
    # Positional pairs allow keys that are not names.
    return {**dict(pairs), **members}


SHORT: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (call, getitem, items, keys, named_dict, named_list, named_tuple, values)
}
