"""Copies of the model on every process, whose gradients are added: DistributedDataParallel, through Accelerate.

Takes a recipe and this process's rows; gives losses and updates of all. Keeps true: gradients are those of the sum over
all rows divided by all targets, and are added once an update, with its last micro-batch; what Accelerate was asked for
is compared with what it became; no environment variable of Accelerate changes the run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from forgather.errors import DistributedError
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.collectives import refuse_other_weights
from forgather.ml.distributed.env import DistributedEnvironment, libraries_see
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.losses import LossRule
from forgather.ml.model_class import class_name
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.gradients import added, summed
from forgather.ml.strategy.precision import Precision
from forgather.ml.strategy.single import tell_sizes, to_device
from forgather.ml.strategy.state import held_optimizer, held_state, restore_optimizer, restore_weights
from forgather.ml.types import Topology, Update, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSettings:
    """How copies are kept alike.

    Args:
        ddp: settings of DistributedDataParallel, and its communication hook.
        scaling: settings of the loss scale of float16.
        sync_each_batch: add gradients with every micro-batch, as little memory as that saves.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    sync_each_batch: bool = False


class DataParallel:
    """The strategy of processes that each hold the whole model.

    Args:
        environment: who this process is.
        layout: sizes; data parallelism alone.
        settings: how copies are kept alike.
        use_cpu: compute on the CPU though there is an accelerator.

    Raises:
        DistributedError: FG722 where Accelerate became something else than what was asked for.
    """

    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None = None

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        settings: DataParallelSettings | None = None,
        use_cpu: bool = False,
    ) -> None:
        self._settings = settings or DataParallelSettings()
        device = environment.start(use_cpu=use_cpu)
        self.mesh = Mesh.of(layout, device.type)
        self.topology = Topology(
            rank=environment.rank,
            world_size=environment.world_size,
            device=device,
            is_writer=environment.rank == 0,
            local_rank=environment.local_rank,
            dp_rank=self.mesh.position.data,
            dp_size=layout.data_parallel_size,
        )
        self._facts = environment.facts_on(device)
        with libraries_see(self._facts):
            self._accelerator = make_accelerator(device, environment.world_size, self._settings.ddp)

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule; places, prepares and wraps it."""
        self._recipe = recipe
        device = self.topology.device
        self.model = recipe.make_model().to(device)
        self.view = self.model
        self.rule = recipe.make_rule(self.model)
        for step in recipe.prepare:
            step(self.model)
        refuse_other_weights({name: weight.shape for name, weight in self.model.named_parameters()})
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.precision = Precision(device, recipe.autocast, scaling=self._settings.scaling)
        self.precision.check(self._parameters)
        self._moves = device.type != "cpu"
        self._graph_is_known = not self._settings.ddp.static_graph
        ddp = self._settings.ddp
        # What is added with each micro-batch holds the sums of earlier ones: of these the mean is right.
        adds_again = self._settings.sync_each_batch or ddp.static_graph
        self._sums = not adds_again and ddp.comm_hook == DDPCommunicationHookType.NO
        self._engine = self._wrapped()

    def _wrapped(self) -> nn.Module:
        """Returns what forward passes go through, so that gradients are added."""
        if self.topology.world_size == 1 or not self._parameters:
            return self.model
        with libraries_see(self._facts), warnings.catch_warnings():
            # Accelerate hands the setting on under the name that it has in all releases of torch.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            engine: nn.Module = self._accelerator.prepare_model(self.model)
        if not isinstance(engine, DistributedDataParallel):
            raise _became(f"a {type(engine).__name__}", "DistributedDataParallel")
        if self._sums:
            engine.register_comm_hook(engine.process_group, lambda group, bucket: added(bucket.buffer(), group))
        return engine

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer of the model as it was built."""
        self.optimizer = self._recipe.make_optimizer(self.model)
        return self.optimizer

    def _place(self, batch: Any) -> Any:
        return to_device(batch, self.topology.device) if self._moves else batch

    def _without_adding(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        # A static graph is learned in the first backward pass, which must add gradients for that.
        last = last or self._settings.sync_each_batch or not self._graph_is_known
        self._graph_is_known = True
        if last or not isinstance(self._engine, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._engine.no_sync()

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window, over all processes; returns this process's share of its loss."""
        if not self.model.training:
            self._engine.train()
        total: Tensor | None = None
        last = len(window.batches) - 1
        for position, batch in enumerate(window.batches):
            with self._without_adding(last=position == last):
                loss = self._loss(self._place(batch), denom)
                # Where sums are not ours, what is added is divided by the number of processes.
                share = loss if self._sums else loss * self.topology.dp_size
                self.precision.scale(share).backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return torch.zeros((), device=self.topology.device) if total is None else total

    def _loss(self, batch: Any, denom: float | Tensor) -> Tensor:
        try:
            with self.precision.autocast():
                total = self.rule.total(self._engine, batch, denom=denom)
        except IndexError as error:
            tell_sizes(error, self.model, batch)
            raise
        return total / denom

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
    ) -> Update:
        """Clips, steps and zeroes, as one act; leaves the update out where float16 gradients overflowed."""
        assert self.optimizer is not None, "build_optimizer comes first"  # noqa: S101
        # Every process holds the same gradients, so each of them comes to the same norm and the same decision.
        if self.precision.unscale(self.optimizer):
            self.discard()
            self.precision.settle()
            return Update(skipped=True)
        norm = None
        if max_norm > 0 or want_norm:
            norm = get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if norm is not None and max_norm > 0:
            clip_grads_with_norm_(self._parameters, max_norm, norm)
        if before_step(norm):
            self.discard()
            self.precision.leave()
            return Update(grad_norm=norm, skipped=True)
        self.optimizer.step()
        after_step()
        self.precision.settle()
        self.discard()
        return Update(grad_norm=norm)

    def discard(self) -> None:
        """Drops the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss sum and the number of valid targets of a batch of this process, without gradients."""
        if self.model.training:
            self.model.eval()
        with self.precision.autocast():
            # The model itself: evaluating must not wait for processes that have fewer batches.
            total = self.rule.total(self.model, self._place(batch))
        return total, self.rule.count(batch)

    def reduce(self, value: Any) -> Any:
        """Returns the sum of a value over all processes, on every process."""
        return summed(value, self.mesh.dp_group, self.topology.device) if self.topology.dp_size > 1 else value

    def capture(self) -> LocalState:
        """Returns the state; every process has all of it, but for buffers, which are those of the first."""
        optimizer = held_optimizer(self.model, self.optimizer, self.precision)
        return held_state(self.model.state_dict(keep_vars=True), optimizer, is_first=self.topology.dp_rank == 0)

    def restore(self, saved: CheckpointReader) -> None:
        """Goes on with the weights of a checkpoint.

        Raises:
            CheckpointError: FG605, on every process, where they are those of another model.
        """
        restore_weights(class_name(self.model), self.model.state_dict(), [self.model], saved)

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Goes on with the optimizer of a checkpoint.

        Raises:
            CheckpointError: FG605, on every process, where it is the state of another one.
        """
        restore_optimizer(self.model, self.optimizer, saved, self.precision)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields the state of the model by name."""
        yield from self.model.state_dict().items()


def make_accelerator(device: torch.device, world_size: int, ddp: DistributedDataParallelKwargs) -> Accelerator:
    """Returns an Accelerator that does what it is told here, and nothing of its own.

    Raises:
        DistributedError: FG722 where it became something else.
    """
    _forget_earlier_state(device, world_size)
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dataloader_config=DataLoaderConfiguration(),
            dynamo_plugin=TorchDynamoPlugin(
                backend="no", mode="default", fullgraph=False, dynamic=False, use_regional_compilation=False
            ),
            kwargs_handlers=[ddp],
        )
    torch.set_num_threads(threads)
    check_engine(accelerator, device, world_size)
    return accelerator


def _forget_earlier_state(device: torch.device, world_size: int) -> None:
    """Drops what Accelerate keeps for the process where it is not that of this run; who took it keeps what it took."""
    kept = PartialState._shared_state
    if kept and (kept.get("num_processes") != world_size or kept["device"].type != device.type):
        AcceleratorState._reset_state(reset_partial_state=True)
    elif AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no":
        AcceleratorState._reset_state()


def check_engine(accelerator: Accelerator, device: torch.device, world_size: int) -> None:
    """Compares what Accelerate became with what was asked for.

    Raises:
        DistributedError: FG722 for other processes, another device or another engine.
    """
    if accelerator.num_processes != world_size:
        raise _became(f"{accelerator.num_processes} process(es)", f"{world_size}")
    if accelerator.device.type != device.type:
        raise _became(f"on the device {accelerator.device}", str(device))
    kind = str(accelerator.distributed_type.value)
    if world_size > 1 and not kind.startswith("MULTI_"):
        raise _became(f"the engine {kind}", "DistributedDataParallel")


def _became(found: str, asked: str) -> DistributedError:
    return DistributedError(
        f"Accelerate runs {found}, and the config asks for {asked}",
        code="FG722",
        hint="start with 'fgcli train' or torchrun, or with 'accelerate launch' without options of an engine, and let "
        "the config choose",
        expected=asked,
        found=found,
    )
