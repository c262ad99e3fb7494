"""Measures the Python of a step beyond a loop by hand with the same torch calls: one process, DDP, FSDP2, a pipeline.

Run it as `python scripts/bench/python_per_step.py [--blocks N] [--only NAME]`. It prints a table on stderr and rows as
JSON on stdout. Models are so small that a step is nearly all Python.

A loop by hand does what a correct loop needs: it reads its batch from a `DataLoader`, divides by the number of targets
of all ranks, checks their loss, clips, and steps AdamW and a schedule. With several ranks these are two small
all-reduces a step (three in a pipeline, whose stages have one norm); the trainer has one, which also carries what a
loop by hand lacks, such as stop requests. A loop that never looks at the loss of the other ranks would save one.

Blocks of ten steps of both loops take turns within one process and its process group: a hook of the trainer's optimizer
does a block of the other loop. Each block of the trainer is compared with the mean of the blocks by hand before and
after it, and has one log line. Times are CPU milliseconds of the main thread of rank 0, which do not count waiting. A
busy machine makes both loops up to twice as slow, because their data leaves the caches. So the result is the mean over
the fastest quarter of the pairs of blocks, chosen by the time of both loops together, which favours neither. Its
standard error is given too: where it is as large as the result, the machine was too busy to say more. What no load
changes is the number of function calls of a step, of Python and of C, which is counted in one more block.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
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
from typing import Any, NamedTuple

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


class Beyond(NamedTuple):
    """A step of the loop by hand, and of the trainer beyond it, with its standard error: milliseconds and calls."""

    by_hand: float
    over: float
    error: float
    calls_by_hand: float
    calls_over: float


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


class Calls:
    """A number of function calls, of Python and of C, and of the steps in which they were made."""

    def __init__(self) -> None:
        self._calls = self._steps = 0

    @property
    def each(self) -> float:
        """The number of calls of a step."""
        return self._calls / self._steps

    def start(self) -> None:
        """Counts the calls until the next call of `sys.setprofile`, in one step."""
        self._steps += 1
        sys.setprofile(self._add)

    def count(self, step: Callable[[], None]) -> None:
        """Does a step, and counts its calls."""
        self.start()
        step()
        sys.setprofile(None)

    def _add(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += event in ("call", "c_call")


class Alternating:
    """Does a block of steps of the loop by hand after each block of steps of the trainer, and measures both.

    Args:
        start: returns the loop by hand; called at the first update, when the process group exists.
    """

    def __init__(self, start: Callable[[], Iterator[None]]) -> None:
        self._start = start
        self._steps: Iterator[None] | None = None
        self._done = 0
        self._left = 0.0
        self.ours: list[float] = []
        self.by_hand: list[float] = []
        self._our_calls, self._by_hand_calls = Calls(), Calls()

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """Returns an AdamW before whose updates the other loop may have its turn."""
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.register_step_pre_hook(self._turn)
        return optimizer

    def _turn(self, *_: Any) -> None:
        entered = time.thread_time()
        sys.setprofile(None)
        if self._steps is None:
            self._steps = self._start()
            next(self._steps)
            gc.collect()
            gc.freeze()
        elif self._done % BLOCK == 0:
            self.ours.append(1000 * (entered - self._left) / BLOCK)
        if self._done % BLOCK == 0:
            began = time.thread_time()
            for _ in range(BLOCK):
                next(self._steps)
            self._left = time.thread_time()
            self.by_hand.append(1000 * (self._left - began) / BLOCK)
        self._done += 1
        if len(self.by_hand) == WARM_UP:
            # Before the first block that counts. A profiler would slow down the steps in which it counts.
            self._by_hand_calls.count(functools.partial(next, self._steps))
            self._our_calls.start()

    def result(self) -> Beyond:
        """Returns the milliseconds of a step."""
        around = [(before + after) / 2 for before, after in itertools.pairwise(self.by_hand)]
        pairs = list(zip(around, self.ours, strict=True))[WARM_UP:]
        fastest = sorted(pairs, key=sum)[: max(2, len(pairs) // 4)]
        differences = [ours - hand for hand, ours in fastest]
        return Beyond(
            by_hand=statistics.mean(hand for hand, _ in fastest),
            over=statistics.mean(differences),
            error=statistics.stdev(differences) / math.sqrt(len(differences)),
            calls_by_hand=self._by_hand_calls.each,
            calls_over=self._our_calls.each - self._by_hand_calls.each,
        )


def measured(strategy: str, has_metrics: bool, blocks: int) -> Beyond:
    """Trains with both loops in this process, which may be one of several ranks; returns the times of a step."""
    kind, ranks, settings = STRATEGIES[strategy]
    torch.set_num_threads(1)
    is_pipeline = strategy == "pipeline"
    steps = (blocks + WARM_UP) * BLOCK + 1
    rows = (texts if is_pipeline else points)((steps + 2 * BLOCK) * BATCH * ranks)
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
    return loops.result()


def as_rows(found: dict[tuple[str, bool], Beyond]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table, with the load of the machine."""
    for (strategy, has_metrics), times in found.items():
        yield {
            "what": f"Python of a step over a loop by hand: {strategy}{', with metrics' if has_metrics else ''}",
            "value": round(times.over, 3),
            "reach": REACH[has_metrics],
            "unit": "ms of CPU",
            "reached": times.over <= REACH[has_metrics],
            "strategy": strategy,
            "metrics": has_metrics,
            "by_hand": round(times.by_hand, 3),
            "error": round(times.error, 3),
            "calls_by_hand": round(times.calls_by_hand),
            "calls_over": round(times.calls_over),
            "load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        }


def main() -> int:
    """Measures the chosen strategies without and with metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100, help="blocks of ten steps")
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
            times = found[strategy, has_metrics]
            shown = f"{times.by_hand:>8.3f} + {times.over:.3f} +- {times.error:.3f} ms"
            shown += f"{times.calls_by_hand:>8.0f} {times.calls_over:+.0f} calls"
            print(f"{strategy:<14}{'metrics' * has_metrics:<10}{shown}", file=sys.stderr, flush=True)
    print(json.dumps(list(as_rows(found))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
