"""Fake tensors that are computed once: an operator that ran before with equal shapes makes its results again.

`FakeTensorMode` remembers results as well, but compares all that torch knows of a tensor, which takes half of the time
of a trace. `RememberingFakes` compares only what the results of a trace depend on, and leaves all others to torch.
Modes above it call operators by `run_below`, which asks it for its results first: torch would ask all modes in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.ml.planner.operators import EagerMode

_OTHER_EACH_TIME = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_TAKING_OTHERS = {"aten::set_", "aten::lift_fresh", "aten::lift_fresh_copy"}  # storages, and tensors that are not fake

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_make_subclass = Tensor._make_subclass  # while a model is built, weights of libraries come by another one

_OF_SHARDS = {
    "_c10d_functional::all_reduce",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
}
"""Operators of torch that are no part of ATen: they read and write whole tensors, whose sizes never change by them."""

_is_remembered: dict[Any, bool] = {}
_writes_in_place: dict[Any, bool] = {}
_recipes: dict[tuple[Any, ...], _Recipe | None] = {}
"""How the results are made, by the operator and its arguments; None if torch makes them each time."""


class _New(NamedTuple):
    """A tensor with a storage of its own, or with that of an argument."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    owner: int | None


class _Several(NamedTuple):
    """A tuple or a list."""

    kind: type
    parts: tuple[_Recipe, ...]


class _Nothing(NamedTuple):
    """None."""


_Recipe = int | _New | _Several | _Nothing  # an integer is the place of the argument that is returned


class RememberingFakes(EagerMode, FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors that computes an operator once for each kind of arguments, see `FakeTensorMode`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the results of an operator."""
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            # Names of code for a profiler, without tensors: no mode is below this one.
            return func(*args, **kwargs)
        key = self._key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if (recipe := _recipes.get(key)) is not None:
            return self._made(recipe, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in _recipes:
            _recipes[key] = self._recipe(args, result)
        return result

    def again(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """Returns the result of an operator in a tuple if it ran before with such arguments; None otherwise.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        key = self._key(func, args, kwargs)
        recipe = None if key is None else _recipes.get(key)
        if recipe is None:
            return None
        with torch._C._DisableTorchDispatch():
            return (self._made(recipe, args),)

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Returns what the results depend on; None if they depend on more."""
        known = _is_remembered.get(func)
        if known is None:
            known = _is_remembered[func] = _can_be_remembered(func)
            _writes_in_place[func] = known and _returns_arguments(func)
        key: list[Any] = [func, torch.is_inference_mode_enabled(), torch.get_default_dtype()]
        if known and self._add(key, args) and (not kwargs or self._add(key, [*kwargs, *kwargs.values()])):
            # The bias corrections of an optimizer are other numbers at each step.
            return tuple(float if type(one) is float else one for one in key) if _writes_in_place[func] else tuple(key)
        return None

    def _add(self, key: list[Any], values: Sequence[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                is_ours = value.fake_mode is self and value.layout is torch.strided
                if not is_ours or value.constant is not None:
                    return False
                key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._add(key, value):
                    return False
            elif isinstance(value, Tensor | Mapping):
                return False
            else:
                # 1, 1.0 and True are equal, but give results of different types.
                key += (kind, value)
        return True

    def _recipe(self, args: Sequence[Any], result: Any) -> _Recipe | None:
        """Returns how to make a result again; None if that is not known."""
        if result is None:
            return _Nothing()
        if type(result) in (list, tuple):
            parts = [self._recipe(args, one) for one in result]
            return None if None in parts else _Several(type(result), tuple(parts))  # type: ignore[arg-type]
        for place, one in enumerate(args):
            if one is result:
                return place
        if type(result) is not FakeTensor or result.layout is not torch.strided or result.constant is not None:
            return None
        memory = result.untyped_storage()
        owners = [place for place, one in enumerate(args) if _shares(one, memory)]
        recipe = _New(
            dtype=result.dtype,
            shape=tuple(result.shape),
            stride=result.stride(),
            offset=int(result.storage_offset()),
            device=result.fake_device,
            owner=owners[0] if owners else None,
        )
        again = self._made(recipe, args)
        keys = torch._C._dispatch_key_set
        return recipe if again.untyped_storage().nbytes() == memory.nbytes() and keys(again) == keys(result) else None

    def _made(self, recipe: _Recipe, args: Sequence[Any]) -> Any:
        if isinstance(recipe, _New):
            made = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
            if recipe.owner is not None:
                made.set_(args[recipe.owner].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
            return self._fake(made, recipe.device)
        if isinstance(recipe, int):
            return args[recipe]
        return recipe.kind(self._made(part, args) for part in recipe.parts) if isinstance(recipe, _Several) else None

    def _fake(self, made: Tensor, device: torch.device) -> FakeTensor:
        """Returns the fake tensor on a device that stands for a new tensor without memory."""
        state = self._states.get(device)
        if state is None:
            first = FakeTensor(self, made, device)
            self._states[device] = dict(vars(first))
            return first
        # The same as the constructor does, which looks at each of its options first.
        again = _make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(again)
        else:
            torch._C._set_throw_on_mutable_data_ptr(again)
        vars(again).update(state)
        return again


def run_below(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an operator in the modes below the one that calls this.

    The modes of a trace pass on all operators of which results are remembered, as long as a fake tensor takes part.

    Args:
        func: the operator.
        types: the types of its tensors, as torch gives them to a dispatch mode.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if FakeTensor in types:
        fake = active_fakes()
        if type(fake) is RememberingFakes and (found := fake.again(func, args, kwargs)) is not None:
            return found[0]
    return func(*args, **kwargs)


def active_fakes() -> FakeTensorMode | None:
    """Returns the active mode of fake tensors, as `torch._guards.active_fake_mode` does; None if there is none."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(_FAKE)
    return found


def _shares(value: Any, memory: torch.UntypedStorage) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage()._cdata == memory._cdata


def _returns_arguments(func: Any) -> bool:
    """Returns whether an operator only writes into its first argument, so that no number decides what its result is."""
    return func._schema.name.endswith("_") and not func._schema.name.endswith("__")


def _can_be_remembered(func: Any) -> bool:
    if isinstance(func, torch._ops.OpOverload) and func._schema.name in _OF_SHARDS:
        return True
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and is_builtin(func)
        and not {*func.tags} & _OTHER_EACH_TIME
        and func._schema.name not in _TAKING_OTHERS
        and not any(argument.is_out for argument in func._schema.arguments)
    )
