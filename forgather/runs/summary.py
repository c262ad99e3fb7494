"""`RunSummary`: what a table shows of one run, from the files of its folder.

The input is a `FoundRun`; the output is plain facts, which are cached, and a `RunSummary`, which is what they mean now:
a run that said "running" may have been killed since. A file that is damaged or of a newer version costs only what it
would have said, and gives one sentence.
"""

from __future__ import annotations

import calendar
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forgather.project.run_facts import FACTS, FORM
from forgather.run_status import STATUS_FILE, RunStatus, Sighting, Status, parse_status
from forgather.runs.labels import Labels, parse_labels
from forgather.runs.metric_records import number_of, numbers_of
from forgather.runs.metrics_file import Best, best_value, last_values, read_content
from forgather.runs.run_folders import LABELS, METRICS, SUMMARY, FoundRun

_MAX_BYTES = 50_000_000
_MOST_STEPS = 2**53
_LATEST = 1e11
"""Units: seconds since 1970. A later time is damage."""
_ENDED = {
    "finished": Status.FINISHED,
    "stopped early": Status.FINISHED,
    "failed": Status.FAILED,
    "interrupted": Status.INTERRUPTED,
}
"""The words of `summary.json`, for a run without a heartbeat."""
LOSSES = ("eval_loss", "loss")
"""The metrics by which runs are compared that name no other one, the first one that is logged."""
_OF_ONE_RUN = ("output_dir", "logging_dir", "log_dir", "run_dir", "run_name", "config_name", "config_description")
# Whether a run goes on after an earlier attempt; the folder of a checkpoint is a value like any other.
_RESUME, _OF_ATTEMPTS = "resume_from_checkpoint", (None, "auto", "never", "~", "null")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run.

    Args:
        folder: the absolute run folder.
        status: what the run does, or how it ended; None if no file says it.
        cause: the cause of a failure, or None.
        config: the name of the config, or None for a run without a record.
        project: the name of the project, or None.
        output_dir: the recorded output folder, or None.
        project_dir: the recorded folder of the project, or None.
        working_dir: the recorded working folder, or None.
        command: the command line that started the run, or None.
        started: the time of the start in seconds since 1970, or None.
        step: the last step, or None.
        max_steps: the number of steps, or None.
        seconds: the duration of the run in seconds, or None.
        tokens_per_second: the speed, or None.
        metrics: the last value of each metric.
        best: the best value of the metric by which models of this run are compared, or None.
        changes: the texts of the values that the config or the command line sets, by path.
        labels: the group, tags and note of the user.
        rerun_of: the folder of the run that this one repeats, or None.
        problems: a sentence for each file that could not be read completely.
        notes: a sentence for each fact that is doubtful, such as a clock that went back.
    """

    folder: str
    status: Status | None
    cause: str | None = None
    config: str | None = None
    project: str | None = None
    output_dir: str | None = None
    project_dir: str | None = None
    working_dir: str | None = None
    command: str | None = None
    started: float | None = None
    step: int | None = None
    max_steps: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Best | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)
    rerun_of: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return os.path.basename(self.folder)


def read_facts(run: FoundRun) -> dict[str, Any]:
    """Returns the facts of a run as plain data, from which `summary_of` makes a `RunSummary`.

    Args:
        run: the run folder and the states of its files.
    """
    facts: dict[str, Any] = {"problems": []}

    def read(name: str, parse: Callable[[bytes], Any], empty: Any) -> Any:
        if name not in run.files:
            return empty
        try:
            return parse(_content(run, name))
        except (OSError, ValueError) as error:
            facts["problems"].append(f"{name}: {getattr(error, 'strerror', None) or error}")
            return empty

    record = read(FACTS, _parsed_object, {})
    facts |= _record_facts(record)
    if type(record.get("form")) is int and record["form"] > FORM:
        facts["problems"].append(f"{FACTS}: it has form {record['form']}, and this version reads form {FORM}")
    status = read(STATUS_FILE, parse_status, None)
    # Not `asdict`, which copies each value and takes a tenth of the time of a first listing.
    facts["status"] = None if status is None else dict(vars(status))
    summary = read(SUMMARY, _parsed_object, {})
    facts["ending"] = _ending_facts(summary)
    facts["requested"] = _requested_metric(summary)
    facts["labels"] = dict(vars(read(LABELS, parse_labels, Labels())))

    def metric_facts(content: bytes) -> dict[str, Any]:
        return _metric_facts(content, summary, facts["problems"])

    facts |= read(METRICS, metric_facts, {"metrics": {}, "best": None})
    return facts


def _content(run: FoundRun, name: str) -> bytes:
    if name == METRICS:
        # The best value of a larger file would take seconds; the last values are at its end.
        return read_content(os.path.join(run.folder, name), _MAX_BYTES)
    if run.files[name][1] > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
    return read_content(os.path.join(run.folder, name))


def _parsed_object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - about the content of a file
    return found


def differing(runs: Sequence[RunSummary], most: int | None = None) -> list[str]:
    """Returns the paths of the values that the configs or command lines of runs set, and that differ between them.

    Args:
        runs: the runs.
        most: the largest number of paths, or None for all.
    """
    names = dict.fromkeys(name for run in runs for name in run.changes)
    return [name for name in names if tells_apart(name, [run.changes.get(name) for run in runs])][:most]


def tells_apart(path: str, texts: Iterable[str | None]) -> bool:
    """Returns whether the values of a path say how runs differ: each run has its own folder, and an attempt of its own.

    Args:
        path: a path in the config.
        texts: the value of each run as text, or None.
    """
    name = path.rpartition(".")[2]
    if name in _OF_ONE_RUN:
        return False
    known = set(_OF_ATTEMPTS) if name == _RESUME else set()
    found: set[str | None] = set()
    for text in texts:
        found.add(text)
        # A value may have to be read from a file: the first two that differ are enough.
        if len(found) > 1 and not found <= known:
            return True
    return False


def _record_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("config", "project", "output_dir", "project_dir", "working_dir", "command", "rerun_of")
    facts: dict[str, Any] = {name: value for name in names if isinstance(value := record.get(name), str)}
    try:
        facts["started"] = datetime.fromisoformat(record["started"]).timestamp()
    except (LookupError, ValueError, TypeError, OverflowError):
        facts["started"] = None
    changes = record.get("changes")
    values = changes.get("values") if isinstance(changes, dict) else None
    facts["changes"] = {
        item["path"]: item["value"]
        for item in (values if isinstance(values, list) else ())
        if isinstance(item, dict) and isinstance(item.get("path"), str) and isinstance(item.get("value"), str)
    }
    return facts


def _ending_facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: summary.get(name) for name in ("status", "error")}
    facts = {name: value if isinstance(value, str) else None for name, value in facts.items()}
    for name in ("step", "max_steps"):
        facts[name] = value if type(value := summary.get(name)) is int and 0 < value < _MOST_STEPS else None
    for name in ("seconds", "tokens_per_second", "started"):
        number = number_of(summary.get(name))
        facts[name] = number if number is not None and math.isfinite(number) else None
    final = summary.get("final")
    facts["final"] = numbers_of(final) if isinstance(final, dict) else {}
    return facts


def _metric_facts(content: bytes, summary: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    last = last_values(content)
    is_whole = len(content) < _MAX_BYTES
    if last.damaged is not None:
        problems.append(f"{METRICS}: {f'line {last.damaged}' if is_whole else 'a line near the end'} is damaged")
    known = [*last.metrics, *(summary["final"] if isinstance(summary.get("final"), dict) else ())]
    chosen = _compared_metric(summary, known)
    best = None
    if chosen is not None and is_whole:
        best = best_value(content, chosen[0], is_greater_better=chosen[1])
    return {"metrics": last.metrics, "last_step": last.step, "best": None if best is None else list(best)}


def _compared_metric(summary: Mapping[str, Any], known: list[str]) -> tuple[str, bool] | None:
    """Returns the metric by which the models of a run are compared, and whether greater values are better."""
    return _requested_metric(summary) or next(((loss, False) for loss in LOSSES if loss in known), None)


def _requested_metric(summary: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Returns the metric that a run was told to choose its best model by, and whether greater values are better."""
    arguments = summary.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    name, greater = arguments.get("metric_for_best_model"), arguments.get("greater_is_better")
    if not isinstance(name, str):
        return None
    name = name if name.startswith("eval_") else f"eval_{name}"
    return name, greater if isinstance(greater, bool) else not name.endswith("loss")


def summary_of(folder: str, facts: Mapping[str, Any], now: float) -> RunSummary:
    """Returns what the facts of a run mean now.

    Args:
        folder: the absolute run folder.
        facts: the result of `read_facts`.
        now: the current time in seconds since 1970.
    """
    ending = facts["ending"]
    stored = facts["status"]
    seen = Sighting(*facts["seen"]) if facts.get("seen") else None
    status = (
        None if stored is None else RunStatus(**{**stored, "status": Status(stored["status"])}).concluded(now, seen)
    )
    state = status.status if status is not None else _ENDED.get(ending["status"])
    is_over = state is not None and not state.is_live and state is not Status.KILLED
    stated = (facts["started"], ending["started"] if status is None else status.started)
    started = next((at for at in stated if at is not None and 0 < at < _LATEST), None) or _named_time(folder)
    seconds, notes = _duration(status, ending, started, now, is_over=is_over)
    cause = (status.cause or {}).get("message") if status is not None else ending["error"]
    last = None if status is None else status.step
    steps: list[int] = [step for step in (last, ending["step"], facts.get("last_step")) if step is not None]
    metrics = {**ending["final"], **facts["metrics"]}
    return RunSummary(
        folder=folder,
        status=state,
        cause=cause,
        config=facts.get("config"),
        project=facts.get("project"),
        output_dir=facts.get("output_dir"),
        project_dir=facts.get("project_dir"),
        working_dir=facts.get("working_dir"),
        command=facts.get("command"),
        started=started,
        step=ending["step"] if is_over and ending["step"] else max(steps, default=None),
        max_steps=(status.max_steps if status is not None else None) or ending["max_steps"],
        seconds=seconds,
        tokens_per_second=ending["tokens_per_second"] or metrics.get("tokens_per_second"),
        metrics=metrics,
        best=None if facts["best"] is None else Best(*facts["best"]),
        changes=facts["changes"],
        labels=Labels(**{**facts["labels"], "tags": tuple(facts["labels"]["tags"])}),
        rerun_of=facts.get("rerun_of"),
        problems=tuple(facts["problems"]),
        notes=notes,
    )


def _duration(
    status: RunStatus | None, ending: Mapping[str, Any], started: float | None, now: float, *, is_over: bool
) -> tuple[float | None, tuple[str, ...]]:
    """Returns the duration of a run, and a note if the clock makes it unknown."""
    if is_over and ending["seconds"] is not None:
        return ending["seconds"], ()  # by a clock that does not jump
    if status is None:
        return ending["seconds"], ()
    seconds = (now if status.status.is_live else status.updated) - (status.started or started or 0.0)
    if seconds < 0:
        return None, ("the clock went back during the run: its duration is not known",)
    return seconds, ()


def _named_time(folder: str) -> float | None:
    """Returns the time in the name of a run folder, or None if it names none."""
    try:
        return float(calendar.timegm(time.strptime(os.path.basename(folder)[:16], "%Y%m%dT%H%M%SZ")))
    except (ValueError, OverflowError):
        return None
