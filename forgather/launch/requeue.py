"""A job of SLURM that is queued again after its time was up.

Takes environment variables and the end of a run; gives a line for people. Keeps true: a job that was cancelled stays
cancelled, since SIGTERM queues nothing; a job is not queued again to begin anew what nothing was saved of.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from forgather.interrupt import present
from forgather.launch.running import Outcome


def requeued(outcome: Outcome, environ: Mapping[str, str], *, goes_on: bool) -> str | None:
    """Queues this job again where SIGUSR1 has ended its run; None where there is nothing to do.

    Args:
        outcome: of the run.
        environ: environment variables of SLURM.
        goes_on: whether the run goes on from what it has saved, once it is started again.

    Returns:
        What was done, or why not.
    """
    heard = present()
    job = environ.get("SLURM_JOB_ID", "")
    if not (job and outcome.interrupted and heard is not None and heard.wants_requeue):
        return None
    if outcome.checkpoint is None and not outcome.nothing_trained:
        return f"job {job} is not queued again: nothing was saved, and it would begin anew"
    if not goes_on:
        return f"job {job} is not queued again: it would begin anew each time, and never end"
    program = shutil.which("scontrol")
    if program is None:
        return f"job {job} is not queued again: there is no scontrol here"
    done = subprocess.run([program, "requeue", job], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[:200]
        return f"job {job} is not queued again: scontrol says {reason or f'status {done.returncode}'}"
    return f"job {job} is queued again"
