"""Runs whose memory is both traced and measured: trainers by name, the peak of torch's profiler, and the traced one."""

import functools
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

import forgather.ml as ml
from forgather.launcher_env import ProcessFacts
from forgather.ml.adapters import lora
from forgather.ml.planner.allocations import storages
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.trainer.loop import loss_divisor
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import tiny_llama

LENGTH, VOCABULARY = 64, 512


@dataclass(frozen=True)
class Cell:
    """A run, and how far its plan may be off, as a share of what was measured."""

    name: str
    world_size: int = 1
    kind: str = "Trainer"
    args: dict = field(default_factory=dict)
    layers: int = 4
    adapter: bool = False
    device_type: str = "cpu"
    above: float = 0.03
    below: float = 0.02

    def __str__(self):
        return self.name


def pipeline(name, schedule, **args):
    world_size = args.pop("world_size", 2)
    given = {"schedule_class": schedule, "pipeline_chunks": 4, **args}
    return Cell(name, world_size, "PipelineTrainer", given, layers=8, above=0.1, below=0.03)


SHARDED = {"fsdp": "full_shard"}
QUICK = [
    Cell("single"),
    Cell("single, recomputed, bf16", args={"gradient_checkpointing": True, "bf16": True}),
    Cell("LoRA, accumulated", args={"gradient_accumulation_steps": 3}, adapter=True, above=0.05),
    Cell("DDP", 2, "AccelTrainer", above=0.1, below=0.03),
    Cell("FSDP2", 2, "AccelTrainer", SHARDED, above=0.05),
    pipeline("1F1B", "Schedule1F1B"),
]
ALL_AT_ONCE = {"device_type": "cuda", "layers": 8}
ONE_ROW = {"optim": "adamw_torch", "per_device_train_batch_size": 1}
FULL = [
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
    Cell("DDP on 4", 4, "AccelTrainer", above=0.1, below=0.03),
    Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2}, above=0.1, below=0.03),
    Cell("tensor, FSDP2", 4, "AccelTrainer", {**SHARDED, "tensor_parallel_size": 2}, above=0.1, below=0.03),
    pipeline("GPipe", "ScheduleGPipe"),
    pipeline("interleaved 1F1B", "ScheduleInterleaved1F1B", stages_per_rank=2),
    pipeline("looped BFS", "ScheduleLoopedBFS", stages_per_rank=2),
    pipeline("interleaved zero bubble", "ScheduleInterleavedZeroBubble", stages_per_rank=2),
    pipeline("ZBV", "ScheduleZBVZeroBubble", stages_per_rank=2),
    pipeline("DualPipeV", "ScheduleDualPipeV", stages_per_rank=2),
    pipeline("1F1B x DDP", "Schedule1F1B", world_size=4, data_parallel_size=2),
    pipeline("1F1B, accumulated", "Schedule1F1B", gradient_accumulation_steps=2),
]


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (256, LENGTH), generator=generator)
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def make_trainer(cell, output_dir, hook=None):
    settings = {"use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 4, "save_strategy": "no"}
    args = getattr(ml, cell.kind.replace("Trainer", "TrainingArguments"))(output_dir, **{**settings, **cell.args})
    model = functools.partial(
        tiny_llama, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=cell.layers
    )
    adapter = lora(r=4) if cell.adapter else None
    return getattr(ml, cell.kind)(model_init=model, args=args, train_dataset=rows(), adapter=adapter)


def measured_peak(trainer, device_type="cpu"):
    """Returns the peak of the bytes that torch's CPU allocator gave to the second step, with what was there before.

    Optimizers take the path that they take by default on the type of device.
    """
    strategy = trainer.strategy
    optimizer = strategy.build_optimizer()
    if device_type == "cuda":
        for group in optimizer.param_groups:
            group["foreach"] = True
    window = next(trainer._train_batches().windows(strategy.rule))

    def step():
        strategy.forward_backward(window, denom=loss_divisor(window.num_valid))
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: False, after_step=lambda: None)

    step()
    local = getattr(strategy, "local", strategy.model)
    kept = [*local.parameters(), *local.buffers(), *tree_iter((optimizer.state, window.batches))]
    found = {one.data_ptr(): one.nbytes() for item in kept if isinstance(item, torch.Tensor) for one in storages(item)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    total = peak = sum(found.values())
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def _rank(cell, output_dir):
    return measured_peak(make_trainer(cell, output_dir), cell.device_type)


def measured(cell, output_dir):
    """Returns the measured peak of each rank."""
    if cell.world_size == 1:
        return [_rank(cell, output_dir)]
    return run_ranks(cell.world_size, _rank, cell, output_dir)


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
