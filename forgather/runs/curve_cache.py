"""The curves of run folders. What was read of a file is kept in the cache, which can be deleted at any time.

The input is run folders; the output is their `Curves`. Nothing is written into a run folder.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from forgather.cache_file import digest_of, read_cached, write_cached
from forgather.project.locations import cache_dir
from forgather.runs.curve import MAX_BUCKETS, Curve
from forgather.runs.curves import Curves
from forgather.runs.growing_file import Position
from forgather.runs.metric_records import Event

METRICS_FILE = "metrics.jsonl"
_FORM = 2


def read_all(run_dirs: Sequence[str], *, is_full: bool = False) -> Iterator[tuple[str, Curves | OSError]]:
    """Yields each folder of a run with its curves, or with the error if its file cannot be read.

    Files are read by several threads, while the caller works on the first runs.

    Args:
        run_dirs: the folders of the runs.
        is_full: whether every point is kept.
    """
    with ThreadPoolExecutor(_num_processors()) as pool:
        yield from zip(run_dirs, pool.map(partial(_curves_or_error, is_full=is_full), run_dirs), strict=True)


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _curves_or_error(run_dir: str, *, is_full: bool) -> Curves | OSError:
    try:
        return read_curves(run_dir, is_full=is_full)
    except OSError as error:
        return error


def read_curves(run_dir: str, *, is_full: bool = False) -> Curves:
    """Returns the curves of the run in a folder; those of a file without changes come from the user's cache.

    Args:
        run_dir: the folder of the run.
        is_full: whether every point is kept; the cache is not used.

    Raises:
        OSError: if the metrics file exists and cannot be read.
    """
    file = os.path.join(os.path.realpath(run_dir), METRICS_FILE)
    folder = None if is_full else cache_dir("curves")
    entry = os.path.join(folder, f"{digest_of(os.fsencode(file))}.json") if folder else None
    kept = read_cached(entry, _FORM) if entry else None
    curves = _restored(kept) if kept else Curves(None if is_full else MAX_BUCKETS)
    before = list(curves.position.state)
    with suppress(FileNotFoundError):
        curves.read(file)
    if entry and before != curves.position.state:
        write_cached(entry, _FORM, _facts(curves))
    return curves


def _facts(curves: Curves) -> dict[str, Any]:
    return {
        **vars(curves),
        "position": vars(curves.position),
        "events": [vars(event) for event in curves.events],
        "curves": {name: _packed(curve.reduced(curves.buckets)) for name, curve in curves.curves.items()},
    }


def _packed(curve: Curve) -> dict[str, Any]:
    """Returns a curve with its arrays as text, which is read ten times faster than numbers."""
    return {
        name: [value.dtype.str, b64encode(value.tobytes()).decode()] if isinstance(value, np.ndarray) else value
        for name, value in vars(curve).items()
    }


def _restored(facts: dict[str, Any]) -> Curves:
    curves = {}
    for name, kept in facts["curves"].items():
        curve = curves[name] = Curve(**kept)
        for key in ("steps", "values", "starts", "sums", "counts"):
            kind, text = kept[key]
            setattr(curve, key, np.frombuffer(b64decode(text), kind))
        curve.last = (curve.last[0], curve.last[1]) if curve.last else None
        curve.gaps = [(step, text) for step, text in curve.gaps]
    parts = {
        "curves": curves,
        "position": Position(**facts["position"]),
        "events": [Event(**event) for event in facts["events"]],
        "pauses": [(step, seconds) for step, seconds in facts["pauses"]],
        "tokens": [(step, total) for step, total in facts["tokens"]],
    }
    return Curves(**{**facts, **parts})
