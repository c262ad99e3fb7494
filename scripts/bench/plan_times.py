"""Measures how well planned times order configs: steps of two gloo ranks, planned after one calibration.

Run it as `python scripts/bench/plan_times.py [--repeats 3] [--figures FILE]`. It prints a table on stderr and rows as
JSON on stdout; `--figures` also stores the work of each config, which a test plans again. Some configs calibrate this
machine by `fgcli plan --calibrate`; the others are planned with the hardware file that it writes, and Kendall's tau
compares the two orders of those. A machine with other load stretches steps, so each config runs several times, the
passes alternate, and the fastest median counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from forgather.cli.main import main as fgcli  # noqa: E402
from forgather.launch.calibration import MeasuredRun, measured_run, work_of  # noqa: E402
from forgather.launch.recorded_graph import recorded_project  # noqa: E402
from forgather.launch.time_planning import time_of  # noqa: E402
from forgather.ml.trainer.meter import Meter  # noqa: E402
from forgather.planner.hardware import Hardware, hardware  # noqa: E402
from forgather.planner.work import RunWork  # noqa: E402
from forgather.project.run_reader import open_run  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402
from tests.planner.step_figures import Figures  # noqa: E402

RANKS, STEPS, REACH = 2, 14, 0.8
# Config, hidden size, layers, rows of a process, recomputation.
CALIBRATING = {
    "ddp 64 x 8, 8 rows": ("ddp", 64, 8, 8, False),
    "ddp 192 x 4, 16 rows": ("ddp", 192, 4, 16, False),
    "fsdp2 128 x 4, 8 rows": ("fsdp2", 128, 4, 8, False),
    "fsdp2 256 x 4, 2 rows": ("fsdp2", 256, 4, 2, False),
    "tensor 128 x 4, 16 rows": ("tensor", 128, 4, 16, False),
    "1f1b 128 x 8, 16 rows": ("pipeline_1f1b", 128, 8, 16, False),
}
PLANNED = {
    "ddp 64 x 4, 4 rows": ("ddp", 64, 4, 4, False),
    "ddp 128 x 8, 16 rows": ("ddp", 128, 8, 16, False),
    "ddp 128 x 8, 16 rows, recomputation": ("ddp", 128, 8, 16, True),
    "ddp 256 x 4, 4 rows": ("ddp", 256, 4, 4, False),
    "fsdp2 64 x 4, 4 rows": ("fsdp2", 64, 4, 4, False),
    "fsdp2 128 x 8, 8 rows, recomputation": ("fsdp2", 128, 8, 8, True),
    "fsdp2 256 x 4, 16 rows": ("fsdp2", 256, 4, 16, False),
    "tensor 64 x 4, 8 rows": ("tensor", 64, 4, 8, False),
    "tensor 256 x 4, 16 rows": ("tensor", 256, 4, 16, False),
    "gpipe 128 x 4, 16 rows": ("pipeline_gpipe", 128, 4, 16, False),
    "1f1b 64 x 8, 8 rows": ("pipeline_1f1b", 64, 8, 8, False),
    "1f1b 256 x 4, 32 rows, recomputation": ("pipeline_1f1b", 256, 4, 32, True),
}


def words_of(cell: tuple, output_dir: str) -> list[str]:
    """Returns the words of the command that trains a config."""
    config, hidden, layers, rows, recomputation = cell
    settings = {
        "model_config.hidden_size": hidden,
        "model_config.intermediate_size": 3 * hidden,
        "model_config.num_hidden_layers": layers,
        "trainer_args.per_device_train_batch_size": rows,
        "trainer_args.max_steps": STEPS,
        "trainer_args.logging_steps": 1,
        "trainer_args.eval_strategy": "no",
        "trainer_args.save_strategy": "no",
        **({"+trainer_args.gradient_checkpointing": "true"} if recomputation else {}),
    }
    changes = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    return ["-p", str(ROOT / "projects/parallel"), "-t", config, "train", "--output-dir", output_dir, *changes]


def train(words: list[str]) -> int:
    """Runs a command on a rank, whose messages are left out."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return fgcli(words)


def raise_priority() -> None:
    """Gives the steps of ranks that start later the highest priority, if this user may; other work stretches steps."""
    start, summary = Meter.start, Meter.summary

    def urgent(meter: Meter) -> None:
        _set_priority(-20)
        start(meter)

    def usual(meter: Meter) -> dict[str, float]:
        _set_priority(0)
        return summary(meter)

    Meter.start, Meter.summary = urgent, usual  # type: ignore[method-assign]


def _set_priority(priority: int) -> None:
    # Where Linux groups processes by session, the nice value only counts inside of the group.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(priority))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread), priority)


def folder_of(name: str, folder: Path) -> Path:
    """Returns the output folder of a config."""
    return folder / "".join(letter if letter.isalnum() else "-" for letter in name)


def measured_once(name: str, cell: tuple, folder: Path) -> MeasuredRun:
    """Returns a run of a config with its measured steps."""
    output_dir = folder_of(name, folder)
    statuses = run_ranks(RANKS, train, words_of(cell, str(output_dir)), timeout=300)
    if any(statuses):
        raise SystemExit(f"{name}: exit statuses {statuses}")
    return measured_runs(name, folder)[-1]


def measured_runs(name: str, folder: Path) -> list[MeasuredRun]:
    """Returns the runs of a config in a folder, oldest first."""
    records = [open_run(str(run)) for run in sorted((folder_of(name, folder) / "runs").glob("2*"))]
    return [measured_run(past, recorded_project(past)) for past in records]


def kendall(first: list[float], second: list[float]) -> float:
    """Returns Kendall's tau of two lists without ties."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    signs = [(first[a] - first[b]) * (second[a] - second[b]) > 0 for a, b in pairs]
    return (2 * sum(signs) - len(pairs)) / len(pairs)


def calibrated(runs: list[MeasuredRun], file: Path) -> Hardware:
    """Returns this machine as `fgcli plan --calibrate` describes it after some runs."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = fgcli(["plan", "--calibrate", *(run.past.folder for run in runs), "-o", str(file)])
    if status:
        raise SystemExit(f"plan --calibrate ended with {status}")
    return hardware(str(file))


def planned_seconds(work: RunWork, device: Hardware) -> float:
    """Returns the middle of the planned seconds of a step."""
    seconds = time_of(work, device)["step"]["seconds"]
    return (seconds["low"] + seconds["high"]) / 2


def main() -> int:
    """Runs the bench. Returns 1 if tau is below its reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each config (default: 3)")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs there; runs that are there count too")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="store the work and the seconds of each config")
    parser.add_argument("--urgent", action="store_true", help="run the steps with the highest priority")
    options = parser.parse_args()
    if options.urgent:
        raise_priority()
    cells = {**CALIBRATING, **PLANNED}
    fastest: dict[str, MeasuredRun] = {}
    with tempfile.TemporaryDirectory() as folder:
        kept = options.runs or Path(folder)
        for _, (name, cell) in itertools.product(range(options.repeats), cells.items()):
            run = measured_once(name, cell, kept)
            print(f"... {name}: {run.seconds:.4f} s", file=sys.stderr, flush=True)
        for name in cells:
            fastest[name] = min(measured_runs(name, kept), key=lambda run: run.seconds)
        several = calibrated([fastest[name] for name in CALIBRATING], Path(folder) / "several.json")
        device = json.loads((Path(folder) / "several.json").read_text())
        works = {name: work_of(run, several) for name, run in fastest.items()}
        each = {name: calibrated([fastest[name]], Path(folder) / "one.json") for name in CALIBRATING}
    planned = {name: planned_seconds(work, several) for name, work in works.items()}
    print("| config | measured, s | planned, s | |\n|---|---|---|---|", file=sys.stderr)
    for name, seconds in planned.items():
        took = fastest[name].seconds
        line = f"| {name} | {took:.4f} | {seconds:.4f} | {seconds / took - 1:+.0%} |"
        print(line + " calibrates" * (name in CALIBRATING), file=sys.stderr)
    measured = [fastest[name].seconds for name in PLANNED]
    order = kendall(measured, [planned[name] for name in PLANNED])
    alone = {
        name: kendall(measured, [planned_seconds(works[other], device) for other in PLANNED])
        for name, device in each.items()
    }
    for name, tau in alone.items():
        print(f"tau after a calibration by {name} alone: {tau:.2f}", file=sys.stderr)
    if options.figures:
        figures = Figures()
        steps = [
            {"name": name, "calibrates": name in CALIBRATING, "seconds": fastest[name].seconds, **figures.packed(work)}
            for name, work in works.items()
        ]
        file = {"device": device, "tau": order, "planned": planned, "texts": figures.texts, "steps": steps}
        options.figures.write_text(json.dumps(file, separators=(",", ":")) + "\n")
    row = {"what": "Kendall's tau of planned and measured steps", "value": round(order, 3), "reach": REACH}
    print(json.dumps([{**row, "unit": f"{len(PLANNED)} configs", "reached": order >= REACH}]))
    return int(order < REACH)


if __name__ == "__main__":
    sys.exit(main())
