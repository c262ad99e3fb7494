"""Compares the idle shares of torch's seven pipeline schedules by formula, simulation, and a run of sleeping layers.

The run has four gloo ranks. A layer sleeps in its forward pass, in its backward pass for the inputs and in its backward
pass for the weights, so that the ranks do not compete for processors. The simulation uses the mean times that the
layers slept. Prints rows as JSON; `--table` prints all measurements.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: E402

from forgather.ml.strategy.pipeline.bubble_simulation import (  # noqa: E402
    StageTimes,
    idle_formula,
    simulate,
)
from forgather.pipeline_schedules import SCHEDULES  # noqa: E402

RANKS, MICRO_BATCHES = 4, 8
UNIT = 0.25  # seconds of one kind of action, for all stages of a rank together; long compared with the cost of sending
STEPS = 2
REACH = 0.05


class Slept:
    """Counts the seconds slept, by kind of action."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"F": [], "I": [], "W": []}

    def sleep(self, kind: str, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.seconds[kind].append(time.perf_counter() - start)


class ToInputs(torch.autograd.Function):
    """Sleeps in the forward pass, and in the backward pass for the inputs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slept: Slept, seconds: float) -> Tensor:
        ctx.slept, ctx.seconds = slept, seconds
        slept.sleep("F", seconds)
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.slept.sleep("I", ctx.seconds)
        return gradient.contiguous(), None, None


class ToWeights(torch.autograd.Function):
    """Sleeps in the backward pass for the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, slept: Slept, seconds: float) -> Tensor:
        ctx.slept, ctx.seconds = slept, seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.slept.sleep("W", ctx.seconds)
        return gradient, None, None


class Sleeping(nn.Module):
    """A stage that sleeps instead of computing."""

    def __init__(self, slept: Slept, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.slept, self.seconds = slept, seconds

    def forward(self, states: Tensor) -> Tensor:
        moved = states + ToWeights.apply(self.weight, self.slept, self.seconds)
        return ToInputs.apply(moved, self.slept, self.seconds)


def stages_of(schedule: str, rank: int, per_rank: int) -> list[int]:
    if SCHEDULES[schedule].v_shaped:
        return [rank, 2 * RANKS - 1 - rank]
    return [rank + RANKS * loop for loop in range(per_rank)]


def measure(schedule: str, rank: int) -> tuple[float, dict[str, list[float]]]:
    """Returns the seconds of the fastest step, and the seconds that this rank slept in it, by kind.

    The fastest step is used because other load on the machine can only make a step longer.
    """
    per_rank = SCHEDULES[schedule].usual_stages
    slept, device = Slept(), torch.device("cpu")
    stages = [
        PipelineStage(Sleeping(slept, 0.0), index, RANKS * per_rank, device)
        for index in stages_of(schedule, rank, per_rank)
    ]
    kind = get_schedule_class(schedule.removeprefix("Schedule"))
    runner = kind(
        stages[0] if SCHEDULES[schedule].one_stage else stages,
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda output, target: (output - target).sum(),
        scale_grads=False,
    )
    rows = torch.zeros(MICRO_BATCHES, 4)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    results = []
    for step in range(1 + STEPS):
        for stage in stages:  # the first step only determines shapes, so it need not sleep as long
            stage.submod.seconds = UNIT / per_rank if step else 0.001
        slept.seconds = {"F": [], "I": [], "W": []}
        dist.barrier()
        start = time.perf_counter()
        runner.step(*([rows] if first else []), **({"target": rows, "losses": []} if last else {}))
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        results.append((took.item(), slept.seconds))
    return min(results[1:], key=lambda result: result[0])


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit)
    found = {schedule: measure(schedule, rank) for schedule in SCHEDULES}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run() -> list[dict[str, Any]]:
    """Returns the measurements of each rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("fork").Process(target=work, args=(r, folder)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def compare(schedule: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the idle shares of one schedule by formula, simulation and measurement."""
    step = max(rank[schedule][0] for rank in ranks)
    slept = [rank[schedule][1] for rank in ranks]
    busy = sum(sum(seconds) for rank in slept for seconds in rank.values())
    mean = {kind: statistics.mean(t for rank in slept for t in rank[kind]) for kind in "FIW"}
    times = StageTimes(mean["F"], mean["I"], mean["W"])
    num_stages = RANKS * SCHEDULES[schedule].usual_stages
    by_stage = [times.as_first(), *[times] * (num_stages - 1)]
    simulated = simulate(schedule, RANKS, MICRO_BATCHES, times=by_stage)
    return {
        "formula": idle_formula(schedule, RANKS, MICRO_BATCHES),
        "equal": simulate(schedule, RANKS, MICRO_BATCHES).idle_share,
        "simulated": simulated.idle_share,
        "measured": 1 - busy / (RANKS * step),
        "step_simulated": simulated.step_time,
        "step_measured": step,
    }


def main() -> None:
    """Prints rows as JSON, or all measurements as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print every schedule with formula and simulation")
    options = parser.parse_args()
    ranks = run()
    found = {schedule: compare(schedule, ranks) for schedule in SCHEDULES}
    if options.table:
        print("| schedule | formula | simulated | simulated, as run | measured | step, s | simulated | difference |")
        print("|---|---|---|---|---|---|---|---|")
        for name, row in found.items():
            off = row["step_measured"] / row["step_simulated"] - 1
            shares = " | ".join(f"{row[key]:.3f}" for key in ("formula", "equal", "simulated", "measured"))
            print(f"| {name} | {shares} | {row['step_measured']:.3f} | {row['step_simulated']:.3f} | {off:+.1%} |")
        return
    rows = []
    for name, row in found.items():
        off = abs(row["step_measured"] / row["step_simulated"] - 1)
        rows.append(
            {
                "what": f"{name}: idle {row['measured']:.3f}, simulated {row['simulated']:.3f}; step over simulation",
                "value": round(100 * off, 1),
                "reach": 100 * REACH,
                "unit": "%",
                "reached": off <= REACH,
            }
        )
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
