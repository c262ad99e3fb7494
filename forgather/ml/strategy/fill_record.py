"""The record of how a model fills its tensors: it is built without values, and each tensor gets a formula.

`FillRecord` is a mode of torch, active inside a `FakeTensorMode` while a model is built. It sees each operation, and
keeps for each memory what its elements are: numbers drawn at random, constants, simple functions of them, or something
else. The last write counts. A `Formula` can be evaluated for any part of a tensor, see `counter_weights.py`. Tensors
that are computed without random numbers (tables of positions) need no formula: `replay` repeats their operations with
values.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from forgather.ml.strategy.counter_draws import normal_probability

Number = float | int | bool


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Numbers that are drawn independently for each element. Two draws are equal only if they are the same object.

    Args:
        kind: "uniform" (from `a` to `b`), "normal" (mean `a`, standard deviation `b`), or "truncated" (a normal
            distribution of which only the part between `low` and `high` is drawn).
        a: see `kind`.
        b: see `kind`.
        seed: the seed of torch's generator when the numbers were drawn.
        low: see `kind`.
        high: see `kind`.
    """

    kind: str
    a: float
    b: float
    seed: int
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A function that is applied to each element.

    Args:
        name: "add", "mul", "div", "clamp", or "cast".
        values: the numbers of the function, or the dtype of a cast.
    """

    name: str
    values: tuple[Any, ...]


Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a memory: sizes, strides and offset of the view that was written to."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements in one region of a memory.

    Args:
        region: the region; None for the whole memory.
        source: the draw, or the constant.
        steps: what is applied to each element afterwards.
    """

    region: Region | None
    source: Draw | Number
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Formula:
    """What the elements of a memory are. A later part replaces what earlier parts say about its region.

    Args:
        parts: the parts. The first one is that of the whole memory.
        other: the operation that no formula describes; "" if the parts describe all elements.
        is_random: whether `other` depends on random numbers.
    """

    parts: tuple[Part, ...] = ()
    other: str = ""
    is_random: bool = False

    @property
    def draws(self) -> list[Draw]:
        """The draws in the formula, in order."""
        return list(dict.fromkeys(part.source for part in self.parts if isinstance(part.source, Draw)))


_UNSET = Formula(other="nothing", is_random=True)
_CONSTANTS: dict[str, Number] = {"zero_": 0.0, "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0}
_CONSTANTS |= {"ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
_LAYOUT_CHANGES = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "set_")
)
_SAME_ELEMENTS = frozenset(("clone", "_to_copy", "copy_", "contiguous"))


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    default_dtype: torch.dtype


class UnrecordedError(Exception):
    """Raised if a model changes a tensor in a way that the record cannot follow."""


class FillRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode that records how tensors are filled. It must be the innermost mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[_Operation] = []
        self._formulas: dict[int, Formula] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._made: list[weakref.ref[Tensor]] = []

    def __enter__(self) -> FillRecord:
        # Since torch 2.13 it draws until all numbers are inside, which reads values.
        self._patch = mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", self._truncated)
        self._patch.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operation, and records what it writes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if not made and not given:
            return result
        written = _written(func, args, kwargs)
        for tensor in written:
            if not isinstance(tensor, FakeTensor):
                raise UnrecordedError(f"{_name(func)} changes a tensor that was made outside of torch")
        self._made += map(weakref.ref, made)
        before = {_memory(one) for one in given}
        new = [one for one in made if _memory(one) not in before]
        if written or new:
            writes = frozenset(_memory(one) for one in (*written, *new))
            self._operations.append(
                _Operation(
                    func, tuple(args), dict(kwargs), result, frozenset(before), writes, torch.get_default_dtype()
                )
            )
            for target in written:
                self._write(func, target, args, kwargs, is_new=False)
            for target in new:
                self._write(func, target, args, kwargs, is_new=True)
        return result

    def formula(self, tensor: Tensor) -> Formula:
        """Returns what the elements of a tensor are. The parts refer to its memory.

        Shapes:
            tensor: any shape.
        """
        found = self._formulas.get(_memory(tensor), _UNSET)
        if found is _UNSET or self._has_own_elements(tensor):
            return found
        return Formula(other="a view of another dtype", is_random=found.is_random or bool(found.draws))

    def replay(self, tensor: Tensor) -> Tensor:
        """Returns the values of a tensor that depends on no random numbers, by repeating its operations.

        Args:
            tensor: a fake tensor of the model.

        Shapes:
            tensor: any shape. Returns the same shape.
        """
        needed, chosen = {_memory(tensor)}, []
        for operation in reversed(self._operations):
            if operation.writes & needed:
                needed |= operation.reads | operation.writes
                chosen.append(operation)
        memories: dict[int, torch.UntypedStorage] = {}
        default_dtype = torch.get_default_dtype()
        try:
            with torch.no_grad():
                for operation in reversed(chosen):
                    torch.set_default_dtype(operation.default_dtype)
                    _repeat(operation, memories)
                return _real(tensor, memories).clone()
        finally:
            torch.set_default_dtype(default_dtype)

    def release(self) -> list[weakref.ref[Tensor]]:
        """Forgets all operations, and returns weak references to the tensors that they made."""
        self._operations.clear()
        self._formulas.clear()
        return self._made

    # -- what one operation writes -------------------------------------------------------------------------------------

    def _write(self, func: Any, target: Tensor, args: Sequence[Any], kwargs: dict[str, Any], *, is_new: bool) -> None:
        memory = _memory(target)
        earlier = self._formulas.get(memory, _UNSET)
        self._formulas[memory] = self._written_formula(func, target, args, kwargs, earlier, is_new=is_new)

    def _written_formula(
        self, func: Any, target: Tensor, args: Sequence[Any], kwargs: dict[str, Any], earlier: Formula, *, is_new: bool
    ) -> Formula:
        name = _name(func)
        region = None if is_new else _region(target)
        if name in _LAYOUT_CHANGES:
            # The operations before it were recorded with the tensor, whose layout is another one now.
            return Formula(other=name, is_random=True)
        if not self._has_own_elements(target):
            # A formula is of the elements that the memory was made of, which the bits of others do not fill.
            return self._other(func, target, args, kwargs, is_new=is_new)
        if is_new and name in _EMPTY:
            return _UNSET
        source = _source(name, args, kwargs)
        if isinstance(source, Draw) and target.is_complex():
            # One number is drawn for an element, and here it has two.
            return Formula(other=f"{name} of complex numbers", is_random=True)
        if source is not None:
            return _replaced(earlier, Part(region, source))
        if name in _SAME_ELEMENTS and (copied := self._copied(target, name, args)) is not None:
            return copied
        step = _step(name, args, kwargs)
        if step is not None and isinstance(args[0], Tensor):
            is_same = args[0] is target or (is_whole(args[0]) and is_whole(target) and _same_layout(args[0], target))
            stepped = _stepped(self.formula(args[0]), region, step) if is_same else None
            if stepped is not None:
                return stepped
        return self._other(func, target, args, kwargs, is_new=is_new)

    def _has_own_elements(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has the dtype of its memory, and is no view of other elements."""
        return self._dtypes.setdefault(_memory(tensor), tensor.dtype) == tensor.dtype

    def _copied(self, target: Tensor, name: str, args: Sequence[Any]) -> Formula | None:
        """Returns the formula of a copy of a whole tensor; None if it has none."""
        of = args[1] if name == "copy_" else args[0]
        if not isinstance(of, FakeTensor) or not (is_whole(of) and is_whole(target) and _same_layout(of, target)):
            return None
        found = self.formula(of)
        if found.other:
            return found if found is _UNSET else None
        # The numbers are drawn once, and both have them.
        return found if of.dtype == target.dtype else _stepped(found, None, Step("cast", (target.dtype,)))

    def _other(
        self, func: Any, target: Tensor, args: Sequence[Any], kwargs: dict[str, Any], *, is_new: bool
    ) -> Formula:
        """Returns the formula of a tensor that an operation without a formula has written to."""
        memory, name = _memory(target), _name(func)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor)]
        found = [self.formula(one) for one in given if is_new or _memory(one) != memory]
        if not is_new:
            earlier = self._formulas.get(memory, _UNSET)
            replaces = name == "copy_" or func._overloadname.endswith("out")
            # An unset memory may be set part by part.
            found += [earlier] if earlier is not _UNSET and not (replaces and is_whole(target)) else []
        random = [one for one in found if one.is_random or one.draws]
        is_random = bool(random) or torch.Tag.nondeterministic_seeded in func.tags
        reason = next((one.other for one in random if one.other and one is not _UNSET), name)
        return Formula(other=reason, is_random=is_random)

    def _truncated(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Stands for torch's function: records the draw, and writes to the tensor nothing that is read."""
        mass = normal_probability((b - mean) / std) - normal_probability((a - mean) / std)
        if mass < 1e-3:
            raise UnrecordedError(f"trunc_normal_ draws from {a} to {b} around {mean}, which is the tail alone")
        if not self._has_own_elements(tensor):
            raise UnrecordedError("trunc_normal_ fills a view of another dtype")
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        with torch.no_grad():
            tensor.zero_()
        draw = Draw("truncated", float(mean), float(std), seed, float(a), float(b))
        memory = _memory(tensor)
        self._formulas[memory] = _replaced(self._formulas[memory], Part(_region(tensor), draw))
        return tensor


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _memory(tensor: Tensor) -> int:
    # The operations keep the tensors, so that no memory gets the number of an earlier one.
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    return found


def is_whole(tensor: Tensor) -> bool:
    """Returns whether a tensor has each element of its memory once, in any order of dimensions.

    Shapes:
        tensor: any shape.
    """
    size = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.itemsize != size:
        return False
    step = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != step:
            return False
        step *= length
    return True


def _region(tensor: Tensor) -> Region | None:
    return None if is_whole(tensor) else (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _same_layout(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.stride() == right.stride()


def _source(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Draw | Number | None:
    """Returns what an operation writes to each element, if that depends on no tensor."""
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in ("fill_", "full", "full_like", "new_full"):
        value = args[{"new_full": 2}.get(name, 1)]
        # Larger integers are not exact in float64.
        return (
            value
            if isinstance(value, bool | int | float) and (isinstance(value, float) or abs(value) <= 2**53)
            else None
        )
    generator = kwargs.get("generator")
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    if name in ("rand", "rand_like"):
        return Draw("uniform", 0.0, 1.0, seed)
    if name in ("randn", "randn_like"):
        return Draw("normal", 0.0, 1.0, seed)
    if name in ("uniform_", "normal_"):
        low = float(args[1]) if len(args) > 1 else 0.0
        high = float(args[2]) if len(args) > 2 else 1.0
        return Draw(name[:-1], low, high, seed)
    if name == "normal" and not isinstance(args[0], Tensor) and not isinstance(args[1], Tensor):
        return Draw("normal", float(args[0]), float(args[1]), seed)
    return None


def _step(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Step | None:
    """Returns the function that an operation applies to each element, if its other arguments are numbers."""
    name = name.removesuffix("_")
    if name == "neg":
        return Step("mul", (-1.0,))
    if name == "clamp":
        bounds = (*args[1:], *([None] * (3 - len(args))))
        bounds = (kwargs.get("min", bounds[0]), kwargs.get("max", bounds[1]))
        return Step("clamp", bounds) if all(one is None or isinstance(one, int | float) for one in bounds) else None
    if name not in ("add", "sub", "mul", "div") or not isinstance(args[1], int | float) or "rounding_mode" in kwargs:
        return None
    value = float(args[1]) * float(kwargs.get("alpha", 1))
    return Step("add", (-value,)) if name == "sub" else Step(name, (value,))


def _replaced(earlier: Formula, part: Part) -> Formula:
    if part.region is None:
        return Formula((part,))
    if earlier.other:
        return Formula(other=earlier.other, is_random=earlier.is_random or isinstance(part.source, Draw))
    kept = tuple(one for one in earlier.parts if one.region != part.region)
    return Formula((*kept, part))


def _stepped(earlier: Formula, region: Region | None, step: Step) -> Formula | None:
    """Returns a formula with a further step; None if there is none, or if the step applies to several parts."""
    if earlier.other:
        return None
    if region is None:
        parts = tuple(dataclasses.replace(part, steps=(*part.steps, step)) for part in earlier.parts)
        return Formula(parts)
    last = earlier.parts[-1]
    if last.region == region:
        return Formula((*earlier.parts[:-1], dataclasses.replace(last, steps=(*last.steps, step))))
    if len(earlier.parts) == 1:
        return Formula((last, Part(region, last.source, (*last.steps, step))))
    return None


def _repeat(operation: _Operation, memories: dict[int, torch.UntypedStorage]) -> None:
    """Does an operation with values, and adds the memories that it makes."""
    args, kwargs = tree_map_only(Tensor, lambda fake: _real(fake, memories), (operation.args, operation.kwargs))
    result = operation.function(*args, **kwargs)
    for fake, value in zip(tree_leaves(operation.result), tree_leaves(result), strict=True):
        if not isinstance(fake, Tensor):
            continue
        if (fake.dtype, fake.stride(), fake.storage_offset()) != (value.dtype, value.stride(), value.storage_offset()):
            raise UnrecordedError(f"{_name(operation.function)} gave another layout with values than without")
        if _name(operation.function) in _EMPTY:
            # Whatever is read before it is set must be the same on every rank.
            value.zero_()
        memories.setdefault(_memory(fake), value.untyped_storage())


def _real(fake: Tensor, memories: dict[int, torch.UntypedStorage]) -> Tensor:
    """Returns the tensor with values that is at the place of one without."""
    if not isinstance(fake, FakeTensor):
        return fake.clone()
    storage = memories.get(_memory(fake))
    if storage is None:
        raise UnrecordedError("it is computed from a tensor that was made elsewhere")
    there = torch.empty(0, dtype=fake.dtype)
    return there.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
