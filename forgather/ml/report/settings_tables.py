"""The settings of a run as tables of its report.

The input is a `RunFacts`; the output is HTML, in which every text is escaped, and secrets are hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forgather.ml.report.html_text import html_text
from forgather.ml.report.run_data import RunFacts
from forgather.redaction import hidden


def settings_parts(facts: RunFacts) -> list[tuple[str, str]]:
    """Returns the titles and tables of the settings of a run, of its model, versions and machine, and of its config.

    Args:
        facts: the data of the report.
    """
    summary = facts.summary
    model = summary.get("model") or {}
    # `run.json` has them already, and the page would show them twice.
    known = {} if facts.run.get("versions") else summary.get("versions") or {}
    # The changes are already listed at the top of the page.
    run = {name: value for name, value in facts.run.items() if name != "changes"}
    tables = {
        "Training arguments": summary.get("arguments"),
        "Optimizer": summary.get("optimizer"),
        "Learning rate schedule": summary.get("schedule"),
        "Model configuration": model.get("config"),
        "Versions and machine": {**known, **(summary.get("machine") or {})},
        "How it was started": run,
    }
    config = f"<pre>{html_text(facts.config, is_document=True)}</pre>" if facts.config else ""
    return [*((title, value_table(values)) for title, values in tables.items() if values), ("Configuration", config)]


def value_table(values: Mapping[str, Any]) -> str:
    """Returns the HTML of a table of names and values, without the values that are None.

    Args:
        values: the values; names of nested mappings are joined by dots.
    """
    rows = "".join(
        f"<div><span>{html_text(name)}</span><code>{html_text(value_text(hidden(value, name)))}</code></div>"
        for name, value in _flat(values).items()
        if value is not None
    )
    return f'<div class="facts">{rows}</div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one flat dict with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def value_text(value: Any) -> str:
    """Returns a value as text: a text as it is, and everything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
