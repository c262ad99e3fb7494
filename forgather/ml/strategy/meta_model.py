"""Models without memory: every tensor is on the meta device, while modules, names and shapes are those of the model.

The functions take a model, or a function that makes one. They return the model without values, and its tensors by name.
Tied weights stay tied, and the random state is not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.log import get_logger

_log = get_logger(__name__)

_PLAIN = (nn.Parameter, nn.Buffer, Tensor, FakeTensor)
# Parts that wrappers (activation checkpointing, compilation) insert into names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def meta_model(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Returns a new model with every tensor on the meta device. The random state is not changed.

    If the constructor of the model reads the values of tensors, the model is made with values first, and then moved to
    the meta device.

    Args:
        make_model: a function that returns the model.
    """
    # A model that is made with values draws random numbers.
    before = capture_rng()
    try:
        model = without_memory(make_model) or make_model()
        move_to_meta(model)
    finally:
        restore_rng(before)
    return model


def without_memory(make_model: Callable[[], nn.Module]) -> nn.Module | None:
    """Returns a model of fake tensors, which have shapes but no values, or None if it cannot be made without values."""
    try:
        # In a trace, the tensors of all parts of a run are those of one mode.
        with active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True):
            return make_model()
    except Exception as error:  # noqa: BLE001 - the border of a user's constructor: what fails is done with values
        _log.info("every rank builds the model with values: building it without memory failed with %r", error)
        return None


def tensors_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields (fqn, owner, name, tensor) for each parameter, buffer and tensor attribute of a module and its submodules.

    A tied tensor is yielded once for each of its names.

    Shapes:
        tensor: any shape.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for kind in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in list(kind.items()):
                if isinstance(value, Tensor):
                    fqn = f"{prefix}.{name}" if prefix else name
                    for wrapper in _WRAPPERS:
                        fqn = fqn.replace(wrapper, "")
                    yield fqn, owner, name, value


def set_tensor(owner: nn.Module, name: str, value: Tensor) -> None:
    """Sets a parameter, a buffer or a tensor attribute of a module.

    Args:
        owner: the module.
        name: the name of the parameter, buffer or attribute.
        value: the new tensor.

    Shapes:
        value: any shape.
    """
    # Not by `setattr`, which refuses a plain tensor where a parameter is registered.
    for kind in (owner._parameters, owner._buffers):
        if name in kind:
            kind[name] = value  # type: ignore[assignment]
            return
    vars(owner)[name] = value


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is of one of torch's plain classes, and not of a subclass that wraps several tensors.

    Shapes:
        tensor: any shape.
    """
    return type(tensor) in _PLAIN


def move_to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Moves every tensor of a model to the meta device, and returns the previous tensors by name.

    A tied tensor is returned under each of its names.

    Shapes:
        The returned tensors have the shapes of the model's tensors.
    """
    values: dict[str, Tensor] = {}
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for fqn, owner, name, old in list(tensors_of(model)):
        if not is_plain(old):
            continue
        values[fqn] = old
        if id(old) not in done:
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                # Attributes that a user's code set on a parameter (a learning rate, a tag) stay on its successor.
                new.__dict__.update(vars(old) if not isinstance(old, FakeTensor) else {})
            done[id(old)] = (old, new)
        set_tensor(owner, name, done[id(old)][1])
    return values


def drop_values(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Moves to the meta device what `move_to_meta` left of a model: its packed weights, but for those of given parts.

    Args:
        model: the model, which is changed in place.
        parts: parts of the model, which share their weights with it.
    """
    kept = {id(tensor) for part in parts for *_, tensor in tensors_of(part)}
    for _, owner, name, old in list(tensors_of(model)):
        if id(old) in kept or is_plain(old):
            continue
        new = torch.empty(old.shape, dtype=old.dtype, device="meta")
        is_weight = isinstance(old, nn.Parameter)
        set_tensor(owner, name, nn.Parameter(new, requires_grad=old.requires_grad) if is_weight else new)
        if "quant_state" in vars(owner):
            # bitsandbytes keeps the scales of a weight with its layer, too.
            vars(owner)["quant_state"] = None


@contextlib.contextmanager
def replacing_conversions() -> Iterator[None]:
    """Context manager in which `to`, `half` and other conversions of a module replace its tensors by new ones.

    torch exchanges the contents of fake tensors in place, which fails as soon as something refers to one of them.
    """
    kept = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Stands for `nn.Module._apply`: each tensor is replaced, and tied ones stay tied."""
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
