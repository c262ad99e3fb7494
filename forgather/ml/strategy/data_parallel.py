"""Copies of the model on every process, whose gradients are added: DistributedDataParallel, through Accelerate.

Takes a recipe and this process's rows; gives losses and updates of all. Keeps true: gradients are those of the sum over
all rows divided by all targets, and are added once an update, with its last micro-batch; what Accelerate was asked for
is compared with what it became; no environment variable of Accelerate changes the run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
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

from forgather.errors import DistributedError
from forgather.ml.distributed.collectives import require_equal_weights
from forgather.ml.distributed.env import DistributedEnvironment, exported_facts
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.gradients import sum_bucket_async
from forgather.ml.strategy.model_strategy import ModelStrategy, topology_of


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


class DataParallel(ModelStrategy):
    """The strategy of processes that each hold the whole model.

    Args:
        environment: who this process is.
        layout: sizes; data parallelism alone.
        settings: how copies are kept alike.
        use_cpu: compute on the CPU though there is an accelerator.

    Raises:
        DistributedError: FG722 where Accelerate became something else than what was asked for.
    """

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        settings: DataParallelSettings | None = None,
        use_cpu: bool = False,
    ) -> None:
        self._settings = settings or DataParallelSettings()
        self._scaling = self._settings.scaling
        device = environment.start(use_cpu=use_cpu)
        self.layout = layout
        self.mesh = Mesh.of(layout, device.type)
        self.topology = topology_of(environment, layout, device)
        self._facts = environment.facts_on(device)
        with exported_facts(self._facts):
            self._accelerator = make_accelerator(device, environment.world_size, self._settings.ddp)

    @property
    def title(self) -> str:
        """The name of the strategy for people."""
        return "DDP"

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule; places, prepares and wraps it."""
        super().build(recipe)
        require_equal_weights({name: weight.shape for name, weight in self.model.named_parameters()})
        ddp = self._settings.ddp
        self._graph_is_known = not ddp.static_graph
        # Each sync of accumulated gradients would add earlier sums again: then only the mean is right.
        syncs_again = self._settings.sync_each_batch or ddp.static_graph
        self._sums = not syncs_again and ddp.comm_hook == DDPCommunicationHookType.NO
        self.engine = self._wrapped()

    def _wrapped(self) -> nn.Module:
        """Returns what forward passes go through, so that gradients are added."""
        if self.topology.world_size == 1 or not self._parameters:
            return self.model
        with exported_facts(self._facts), warnings.catch_warnings():
            # Accelerate hands the setting on under the name that it has in all releases of torch.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            engine: nn.Module = self._accelerator.prepare_model(self.model)
        if not isinstance(engine, DistributedDataParallel):
            raise _became(f"a {type(engine).__name__}", "DistributedDataParallel")
        if self._sums:
            engine.register_comm_hook(
                engine.process_group, lambda group, bucket: sum_bucket_async(bucket.buffer(), group)
            )
        return engine

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        # A static graph is learned in the first backward pass, which must add gradients for that.
        syncs = is_last or self._settings.sync_each_batch or not self._graph_is_known
        self._graph_is_known = True
        if syncs or not isinstance(self.engine, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.engine.no_sync()

    def _backward(self, loss: Tensor) -> None:
        # DDP's own way takes the mean over processes, which undoes this factor.
        super()._backward(loss if self._sums else loss * self.topology.dp_size)


def data_parallel_strategy(
    environment: DistributedEnvironment,
    args: Any,
    *,
    scaling: Mapping[str, Any],
    sync_each_batch: bool,
    ddp: Callable[[], DistributedDataParallelKwargs],
) -> DataParallel:
    """Returns the strategy of arguments that ask for whole copies of the model.

    Args:
        environment: the rank of this process, and the process group.
        args: the training arguments.
        scaling: settings of the loss scale of float16.
        sync_each_batch: add gradients with every micro-batch.
        ddp: gives the settings of DistributedDataParallel.

    Raises:
        DistributedError: FG704 for sizes that do not make the processes, FG722 for another engine of Accelerate.
    """
    layout = Layout.of(environment.world_size, data=args.data_parallel_size, tensor=args.tensor_parallel_size)
    settings = DataParallelSettings(ddp=ddp(), scaling=scaling, sync_each_batch=sync_each_batch)
    return DataParallel(environment, layout, settings=settings, use_cpu=args.use_cpu)


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
        hint="start with 'fgcli train' or torchrun, or with 'accelerate launch' without engine options, and let the "
        "config choose the engine",
        expected=asked,
        found=found,
    )
