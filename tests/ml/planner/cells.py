"""Runs whose memory is both traced and measured: trainers by name, the peak of torch's profiler, and the traced one."""

import contextlib
import functools
from dataclasses import dataclass, field

from torch import nn
from torch.profiler import record_function

import forgather.ml as ml
from forgather.launcher_env import ProcessFacts
from forgather.ml.adapters import lora
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.trainer.divergence import window_with_divergence
from forgather.ml.trainer.loop import loss_divisor
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.moved_activations import moved_to_host
from tests.ml.planner import cell_models
from tests.ml.planner.live_bytes import profiled


@dataclass(frozen=True)
class Cell:
    """A run, and how far its plan may be off, as a share of what was measured.

    Args:
        missed: why the plan of this run is known to be further off; empty for all others.
    """

    name: str
    world_size: int = 1
    kind: str = "Trainer"
    args: dict = field(default_factory=dict)
    layers: int = 4
    model: str = "llama"
    sizes: dict = field(default_factory=dict)
    length: int = cell_models.LENGTH
    adapter: bool = False
    device_type: str = "cpu"
    above: float = 0.03
    below: float = 0.02
    missed: str = ""

    def __str__(self):
        return self.name

    @property
    def group(self):
        """One of `GROUPS`."""
        if self.kind == "PipelineTrainer":
            return "pipelines"
        if "deepspeed" in self.args:
            return "ZeRO"
        if "tensor_parallel_size" in self.args:
            return "tensor"
        if "fsdp" in self.args:
            return "FSDP2"
        return "DDP" if self.world_size > 1 else "single"


GROUPS = ("single", "DDP", "FSDP2", "tensor", "ZeRO", "pipelines")
"""The strategies of cells, without their variants."""


def pipeline(name, schedule, **args):
    world_size = args.pop("world_size", 2)
    fields = {field: args.pop(field) for field in ("model", "sizes", "length", "layers", "missed") if field in args}
    given = {"schedule_class": schedule, "pipeline_chunks": 4, **args}
    return Cell(name, world_size, "PipelineTrainer", given, **{"layers": 8, "above": 0.1, "below": 0.03, **fields})


SHARDED = {"fsdp": "full_shard"}
RING = {"context_parallel_method": "ring"}
CHUNKED = {"linear_cross_entropy": True, "linear_cross_entropy_chunk_size": 32}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0, "per_device_train_batch_size": 1}
QUICK = [
    Cell("single"),
    Cell("FSDP2 of 2 blocks", 2, "AccelTrainer", SHARDED, layers=2, above=0.05),
    Cell("in backward, recomputed", args={**IN_BACKWARD, "gradient_checkpointing": True}, layers=2),
]
ALL_AT_ONCE = {"device_type": "cuda", "layers": 6}
ONE_ROW = {"optim": "adamw_torch", "per_device_train_batch_size": 1}
OFFLOADED = {"activation_offloading": True}
_RECOMPUTED, _KWARGS = {"gradient_checkpointing": True}, "gradient_checkpointing_kwargs"
FULL = [
    Cell(
        "LoRA, recomputed, bf16, accumulated",
        args={"gradient_checkpointing": True, "bf16": True, "gradient_accumulation_steps": 3},
        layers=1,
        adapter=True,
        above=0.05,
    ),
    Cell("DDP of 2 blocks", 2, "AccelTrainer", layers=2, above=0.1, below=0.03),
    Cell("single, recomputed, bf16", args={"gradient_checkpointing": True, "bf16": True}),
    Cell("single, products kept", args={**_RECOMPUTED, _KWARGS: {"mode": "selective"}}),
    Cell("single, every third", args={**_RECOMPUTED, _KWARGS: {"every_n_layers": 3}}, layers=7),
    Cell("single, offloaded", args={**_RECOMPUTED, _KWARGS: {"offload": True}}),
    Cell("single, all activations offloaded", args=OFFLOADED, device_type="cuda", layers=6),
    Cell("single, inputs offloaded", args={**OFFLOADED, **_RECOMPUTED}, device_type="cuda", layers=6),
    Cell("FSDP2, activations offloaded", 2, "AccelTrainer", {**SHARDED, **OFFLOADED}, **ALL_AT_ONCE, above=0.05),
    Cell("LoRA, accumulated", args={"gradient_accumulation_steps": 3}, adapter=True, above=0.05),
    Cell("DDP", 2, "AccelTrainer", above=0.1, below=0.03),
    Cell("FSDP2", 2, "AccelTrainer", SHARDED, above=0.05),
    pipeline("1F1B", "Schedule1F1B", layers=4, pipeline_chunks=2),
    Cell("DDP, all weights at once", 2, "AccelTrainer", ONE_ROW, **ALL_AT_ONCE, above=0.1, below=0.03),
    Cell("FSDP2, all weights at once", 2, "AccelTrainer", {**SHARDED, **ONE_ROW}, **ALL_AT_ONCE, above=0.05),
    Cell("single, accumulated", args={"gradient_accumulation_steps": 3}),
    Cell("single, bf16", args={"bf16": True}),
    Cell("FSDP2 on 4", 4, "AccelTrainer", SHARDED, above=0.05),
    Cell("FSDP2, accumulated", 2, "AccelTrainer", {**SHARDED, "gradient_accumulation_steps": 3}, above=0.05),
    Cell("FSDP2, not resharded", 2, "AccelTrainer", {"fsdp": "shard_grad_op"}, above=0.05),
    Cell("FSDP2, hybrid", 4, "AccelTrainer", {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}, above=0.05),
    Cell("FSDP2, bf16", 2, "AccelTrainer", {**SHARDED, "bf16": True}, above=0.05),
    Cell("FSDP2, recomputed", 2, "AccelTrainer", {**SHARDED, "gradient_checkpointing": True}, above=0.05),
    Cell("FSDP2, LoRA", 2, "AccelTrainer", SHARDED, adapter=True, above=0.05),
    Cell("DDP, accumulated", 2, "AccelTrainer", {"gradient_accumulation_steps": 3}, above=0.1, below=0.03),
    Cell("DDP, copied", 2, "AccelTrainer", {"ddp_gradient_as_bucket_view": False}, above=0.1, below=0.03),
    Cell("DDP on 4", 4, "AccelTrainer", above=0.1, below=0.03),
    Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2}, above=0.1, below=0.03),
    Cell("tensor, FSDP2", 4, "AccelTrainer", {**SHARDED, "tensor_parallel_size": 2}, above=0.1, below=0.03),
    Cell("context", 2, "AccelTrainer", {"context_parallel_size": 2}, above=0.1, below=0.03),
    Cell("context on 4", 4, "AccelTrainer", {"context_parallel_size": 4}, above=0.1, below=0.03),
    Cell("context, FSDP2", 4, "AccelTrainer", {**SHARDED, "context_parallel_size": 2}, above=0.1, below=0.03),
    Cell("context ring", 2, "AccelTrainer", {"context_parallel_size": 2, **RING}, above=0.1, below=0.03),
    Cell(
        "context ring, FSDP2", 4, "AccelTrainer", {**SHARDED, "context_parallel_size": 2, **RING}, above=0.1, below=0.03
    ),
    pipeline("1F1B of 8 blocks", "Schedule1F1B"),
    pipeline("GPipe", "ScheduleGPipe"),
    pipeline("interleaved 1F1B", "ScheduleInterleaved1F1B", stages_per_rank=2),
    pipeline("looped BFS", "ScheduleLoopedBFS", stages_per_rank=2),
    pipeline("interleaved zero bubble", "ScheduleInterleavedZeroBubble", stages_per_rank=2),
    pipeline("ZBV", "ScheduleZBVZeroBubble", stages_per_rank=2),
    pipeline("DualPipeV", "ScheduleDualPipeV", stages_per_rank=2),
    Cell("single, in backward", args=IN_BACKWARD),
    Cell("FSDP2, in backward", 2, "AccelTrainer", {**SHARDED, **IN_BACKWARD}, above=0.05),
    Cell("single, chunked loss", args=CHUNKED),
    Cell("single, bf16, chunked loss", args={**CHUNKED, "bf16": True}),
    Cell("FSDP2, chunked loss", 2, "AccelTrainer", {**SHARDED, **CHUNKED}, above=0.05),
    Cell("tensor, chunked loss", 2, "AccelTrainer", {**CHUNKED, "tensor_parallel_size": 2}, above=0.1, below=0.03),
    pipeline("1F1B, chunked loss", "Schedule1F1B", **CHUNKED),
    pipeline("1F1B x DDP", "Schedule1F1B", world_size=4, data_parallel_size=2),
    pipeline("1F1B, accumulated", "Schedule1F1B", gradient_accumulation_steps=2),
]


def make_trainer(cell, output_dir, hook=lambda function: function):
    settings = {"use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 4, "save_strategy": "no"}
    args = getattr(ml, cell.kind.replace("Trainer", "TrainingArguments"))(output_dir, **{**settings, **cell.args})
    return getattr(ml, cell.kind)(
        model_init=functools.partial(hook(cell_models.model), cell.model, cell.layers, **cell.sizes),
        args=args,
        train_dataset=cell_models.rows(cell.model, cell.length),
        adapter=lora(r=4) if cell.adapter else None,
        loss_fn=nn.CrossEntropyLoss() if cell.model in cell_models.OWN else None,
    )


STEPS = ("first step", "second step", "third step", "fourth step", "fifth step")


def measured_peak(make, device_type="cpu"):
    """Returns the peak of a step of a new trainer in bytes, with all that was allocated before.

    Optimizers take the path that they take by default on the type of device. The process must be new.
    """
    moves = moved_to_host() if device_type == "cuda" else contextlib.nullcontext()
    with profiled(STEPS[1:]) as found, moves:
        trainer = make()
        strategy = trainer.strategy
        optimizer = strategy.build_optimizer()
        if device_type == "cuda":
            for group in optimizer.param_groups:
                group["foreach"] = True
        window = next(trainer._train_batches().windows(strategy.rule))
        for name in STEPS:
            with record_function(name):
                full = window_with_divergence(strategy, window)
                strategy.forward_backward(full, denom=loss_divisor(window.num_valid))
                strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: False, after_step=lambda: None)
    return found.num_bytes


def measured(cell, output_dir):
    """Returns the measured peak of each rank."""
    if "deepspeed" in cell.args:
        import_engine()
    cell_models.rows(cell.model, cell.length)
    make = functools.partial(make_trainer, cell, output_dir)
    return run_ranks(cell.world_size, measured_peak, make, cell.device_type)


def traced(cell, output_dir, *, depth=None):
    """Returns the trace of each rank that has parts of its own: of all of them under a pipeline, else of rank 0."""
    relay = Relay()

    def trace(rank):
        facts = ProcessFacts(rank=rank, local_rank=rank, world_size=cell.world_size, local_world_size=cell.world_size)
        make = functools.partial(make_trainer, cell, output_dir)
        return trace_rank(make, facts, depth=depth, relay=relay, device_type=cell.device_type)

    ranks = range(cell.world_size) if cell.kind == "PipelineTrainer" else [0]
    found = [trace(rank) for rank in ranks]
    assert relay.was_right or cell.world_size > 1
    return found if relay.was_right else [trace(rank) for rank in ranks]
