"""Initial weights by position: each rank computes the elements of its slices, and nothing else.

`counter_weights` builds the model of a recipe without values, records how it fills its tensors (`fill_record.py`), and
returns `InitialWeights` that compute slices. An element depends on the seed, the name of its parameter and its own
position. So the weights are the same for any number of ranks, and one process gives the reference. Values are computed
in float64 on the CPU and rounded once. A tensor that the model computes without random numbers is computed as the model
does it, whole. Every other tensor is refused by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.errors import TrainingError
from forgather.ml.strategy.counter_draws import (
    CHUNK,
    Floats,
    normal_probability,
    normal_quantile,
    stream_key,
    uniform,
)
from forgather.ml.strategy.fake_caches import alive, clear_caches
from forgather.ml.strategy.fill_record import Draw, FillRecord, Formula, Part, Region, Step, UnrecordedError, is_whole
from forgather.ml.strategy.meta_model import is_plain, move_to_meta, replacing_conversions, tensors_of
from forgather.ml.strategy.state import Box, whole_box

COUNTER_VERSION = 1
"""The version of the values: a change of what any fill gives is another version."""

_HINT = (
    "fill parameters by uniform_, normal_, trunc_normal_, xavier_*, kaiming_* or constants of torch.nn.init, or set "
    "initial_weights: sequential, with which one process makes the model"
)


class CounterWeights:
    """The recorded fills of a model, from which any slice of a tensor can be computed.

    Args:
        make_model: a function that returns the model.

    Attributes:
        model: the model, whose tensors are on the meta device.
        names: the names of all tensors of the model.

    Raises:
        TrainingError: FG619 if the model reads values while it is built, or fills a tensor in another way.
    """

    def __init__(self, make_model: Any) -> None:
        record = FillRecord()
        try:
            with active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True), replacing_conversions(), record:
                self.model: nn.Module = make_model()
        except UnrecordedError as error:
            raise _refused(f"the model cannot be built without values: {error}") from None
        except (RuntimeError, NotImplementedError, TypeError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise _refused(f"the model cannot be built without values ({said:.160})") from error
        self._tensors: dict[str, Tensor] = {}
        self._plans: dict[str, _Plan | Tensor] = {}
        named: dict[Draw, tuple[str, int]] = {}
        first: dict[int, str] = {}
        for fqn, _, _, tensor in tensors_of(self.model):
            if first.setdefault(id(tensor), fqn) == fqn:
                formula = record.formula(tensor)
                for number, draw in enumerate(formula.draws):
                    named.setdefault(draw, (fqn, number))
                self._plans[fqn] = _plan(fqn, tensor, formula, record, named)
            else:
                self._plans[fqn] = self._plans[first[id(tensor)]]
            self._tensors[fqn] = tensor
        self.names = list(self._plans)
        move_to_meta(self.model)
        own = {id(tensor) for tensor in self._tensors.values()}
        if kept := alive(record.release()) - own:
            clear_caches(kept | own)

    def digest(self, left_out: Collection[str] = ()) -> str:
        """Returns a digest of all names, shapes and fills.

        Args:
            left_out: the names of tensors that are not part of it.
        """
        facts = [
            (fqn, tuple(self._tensors[fqn].shape), str(plan)[:2000])
            for fqn, plan in self._plans.items()
            if fqn not in left_out
        ]
        return hashlib.sha256(repr((COUNTER_VERSION, facts)).encode()).hexdigest()

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of a tensor of the model.

        Raises:
            KeyError: if there is no tensor of this name.
        """
        return self._tensors[fqn].shape

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of a tensor.

        Args:
            fqn: the name of the tensor.
            box: the part, as one slice for each dimension.
            dtype: the dtype of the result; None for that of the tensor.

        Shapes:
            Returns the lengths of the slices.

        Raises:
            KeyError: if there is no tensor of this name.
        """
        plan, dtype = self._plans[fqn], dtype or self._tensors[fqn].dtype
        if isinstance(plan, Tensor):
            return plan[box].to(dtype, copy=True)
        # Rounded to the dtype of the tensor first, as the weights are of a model that one process makes and converts.
        found = torch.empty([one.stop - one.start for one in box], dtype=self._tensors[fqn].dtype)
        plan.write(found, box)
        return found.to(dtype)


@dataclass(frozen=True)
class _Filled:
    """One part of a parameter, with its place in the parameter."""

    box: Box
    source: Draw | float | int | bool
    key: tuple[int, str, int] | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class _Plan:
    """How a tensor is filled: later parts replace the elements of earlier ones.

    Args:
        shape: the shape of the whole tensor.
        parts: the parts.
    """

    shape: tuple[int, ...]
    parts: tuple[_Filled, ...]

    def write(self, out: Tensor, box: Box) -> None:
        """Writes a part of the tensor into a contiguous tensor of the shape of the part."""
        for part in self.parts:
            shared = _shared(part.box, box)
            if shared is None:
                continue
            if shared == box:
                _compute(part, self.shape, box, out)
                continue
            piece = torch.empty([one.stop - one.start for one in shared], dtype=out.dtype)
            _compute(part, self.shape, shared, piece)
            out[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(shared, box, strict=True))] = piece


def _shared(left: Box, right: Box) -> Box | None:
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(left, right, strict=True))
    return None if any(one.start >= one.stop for one in found) else found


def _plan(
    fqn: str,
    tensor: Tensor,
    formula: Formula,
    record: FillRecord,
    named: dict[Draw, tuple[str, int]],
) -> _Plan | Tensor:
    """Returns how a tensor is filled, or its values if they depend on no random numbers.

    Raises:
        TrainingError: FG619 if neither is possible.
    """
    if not isinstance(tensor, FakeTensor):
        if not is_plain(tensor) or tensor.is_meta:
            raise _refused(f"{fqn!r} is a {type(tensor).__name__} that was made elsewhere")
        return tensor.detach().clone()
    # The parts refer to the memory: a parameter that is a part of it has other positions.
    if not formula.other and tensor.is_contiguous() and is_whole(tensor):
        parts = [_filled(fqn, part, tuple(tensor.shape), named) for part in formula.parts]
        if all(part is not None for part in parts):
            return _Plan(tuple(tensor.shape), tuple(part for part in parts if part is not None))
    if formula.is_random or formula.draws:
        if formula.other == "nothing":
            raise _refused(f"{fqn!r} is left as torch.empty makes it")
        how = f"is filled by way of {formula.other}" if formula.other else "is filled in parts of another layout"
        raise _refused(f"{fqn!r} {how}")
    try:
        return record.replay(tensor)
    except UnrecordedError as error:
        raise _refused(f"{fqn!r} cannot be computed again: {error}") from None


def _refused(what: str) -> TrainingError:
    return TrainingError(
        f"initial_weights is 'counter', and {what}",
        code="FG619",
        hint=_HINT,
    ).about("args.initial_weights")


def _filled(fqn: str, part: Part, shape: tuple[int, ...], named: dict[Draw, tuple[str, int]]) -> _Filled | None:
    box = whole_box(shape) if part.region is None else _box_of(part.region, shape)
    if box is None:
        return None
    key = (part.source.seed, *named[part.source]) if isinstance(part.source, Draw) else None
    return _Filled(box, part.source, key, part.steps)


def _box_of(region: Region, shape: tuple[int, ...]) -> Box | None:
    """Returns the part of a contiguous tensor that a view covers; None if it is not one range in each dimension."""
    sizes, strides, offset = region
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = [offset // step % size for step, size in zip(inner, shape, strict=True)]
    lengths = [1] * len(shape)
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        dim = next((one for one, step in enumerate(inner) if step == stride and shape[one] > 1), None)
        if dim is None or lengths[dim] != 1:
            return None
        lengths[dim] = size
    if any(first + length > size for first, length, size in zip(start, lengths, shape, strict=True)):
        return None
    return tuple(slice(first, first + length) for first, length in zip(start, lengths, strict=True))


# -- elements ----------------------------------------------------------------------------------------------------------


def _compute(part: _Filled, shape: tuple[int, ...], box: Box, out: Tensor) -> None:
    """Computes the elements of a box, and writes them into a contiguous tensor."""
    flat = out.view(-1)
    if part.key is None or not isinstance(part.source, Draw):
        values = np.full(1, float(part.source), dtype=np.float64)  # type: ignore[arg-type]
        flat.fill_(_rounded(_apply(values, part.steps), out.dtype)[0])
        return
    key, done = stream_key(*part.key), 0
    for ranges in _batches(_runs(shape, box)):
        count = sum(length for _, length in ranges)
        values = _drawn(part.source, uniform(key, ranges, count))
        flat[done : done + count] = _rounded(_apply(values, part.steps), out.dtype)
        done += count


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yields start and length of each range of positions that a box covers in a contiguous tensor, in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Dimensions behind the last one that is cut are covered completely.
    cut = max((dim for dim, one in enumerate(box) if one != slice(0, shape[dim])), default=-1)
    length = math.prod(one.stop - one.start for one in box[max(cut, 0) :])
    outer = [range(one.start, one.stop) for one in box[: max(cut, 0)]]
    first = box[cut].start * strides[cut] if cut >= 0 else 0
    for place in np.ndindex(*map(len, outer)):
        steps = zip(outer, place, strides, strict=False)
        yield first + sum(each[index] * stride for each, index, stride in steps), length


def _batches(runs: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of ranges that have at most `CHUNK` elements together; long ranges are cut."""
    batch: list[tuple[int, int]] = []
    room = CHUNK
    for start, length in runs:
        while length:
            taken = min(length, room)
            batch.append((start, taken))
            start, length, room = start + taken, length - taken, room - taken
            if not room:
                yield batch
                batch, room = [], CHUNK
    if batch:
        yield batch


def _drawn(draw: Draw, numbers: Floats) -> Floats:
    if draw.kind == "uniform":
        numbers *= draw.b - draw.a
        numbers += draw.a
        return numbers
    if draw.kind == "normal":
        found = normal_quantile(numbers)
        found *= draw.b
        found += draw.a
        return found
    low, high = (normal_probability((bound - draw.a) / draw.b) for bound in (draw.low, draw.high))
    numbers *= high - low
    numbers += low
    found = normal_quantile(numbers)
    found *= draw.b
    found += draw.a
    return np.clip(found, draw.low, draw.high, out=found)


def _apply(values: Floats, steps: tuple[Step, ...]) -> Floats:
    for step in steps:
        if step.name == "add":
            values = values + step.values[0]
        elif step.name == "mul":
            values = values * step.values[0]
        elif step.name == "div":
            values = values / step.values[0]
        elif step.name == "clamp":
            values = np.clip(values, *step.values)
        else:
            values = torch.from_numpy(values).to(step.values[0]).to(torch.float64).numpy()
    return values


def _rounded(values: Floats, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).to(dtype)
