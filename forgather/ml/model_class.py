"""The class of a model as the user wrote it."""

from __future__ import annotations

from typing import Any


def user_class(model: Any) -> type:
    """Returns the user's class: `fully_shard` puts one of its own, `FSDPNet`, in front of `Net`."""
    return next(cls for cls in type(model).__mro__ if not _is_of_fully_shard(cls))


def class_name(model: Any) -> str:
    """Returns the name of the user's class."""
    return user_class(model).__name__


def _is_of_fully_shard(cls: type) -> bool:
    # By name: a model that nobody shards needs none of torch's distributed half.
    return any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in cls.__mro__)
