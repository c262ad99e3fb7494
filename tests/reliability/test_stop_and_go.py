"""The real command with its launcher: signals to it or to one of its processes, and runs that are started again."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from forgather.run_status import Status, read_status
from tests.patience import patience
from tests.project.workbench import ROOT, make_project

TOY = """\
import os, signal, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

def model():
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1))

def rows(count):
    draws = torch.Generator().manual_seed(count)
    made = [torch.randint(0, 64, (8,), generator=draws) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in made]

class Paced(TrainerCallback):
    def __init__(self, seconds, dies):
        self.seconds, self.dies = seconds, dies

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            # In one act: lines of two processes must not meet in one.
            os.write(1, f"rank {os.environ.get('RANK', 0)} is process {os.getpid()}\\n".encode())
        time.sleep(self.seconds)
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.dies and is_first and state.global_step == 3 and os.environ.get("RANK") == str(last):
            os.kill(os.getpid(), signal.SIGKILL)
"""
CONFIG = """\
-- set several = procs | default(2) > 1
meta:
  nproc_per_node: {{ procs | default(2) }}
  output_dir: out
-- if dies is defined
  fault_tolerance: {max_retry_attempts: 2, checkpoint_interval: 2}
-- endif
dynamic_args:
  [{names: --procs, type: int}, {names: --seconds, type: float}, {names: --dies, type: int}]
main: !singleton:forgather.ml:{{ 'AccelTrainer' if several else 'Trainer' }}
  model: !partial:toy.py:model {}
  args: !singleton:forgather.ml:{{ 'AccelTrainingArguments' if several else 'TrainingArguments' }}
    output_dir: out
    logging_dir: !var {name: run_dir, default: ~}
    per_device_train_batch_size: 2
    max_steps: 8
    learning_rate: 0.01
-- if dies is not defined
    save_strategy: epoch
-- endif
    report_to: none
    use_cpu: true
  train_dataset: !singleton:toy.py:rows {count: 40}
  callbacks: [!singleton:toy.py:Paced {seconds: {{ seconds | default(0) }}, dies: {{ dies | default(0) }}}]
  distributed_env: !singleton:forgather.ml.distributed:DistributedEnvironment {timeout_seconds: 60}
"""
FGCLI = (sys.executable, "-m", "forgather", "-t", "a", "train", "--no-check")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *(str(ROOT / "scripts/train_script.py"), "a", "--no-check"),
)


@pytest.fixture(autouse=True)
def only_in_the_full_set(full):
    if not full:
        pytest.skip("the quick set runs the same in forked ranks")


@pytest.fixture(scope="module")
def took():
    """How long after its signal each run ended."""
    return {}


@pytest.fixture
def bench(tmp_path):
    return make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})


def started(bench, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=bench, env=environment, **streams)


def stopped(bench, words, number, to, *, again=None):
    """Returns status, output and seconds of a run whose `to` gets a signal in its third step."""
    with started(bench, *words, "--seconds", "1") as process:
        lines, ranks = [], {}
        while len(ranks) < (1 if words[-1] == "1" else 2):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
            if found := re.match(r"rank (\d) is process (\d+)", lines[-1]):
                ranks[found[1]] = int(found[2])
        begun = time.monotonic()
        os.kill(process.pid if to == "launcher" else ranks[to], number)
        if again is not None:
            time.sleep(again)
            os.kill(process.pid if to == "launcher" else ranks[to], number)
        output, _ = process.communicate(timeout=patience(60))
    return process.returncode, "".join(lines) + output, time.monotonic() - begun


def saved(bench):
    return sorted(int(folder.name.split("-")[1]) for folder in (bench / "out").glob("checkpoint-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("to", ["launcher", "0", "1"])
def test_a_signal_to_the_launcher_or_to_one_process_saves_once(bench, number, to, took, figure):
    status, output, seconds = stopped(bench, FGCLI, number, to)
    assert 143 == status, output
    assert 1 == len(saved(bench)), output
    assert 1 == output.count("interrupted; the state is saved in"), output
    assert "error" not in output
    took[number, to] = seconds
    if len(took) == 6:
        slowest = max(took.values())
        figure("R11", f"6 of 6 signals to the real command or one of its processes: 143, at most {slowest:.1f} s later")


def test_signals_of_one_moment_are_one(bench):
    status, output, _ = stopped(bench, FGCLI, signal.SIGTERM, "launcher", again=0.05)
    assert 143 == status, output
    assert 1 == len(saved(bench)), output
    assert "Traceback" not in output and "error" not in output


def test_a_second_signal_ends_at_once_and_saves_nothing(bench):
    bench_words = (*FGCLI, "--procs", "1")
    status, output, seconds = stopped(bench, bench_words, signal.SIGTERM, "launcher", again=0.2)
    assert 143 == status, output
    assert [] == saved(bench), output
    assert seconds < patience(10)


def test_torchrun_in_charge_saves_once(bench):
    status, output, _ = stopped(bench, TORCHRUN, signal.SIGTERM, "launcher")
    assert status != 0
    assert 1 == len(saved(bench)), output
    assert 1 == output.count("interrupted; the state is saved in"), output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_is_started_again_and_ends_with_the_same_bits(bench, ranks, figure):
    weights = []
    for dies in (0, 1):
        with started(bench, *FGCLI, "--procs", str(ranks), "--dies", str(dies)) as process:
            output, _ = process.communicate(timeout=patience(120))
        assert 0 == process.returncode, output
        weights.append((bench / "out/model.safetensors").read_bytes())
        (bench / "out").rename(bench / f"out{dies}")
    line = (
        rf"attempt 2 of 3, after rank {ranks - 1} of {ranks} was ended by SIGKILL in step 4, .*; resuming from step 2"
    )
    assert 1 == len(re.findall(line, output)), output
    assert weights[0] == weights[1]
    # Each attempt has a run folder of its own.
    first, second = (read_status(str(folder)) for folder in sorted((bench / "out1/runs").glob("2*")))
    assert [Status.KILLED if ranks == 1 else Status.FAILED, Status.FINISHED] == [first.status, second.status]
    assert ranks - 1 == first.cause["rank"]
    figure("R12", f"a killed run of {ranks} started again by itself: the same bits")
