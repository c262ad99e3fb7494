"""How a run starts: in as many processes as its config asks for, with a line that says who started them."""

import os
import subprocess
import sys

import pytest
import torch

from forgather.errors import DistributedError
from forgather.launch import plan_run, prepare_run, run
from forgather.launcher_env import processes_of_accelerate, started_by
from forgather.project.project import Project
from tests.project.workbench import ROOT, make_project

CONFIG = """\
meta: {{nproc_per_node: {processes}}}
main: !singleton:{trainer}
  model: !singleton:own.py:Regression
  args: !singleton:{arguments} {{output_dir: out, use_cpu: true, max_steps: 1, save_strategy: "no"{more}}}
  train_dataset: !singleton:own.py:regression_rows
"""
OWN = "from tests.ml.fixtures import Regression, regression_rows\n"
LOSS_IN_A_TUPLE = """\
from tests.ml.fixtures import Regression as Scalar, regression_rows


class Regression(Scalar):
    def forward(self, x, y):
        return (super().forward(x, y),)
"""
OURS = {"trainer": "forgather.ml:AccelTrainer", "arguments": "forgather.ml:AccelTrainingArguments", "more": ""}
HF = {
    "trainer": "forgather.ml.trainer.hf:HFTrainer",
    "arguments": "transformers:TrainingArguments",
    "more": ", report_to: [], disable_tqdm: true",
}
SIZES = {**OURS, "more": ", data_parallel_size: 2"}


def bench(folder, processes, words=OURS):
    config = CONFIG.format(processes=processes, **words)
    return make_project(folder, {"templates/configs/a.yaml": config, "own.py": OWN})


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [OURS, HF], ids=["ours", "hf"])
def test_a_run_of_this_process_whose_config_asks_for_two_is_refused_and_both_ways_are_named(tmp_path, words):
    trainer = Project("a", bench(tmp_path, 2, words))("main")
    with pytest.raises(DistributedError) as caught:
        trainer.train()
    assert "FG776" == caught.value.code
    assert "this run has one process, and config 'a.yaml' requests 2" in str(caught.value.message)
    assert "`fgcli -t a train`" in caught.value.hint
    assert "Project('a', ..., nproc_per_node=1)" in caught.value.hint
    assert trainer.state.global_step == 0


def test_what_the_hint_names_trains(tmp_path, caplog):
    Project("a", bench(tmp_path, 2), nproc_per_node=1)("main").train()
    assert "processes  1 on cpu, started by " in caplog.text
    plan = plan_run(Project("a", tmp_path))
    assert 0 == run(plan, prepare_run(plan, ["fgcli", "train", "--nproc-per-node", "1"])).status


def test_a_trainer_of_transformers_trains_alike_at_every_start(tmp_path):
    words = {"trainer": "transformers:Trainer", "arguments": "transformers:TrainingArguments", "more": HF["more"]}
    trained = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folder = bench(tmp_path / str(seed), 1, words)
        (tmp_path / str(seed) / "own.py").write_text(LOSS_IN_A_TUPLE, encoding="utf-8")
        plan = plan_run(Project("a", folder))
        built = []
        assert 0 == run(plan, prepare_run(plan, ["fgcli", "train"]), built=built.append).status
        trained.append({name: value.clone() for name, value in built[0].model.state_dict().items()})
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


@pytest.mark.parametrize(("processes", "machine", "refused"), [(1, 4, False), ("auto", 4, True), ("auto", 1, False)])
def test_auto_is_what_the_machine_has(tmp_path, monkeypatch, processes, machine, refused):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: machine)
    trainer = Project("a", bench(tmp_path, processes))("main")
    if refused:
        with pytest.raises(DistributedError, match="requests 4"):
            trainer.train()
    else:
        trainer.train()


def test_sizes_that_multiply_to_two_are_refused_too(tmp_path):
    with pytest.raises(DistributedError):
        Project("a", bench(tmp_path, "auto", SIZES))("main").train()


def test_a_trainer_that_no_config_made_asks_for_nothing(settings, caplog):
    from forgather.ml import Trainer
    from tests.ml.fixtures import Regression, regression_rows

    Trainer(Regression(), settings(max_steps=1), train_dataset=regression_rows()).train()
    assert caplog.messages[0].startswith("processes  1 on cpu, started by ")


@pytest.mark.parametrize(
    ("chosen", "evaluated", "line"),
    [
        ({}, 3, "20 to train on, 3 to evaluate; 8 per step, 3 steps per epoch"),
        ({"gradient_accumulation_steps": 2}, 0, "20 to train on, none to evaluate; 16 per step (8 x 2 accumulated), 2 steps"),
        ({"dataloader_drop_last": True}, 3, "8 per step, 2 steps per epoch, the last 4 of an epoch left out"),
    ],
)  # fmt: skip
def test_a_run_says_how_many_rows_it_trains_on_and_evaluates(settings, caplog, chosen, evaluated, line):
    from forgather.ml import Trainer
    from tests.ml.fixtures import Regression, regression_rows

    rows = regression_rows()
    some = [rows[place % len(rows)] for place in range(20)]
    args = settings(max_steps=1, per_device_train_batch_size=8, **chosen)
    Trainer(Regression(), args, train_dataset=some, eval_dataset={"a": some[:evaluated]} if evaluated else None).train()
    assert any(message.startswith("rows  ") and line in message for message in caplog.messages), caplog.messages


ELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "program", "said"),
    [
        ({}, "/usr/bin/fgcli", "fgcli"),
        ({}, "/lib/forgather/__main__.py", "fgcli"),
        ({}, "train.py", "python train.py"),
        ({}, "-c", "python"),
        (ELASTIC, "train.py", "torchrun"),
        ({**ELASTIC, "FORGATHER_CHECKED": "1"}, "fgcli", "fgcli"),
        ({**ELASTIC, "ACCELERATE_MIXED_PRECISION": "no"}, "train.py", "accelerate launch"),
        (SLURM, "fgcli", "SLURM"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "fgcli", "mpirun"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "train.py", "accelerate launch"),
    ],
)
def test_who_started_a_process(environ, program, said):
    assert said == started_by(environ, program, parent=[])


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["python", "/bin/accelerate", "launch", "--num_processes", "2", "x.py"], 2),
        (["python", "-m", "accelerate.commands.launch", "--num-processes=3", "x.py"], 3),
        (["python", "/bin/accelerate", "launch", "x.py"], 4),
        (["bash", "--num_processes", "2"], None),
    ],
)
def test_what_accelerate_was_asked_for_is_read_off_its_command_line_and_its_file(tmp_path, words, asked):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_machines: 1\nnum_processes: 4\n")
    assert asked == processes_of_accelerate({"HF_HOME": str(tmp_path)}, words)


@pytest.mark.matrix
def test_accelerate_that_starts_one_process_of_two_is_named_in_the_line(tmp_path):
    folder = bench(tmp_path / "bench", 1)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "scripts" / "train_script.py"), "a"],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    line = "processes  1 on cpu, started by accelerate launch, which was configured for 2 and starts one where there is no GPU"
    assert line in done.stderr.splitlines()
