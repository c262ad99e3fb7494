"""The ways to train one config on some devices: strategies, recomputation, offload, and divisions of an update.

Takes the settings of the config and a number of devices; gives `Choice`s, each with the settings of the trainer that
select it. Whether a config may use a choice is not decided here: `fgcli check` refuses what does not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS
from forgather.planner.zero_settings import STAGE, ZERO, zero_settings

TRAINER, ACCEL_TRAINER = "forgather.ml:Trainer", "forgather.ml:AccelTrainer"
PIPELINE_TRAINER = "forgather.ml:PipelineTrainer"
TRAINERS = (TRAINER, ACCEL_TRAINER, PIPELINE_TRAINER)
"""The trainers whose configs can take another strategy: their templates read `trainer_class`."""

ROWS, MICRO_BATCHES, RECOMPUTE = "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"
STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)
"""What a choice may offload to the memory of the host."""
GLOBAL_BATCH, SCHEDULE, CHUNKS = "global_batch_size", "schedule_class", "pipeline_chunks"
_OF_PIPELINES = (SCHEDULE, CHUNKS, "pipeline_parallel_size", "stages_per_rank", "split_spec", "checkpoint_sequential")
POSITIONS = "context_parallel_size"
DEFAULTS: Mapping[str, Any] = {
    ROWS: 8,
    MICRO_BATCHES: 1,
    GLOBAL_BATCH: None,
    RECOMPUTE: False,
    "fsdp": None,
    "fsdp_config": None,
    "deepspeed": None,
    "tensor_parallel_size": 1,
    POSITIONS: 1,
    "tp_plan": None,
    "data_parallel_size": None,
    SCHEDULE: "ScheduleGPipe",
    CHUNKS: None,
    "pipeline_parallel_size": None,
    "stages_per_rank": None,
    "split_spec": None,
    "checkpoint_sequential": False,
}
"""The settings that a choice decides, with the values that trainers have without them."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, without the size of its micro-batches.

    Args:
        title: the name in tables.
        trainer: the constructor of `main`.
        settings: the settings of the trainer that select it; settings of `DEFAULTS` that are missing keep the default.
        processes: the number of processes.
        replicas: the number of processes that read different rows.
        divided: among how many processes weights, gradients and optimizer state are divided at most, in this order;
            empty if these sizes do not follow from those of the model, or are not all on the device.
        offloads: what is in the memory of the host, of "parameters", "gradients" and "optimizer".
        like: the title of the choice that does the same without offload, and whose trace says what this one needs.
    """

    title: str
    trainer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    replicas: int = 1
    divided: tuple[int, int, int] | tuple[()] = ()
    offloads: tuple[str, ...] = ()
    like: str | None = None

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes activations."""
        return bool(self.settings.get(RECOMPUTE))

    def without_recomputation(self, others: Iterable[Choice]) -> Choice | None:
        """Returns the choice that does the same without recomputation; None of one that keeps activations itself.

        Args:
            others: all choices.
        """
        if not self.recomputes:
            return None
        settings = {**self.settings, RECOMPUTE: False}
        return next((one for one in others if one.settings == settings and one.trainer == self.trainer), None)

    def least_state(self, weights: int, gradients: int, optimizer: int) -> int:
        """Returns the least number of bytes that a process holds besides activations.

        Args:
            weights: the bytes of the weights of the whole model.
            gradients: the bytes of its gradients.
            optimizer: the bytes of its optimizer state.
        """
        sizes = (weights, gradients, optimizer)
        return sum(size // parts for size, parts in zip(sizes, self.divided, strict=True)) if self.divided else 0


def choices(gpus: int, nodes: int, given: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Returns the choices for some devices, those that divide most among them first.

    Args:
        gpus: the number of devices of a machine.
        nodes: the number of machines.
        given: the settings of the config by name, as far as they are plain values. Its `context_parallel_size` is kept:
            it follows from the length of the rows.
    """
    world = gpus * nodes
    size = given.get(POSITIONS, 1)
    if size > 1:
        whole = [*_sharded(gpus, nodes, given), *_tensor(gpus, nodes, given)]
        plain = [_of_divided_rows(one, size) for one in whole if one.replicas % size == 0]
    elif world == 1:
        plain = [*_on_one(given)]
    else:
        plain = [*_sharded(gpus, nodes, given), *_tensor(gpus, nodes, given), *_zero(world, given)]
    ways = [way for one in plain for way in (one, *_offloaded(one, given))]
    # Recomputation needs less memory: what does not fit with it does not fit without it.
    return tuple(
        replace(
            one,
            settings={**one.settings, RECOMPUTE: recomputes},
            title=_title(one.title, recomputes),
            like=None if one.like is None else _title(one.like, recomputes),
        )
        for one in ways
        for recomputes in (True, False)
    )


def _title(strategy: str, recomputes: bool) -> str:
    return f"{strategy}, recomputed" if recomputes else f"{strategy} without recomputation"


def _of_divided_rows(choice: Choice, size: int) -> Choice:
    """Returns a choice whose replicas are groups of ranks that divide the positions of their rows."""
    return replace(
        choice,
        title=f"{choice.title}, rows over {size}",
        settings={**choice.settings, POSITIONS: size},
        replicas=choice.replicas // size,
    )


def _on_one(given: Mapping[str, Any]) -> Iterator[Choice]:
    yield Choice(title="one process", trainer=TRAINER, divided=(1, 1, 1))
    sharded = {"fsdp": "full_shard", "fsdp_config": {**(_fsdp_config(given) or {}), "cpu_offload": True}}
    yield Choice(title="FSDP2, offloaded", trainer=ACCEL_TRAINER, settings=sharded, offloads=STATE)
    yield Choice(
        title="ZeRO 2, optimizer offloaded",
        trainer=ACCEL_TRAINER,
        settings={"deepspeed": zero_settings(given.get("deepspeed"), 2, ["offload_optimizer"])},
        offloads=STATE[1:],
    )


def _sharded(gpus: int, nodes: int, given: Mapping[str, Any]) -> Iterator[Choice]:
    world = gpus * nodes
    config = _fsdp_config(given)
    common: dict[str, Any] = {"trainer": ACCEL_TRAINER, "processes": world, "replicas": world}
    for title, name, parts in (
        ("FSDP2", "full_shard", world),
        ("FSDP2, not resharded", "shard_grad_op", world),
        ("FSDP2, hybrid shards", "hybrid_shard", gpus),
    ):
        if name != "hybrid_shard" or nodes > 1:
            yield Choice(
                title=title, settings={"fsdp": name, "fsdp_config": config}, divided=(parts, parts, parts), **common
            )
    yield Choice(title="DDP", divided=(1, 1, 1), **common)


def _tensor(gpus: int, nodes: int, given: Mapping[str, Any]) -> Iterator[Choice]:
    world, size = gpus * nodes, 2
    while size <= gpus:
        if gpus % size == 0:
            slices = {"tensor_parallel_size": size}
            common: dict[str, Any] = {"trainer": ACCEL_TRAINER, "processes": world, "replicas": world // size}
            if world > size:
                yield Choice(
                    title=f"tensor {size} x FSDP2",
                    settings={**slices, "fsdp": "full_shard", "fsdp_config": _fsdp_config(given)},
                    divided=(world, world, world),
                    **common,
                )
            rest = f" x DDP {world // size}" if world > size else ""
            yield Choice(title=f"tensor {size}{rest}", settings=slices, divided=(size, size, size), **common)
        size *= 2


def _zero(world: int, given: Mapping[str, Any]) -> Iterator[Choice]:
    for stage in (3, 2, 1):
        settings = {"deepspeed": zero_settings(given.get("deepspeed"), stage)}
        yield Choice(title=f"ZeRO {stage}", trainer=ACCEL_TRAINER, settings=settings, processes=world, replicas=world)


def _offloaded(choice: Choice, given: Mapping[str, Any]) -> Iterator[Choice]:
    """Yields the choices that do the same as another one, with parts of the state in the memory of the host."""
    common: dict[str, Any] = {"divided": (), "like": choice.title}
    if "fsdp" in choice.settings and not choice.offloads:
        config = {**(choice.settings["fsdp_config"] or {}), "cpu_offload": True}
        settings = {**choice.settings, "fsdp_config": config}
        yield replace(choice, title=f"{choice.title}, offloaded", settings=settings, offloads=STATE, **common)
    if "deepspeed" in choice.settings and not choice.offloads:
        stage = choice.settings["deepspeed"][ZERO][STAGE]
        for title, offloads, names, least in (
            ("optimizer offloaded", STATE[1:], ("offload_optimizer",), 2),
            ("offloaded", STATE, ("offload_optimizer", "offload_param"), 3),
        ):
            if stage >= least:
                settings = {"deepspeed": zero_settings(given.get("deepspeed"), stage, names)}
                yield replace(choice, title=f"{choice.title}, {title}", settings=settings, offloads=offloads, **common)


def _fsdp_config(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the config's own settings of FSDP2, without those that a choice decides."""
    own = given.get("fsdp_config") or {}
    decided = ("sharding_strategy", "activation_checkpointing", "reshard_after_forward", "shard_size", "cpu_offload")
    return {key: value for key, value in own.items() if key.removeprefix("fsdp_") not in decided} or None


def batches(rows: int, replicas: int) -> tuple[tuple[int, int], ...]:
    """Returns the divisions of an update: pairs of the rows of a micro-batch and the number of micro-batches.

    Args:
        rows: the rows of an update, over all replicas.
        replicas: the number of replicas.

    Returns:
        The pairs, smallest micro-batch first; empty if the rows cannot be divided among the replicas.

    Example:
        >>> batches(16, 2)
        ((1, 8), (2, 4), (4, 2), (8, 1))
    """
    if rows % replicas:
        return ()
    own = rows // replicas
    return tuple((size, own // size) for size in range(1, own + 1) if own % size == 0)


def changes(choice: Choice, batch: tuple[int, int], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in which a choice differs from a config, by name.

    Args:
        choice: the choice.
        batch: the rows of a micro-batch and the number of micro-batches of an update.
        given: the settings of the config.
    """
    # The micro-batches of a pipeline are those of its schedule, which divides the rows of a process.
    chunks = choice.settings.get(CHUNKS, 1)
    wanted = {**DEFAULTS, **choice.settings, ROWS: batch[0] * chunks, MICRO_BATCHES: batch[1] // chunks}
    found = {name: value for name, value in wanted.items() if value != given.get(name, DEFAULTS[name])}
    if choice.trainer == PIPELINE_TRAINER:
        return found
    # Other trainers do not have these settings, and accept them only as `~`.
    undone = {name: None for name in _OF_PIPELINES if given.get(name) is not None}
    return {**{name: value for name, value in found.items() if name not in _OF_PIPELINES}, **undone}
