"""DistributedDataParallel with buckets that are the same in every step, so that a resumed run has the same bits.

The input is a model that Accelerate wraps. The result is a `FixedBuckets`. torch itself makes the buckets again after
the first step, in the order in which gradients arrived. The position of a gradient in its bucket determines the order
in which the ranks' numbers are added, and more than two numbers have another sum in another order. So the first step
after a resume would differ in the last digits from the same step of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.log import get_logger

_log = get_logger(__name__)


class FixedBuckets(DistributedDataParallel):
    """`DistributedDataParallel` that makes its buckets once, in the reverse order of the model's weights.

    Gradients arrive in about this order, so buckets are still reduced during the backward pass. With
    `find_unused_parameters`, torch makes these buckets itself, and keeps them.

    Args:
        module: the model.
        find_unused_parameters: as in `DistributedDataParallel`.
        static_graph: as in `DistributedDataParallel`.
        **settings: the other arguments of `DistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, find_unused_parameters: bool = False, static_graph: bool = False, **settings: Any
    ) -> None:
        self._rebuilds = static_graph or not find_unused_parameters
        self._only_records = False
        super().__init__(module, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **settings)
        if self._rebuilds and not self._rebuild_now():
            _log.warning(
                "torch %s makes the buckets of DistributedDataParallel again after the first step: with more than two "
                "processes, a resumed run can differ from an uninterrupted one in the last digits",
                torch.__version__,
            )

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        weights, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (weights[::-1], are_sparse[::-1]) if self._rebuilds else (weights, are_sparse)

    def _rebuild_now(self) -> bool:
        """Makes the buckets as if gradients had arrived in the order of the reducer's weights; torch does so once.

        Returns False if this version of torch has no such functions.
        """
        push, rebuild = (getattr(self.reducer, name, None) for name in ("_push_all_rebuilt_params", "_rebuild_buckets"))
        if push is None or rebuild is None:
            return False
        push()
        return bool(rebuild())

    def register_comm_hook(self, state: object, hook: Callable[..., Future[Tensor]]) -> None:
        """Registers the function that reduces the gradients of a bucket; see `DistributedDataParallel`.

        Args:
            state: the first argument of the hook.
            hook: the function, which is not called while a static graph is only recorded.
        """
        if not self.static_graph:
            super().register_comm_hook(state, hook)
            return

        @functools.wraps(hook)  # torch looks at the name and the annotations of a hook
        def hook_unless_recording(state: object, bucket: Any) -> Future[Tensor]:
            return noop_hook(None, bucket) if self._only_records else hook(state, bucket)

        super().register_comm_hook(state, hook_unless_recording)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes reduce no gradients."""
        if not self.static_graph or self._static_graph_delay_allreduce_enqueued:
            with super().no_sync():
                yield
            return
        # torch records a static graph in the first backward pass of all, and would reduce these gradients. No later
        # step reduces them twice, so a resumed run would differ in its first step.
        if not self._comm_hooks:
            self.register_comm_hook(self.process_group, allreduce_hook)
        self._only_records = True
        try:
            yield
        finally:
            self._only_records = False

    def names_of(self, indices: list[int]) -> list[str]:
        """Returns the names of weights, given by their numbers in messages of torch."""
        names = {id(weight): name for name, weight in self.module.named_parameters()}
        weights, _ = self._build_params_for_reducer()
        return [names[id(weights[index])] for index in indices]


@contextlib.contextmanager
def fixed_buckets() -> Iterator[None]:
    """Context manager in which Accelerate wraps models in `FixedBuckets`."""
    # Accelerate has no setting for the class, and finds it by this name.
    original = torch.nn.parallel.DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = FixedBuckets  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.nn.parallel.DistributedDataParallel = original  # type: ignore[misc]


def note_unused_weights(error: BaseException, engine: nn.Module) -> None:
    """Adds a note to torch's error about weights without a gradient: their names, and the setting that allows them.

    Args:
        error: the error that gets the note, if it is that one.
        engine: the module that training calls.
    """
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    if found is not None and isinstance(engine, FixedBuckets):
        names = engine.names_of([int(number) for number in found[1].split()])
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        error.add_note(f"weights without a gradient: {shown}; ddp_find_unused_parameters: true allows them")
