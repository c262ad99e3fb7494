"""Run folders for the tests of comparisons: real records of small projects, and metrics that the test writes."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from forgather.project.project import Project
from forgather.project.run_writer import write_record
from tests.project.workbench import make_project

BASE = """\
args: &args
  learning_rate: {{ rate | default(0.01) }}
  schedule: cosine
  batch: 8
  seed: 42
  output_dir: {{ joinpath(project_dir, 'out') }}
main: !partial:app.py:Trainer
  settings: *args
-- block extra
-- endblock extra
"""
FILES = {
    "app.py": "class Trainer:\n    def __init__(self, settings):\n        self.settings = settings\n",
    "templates/base.yaml": BASE,
    "templates/configs/plain.yaml": "-- extends 'base.yaml'\n",
    "templates/configs/deep.yaml": "-- extends 'base.yaml'\n-- block extra\nmore: {depth: 3}\n-- endblock extra\n",
}
START = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Runs:
    """A project and its run folders.

    Args:
        folder: an empty folder.
        files: the files of the project.
    """

    def __init__(self, folder, files=FILES):
        self.project = Path(make_project(folder / "project", files, meta="name: Bench\n"))
        self.folder = self.project / "out" / "runs"
        self.count = 0

    def add(self, config="plain.yaml", *, overrides=(), lines=(), name=None, summary=None, variables=None):
        """Writes a run folder, and returns its path; `lines` are the lines of its metrics."""
        started = START + timedelta(minutes=self.count)
        self.count += 1
        stem = config.removesuffix(".yaml")
        folder = self.folder / (name or f"{started:%Y%m%dT%H%M%SZ}-{stem}")
        folder.mkdir(parents=True)
        project = Project(config, str(self.project), overrides=list(overrides), **(variables or {}))
        write_record(str(folder), project, command=["fgcli", "train"], started=started)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
        if lines is not None:
            write_lines(folder / "metrics.jsonl", lines)
        return folder


def write_lines(file, lines):
    """Writes records, or texts as they are, as the lines of a file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts))


def falling(steps, *, end, every=1, metric="loss", seed=0, **others):
    """Lines of a metric that falls to `end`, with noise."""
    draw = random.Random(seed)
    return [
        {"step": step, "time": 1e9 + step / 2, metric: end + 3.0 / step**0.5 + draw.random() / 10, **others}
        for step in range(every, steps + 1, every)
    ]
