"""Launching: runs the `main` target of a config in the current process or in several processes.

All decisions about the number and the start of processes are made in this package.
"""

from __future__ import annotations

from forgather.launch.in_process import Outcome, RunPlan, plan_run, prepare_run, run

__all__ = ["Outcome", "RunPlan", "plan_run", "prepare_run", "run"]
