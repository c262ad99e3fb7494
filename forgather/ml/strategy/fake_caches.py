"""Models that are built without memory, and the caches of their constructors that must not keep what such a build made.

A constructor may compute tables in a function with `functools.lru_cache`. What it computes in a build without memory
has no values, and the cache would give it to the model that is built for the run.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DEPTH = 4


@contextmanager
def building_without_memory() -> Iterator[FakeTensorMode]:
    """Makes tensors without values in its block. Afterwards no `functools.lru_cache` has one of them.

    Within another block or another `FakeTensorMode` that mode continues, and caches are left to it.
    """
    if (outer := active_fake_mode()) is not None:
        with outer:
            yield outer
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            yield mode
    finally:
        _clear_caches(mode)


def _clear_caches(mode: FakeTensorMode) -> None:
    """Clears each cache of a function that has a tensor of the mode."""
    # Frozen objects, as before a process forks, are not among those that `gc` lists.
    if is_frozen := gc.get_freeze_count() > 0:
        gc.unfreeze()
        gc.collect()
    for one in gc.get_objects():
        # `isinstance` would ask proxies for their class, which may import what they stand for. The results of
        # a bounded cache are among its referents, those of an unbounded one are in its dict.
        if type(one) is functools._lru_cache_wrapper and _has_fake(gc.get_referents(one), mode, _DEPTH):
            one.cache_clear()
    if is_frozen:
        gc.freeze()


def _has_fake(values: Iterable[Any], mode: FakeTensorMode, depth: int) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_mode is mode:
                return True
        elif depth and type(value) in (tuple, list, dict):
            inner = value.values() if isinstance(value, Mapping) else value
            if _has_fake(inner, mode, depth - 1):
                return True
    return False
