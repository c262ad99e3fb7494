"""Measures the overhead of a training step: this trainer, a raw loop, Accelerate, transformers.

Run it as `python scripts/bench/step_overhead.py [--steps N] [--repeats N]`. It prints a table on stderr and rows as
JSON on stdout. The model has eight parameters, so a step is nearly all overhead. Every loop clips, steps AdamW and a
schedule, and reads its batches from a `DataLoader`. Times are CPU milliseconds of the thread. The result is the median
of the repeats; the loops alternate, so that a slow period of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, get_scheduler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forgather.ml import Trainer, TrainingArguments  # noqa: E402

BATCH = 2
REACH = {"ours, logging off": 0.15, "ours, metrics every 10 steps": 0.30, "ours, metrics every step": None}


class Eight(nn.Module):
    """Eight parameters: seven weights and a bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 7, generator=generator)
        self.labels = torch.randn(count, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.labels[index]}


class JsonLines(TrainerCallback):
    """Writes and flushes one line per record of metrics."""

    def __init__(self, file):
        self.stream = open(file, "w", encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.stream.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        self.stream.flush()

    def on_train_end(self, args, state, control, **kwargs):
        self.stream.close()


class Stopwatch(TrainerCallback):
    """Measures the CPU time of the thread from the first to the last step, without start-up and shutdown."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == WARM_UP:
            self.began = time.thread_time()
        self.ended = time.thread_time()


WARM_UP = 20


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def raw(steps, folder):
    model = Eight().train()
    optimizer = optimizer_of(model)
    schedule = get_scheduler("linear", optimizer, 0, steps)
    loader = DataLoader(Rows(steps * BATCH), batch_size=BATCH, shuffle=True, collate_fn=collate)
    for step, batch in enumerate(loader, start=1):
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == WARM_UP:
            began = time.thread_time()
    return time.thread_time() - began


def accelerate_loop(steps, folder):
    accelerator = Accelerator(cpu=True)
    model = Eight().train()
    optimizer = optimizer_of(model)
    schedule = get_scheduler("linear", optimizer, 0, steps)
    loader = DataLoader(Rows(steps * BATCH), batch_size=BATCH, shuffle=True, collate_fn=collate)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step == WARM_UP:
            began = time.thread_time()
    return time.thread_time() - began


def arguments(kind, steps, folder, every):
    logging_settings = {"logging_strategy": "steps", "logging_steps": every} if every else {"logging_strategy": "no"}
    return kind(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **logging_settings,
    )


def ours(every):
    def measure(steps, folder):
        watch = Stopwatch()
        callbacks = [JsonLines(folder / "metrics.jsonl"), watch] if every else [watch]
        trainer = Trainer(
            Eight(),
            arguments(TrainingArguments, steps, folder, every),
            train_dataset=Rows(steps * BATCH),
            data_collator=collate,
            optimizer_factory=torch.optim.AdamW,
            callbacks=callbacks,
        )
        trainer.train()
        return watch.ended - watch.began

    return measure


def theirs(every):
    def measure(steps, folder):
        watch, model = Stopwatch(), Eight()
        callbacks = [JsonLines(folder / "metrics.jsonl"), watch] if every else [watch]
        trainer = transformers.Trainer(
            model,
            arguments(transformers.TrainingArguments, steps, folder, every),
            train_dataset=Rows(steps * BATCH),
            data_collator=collate,
            optimizers=(optimizer_of(model), None),
            callbacks=callbacks,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return watch.ended - watch.began

    return measure


LOOPS = {
    "raw loop": raw,
    "ours, logging off": ours(0),
    "ours, metrics every 10 steps": ours(10),
    "ours, metrics every step": ours(1),
    "accelerate loop": accelerate_loop,
    "transformers.Trainer, logging off": theirs(0),
    "transformers.Trainer, metrics every 10 steps": theirs(10),
}


def measure(steps, repeats):
    seconds = {name: [] for name in LOOPS}
    for _ in range(repeats):
        for name, loop in LOOPS.items():
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(0)
                seconds[name].append(1000 * loop(steps, Path(folder)) / (steps - WARM_UP))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {name: (median, median - medians["raw loop"]) for name, median in medians.items()}


def as_rows(measured):
    for name, (_, over) in measured.items():
        if name != "raw loop":
            reach = REACH.get(name)
            yield {
                "what": f"step over a raw loop: {name}",
                "value": round(over, 3),
                "reach": reach,
                "unit": "ms of CPU",
                "reached": None if reach is None else over <= reach,
            }


def table(measured):
    lines = [f"{'loop':<46}{'ms/step':>9}{'over raw':>10}{'reach':>8}"]
    for name, (median, over) in measured.items():
        reach = REACH.get(name)
        lines.append(f"{name:<46}{median:>9.3f}{over:>10.3f}{'' if reach is None else reach:>8}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        measured = measure(options.steps, options.repeats)
    print(table(measured), file=sys.stderr)
    print(json.dumps(list(as_rows(measured))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
