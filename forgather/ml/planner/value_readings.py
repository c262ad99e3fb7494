"""Engines and optimizers that read values, where tensors are fake and have none.

DeepSpeed reads the norm of the gradients, and a gradient scaler reads whether they overflowed. Neither changes what is
allocated as long as the step is taken. `ReadingZeros` therefore answers zero: no overflow, and a norm below every
limit. In its forward pass, a model may decide by a value what it computes: there the trace fails.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from forgather.ml.planner.operators import DEVICE_OF, EagerMode, has_dtensor
from forgather.ml.planner.remembered_fakes import run_below


class ReadingZeros(EagerMode):
    """Context manager in which the value of a fake scalar is zero, unless it is known. Real scalars keep theirs.

    Args:
        model: the model in whose forward pass no value is answered; None while models are built, which may read values
            of the weights that they initialize.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._hooks: list[Any] = []
        self._depth = 0

    def __enter__(self) -> ReadingZeros:
        if self._model is not None:
            self._hooks = [
                self._model.register_forward_pre_hook(lambda *_: self._moved(1)),
                self._model.register_forward_hook(lambda *_: self._moved(-1), always_call=True),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _moved(self, change: int) -> None:
        self._depth += change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, or answers a reading."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if has_dtensor(tuple(types)):
            return NotImplemented
        if func is not torch.ops.aten._local_scalar_dense.default or self._depth > 0:
            return run_below(func, types, args, kwargs or {})
        if not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args)
        try:
            return func(*args)
        except DataDependentOutputException:
            return 0.0 if args[0].dtype.is_floating_point else 0


def keep_loss_scale(precision: Any) -> None:
    """Makes the loss scale of float16 a real tensor, so that it can be read.

    Args:
        precision: the `Precision` of a strategy; None if it has none.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        with unset_fake_temporarily():
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Context manager in which Python's garbage collector looks at objects that were made inside of it only.

    A process that has imported torch has a million others. If the caller has frozen objects, they stay frozen, as do
    those that were made until here.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def living_tensors(fake: FakeTensorMode) -> Iterator[Tensor]:
    """Yields all fake tensors of a mode that are alive, such as the buffers that an engine keeps to itself.

    Args:
        fake: the mode that made them.

    Shapes:
        Yields tensors of any shapes.
    """
    gc.collect()
    for item in gc.get_objects():
        if type(item) is FakeTensor and item.fake_mode is fake and item.device.type != "meta":
            yield item
