"""Measures the overhead of a step of two processes: this trainer, and the same loop written by hand.

Run it as `python scripts/bench/parallel_step.py [--steps N] [--repeats N]`. It prints a table on stderr and rows as
JSON on stdout. Two gloo ranks train a model of eight parameters, so a step is nearly all overhead. Every loop sums the
number of targets over the ranks, divides by it, clips, steps AdamW and a schedule, and sums the loss over the ranks and
checks it. Times are CPU milliseconds of the main thread of rank 0. The result is the median of the repeats, and the
loops alternate. The times are taken in the collator, because a callback would cost a broadcast per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_scheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from step_overhead import BATCH, WARM_UP, Eight, Rows, collate, optimizer_of  # noqa: E402

from forgather.ml import AccelTrainer, AccelTrainingArguments  # noqa: E402
from forgather.ml.callbacks.metrics import JsonLogger  # noqa: E402
from forgather.ml.distributed.env import DistributedEnvironment  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402

RANKS = 2
REACH = {"over torch written by hand": 0.2, "over Accelerate written by hand": 0.2}


def _summed(value):
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


class Stamped:
    """A collator that records the time at which it makes the batch of a step."""

    def __init__(self):
        self.times = []

    def __call__(self, rows):
        self.times.append(time.thread_time())
        return collate(rows)

    @property
    def per_step(self):
        """Returns the milliseconds between two batches, without the first ones."""
        return 1000 * (self.times[-1] - self.times[WARM_UP]) / (len(self.times) - 1 - WARM_UP)


def _by_hand(model, optimizer, schedule, loader, backward, clip):
    model.train()
    for batch in loader:
        targets = len(batch["labels"])
        loss = model(**batch)["loss"] * targets / _summed(targets)
        backward(loss * RANKS)
        shown = _summed(loss.detach())
        if not math.isfinite(shown):
            raise ValueError(shown)
        clip(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def torch_by_hand(steps, folder):
    DistributedEnvironment().start(use_cpu=True)
    model = DistributedDataParallel(Eight())
    optimizer = optimizer_of(model)
    rows = Rows(steps * BATCH * RANKS)
    stamped = Stamped()
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows), collate_fn=stamped)
    schedule = get_scheduler("linear", optimizer, 0, steps)
    backward = torch.Tensor.backward
    _by_hand(model, optimizer, schedule, loader, backward, torch.nn.utils.clip_grad_norm_)
    return stamped.per_step


def accelerate_by_hand(steps, folder):
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    torch.set_num_threads(1)
    model = Eight()
    optimizer = optimizer_of(model)
    stamped = Stamped()
    loader = DataLoader(Rows(steps * BATCH * RANKS), batch_size=BATCH, shuffle=True, collate_fn=stamped)
    schedule = get_scheduler("linear", optimizer, 0, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    _by_hand(model, optimizer, schedule, loader, accelerator.backward, accelerator.clip_grad_norm_)
    return stamped.per_step


def ours(every):
    def measured(steps, folder):
        stamped = Stamped()
        logged = {"logging_strategy": "steps", "logging_steps": every} if every else {"logging_strategy": "no"}
        trainer = AccelTrainer(
            Eight,
            AccelTrainingArguments(
                output_dir=str(Path(folder) / "out"),
                per_device_train_batch_size=BATCH,
                max_steps=steps,
                save_strategy="no",
                use_cpu=True,
                **logged,
            ),
            train_dataset=Rows(steps * BATCH * RANKS),
            data_collator=stamped,
            optimizer_factory=torch.optim.AdamW,
            callbacks=[JsonLogger()] if every else [],
        )
        trainer.train()
        return stamped.per_step

    return measured


LOOPS = {
    "torch written by hand": torch_by_hand,
    "Accelerate written by hand": accelerate_by_hand,
    "ours, logging off": ours(0),
    "ours, metrics every 10 steps": ours(10),
}


def _with_rest(loop, steps, folder):
    per_step = loop(steps, folder)
    dist.barrier()
    return per_step


def measure(steps, repeats):
    times = {name: [] for name in LOOPS}
    for _ in range(repeats):
        for name, loop in LOOPS.items():
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(run_ranks(RANKS, _with_rest, loop, steps, folder, timeout=600)[0])
    return {name: statistics.median(found) for name, found in times.items()}


def as_rows(measured):
    for name in ("ours, logging off", "ours, metrics every 10 steps"):
        for against in ("torch written by hand", "Accelerate written by hand"):
            over = measured[name] - measured[against]
            reach = REACH[f"over {against}"] if name == "ours, logging off" else None
            yield {
                "what": f"step of two ranks over {against}: {name}",
                "value": round(over, 3),
                "reach": reach,
                "unit": "ms of CPU",
                "reached": None if reach is None else over <= reach,
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        measured = measure(options.steps, options.repeats)
    for name, median in measured.items():
        print(f"{name:<40}{median:>9.3f} ms/step", file=sys.stderr)
    print(json.dumps(list(as_rows(measured))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
