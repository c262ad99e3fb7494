"""Counts what makes the host wait for a device, and collectives, in the steps of a run.

Takes a trainer; gives a `StepCounts` for its steady steps, in which nothing is logged. Keeps true: the run takes the
branches of an accelerator (`reads_forbidden`), whose tensors lie on the CPU here. A read of rows that the loader has
just collated, or of a copy that `AsyncHostCopy` has brought, is not counted: on an accelerator, both are on the host.
"""

import contextlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import forgather.ml
from forgather.ml.host_reads import reads_forbidden
from forgather.ml.trainer import meter
from forgather.ml.trainer.run import Run

_PACKAGE = Path(forgather.ml.__file__).parents[1]
_AFTER = 2
"""Steps before the counted ones: the first ones create states, and check what is given once."""

_HOST_PLACES = (
    ("trainer/data_loader.py", None),
    ("trainer/batch_sampler.py", None),
    ("trainer/data_rng.py", None),
    ("data/packing.py", None),
    ("documents.py", "lengths"),
    ("checkpoint/rng.py", None),
    ("distributed/collectives.py", None),
    ("strategy/pipeline/schedules.py", "_loss_of"),
)
"""Code whose tensors are on the host in any run: rows before they are moved, random states, values sent
over gloo, the numbers of a pipeline's micro-batches."""

_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "allclose",
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
_BY_NAME = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


_HOST_FUNCTIONS = {"_get_value"}
"""torch's optimizers count steps in tensors on the host unless they are fused or capturable."""
_WRAPPERS = (
    "torch/utils/_python_dispatch.py",
    "torch/overrides.py",
    "_dynamo/eval_frame.py",
    "torch/_compile.py",
    "ml/distributed/communication.py",
)


@dataclass
class StepCounts:
    """What the steps of a rank did.

    Args:
        steps: the number of counted steps.
        reads: for each place that read, how often.
        collectives: for each (place, operation), how often.
    """

    steps: int = 0
    reads: Counter = field(default_factory=Counter)
    collectives: Counter = field(default_factory=Counter)


def _frames():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def _place():
    """Returns (the function of Forgather that leads here, the innermost line outside of torch's dispatch), or None."""
    own = library = None
    for file, name, line in _frames():
        if file == __file__ or file.endswith(_WRAPPERS):
            continue
        if name in _HOST_FUNCTIONS:
            return None
        if library is None:
            # A line of ours moves with each change above it, and is found by the name of its function.
            place = "" if file.startswith(str(_PACKAGE)) else f":{line}"
            library = f"{'/'.join(Path(file).parts[-2:])}{place} {name}"
        if file.startswith(str(_PACKAGE)):
            inside = file.removeprefix(f"{_PACKAGE}/").removeprefix("ml/")
            if any(inside == one and function in (None, name) for one, function in _HOST_PLACES):
                return None
            own = own or f"{inside} {name}"
    return own, library


class _FunctionCounter(TorchFunctionMode):
    def __init__(self, counter):
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _BY_NAME and not self.counter.is_host(args[0]):
            self.counter.read(func.__name__)
        if func in (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__) and self.counter.is_host(args[0]):
            with self.counter.paused():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _DispatchCounter(TorchDispatchMode):
    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [
            one
            for one in (args[1] if name in _INDEXING else ())
            if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)
        ]
        # One number at the places of one mask is filled in without a look at the mask.
        by_mask = bool(masks) and not (name != "index" and len(masks) == 1 and args[2].numel() == 1)
        if name in _READS or by_mask:
            self.counter.read(name if not by_mask else "index by a mask")
            with self.counter.paused():
                return func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            self.counter.communicate(name.strip("_"))
        if any(issubclass(one, DTensor) for one in types):
            # The tensor itself then calls the operators of its local parts, with this mode still on.
            return NotImplemented
        return func(*args, **(kwargs or {}))


class _Counter:
    def __init__(self):
        self.counts = StepCounts()
        self.is_on = False
        self._stack = contextlib.ExitStack()
        self._host: list[int] = []

    @contextlib.contextmanager
    def paused(self):
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def switch(self, is_on):
        """Begins or ends the counting; the modes cost time in steps that are not counted."""
        if is_on and not self.is_on:
            self._stack.enter_context(_FunctionCounter(self))
            self._stack.enter_context(_DispatchCounter(self))
        elif not is_on:
            self._stack.close()
        self.is_on = is_on

    def is_host(self, tensor):
        return any(one is tensor for one in self._host)

    def read(self, what):
        if self.is_on and (place := _place()) is not None:
            self.counts.reads[(*place, what)] += 1

    def communicate(self, what):
        if self.is_on:
            place = _place()
            self.counts.collectives[(place[0] if place else "host", what)] += 1

    def bring(self, copy):
        """Returns what an asynchronous copy brought, which is on the host."""
        self._host = [*self._host[-20:], copy]
        return copy


@contextlib.contextmanager
def counted_steps(steps=2):
    """Context manager in which the steady steps of one run are counted; gives their `StepCounts`."""
    counter = _Counter()
    finish, read = Run.finish_step, meter.AsyncHostCopy.read

    def finish_step(run, *args):
        result = finish(run, *args)
        step = run.session.state.global_step
        counter.counts.steps += counter.is_on
        counter.switch(_AFTER <= step < _AFTER + steps)
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(reads_forbidden())
        Run.finish_step = finish_step
        meter.AsyncHostCopy.read = lambda copy: counter.bring(read(copy))
        try:
            yield counter.counts
        finally:
            counter.switch(False)
            Run.finish_step, meter.AsyncHostCopy.read = finish, read
