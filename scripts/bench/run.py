"""Runs all benchmarks one after the other. Prints a table, and writes the figures as JSON with `-o`.

Example: python scripts/bench/run.py -o bench.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = (
    "cold",
    "warm",
    "insight",
    "step_overhead",
    "python_per_step",
    "first_step",
    "launch",
    "parallel_step",
    "pipeline_idle",
)
LONG = ("plan_times",)
"""Parts of many minutes, which run where they are named."""


def main() -> int:
    """Runs the selected benchmarks. Returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all of these); {', '.join(LONG)}"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the figures there as JSON")
    options = parser.parse_args()
    unknown = set(options.parts) - {*PARTS, *LONG}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join([*PARTS, *LONG])}")
    rows, failed = [], False
    for part in options.parts or PARTS:
        print(f"... {part}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, HERE / f"{part}.py"], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed = True
            continue
        rows += [{"part": part, **row} for row in json.loads(done.stdout)]
    print(table(rows))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")
    return int(failed)


def table(rows: list[dict]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| what | measured | reach | unit | |", "|---|---|---|---|---|"]
    for row in rows:
        reach = "" if row["reach"] is None else row["reach"]
        mark = "" if row["reach"] is None else ("reached" if row["reached"] else "NOT reached")
        lines.append(f"| {row['what']} | {row['value']} | {reach} | {row['unit']} | {mark} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
