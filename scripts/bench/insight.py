"""Measures `check`, `code`, `blame`, `graph` and `diff` on the demo: CPU time, memory, heavy modules.

Each figure is the median of several new processes. Bytecode is cached, as on a user's machine; "cold" means that the
caches of Forgather are empty.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from cold import DEMO, FGCLI, ROOT, heavy_modules, row, run, surroundings

PROJECTS = ["-p", str(ROOT / "projects")]
PEAK = (
    "import sys\nfrom forgather.cli.main import main\n"
    "try:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
    "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)"
)


def empty(cache: str) -> None:
    """Removes all cached facts."""
    shutil.rmtree(cache, ignore_errors=True)
    os.makedirs(cache)


def peak_megabytes(arguments: list[str], cache: str) -> float:
    """Returns the peak memory of a command."""
    command = [sys.executable, "-c", PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings(cache), check=True)
    return int(done.stderr.split("VmHWM:")[1].split()[0]) / 1024


def checks(repeats: int, cache: str) -> list[dict]:
    """Returns the rows about `fgcli check`."""
    one, everything = [*FGCLI, *DEMO, "check"], [*FGCLI, *PROJECTS, "check", "--all"]
    cold, warm, whole, whole_warm = [], [], [], []
    run(one, cache)
    for _ in range(repeats):
        empty(cache)
        cold.append(run(one, cache)[0])
        warm.append(run(one, cache)[0])
        empty(cache)
        whole.append(run(everything, cache)[1])
        whole_warm.append(run(everything, cache)[1])
    empty(cache)
    peak = peak_megabytes([*DEMO, "check"], cache)
    heavy = heavy_modules([*PROJECTS, "check", "--all"], cache)
    median = statistics.median
    return [
        row("fgcli check of the demo, empty caches", median(cold) * 1e3, 350, "ms CPU"),
        row("fgcli check of the demo, full caches", median(warm) * 1e3, 150, "ms CPU"),
        row("fgcli check of the demo, empty caches: peak memory", peak, 60, "MB"),
        row("fgcli check --all over projects/, empty caches", median(whole), 2, "s wall"),
        row("fgcli check --all over projects/, full caches", median(whole_warm), 2, "s wall"),
        row("heavy modules after check --all: " + (", ".join(heavy) or "none"), len(heavy), 0, "modules"),
    ]


def codes(repeats: int, cache: str) -> list[dict]:
    """Returns the rows about `fgcli code`."""
    plain, proven = [*FGCLI, *DEMO, "code"], [*FGCLI, *DEMO, "code", "--verify"]
    cold, warm, verified = [], [], []
    run(plain, cache)
    for _ in range(repeats):
        empty(cache)
        cold.append(run(plain, cache)[0])
        warm.append(run(plain, cache)[0])
        verified.append(run(proven, cache)[0])
    median = statistics.median
    return [
        row("fgcli code of the demo, empty caches", median(cold) * 1e3, 400, "ms CPU"),
        row("fgcli code of the demo, full caches", median(warm) * 1e3, 400, "ms CPU"),
        row("fgcli code --verify of the demo, full caches", median(verified) * 1e3, 400, "ms CPU"),
    ]


def milliseconds(job: Callable[[], object], repeats: int) -> float:
    """Returns the median CPU time of a call in this process after three warm-up calls."""
    times = []
    for _ in range(repeats + 3):
        gc.collect()
        start = time.process_time()
        job()
        times.append(time.process_time() - start)
    return statistics.median(times[3:]) * 1e3


def blames(repeats: int) -> list[dict]:
    """Returns the rows about blame."""
    sys.path.insert(0, str(ROOT))
    from forgather import Project
    from forgather.config.insight.blame import blame
    from forgather.config.insight.line_annotations import annotate

    def demo() -> Project:
        return Project("fast.yaml", DEMO[1])

    project = demo()
    rendered, graph = project.rendered, project.graph
    count = sum(1 for _ in blame(graph))
    alone = milliseconds(lambda: list(blame(graph)), 5 * repeats)
    with_files = milliseconds(lambda: list(blame(demo().graph)), 5 * repeats)
    lines = milliseconds(lambda: annotate(rendered, graph), 5 * repeats)
    return [
        row(f"blame of every value of the demo ({count} paths), warm", alone, 10, "ms CPU"),
        row("the same, rendered and loaded from its files each time", with_files, 10, "ms CPU"),
        row("annotations of every line of the demo, warm", lines, 10, "ms CPU"),
    ]


def pages(repeats: int, cache: str) -> list[dict]:
    """Returns the rows about the page of the demo."""
    file = os.path.join(cache, "page.html")
    command = [*FGCLI, *DEMO, "graph", "-o", file]
    cold, warm = [], []
    for _ in range(repeats):
        empty(cache)
        cold.append(run(command, cache)[0])
        warm.append(run(command, cache)[0])
    return [
        row("fgcli graph --format html of the demo, empty caches", statistics.median(cold) * 1e3, 400, "ms CPU"),
        row("fgcli graph --format html of the demo, full caches", statistics.median(warm) * 1e3, 400, "ms CPU"),
        row("size of the page", os.path.getsize(file) / 1e3, 300, "kB"),
    ]


def diffs(repeats: int, cache: str) -> list[dict]:
    """Returns the rows about `fgcli diff`, whose exit status is 1 because the configs differ."""
    fgcli = [sys.executable, "-c", "from forgather.cli.main import main; main()", *DEMO, "diff"]
    configs, revisions = [*fgcli, "tiny", "fast"], [*fgcli, "tiny@HEAD", "tiny"]
    cold, warm, git = [], [], []
    for _ in range(repeats):
        empty(cache)
        cold.append(run(configs, cache)[0])
        warm.append(run(configs, cache)[0])
        git.append(run(revisions, cache)[0])
    median = statistics.median
    return [
        row("fgcli diff tiny fast in the demo, empty caches", median(cold) * 1e3, 400, "ms CPU"),
        row("fgcli diff tiny fast in the demo, full caches", median(warm) * 1e3, 400, "ms CPU"),
        row("fgcli diff tiny@HEAD tiny in the demo, git included", median(git) * 1e3, 400, "ms CPU"),
    ]


def measure(repeats: int) -> list[dict]:
    """Returns one record for each row of the table."""
    cache = tempfile.mkdtemp()
    try:
        rows = [*blames(repeats), *checks(repeats, cache), *pages(repeats, cache)]
        return [*rows, *diffs(repeats, cache), *codes(repeats, cache)]
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))
