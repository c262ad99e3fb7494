"""The ways out of a config that is built: what is promised is what a plan of the changed config finds."""

import json

import pytest

from forgather.launch.planning import Device, fit_on, traced_plan
from forgather.launch.ways_out import Place, ways_out
from forgather.planner.hardware import Hardware
from forgather.project.project import Project
from tests.project.workbench import TINY_TRAINING, make_project

TINY = TINY_TRAINING.replace("train_batch_size: 2", "train_batch_size: 8")
ACCELERATED = TINY.replace("trainers/trainer", "trainers/accel_trainer")
PIPELINE = TINY.replace("trainers/trainer", "trainers/pipeline_trainer").replace("_layers: 1", "_layers: 3")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    files = {
        "rows.jsonl": rows,
        "templates/configs/tiny.yaml": TINY,
        "templates/configs/accelerated.yaml": ACCELERATED,
        "templates/configs/stages.yaml": PIPELINE,
        "templates/configs/evaluated.yaml": f"{TINY}    eval_strategy: epoch\n    per_device_eval_batch_size: 7\n",
        "templates/configs/whole.yaml": f"{TINY}    global_batch_size: 8\n",
    }
    folder = make_project(tmp_path / "bench", files)
    monkeypatch.chdir(folder)
    return folder


def found(config, limit, *, gpus=1, say=lambda line: None, **settings):
    overrides = [(f"+trainer_args.{name}", text) for name, text in settings.items()]
    project = Project(config, ".", trust=True, overrides=overrides)
    place = Place(device=box(limit), device_type="cpu", gpus=gpus, nodes=1)
    plan, _ = traced_plan(project, gpus=gpus, nodes=1)
    return ways_out(project, plan, place, say=say), plan


def box(limit):
    return Device(Hardware(name="box", title="box", kind="cpu", memory_bytes=limit))


def check_promises(config, ways, limit, *, gpus=1, **settings):
    """Asserts that a config with the changes of a way has the planned peak of the way, and fits or does not."""
    overrides = [(f"+trainer_args.{name}", text) for name, text in settings.items()]
    for way in ways:
        changed = Project(config, ".", trust=True, overrides=[*overrides, *way["assignments"]])
        plan, _ = traced_plan(changed, gpus=gpus, nodes=1)
        worst = max(fit_on(plan, box(limit))["ranks"], key=lambda rank: rank["most"])
        assert (way["peak_bytes"], way["verdict"]) == (worst["peak_bytes"], worst["verdict"]), way["title"]


def test_smaller_micro_batches_are_the_largest_that_fit(bench):
    said = []
    ways, plan = found("tiny", 300_000, say=said.append, gradient_checkpointing="true", bf16="true")
    first = ways[0]
    # Four rows are planned to fit; the update keeps its eight.
    assert ("smaller micro-batches (4 rows, 2 accumulated)", "fits") == (first["title"], first["verdict"])
    assert first["peak_bytes"] <= 300_000 < plan["ranks"][0]["phases"][0]["num_bytes"]
    assert not any(way["verdict"] == "fits" for way in ways[1:])
    refused = {way["title"]: way["reason"] for way in ways if way["reason"]}
    freed = "gradients freed in the backward pass, whose norm is not clipped"
    assert {"8-bit AdamW, which rounds its state", "Adafactor, another optimizer", freed} >= refused.keys()
    assert "planning a way out: smaller micro-batches" == said[0]
    check_promises("tiny", ways[:1], 300_000, gradient_checkpointing="true", bf16="true")


@pytest.mark.matrix
def test_where_the_evaluation_is_left_as_the_peak_its_rows_are_fewer_as_well(bench):
    said = []
    asked = {"gradient_checkpointing": "true", "bf16": "true"}
    ways, plan = found("evaluated", 110_000, say=said.append, **asked)
    assert ["training step", "evaluation"] == [phase["phase"] for phase in plan["ranks"][0]["phases"]]
    title = "smaller micro-batches, evaluation of one row at a time (1 row, 8 accumulated)"
    alone = next(way for way in ways if way["title"] == "smaller micro-batches (1 row, 8 accumulated)")
    assert ("does not fit", "evaluation") == (alone["verdict"], alone["phase"])
    assert (title, "fits") == (ways[0]["title"], ways[0]["verdict"])
    check_promises("evaluated", ways[:1], 110_000, **asked)
    # What is refused is not announced.
    refused = [way["title"] for way in ways if (way["reason"] or "").startswith("[")]
    assert not {f"planning a way out: {title}" for title in refused} & set(said)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("config", "gpus", "limit", "settings"),
    [
        ("tiny", 1, 100_500, {}),
        ("whole", 1, 300_000, {}),
        ("accelerated", 2, 300_000, {}),
        ("accelerated", 2, 300_000, {"fsdp": "shard_grad_op"}),
        ("stages", 2, 450_000, {}),
    ],
)
def test_each_way_out_is_as_large_as_planned(bench, config, gpus, limit, settings):
    ways, plan = found(config, limit, gpus=gpus, **settings)
    need = max(phase["num_bytes"] for rank in plan["ranks"] for phase in rank["phases"])
    usable = [way for way in ways if way["reason"] is None]
    assert len(usable) >= 2
    assert all(way["peak_bytes"] < need for way in usable)
    assert all((way["peak_bytes"] <= limit) == (way["verdict"] == "fits") for way in usable)
    fits = [way["verdict"] == "fits" for way in usable]
    assert fits == sorted(fits, reverse=True)
    check_promises(config, usable[:3], limit, gpus=gpus, **settings)


@pytest.mark.matrix
def test_where_nothing_fits_each_way_says_by_how_much(bench):
    ways, _ = found("tiny", 10_000)
    usable = [way for way in ways if way["reason"] is None]
    assert not any(way["verdict"] == "fits" for way in usable)
    over = [way["least"] - way["available"] for way in usable]
    assert over == sorted(over)
    assert over[0] > 0
    # Together they need less than each alone.
    assert "," in usable[0]["title"].partition(" (")[0]
    check_promises("tiny", usable[:3], 10_000)
