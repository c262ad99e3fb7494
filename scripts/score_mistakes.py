"""Scores a tool on the corpus of seeded mistakes in `tests/config/mistakes/`.

    python scripts/score_mistakes.py --command 'fgcli -p {project} check {config} --json'

Seeds each mistake into a copy of the project, runs the command, and compares the findings that it prints as JSON with
those of an ideal tool. The README of the corpus describes the records and the format of findings.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "config" / "mistakes"))

from corpus import Finding, Mistake, read_innocent, read_mistakes  # noqa: E402

COLUMNS = ("mistakes", "found", "line", "code", "exact")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Returns the exit status, which is 1 if a correct edit was reported as a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", required=True, help="command line with {project} and {config}")
    parser.add_argument("--codes", type=Path, help="JSON file: a tool's code to one of the corpus, or several")
    parser.add_argument("--category", help="this category alone")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument("--json", action="store_true", help="one object a mistake, instead of the table")
    options = parser.parse_args(arguments)
    codes = json.loads(options.codes.read_text(encoding="utf-8")) if options.codes else {}
    mistakes = [item for item in [*read_mistakes(), *read_innocent()] if options.category in (None, item.category)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        rows = list(
            pool.map(lambda item: score(item, Path(folder, item.id).resolve(), options.command, codes), mistakes)
        )
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    return int(any(row["category"] == "innocent" and row["found"] for row in rows))


def score(mistake: Mistake, folder: Path, command: str, codes: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Returns which parts of the command's findings about one mistake are correct."""
    mistake.seed(folder)
    started = time.perf_counter()
    findings, trouble = run(command, folder, mistake.config)
    row: dict[str, Any] = {"id": mistake.id, "category": mistake.category, "seconds": time.perf_counter() - started}
    row["said"] = trouble or [f"{found.code} {found.file}:{found.line} {found.message}" for found in findings]
    bad = [found for found in findings if found.severity in ("error", "warning")]
    if mistake.category == "innocent":
        return row | {"found": bool(bad or trouble)}
    places = mistake.places(folder)
    placed = [found for found in findings if (found.file, found.line) in places]
    meant = [found for found in findings if mistake.expect["code"] in _of_the_corpus(found.code, codes)]
    return row | {
        "expected": f"{mistake.expect['code']} {places[0][0]}:{places[0][1]}",
        "found": bool(findings),
        "line": bool(placed),
        "code": bool(meant),
        "exact": any(found in meant for found in placed),
    }


def run(command: str, folder: Path, config: str | None) -> tuple[list[Finding], str]:
    """Runs the command on a project. Returns its findings, and a description of a failure of the command itself."""
    words = [word.format(project=folder, config=config or "") for word in shlex.split(command)]
    done = subprocess.run([word for word in words if word], capture_output=True, text=True, timeout=120)
    try:
        said = json.loads(done.stdout)
        records = said["findings"] if isinstance(said, Mapping) else said
        return [_finding(record, folder) for record in records], ""
    except (ValueError, KeyError, TypeError) as error:
        return [], f"no findings: {error!r}; exit status {done.returncode}; {done.stderr.strip()[-300:]}"


def _finding(record: Mapping[str, Any], folder: Path) -> Finding:
    path = Path(record["file"]) if record.get("file") else None
    if path and path.is_absolute():
        path = path.resolve()
        path = path.relative_to(folder) if path.is_relative_to(folder) else path
    return Finding(
        file=path.as_posix() if path else None,
        line=record.get("line"),
        code=str(record.get("code", "")),
        severity=str(record.get("severity", "error")),
        message=str(record.get("message", "")),
        hint=str(record.get("hint") or ""),
    )


def _of_the_corpus(code: str, codes: Mapping[str, str | list[str]]) -> list[str]:
    meant = codes.get(code, code)
    return [meant] if isinstance(meant, str) else list(meant)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the number of mistakes found, and of those with the right line and the right code, by category."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row)
    innocent = groups.pop("innocent", [])
    groups["all"] = [row for row in rows if row["category"] != "innocent"]
    lines = [f"{'':<14}" + "".join(f"{name:>10}" for name in COLUMNS)]
    for category, group in groups.items():
        counts = [len(group), *(sum(row[name] for row in group) for name in COLUMNS[1:])]
        lines.append(f"{category:<14}" + "".join(f"{count:>10}" for count in counts))
    lines += ["", "not exact:"]
    lines += [f"  {row['id']}: expected {row['expected']}; said {row['said'] or 'nothing'}"[:300]
              for row in groups["all"] if not row["exact"]] or ["  none"]  # fmt: skip
    if innocent:
        wrong = [f"  {row['id']}: {row['said']}"[:300] for row in innocent if row["found"]]
        lines += ["", f"right edits called mistakes: {len(wrong)} of {len(innocent)}", *wrong]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
