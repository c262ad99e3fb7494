"""The real command on a tiny project: the job of these tests as someone would describe and start it.

Takes a folder; gives a project there, runs of it, and kills. Keeps true: the run is the one of `job.trainer`, but that
its steps take a while where that is asked for, so that most of the command's time is training.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import patience
from tests.project.workbench import ROOT, make_project

TINY = """\
import os
import time

from forgather.ml.callbacks import TrainerCallback
from tests.ml.fixtures import Regression, regression_rows
from tests.reliability.job import Noisy


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
"""
CONFIG = """\
-- set steps, save_steps, last = steps | default(9), save_steps | default(3), last | default('null')
meta: {output_dir: out}
main: !singleton:forgather.ml:Trainer
  model: !singleton:tiny.py:Regression []
  args: !singleton:forgather.ml:TrainingArguments
    output_dir: out
    max_steps: {{ steps }}
    save_strategy: steps
    save_steps: {{ save_steps }}
    save_total_limit: {{ last }}
    logging_strategy: steps
    logging_steps: 2
    learning_rate: 1.0e-2
    lr_scheduler_type: cosine
    warmup_steps: 2
    per_device_train_batch_size: 2
    use_cpu: true
    report_to: none
  train_dataset: !singleton:tiny.py:Noisy []
  eval_dataset: !singleton:tiny.py:regression_rows [4]
  callbacks: [!singleton:tiny.py:Slow []]
"""


def make(folder, **values):
    """Returns the folder of a new project; values are those of the template."""
    given = "".join(f"-- set {name} = {value}\n" for name, value in values.items())
    files = {"tiny.py": TINY, "templates/configs/tiny.yaml": given + CONFIG}
    return make_project(folder, files, meta="default_config: tiny\n")


def start(project, *arguments, step_seconds=0.3):
    """Starts the command in a process group of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEP_SECONDS": str(step_seconds)}
    log = (Path(project) / "log.txt").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "forgather", "train", "--resume", "auto", *arguments],
            cwd=project,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(project, *arguments, timeout=120):
    """Runs the command to its end."""
    status = start(project, *arguments).wait(patience(timeout))
    assert 0 == status, (Path(project) / "log.txt").read_text(errors="replace")[-3000:]


def killed(project, seconds):
    """Starts the command and kills it after so many seconds; tells whether it was in time."""
    process = start(project)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return -signal.SIGKILL == process.wait(patience(10))
