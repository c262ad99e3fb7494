"""Batches that are tried on the devices before a run: by all processes together, and without a trace in the run."""

import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from forgather.launch import batch_trial
from forgather.launch.auto_values import values_of_checkpoint
from forgather.launch.batch_trial import Tried, asks_for_trial
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.peer import Peer
from forgather.planner.batch_size import smaller_sizes
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments
from tests.project.workbench import TINY_TRAINING, fgcli, make_project

TRIED = TINY_TRAINING.replace("train_batch_size: 2", "train_batch_size: 8\n    auto_find_batch_size: true")
LIMITED = f"""{TRIED}[data_collator]
    !singleton:toy.py:Limited
    collator:
        !singleton:forgather.ml.data:CausalLMCollator
        tokenizer: *tokenizer
"""
# The memory of one rank is made small: with more rows it raises torch's own error, in the loss or before all others.
TOY = """\
import os
import torch

class Limited:
    def __init__(self, collator):
        self.collator = collator
        with open("pids", "a") as stream:
            stream.write(f"{os.getpid()}\\n")

    def __call__(self, items):
        most, rank, kind = os.environ.get("LIMIT", "99,0,memory").split(",")
        if len(items) > int(most) and os.environ.get("RANK", "0") == rank:
            raise {"memory": torch.OutOfMemoryError, "other": ValueError}[kind]("with these rows")
        return self.collator(items)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    files = {
        "toy.py": TOY,
        "rows.jsonl": rows,
        "templates/configs/one.yaml": LIMITED,
        "templates/configs/two.yaml": LIMITED.replace("trainers/trainer", "trainers/accel_trainer"),
    }
    folder = make_project(tmp_path / "bench", files)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORGATHER_TRUST", f"{folder}/")
    return folder


def project(config="one", **settings):
    return Project(config, ".", overrides=[(f"trainer_args.{name}", text) for name, text in settings.items()])


def test_sizes_that_are_tried_after_another():
    for size, unit in ((1, 1), (7, 1), (64, 4), (1000, 1)):
        sizes = [size, *smaller_sizes(size, unit)]
        assert sizes == sorted(set(sizes), reverse=True)
        assert unit == sizes[-1]
        assert all(one % unit == 0 for one in sizes)
    assert [] == [*smaller_sizes(4, 4)]


def batches(world_size=1, **settings):
    return [*batch_trial._batches(trainer_arguments(project(**settings).graph), world_size)]


def test_a_global_batch_is_kept(bench):
    assert asks_for_trial(project())
    assert not asks_for_trial(project(auto_find_batch_size="false"))
    rows = "per_device_train_batch_size"
    assert [{rows: size} for size in (8, 7, 5, 3, 1)] == batches()
    # Of an update of 24 on two ranks: 12 rows of each.
    found = batches(2, global_batch_size="24", per_device_train_batch_size="6", gradient_accumulation_steps="2")
    assert [6, 4, 3, 2, 1] == [one[rows] for one in found]
    assert [3, 4, 6, 12] == [one["gradient_accumulation_steps"] for one in found[1:]]
    (first, *_) = batches(2, global_batch_size="24", per_device_train_batch_size="null")
    assert 12 == first[rows]


def request(one):
    overrides = [*one.overrides, ("trainer_args.auto_find_batch_size", "false")]
    now = one.instant.replace(tzinfo=None).isoformat()
    facts = {"config": "one", "project_dir": one.meta.project_dir, "variables": {}}
    return {**facts, "overrides": overrides, "now": now}


@pytest.mark.parametrize(("limit", "status"), [("8,0,memory", 0), ("7,0,memory", 75), ("7,0,other", 1)])
def test_a_trial_tells_too_little_memory_from_other_failures(bench, monkeypatch, limit, status):
    monkeypatch.setenv("LIMIT", limit)
    said = []
    state = torch.get_rng_state()
    assert status == batch_trial._try_here(request(project()), said.append)
    torch.set_rng_state(state)
    assert (["ValueError: with these rows"] if status == 1 else []) == said
    assert not (bench / "out").exists()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(0, ""), (0, "")], (0, "")),
        ([(0, ""), (75, "")], (75, "")),
        # A lost connection follows from the rank that lacked memory.
        ([(1, "connection closed"), (75, "")], (75, "")),
        ([(0, ""), (1, "KeyError: x")], (1, "KeyError: x")),
    ],
)
def test_all_ranks_take_the_same_answer(answers, expected):
    store, found = HashStore(), {}

    def answer(rank):
        member = Peer(ProcessFacts(rank=rank, local_rank=rank, world_size=2, local_world_size=2), store, 5.0)
        found[rank] = batch_trial._agreed(member, "trial/0", *answers[rank])

    threads = [threading.Thread(target=answer, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {0: expected, 1: expected} == found


def test_the_line_says_what_was_tried():
    changes = {"per_device_train_batch_size": 5}
    assert Tried(5, (8, 7), "", changes).line().endswith("is 5, tried on all devices; 8, 7 did not fit")
    assert "could not be tried (KeyError: x)" in Tried(5, (), "KeyError: x", changes).line()


def train(bench, config, *words, limit, out):
    output = ["--set", f"trainer_args.output_dir={bench / out}"]
    return fgcli("-t", config, "train", *words, *output, cwd=bench, env={"LIMIT": limit})


def losses(folder):
    (file,) = Path(folder).glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "loss", "grad_norm")} for line in lines]


ROWS = "trainer_args.per_device_train_batch_size"


@pytest.mark.matrix
@pytest.mark.parametrize(("config", "limit"), [("one", "5,0,memory"), ("two", "5,1,memory"), ("two", "5,0,memory")])
def test_a_run_with_a_batch_that_was_tried_is_that_with_the_number_written(bench, config, limit):
    found = train(bench, config, limit=limit, out="found")
    assert 0 == found.returncode, found.stderr
    assert "per_device_train_batch_size is 5, tried on all devices; 8, 7 did not fit" in found.stderr
    # Only the main process says it.
    assert 1 == found.stderr.count("tried on all devices")
    written = train(
        bench, config, "--set", f"{ROWS}=5", "--set", "trainer_args.auto_find_batch_size=false", limit=limit, out="own"
    )
    assert 0 == written.returncode, written.stderr
    assert losses(bench / "own") == losses(bench / "found")
    models = [(bench / name / "model.safetensors").read_bytes() for name in ("own", "found")]
    assert models[0] == models[1]
    (overrides,) = (bench / "found/runs").glob("*/overrides.yaml")
    assert {"5", "false"} <= set(re.findall(r'value: "(\w+)"', overrides.read_text()))
    # No process of a trial is left, and so none of its memory.
    pids = (bench / "pids").read_text().split()
    count = 2 if config == "two" else 1
    assert (3 + 1 + 1) * count == len(pids)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.matrix
def test_a_resumed_run_keeps_the_batch_and_tries_nothing(bench):
    saving = ("--set", "trainer_args.save_strategy=steps", "--set", "+trainer_args.save_steps=2")
    assert 0 == train(bench, "one", *saving, limit="5,0,memory", out="kept").returncode
    longer = ("--set", "trainer_args.max_steps=3", "--resume")
    resumed = train(bench, "one", *saving, *longer, limit="4,0,memory", out="kept")
    assert "tried on all devices" not in resumed.stderr
    assert "has no effect" not in resumed.stderr
    assert "per_device_train_batch_size is 5 (as in checkpoint-2)" in resumed.stderr
    # Which is how a run ends whose device became smaller.
    assert "OutOfMemoryError" in resumed.stderr


@pytest.mark.matrix
def test_where_nothing_fits_and_where_a_trial_fails(bench):
    nothing = train(bench, "one", limit="0,0,memory", out="nothing")
    assert 1 == nothing.returncode
    assert (
        "error[FG948]: auto_find_batch_size is true, and no batch fits on the devices: 8, 7, 5, 3, 1" in nothing.stderr
    )
    assert not (bench / "nothing").exists()
    other = train(bench, "one", limit="0,0,other", out="other")
    assert 1 == other.returncode
    assert "is 8, which could not be tried (ValueError: with these rows)" in other.stderr
    assert "error: ValueError: with these rows" in other.stderr


def test_a_resumed_run_keeps_the_division_of_its_global_batch(bench):
    sizes = {"global_batch_size": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    given = [(f"trainer_args.{name}", str(value)) for name, value in sizes.items()]
    (bench / "checkpoint-2").mkdir()
    trained = {**sizes, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    (bench / "checkpoint-2" / "training_args.json").write_text(json.dumps(trained))

    def kept(overrides):
        found = values_of_checkpoint(Project("one", overrides=overrides), str(bench / "checkpoint-2"))
        return {value.name: value.text for value in found}

    assert {"per_device_train_batch_size": "2", "gradient_accumulation_steps": "4"} == kept(given)
    assert {"per_device_train_batch_size": "2"} == kept(given[:2])


def test_the_batch_of_a_deepspeed_mapping_is_kept_by_smaller_rows(bench):
    project = Project("two", overrides=[("+trainer_args.deepspeed", "{train_batch_size: 8}")])
    arguments = trainer_arguments(project.graph)
    assert 8 == arguments.global_batch()
    sizes = list(batch_trial._batches(arguments, 2))
    assert {8} == {2 * one["per_device_train_batch_size"] * one["gradient_accumulation_steps"] for one in sizes[1:]}
    usual = trainer_arguments(Project("two").graph)
    assert (None, {"per_device_train_batch_size"}) == (
        usual.global_batch(),
        set(list(batch_trial._batches(usual, 2))[1]),
    )
