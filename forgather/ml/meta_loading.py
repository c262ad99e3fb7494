"""Whether trained models are made without values, so that each rank can read its slices of the weights itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_meta: ContextVar[bool] = ContextVar("loading_on_meta", default=False)


@contextmanager
def loading_on_meta() -> Iterator[None]:
    """Context manager in which trained models are made on the meta device, and no weights are read."""
    token = _on_meta.set(True)
    try:
        yield
    finally:
        _on_meta.reset(token)


def is_loading_on_meta() -> bool:
    """Returns whether trained models are made on the meta device."""
    return _on_meta.get()
