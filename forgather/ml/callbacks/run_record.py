"""The record that `fgcli` writes into the folder of a run, as trackers get it.

The input is the folder of a run; the output is a `RunRecord` without secrets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather.redaction import hidden, hide


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the folder of a run says about its config.

    Args:
        facts: the name of the config, of its project and of the run, the commit, and the values that the config or the
            command line changed, with the line that set each.
        texts: the rendered config and the origin of each value, by the name of the file.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def read_record(folder: Path) -> RunRecord:
    """Returns the record of a run without secrets; an empty one if the run was not started by `fgcli`.

    Args:
        folder: the folder of the run.
    """
    texts: dict[str, str] = {}
    for name in ("config.yaml", "origins.txt"):
        with suppress(OSError):
            texts[name] = hide((folder / name).read_text(encoding="utf-8"), is_document=True)
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return RunRecord({}, texts)
    places = dict(_origins(texts.get("origins.txt", "")))
    changes = {value["path"]: value["value"] for value in run.get("changes", {}).get("values", ())}
    facts = {
        "config": run.get("config"),
        "project": run.get("project"),
        "run": folder.name,
        "commit": (run.get("git") or {}).get("commit"),
        "changes": changes,
        "origins": {path: places[path] for path in changes if path in places},
    }
    return RunRecord(hidden(facts), texts)


def _origins(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        value, _, place = line.rpartition("  # ")
        yield value.partition(" = ")[0], place
