"""Constructors that build a model, called so that the model takes no memory.

A config may build its model before the trainer exists. `without_memory_for_models` wraps such constructors while the
objects of a config are built. Every other constructor, such as one of data sets, is called as it is.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather.ml.strategy.meta_model import set_tensor, tensors_of


def without_memory_for_models(function: Callable[..., Any], fake: FakeTensorMode) -> Callable[..., Any]:
    """Returns a constructor that makes fake tensors if the given one builds a module, and the given one otherwise.

    Args:
        function: a class or a function that a config calls.
        fake: the mode in which the module is built.
    """
    if not builds_module(function):
        return function

    @functools.wraps(function)
    def build(*args: Any, **kwargs: Any) -> Any:
        with fake:
            return function(*args, **kwargs)

    return build


def builds_module(function: Callable[..., Any]) -> bool:
    """Returns whether a constructor builds a `torch.nn.Module`, as far as its class or its annotations tell.

    Args:
        function: a class or a function that a config calls.
    """
    if isinstance(function, type):
        return issubclass(function, nn.Module)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and function.__name__ in ("from_config", "from_pretrained", "_from_config"):
        # The automatic classes of transformers have no base class in common with the models that they make.
        return issubclass(owner, nn.Module) or hasattr(owner, "_model_mapping")
    try:
        result = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        # Annotations that refer to names which exist for type checkers only.
        return False
    return isinstance(result, type) and issubclass(result, nn.Module)


@contextlib.contextmanager
def replacing_conversions() -> Iterator[None]:
    """Context manager in which `to`, `half` and other conversions of a module replace its tensors by new ones.

    torch exchanges the contents of fake tensors in place, which fails as soon as something refers to one of them.
    """
    kept = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        done: dict[int, tuple[Tensor, Tensor]] = {}
        for _, owner, name, old in list(tensors_of(module)):
            if (name not in owner._parameters and name not in owner._buffers) or not (recurse or owner is module):
                continue
            if id(old) not in done:
                new = convert(old)
                if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                done[id(old)] = (old, new)
            if done[id(old)][1] is not old:
                set_tensor(owner, name, done[id(old)][1])
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = kept  # type: ignore[method-assign]
