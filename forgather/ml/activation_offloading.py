"""Activations in the memory of the host between the forward and the backward pass.

`saved_on_host` is a context manager around a forward pass. What autograd saves there for the backward pass is copied to
the host, and back when the backward pass needs it, so that a device holds the activations of a few operations. The
numbers are copies of the same bits, so no gradient changes. It takes tensors as autograd saves them, and gives them
back in the same form; the graph, parameter names and modules are untouched.

Parameters are not moved, nor are storages below 1 KiB, sparse tensors and tensors of classes that are not known. What
several operations save is one copy: a mask that each layer has, or an input of three projections. On a CPU nothing is
moved, since the tensors are in the memory of the host. On CUDA the copies go through pinned memory, on two streams
beside that of the model. No GPU has run this module: the order of its calls is tested with recorded streams.

Source:
    `torch.autograd.graph.save_on_cpu`, with the streams of torchtune's and TRL's `OffloadActivations`. Difference: a
    storage is copied once, however many tensors on it are saved.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

_SMALLEST_BYTES = 1024
IN_FLIGHT = 5
"""The number of copies to the host that the model's stream may be ahead of."""
_AHEAD = 2
"""The number of storages that are fetched before the backward pass asks for them."""
_WITH_STREAMS = ("cuda", "xpu")

host_memory: ContextVar[Callable[[int, torch.dtype], Tensor] | None] = ContextVar("host_memory", default=None)
"""A function that returns memory for so many elements of a dtype, in place of torch's memory of the host. While it is
set, a CPU is a device whose tensors are moved: for plans, which trace the step of a GPU on a CPU, and for tests."""
_is_saving: ContextVar[bool] = ContextVar("is_saving", default=False)


@contextlib.contextmanager
def saved_on_host(*, streams: Any = torch) -> Iterator[None]:
    """Context manager in which autograd saves tensors in the memory of the host.

    Args:
        streams: the module that has `Stream` and `accelerator.current_stream`, as torch does.
    """
    saved = _Saved(streams)
    token = _is_saving.set(True)
    try:
        with saved_tensors_hooks(saved.pack, _unpack):
            yield
    finally:
        _is_saving.reset(token)
        saved.end()


def saved_on_device() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which a surrounding `saved_on_host` moves nothing.

    It is for the end of a forward pass, which the backward pass needs at once: copies would take time, and save nothing
    while the memory is at its peak.
    """
    return saved_tensors_hooks(_Stays.of, _unpack) if _is_saving.get() else contextlib.nullcontext()


@dataclass(slots=True, frozen=True)
class _Stays:
    """A tensor that stays where it is.

    Args:
        tensor: the tensor.
        version: the number of changes in place that it had when it was saved.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Stays:
        # The result of an operation that saves it would keep the operation alive, which keeps it.
        return cls(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def unpacked(self) -> Tensor:
        # Autograd itself checks this of tensors without hooks.
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


@dataclass(slots=True, frozen=True)
class _Moved:
    """A tensor whose storage is on the host.

    Args:
        held: the copy of the storage.
        size: the shape of the tensor.
        stride: its strides.
        offset: where it begins in the storage, in elements.
    """

    held: _Held
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpacked(self) -> Tensor:
        return self.held.taken().as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True, frozen=True)
class _Placed:
    """A DTensor whose local tensor was packed.

    Args:
        local: the local tensor.
        outer: the DTensor's class, description, shape and strides.
    """

    local: _Stays | _Moved
    outer: tuple[Any, Any, torch.Size, tuple[int, ...]]

    def unpacked(self) -> Tensor:
        kind, description, size, stride = self.outer
        made: Tensor = kind.__tensor_unflatten__({"_local_tensor": self.local.unpacked()}, description, size, stride)
        return made


def _unpack(packed: _Stays | _Moved | _Placed) -> Tensor:
    return packed.unpacked()


class _Saved:
    """What one forward pass saves. Storages are recognized within it only: buffers are used again by later passes."""

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        # Weak: a pipeline frees what a micro-batch saved while the forward passes of others go on.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Held]]] = {}
        self._lanes: set[_Lane] = set()

    def pack(self, tensor: Tensor) -> _Stays | _Moved | _Placed:
        if type(tensor) is DTensor and not _is_parameter(tensor):
            names, description = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
            if names == ["_local_tensor"] and type(tensor._local_tensor) in (Tensor, FakeTensor):
                outer = (DTensor, description, tensor.shape, tensor.stride())
                return _Placed(self._packed(tensor._local_tensor.detach()), outer)
        return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> _Stays | _Moved:
        if not _is_moved(tensor):
            return _Stays.of(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, storage.nbytes(), tensor._version, tensor.dtype, tensor.device)
        _, known = self._known.get(key, (None, None))
        held = None if known is None else known()
        if held is None:
            lane = _lane_of(tensor.device, self._streams)
            held = lane.sent(tensor)
            # The reference keeps the memory of no value, and no other storage gets this one's address.
            self._known[key] = (StorageWeakRef(storage), weakref.ref(held))  # type: ignore[no-untyped-call]
            self._lanes.add(lane)
        held.uses += 1
        return _Moved(held, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def end(self) -> None:
        self._known.clear()
        for lane in self._lanes:
            lane.settle(0)


def _is_parameter(tensor: Tensor) -> bool:
    # A transposed weight is a view of it.
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _is_moved(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or _is_parameter(tensor):
        return False
    if tensor.device.type == "meta" or (tensor.device.type == "cpu" and host_memory.get() is None):
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return (
        num_bytes >= _SMALLEST_BYTES
        and num_bytes % tensor.element_size() == 0
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Held:
    """A storage on the host, and its copy on the device while the backward pass uses it.

    Args:
        host: the storage as one row of elements.
        lane: the lane of its device.
        before: the storage that was sent before this one.
        sent: the event of the copy to the host; None if it is there.
    """

    __slots__ = ("__weakref__", "_back", "_fetched", "before", "host", "lane", "sent", "uses")

    def __init__(self, host: Tensor, lane: _Lane, before: weakref.ref[_Held] | None, sent: Any) -> None:
        self.host, self.lane, self.before, self.sent = host, lane, before, sent
        self.uses = 0
        """How many saved tensors are on it that the backward pass has not used."""
        self._back: Tensor | None = None
        self._fetched: Any = None

    def taken(self) -> Tensor:
        """Returns the storage on the device, and begins to fetch those that the backward pass probably needs next."""
        self.fetch()
        back = self._back
        assert back is not None, "fetched"  # noqa: S101
        self.lane.await_event(self._fetched)
        self.uses -= 1
        if self.uses <= 0:
            # A backward pass that is divided takes the same tensors twice, and fetches them again.
            self._back = None
        earlier = self
        for _ in range(_AHEAD if self.lane.has_streams else 0):
            found = None if earlier.before is None else earlier.before()
            if found is None:
                break
            earlier = found
            if earlier.uses > 0:
                earlier.fetch()
        return back

    def fetch(self) -> None:
        if self._back is None:
            self._back, self._fetched = self.lane.fetched(self.host, self.sent)


class _Lane:
    """The copies between the host and one device, in their order.

    Args:
        device: the device.
        streams: the module that has `Stream` and `accelerator.current_stream`, as torch does.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        self.device = device
        self.has_streams = device.type in _WITH_STREAMS or streams is not torch
        self._streams = streams
        self._out: Any = streams.Stream(device) if self.has_streams else None
        self._in: Any = streams.Stream(device) if self.has_streams else None
        self._in_flight: deque[tuple[Tensor, Any]] = deque()
        self._last: weakref.ref[_Held] | None = None

    def sent(self, tensor: Tensor) -> _Held:
        """Returns the copy of a tensor's storage, which may be on its way."""
        with torch.no_grad():
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((count,), (1,), 0)
            host = (host_memory.get() or self._allocated)(count, tensor.dtype)
            event = None
            if self._out is None:
                host.copy_(whole)
            else:
                self._out.wait_stream(self._current())
                with self._out:
                    host.copy_(whole, non_blocking=True)
                    event = self._out.record_event()
                self._in_flight.append((whole, event))
                self.settle(IN_FLIGHT)
        held = _Held(host, self, self._last, event)
        self._last = weakref.ref(held)
        return held

    def _allocated(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self.device.type in _WITH_STREAMS)

    def settle(self, most: int) -> None:
        """Lets the model's stream wait for the oldest copies, so that their memory may be used again.

        Args:
            most: how many copies may be on their way.
        """
        while len(self._in_flight) > most:
            _, event = self._in_flight.popleft()
            self.await_event(event)

    def fetched(self, host: Tensor, sent: Any) -> tuple[Tensor, Any]:
        """Returns a copy of a storage on the device, and the event after which it is there."""
        with torch.no_grad():
            back = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            if self._in is None:
                return back.copy_(host), None
            # The memory is that of the model's stream, which may still use what was there.
            self._in.wait_stream(self._current())
            self._in.wait_event(sent)
            with self._in:
                back.copy_(host, non_blocking=True)
                event = self._in.record_event()
            # It may be dropped without having been used.
            back.record_stream(self._in)
        return back, event

    def await_event(self, event: Any) -> None:
        if event is not None:
            # An order between two streams: the host does not wait.
            self._current().wait_event(event)

    def _current(self) -> Any:
        return self._streams.accelerator.current_stream(self.device)


@functools.cache
def _lane_of(device: torch.device, streams: Any) -> _Lane:
    return _Lane(device, streams)
