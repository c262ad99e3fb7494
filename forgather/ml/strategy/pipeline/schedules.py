"""torch's pipeline schedules: placement of stages on ranks, number of micro-batches, and the steps of a schedule.

`place_stages` and `num_micro_batches` need no process group. They refuse sizes that torch would refuse on one rank
while the other ranks wait, so that every rank raises the error before anything runs. `ScheduleRunner` runs forward and
backward passes over the stages on this rank. Gradients add up over steps, and the schedule never scales them. torch
fixes the shapes of a schedule in its first step, so each shape of inputs has its own schedule and buffers. `StageRNG`
gives each stage and each replica its own random numbers. The global random state stays equal on all ranks of a replica,
because a collator may draw from it, and because restoring it must restore the random numbers of every stage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from forgather.errors import DistributedError, nearest
from forgather.ml.documents import Documents
from forgather.ml.strategy.pipeline.microbatch_split import StepInputs
from forgather.pipeline_schedules import SCHEDULES, ScheduleFacts


def facts_of(name: str) -> ScheduleFacts:
    """Returns the properties of a schedule.

    Args:
        name: the name of the schedule.

    Raises:
        DistributedError: FG760 if torch has no schedule with this name.
    """
    if name not in SCHEDULES:
        raise DistributedError(f"no schedule {name!r}", code="FG760", hint=nearest(name, list(SCHEDULES)))
    return SCHEDULES[name]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of stages on the ranks of a pipeline.

    Args:
        num_ranks: the number of ranks in the pipeline.
        stages_per_rank: the number of stages on each rank.
        v_shaped: True if every second round of stages is assigned in reverse rank order, so that with two stages per
            rank the first rank has the first and the last stage.

    Example:
        >>> Placement(2, 2, v_shaped=False).stages_of(0), Placement(2, 2, v_shaped=True).stages_of(0)
        ((0, 2), (0, 3))
    """

    num_ranks: int
    stages_per_rank: int
    v_shaped: bool

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of the stages on a rank, in ascending order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def rank_of(self, stage: int) -> int:
        """Returns the rank of a stage."""
        turn, position = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - position if self.v_shaped and turn % 2 else position

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which computes the loss."""
        return self.rank_of(self.num_stages - 1)


def place_stages(name: str, num_ranks: int, *, stages_per_rank: int | None, num_stages: int | None) -> Placement:
    """Returns the placement of stages on ranks.

    Args:
        name: the name of the schedule.
        num_ranks: the number of ranks in the pipeline.
        stages_per_rank: the number of stages on each rank. None to derive it from the number of stages or from the
            schedule.
        num_stages: the number of stages that the model is cut into. None to derive it from `stages_per_rank` or from
            the schedule.

    Raises:
        DistributedError: FG760 if the schedule is unknown, or if schedule, stages and ranks do not fit together.
    """
    facts = facts_of(name)
    if stages_per_rank is None:
        if num_stages is not None:
            if num_stages % num_ranks:
                raise _no_fit(
                    f"the model is cut into {num_stages} stages, which do not distribute evenly over {num_ranks} ranks",
                    f"cut it into {num_ranks} stages, or a multiple of that",
                )
            stages_per_rank = num_stages // num_ranks
        else:
            stages_per_rank = facts.usual_stages
    elif num_stages is not None and num_stages != num_ranks * stages_per_rank:
        raise _no_fit(
            f"the model is cut into {num_stages} stages, and {num_ranks} ranks with stages_per_rank "
            f"{stages_per_rank} hold {num_ranks * stages_per_rank}",
            f"give a split_spec with {num_ranks * stages_per_rank - 1} cuts, or change stages_per_rank",
        )
    if facts.one_stage and stages_per_rank != 1:
        raise _no_fit(
            f"{name} runs one stage on each rank, and there are {stages_per_rank}",
            f"use ScheduleInterleaved1F1B, or cut the model into {num_ranks} stages",
        )
    if facts.v_shaped and stages_per_rank != 2:
        raise _no_fit(
            f"{name} runs two stages on each rank, and stages_per_rank is {stages_per_rank}",
            f"cut the model into {2 * num_ranks} stages",
        )
    return Placement(num_ranks, stages_per_rank, facts.v_shaped)


def _no_fit(message: str, hint: str) -> DistributedError:
    return DistributedError(message, code="FG760", hint=hint).about("schedule_class")


def num_micro_batches(name: str, placement: Placement, rows: int, asked: int | None) -> int:
    """Returns the number of micro-batches that the rows of one step are split into.

    Args:
        name: the name of the schedule.
        placement: the placement of the stages on ranks.
        rows: the number of rows in one step of one replica.
        asked: the number of micro-batches in the settings. None for the smallest number that is at least the number of
            stages and that the rows and the schedule allow. If they allow only smaller numbers, the largest of these is
            used.

    Raises:
        DistributedError: FG761 if the schedule or the rows do not allow the number of micro-batches.
    """
    legal = [chunks for chunks in range(1, rows + 1) if _obstacle(name, placement, rows, chunks) is None]
    # The error names `pipeline_chunks` only if the user set it.
    is_set = asked is not None
    if asked is None:
        enough = [chunks for chunks in legal if chunks >= placement.num_stages]
        if legal:
            return enough[0] if enough else legal[-1]
        asked = placement.num_stages
    obstacle = _obstacle(name, placement, rows, asked)
    if obstacle is None:
        return asked
    possible = ", ".join(map(str, legal[:10]))
    also = f", and pipeline_chunks to {placement.num_stages} or more" if is_set else ""
    raise DistributedError(
        obstacle,
        code="FG761",
        hint=f"with this batch size, set pipeline_chunks to one of: {possible}"
        if legal
        else f"set per_device_train_batch_size to a multiple of {placement.num_stages}{also}",
    ).about("pipeline_chunks" if is_set else "schedule_class")


def _obstacle(name: str, placement: Placement, rows: int, chunks: int) -> str | None:
    """Returns why the rows cannot be split into the given number of micro-batches, or None if they can."""
    facts = facts_of(name)
    # With uneven parts the last rank would raise and the others would wait for it until the process group times out.
    if rows % chunks:
        return f"{rows} rows (per_device_train_batch_size) cannot be split evenly into {chunks} micro-batches"
    if facts.chunk_per_stage and chunks < placement.num_stages:
        return f"{name} needs as many micro-batches as stages ({placement.num_stages}), and there are {chunks}"
    if facts.rounds and chunks % (rounds := max(1, chunks // placement.num_ranks)):
        return (
            f"{name} runs {chunks} micro-batches on {placement.num_ranks} ranks in {rounds} rounds, and they do not "
            f"split evenly into rounds"
        )
    return None


_NOTHING_TO_DO = contextlib.nullcontext()
_MAX_SHAPES = 16
"""The number of input shapes whose buffers are kept. The least recently used ones are dropped."""

MicroBatchLoss = Callable[[Any, int], Tensor]


class ScheduleRunner:
    """Runs forward and backward passes over the stages on this rank.

    Args:
        stages: the stage modules on this rank, by stage number.
        schedule: the name of the schedule.
        placement: the placement of all stages on ranks.
        parts: the number of micro-batches.
        group: the process group of the pipeline.
        device: the device that this rank computes on.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: str,
        placement: Placement,
        parts: int,
        group: Any,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.placement = placement
        self.parts = parts
        self.group = group
        self.device = device
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._loss: MicroBatchLoss | None = None
        self._chunks: list[Documents | None] = []
        self._after_stage: Callable[[int], None] | None = None
        self._sharded = any(isinstance(stage, FSDPModule) for stage in stages.values())
        # Schedules that split the backward pass run parts of a compiled graph twice, and torch refuses that for graphs
        # whose buffers are donated.
        if facts_of(schedule).splits_backward:
            torch._functorch.config.donated_buffer = False

    def run(
        self, inputs: StepInputs, loss: MicroBatchLoss, *, after_stage: Callable[[int], None] | None = None
    ) -> Tensor | None:
        """Adds the gradients of one step, and returns the sum of its losses, or None on a rank without the last stage.

        Args:
            inputs: the inputs of the stages. The number of rows is a multiple of `parts`.
            loss: a function that returns the loss of a micro-batch. It is called with the output of the last stage and
                the number of the micro-batch.
            after_stage: a function that is called with the number of a stage when its last backward pass of the step
                has ended. None to call nothing.

        Raises:
            Exception: the exception that a stage raised, without the RuntimeError that torch wraps around it.

        Shapes:
            The function `loss` returns a scalar tensor. Returns a scalar tensor or None.
        """
        self._loss, self._after_stage = loss, after_stage
        size = inputs.rows // self.parts
        documents = inputs.documents
        self._chunks[:] = [documents and documents[size * i : size * (i + 1)] for i in range(self.parts)]
        made, is_new = self._schedule_for(inputs)
        # The first step of a schedule allocates buffers for its shapes.
        earlier = self._take_gradients() if is_new and self._sharded else {}
        first = inputs.first if 0 in self.stages else ()
        has_loss = self.placement.num_stages - 1 in self.stages
        losses: list[Tensor] = []
        # The target of a micro-batch is its number: torch passes a single tensor to the loss, which needs the whole
        # batch.
        target = torch.arange(self.parts) if has_loss else None
        try:
            # Without outputs: merged, the logits of all micro-batches would stay in memory.
            made.step(*first, target=target, losses=losses, return_outputs=False, **inputs.every)
        except RuntimeError as error:
            raise _stage_exception(error) from None
        finally:
            self._loss = self._after_stage = None
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return torch.stack([part.detach() for part in losses]).sum() if has_loss else None

    def _schedule_for(self, inputs: StepInputs) -> tuple[Any, bool]:
        key = inputs.shape
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], False
        while len(self._kept) >= _MAX_SHAPES:
            self._kept.popitem(last=False)
        made = self._kept[key] = self._make_schedule()
        return made, True

    def _make_schedule(self) -> Any:
        stages = [
            _Stage(module, index, self.placement.num_stages, self.device, group=self.group, done=self._stage_done)
            for index, module in sorted(self.stages.items())
        ]
        for stage in stages:
            stage.documents_of_chunks = self._chunks
        held = stages[0] if facts_of(self.schedule).one_stage else stages
        kind = get_schedule_class(self.schedule.removeprefix("Schedule"))
        # With `scale_grads` torch would divide the accumulated gradients of all earlier steps again in each step.
        return kind(held, self.parts, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, output: Any, number: Tensor) -> Tensor:
        assert self._loss is not None, "losses are computed within a step"  # noqa: S101
        return self._loss(output, int(number))

    def _stage_done(self, index: int) -> None:
        if self._after_stage is not None:
            self._after_stage(index)

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Removes and returns the gradients: torch drops those of sharded parameters when it allocates buffers."""
        found = {}
        for stage in self.stages.values():
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    found[parameter] = parameter.grad
                    parameter.grad = None
        return found


class _Stage(PipelineStage):
    """A stage that calls `done` after its last backward pass of a step, and whose shapes are inferred from zeros.

    torch would infer them from uninitialized memory, which may have any values. The stage tells its module which
    documents the rows of each micro-batch hold.
    """

    documents_of_chunks: Sequence[Documents | None] = ()

    def __init__(self, *args: Any, done: Callable[[int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done = done

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of a micro-batch."""
        self.submod.documents = self.documents_of_chunks[fwd_chunk_id]  # type: ignore[assignment]
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.submod.documents = None  # type: ignore[assignment]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Computes the gradients of a micro-batch; see `PipelineStage`."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if last_backward:
            self._done(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Computes the gradients of weights of a micro-batch; see `PipelineStage`."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if last_backward:
            self._done(self.stage_index)

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        if not self.is_first:
            with torch.no_grad():
                for tensor in args:
                    tensor.zero_()
        return super()._compute_outputs(*args, module=module, **kwargs)


def _stage_exception(error: BaseException) -> BaseException:
    """Returns the exception that a stage raised, which torch wraps in RuntimeErrors that print tensors."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class StageRNG:
    """The random numbers of forward and backward passes on one rank.

    Args:
        replica: the number of the model replica that this rank belongs to.
        position: the rank in the pipeline.
        draws: True if the model draws random numbers. If it is False, no random state is changed.
    """

    def __init__(self, *, replica: int, position: int, draws: bool) -> None:
        self.replica = replica
        self.position = position
        self.draws = draws

    def isolated(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that seeds torch for this rank, and restores the previous random state at its end.

        Every rank of a pipeline must enter it the same number of times, because entering draws a random number from the
        global random state.
        """
        return self._seeded() if self.draws else _NOTHING_TO_DO

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        # One draw from the generator whose state is equal on all ranks of the replica: its state in a checkpoint
        # determines the random numbers of every stage.
        shared = int(torch.randint(2**62, (), dtype=torch.int64))
        kept = torch.get_rng_state()
        text = f"{shared} {self.replica} {self.position}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        try:
            yield
        finally:
            torch.set_rng_state(kept)


def draws_random_numbers(model: nn.Module, config: Any = None) -> bool:
    """Returns whether a model draws random numbers in training, because of a dropout above zero or a similar setting.

    Args:
        model: the model whose modules are searched for dropout.
        config: the configuration of the model. A float above zero with "drop", "noise" or "jitter" in its name means
            that the model draws random numbers. None if there is no configuration.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            return True
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    words = ("drop", "noise", "jitter")
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in words)
        for name, value in settings.items()
    )
