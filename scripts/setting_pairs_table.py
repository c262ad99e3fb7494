"""Writes the table of `docs/setting_pairs.md` from `forgather/ml/setting_pairs.json`.

Replaces the text between the marks `<!-- pairs -->` and `<!-- end of pairs -->` of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "setting_pairs.md"
PAIRS = ROOT / "forgather" / "ml" / "setting_pairs.json"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->\n"


def table(pairs: Mapping[str, Any]) -> str:
    """Returns the table, with the reasons and the tests below it."""
    notes: dict[str, int] = {}

    def cell(verdict: Mapping[str, str]) -> str:
        ((kind, what),) = verdict.items()
        if kind == "refused":
            return f"refused ([{what}](errors/{what}.md))"
        note = f"`{what}`" if kind == "equal" else what
        return f"{kind} ({notes.setdefault(note, len(notes) + 1)})"

    worlds = pairs["worlds"]
    lines = ["| setting | " + " | ".join(worlds.values()) + " |", "|" + "---|" * (len(worlds) + 1)]
    for setting, verdicts in pairs["settings"].items():
        lines.append(f"| `{setting}` | " + " | ".join(cell(verdicts[world]) for world in worlds) + " |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())]) + "\n"


def page_with(text: str, written: str) -> str:
    """Returns a page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    made = table(json.loads(PAIRS.read_text(encoding="utf-8")))
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
