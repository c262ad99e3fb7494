"""What differs between runs: values of the configs, code, versions, data and hardware.

The input is the runs; the output is a `Differing` for each thing that is not the same in all runs. The graphs are
compared with that of the first run by `project.comparison`, so a value that is equal in all runs makes no difference
even if other templates wrote it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.bounded import MAX_CODE_BYTES, read_text
from forgather.config.graph import Scalar
from forgather.config.insight.change import Change, Difference, Side
from forgather.config.insight.path_lookup import steps_along
from forgather.config.path import GraphPath, Key, format_path
from forgather.project.comparison import compare
from forgather.project.fault_tolerance import RESUME
from forgather.project.origin_labels import cause_of
from forgather.runs.compared_run import ComparedRun

_OF_THE_RUN = frozenset({"output_dir", "logging_dir", "log_dir", "run_dir", "run_name", "run_id", "cache_dir"})
"""The names of settings that say where a run writes, or what it is called, and change no number."""
_NOT_BUILT = (Key("meta"), Key("dynamic_args"))
_MOST_LINES = 400


@dataclass(frozen=True)
class Value:
    """A value of one run.

    Args:
        text: the value as text.
        place: the line that set it, such as `templates/project.yaml:12`; "" if it is not from a file.
        number: the value as a number; None if it is not a number.
        key: a text that is equal for equal values alone; `text` may be shortened.
    """

    text: str
    place: str = ""
    number: float | None = None
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Differing:
    """A thing that is not the same in all runs.

    Args:
        kind: "config", "code", "version", "data" or "hardware".
        name: the path in the graph, or the name of the file, package or fact.
        values: for each run its value, or None if the run has none.
        is_seed: whether it is a seed of random numbers.
        is_label: whether it only says where the run writes, or what it is called.
        also: further paths of the same value.
    """

    kind: str
    name: str
    values: tuple[Value | None, ...]
    is_seed: bool = False
    is_label: bool = False
    also: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str | None, ...]:
        """For each run, a text that is equal for equal values alone."""
        return tuple((value.key or value.text) if value is not None else None for value in self.values)

    @property
    def short_name(self) -> str:
        """The last name of the path."""
        return self.name.rsplit(".", 1)[-1]


def config_differences(runs: Sequence[ComparedRun]) -> list[Differing]:
    """Returns the values of the configs that differ, in the order of the graphs; seeds and names are last."""
    found = [{_path_of(item): item for item in _compared(runs[0], run)} for run in runs]
    paths = list(dict.fromkeys(path for differences in found for path in differences))
    # Seeds explain little, and names nothing.
    ordered = sorted(paths, key=lambda path: (path[:1] in _LAST, _is_seed(path)))
    return [_differing(path, found, runs) for path in ordered]


_LAST = tuple((step,) for step in _NOT_BUILT)


def _compared(old: ComparedRun, new: ComparedRun) -> Iterator[Difference]:
    if old is not new:
        # Changed Python files are differences of code.
        yield from (item for item in compare(old.side, new.side) if item.change is not Change.CODE)


def is_only_seeds(old: ComparedRun, new: ComparedRun) -> bool:
    """Returns whether the configs of two runs differ in seeds alone, apart from where the runs write."""
    paths = map(_path_of, _compared(old, new))
    return all(_is_seed(path) or _is_label(path) or _is_of_attempts(path, (old, new)) for path in paths)


def _path_of(item: Difference) -> GraphPath:
    return item.path


def _is_seed(path: GraphPath) -> bool:
    return isinstance(path[-1], Key) and str(path[-1].name).endswith("seed")


def _is_label(path: GraphPath) -> bool:
    return path[:1] in _LAST or (isinstance(path[-1], Key) and path[-1].name in _OF_THE_RUN)


def _is_of_attempts(path: GraphPath, runs: Sequence[ComparedRun]) -> bool:
    """Returns whether a value only says that a run went on after an earlier attempt of its own."""
    return path[-1:] == (Key(RESUME),) and all(run.earlier for run in runs if run.resumes)


def _differing(path: GraphPath, found: Sequence[dict[GraphPath, Difference]], runs: Sequence[ComparedRun]) -> Differing:
    known = [differences.get(path) for differences in found]
    first = next(item for item in known if item is not None)
    of_first = _value(first, first.old, first.new, runs[0])
    values: list[Value | None] = []
    for item, differences, run in zip(known, found, runs, strict=True):
        if item is not None:
            values.append(_value(item, item.new, item.old, run))
        else:
            # Without a difference, the value is that of the first run, or its container has no such value.
            is_there = not differences or len(steps_along(run.side.graph, path)) == len(path)
            values.append(of_first if is_there else None)
    return Differing(
        kind="config",
        name=format_path(path),
        values=tuple(values),
        is_seed=_is_seed(path),
        is_label=_is_label(path) or _is_of_attempts(path, runs),
        also=tuple(format_path(other) for other in first.also),
    )


def _value(item: Difference, side: Side, other: Side, run: ComparedRun) -> Value | None:
    """Returns one side of a difference as a value of a run; None if the run has no such value."""
    site = cause_of(side.origin, other.origin)
    place = run.labels.site(site) if site is not None else ""
    is_old = side is item.old
    if item.change in (Change.SHARED, Change.APART):
        is_one = (item.change is Change.SHARED) is not is_old
        partner = format_path(item.partner or ())
        return Value(f"one object with {partner}" if is_one else "an object of its own", place)
    if item.change is (Change.ADDED if is_old else Change.REMOVED):
        return None
    if isinstance(side.node, Scalar):
        value = side.node.value
        return Value(side.text, place, _number(value), key=f"{type(value).__name__} {value!r}")
    text = f"order {side.text}" if item.change is Change.ORDER else side.text
    return Value(text, place)


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None  # an integer of hundreds of digits, such as a seed, has no place on an axis


def fact_differences(runs: Sequence[ComparedRun]) -> list[Differing]:
    """Returns the differences of code, versions, data and hardware."""
    return [*_code(runs), *_versions(runs), *_data(runs), *_hardware(runs)]


def _rows(
    kind: str, names: Sequence[str], value: Callable[[ComparedRun, str], Any], runs: Sequence[ComparedRun]
) -> Iterator[Differing]:
    for name in names:
        found = [value(run, name) for run in runs]
        values = tuple(
            None if item is None else item if isinstance(item, Value) else Value(str(item)) for item in found
        )
        row = Differing(kind=kind, name=name, values=values)
        if len(set(row.keys)) > 1:
            yield row


def _names(tables: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _code(runs: Sequence[ComparedRun]) -> Iterator[Differing]:
    """Yields the copied files that differ; a template that a run did not use is a difference of its config."""
    names = [name for name in _names([run.run.table("files") for run in runs]) if name.startswith("templates/")]
    for row in _rows("code", names, _file, runs):
        if None not in row.values or row.name.endswith(".py"):
            shown = next(run for run, value in zip(runs, row.values, strict=True) if value is not None)
            place = shown.run.place(os.path.join(shown.run.folder, *row.name.split("/")))
            yield Differing(kind="code", name=place, values=_versioned(row.values))


def _file(run: ComparedRun, name: str) -> Value | None:
    # The digest of the original: two copies in which secrets were hidden can be equal where the files were not.
    digest = run.run.table("redacted").get(name) or run.run.table("files").get(name)
    return None if digest is None else Value(os.path.join(run.run.folder, *name.split("/")), key=str(digest))


def _versioned(values: Sequence[Value | None]) -> tuple[Value | None, ...]:
    """Returns the values with names A, B, ... for the contents of a file; the place is the path of the copy."""
    seen = list(dict.fromkeys(value.key for value in values if value is not None))
    return tuple(
        None if value is None else Value(f"version {seen.index(value.key) + 1}", value.text, key=value.key)
        for value in values
    )


def file_changes(row: Differing) -> list[tuple[str, list[str]]]:
    """Returns how the contents of a file differ from the first one, as lines of a unified diff without head.

    Args:
        row: a difference of code.
    """
    copies = {value.text: value.place for value in row.values if value is not None}
    (_, first), *others = copies.items()
    before = _lines(first)
    found = []
    for version, copy in others:
        lines = list(difflib.unified_diff(before, _lines(copy), lineterm="", n=2))[2:]
        cut = [f"... and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
        found.append((version, lines[:_MOST_LINES] + cut))
    return found


def _lines(copy: str) -> list[str]:
    try:
        return read_text(copy, MAX_CODE_BYTES).split("\n")
    except (OSError, ValueError):
        return ["(the copy in the run folder cannot be read)"]


def _versions(runs: Sequence[ComparedRun]) -> Iterator[Differing]:
    names = _names([run.run.table("versions") for run in runs])
    yield from _rows("version", names, lambda run, name: run.run.table("versions").get(name), runs)


def _data(runs: Sequence[ComparedRun]) -> Iterator[Differing]:
    tables = [{item["named"]: _data_value(item["files"]) for item in run.run.listed("data")} for run in runs]
    by_run = {id(run): table for run, table in zip(runs, tables, strict=True)}
    yield from _rows("data", _names(tables), lambda run, name: by_run[id(run)].get(name), runs)


def _data_value(files: dict[str, dict[str, Any]]) -> Value:
    """Returns files as a value. Two values are equal if the contents, or else the sizes and times, are."""
    facts = [
        [os.path.basename(file), fact["digest"] or [fact["size"], fact["mtime_ns"]]]
        for file, fact in sorted(files.items())
    ]
    key = hashlib.blake2b(json.dumps(facts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    size = sum(fact["size"] or 0 for fact in files.values())
    return Value(f"{len(files)} file{'' if len(files) == 1 else 's'}, {size:,} bytes, content {key[:8]}", key=key)


def _hardware(runs: Sequence[ComparedRun]) -> Iterator[Differing]:
    tables = [_hardware_facts(run) for run in runs]
    by_run = {id(run): table for run, table in zip(runs, tables, strict=True)}
    yield from _rows("hardware", _names(tables), lambda run, name: by_run[id(run)].get(name), runs)


def _hardware_facts(run: ComparedRun) -> dict[str, Any]:
    machine, processors = run.table("machine"), run.run.table("processors")
    return {
        "machine": run.run.facts.get("hostname"),
        "platform": run.run.facts.get("platform"),
        "device": machine.get("device"),
        "processes": run.run.processes,
        "processors": processors.get("count"),
        "threads": machine.get("threads"),
        **{name: value for name, value in processors.items() if name != "count"},
    }
