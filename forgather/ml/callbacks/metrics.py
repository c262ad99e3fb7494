"""Metrics as JSON lines: `metrics.jsonl` with all metrics, and `loss.jsonl` with the reproducible ones."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.ml.callbacks.base import ExportableState, TrainerCallback
from forgather.ml.callbacks.output_target import is_selected_rank, report_only, run_folder
from forgather.ml.metrics import METRICS_FILE, LineWriter, end_of_lines, repeatable_metrics, resume_lines
from forgather.ml.tracking import Logged


class JsonLogger(TrainerCallback, ExportableState):
    """A callback that appends each log to `metrics.jsonl` in the run's folder: `step`, `time` and the logged numbers.

    What happens at a step, such as an anomaly, is a line with `event`. `loss.jsonl` in the same folder gets the lines
    of logs without times, speeds and memory, so that a repeated run writes identical bytes. On a resume, the files are
    cut or filled so that they have exactly the lines up to the step of the checkpoint, even in a new folder.

    Args:
        name: the value of `name` in each line, which distinguishes runs whose files are read together, or None to
            leave `name` out.
        rank_filter: the rank or ranks that write, or None for all ranks. If several ranks write, rank n above 0 writes
            `metrics.rank<n>.jsonl`.
        path: another file for the metrics, or None for `metrics.jsonl`. With another file, `loss.jsonl` is not written.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.
    """

    def __init__(
        self,
        name: str | None = None,
        rank_filter: int | Collection[int] | None = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self.rank_filter = rank_filter
        self.path = path
        self.run_dir = run_dir
        self._writer: LineWriter | None = None
        self._repeatable: LineWriter | None = None
        self._times: list[float] = []
        self._begins: dict[str, int] = {}
        # What happened at steps, and the user's numbers: the number of log lines before each, and its line.
        self._events: list[list[Any]] = []

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Truncates or fills the files of a resumed run, so that they end at the step of the checkpoint."""
        if not is_selected_rank(self.rank_filter, args):
            return
        history = state.log_history
        # Fewer times than lines: the callback was added during the run, so the earliest lines have no time.
        self._times = self._times[-len(history) :] if history else []
        times = [None] * (len(history) - len(self._times)) + self._times
        lines = [(line["step"], {name: value for name, value in line.items() if name != "step"}) for line in history]
        file = self._file(args)
        self._events = self._events if state.global_step else []
        logged = [self._record(step, at, line) for at, (step, line) in zip(times, lines, strict=True)]
        records = {file: _merged(logged, self._events)}
        if self.path is None:
            reproducible = [_reproducible_line(step, line) for step, line in lines]
            records[_loss_file(file)] = [record for record in reproducible if record is not None]
        # A run that starts from the beginning appends to an existing file and leaves earlier lines alone.
        goes_on = state.global_step > 0
        self._begins = {
            str(path): resume_lines(
                path,
                found,
                self._begins.get(str(path)),
                name=self.name if path == file else None,
                step=state.global_step,
            )
            if goes_on
            else end_of_lines(path)
            for path, found in records.items()
        }

    def on_rewind(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Truncates the files to the step of the checkpoint to which the run was rewound."""
        # Not decorated itself, since `on_train_begin` is.
        self.on_train_begin(args, state, control, **kwargs)

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Appends a log as one line to each of the metrics files."""
        if not logs or not is_selected_rank(self.rank_filter, args):
            return
        writer = self._open(args)
        line = _reproducible_line(state.global_step, logs)
        if self._repeatable is not None and line is not None:
            self._repeatable.write(line)
        self._times.append(round(time.time(), 3))
        writer.write(self._record(state.global_step, self._times[-1], logs))

    @report_only
    def on_run_event(
        self, args: Any, state: Any, control: Any, run_event: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Appends something that happened at a step, such as an anomaly, as one line to the metrics file."""
        if run_event:
            facts = {name: value for name, value in run_event.items() if name != "step"}
            self._write_event(args, state, run_event["step"], facts)

    @report_only
    def on_logged(self, args: Any, state: Any, control: Any, logged: Logged, **kwargs: Any) -> None:
        """Appends numbers of the user's code as one line to the metrics file; `loss.jsonl` gets no such line."""
        if logged.kind == "numbers":
            self._write_event(args, state, logged.step, logged.content)

    @report_only
    def on_control(self, args: Any, state: Any, control: Any, facts: dict[str, Any], done: str, **kwargs: Any) -> None:
        """Appends a line with `event: control` for an action of the user; `loss.jsonl` gets no such line."""
        # Readers show the message of an event, of whatever kind it is.
        self._write_event(args, state, state.global_step, {"event": "control", "message": done, **facts})

    def _write_event(self, args: Any, state: Any, step: int, facts: Mapping[str, Any]) -> None:
        if is_selected_rank(self.rank_filter, args):
            line = self._record(step, round(time.time(), 3), dict(facts))
            self._events.append([len(state.log_history), line])
            self._open(args).write(line)

    def _open(self, args: Any) -> LineWriter:
        # Opened at the first line, so that a run that logs nothing leaves no file.
        if self._writer is None:
            self._writer = LineWriter(self._file(args))
            if self.path is None:
                # One warning about an unwritable folder is enough, and the other writer logs it.
                self._repeatable = LineWriter(_loss_file(self._file(args)), warns=False)
        return self._writer

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the metrics files."""
        for writer in (self._writer, self._repeatable):
            if writer is not None:
                writer.close()

    def state(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint: the times of the lines, where they start, and the events."""
        attributes = {"_times": list(self._times), "_begins": dict(self._begins), "_events": list(self._events)}
        return {"args": {}, "attributes": attributes}

    def _record(self, step: int, time: float | None, logs: dict[str, Any]) -> dict[str, Any]:
        record = {"step": step, **({} if time is None else {"time": time}), **logs}
        return record if self.name is None else record | {"name": self.name}

    def _file(self, args: Any) -> Path:
        file = Path(self.path) if self.path is not None else run_folder(args, self.run_dir) / METRICS_FILE
        # With a single writing rank the file keeps its plain name, whichever rank that is.
        several = not isinstance(self.rank_filter, int)
        rank = int(args.process_index) if several else 0
        return file.with_name(f"{file.stem}.rank{rank}{file.suffix}") if rank else file


def _merged(logged: list[dict[str, Any]], events: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the lines of logs and of events in the order in which they were written."""
    lines, taken = [], 0
    for number, line in events:
        lines += [*logged[taken:number], line]
        taken = number
    return lines + logged[taken:]


def _loss_file(file: Path) -> Path:
    return file.with_name(file.name.replace("metrics", "loss"))


def _reproducible_line(step: int, logs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the line for `loss.jsonl`, or None if the log has no reproducible number."""
    numbers = repeatable_metrics(logs)
    return {"step": step, **numbers} if numbers.keys() - {"epoch"} else None
