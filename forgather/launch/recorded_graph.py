"""Builds parts of the graph that a past run has recorded: for an evaluation, an export, or generation.

Takes a `PastRun`; gives the config that builds its graph, and the context in which its nodes are built. The run's
folders are not written to: the graph names a temporary output folder, which nothing creates.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from forgather.project.project import Project
from forgather.project.rerun import rerun_meta, rerun_project, unchanged_record
from forgather.project.run_reader import PastRun

USUAL_SEED = 42
"""The seed of a run that names none: the default of transformers and of our trainers."""


def unused_output_dir() -> str:
    """Returns the path of an output folder of this process, which does not exist."""
    return os.path.join(tempfile.gettempdir(), f"forgather-{os.getpid()}")


def recorded_project(run: PastRun, changes: Sequence[tuple[str, str]] = ()) -> Project:
    """Returns the config that builds the recorded graph. Constructs nothing and writes nothing.

    Args:
        run: the run.
        changes: further changes of the graph, as pairs of graph path and YAML text.

    Raises:
        ForgatherError: if the record cannot be read.
    """
    return rerun_project(run, rerun_meta(run), unused_output_dir(), changes)


@contextmanager
def building(run: PastRun, project: Project) -> Iterator[None]:
    """Context manager in which nodes of a recorded graph are built: errors get a place in it.

    The weights that a model begins with are replaced by those that the run has trained, so transformers does not report
    that some of them are new.

    Args:
        run: the run.
        project: the config that `recorded_project` returned.
    """
    quiet = import_module("forgather.ml.library_progress").without_load_reports
    with unchanged_record(run, project.meta), project.located(), quiet():
        yield
