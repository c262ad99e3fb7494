"""The tensor memory of a piece of code: each storage that lived while the code ran.

`AllocationRecorder` observes every operator of torch below autograd, with real tensors or with fake ones, and gives
`Allocation`s, which `peaks.py` adds up. Nothing here knows about models or strategies.

Units:
    bytes, without the rounding of a device's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgather.ml.planner.operators import EagerMode, has_dtensor, name_of, tensors_in
from forgather.ml.planner.remembered_fakes import active_fakes, run_below

HOST = "host"
"""The phase of the region that stands for the memory of the host: of all allocations there, wherever they were made."""
STEP_PHASES = ("forward", "backward", "update", HOST)
"""The phases of an optimizer step, and its memory of the host; all others come between two steps."""


class Region(NamedTuple):
    """A part of a run in which memory is compared.

    Args:
        phase: "forward", "backward", "update" or "evaluation".
        block: the index of the repeated block of the model that runs; -1 before the first block (embeddings) and
            outside of passes, and the number of blocks after the last one (output layer and loss).
    """

    phase: str
    block: int


@dataclass(slots=True, eq=False)
class Allocation:
    """The memory of one storage between two changes of its size.

    Args:
        num_bytes: the size in bytes.
        born: the time at which the storage was first seen, in events since the start of the recording; 0 if it existed
            before.
        region: the region of the run in which it was allocated.
        operation: the operator that returned it, such as "aten.mm"; "" if it existed before the recording.
        shape: the shape of the first tensor on the storage.
        dtype: the dtype of that tensor.
        category: what the memory is used for. None if it is not known.
        died: the time at which the storage was freed. None if it was alive at the end.
        on_host: whether a GPU would not hold it, because it is in the memory of the host.
    """

    num_bytes: int
    born: int
    region: Region
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: str | None = None
    died: int | None = None
    on_host: bool = False

    def copy(self) -> Allocation:
        """Returns a copy, in a fifth of the time of `copy.copy`: a trace copies all allocations several times."""
        return Allocation(
            self.num_bytes,
            self.born,
            self.region,
            self.operation,
            self.shape,
            self.dtype,
            self.category,
            self.died,
            self.on_host,
        )

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape)) or "1"
        return f"{self.operation or 'before the step'}: {sizes} {str(self.dtype).removeprefix('torch.')}"


class AllocationRecorder(EagerMode):
    """Context manager that records the storages of all tensors that operators return while it is active.

    Args:
        locate: a function that returns the current region.
        categorize: a function that returns the category of a new allocation, or None if it is known later.
    """

    # Python sets these attributes where the class is used as a context manager.
    _resize: Any
    _shapes_of: Any
    _outer_fake_mode: Any

    def __init__(
        self, locate: Callable[[], Region], categorize: Callable[[Allocation], str | None] = lambda _: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._locate = locate
        self._categorize = categorize
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], Allocation]] = {}
        self._clock = 0
        self._computes_shapes = False
        self.allocations: list[Allocation] = []

    @property
    def clock(self) -> int:
        """The number of events until now."""
        return self._clock

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Records storages that existed before, and sets the category of all given storages.

        Args:
            tensors: the tensors.
            category: what their memory is used for.

        Shapes:
            tensors: any shapes.
        """
        for tensor in tensors:
            for storage in storages(tensor):
                self._see(storage, tensor, "")
                held = self._live[id(storage)][1]
                # Their order says nothing: those of an engine come as Python's memory has them.
                held.born, held.category = 0, category

    def found(self, tensors: Iterable[Tensor]) -> Iterator[Allocation]:
        """Yields the allocations of storages that are alive; tensors that were never seen have none.

        Shapes:
            tensors: any shapes.
        """
        for tensor in tensors:
            for storage in storages(tensor):
                if (known := self._live.get(id(storage))) is not None:
                    yield known[1]

    def end_at_birth(self, tensors: Iterable[Tensor]) -> None:
        """Records that storages were freed right after their birth, because their values were moved to other memory.

        Args:
            tensors: tensors that are alive; tensors that were never seen are ignored.

        Shapes:
            tensors: any shapes.
        """
        for tensor in tensors:
            for storage in storages(tensor):
                if (known := self._live.get(id(storage))) is not None:
                    known[1].died = known[1].born + 1

    def until_now(self) -> tuple[Allocation, ...]:
        """Returns copies of all allocations so far, in the order of their birth."""
        return tuple(one.copy() for one in self.allocations)

    def __enter__(self) -> AllocationRecorder:
        self._outer_fake_mode = active_fakes()
        self._resize = resize = torch.UntypedStorage.resize_

        def recording_resize(storage: torch.UntypedStorage, size: int) -> Any:
            # No operator: FSDP2 frees and allocates gathered weights in this way.
            result = resize(storage, size)
            known = self._live.get(id(storage))
            if known is not None and known[1].num_bytes != size:
                self._replace(storage, known[1], size)
            return result

        self._shapes_of = shapes_of = ShardingPropagator._propagate_tensor_meta_non_cached

        def without_recording(propagator: ShardingPropagator, *args: Any) -> Any:
            # The first time that a DTensor computes with some shapes, it makes fake tensors of the whole shapes.
            self._computes_shapes = True
            try:
                return shapes_of(propagator, *args)
            finally:
                self._computes_shapes = False

        torch.UntypedStorage.resize_ = recording_resize  # type: ignore[assignment,method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = without_recording  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._shapes_of  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records the storages of its results."""
        # A DTensor computes with its local tensor, whose operators come here afterwards.
        if has_dtensor(tuple(types)):
            return NotImplemented
        # The fake version of this operator returns a new tensor, the real one its argument.
        waits = func is torch.ops._c10d_functional.wait_tensor.default
        result = args[0] if waits and self._outer_fake_mode is not None else run_below(func, types, args, kwargs or {})
        if self.counts:
            for tensor in tensors_in(result):
                for storage in storages(tensor):
                    self._see(storage, tensor, func)
        return result

    @property
    def counts(self) -> bool:
        """Whether the operator that runs is part of the run."""
        # The shapes that a DTensor computes take no memory.
        return not self._computes_shapes and active_fakes() is self._outer_fake_mode

    def _see(self, storage: torch.UntypedStorage, tensor: Tensor, operation: Any) -> None:
        known = self._live.get(id(storage))
        if known is None:
            name, shape = name_of(operation), tuple(tensor.shape)
            self._begin(storage, Allocation(storage.nbytes(), 0, self._locate(), name, shape, tensor.dtype))
        elif known[1].num_bytes != storage.nbytes():
            self._replace(storage, known[1], storage.nbytes())

    def _begin(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        key = id(storage)
        recorder = weakref.ref(self)

        def freed(_: Any) -> None:
            owner = recorder()
            if owner is not None and owner._live.get(key, (None, None))[1] is allocation:
                del owner._live[key]
                owner._end(allocation)

        self._clock += 1
        allocation.born = self._clock
        allocation.category = allocation.category or self._categorize(allocation)
        self._live[key] = (weakref.ref(storage, freed), allocation)
        self.allocations.append(allocation)

    def _end(self, allocation: Allocation) -> None:
        if allocation.died is not None:  # see `end_at_birth`
            return
        self._clock += 1
        allocation.died = self._clock

    def _replace(self, storage: torch.UntypedStorage, old: Allocation, num_bytes: int) -> None:
        self._end(old)
        self._begin(
            storage,
            Allocation(num_bytes, 0, self._locate(), old.operation, old.shape, old.dtype, category=old.category),
        )

    def set_new_category(self, tensors: Iterable[Any], category: str) -> None:
        """Sets the category of storages that were allocated while the recorder was active, and are no gradients.

        Args:
            tensors: tensors; other values are ignored.
            category: what their memory is used for.

        Shapes:
            tensors: any shapes.
        """
        self.set_category(
            (item for item in tensors if isinstance(item, Tensor)), category, only=lambda a: bool(a.operation)
        )

    def set_category(
        self, tensors: Iterable[Any], category: str, *, only: Callable[[Allocation], bool] = lambda _: True
    ) -> None:
        """Sets the category of storages that are alive; tensors that were never seen are ignored.

        Args:
            tensors: tensors; other values are ignored.
            category: what their memory is used for.
            only: a function that returns whether an allocation gets the category.

        Shapes:
            tensors: any shapes.
        """
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for storage in storages(tensor):
                    if (known := self._live.get(id(storage))) is not None and only(known[1]):
                        known[1].category = category


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of a tensor on this rank: several for a tensor that wraps others, such as a quantized one.

    Shapes:
        tensor: any shape.
    """
    if isinstance(tensor, DTensor):
        yield from storages(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
