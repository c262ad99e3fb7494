"""Runs the `main` target of a config, in this process or in several. All decisions about processes are made here."""

from __future__ import annotations

from forgather.launch.in_process import Outcome, RunPlan, plan_run, prepare_run, run

__all__ = ["Outcome", "RunPlan", "plan_run", "prepare_run", "run"]
