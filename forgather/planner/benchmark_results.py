"""The results of a benchmark: a file that is written after each cell, and the rows of its table.

Takes a benchmark as `forgather.planner.benchmark` writes it; keeps one row for each cell: planned and measured figures,
or the reason why the cell was not measured.

Units:
    seconds; GB is 10^9 bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from forgather.errors import PlanError
from forgather.json_text import JsonFault, parse_json
from forgather.planner import benchmark
from forgather.source import Span

FORMAT = "forgather-benchmark-results-1"
_COUNTS = ("gpu_count", "per_gpu_batch_size", "gradient_accumulation_steps", "global_batch_size", "sequence_length")
_MAKE = "'fgcli benchmark --model NAME --output FILE' writes one"


class Status(StrEnum):
    """What became of a cell: `REFUSED` was never started, `FAILED` ended with an error."""

    MEASURED = "measured"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one cell.

    Args:
        cell: the cell of the benchmark.
        status: what became of it.
        use_cpu: True if it was measured on the CPU, whatever hardware it was planned for.
        reason: why it has no figures; "" if it has.
        measured: `step_seconds` (the median), `all_step_seconds`, `tokens_per_second`, `peak_gb` (tensors of the rank
            with most), `device` and `versions`; empty if it was not measured.
    """

    cell: Mapping[str, Any]
    status: Status
    use_cpu: bool = False
    reason: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def planned(self) -> dict[str, float]:
        """The same figures by formula, and without the overhead that no tensor has; empty if nothing fits."""
        config = self.cell.get("config")
        if config is None:
            return {}
        seconds = config["estimated_step_seconds"]
        memory = config["estimated_memory"]
        tokens = config["global_batch_size"] * config["sequence_length"]
        peak = memory["per_gpu_gb"] - memory["overhead_gb"]
        return {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gb": peak}

    def as_data(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return {**asdict(self), "status": str(self.status), "planned": self.planned}


def read_benchmark(file: str) -> dict[str, Any]:
    """Returns the benchmark in a file.

    Args:
        file: the path of the file.

    Raises:
        PlanError: FG998 if the file cannot be read, or is no benchmark.
    """
    found = _read(file, f"the benchmark {file!r} cannot be read", _MAKE)
    if not isinstance(found, dict) or found.get("format") != benchmark.FORMAT:
        raise PlanError(f"{file!r} is no benchmark of the form {benchmark.FORMAT!r}", code="FG998", hint=_MAKE)
    wrong = next(_faults(found.get("cells")), None)
    if wrong is not None:
        raise PlanError(f"{file!r}: {wrong}", code="FG998", hint=_MAKE)
    return found


def _faults(cells: Any) -> Iterator[str]:
    if not isinstance(cells, list):
        yield "'cells' is no list"
        return
    for number, cell in enumerate(cells):
        if not isinstance(cell, Mapping) or not isinstance(cell.get("name"), str):
            yield f"cell {number} has no name"
        elif isinstance(config := cell.get("config"), Mapping):
            yield from (f"cell {cell['name']!r}: {fault}" for fault in _config_faults(config))
        elif not isinstance(cell.get("reason"), str):
            yield f"cell {cell['name']!r} has neither a 'config' nor a 'reason'"
    names = [cell["name"] for cell in cells]
    yield from (f"two cells are called {name!r}" for name in names if names.count(name) > 1)


def _config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        if not isinstance(config.get(name), int) or isinstance(config[name], bool) or config[name] < 1:
            yield f"{name} is {config.get(name)!r}: it is a whole number from 1"
    if config.get("distributed_strategy") not in benchmark.STRATEGIES:
        yield f"distributed_strategy is {config.get('distributed_strategy')!r}: known are {benchmark.STRATEGIES}"
    memory = config.get("estimated_memory")
    sizes = ("per_gpu_gb", "overhead_gb", "host_gb")
    if not isinstance(memory, Mapping) or any(not isinstance(memory.get(size), int | float) for size in sizes):
        yield f"estimated_memory does not have the numbers {', '.join(sizes)}"
    seconds = config.get("estimated_step_seconds")
    if not isinstance(seconds, int | float) or not seconds > 0:
        yield f"estimated_step_seconds is {seconds!r}: it is a number above 0"
    for name in ("model_name", "device"):
        if not isinstance(config.get(name), str):
            yield f"{name} is {config.get(name)!r}: it is a name"


def results_file(file: str) -> str:
    """Returns the path of the results of a benchmark.

    Example:
        >>> results_file("bert_benchmark.json")
        'bert_benchmark.results.json'
    """
    stem, ending = os.path.splitext(file)
    return f"{stem}.results{ending or '.json'}"


def measured_rows(file: str) -> list[Row]:
    """Returns the rows of a results file that were measured; none if there is no such file.

    Args:
        file: the path of the results.

    Raises:
        PlanError: FG998 if the file has another form.
    """
    if not os.path.exists(file):
        return []
    why, hint = f"the results {file!r} cannot be read", "move the file away: then all cells are measured"
    found = _read(file, why, hint)
    try:
        if found["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        rows = [{name: value for name, value in row.items() if name != "planned"} for row in found["rows"]]
        return [Row(**{**row, "status": Status(row["status"])}) for row in rows if row["status"] == Status.MEASURED]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{why}: {error}", code="FG998", span=Span(file, 1), hint=hint) from error


def _read(file: str, why: str, hint: str) -> Any:
    try:
        with open(file, encoding="utf-8") as stream:
            return parse_json(stream.read()).value
    except JsonFault as error:
        raise PlanError(f"{why}: it is {error}", code="FG998", span=Span(file, error.line), hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise PlanError(f"{why}: {reason}", code="FG998", hint=hint) from error


def write_rows(file: str, model: str, rows: Sequence[Row]) -> None:
    """Writes rows as a results file, which is complete at any time.

    Args:
        file: the path of the results.
        model: the name of the model.
        rows: the rows.
    """
    aside = f"{file}.{os.getpid()}"
    with open(aside, "w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, "model": model, "rows": [row.as_data() for row in rows]}, stream, indent=2)
    os.replace(aside, file)
