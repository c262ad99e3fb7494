"""The facts of many runs, which are kept in the user's cache folder and read again only where a file has changed.

The input is the run folders below a folder; the output is their facts, and single values of their graphs. The cache is
derived and disposable: an entry counts only as long as the time, size and inode of every file are the same.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from forgather.cache_file import code_fingerprint, digest_of, read_cached, write_cached
from forgather.project.locations import cache_dir
from forgather.project.run_facts import GRAPH
from forgather.run_status import Status
from forgather.runs.config_values import ConfigText, Value
from forgather.runs.metrics_file import read_content
from forgather.runs.run_folders import FoundRun
from forgather.runs.summary import read_facts

_FORM = 1
_NUM_SHARDS = 8
"""The number of cache files of one folder, so that a change of one run rewrites a part of them."""
_CODE = os.path.dirname(os.path.abspath(__file__))
_MAX_GRAPH_BYTES = 10_000_000


class FactStore:
    """The facts of the runs below a folder.

    Args:
        top: the absolute folder.
        runs: the run folders in it.
        now: the current time in seconds since 1970.
    """

    def __init__(self, top: str, runs: Sequence[FoundRun], now: float) -> None:
        self._top = top
        self._folder = cache_dir("runs")
        self._runs = {run.folder: run for run in runs}
        self._entries: dict[str, dict[str, Any]] = {}
        self._changed: set[int] = set()
        self._graphs: dict[str, ConfigText] = {}
        kept = self._kept()
        for run in runs:
            files = {name: list(state) for name, state in run.files.items()}
            entry = kept.get(run.folder)
            if entry is None or entry["files"] != files:
                facts = read_facts(run)
                facts["seen"] = sighting_of(facts, None if entry is None else entry["facts"], now)
                entry = {"files": files, "facts": facts, "values": {}}
                self._changed.add(_shard(run.folder))
            self._entries[run.folder] = entry
        self._changed |= {_shard(folder) for folder in kept.keys() - self._runs.keys()}

    def facts(self, folder: str) -> Mapping[str, Any]:
        """Returns the facts of a run, as `read_facts` does."""
        facts: Mapping[str, Any] = self._entries[folder]["facts"]
        return facts

    def value(self, folder: str, path: str) -> tuple[Value] | None:
        """Returns the value at a path in the graph of a run, in a tuple of one; None if there is no such value."""
        values = self._entries[folder]["values"]
        if path not in values:
            found = self.graph(folder).get(path)
            values[path] = None if found is None else list(found)
            self._changed.add(_shard(folder))
        kept = values[path]
        return None if kept is None else (kept[0],)

    def has_graph(self, folder: str) -> bool:
        """Returns whether a run has recorded its graph."""
        return GRAPH in self._runs[folder].files

    def graph(self, folder: str) -> ConfigText:
        """Returns the text of the graph of a run; an empty one if there is none."""
        if folder not in self._graphs:
            self._graphs[folder] = ConfigText(self._graph_text(folder))
        return self._graphs[folder]

    def _graph_text(self, folder: str) -> str:
        state = self._runs[folder].files.get(GRAPH)
        if state is None or state[1] > _MAX_GRAPH_BYTES:
            return ""
        try:
            return read_content(os.path.join(folder, GRAPH)).decode("utf-8", "replace")
        except OSError:
            return ""

    def save(self) -> None:
        """Writes what has changed into the cache, if there is a cache folder."""
        for shard in self._changed if self._folder is not None else ():
            entries = {folder: entry for folder, entry in self._entries.items() if _shard(folder) == shard}
            write_cached(self._file(shard), _FORM, {"top": self._top, "runs": entries})
        self._changed.clear()

    def _kept(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for shard in range(_NUM_SHARDS) if self._folder is not None else ():
            cached = read_cached(self._file(shard), _FORM)
            if cached is not None and cached["top"] == self._top:
                found |= cached["runs"]
        return found

    def _file(self, shard: int) -> str:
        key = "\0".join((code_fingerprint(_CODE, os.path.dirname(_CODE)), self._top, str(shard)))
        return os.path.join(self._folder or "", digest_of(os.fsencode(key)) + ".json")


def sighting_of(facts: Mapping[str, Any], before: Mapping[str, Any] | None, now: float) -> list[Any] | None:
    """Returns the arguments of a `Sighting` of the heartbeat; None for a run that says how it ended.

    Args:
        facts: the facts of a run, as `read_facts` returns them.
        before: the facts of the same run at an earlier time, with the sighting under "seen", or None.
        now: the current time in seconds since 1970.
    """
    status, earlier = facts["status"], None if before is None else before["status"]
    if status is None or not Status(status["status"]).is_live:
        return None
    if before is None or earlier is None or earlier["started"] != status["started"]:
        return [now, False]
    # Another file may have changed, and the heartbeat may be the same.
    return [now, True] if status["beat"] > earlier["beat"] else before["seen"] or [now, False]


def _shard(folder: str) -> int:
    return zlib.crc32(os.fsencode(folder)) % _NUM_SHARDS
