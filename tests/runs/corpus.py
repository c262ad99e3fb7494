"""Run folders as runs leave them, by the thousand: records, graphs, metrics and statuses, written without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from forgather.run_status import STATUS_FILE, Status, of_this_process

GRAPH = """\
# What was built, overrides included: a config by itself, without templates. {{% raw %}}
.run_dir: &run_dir !var
  name: run_dir
  default: ~
meta:
  config_name: Tiny
  config_description: "A description: with a colon"
dataset: &dataset !singleton:forgather.ml.data:split@dataset
  folder: ~
  seed: 42
optimizer: &optimizer !partial:torch.optim:{optimizer}@optimizer
  lr: {lr}
  betas:
    - 0.9
    - 0.95
model: &model !singleton:forgather.ml.models:from_config@model
  path: {model}
trainer_args: &trainer_args !singleton:forgather.ml:TrainingArguments@trainer_args
  output_dir: {output_dir}
  learning_rate: {lr}
  max_steps: 1000
  resume_from_checkpoint: {resume}
trainer: &trainer !singleton:forgather.ml:Trainer@trainer
  model: *model
  args: *trainer_args
  optimizer_factory: *optimizer
main: *trainer
# {{% endraw %}}
"""
STARTED = 1_767_225_600.0  # 2026-01-01T00:00:00Z
ARGUMENTS = {f"argument_{number}": number for number in range(60)}


def make_run(
    output_dir: Path,
    number: int = 0,
    *,
    lr: object = 0.001,
    optimizer: str = "AdamW",
    status: Status | None = Status.FINISHED,
    lines: int = 20,
    loss: float = 2.0,
    changes: dict[str, str] | None = None,
    record: dict[str, Any] | None = None,
    model: str = "~",
    resume: str = "~",
    **stated: Any,
) -> Path:
    """Writes a run folder and returns it.

    Args:
        output_dir: the output folder.
        number: the number of the run, which gives its start and its name.
        status: what `status.json` says, or None for a run of an older version, without the file.
        lines: the number of lines of `metrics.jsonl`; every tenth one is an evaluation.
        loss: the last value of `eval_loss`; the best one is a tenth less.
        changes: the values that the command line set, by path.
        record: further facts of `run.json`.
        stated: further fields of `status.json`.
    """
    started = STARTED + 60 * number
    name = f"2026{1 + number // 44640:02}{1 + number // 1440 % 31:02}T{number // 60 % 24:02}{number % 60:02}00Z-tiny"
    folder = output_dir / "runs" / name
    folder.mkdir(parents=True)
    changed = {"optimizer.lr": str(lr)} if changes is None else changes
    facts = {
        "form": 2, "project": "Tiny", "project_dir": str(output_dir.parent), "config": "tiny.yaml",
        "started": "2026-01-01T00:00:00+00:00" if number == 0 else _iso(started), "working_dir": str(output_dir.parent),
        "command": "fgcli train", "hostname": "vm", "output_dir": str(output_dir),
        "versions": {f"package_{index}": "1.2.3" for index in range(10)},
        "files": {f"templates/file_{index}": "0" * 40 for index in range(30)},
        "changes": {"parent": "project.yaml", "values": [
            {"path": path, "value": value, "was": "0.01"} for path, value in changed.items()]},
        **(record or {}),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts, indent=2))
    text = GRAPH.format(lr=lr, optimizer=optimizer, output_dir=output_dir, model=model, resume=resume)
    (folder / "graph.yaml").write_text(text)
    records = [_line(index, lines, started, loss) for index in range(1, lines + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    is_over = status in (Status.FINISHED, None)
    summary = {
        "status": "finished" if is_over else "running", "started": started, "max_steps": 10 * lines,
        "arguments": ARGUMENTS, "error": None,
        **({"seconds": 90.5, "step": 10 * lines, "tokens_per_second": 1000.0 + number,
            "final": {"eval_loss": loss, "loss": loss + 0.1}} if is_over else {}),
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    if status is not None:
        found = of_this_process(started)
        stated = {"updated": started + 100, "step": 10 * lines, "max_steps": 10 * lines, **stated}
        found = dataclasses.replace(found, status=status, **stated)
        (folder / STATUS_FILE).write_text(json.dumps({"form": 1, **dataclasses.asdict(found)}, indent=1))
    return folder


def _line(index: int, lines: int, started: float, loss: float) -> dict[str, Any]:
    at = {"step": 10 * index, "time": started + index}
    if index % 10 == 0:
        best = index == lines // 20 * 10
        return {**at, "eval_loss": loss * 0.9 if best else loss, "eval_runtime": 1.0, "epoch": index / lines}
    return {
        **at, "loss": loss + 10 / index, "grad_norm": 1.25, "learning_rate": 1e-3, "tokens_per_second": 1000.0,
        "steps_per_second": 0.64, "memory_bytes": 837722112, "epoch": index / lines,
    }  # fmt: skip


def _iso(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
