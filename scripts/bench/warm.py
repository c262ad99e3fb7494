"""Measures a warm process: render and load of a 300-line config, and the same job in Hydra if that is installed.

Both sides describe 200 values and 20 objects. The config of Forgather inherits through three templates. The results are
medians of CPU times of alternating runs.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from forgather.config.environment import ConfigEnvironment  # noqa: E402
from forgather.config.load import load  # noqa: E402
from forgather.config.materialize import materialize  # noqa: E402
from forgather.config.render import render  # noqa: E402

OBJECTS, VALUES_EACH, REPEATS = 20, 10, 41


def write_config(folder: Path) -> str:
    """Writes a base, a project and a leaf template of about 300 lines together, and returns the leaf's name."""
    base = ["## base"]
    for i in range(OBJECTS):
        base += [f"object_{i}: &object_{i} !singleton:types:SimpleNamespace@object_{i}", f"-- block object_{i}"]
        base += [
            f"    value_{j}: {{{{ {i} * {j} }}}}" if j == 0 else f"    value_{j}: {i + j / 10}"
            for j in range(VALUES_EACH)
        ]
        base += [f"-- endblock object_{i}"]
    base += ["main: !singleton:types:SimpleNamespace"] + [f"    object_{i}: *object_{i}" for i in range(OBJECTS)]
    project = ["-- extends 'base.yaml'"]
    leaf = ["-- extends 'project.yaml'"]
    for i in range(OBJECTS):
        target = project if i % 2 else leaf
        target += ["", f"[object_{i}]", "    == super()", f"    value_{i % VALUES_EACH}: 1e-3"]
    for name, lines in {"base.yaml": base, "project.yaml": project, "leaf.yaml": leaf}.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return "leaf.yaml"


def write_hydra(folder: Path) -> None:
    """Writes the same 200 values and 20 objects as Hydra config groups with overrides by composition."""
    lines = ["defaults:", "  - base", "  - project", "  - _self_"]
    base, project = [], []
    for i in range(OBJECTS):
        base += [f"object_{i}:", "  _target_: types.SimpleNamespace"]
        base += [f"  value_{j}: {i + j / 10}" for j in range(VALUES_EACH)]
        target = project if i % 2 else lines
        target += [f"object_{i}:", f"  value_{i % VALUES_EACH}: 1e-3"]
    for name, text in {"base.yaml": base, "project.yaml": project, "leaf.yaml": lines}.items():
        (folder / name).write_text("\n".join(text) + "\n")


def timed(job) -> float:
    """Returns the CPU seconds of one call."""
    gc.collect()
    start = time.process_time()
    job()
    return time.process_time() - start


def main() -> None:
    """Prints the figures as JSON."""
    ours, hydras = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    name = write_config(ours)
    write_hydra(hydras)
    environment = ConfigEnvironment(searchpath=(str(ours),))

    def graph():
        return load(render(environment, name))

    def objects():
        return materialize(graph(), targets=["main"], variables={}, project_dir=str(ours))

    hydra_job = hydra(hydras)
    for _ in range(3):
        objects()
        hydra_job and hydra_job()
    graphs, built, theirs = [], [], []
    for _ in range(REPEATS):
        graphs.append(timed(graph))
        built.append(timed(objects))
        if hydra_job:
            theirs.append(timed(hydra_job))
    median = statistics.median
    lines = render(environment, name).text.count("\n")
    rows = [
        {
            "what": f"render + load + graph, {lines} rendered lines, warm",
            "value": round(median(graphs) * 1e3, 2),
            "reach": 15,
            "unit": "ms CPU",
            "reached": median(graphs) < 0.015,
        }
    ]
    if theirs:
        ratio = median(theirs) / median(built)
        hydra_ms, our_ms = median(theirs) * 1e3, median(built) * 1e3
        rows.append(
            {
                "what": f"Hydra compose + instantiate ({hydra_ms:.1f} ms) / ours with objects ({our_ms:.1f} ms)",
                "value": round(ratio, 2),
                "reach": 3,
                "unit": "x (at least)",
                "reached": ratio >= 3,
            }
        )
    print(json.dumps(rows, indent=2))


def hydra(folder: Path):
    """Returns the same job in Hydra, or None if Hydra is not installed."""
    try:
        from hydra import compose, initialize_config_dir
        from hydra.utils import instantiate
    except ImportError:
        print("hydra-core is not installed: the comparison is left out", file=sys.stderr)
        return None

    def job():
        with initialize_config_dir(str(folder), version_base="1.3"):
            return instantiate(compose("leaf"))

    return job


if __name__ == "__main__":
    main()
