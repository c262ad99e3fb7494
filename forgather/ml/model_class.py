"""The class of a model as the user wrote it: FSDP2 replaces it by a subclass."""

from __future__ import annotations

from typing import Any


def user_class(model: Any) -> type:
    """Returns the user's class of a model, such as `Net`: `fully_shard` replaces it by a subclass, `FSDPNet`."""
    return next(cls for cls in type(model).__mro__ if not _is_of_fully_shard(cls))


def class_name(model: Any) -> str:
    """Returns the name of the user's class of a model."""
    return user_class(model).__name__


def _is_of_fully_shard(cls: type) -> bool:
    # Compared by name: a model that is not sharded does not need torch's distributed modules.
    return any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in cls.__mro__)
