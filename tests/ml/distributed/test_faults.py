"""One rank that fails in a real training ends the whole job within 15 s, whatever it does, wherever and on whichever rank.

The first cause is told once, with rank, step and phase; no process is left behind. All of it runs with `--all-cells`. What
runs always: tests/launch/test_failures.py starts a run as a user does, and tests/reliability/test_failing_ranks.py forks
the ranks.
"""

import itertools
import os
import re
import time
from pathlib import Path

import pytest

from tests.patience import patience
from tests.project.workbench import fgcli, make_project

REACH_SECONDS = 15
HANG_SECONDS = 8 + 10
WAYS = ("raise", "memory", "leave", "SIGKILL", "SIGSEGV")
PHASES = {
    "forward": r"step 1, forward and backward",
    "backward": r"step 1, forward and backward",
    "save": r"step 2, saving",
    "eval": r"step 2, evaluation",
}
ALL = [
    *(("ddp", *case) for case in itertools.product(WAYS, PHASES, (0, 1))),
    *(("ddp", "SIGKILL", phase, rank) for phase in ("train_worker", "eval_worker") for rank in (0, 1)),
    *(
        (kind, *case)
        for kind in ("fsdp2", "pipeline")
        for case in (("raise", "eval", 1), ("SIGKILL", "backward", 1), ("leave", "save", 1), ("memory", "backward", 0))
    ),
]
TOLD = {
    "raise": "error: ValueError: of this rank",
    "memory": "error: OutOfMemoryError: out of memory",
    "leave": "error[FG710]: rank {rank} of 2 exited with status 7 in {where}, without an error message",
    "SIGKILL": "error[FG710]: rank {rank} of 2 was ended by SIGKILL in {where}, without an error message",
    "SIGSEGV": "error[FG710]: rank {rank} of 2 was ended by SIGSEGV in {where}, without an error message",
}
STATUS = {"raise": 1, "memory": 1, "leave": 7, "SIGKILL": 137, "SIGSEGV": 139}
TOY = """\
import importlib, multiprocessing, os, signal, time
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from forgather.ml.distributed import phase as run_phase

STRATEGIES = {"ddp": "data_parallel:DataParallel", "fsdp2": "fsdp2:Sharded", "pipeline": "pipeline.strategy:Pipeline"}

class Fault:
    def __init__(self, how, phase, rank, kind):
        self.how, self.phase, self.here = how, phase, str(rank) == os.environ.get("RANK")
        module, name = STRATEGIES[kind].split(":")
        strategy = getattr(importlib.import_module("forgather.ml.strategy." + module), name)
        strategy.capture = self.before(strategy.capture)

    def before(self, capture):
        def captured(strategy, *args, **kwargs):
            # What a checkpoint will take is found out before the first step, too.
            if run_phase.current_phase().phase == "saving":
                self.reach("save")
            return capture(strategy, *args, **kwargs)
        return captured

    def reach(self, phase):
        if not self.here or phase != self.phase:
            return
        print(f"failing at {time.time()}", flush=True)
        if self.how == "raise":
            raise ValueError("of this rank")
        if self.how == "memory":
            raise torch.OutOfMemoryError("out of memory")
        if self.how == "leave":
            os._exit(7)
        if self.how == "worker":
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            time.sleep(600)
        if self.how == "one more":
            dist.all_reduce(torch.zeros(3))
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, self.how))

def model(fault):
    made = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    block = made.model.layers[1 if fault.here and os.environ["RANK"] == "1" else 0]
    block.register_forward_pre_hook(lambda module, _: fault.reach("forward" if module.training else "eval"))
    block.register_full_backward_pre_hook(lambda *_: fault.reach("backward"))
    return made

class Rows(Dataset):
    def __init__(self, fault, kind):
        self.fault, self.kind = fault, kind

    def __len__(self):
        return 16

    def __getitem__(self, row):
        if get_worker_info() is not None:
            self.fault.reach(self.kind + "_worker")
        return {"input_ids": torch.arange(row, row + 8), "labels": torch.arange(row, row + 8)}

class AtEndOfStep(TrainerCallback):
    def __init__(self, fault):
        self.fault = fault

    def on_step_end(self, args, state, control, **kwargs):
        self.fault.reach("step")
"""
CONFIG = """\
meta: {nproc_per_node: 2, output_dir: out}
dynamic_args:
  [{names: --how, type: str}, {names: --phase, type: str}, {names: --rank, type: int}, {names: --kind, type: str},
   {names: --timeout, type: int}]
-- set kind, how, phase, rank = kind | default('ddp'), how | default('raise'), phase | default('save'), rank | default(0)
-- set pipeline = kind == 'pipeline'
.fault: &fault !singleton:toy.py:Fault {how: {{ how }}, phase: {{ phase }}, rank: {{ rank }}, kind: {{ kind }}}
main: !singleton:forgather.ml:{{ 'PipelineTrainer' if pipeline else 'AccelTrainer' }}
  model: !partial:toy.py:model {fault: *fault}
  args: !singleton:forgather.ml:{{ 'PipelineTrainingArguments' if pipeline else 'AccelTrainingArguments' }}
    output_dir: out
    logging_dir: !var {name: run_dir, default: ~}
    per_device_train_batch_size: 2
    max_steps: 3
    save_strategy: steps
    save_steps: 2
    eval_strategy: steps
    eval_steps: 2
    report_to: none
    use_cpu: true
    dataloader_num_workers: {{ 1 if phase.endswith('worker') or how == 'worker' else 0 }}
-- if kind == 'fsdp2'
    fsdp: true
-- elif pipeline
    split_spec: auto
-- endif
  train_dataset: !singleton:toy.py:Rows {fault: *fault, kind: train}
  eval_dataset: !singleton:toy.py:Rows {fault: *fault, kind: eval}
  callbacks: [!singleton:toy.py:AtEndOfStep {fault: *fault}]
  distributed_env: !singleton:forgather.ml.distributed:DistributedEnvironment
    timeout_seconds: {{ timeout | default(8 if how == 'SIGSTOP' else 600) }}
    start_timeout_seconds: 60
"""


def failed(tmp_path, kind, how, phase, rank):
    """Returns the run, and how many seconds after the failure it ended."""
    bench = make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})
    words = ["--how", how, "--phase", phase, "--rank", str(rank), "--kind", kind]
    done = fgcli("-t", "a", "train", *words, cwd=bench, env={"OMP_NUM_THREADS": "1", "OF_THIS_TEST": str(bench)})
    ended = time.time()
    begun = re.search(r"failing at ([\d.]+)", done.stdout + done.stderr)
    assert begun is not None, done.stderr
    return done, ended - float(begun[1])


def left_behind(bench):
    """Returns the processes that the run has left."""
    mark, found = f"OF_THIS_TEST={bench}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "how", "phase", "rank"), ALL)
def test_a_rank_that_fails_ends_the_job_and_is_named(tmp_path, kind, how, phase, rank):
    done, seconds = failed(tmp_path, kind, how, phase, rank)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]

    assert seconds < patience(REACH_SECONDS)
    assert [] == left_behind(tmp_path / "bench")
    assert 1 == len(errors), done.stderr
    if phase.endswith("worker"):
        assert 1 == done.returncode
        assert re.match(r"error: RuntimeError: DataLoader worker .* exited unexpectedly", errors[0])
        assert re.search(rf"note: rank {rank} of 2, (step [12], )?(reading data|evaluation)", done.stderr)
        return
    assert STATUS[how] == done.returncode
    assert TOLD[how].format(rank=rank, where=PHASES[phase]) == errors[0]
    assert "Traceback" not in done.stderr
    if how in ("raise", "memory"):
        assert f"note: rank {rank} of 2, {PHASES[phase]}" in done.stderr


@pytest.mark.matrix
def test_a_rank_that_hears_no_signal_is_found_and_ended(tmp_path):
    done, seconds = failed(tmp_path, "ddp", "SIGSTOP", "step", 1)

    assert 1 == done.returncode
    assert seconds < patience(HANG_SECONDS)
    assert "note: the others wait for rank 1, which did not answer" in done.stderr
    assert 1 == sum(line.startswith("error") for line in done.stderr.splitlines()), done.stderr
    (report,) = (tmp_path / "bench/out/runs").glob("*/hang.txt")
    assert "rank 1: did not answer" in report.read_text()
    assert [] == [os.fsdecode(one) for one in left_behind(tmp_path / "bench")]
