"""Measures cold processes: `fgcli pp`, `--help` and `ls` of the demo, as CPU-time ratios and wall times.

Each figure is the median over alternating runs, so that other load on the machine affects both sides of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASELINE = [sys.executable, "-c", "import jinja2, ruamel.yaml"]
FGCLI = [sys.executable, "-c", "import sys; from forgather.cli.main import main; sys.exit(main())"]
DEMO = ["-p", str(ROOT / "projects" / "tiny_llama")]
HEAVY = ("torch", "numpy", "transformers")


def surroundings(cache: str) -> dict[str, str]:
    """Returns the environment of every measured process, in which bytecode is cached as on a user's machine."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}


def run(command: list[str], cache: str) -> tuple[float, float]:
    """Runs a command; returns its CPU seconds and wall seconds."""
    environment = surroundings(cache)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def heavy_modules(arguments: list[str], cache: str) -> list[str]:
    """Returns the heavy modules that are in `sys.modules` after a command."""
    code = (
        "import sys\nfrom forgather.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    environment = surroundings(cache)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stderr.splitlines()[-1].replace("'", '"'))


def measure(repeats: int) -> list[dict]:
    """Returns one record for each row of the table."""
    cache = tempfile.mkdtemp()
    pp, ls, help_ = [*FGCLI, *DEMO, "pp"], [*FGCLI, *DEMO, "ls"], [*FGCLI, "--help"]
    base, first, second, help_wall, ls_wall = [], [], [], [], []
    for command in (BASELINE, pp, ls, help_):
        run(command, cache)
    for _ in range(repeats):
        base.append(run(BASELINE, cache)[0])
        shutil.rmtree(cache, ignore_errors=True)
        os.makedirs(cache)
        first.append(run(pp, cache)[0])
        second.append(run(pp, cache)[0])
        help_wall.append(run(help_, cache)[1])
        run(ls, cache)
        ls_wall.append(run(ls, cache)[1])
    median = statistics.median
    heavy = sorted({*heavy_modules(["--help"], cache), *heavy_modules([*DEMO, "ls"], cache)})
    shutil.rmtree(cache, ignore_errors=True)
    return [
        row("fgcli pp, first time / import jinja2, ruamel.yaml", median(first) / median(base), 2.3, "x CPU"),
        row("fgcli pp, with the template cache / the same", median(second) / median(base), 1.7, "x CPU"),
        row("fgcli --help", median(help_wall) * 1e3, 150, "ms wall"),
        row("fgcli ls, second time", median(ls_wall) * 1e3, 200, "ms wall"),
        row("heavy modules after --help and ls: " + (", ".join(heavy) or "none"), len(heavy), 0, "modules"),
    ]


def row(what: str, value: float, reach: float, unit: str) -> dict:
    """Returns one line of the table."""
    return {"what": what, "value": round(value, 3), "reach": reach, "unit": unit, "reached": value <= reach}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))
