"""Data parallelism with replicated models: DistributedDataParallel (DDP), wrapped by Accelerate.

The gradients are those of the sum of losses over the rows of all ranks, divided by the number of valid targets on all
ranks. They are reduced once per optimizer step, in the backward pass of its last micro-batch. The engine that
Accelerate chose is compared with the requested one, so that environment variables of Accelerate do not change the run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.distributed.collectives import require_equal_weights
from forgather.ml.distributed.env import DistributedEnvironment, exported_facts
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.ddp_buckets import fixed_buckets, note_unused_weights
from forgather.ml.strategy.gradients import sum_bucket_async
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.strategy.shapes_only import has_shapes_only
from forgather.ml.strategy.topology import topology_of

_log = get_logger(__name__)

_HOOKS_WITH_STATE = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


class DataParallel(ModelStrategy):
    """The strategy for ranks that each have a replica of the whole model.

    Args:
        environment: the rank, the world size and the process group.
        layout: the sizes of the mesh axes. Only the data-parallel and context-parallel axes may be larger than 1.
        ddp: the settings of DistributedDataParallel, including its communication hook. None for the defaults. With
            `broadcast_buffers=None`, buffers are broadcast if they are part of the model's state.
        scaling: the arguments of `torch.amp.GradScaler`, which scales the loss in float16. None for the defaults.
        sync_each_batch: True to reduce gradients after every micro-batch, which may save memory.
        use_cpu: True to compute on the CPU even if there is an accelerator.

    Raises:
        DistributedError: FG722 if Accelerate runs on another number of processes, on another device, or with an engine
            other than DistributedDataParallel.
    """

    title = "DDP"

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        ddp: DistributedDataParallelKwargs | None = None,
        scaling: Mapping[str, Any] | None = None,
        sync_each_batch: bool = False,
        use_cpu: bool = False,
    ) -> None:
        self._ddp = ddp or DistributedDataParallelKwargs()
        self._scaling = scaling
        self._sync_each_batch = sync_each_batch
        device = environment.start(use_cpu=use_cpu)
        self.layout = layout
        self.mesh = Mesh.create(layout, device.type)
        self.topology = topology_of(environment, layout, device)
        self._facts = environment.facts_on(device)
        with exported_facts(self._facts):
            self._accelerator = make_accelerator(device, environment.world_size, self._ddp)

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule; places the model, applies the `prepare` steps, and wraps it in DDP."""
        super().build(recipe)
        require_equal_weights({name: weight.shape for name, weight in self.model.named_parameters()})
        # Each reduction of accumulated gradients includes those of earlier micro-batches again, which are already equal
        # on all ranks: a mean leaves them unchanged, a sum would count them once per rank.
        self._sums = not self._sync_each_batch and self._ddp.comm_hook == DDPCommunicationHookType.NO
        self.engine = self._wrapped()

    @property
    def gradients_are_views(self) -> bool:
        """Whether gradients are views of DDP's buckets, so that the buckets take no further memory."""
        return bool(self._ddp.gradient_as_bucket_view)

    def _wrapped(self) -> nn.Module:
        """Returns the module that forward passes must call, so that DDP reduces the gradients."""
        if self.topology.world_size == 1 or not self._parameters:
            return self.model
        # DDP's reducer reads the addresses of weights, which have none. The planner adds its buckets.
        if has_shapes_only():
            return self.model
        settings = self._ddp
        if settings.broadcast_buffers is None:
            settings = replace(settings, broadcast_buffers=has_saved_buffers(self.model))
        self._accelerator.ddp_handler = settings
        with exported_facts(self._facts), fixed_buckets(), warnings.catch_warnings():
            # Accelerate passes the setting under the name that all releases of torch know.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            engine: nn.Module = self._accelerator.prepare_model(self.model)
        if not isinstance(engine, DistributedDataParallel):
            raise _other_engine(f"a {type(engine).__name__}", "DistributedDataParallel")
        if self._sums:
            engine.register_comm_hook(
                engine.process_group, lambda group, bucket: sum_bucket_async(bucket.buffer(), group)
            )
        return engine

    def trained_parameters_changed(self) -> None:
        """Wraps the model in DDP again, whose reducer waits for the gradients of the parameters that it was made with.

        Collective: every rank must call it.
        """
        if isinstance(self.engine, DistributedDataParallel):
            # Hooks of the old reducer would reduce each gradient a second time.
            self.engine._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self.engine = self._wrapped()

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if is_last or self._sync_each_batch or not isinstance(self.engine, DistributedDataParallel):
            return super()._gradient_sync(is_last=is_last)
        return self.engine.no_sync()

    def _backward(self, loss: Tensor) -> None:
        # Without our hook DDP takes the mean over processes, which undoes this factor.
        super()._backward(loss if self._sums else loss * self.topology.world_size)

    def _reduce_gradients(self) -> None:
        if isinstance(self.engine, DistributedDataParallel):
            try:
                # torch itself looks in the next step, when these gradients have changed the weights of each rank.
                self.engine._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                note_unused_weights(error, self.engine)
                raise

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state of a checkpoint; see `ModelStrategy.restore_optimizer`.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer.
        """
        super().restore_optimizer(saved)
        if self._ddp.comm_hook in _HOOKS_WITH_STATE and isinstance(self.engine, DistributedDataParallel):
            _log.warning(
                "comm_hook %s: its error feedback is in no checkpoint and starts again, so the weights will differ "
                "from those of an uninterrupted run",
                self._ddp.comm_hook.value,
            )


def data_parallel_strategy(
    environment: DistributedEnvironment,
    args: Any,
    *,
    scaling: Mapping[str, Any],
    sync_each_batch: bool,
    ddp: Callable[[], DistributedDataParallelKwargs],
) -> DataParallel:
    """Returns the strategy for training arguments that request replicated weights.

    Args:
        environment: the rank, the world size and the process group.
        args: the training arguments.
        scaling: the arguments of `torch.amp.GradScaler`, which scales the loss in float16.
        sync_each_batch: True to reduce gradients after every micro-batch.
        ddp: a function that returns the settings of DistributedDataParallel.

    Raises:
        DistributedError: FG704 if the product of the parallel sizes is not the number of processes; FG722 if Accelerate
            runs on another number of processes, on another device, or with an engine other than
            DistributedDataParallel.
    """
    layout = Layout.for_world(
        environment.world_size,
        data=args.data_parallel_size,
        tensor=args.tensor_parallel_size,
        context=args.context_parallel_size,
    )
    settings: dict[str, Any] = {"ddp": ddp(), "scaling": scaling, "sync_each_batch": sync_each_batch}
    return DataParallel(environment, layout, use_cpu=args.use_cpu, **settings)


def has_saved_buffers(model: nn.Module) -> bool:
    """Returns whether a model has buffers that are part of its state, such as the running means of batch norms.

    Other buffers, such as the frequencies of rotary embeddings, are computed when the model is made. They are equal on
    all ranks, and no checkpoint has them, so training may not depend on changes of them.

    Args:
        model: the model.
    """
    state = model.state_dict(keep_vars=True)
    return any(name in state for name, _ in model.named_buffers(remove_duplicate=False))


def make_accelerator(device: torch.device, world_size: int, ddp: DistributedDataParallelKwargs) -> Accelerator:
    """Returns an Accelerator that ignores the environment variables and the configuration file of Accelerate.

    Args:
        device: the device that this rank computes on.
        world_size: the number of processes.
        ddp: the settings of DistributedDataParallel.

    Raises:
        DistributedError: FG722 if Accelerate runs on another number of processes, on another device, or with an engine
            other than DistributedDataParallel.
    """
    _forget_earlier_state(device, world_size)
    # Accelerate sets the number of threads in a CPU run of several processes, which the launcher or the user decides.
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
    """Drops the state that Accelerate keeps in the Python process, if it does not fit this run.

    Accelerators that were made earlier keep their own state.
    """
    # Accelerate keeps one state until the Python process ends, and a new Accelerator adopts it without a comparison.
    kept = PartialState._shared_state
    if kept and (kept.get("num_processes") != world_size or kept["device"].type != device.type):
        AcceleratorState._reset_state(reset_partial_state=True)
    elif AcceleratorState._shared_state and AcceleratorState().mixed_precision != "no":
        AcceleratorState._reset_state()


def check_engine(accelerator: Accelerator, device: torch.device, world_size: int) -> None:
    """Compares what Accelerate runs with what was requested.

    Args:
        accelerator: the Accelerator to check.
        device: the requested device.
        world_size: the requested number of processes.

    Raises:
        DistributedError: FG722 if the number of processes, the device or the engine differs.
    """
    # Without this check each rank would silently train alone, for example under `accelerate launch --cpu`.
    if accelerator.num_processes != world_size:
        raise _other_engine(f"{accelerator.num_processes} process(es)", f"{world_size}")
    if accelerator.device.type != device.type:
        raise _other_engine(f"on the device {accelerator.device}", str(device))
    kind = str(accelerator.distributed_type.value)
    if world_size > 1 and not kind.startswith("MULTI_"):
        raise _other_engine(f"the engine {kind}", "DistributedDataParallel")


def _other_engine(found: str, asked: str) -> DistributedError:
    return DistributedError(
        f"Accelerate runs {found}, and the config asks for {asked}",
        code="FG722",
        hint="start with 'fgcli train' or torchrun, or with 'accelerate launch' without engine options, and let the "
        "config choose the engine",
        expected=asked,
        found=found,
    )
