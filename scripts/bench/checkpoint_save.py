"""Measures the cost of a checkpoint: its stall compared with `torch.save`, the steps while it is written, its digests.

Run it as `python scripts/bench/checkpoint_save.py [--gib 1.4] [--repeats 5] [--folder DIR]`. It prints a table on
stderr and rows as JSON on stdout; `--figures FILE` also stores them for docs/guarantees.md. One run trains on one
thread of two processors and saves asynchronously. Between two checkpoints, while nothing is being written, it measures
steps and a `torch.save` of the same weights and optimizer state, so that a slow period of the machine affects all of
them. The results are medians. The folder must be on the disk to be measured, not in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import xxhash
from torch import nn
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forgather.ml import Trainer, TrainingArguments  # noqa: E402
from forgather.ml.checkpoint import LocalStorage  # noqa: E402
from forgather.ml.checkpoint.checkpoint_dir import Draft  # noqa: E402
from forgather.ml.checkpoint.manifest import MANIFEST  # noqa: E402
from forgather.ml.checkpoint.state import file_chunks  # noqa: E402
from forgather.ml.checkpoint.storage import write_file  # noqa: E402

WIDTH, PIECE = 2048, 8 << 20
REACH = {"stall": 0.6, "next step": 1.10, "digests": 1.05}


class Layers(nn.Module):
    """A stack of square layers whose weights and optimizer state (two numbers per weight) have a given size."""

    def __init__(self, gib: float):
        super().__init__()
        torch.manual_seed(0)
        count = max(1, round(gib * 2**30 / (12 * WIDTH * WIDTH)))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])

    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}


class Rows(torch.utils.data.Dataset):
    """A data set of identical rows that never ends within a run."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return {"x": torch.ones(WIDTH), "labels": torch.zeros(WIDTH)}


class Measure(TrainerCallback):
    """Saves repeatedly, and measures each save and the steps around it."""

    QUIET = 4

    def __init__(self, repeats, folder):
        self.repeats, self.folder = repeats, folder
        self.stalls, self.during, self.quiet, self.torch_saves, self.written = [], [], [], [], []
        self._began = self._ended = self._saving_since = self._quiet_steps = 0
        self._saves = False

    def on_step_begin(self, args, state, control, **others):
        now = time.perf_counter()
        if self._saves:
            self.stalls.append(now - self._ended)
            self._saves, self._saving_since = False, now
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, *, model=None, optimizer=None, **others):
        took = time.perf_counter() - self._began
        if self._saving_since:
            # A step in which the writing ended belongs to neither group.
            if not (Path(args.output_dir) / f"checkpoint-{state.global_step - 1}" / MANIFEST).exists():
                self.during.append(took)
        elif state.global_step > 2:
            self.quiet.append(took)
            self._quiet_steps += 1
        if self._quiet_steps >= self.QUIET and not self._saving_since:
            self._quiet_steps = 0
            self.torch_saves.append(self._torch_save(model, optimizer))
            if len(self.stalls) >= self.repeats:
                control.should_training_stop = True
            else:
                control.should_save = self._saves = True
        self._ended = time.perf_counter()

    def on_save(self, args, state, control, **others):
        if self._saving_since:
            self.written.append(time.perf_counter() - self._saving_since)
        self._saving_since = 0

    def _torch_save(self, model, optimizer):
        file = self.folder / "torch.pt"
        began = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        took = time.perf_counter() - began
        file.unlink()
        return took


def measure_run(gib, repeats, folder):
    """Returns the measurements of one run, and its trainer."""
    measure = Measure(repeats, folder)
    args = TrainingArguments(
        folder / "out",
        max_steps=100_000,
        per_device_train_batch_size=16,
        save_strategy="best",
        eval_strategy="epoch",
        save_total_limit=1,
        async_save=True,
        logging_strategy="no",
        use_cpu=True,
        max_grad_norm=0.0,
    )
    trainer = Trainer(Layers(gib), args, train_dataset=Rows(), eval_dataset=[Rows()[0]], callbacks=[measure])
    trainer.save_model = lambda *_: None
    trainer.train()
    return measure, trainer


class Plain(Draft):
    """A checkpoint draft without digests."""

    def write(self, name, chunks):
        write_file(self.storage, self.folder / name, _pieces(chunks))


def _pieces(chunks):
    for chunk in chunks:
        whole = memoryview(chunk).cast("B")
        for start in range(0, len(whole), PIECE):
            yield whole[start : start + PIECE]


def measure_digests(trainer, repeats, folder):
    """Returns the seconds of a save with digests, of a save without, and of the digests alone."""
    state = trainer.optimizer.state_dict()["state"]
    tensors = {f"{number}.{name}": value for number, entry in state.items() for name, value in entry.items()}
    tensors |= trainer.model.state_dict()
    found = {Draft: [], Plain: []}
    for repeat in range(repeats + 1):
        for kind in (Draft, Plain) if repeat % 2 else (Plain, Draft):
            place = folder / "digests"
            place.mkdir()
            began = time.perf_counter()
            kind(LocalStorage(), place).write("state.safetensors", file_chunks(tensors))
            found[kind].append(time.perf_counter() - began)
            shutil.rmtree(place)
    hasher, began = xxhash.xxh3_128(), time.perf_counter()
    for piece in _pieces(file_chunks(tensors)):
        hasher.update(piece)
    return found[Draft][1:], found[Plain][1:], time.perf_counter() - began


def note(file, gib, seconds, ratios):
    """Adds the figures to those of the reliability tests."""
    texts = {
        "stall": f"{ratios['stall']:.3f} of torch.save of {gib} GiB ({seconds['torch.save']:.1f} s), limit "
        f"{REACH['stall']}; a step takes {ratios['next step']:.2f} of its time during the writing, limit "
        f"{REACH['next step']:.2f}",
        "digests": f"{ratios['digests']:.2f} of the save without, limit {REACH['digests']}; "
        f"the digests alone take {seconds['digests alone'] / seconds['save without']:.0%} of it",
    }
    figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    figures |= {name: {"scripts/bench/checkpoint_save.py": text} for name, text in texts.items()}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(figures, indent=1, sort_keys=True), encoding="utf-8")


def main() -> int:
    """Measures and prints. Returns an exit status of 0 if every figure is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.4, help="size of a checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk that is meant")
    parser.add_argument("--figures", type=Path, help="what scripts/write_guarantees.py reads; the figures are added")
    options = parser.parse_args()
    logging.getLogger("forgather").setLevel(logging.ERROR)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    try:
        measure, trainer = measure_run(options.gib, options.repeats, folder)
        hashed, plain, hashing = measure_digests(trainer, options.repeats, folder)
    finally:
        shutil.rmtree(folder)
    median = statistics.median
    seconds = {
        "stall of an asynchronous save": median(measure.stalls),
        "torch.save": median(measure.torch_saves),
        "written after": median(measure.written),
        "step during the writing": median(measure.during) if measure.during else float("nan"),
        "step": median(measure.quiet),
        "save with digests": median(hashed),
        "save without": median(plain),
        "digests alone": hashing,
    }
    ratios = {
        "stall": seconds["stall of an asynchronous save"] / seconds["torch.save"],
        "next step": seconds["step during the writing"] / seconds["step"],
        "digests": seconds["save with digests"] / seconds["save without"],
    }
    for name, value in seconds.items():
        sys.stderr.write(f"{name:32} {value:8.3f} s\n")
    for name, value in ratios.items():
        reach = f"   reach {REACH[name]:.2f}" if name in REACH else ""
        sys.stderr.write(f"{name:32} {value:8.3f}  {reach}\n")
    if options.figures is not None:
        note(options.figures, options.gib, seconds, ratios)
    sys.stdout.write(json.dumps({"gib": options.gib, "seconds": seconds, "ratios": ratios}) + "\n")
    return 0 if all(ratios[name] <= reach for name, reach in REACH.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
