"""Ctrl-C at a run of two ranks, wherever it is: one line, status 130, no traceback, no process left, whole checkpoints."""

import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher import api as launcher_api

from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.distributed import launcher
from tests.ml.distributed.test_faults import left_behind
from tests.patience import patience
from tests.project.workbench import ROOT, make_project

TOY = """\
import os, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from forgather.ml.strategy.data_parallel import DataParallel
from forgather.ml.trainer.checkpoint_writer import CheckpointWriter

def reach(phase):
    if os.environ.get("WANT") in (f"{phase} {os.environ.get('RANK', '0')}", phase):
        print("reached", phase, flush=True)
        time.sleep(4)

def late(owner, name):
    usual = getattr(owner, name)
    def act(*args, **kwargs):
        reach(name)
        return usual(*args, **kwargs)
    setattr(owner, name, act)

late(DataParallel, "restore")
late(CheckpointWriter, "_fill")
late(CheckpointWriter, "_finish")

def model():
    reach("model")
    made = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    made.model.layers[0].register_forward_pre_hook(lambda module, _: None if module.training else reach("eval"))
    return made

class Shards:
    num_shards = 1
    def shard_size(self, shard):
        return 1
    def shard_name(self, shard):
        return "toy"
    def open(self, shard, offset=None):
        return Reader(offset or 0)
    def __iter__(self):
        return self.open(0)

class Reader:
    def __init__(self, offset):
        self.offset = offset
    def __iter__(self):
        return self
    def __next__(self):
        if self.offset == 200:
            raise StopIteration
        if self.offset == 70:
            reach("reader")
        self.offset += 1
        return {name: torch.arange(8) + self.offset % 40 for name in ("input_ids", "labels")}

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return {name: torch.arange(8) + row for name in ("input_ids", "labels")}
"""
CONFIG = """\
meta: {nproc_per_node: 2, output_dir: out}
dynamic_args: [{names: --steps, type: int, default: 30}]
main: !singleton:forgather.ml:AccelTrainer
  model: !partial:toy.py:model {}
  args: !singleton:forgather.ml:AccelTrainingArguments
    output_dir: out
    logging_dir: !var {name: run_dir, default: ~}
    per_device_train_batch_size: 2
    max_steps: {{ steps | default(30) }}
    save_strategy: steps
    save_steps: 2
    async_save: true
    eval_strategy: steps
    eval_steps: 3
    report_to: none
    use_cpu: true
    resume_from_checkpoint: auto
  train_dataset: !singleton:toy.py:Shards {}
  eval_dataset: !singleton:toy.py:Rows {}
  distributed_env: !singleton:forgather.ml.distributed:DistributedEnvironment
"""
# Whether something was trained.
PHASES = {"model": False, "model 1": False, "restore 1": None, "reader 0": True, "eval": True, "_fill 1": True}
PHASES["_finish 0"] = True


def run(bench, *words, want="", timeout=120):
    """Returns the status and the output of a run, which gets Ctrl-C as from a terminal when it is where it shall be."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANT": want}
    env |= {"FORGATHER_TRUST": str(bench), "OF_THIS_TEST": str(bench)}
    command = [sys.executable, "-m", "forgather", "-t", "a", "train", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=bench, env=env, **options) as started:
        lines = []
        for line in started.stdout:
            if line.startswith("reached") and not any(one.startswith("reached") for one in lines):
                os.killpg(started.pid, signal.SIGINT)
            lines.append(line)
        status = started.wait(patience(timeout))
    return status, "".join(lines)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_two_ranks_cleanly(tmp_path, phase):
    bench = make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})
    if phase.startswith("restore"):
        assert 0 == run(bench, "--steps", "4")[0]
    status, output = run(bench, want=phase)
    assert 130 == status, output
    assert "reached" in output
    assert "Traceback" not in output
    assert 1 == output.count("interrupted; "), output
    assert [] == left_behind(bench)
    steps = [step for step, _ in list_checkpoints(bench / "out")]
    if PHASES[phase]:
        assert f"the state is saved in out/checkpoint-{max(steps)}" in output
    else:
        assert "nothing was trained yet" in output
        assert steps == ([2, 4] if PHASES[phase] is None else [])
    # What is there is whole: a run goes on with it.
    assert 0 == run(bench, "--steps", str(max(steps, default=0) + 2))[0]


class Rendezvous:
    """Stands for the object whose thread sends heartbeats."""


def test_the_rendezvous_outlives_its_agent(monkeypatch):
    handler = Rendezvous()
    spec = WorkerSpec(role="default", local_world_size=1, entrypoint="true", rdzv_handler=handler)
    watched = []
    monkeypatch.setattr(
        launcher.LocalElasticAgent,
        "_monitor_workers",
        lambda agent, group: watched.append(agent) or RunResult(state=WorkerState.HEALTHY),
    )
    with launcher._restart_hook(launcher._Attempts(1, os.devnull, lambda *_: True)):
        agent = launcher_api.LocalElasticAgent(spec, DefaultLogsSpecs())
    agent._monitor_workers(agent._worker_group)
    assert 1 == len(watched)
    kept = weakref.ref(handler)
    watched.clear()
    del agent, spec, handler
    gc.collect()
    assert kept() is not None
    launcher._rendezvous.clear()
