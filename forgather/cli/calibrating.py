"""`fgcli plan --calibrate`: learns from finished runs how much of its peak rates a device reaches."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.output import print_findings, print_note, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.errors import PlanError
from forgather.launch.calibration import calibration_of, measured_run
from forgather.launch.in_process import MAIN, plan_run
from forgather.launch.recorded_graph import recorded_project
from forgather.project.path_display import near_path
from forgather.project.run_reader import open_run

USUAL_FILE = "calibrated.json"
_OF_A_PLAN = (
    *("gpus", "device_type", "tokens", "days", "price", "memory", "free", "grid", "longest", "overrides"),
    *("find", "by", "global_batch", "write", "write_as"),
)


def calibrate(invocation: Invocation) -> int:
    """Calibrates a device from the runs of `--calibrate`, and writes its hardware file; returns the exit status.

    Args:
        invocation: the command line.

    Raises:
        PlanError: FG983 if an option is given that only plans of a config have; FG996 if a run cannot be learned from.
        ProjectError: FG437 or FG438 if a folder is not that of a run, or if its record is damaged.
    """
    options = invocation.options
    given = {name: getattr(options, name) for name in _OF_A_PLAN}
    other = next((name for name, value in given.items() if value is not None and value is not False), None)
    if other is not None:
        raise PlanError(
            f"--{'set' if other == 'overrides' else other.replace('_', '-')} cannot be combined with --calibrate",
            code="FG983",
            hint="calibrate first; then plan with the hardware file that it writes",
        )
    runs = []
    for folder in options.calibrate:
        past = open_run(folder)
        print_findings(past.notes, past.project_dir)
        wanted = invocation.config and os.path.basename(invocation.config).removesuffix(".yaml")
        if wanted and wanted != os.path.basename(past.config).removesuffix(".yaml"):
            raise PlanError(
                f"{near_path(past.folder)!r} is a run of {past.config!r}, and -t names {invocation.config!r}",
                code="FG996",
                hint="leave -t out: a run has recorded its config",
            )
        project = recorded_project(past)
        runs.append(measured_run(past, project))
        plan_run(project)
        ask_trust(project, [MAIN])
    with redirect_stdout(sys.stderr):
        found = calibration_of(runs, options.hardware)
    file = options.output or USUAL_FILE
    write_json(found["hardware"], file)
    if options.json:
        write_json({**found, "file": file})
    else:
        write_text("\n".join(_lines(found)))
    print_note(f"written to {near_path(file)}; plan with --hardware {shlex.quote(file)}")
    return 0


def _lines(found: Mapping[str, Any]) -> list[str]:
    efficiency = found["hardware"]["efficiency"]
    width = max(len(near_path(run["run"])) for run in found["runs"])
    lines = [f"{'run':<{width}}  measured  planned", *(
        f"{near_path(run['run']):<{width}}  {run['measured']:>6.3g} s  {run['planned']:>5.3g} s  "
        f"{run['planned'] / run['measured'] - 1:+.0%}"
        for run in found["runs"]
    )]  # fmt: skip
    lines += ["", found["hardware"]["title"]]
    for name, value in efficiency.items():
        if not isinstance(value, float):
            continue
        if name == "largest_error":
            continue
        amount = f"{value * 1e6:.3g} us" if name.endswith("_seconds") else f"{value:.3g} of the peak"
        how = "fitted by itself" if name in efficiency["fitted"] else "by the common factor"
        lines.append(f"  {name.removesuffix('_seconds'):<13}  {amount:<17}  {how}")
    return lines
