"""Measures the Python of a step beyond a loop by hand with the same torch calls: one process, DDP, FSDP2, a pipeline.

Run it as `python scripts/bench/python_per_step.py [--blocks N] [--only NAME]`. It prints a table on stderr and rows as
JSON on stdout. Models are so small that a step is nearly all Python. Steps of both loops alternate within one process:
a hook of the trainer's optimizer does a step of the other loop, so that a busy machine slows both equally. A loop by
hand reads its batch from a `DataLoader`, divides by the number of targets of all ranks, checks their loss, clips,
and steps AdamW and a schedule. Times are CPU milliseconds of the main thread of rank 0, which do not count waiting. The
result is the median over blocks of ten steps, so that it includes the log line of every tenth step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from step_overhead import BATCH, Eight, optimizer_of  # noqa: E402

import forgather.ml as ml  # noqa: E402
from forgather.ml.callbacks.metrics import JsonLogger  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402

BLOCK, WARM_UP = 10, 2
LENGTH, VOCAB = 8, 32
REACH = {False: 0.15, True: 0.30}
STRATEGIES = {
    "one process": ("Trainer", 1, {}),
    "DDP": ("AccelTrainer", 2, {}),
    "FSDP2": ("AccelTrainer", 2, {"fsdp": "full_shard"}),
    "pipeline": ("PipelineTrainer", 2, {"pipeline_parallel_size": 2, "schedule_class": "Schedule1F1B"}),
}


def texts(count: int) -> list[dict[str, Tensor]]:
    """Returns rows of tokens, each its own labels."""
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def points(count: int) -> list[dict[str, Tensor]]:
    """Returns rows for the model of eight parameters."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(7, generator=generator), "labels": torch.randn((), generator=generator)}] * count


def tiny_llama() -> LlamaForCausalLM:
    """Returns a Llama of two blocks."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, tie_word_embeddings=False, **sizes))


class FirstStage(nn.Module):
    """The embedding and the first block."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model.model
        self.model.layers, self.model.norm = self.model.layers[:1], nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).last_hidden_state


class LastStage(nn.Module):
    """The last block and the head."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model, self.head = model.model, model.lm_head
        self.model.layers, self.model.embed_tokens = self.model.layers[1:], None

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.model(inputs_embeds=states, use_cache=False).last_hidden_state)


def summed(value: float | Tensor, ranks: int) -> float:
    """Returns the sum over the ranks as a number."""
    total = torch.as_tensor(value, dtype=torch.float32)
    if ranks > 1:
        dist.all_reduce(total)
    return total.item()


def updated(model: nn.Module, optimizer: Any, schedule: Any, loss: float) -> None:
    """Ends a step: checks the loss, clips, and steps optimizer and schedule."""
    if not math.isfinite(loss):
        raise ValueError(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def by_hand(strategy: str, rows: list[dict[str, Tensor]], ranks: int) -> Iterator[None]:
    """Trains step by step."""
    model = Eight().train()
    if strategy == "DDP":
        model = DistributedDataParallel(model)
    elif strategy == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = optimizer_of(model)
    schedule = get_scheduler("linear", optimizer, 0, len(rows))
    for batch in DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=default_collate):
        targets = len(batch["labels"])
        all_targets = summed(targets, ranks)
        loss = model(**batch)["loss"] * (targets / all_targets)
        (loss * ranks).backward()
        updated(model, optimizer, schedule, summed(loss.detach(), ranks))
        yield


def pipeline_by_hand(strategy: str, rows: list[dict[str, Tensor]], ranks: int) -> Iterator[None]:
    """Trains step by step in two stages."""
    rank, device = dist.get_rank(), torch.device("cpu")
    model = (LastStage if rank else FirstStage)(tiny_llama()).train()
    stage = PipelineStage(model, rank, ranks, device)
    targets = 1

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits[:, :-1].reshape(-1, VOCAB)
        return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / targets

    run = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=False)
    optimizer = optimizer_of(model)
    schedule = get_scheduler("linear", optimizer, 0, len(rows))
    for batch in DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=default_collate):
        targets = batch["labels"][:, 1:].numel()
        losses: list[Tensor] = []
        if rank:
            run.step(target=batch["labels"], losses=losses)
        else:
            run.step(batch["input_ids"])
        loss = summed(torch.stack(losses).detach().sum() if losses else 0.0, ranks)
        # Each rank has the weights of its stage, and all are clipped by one norm.
        squares = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]) ** 2
        dist.all_reduce(squares)
        if not math.isfinite(loss):
            raise ValueError(loss)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield


class Alternating:
    """Does a step of the loop by hand before each update of the trainer, and measures both.

    Args:
        start: returns the loop by hand; called at the first update, when the process group exists.
    """

    def __init__(self, start: Callable[[], Iterator[None]]) -> None:
        self._start = start
        self._steps: Iterator[None] | None = None
        self._left: float | None = None
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """Returns an AdamW before whose updates the other loop has its turn."""
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.register_step_pre_hook(self._turn)
        return optimizer

    def _turn(self, *_: Any) -> None:
        entered = time.thread_time()
        if self._steps is None:
            self._steps = self._start()
            next(self._steps)
            gc.collect()
            gc.freeze()
        if self._left is not None:
            self.ours.append(entered - self._left)
            entered = time.thread_time()
            next(self._steps)
            self.theirs.append(time.thread_time() - entered)
        self._left = time.thread_time()

    def medians(self) -> tuple[float, float]:
        """Returns the milliseconds of a step: by hand, and by the trainer beyond it."""
        theirs, ours = (_blocks(times) for times in (self.theirs, self.ours))
        return statistics.median(theirs), statistics.median(a - b for a, b in zip(ours, theirs, strict=True))


def _blocks(times: list[float]) -> list[float]:
    starts = range(WARM_UP * BLOCK, len(times) - BLOCK + 1, BLOCK)
    return [1000 * sum(times[at : at + BLOCK]) / BLOCK for at in starts]


def measured(strategy: str, has_metrics: bool, blocks: int) -> tuple[float, float]:
    """Trains with both loops in this process, which may be one of several ranks; returns what `medians` does."""
    kind, ranks, settings = STRATEGIES[strategy]
    torch.set_num_threads(1)
    is_pipeline = strategy == "pipeline"
    steps = (blocks + WARM_UP) * BLOCK + 1
    rows = (texts if is_pipeline else points)((steps + 1) * BATCH * ranks)
    loops = Alternating(functools.partial(pipeline_by_hand if is_pipeline else by_hand, strategy, rows, ranks))
    logged = {"logging_strategy": "steps", "logging_steps": BLOCK} if has_metrics else {"logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(ml, kind.replace("Trainer", "TrainingArguments"))(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            save_strategy="no",
            use_cpu=True,
            **logged,
            **settings,
        )
        getattr(ml, kind)(
            model_init=tiny_llama if is_pipeline else Eight,
            args=arguments,
            train_dataset=rows,
            data_collator=default_collate,
            optimizer_factory=loops.adamw,
            callbacks=[JsonLogger()] if has_metrics else [],
        ).train()
    return loops.medians()


def as_rows(found: dict[tuple[str, bool], tuple[float, float]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table, with the load of the machine."""
    for (strategy, has_metrics), (theirs, over) in found.items():
        yield {
            "what": f"Python of a step over a loop by hand: {strategy}{', with metrics' if has_metrics else ''}",
            "value": round(over, 3),
            "reach": REACH[has_metrics],
            "unit": "ms of CPU",
            "reached": over <= REACH[has_metrics],
            "strategy": strategy,
            "metrics": has_metrics,
            "by_hand": round(theirs, 3),
            "load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        }


def main() -> int:
    """Measures the chosen strategies without and with metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60, help="blocks of ten steps")
    parser.add_argument("--only", choices=STRATEGIES, help="one strategy")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = {}
    for strategy in [options.only] if options.only else STRATEGIES:
        for has_metrics in (False, True):
            # Also one process is forked, so that each run begins in the same state.
            work = (measured, strategy, has_metrics, options.blocks)
            with contextlib.redirect_stdout(sys.stderr):
                found[strategy, has_metrics] = run_ranks(STRATEGIES[strategy][1], *work, timeout=900)[0]
            theirs, over = found[strategy, has_metrics]
            print(
                f"{strategy:<14}{'metrics' * has_metrics:<10}{theirs:>8.3f} + {over:.3f}", file=sys.stderr, flush=True
            )
    print(json.dumps(list(as_rows(found))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
