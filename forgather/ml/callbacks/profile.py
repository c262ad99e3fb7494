"""A profile of some steps by torch.profiler: a trace for Perfetto, and a table of operators for the report."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.callbacks.output_target import report_only, run_folder
from forgather.ml.log import get_logger
from forgather.replaced_file import replace_file

_log = get_logger(__name__)

FOLDER = "profile"
OPERATORS_FILE = "operators.json"
_MOST_OPERATORS = 40


class ProfileCallback(TrainerCallback):
    """A callback that profiles some steps.

    The first `wait` steps run as usual, `warmup` steps are thrown away, `active` steps are recorded.

    It writes `profile/trace.json.gz` into the run folder, which https://ui.perfetto.dev shows, and
    `profile/operators.json`, the table of the report. The recorded steps are slower; the weights are the same.

    Args:
        wait: the number of steps before the profiler starts.
        warmup: the number of steps in which the profiler runs and nothing is kept.
        active: the number of steps that are recorded.
        record_shapes: whether the shapes of inputs are recorded.
        profile_memory: whether allocations are recorded.
        with_stack: whether the Python stack of each operator is recorded, which is slow.
        all_ranks: whether each rank profiles, and not rank 0 alone; rank n above 0 writes `trace.rank<n>.json.gz`.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.

    Raises:
        ArgumentValueError: FG813 if a value is not allowed.
    """

    def __init__(
        self,
        wait: int = 5,
        warmup: int = 1,
        active: int = 3,
        *,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        all_ranks: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_wrong_values("callbacks:ProfileCallback", locals())
        self.wait, self.warmup, self.active = wait, warmup, active
        self.all_ranks = all_ranks
        self.run_dir = run_dir
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: profile | None = None
        self._steps = 0
        self._is_written = False
        self._place = Path()
        self._suffix = ""

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says if the run has too few steps to be profiled."""
        self._steps, self._is_written, self._profiler = 0, False, None
        rank = int(args.process_index)
        self._place, self._suffix = run_folder(args, self.run_dir) / FOLDER, f".rank{rank}" if rank else ""
        left, needed = state.max_steps - state.global_step, self.wait + self.warmup + self.active
        if left < needed:
            _log.warning("profile: the run has %d steps, and wait, warmup and active are %d together", left, needed)

    @report_only
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the profiler with the first step of the run."""
        if self._profiler is None and not self._is_written and (self.all_ranks or not self._suffix):
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            with warnings.catch_warnings():
                # torch warns of a warmup of 0, which the user has chosen.
                warnings.simplefilter("ignore", UserWarning)
                steps = schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
            self._profiler = profile(
                activities=kinds,
                schedule=steps,
                on_trace_ready=self._write,
                **self._options,
            )
            self._profiler.start()

    @report_only
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tells the profiler that a step has ended, and stops it after the last one that is recorded."""
        if self._profiler is not None:
            self._steps += 1
            self._profiler.step()
            if self._is_written:
                self._stop()

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the profile of a run that has ended before all steps were recorded."""
        began, steps = self._profiler is not None, self._steps
        self._stop()
        if began and not self._is_written:
            needed = self.wait + self.warmup
            _log.warning(
                "profile: nothing was recorded: the run had %d steps, and wait and warmup are %d", steps, needed
            )

    def _stop(self) -> None:
        stopped, self._profiler = self._profiler, None
        if stopped is not None:
            stopped.stop()

    def _write(self, profiled: profile) -> None:
        recorded = self._steps - self.wait - self.warmup
        if self._is_written or recorded < 1:
            return
        self._is_written = True
        self._place.mkdir(parents=True, exist_ok=True)
        trace = self._place / f"trace{self._suffix}.json.gz"
        profiled.export_chrome_trace(str(trace))
        facts = {"steps": recorded, "trace": f"{FOLDER}/{trace.name}", "operators": operator_table(profiled)}
        stem, suffix = os.path.splitext(OPERATORS_FILE)
        text = json.dumps(facts, indent=1) + "\n"
        replace_file(self._place / f"{stem}{self._suffix}{suffix}", text.encode())
        _log.warning("profile: %d steps are in %s, which https://ui.perfetto.dev opens", recorded, trace)


def operator_table(profiled: profile) -> list[dict[str, Any]]:
    """Returns the operators that took the most time by themselves, the longest first.

    Args:
        profiled: a profiler that has recorded steps.

    Units:
        microseconds over all recorded steps; bytes.
    """
    rows = [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_us": event.self_cpu_time_total,
            "cpu_us": event.cpu_time_total,
            "self_device_us": event.self_device_time_total,
            "device_us": event.device_time_total,
            "self_memory_bytes": event.self_cpu_memory_usage + event.self_device_memory_usage,
        }
        for event in profiled.key_averages()
        # The marks that the profiler sets around each step are no operators.
        if not event.key.startswith("ProfilerStep")
    ]
    has_device = any(row["self_device_us"] for row in rows)
    rows.sort(key=lambda row: -row["self_device_us" if has_device else "self_cpu_us"])
    return rows[:_MOST_OPERATORS]
