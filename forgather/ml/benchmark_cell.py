"""One cell of a benchmark: trains a well-known model with random weights and random rows for some steps.

`python -m forgather.ml.benchmark_cell FOLDER` reads `asked.json` in the folder, and writes `measured.json` there, or
`error.json`. It runs in each process of the cell; the first process writes.

Units:
    seconds; GB is 10^9 bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

from forgather.errors import first_line
from forgather.ml.planner.allocations import storages
from forgather.ml.trainer.accel import AccelTrainer
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments
from forgather.ml.trainer.trainer import Trainer
from forgather.planner.model_shapes import ModelShape, model_shape

WARM_UP = 2
_GB = 1e9
_IGNORED, _HIDDEN_EVERY = -100, 7


def measure_cell(config: Mapping[str, Any], *, use_cpu: bool, steps: int, output_dir: str) -> dict[str, Any]:
    """Returns the figures of a cell, see `forgather.planner.benchmark_results.Row.measured`.

    Args:
        config: what `HardwareSelector.get_distributed_training_config` returned.
        use_cpu: True to compute on the CPU.
        steps: the number of steps whose time is measured.
        output_dir: a folder for what a trainer writes.
    """
    shape = model_shape(config["model_name"])
    trainer = _trainer(config, shape, use_cpu, output_dir)
    step, kept = _step_of(trainer)
    device = trainer.strategy.topology.device
    for _ in range(WARM_UP):
        step()
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else cpu_peak(step, kept())
    median = statistics.median(seconds)
    tokens = config["global_batch_size"] * config["sequence_length"]
    return {
        "step_seconds": median,
        "all_step_seconds": seconds,
        "tokens_per_second": tokens / median,
        "peak_gb": _largest(peak, device) / _GB,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _trainer(config: Mapping[str, Any], shape: ModelShape, use_cpu: bool, output_dir: str) -> Trainer:
    dtype, strategy, gpus = config["mixed_precision_dtype"], config["distributed_strategy"], config["gpu_count"]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": config["per_gpu_batch_size"],
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "gradient_checkpointing": config["gradient_checkpointing"],
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "use_cpu": use_cpu,
        "save_strategy": "no",
        "max_steps": 1,
    }
    if strategy == "FSDP":
        sharding = config["fsdp_config"]
        settings["fsdp"] = sharding["sharding_strategy"].lower()
        if sharding["cpu_offload"]:
            settings["fsdp_config"] = {"cpu_offload": True}
    if strategy == "DeepSpeed":
        zero = config["deepspeed_config"]
        offloads = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param") if zero[name]}
        settings["deepspeed"] = {"zero_optimization": {"stage": zero["zero_stage"], **offloads}}
    is_single = strategy == "DDP" and gpus == 1
    # The trainer of one process has no fp16.
    arguments: Any = TrainingArguments if is_single and dtype != "fp16" else AccelTrainingArguments
    if arguments is TrainingArguments:
        del settings["fp16"]
    trainer: Any = Trainer if arguments is TrainingArguments else AccelTrainer
    made: Trainer = trainer(
        model_init=lambda: random_model(shape),
        args=arguments(output_dir, **settings),
        train_dataset=[random_row(shape, config["sequence_length"])] * config["global_batch_size"],
    )
    return made


def random_model(shape: ModelShape) -> nn.Module:
    """Returns a model of a shape with random weights.

    Args:
        shape: the shape.
    """
    if shape.traced is not None:
        raise ValueError(f"{shape.name} is trained by a recipe of diffusers, which a benchmark does not run")
    sizes = dict(shape.config)
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model: nn.Module = getattr(transformers, shape.model_class).from_config(config)
    return model


def random_row(shape: ModelShape, tokens: int) -> dict[str, Any]:
    """Returns a row of random values of the task of a model.

    Args:
        shape: the shape of the model.
        tokens: the number of tokens; images have a size of their own.
    """
    if shape.family == "vision":
        return {"pixel_values": torch.rand(3, 224, 224), "labels": 0}
    ids = torch.randint(5, shape.vocab_size, (tokens,))
    if shape.family == "text_generation":
        return {"input_ids": ids, "labels": ids.clone()}
    others = torch.randint(5, shape.vocab_size, (tokens,))
    if shape.family == "text2text_generation":
        return {"input_ids": ids, "labels": others}
    is_hidden = torch.arange(tokens) % _HIDDEN_EVERY == 0
    hidden = torch.where(is_hidden, torch.full_like(ids, 4), ids)
    return {"input_ids": hidden, "labels": torch.where(is_hidden, ids, torch.full_like(ids, _IGNORED))}


def _step_of(trainer: Trainer) -> tuple[Callable[[], None], Callable[[], list[Any]]]:
    """Returns a function that does an optimizer step of the run, and one that returns what lasts between steps."""
    strategy: Any = trainer.strategy
    optimizer = strategy.build_optimizer()
    window = next(trainer._train_batches().windows(strategy.rule))
    args = trainer.args

    def step() -> None:
        strategy.forward_backward(window, denom=loss_divisor(window.num_valid))
        strategy.update(
            max_norm=args.max_grad_norm, want_norm=True, before_step=lambda norm: False, after_step=lambda: None
        )

    def kept() -> list[Any]:
        state = getattr(optimizer, "state", {})
        return [*strategy.model.parameters(), *strategy.model.buffers(), *tree_iter((dict(state), window.batches))]

    return step, kept


def cpu_peak(step: Callable[[], None], kept: Iterable[Any]) -> int:
    """Returns the largest sum of bytes that torch's CPU allocator gave away during a step, with what was there before.

    Args:
        step: a function that does the step.
        kept: the tensors that are there before; other values are ignored.
    """
    before = {
        storage.data_ptr(): storage.nbytes() for item in kept if isinstance(item, Tensor) for storage in storages(item)
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events: Any = recorded.profiler
    total = peak = sum(before.values())
    for event in sorted(
        (one for one in events.kineto_results.events() if one.name() == "[memory]"), key=lambda one: one.start_ns()
    ):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def _largest(value: int, device: torch.device) -> int:
    if not dist.is_initialized():
        return value
    all_values = torch.tensor(value, device=device)
    dist.all_reduce(all_values, op=dist.ReduceOp.MAX)
    return int(all_values)


def main(folder: Path) -> int:
    """Measures the cell that a folder asks for, and returns the exit status.

    Args:
        folder: the folder with `asked.json`.
    """
    try:
        asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
        found = measure_cell(asked["config"], use_cpu=asked["use_cpu"], steps=asked["steps"], output_dir=str(folder))
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / "measured.json").write_text(json.dumps(found), encoding="utf-8")
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - the top of a worker: the row of the cell shows any failure
        problem = {"error": f"{type(error).__name__}: {first_line(error)}"}
        # Of several processes, the first one that fails knows the cause.
        with suppress(FileExistsError), open(folder / "error.json", "x", encoding="utf-8") as stream:
            json.dump(problem, stream)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
