"""The curves of run folders. What was read of a file is kept in the cache, which can be deleted at any time.

The input is run folders; the output is their `Curves`. Nothing is written into a run folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any

from forgather.cache_file import digest_of, read_cached, write_cached
from forgather.project.locations import cache_dir
from forgather.runs.curve import MAX_BUCKETS, Curve
from forgather.runs.curves import Curves
from forgather.runs.metric_lines import Event, Lines

METRICS_FILE = "metrics.jsonl"
_FORM = 1
_BYTES_OF_ONE_PROCESS = 20_000_000


def read_all(run_dirs: Sequence[str], *, is_full: bool = False) -> Iterator[tuple[str, Curves | OSError]]:
    """Yields each folder of a run with its curves, or with the error if its file cannot be read.

    Long files that are not in the cache are read by several processes, while the caller works on the first runs.

    Args:
        run_dirs: the folders of the runs.
        is_full: whether every point is kept.
    """
    read = partial(_curves_or_error, is_full=is_full)
    workers = min(num_processors(), len(run_dirs))
    if workers < 2 or new_bytes(run_dirs, is_full=is_full) < _BYTES_OF_ONE_PROCESS:
        yield from zip(run_dirs, map(read, run_dirs), strict=True)
        return
    # A process that was forked has imported everything; elsewhere than on Linux, a fork is not safe.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from zip(run_dirs, pool.map(read, run_dirs), strict=True)


def new_bytes(run_dirs: Sequence[str], *, is_full: bool = False) -> int:
    """Returns how many bytes of metrics were not read before, as far as the cache knows.

    Units:
        bytes.
    """
    total = 0
    for run_dir in run_dirs:
        file = _metrics_file(run_dir)
        entry = None if is_full else _entry(file)
        with suppress(OSError):
            total += 0 if entry and os.path.exists(entry) else os.stat(file).st_size
    return total


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _curves_or_error(run_dir: str, *, is_full: bool) -> Curves | OSError:
    try:
        return read_curves(run_dir, is_full=is_full)
    except OSError as error:
        return error


def _metrics_file(run_dir: str) -> str:
    return os.path.join(os.path.realpath(run_dir), METRICS_FILE)


def _entry(file: str) -> str | None:
    folder = cache_dir("curves")
    return os.path.join(folder, f"{digest_of(os.fsencode(file))}.json") if folder else None


def read_curves(run_dir: str, *, is_full: bool = False) -> Curves:
    """Returns the curves of the run in a folder; those of a file without changes come from the user's cache.

    Args:
        run_dir: the folder of the run.
        is_full: whether every point is kept; the cache is not used.

    Raises:
        OSError: if the metrics file exists and cannot be read.
    """
    file = _metrics_file(run_dir)
    entry = None if is_full else _entry(file)
    kept = read_cached(entry, _FORM) if entry else None
    curves = _restored(kept) if kept else Curves(None if is_full else MAX_BUCKETS)
    before = curves.lines.offset, curves.lines.modified
    with suppress(FileNotFoundError):
        curves.read(file)
    if entry and before != (curves.lines.offset, curves.lines.modified):
        write_cached(entry, _FORM, _facts(curves))
    return curves


def _facts(curves: Curves) -> dict[str, Any]:
    return {
        **vars(curves),
        "lines": vars(curves.lines),
        "events": [vars(event) for event in curves.events],
        "curves": {name: vars(curve) for name, curve in curves.curves.items()},
    }


def _restored(facts: dict[str, Any]) -> Curves:
    curves = {}
    for name, kept in facts["curves"].items():
        curve = Curve(**kept)
        curve.last = (curve.last[0], curve.last[1]) if curve.last else None
        curve.sums = [(start, total, count) for start, total, count in curve.sums]
        curve.gaps = [(step, text) for step, text in curve.gaps]
        curves[name] = curve
    before, total = facts["tokens"]
    parts = {"curves": curves, "lines": Lines(**facts["lines"]), "tokens": (before, total)}
    return Curves(**{**facts, **parts, "events": [Event(**event) for event in facts["events"]]})
