"""Run summary: the results, settings and paths of a run, as `summary.json`, on the terminal and as an HTML report."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback

from forgather.ml.callbacks.effective_settings import effective_settings
from forgather.ml.callbacks.output_target import report_only, run_folder, shared_console
from forgather.ml.callbacks.text_sample import unwrap_model
from forgather.ml.metrics import METRICS_FILE, as_json, repeatable_metrics
from forgather.ml.model_class import class_name, num_parameters
from forgather.ml.number_format import (
    evaluation_titles,
    format_count,
    format_duration,
    format_perplexity,
    format_share,
)
from forgather.ml.report import REPORT_FILE, write_report
from forgather.ml.report.run_data import SAMPLES_FILE, SUMMARY_FILE
from forgather.redaction import hidden
from forgather.replaced_file import replace_file

_UNITS = ("tokens", "samples")
"""The units of speed, of which the first one that a run has measured is shown."""

_REPORT_SHARE = 0.01
"""The largest part of the time of a run that reports of it take while it goes on."""
_STATUS_STYLES = {"finished": "bold green", "failed": "bold red"}
# A plain module is saved without a config, a large model in several files, and adapters under their own name.
_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
_PACKAGES = ("forgather", "torch", "transformers", "datasets", "tokenizers", "accelerate")


class RunSummaryCallback(TrainerCallback):
    """A callback that writes `summary.json` and `report.html` into the run's folder and prints the results.

    Both are also written at the start of training, and the report is refreshed with the logs, so that a run can be
    looked at while it goes on, and after it was killed. Refreshing takes at most one hundredth of the time of the run.
    This callback must come after the other callbacks, because it reads their files.

    Args:
        name: the title of the report, or None for the project and config that the launcher recorded. Without such a
            record, the title is the name of the folder.
        report: True to write `report.html`.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.
        console: the console that is printed to, or None for standard output.
        refresh_seconds: the least time between two reports of a run that goes on.

    Units:
        seconds, of `refresh_seconds`.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        report: bool = True,
        run_dir: str | os.PathLike[str] | None = None,
        console: Console | None = None,
        refresh_seconds: float = 15.0,
    ) -> None:
        self.name = name
        self.report = report
        self.run_dir = run_dir
        self.console = console
        self.refresh_seconds = refresh_seconds
        self._next_report = 0.0
        self._summary: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        self._speeds: dict[str, list[float]] = {}
        self._begin = (0.0, 0)
        self._model_before: tuple[tuple[int, int], ...] | None = None
        self._checkpoint: Path | None = None

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Writes the summary with the status "running".

        On a resume, the values of earlier steps are read from the log history.
        """
        if not state.is_world_process_zero:
            return
        self._begin = (time.monotonic(), state.global_step)
        # `train` may be called twice on one trainer.
        self._last, self._steps, self._speeds = {}, {}, {}
        for line in state.log_history if state.global_step else ():
            values = {name: value for name, value in repeatable_metrics(line).items() if name not in ("step", "epoch")}
            self._remember(values, line["step"])
        # The output folder may contain a model of an earlier run, which is not a result of this one.
        self._model_before, self._checkpoint = written_model(args), None
        self._summary = {
            "name": self.name,
            "status": "running",
            "started": round(time.time(), 3),
            "max_steps": state.max_steps,
            "has_perplexity": bool(getattr(_task(args, kwargs), "has_perplexity", False)),
            "model": model_facts(unwrap_model(model)),
            **effective_settings(args, kwargs.get("optimizer"), kwargs.get("lr_scheduler")),
            "versions": versions(),
            "machine": machine(model),
        }
        if (replaced := getattr(args, "deepspeed_replaced", None)) is not None:
            self._summary["deepspeed_replaced"] = {"deepspeed": replaced, "trained_with": f"FSDP2 ({args.fsdp})"}
        self._write(args)
        self._next_report = 0.0
        self._refresh(args)

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Records the last value of each metric, and all values of the speeds."""
        if logs and state.is_world_process_zero:
            self._remember(logs, state.global_step)
            for unit in _UNITS:
                if f"{unit}_per_second" in logs:
                    self._speeds.setdefault(unit, []).append(float(logs[f"{unit}_per_second"]))
            self._refresh(args)

    def _refresh(self, args: Any) -> None:
        """Writes the report of a run that goes on, unless the last one is recent or took too much of the time."""
        begin = time.monotonic()
        if not self.report or begin < self._next_report:
            return
        try:
            write_report(run_folder(args, self.run_dir))
        finally:
            end = time.monotonic()
            self._next_report = end + max(self.refresh_seconds, (end - begin) / _REPORT_SHARE)

    def on_control(self, args: Any, state: Any, control: Any, facts: Mapping[str, Any], **kwargs: Any) -> None:
        """Excludes the time of a pause from the time and the speed of the run."""
        begin, first_step = self._begin
        self._begin = (begin + facts.get("paused_seconds", 0.0), first_step)

    def _remember(self, values: Mapping[str, Any], step: int) -> None:
        self._last |= values
        self._steps |= dict.fromkeys(values, step)

    @report_only
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the path of the checkpoint that was saved last."""
        self._checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"

    @report_only
    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Writes the summary and the report, and prints the main results.

        If an exception ended the run, `error` is that exception.
        """
        if not state.is_world_process_zero:
            return
        begin, first_step = self._begin
        seconds = time.monotonic() - begin
        evaluated = evaluation_titles(self._last)
        self._summary |= {
            "status": status(state, error),
            "error": f"{type(error).__name__}: {error}" if error is not None else None,
            "seconds": round(seconds, 3),
            "step": state.global_step,
            "first_step": first_step,
            "epoch": state.epoch,
            "steps_per_second": (state.global_step - first_step) / seconds if seconds else None,
            **{f"{unit}_per_second": self._speed(unit) for unit in _UNITS},
            "final": self._last,
            "final_steps": {name: step for name, step in self._steps.items() if name in ("loss", *evaluated)},
            "best": {"metric": state.best_metric, "step": state.best_global_step},
        }
        folder = run_folder(args, self.run_dir)
        self._summary["places"] = self._places(args, folder)
        self._write(args)
        if self.report:
            write_report(folder)
        self._print()

    def _speed(self, unit: str) -> float | None:
        if self._speeds.get(unit):
            # The median: a single slow interval, such as the first one with its compilation, does not move it.
            return median(self._speeds[unit])
        return self._last.get(f"train_{unit}_per_second")

    def _places(self, args: Any, folder: Path) -> dict[str, str]:
        """Returns the paths of the results that this run wrote, by kind; results of an earlier run are left out."""
        model = written_model(args)
        found = {
            "model": Path(args.output_dir) if model is not None and model != self._model_before else None,
            "checkpoint": self._checkpoint,
            "metrics": folder / METRICS_FILE,
            "samples": folder / SAMPLES_FILE,
        }
        if found["model"] is not None:
            # The final model is the result; a checkpoint is listed only when the run has not saved a model.
            found.pop("checkpoint")
        places = {name: str(place) for name, place in found.items() if place is not None and place.exists()}
        return places | ({"report": str(folder / REPORT_FILE)} if self.report else {})

    def _write(self, args: Any) -> None:
        folder = run_folder(args, self.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(hidden(as_json(self._summary)), indent=2, ensure_ascii=False) + "\n"
        # In one step: `write_report` may read the file of a running run.
        replace_file(folder / SUMMARY_FILE, text.encode())

    def _print(self) -> None:
        console = self.console or shared_console()
        console.print()
        head, *lines = summary_lines(self._summary)
        status = self._summary["status"]
        shown = Text(head)
        shown.stylize(_STATUS_STYLES.get(status, "bold yellow"), 0, len(f"run {status}"))
        console.print(shown, soft_wrap=True)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def status(state: Any, error: BaseException | None) -> str:
    """Returns the status of a run that has ended: "interrupted", "failed", "finished" or "stopped early".

    Args:
        state: the state of the trainer.
        error: the exception that ended the run, or None if the run ended without an exception.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is not None:
        return "failed"
    return "finished" if state.global_step >= state.max_steps else "stopped early"


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a summary that are printed at the end of a run."""
    lines = [f"run {summary['status']}: {_progress_text(summary)}"]
    final = summary["final"]
    titles = evaluation_titles(final)
    width = max([10, *map(len, titles.values())])
    for name, label in titles.items():
        has_perplexity = summary.get("has_perplexity") and name.endswith("_loss")
        read = format_perplexity(final[name]) if has_perplexity else None
        notes = ([f"perplexity {read}"] if read else []) + ([at] if (at := _logged_at(summary, name)) else [])
        lines.append(f"  {label:<{width}} {final[name]:.4f}" + (f"  ({', '.join(notes)})" if notes else ""))
    if "loss" in final:
        at = _logged_at(summary, "loss")
        lines.append(f"  {'loss':<{width}} {final['loss']:.4f}" + (f"  ({at})" if at else ""))
    model = summary.get("model") or {}
    if model.get("num_trainable", 0) < model.get("num_parameters", 0):
        lines.append(f"  {'trainable':<{width}} {format_share(model['num_trainable'], model['num_parameters'])}")
    return lines + [f"  {name:<{width}} {_relative_path(place)}" for name, place in summary["places"].items() if place]


def _task(args: Any, scene: Mapping[str, Any]) -> Any:
    """Returns the trainer's task object, or None if the trainer has none, as `transformers.Trainer`."""
    return scene.get("task") or getattr(args, "task", None)


def _logged_at(summary: Mapping[str, Any], name: str) -> str:
    """Returns a text with the step at which the last value of a metric was logged, or "" if the step is unknown."""
    step = summary.get("final_steps", {}).get(name)
    return "" if step is None else f"logged at step {step}"


def _relative_path(place: str) -> str:
    """Returns a path below the working folder as a relative path, and any other path unchanged."""
    relative = os.path.relpath(place)
    return place if relative.startswith(os.pardir) else relative


def _progress_text(summary: Mapping[str, Any]) -> str:
    """Returns a text with the number of steps since the run was started or resumed, their time and their speed."""
    step, first_step = summary["step"], summary.get("first_step", 0)
    if step == first_step > 0:
        return f"nothing was trained, the run is at step {step}"
    taken = step - first_step
    which = f"{first_step + 1} to {step}" if taken > 1 else f"number {step}"
    own = f"{taken} step{'' if taken == 1 else 's'}" + (f" ({which})" if first_step else "")
    unit = next((unit for unit in _UNITS if summary.get(f"{unit}_per_second")), _UNITS[0])
    speed = summary.get(f"{unit}_per_second")
    kind = "median " if f"{unit}_per_second" in summary["final"] else ""
    skipped = summary["final"].get("train_skipped_steps")
    left_out = f"; {skipped} step{'' if skipped == 1 else 's'} of the run skipped as bad" if skipped else ""
    speed_told = f" ({kind}{format_count(speed)} {unit}/s)" if speed else ""
    return f"{own} in {format_duration(summary['seconds'])}{speed_told}{left_out}"


def written_model(args: Any) -> tuple[tuple[int, int], ...] | None:
    """Returns a value that changes when a model is written into the output folder; None without a model."""
    found = []
    for name in _MODEL_FILES:
        try:
            facts = (Path(args.output_dir) / name).stat()
        except OSError:
            continue
        # inode and time change with every save, even when the content is equal.
        found.append((facts.st_ino, facts.st_mtime_ns))
    return tuple(found) or None


def model_facts(model: Any) -> dict[str, Any]:
    """Returns the class, number of parameters and configuration of a model.

    For a sharded or pipelined model, these describe the whole model, not the part on this rank.
    """
    if model is None:
        return {}
    model = getattr(model, "stands_for", model)
    config: Any = getattr(model, "config", None)
    return {
        "class": class_name(model),
        "num_parameters": num_parameters(model),
        "num_trainable": num_parameters(model, trainable=True),
        "config": config.to_dict() if hasattr(config, "to_dict") else {},
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the results of a run, by name."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine(model: Any) -> dict[str, Any]:
    """Returns facts about the hardware and the Python interpreter; the device is that of the model."""
    device = next((parameter.device for parameter in model.parameters()), None) if model is not None else None
    facts = {"platform": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count(), "device": str(device)}
    if device is not None and device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts | {"threads": torch.get_num_threads(), "executable": sys.executable}
