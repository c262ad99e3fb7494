"""Which trainings are compared with one process: the cells of the matrix, as data."""

from tests.ml.distributed.bench import GLOBAL_ROWS, OPTIONS, Cell

SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""Stages of a rank, by schedule."""


def _accel(strategy, world_size, *, dp_size=None, **settings):
    return {
        "strategy": strategy,
        "world_size": world_size,
        "trainer": "AccelTrainer",
        "dp_size": world_size if dp_size is None else dp_size,
        "settings": settings,
    }


def _pipeline(schedule, world_size, *, dp_size=1, label="", **settings):
    replica = world_size // dp_size
    rows = GLOBAL_ROWS // dp_size
    return {
        "strategy": f"{schedule.removeprefix('Schedule')}{label}",
        "world_size": world_size,
        "trainer": "PipelineTrainer",
        "dp_size": dp_size,
        "settings": {
            "split_spec": "auto",
            "schedule_class": schedule,
            "stages_per_rank": SCHEDULES[schedule],
            "pipeline_parallel_size": replica,
            "pipeline_chunks": min(rows, 8),
            **settings,
        },
    }


def _zero(stage, label="", **settings):
    config = {"zero_optimization": {"stage": stage, **settings}}
    return _accel(f"ZeRO-{stage}{label}", 2, deepspeed=config)


def _zeros():
    for stage in (1, 2, 3):
        yield _zero(stage)
    host = {"device": "cpu"}
    yield _zero(2, ", optimizer offload", offload_optimizer=host)
    yield _zero(3, ", optimizer and parameter offload", offload_optimizer=host, offload_param=host)


def _kinds():
    for ranks in (2, 4):
        yield _accel("DDP", ranks)
        yield _accel("FSDP2", ranks, fsdp="full_shard")
    yield _accel("FSDP2 shard_grad_op", 2, fsdp="shard_grad_op")
    yield _accel("FSDP2 offload", 2, fsdp="full_shard", fsdp_config={"cpu_offload": True})
    yield _accel("HSDP", 4, fsdp="hybrid_shard", fsdp_config={"shard_size": 2})
    yield _accel("HSDP offload", 4, fsdp="hybrid_shard", fsdp_config={"shard_size": 2, "cpu_offload": True})
    yield _accel("TP2", 2, dp_size=1, tensor_parallel_size=2)
    yield _accel("DP2 x TP2", 4, dp_size=2, tensor_parallel_size=2)
    sliced = {"dp_size": 2, "tensor_parallel_size": 2, "fsdp": "full_shard"}
    yield _accel("FSDP2 x TP2", 4, **sliced)
    yield _accel("FSDP2 x TP2 offload", 4, **sliced, fsdp_config={"cpu_offload": True})
    for ranks in (2, 4):
        yield _accel("CP", ranks, dp_size=1, context_parallel_size=ranks)
    divided = {"dp_size": 2, "context_parallel_size": 2}
    yield _accel("DP2 x CP2", 4, **divided)
    yield _accel("FSDP2 x CP2", 4, **divided, fsdp="full_shard")
    yield _accel("CP2 x TP2", 4, dp_size=1, context_parallel_size=2, tensor_parallel_size=2)
    yield _accel("FSDP2 x CP2 x TP2", 8, **divided, tensor_parallel_size=2, fsdp="full_shard")
    shards = {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}
    yield _accel("HSDP x CP2", 8, dp_size=4, context_parallel_size=2, **shards)
    for schedule in SCHEDULES:
        for ranks in (2, 4):
            yield _pipeline(schedule, ranks)
        yield _pipeline(schedule, 4, dp_size=2, label=", DP2 x PP2")
        yield _pipeline(schedule, 4, dp_size=2, label=", FSDP2 x PP2", fsdp="shard_grad_op")


def _rings():
    for ranks, rotate_method in ((2, "allgather"), (4, "alltoall")):
        yield _ring("CP ring", ranks, ranks, dp_size=1, context_parallel_rotate_method=rotate_method)
    yield _ring("DP2 x CP2 ring", 4, dp_size=2)
    yield _ring("FSDP2 x CP2 ring", 4, dp_size=2, fsdp="full_shard")
    yield _ring("CP2 ring x TP2", 4, dp_size=1, tensor_parallel_size=2)
    yield _ring("FSDP2 x CP2 ring x TP2", 8, dp_size=2, tensor_parallel_size=2, fsdp="full_shard")
    yield _ring("HSDP x CP2 ring", 8, dp_size=4, fsdp="hybrid_shard", fsdp_config={"shard_size": 2})


def _ring(strategy, world_size, size=2, **settings):
    return _accel(strategy, world_size, context_parallel_size=size, context_parallel_method="ring", **settings)


_QUICK = {
    ("DDP", 2, "llama", 3),
    ("FSDP2", 2, "gpt2", 3),
    ("HSDP", 4, "llama", 1),
    ("TP2", 2, "tied llama", 1),
    ("CP", 2, "gpt2", 3),
    ("FSDP2 x CP2", 4, "llama", 1),
    ("CP2 x TP2", 4, "llama", 1),
    ("GPipe", 2, "gpt2", 3),
    ("1F1B", 2, "llama", 3),
    ("Interleaved1F1B", 2, "gpt2", 1),
    ("LoopedBFS", 2, "llama", 1),
    ("InterleavedZeroBubble", 2, "gpt2", 1),
    ("ZBVZeroBubble", 2, "llama", 1),
    ("DualPipeV", 2, "gpt2", 1),
}
"""What every run of the suite trains, in fp64; products of strategies are in test_sharded.py and test_pipeline.py."""


_QUICK_RINGS = {
    ("CP ring", 2, "gpt2", 3, "fp64"),
    ("FSDP2 x CP2 ring", 4, "llama", 1, "fp64"),
}


_QUICK_OPTIONS = {
    ("LoRA", "FSDP2"),
    ("DoRA", "1F1B"),
    ("counter", "FSDP2 x TP2"),
    ("fewer from epoch 1", "FSDP2"),
    ("global batch", "DDP"),
    ("more from step 2", "1F1B"),
    ("chunked loss", "FSDP2"),
    ("chunked loss", "1F1B"),
    ("in backward", "HSDP"),
    ("offloaded", "FSDP2"),
    ("evaluated", "CP"),
}


def all_cells():
    """Yields every cell."""
    for kind in _kinds():
        # The projections of GPT-2 are fused, and cannot be sliced.
        tied = "tied llama" if "tensor_parallel_size" in kind["settings"] else "gpt2"
        for model in ("llama", tied):
            for accumulation in (1, 3):
                for precision in ("fp64", "fp32 sgd", "fp32 adamw"):
                    named = (kind["strategy"], kind["world_size"], model, accumulation)
                    is_quick = precision == "fp64" and named in _QUICK
                    yield Cell(**kind, model=model, accumulation=accumulation, precision=precision, quick=is_quick)
    for kind in _zeros():
        for model in ("llama", "gpt2"):
            for accumulation in (1, 3):
                for precision in ("fp32 sgd", "fp32 adamw"):
                    # The stages without offload have tests of their own, in test_deepspeed.py.
                    named = (model, accumulation, precision) == ("llama", 3, "fp32 adamw")
                    is_quick = named and "offload" in kind["strategy"]
                    cell = {"model": model, "accumulation": accumulation, "precision": precision, "quick": is_quick}
                    yield Cell(**kind, **cell)
    yield from _with_options()
    yield from _of_one_document()


def _of_one_document():
    """Yields the cells of a ring, which computes causal attention over whole rows."""
    for kind in _rings():
        tied = "tied llama" if "tensor_parallel_size" in kind["settings"] else "gpt2"
        for model in ("llama", tied):
            for accumulation in (1, 3):
                for precision in ("fp64", "fp32 sgd", "fp32 adamw"):
                    named = (kind["strategy"], kind["world_size"], model, accumulation, precision)
                    cell = {"model": model, "accumulation": accumulation, "precision": precision}
                    yield Cell(**kind, **cell, option="one document", quick=named in _QUICK_RINGS)
    # What torch or Forgather refuses with the strategy, whatever divides the rows.
    sharded, sliced = ("re-entrant", "in backward"), ("LoRA", "fp16")
    for option in [name for name in OPTIONS if name.startswith("one document, ")]:
        for kind in _rings():
            is_refused = option.endswith(sharded) and "fsdp" not in kind["settings"]
            is_refused |= option.endswith(sliced) and "tensor_parallel_size" in kind["settings"]
            if kind["strategy"] in ("CP ring", "FSDP2 x CP2 ring", "CP2 ring x TP2") and not is_refused:
                precision = "fp32 sgd" if option.endswith(("bf16", "fp16")) else "fp64"
                accumulation = 1 if option.endswith("in backward") else 3
                yield Cell(**kind, accumulation=accumulation, precision=precision, option=option)


def _with_options():
    """Yields the cells of the matrix that come from a setting other than the strategy."""
    ddp, fsdp2 = _accel("DDP", 2), _accel("FSDP2", 2, fsdp="full_shard")
    hybrid = _accel("HSDP", 4, fsdp="hybrid_shard", fsdp_config={"shard_size": 2})
    tensor = _accel("TP2", 2, dp_size=1, tensor_parallel_size=2)
    both = _accel("FSDP2 x TP2", 4, dp_size=2, tensor_parallel_size=2, fsdp="full_shard")
    pipelines = {schedule: _pipeline(schedule, 2) for schedule in SCHEDULES}
    copies = [ddp, fsdp2, hybrid, tensor, both]
    context = _accel("CP", 2, dp_size=1, context_parallel_size=2)
    sharded_context = _accel("FSDP2 x CP2", 4, dp_size=2, context_parallel_size=2, fsdp="full_shard")
    sliced_context = _accel("CP2 x TP2", 4, dp_size=1, context_parallel_size=2, tensor_parallel_size=2)
    divided = [context, sharded_context]
    zeros = [_zero(stage) for stage in (1, 2, 3)]
    # DeepSpeed keeps weights of this size whole otherwise, and a DoRA reads a frozen weight outside of its layer.
    partitioned = _zero(3, ", all weights partitioned", stage3_param_persistence_threshold=0)
    autocast = _accel("FSDP2 autocast", 2, fsdp="full_shard", fsdp_config={"mixed_precision": "autocast"})
    sharded_stages = [
        _pipeline(schedule, 4, dp_size=2, label=", FSDP2 x PP2", fsdp="shard_grad_op") for schedule in SCHEDULES
    ]
    whole_backward = [kind for name, kind in pipelines.items() if "Zero" not in name and "Dual" not in name]
    of_option = {
        "bf16": [*copies, *divided, sliced_context, autocast, *pipelines.values(), *sharded_stages],
        "fp16": [ddp, fsdp2, hybrid, both, *divided],
        "compiled": [ddp, fsdp2, hybrid, *pipelines.values()],
        "recomputed": [*copies, *divided, sliced_context, *zeros, *pipelines.values()],
        "re-entrant": [fsdp2, hybrid, tensor, both, sharded_context, *zeros],
        "fewer from epoch 1": [*copies, *divided, *zeros, *pipelines.values()],
        "more from step 2": [*copies, *zeros, *pipelines.values(), sharded_stages[1]],
        "global batch": [*copies, *divided, *zeros, pipelines["Schedule1F1B"], sharded_stages[1]],
        "chunked loss": [*copies, *divided, *zeros, *pipelines.values(), *sharded_stages],
        "chunked loss, recomputed": [*copies, *divided, zeros[2], pipelines["Schedule1F1B"]],
        "chunked loss, compiled": [ddp, fsdp2, pipelines["Schedule1F1B"]],
        "chunked loss, LoRA": [ddp, fsdp2, *zeros, *pipelines.values()],
        "bf16, chunked loss": [*copies, autocast, *pipelines.values(), *sharded_stages],
        "fp16, chunked loss": [ddp, fsdp2, hybrid, both],
        "offloaded": [*copies, *divided, sliced_context, *pipelines.values(), *sharded_stages],
        "offloaded, recomputed": [*copies, context, pipelines["Schedule1F1B"], pipelines["ScheduleZBVZeroBubble"]],
        "offloaded, compiled": [ddp, fsdp2, pipelines["Schedule1F1B"]],
        "offloaded, chunked loss": [*copies, context, *pipelines.values()],
        "offloaded, LoRA": [ddp, fsdp2, *pipelines.values()],
        "bf16, offloaded": [*copies, autocast, pipelines["Schedule1F1B"]],
        "half of the activations": [ddp, fsdp2, hybrid, pipelines["Schedule1F1B"]],
        "flattened": [*copies, *divided, *zeros],
        "frozen stage": [fsdp2, *whole_backward],
        "frozen stage, recomputed": [fsdp2],
        "compiled and recomputed": [fsdp2],
        "bf16, frozen stage, recomputed": [fsdp2],
        "bf16, frozen stage, recomputed and compiled": [fsdp2],
        "Adafactor": [ddp, context, *pipelines.values()],
        "Muon": [ddp, context, *pipelines.values()],
        "LoRA": [ddp, fsdp2, hybrid, *divided, *zeros, *pipelines.values()],
        "DoRA": [ddp, fsdp2, hybrid, *divided, *zeros, partitioned, *pipelines.values()],
        "groups": [*copies, *divided, *zeros, *pipelines.values(), *sharded_stages],
        "frozen by name": [*copies, *divided, *zeros, *whole_backward],
        "frozen at first": [*copies, *divided],
        "averaged": [*copies, *divided, *pipelines.values(), *sharded_stages],
        "evaluated": [*divided, sliced_context],
        "evaluated, chunked loss": divided,
        "averaged, LoRA": [ddp, fsdp2, pipelines["Schedule1F1B"]],
        "noise": [tensor],
        "LoRA, recomputed": [ddp, fsdp2, zeros[2], pipelines["Schedule1F1B"]],
        "LoRA and a head": [ddp, fsdp2, *zeros, pipelines["Schedule1F1B"]],
        "LoRA and tokens": [ddp, fsdp2, *zeros, pipelines["Schedule1F1B"]],
        "counter": [*copies, *zeros, *pipelines.values(), *sharded_stages],
        "counter, LoRA": [ddp, fsdp2, *zeros, pipelines["Schedule1F1B"]],
        "PiSSA": [ddp, fsdp2, *zeros, pipelines["Schedule1F1B"]],
    }
    offload = _accel("FSDP2 offload", 2, fsdp="full_shard", fsdp_config={"cpu_offload": True})
    of_option |= {
        "in backward": [fsdp2, hybrid, sharded_context, offload],
        "in backward, recomputed": [fsdp2, hybrid],
        "in backward, chunked loss": [fsdp2],
        "in backward, compiled": [fsdp2],
        "in backward, offloaded": [fsdp2],
        "bf16, in backward": [fsdp2, hybrid],
        "frozen at first, in backward": [fsdp2],
    }
    for option, kinds in of_option.items():
        for kind in kinds:
            in_double = not option.startswith(("bf16", "fp16", "PiSSA")) and kind not in (*zeros, partitioned)
            precision = "fp64" if in_double else "fp32 sgd"
            is_quick = option == "bf16, frozen stage, recomputed"
            is_quick |= (option, kind["strategy"]) in _QUICK_OPTIONS
            accumulation = 1 if "in backward" in option else 3
            yield Cell(**kind, accumulation=accumulation, precision=precision, option=option, quick=is_quick)
    # The gradient of a tied head is the sum of two, on two ranks or on one.
    tied = [(ddp, "gpt2"), (fsdp2, "gpt2"), (tensor, "tied llama"), (zeros[2], "gpt2")]
    for kind, model in [*tied, *((kind, "gpt2") for kind in pipelines.values())]:
        precision = "fp32 sgd" if kind is zeros[2] else "fp64"
        yield Cell(**kind, model=model, accumulation=3, precision=precision, option="chunked loss")
    for schedule in SCHEDULES:
        sliced = _pipeline(schedule, 4, label=", PP2 x TP2", tensor_parallel_size=2)
        sliced["settings"]["pipeline_parallel_size"] = 2
        yield Cell(**sliced, accumulation=3)
        shards = {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}
        yield Cell(**_pipeline(schedule, 8, dp_size=4, label=", HSDP x PP2", **shards), accumulation=3)
    for schedule in list(SCHEDULES)[:4]:
        yield Cell(**_pipeline(schedule, 4, dp_size=2, label=", FSDP2 full x PP2", fsdp="full_shard"), accumulation=3)
