"""Caches of functions that a build without memory has filled with tensors that have no values.

A constructor may compute tables in a function with `functools.lru_cache`. Such a cache would give the tables of a build
without memory to the model that is built for the run. `clear_caches` finds the caches by the modules and classes that
have them, and not by the garbage collector, which does not list what was frozen before a process was forked.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_DEPTH = 4
_CACHE = functools._lru_cache_wrapper


def alive(made: Iterable[weakref.ref[Tensor]]) -> set[int]:
    """Returns the `id` of each tensor that something still has.

    Args:
        made: weak references to tensors.
    """
    return {id(one) for reference in made if (one := reference()) is not None}


def clear_caches(tensors: Collection[int]) -> None:
    """Clears each `functools.lru_cache` of a module or class that has one of some tensors.

    Args:
        tensors: the `id` of each tensor; all of them are alive.
    """
    for cache in _caches():
        # The results of a bounded cache are among its referents, those of an unbounded one are in its dict.
        if cache.cache_info().currsize and _has(gc.get_referents(cache), tensors, _DEPTH):
            cache.cache_clear()


def _caches() -> Iterator[Any]:
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        for one in list(space.values()):
            # `isinstance` would ask proxies for their class, which may import what they stand for.
            if type(one) is _CACHE:
                yield one
            elif issubclass(type(one), type) and vars(one).get("__module__") == space.get("__name__"):
                methods = (getattr(inner, "__func__", inner) for inner in list(vars(one).values()))
                yield from (inner for inner in methods if type(inner) is _CACHE)


def _has(values: Sequence[Any], tensors: Collection[int], depth: int) -> bool:
    for value in values:
        if type(value) is FakeTensor:
            if id(value) in tensors:
                return True
        elif depth and type(value) in (tuple, list, dict):
            inner = list(value.values()) if type(value) is dict else value
            if _has(inner, tensors, depth - 1):
                return True
    return False
