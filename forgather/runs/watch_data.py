"""Watched runs as plain data: a snapshot for programs, and for the page what has changed since it asked last.

The input is `WatchedRuns`; the output is strict JSON data, in which numbers that are not finite are texts.
"""

from __future__ import annotations

import math
import os
from typing import Any

from forgather.redaction import hide
from forgather.runs.growing_curve import Bucket, GrowingCurve
from forgather.runs.live_run import LiveRun, RunEvent
from forgather.runs.metrics_file import Best
from forgather.runs.summary import RunSummary, differing
from forgather.runs.watched_runs import WatchedRuns

_MOST_PATHS = 5


def snapshot(watched: WatchedRuns) -> dict[str, Any]:
    """Returns the state of all runs, without curves.

    Args:
        watched: the runs.
    """
    runs = []
    for summary in watched.summaries():
        facts, run = _summary_facts(summary), watched.live.get(summary.folder)
        facts["metrics"] = {name: _strict(value) for name, value in summary.metrics.items()}
        if run is not None:
            facts |= _live_facts(run)
            facts["events"] = [_event_facts(event) for event in run.events]
        runs.append(facts)
    return {"runs": runs}


def changes_since(watched: WatchedRuns, version: int) -> dict[str, Any]:
    """Returns what has changed since a version: all runs, and of each curve the buckets that are new or have grown.

    Args:
        watched: the runs.
        version: the version that the reader has; 0 if it has none.

    Returns:
        "version", and for each of "runs" its facts. "curves" of a run says, by metric, how many of the first points of
        the reader stay ("kept"), and which follow: lists of the last step, the least, the greatest and the last value.
    """
    known = version if version <= watched.version else 0
    runs = []
    for summary in watched.summaries():
        facts, run = _summary_facts(summary), watched.live.get(summary.folder)
        if run is not None:
            facts |= _live_facts(run)
            # A reader that has points of a file that was read again, or of a run that left and came back, drops them.
            facts["restarted"] = run.restarted > known or run.first_version > known
            since = 0 if facts["restarted"] else known
            facts["curves"] = {
                hide(name): _curve_facts(curve, since) for name, curve in run.curves.items() if curve.version > since
            }
            facts["events"] = [_event_facts(event) for event in run.events if event.version > since]
        runs.append(facts)
    ranking = watched.ranking
    return {
        "version": watched.version,
        "metric": None if ranking is None else ranking.metric,
        "title": None if ranking is None else hide(ranking.title),
        "num_trials": 0 if ranking is None else ranking.num_trials,
        "paths": differing(watched.summaries(), _MOST_PATHS),
        "runs": runs,
    }


def _summary_facts(run: RunSummary) -> dict[str, Any]:
    best: Best | None = run.best
    return {
        "folder": hide(run.folder),
        "name": hide(run.name),
        "output": hide(os.path.basename(os.path.dirname(os.path.dirname(run.folder)))),
        "config": run.config,
        "status": None if run.status is None else str(run.status),
        "cause": None if run.cause is None else hide(run.cause),
        "started": run.started,
        "seconds": run.seconds,
        "step": run.step,
        "max_steps": run.max_steps,
        "best": None if best is None else {"metric": best.metric, "value": _strict(best.value), "step": best.step},
        "changes": {name: hide(text) for name, text in run.changes.items()},
        "problems": [hide(problem) for problem in (*run.problems, *run.notes)],
    }


def _live_facts(run: LiveRun) -> dict[str, Any]:
    last = run.summary.metrics
    peak = last.get("memory_peak_bytes", last.get("memory_bytes"))
    return {
        "is_live": run.is_live,
        "last_seen": run.last_seen,
        "seconds_left": run.seconds_left,
        "seconds_per_step": run.seconds_per_step,
        "tokens_per_second": _strict(last.get("tokens_per_second")),
        "memory_bytes": _strict(peak),
        "num_events": run.num_events,
        "num_damaged_lines": run.num_damaged,
    }


def _event_facts(event: RunEvent) -> dict[str, Any]:
    return {"number": event.number, "step": event.step, "kind": hide(event.kind), "text": event.text}


def _curve_facts(curve: GrowingCurve, since: int) -> dict[str, Any]:
    kept, buckets = curve.changes_since(since)
    return {"kept": kept, "points": [_point(bucket) for bucket in buckets]}


def _point(bucket: Bucket) -> list[Any]:
    has_value = math.isfinite(bucket.lowest)
    return [
        bucket.last_step,
        bucket.lowest if has_value else None,
        bucket.highest if has_value else None,
        _strict(bucket.last),
    ]


def _strict(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
