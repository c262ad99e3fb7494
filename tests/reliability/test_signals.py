"""A scheduler's signal on any rank in any phase: one checkpoint, status 143, and the run goes on as if nothing had been.

The matrix is that of docs/guarantees.md, R11: eight phases, each with the signal on rank 0 and on rank 1.
"""

import itertools
import shutil

import pytest

from tests.ml.distributed.gang import import_compiler
from tests.patience import patience
from tests.project.workbench import make_project
from tests.reliability.ranks import run_command

# The steps that are saved, in the order in which that happens: the run saves every third step and the last.
PHASES = {
    "data": [],
    "compile": [1],
    "warmup": [2],
    "train": [3, 4],
    "accumulation": [3, 5],
    "eval": [3, 4],
    "save": [3],
    "final": [3, 6],
}
ALL = list(itertools.product(PHASES, (0, 1)))
ALWAYS = [("eval", 1), ("save", 0)]
TOY = """\
import os, signal, time
import torch
from torch._dynamo import register_backend
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from forgather.ml.strategy.data_parallel import DataParallel

WANT = os.environ.get("WANT", "")

def reach(phase):
    rank = os.environ.get("RANK", "0")
    if WANT == f"{phase} {rank}":
        # Once: a save and an evaluation have more than one moment.
        globals()["WANT"] = ""
        print(f"signal at {time.time()}", flush=True)
        usual = signal.SIGHUP if phase in ("data", "eval") else signal.SIGTERM
        os.kill(os.getpid(), usual if rank == "0" or usual == signal.SIGHUP else signal.SIGUSR1)

@register_backend
def signalling(graph, inputs):
    reach("compile")
    return graph.forward

capture = DataParallel.capture
def captured(self, *args, **kwargs):
    reach({3: "save", 6: "final"}.get(STEP, ""))
    return capture(self, *args, **kwargs)
DataParallel.capture = captured
STEP = 0

def model():
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1))

def rows(count):
    reach("data")
    draws = torch.Generator().manual_seed(count)
    made = [torch.randint(0, 64, (8,), generator=draws) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in made]

class Signals(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        globals()["STEP"] = state.global_step + 1
        reach({2: "warmup", 4: "train"}.get(STEP, ""))

    def on_substep_end(self, args, state, control, **kwargs):
        reach("accumulation" if STEP == 5 else "")

    def on_prediction_step(self, args, state, control, **kwargs):
        reach("eval" if STEP == 4 else "")

    def on_evaluate(self, args, state, control, **kwargs):
        print(f"evaluated step {state.global_step}", flush=True)
"""
CONFIG = """\
meta: {nproc_per_node: 2, output_dir: out}
dynamic_args: [{names: --resume-from-checkpoint, type: str}, {names: --compile, type: int}]
main: !singleton:forgather.ml:AccelTrainer
  model: !partial:toy.py:model {}
  args: !singleton:forgather.ml:AccelTrainingArguments
    output_dir: out
    logging_dir: !var {name: run_dir, default: ~}
    per_device_train_batch_size: 2
    per_device_eval_batch_size: 2
    gradient_accumulation_steps: 2
    max_steps: 6
    warmup_steps: 3
    learning_rate: 0.01
    logging_steps: 1
    save_strategy: steps
    save_steps: 3
    eval_strategy: steps
    eval_steps: 2
    report_to: none
    use_cpu: true
    resume_from_checkpoint: {{ resume_from_checkpoint | default(none) | toyaml }}
-- if compile is defined and compile
    torch_compile: true
    torch_compile_backend: signalling
-- endif
  train_dataset: !singleton:toy.py:rows {count: 40}
  eval_dataset: !singleton:toy.py:rows {count: 12}
  callbacks: [!singleton:toy.py:Signals {}, !singleton:forgather.ml.callbacks:JsonLogger {}]
  distributed_env: !singleton:forgather.ml.distributed:DistributedEnvironment {timeout_seconds: 30}
"""


def pytest_generate_tests(metafunc):
    if "phase" in metafunc.fixturenames:
        cases = ALL if metafunc.config.getoption("full") else ALWAYS
        metafunc.parametrize(("phase", "rank"), cases, ids=[f"{phase}-{rank}" for phase, rank in cases])


def trained(bench, *words):
    return run_command(["-t", "a", "train", "--no-check", *words], bench)


def result(bench):
    """Returns the weights that the run ended with, and its loss file, that of a resumed run beginning with the first's."""
    last = max((bench / "out/runs").glob("*/loss.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    return (bench / "out/model.safetensors").read_bytes(), last.read_text().splitlines()


def saved(bench):
    return sorted(int(folder.name.split("-")[1]) for folder in (bench / "out").glob("checkpoint-*"))


@pytest.fixture(scope="module")
def took():
    """How long after its signal each run ended."""
    return {}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns how a run without a signal ends, as a function of whether it compiles; each is made once."""
    made = {}

    def of(compiles):
        if compiles not in made:
            bench = make_project(tmp_path_factory.mktemp("whole"), {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})
            assert [0, 0] == trained(bench, "--compile", str(int(compiles))).statuses
            made[compiles] = result(bench)
            assert "train_loss" in made[compiles][1][-1]
        return made[compiles]

    return of


def test_a_signal_gives_one_checkpoint_and_the_run_goes_on_exactly(
    tmp_path, monkeypatch, undisturbed, phase, rank, took, figure
):
    compiles = phase == "compile"
    if compiles:
        import_compiler()
    words = ("--compile", str(int(compiles)))
    bench = make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})
    monkeypatch.setenv("WANT", f"{phase} {rank}")
    stopped = trained(bench, *words)

    assert [143, 143] == stopped.statuses, stopped.printed
    assert PHASES[phase] == saved(bench), stopped.printed
    assert 1 == len(stopped.moments), stopped.printed
    told = "nothing was trained yet" if phase == "data" else f"the state is saved in out/checkpoint-{saved(bench)[-1]}"
    assert 1 == stopped.printed.count(f"interrupted; {told}"), stopped.printed
    assert "error" not in stopped.printed
    seconds = stopped.end - stopped.moments[0]
    assert seconds < patience(15)
    if phase == "eval":
        assert "evaluated step 2" in stopped.printed and "evaluated step 4" not in stopped.printed, stopped.printed
    monkeypatch.setenv("WANT", "")
    resumed = trained(bench, "--resume-from-checkpoint", "auto", *words)
    assert [0, 0] == resumed.statuses, resumed.printed
    assert undisturbed(compiles) == result(bench)
    shutil.rmtree(bench)
    took[phase, rank] = seconds
    if len(took) == len(ALL):
        slowest = max(took.values())
        figure("R11", f"{len(took)} of {len(ALL)}: one checkpoint (none before the first step), 143, the same bits when "
               f"resumed; ended at most {slowest:.1f} s after the signal")  # fmt: skip
