"""Tables and text about checkpoints for the terminal, and the same facts as plain data for JSON.

The input is the results of `forgather.ml.checkpoint.inspect`; the output is text or plain data. This module reads no
file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.output import plural
from forgather.cli.palette import Look, indent_of, styled
from forgather.errors import ForgatherError
from forgather.project.path_display import near_path

_LISTED = 12


def survey_text(survey: Any) -> str:
    """Returns a table of the checkpoints in an output folder as text.

    A line below the table names the checkpoint from which a run would resume.
    """
    newest = survey.newest
    metric = next((found.progress.metric[0] for found in survey.checkpoints if found.progress.metric), "metric")
    rows = [("", "step", "run", "written", "size", "loss", metric)]
    for found in survey.checkpoints:
        value = found.progress.metric
        rows.append(
            (
                "!" if found.problem else "*" if found is newest else " ",
                str(found.step),
                found.origin.run[:6] or "-",
                _moment(found.origin.written),
                _size(found.size) if found.size else "-",
                _loss(found),
                " ".join(["-" if value is None else f"{value[1]:.4f}", *_notes(survey, found)]),
            )
        )
    lines = [near_path(str(survey.folder)), *_table(rows, right={1, 4, 5})]
    for found in survey.checkpoints:
        if found.problem:
            lines.append(f"! {found.folder.name}: [{found.problem.code}] {found.problem.message}")
    if any(found.progress.loss_step not in (-1, found.step) for found in survey.checkpoints):
        lines.append("loss is the last one that was logged, (N) at step N")
    if newest is None:
        lines.append("'--resume auto' would take none of them, and end with an error")
    elif newest.is_model_alone:
        parts = ",".join(import_module("forgather.ml.checkpoint.files").RESUME_PARTS)
        lines.append(
            f"* {newest.folder.name} contains the model only: '--resume auto' ends with an error, unless "
            f"--allow-missing {parts} is given, which start from the beginning then"
        )
    else:
        lines.append(f"* '--resume auto' takes {newest.folder.name}, once it has read every byte of it ('ckpt verify')")
    return "\n".join(lines)


def paint(line: str) -> str:
    """Returns a line about checkpoints with colors.

    The line of an incomplete checkpoint is red, and that of the checkpoint from which a run would resume is bold.
    """
    if line.startswith("!"):
        return styled("error", line)
    if line.startswith("*"):
        return styled("good", "*") + styled("strong" if line[1:2] == " " and line[2:3] == " " else "", line[1:])
    head, word, rest = line.rpartition("  intact")
    if word:
        return f"{head}  {styled('good', 'intact')}{rest}"
    return styled("dim", line) if line.startswith("   step ") else line


LOOK = Look(paint, indent_of)


def _loss(found: Any) -> str:
    loss, step = found.progress.loss, found.progress.loss_step
    if loss is None:
        return "-"
    return f"{loss:.4f}" if step in (-1, found.step) else f"{loss:.4f} ({step})"


def _notes(survey: Any, found: Any) -> list[str]:
    """Returns notes on a checkpoint: its rank among the best, and "model only" if it lacks what a resume needs."""
    best = survey.best_steps
    notes = []
    if found.problem is None and found.step in best:
        place = best.index(found.step)
        notes.append("best" if place == 0 else f"best #{place + 1}")
    return [*notes, *(["model only"] if found.is_model_alone else [])]


def surveyed_fact(found: Any) -> dict[str, Any]:
    """Returns one row of the table of checkpoints as plain data."""
    progress = found.progress
    return {
        "folder": str(found.folder),
        "step": found.step,
        "run": found.origin.run,
        "serial": found.origin.serial,
        "written": found.origin.written,
        "bytes": found.size,
        "loss": progress.loss,
        "loss_step": None if progress.loss_step < 0 else progress.loss_step,
        "metric": None if progress.metric is None else {"name": progress.metric[0], "value": progress.metric[1]},
        "is_best": progress.is_best,
        "model_only": found.is_model_alone,
        "problem": None if found.problem is None else fact_of(found.problem),
    }


def fact_of(error: ForgatherError) -> dict[str, Any]:
    """Returns the code, message and hint of an error as plain data."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def prune_text(survey: Any, gone: Sequence[Any], kept: Sequence[Any]) -> str:
    """Returns a list of the checkpoints that are removed and those that are kept, with the reasons, as text.

    Args:
        survey: the checkpoints of an output folder.
        gone: the checkpoints to remove.
        kept: the checkpoints to keep.
    """
    newest = survey.newest
    lines = [near_path(str(survey.folder))]
    for found in survey.checkpoints:
        reasons = [*(["newest"] if found is newest else []), *_notes(survey, found)]
        if found.problem:
            reasons = [f"not complete, not touched: {found.problem.message}"]
        word = "goes" if found in gone else "stays"
        lines.append(f"  {word:<5}  {found.folder.name}  {', '.join(reasons)}".rstrip())
    size = _size(sum(found.size for found in gone))
    lines.append(
        f"{plural(len(gone), 'checkpoint')} of {len(gone) + len(kept)} {'goes' if len(gone) == 1 else 'go'}, {size}"
    )
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    """Returns the rows of a table as lines with aligned columns.

    Args:
        rows: the cells of each row.
        right: the indices of the columns that are aligned to the right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _moment(seconds: float) -> str:
    """Returns a time as local date and time of day, or "-" if the time is unknown (0)."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def _size(num_bytes: int) -> str:
    text: str = import_module("forgather.ml.number_format").format_bytes(num_bytes)
    return text


def contents_text(folder: Path, found: Any) -> str:
    """Returns a description of a checkpoint as text.

    Args:
        folder: the folder of the checkpoint.
        found: the contents of the checkpoint.
    """
    progress, facts = found.progress, found.manifest.facts
    rows = {
        "checkpoint": near_path(str(folder)),
        "step": _step(found),
        "run": f"{found.origin.run or 'unknown'}, written {_moment(found.origin.written)}",
        "size": f"{_size(found.manifest.size)} in {plural(len(found.manifest.files), 'file')}",
        "loss": None if progress.loss is None else f"{progress.loss:.6g}{_of_step(progress, found.manifest.step)}",
        "metric": None if progress.metric is None else f"{progress.metric[0]} {progress.metric[1]:.6g}",
        "versions": _pairs(facts.get("versions")),
        "layout": _pairs(facts.get("layout")),
        "config": facts.get("config"),
        "optimizer": _optimizer(found),
        "schedule": found.classes.get("schedule"),
        "position": _pairs(found.position),
    }
    if not found.settings:
        rows["optimizer"] = "none: the model alone was saved"
    lines = [f"{label:<10}  {value}" for label, value in rows.items() if value]
    for name, tensors in found.tensors.items():
        lines += ["", *_tensors(name, tensors)]
    return "\n".join(lines)


def _of_step(progress: Any, step: int) -> str:
    return "" if progress.loss_step in (-1, step) else f", the last that was logged, at step {progress.loss_step}"


def _step(found: Any) -> str:
    progress = found.progress
    total = f" of {progress.max_steps}" if progress.max_steps else ""
    return f"{found.manifest.step}{total}, epoch {progress.epoch:.4g}"


def _optimizer(found: Any) -> str:
    groups = [
        f"{plural(count, 'weight')} at {_pairs({name: value for name, value in group.items() if value})}"
        for group, count in zip(found.settings, found.num_parameters, strict=True)
    ]
    return f"{found.classes.get('optimizer', 'unknown')}: {'; '.join(groups)}"


def _pairs(values: Any) -> str:
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _tensors(name: str, tensors: Sequence[Any]) -> list[str]:
    numel = sum(tensor.numel for tensor in tensors)
    types = sorted({tensor.dtype for tensor in tensors})
    lines = [f"{name}: {plural(len(tensors), 'tensor')}, {numel:,} values, {', '.join(types)}"]
    rows = [(f"  {it.name}", it.dtype, "x".join(map(str, it.shape)) or "scalar") for it in tensors[:_LISTED]]
    if rows:
        lines += _table(rows, right=set())
    if len(tensors) > _LISTED:
        lines.append(f"  ... and {len(tensors) - _LISTED} more: '--json' lists all")
    return lines


def difference_text(folders: Sequence[Path], found: Sequence[Any]) -> str:
    """Returns a table of the differences between two checkpoints.

    Args:
        folders: the folders of the two checkpoints.
        found: the contents of the two checkpoints, in the same order.
    """
    left, right = (_flat(it) for it in found)
    rows = [
        (name, left.get(name, "-"), right.get(name, "-"))
        for name in [*left, *(name for name in right if name not in left)]
        if left.get(name) != right.get(name)
    ]
    lines = _table([("", *(near_path(str(folder)) for folder in folders)), *rows], right=set())
    same = sum(left[name] == right.get(name) for name in left if name.startswith("file "))
    lines.append(f"{plural(same, 'file')} of the same bytes, {plural(len(rows), 'difference')}")
    return "\n".join(lines)


def _flat(found: Any) -> dict[str, str]:
    config = found.manifest.facts.get("config", "-")
    flat = {"step": str(found.manifest.step), "run": found.origin.run, "config": str(config)}
    for fact in ("versions", "layout"):
        values = found.manifest.facts.get(fact)
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            flat[f"{fact} {name}"] = str(value)
    flat |= {f"argument {name}": f"{value}" for name, value in found.arguments.items() if name != "logging_dir"}
    flat |= {f"position {name}": str(value) for name, value in found.position.items()}
    for number, group in enumerate(found.settings):
        flat |= {f"optimizer {number} {name}": str(value) for name, value in group.items()}
    for tensors in found.tensors.values():
        flat |= {f"tensor {it.name}": f"{it.dtype} {'x'.join(map(str, it.shape))}" for it in tensors}
    flat |= {f"file {name}": fact.digest[:12] for name, fact in found.manifest.files.items()}
    return flat
