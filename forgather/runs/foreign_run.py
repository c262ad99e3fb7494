"""A run that another program recorded, and the run folder that is made of it.

The input is what a reader of that program's files found: values of a config and lines of metrics. The output is a run
folder with `run.json`, `graph.yaml`, `metrics.jsonl` and `summary.json`, as `fgcli runs` and `fgcli compare` read them.
Its name follows from the identity of the run, so that a second import finds the first one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from forgather.bounded import MAX_ENTRIES
from forgather.cache_file import digest_of
from forgather.config.yaml.scalar_text import quoted, scalar_text
from forgather.errors import ProjectError
from forgather.project.run_facts import FACTS, FORM, GRAPH
from forgather.redaction import hidden, known_hidden, note
from forgather.replaced_file import replace_file
from forgather.runs.labels import Labels, change_labels
from forgather.runs.run_folders import LABELS, METRICS, SUMMARY

IMPORTED = "imported"
"""The key of `run.json` that marks an imported run, and the tag that it gets."""
_GROUPS = {"train/": "", "eval/": "eval_", "test/": "test_"}
_MARKS = ("{{", "{%", "{#", "##")
"""What has a meaning in a template."""
_RESERVED = frozenset(("step", "time", "name", "event"))
_DEEPEST, _MOST_STEPS = 50, 1 << 53
_LATEST = 253_402_300_799
"""The last second of the year 9999."""


class DamagedFileError(ValueError):
    """Raised if a file of another program cannot be read; the text is a sentence without the name of the file."""


@dataclass(frozen=True, kw_only=True)
class ForeignRun:
    """A run that another program recorded.

    Args:
        tool: the name of the program, as in `fgcli runs import TOOL`.
        identity: a text that no other run of the program has.
        name: the name of the run.
        source: the path of the file or folder that was read.
        project: the name of the project, or None.
        started: the start in seconds since 1970, or None.
        status: the status as in `summary.json`; None if the files do not say how the run ended.
        config: the config, as JSON data.
        lines: the lines of metrics, each with `step` and, if it is known, `time`.
        labels: the group, tags and note.
        left_out: how many logged values are not numbers, or belong to no step.
    """

    tool: str
    identity: str
    name: str
    source: str
    project: str | None = None
    started: float | None = None
    status: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    labels: Labels = field(default_factory=Labels)
    left_out: int = 0

    def __post_init__(self) -> None:
        todo: list[tuple[Any, int]] = [(self.config, 0)]
        while todo:
            value, depth = todo.pop()
            if depth > _DEEPEST:
                raise DamagedFileError(f"its config is nested more than {_DEEPEST} times")
            inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
            todo += [(item, depth + 1) for item in inner]


class Outcome(StrEnum):
    """What an import did with a run folder."""

    NEW = "imported"
    UPDATED = "updated"
    SAME = "already imported"


def found_files(top: str, matches: re.Pattern[str]) -> list[str]:
    """Returns the path itself if it is a file, else the files below it whose names match a pattern, sorted.

    Raises:
        ProjectError: FG580 if there is no such file.
    """
    if os.path.isfile(top):
        return [top]
    if not os.path.isdir(top):
        raise ProjectError(f"{top!r} does not exist", code="FG580", hint="name a file, or a folder that contains some")
    found: list[str] = []
    count = 0
    for here, _, names in os.walk(top):
        count += len(names)
        if count > MAX_ENTRIES:
            raise ProjectError(
                f"{top!r} has more than {MAX_ENTRIES:,} files", code="FG580", hint="name a folder nearer to the runs"
            )
        found += [os.path.join(here, name) for name in names if matches.search(name)]
    if not found:
        raise ProjectError(
            f"no file below {top!r} has a name like {matches.pattern!r}",
            code="FG580",
            hint="name the folder in which the other program wrote its files",
        )
    return sorted(found)


def metric_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of metrics in `metrics.jsonl` by their names in a tracker.

    `train/loss` becomes `loss` and `eval/loss` becomes `eval_loss`, as the callbacks of transformers wrote them. A name
    stays as it is if two would become one.

    Example:
        >>> metric_names(["train/loss", "eval/loss", "lr", "train/lr"])
        {'train/loss': 'loss', 'eval/loss': 'eval_loss', 'lr': 'lr', 'train/lr': 'train/lr'}
    """
    names = list(dict.fromkeys(names))
    wanted = {name: _own_name(name) for name in names}
    taken: dict[str, int] = {}
    for own in wanted.values():
        taken[own] = taken.get(own, 0) + 1
    found: dict[str, str] = {}
    for name, own in wanted.items():
        chosen = own if own not in _RESERVED and (taken[own] == 1 or own == name) else name
        while chosen in _RESERVED or (chosen != own and chosen in taken):
            chosen += "_"
        taken.setdefault(chosen, 1)
        found[name] = chosen
    return found


def _own_name(name: str) -> str:
    for group, prefix in _GROUPS.items():
        if name.startswith(group):
            return f"{prefix}{name.removeprefix(group)}"
    return name


def instant(seconds: float) -> float | None:
    """Returns a time in milliseconds' precision, or None if it is in no year from 1970 to 9999.

    Example:
        >>> [instant(seconds) for seconds in (0.12345, float("nan"), -1.0, 1e300)]
        [0.123, None, None, None]
    """
    return round(seconds, 3) if 0 < seconds <= _LATEST else None


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by their paths.

    Example:
        >>> flattened({"lr": 0.1, "optimizer": {"name": "adamw"}})
        {'lr': 0.1, 'optimizer.name': 'adamw'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def plausible(run: ForeignRun) -> ForeignRun:
    """Returns a run without times and steps that no run has, such as those of a damaged file.

    Args:
        run: the run as its files describe it.
    """
    lines: list[Mapping[str, Any]] = []
    left_out = run.left_out
    for line in run.lines:
        if 0 <= line["step"] < _MOST_STEPS:
            lines.append({name: value for name, value in line.items() if name != "time" or _is_instant(value)})
        else:
            left_out += sum(name not in _RESERVED for name in line)
    started = run.started if _is_instant(run.started) else None
    return replace(run, started=started, lines=lines, left_out=left_out)


def _is_instant(value: float | None) -> bool:
    return value is not None and 0 < value < _LATEST


def write_imported(run: ForeignRun, output_dir: str) -> tuple[str, Outcome]:
    """Writes the run folder of a run that another program recorded, and returns it with what was done.

    A folder that an earlier import of the same run wrote is updated if the run has changed; its labels stay.

    Args:
        run: the run.
        output_dir: the folder in whose subfolder `runs` the run folder is.

    Raises:
        ProjectError: FG582 if the folder cannot be written.
    """
    folder = os.path.join(output_dir, "runs", _folder_name(run))
    files = _files(run, output_dir)
    try:
        earlier = _imported_digest(folder)
        if earlier == json.loads(files[FACTS])[IMPORTED]["digest"]:
            return folder, Outcome.SAME
        os.makedirs(folder, exist_ok=True)
        # The record comes last: an import that was interrupted is repeated.
        for name in (METRICS, SUMMARY, GRAPH, FACTS):
            replace_file(os.path.join(folder, name), files[name].encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ProjectError(
            f"{folder!r} cannot be written: {error.strerror or error}",
            code="FG582",
            hint="make room, or choose another folder with -o",
        ) from error
    if earlier is None and not os.path.exists(os.path.join(folder, LABELS)):
        tags = tuple(sorted({*run.labels.tags, IMPORTED}))
        change_labels(folder, lambda _: Labels(group=run.labels.group, tags=tags, note=run.labels.note))
    return folder, Outcome.NEW if earlier is None else Outcome.UPDATED


def _folder_name(run: ForeignRun) -> str:
    began = datetime.fromtimestamp(run.started or 0.0, UTC)
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.")[:60] or run.tool
    return f"{began:%Y%m%dT%H%M%SZ}-{word}-{digest_of(run.identity.encode('utf-8', 'backslashreplace'))[:8]}"


def _files(run: ForeignRun, output_dir: str) -> dict[str, str]:
    # A secret that is under its name must not appear in any other text either.
    for path, value in flattened(run.config).items():
        note(path, value)
    config = hidden(run.config)
    lines = [known_hidden({name: _strict(value) for name, value in line.items()}) for line in run.lines]
    final: dict[str, Any] = {}
    for line in lines:
        final |= {name: value for name, value in line.items() if name not in _RESERVED}
    step = max((line["step"] for line in lines), default=None)
    times = [line["time"] for line in lines if "time" in line]
    began = run.started or (times[0] if times else None)
    summary = {
        "name": run.name,
        "status": run.status,
        "started": began,
        "step": step,
        "seconds": max(times) - began if times and began is not None and max(times) >= began else None,
        "final": final,
    }
    texts = {
        METRICS: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
        SUMMARY: json.dumps(hidden(summary), indent=1, ensure_ascii=False) + "\n",
        GRAPH: "\n".join(
            ["# The config that the other program recorded.", *(_graph_lines(config) if config else ["{}"]), ""]
        ),
    }
    values = [{"path": path, "value": _text(value), "was": None} for path, value in flattened(config).items()]
    facts = {
        "form": FORM,
        "project": run.project or run.tool,
        "config": run.name,
        "started": None if began is None else datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["fgcli", "runs", "import", run.tool, run.source]),
        "output_dir": os.path.abspath(output_dir),
        "changes": {"parent": None, "values": values},
    }
    told = "".join(texts.values())
    digest = digest_of(told.encode("utf-8", "backslashreplace"))
    facts[IMPORTED] = {"tool": run.tool, "identity": run.identity, "source": run.source, "digest": digest}
    return texts | {FACTS: json.dumps(hidden(facts), indent=2, ensure_ascii=False) + "\n"}


def _strict(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _graph_lines(value: Any, indent: str = "") -> Iterator[str]:
    """Yields the lines of a mapping or a list as YAML that is no template, one entry a line."""
    is_list = not isinstance(value, Mapping)
    for key, item in enumerate(value) if is_list else value.items():
        head = f"{indent}-" if is_list else f"{indent}{_scalar(str(key))}:"
        if isinstance(item, Mapping | list) and item:
            yield head
            yield from _graph_lines(item, f"{indent}  ")
        else:
            yield f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "{}" if isinstance(value, Mapping) else "[]"
    if not isinstance(value, str):
        return scalar_text(value)
    text = value.encode("utf-8", "replace").decode()  # half of a surrogate pair is no character
    if not any(mark in text for mark in _MARKS):
        return scalar_text(text)
    # The file is rendered as a template when it is read.
    return re.sub(r"[{#]", lambda found: f"\\u{ord(found[0]):04x}", quoted(text))


def _imported_digest(folder: str) -> str | None:
    """Returns the digest that an earlier import recorded; None without one."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        with open(os.path.join(folder, FACTS), encoding="utf-8") as stream:
            return str(json.load(stream)[IMPORTED]["digest"])
    return None


def grouped(values: Iterable[tuple[int, float, str, float]]) -> Iterator[dict[str, Any]]:
    """Yields lines of metrics from single values: values of one step that follow one another share a line.

    Args:
        values: step, time, name and value of each.
    """
    line: dict[str, Any] = {}
    for step, at, name, value in values:
        if line and (line["step"] != step or name in line):
            yield line
            line = {}
        line.setdefault("step", step)
        if (time := instant(at)) is not None:
            line.setdefault("time", time)
        line[name] = value
    if line:
        yield line
