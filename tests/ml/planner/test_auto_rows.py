"""The rows that `auto` finds fit by the plan of the run that has them, in all kinds of run."""

import json
import random

import pytest

from forgather.errors import PlanError
from forgather.launch.auto_values import find_values
from forgather.launch.planning import Device, fit_on, traced_plan
from forgather.launch.room import Room
from forgather.planner.hardware import Hardware
from forgather.project.project import Project
from tests.project.workbench import COLLATOR_OF_TOYS, TINY_TRAINING, make_project

ROWS = "trainer_args.per_device_train_batch_size"
SAVES = "    save_strategy: steps\n    save_steps: 2\n"
EVALUATES = "    eval_strategy: steps\n    eval_steps: 1\n"


def config(trainer="trainer", layers=1, settings=""):
    text = TINY_TRAINING.replace("trainers/trainer", f"trainers/{trainer}").replace("_layers: 1", f"_layers: {layers}")
    return text.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: auto") + settings


KINDS = {
    "saving": (config(settings=SAVES + EVALUATES), 1, 1),
    "accumulated": (config(settings="    gradient_accumulation_steps: 3\n"), 1, 1),
    "global": (config(settings="    global_batch_size: 48\n"), 1, 1),
    "recomputed": (config(layers=7, settings="    gradient_checkpointing: true\n"), 1, 1),
    "replicated": (config("accel_trainer", settings=SAVES), 2, 1),
    "sharded": (config("accel_trainer", 2, SAVES + "    fsdp: full_shard\n"), 2, 1),
    "hybrid": (config("accel_trainer", 2, SAVES + "    fsdp: hybrid_shard\n"), 2, 2),
    "tensor": (config("accel_trainer", 2, SAVES + "    tensor_parallel_size: 2\n"), 2, 2),
    "staged": (config("pipeline_trainer", 3, "    pipeline_chunks: 2\n"), 2, 1),
}
QUICK = ["saving"]
# Batches of more than two rows are longer than those that the search traces.
TOY = """\
import torch

class Growing:
    def __init__(self, collator):
        self.collator = collator

    def __call__(self, items):
        batch = self.collator(items)
        return {name: torch.cat([one, one[:, :2]], 1) for name, one in batch.items()} if len(items) > 2 else batch
"""
GROWING = COLLATOR_OF_TOYS.format(name="Growing")


def peak(plan):
    return max(phase["num_bytes"] for rank in plan["ranks"] for phase in rank["phases"])


@pytest.fixture
def bench(tmp_path, monkeypatch):
    # Blocks of one document come first: models compute a mask only for those of several.
    words = "".join(json.dumps({"text": f"a long row {number} " * 20}) + "\n" for number in range(20))
    short = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(100))
    files = {f"templates/configs/{name}.yaml": text for name, (text, *_) in KINDS.items()}
    files |= {"templates/configs/growing.yaml": config() + GROWING, "toy.py": TOY}
    folder = make_project(tmp_path / "bench", {"rows.jsonl": words + short, **files})
    monkeypatch.chdir(folder)
    return folder


def planned(name, cluster, *changes):
    return traced_plan(Project(name, ".", trust=True, overrides=[*changes]), **cluster, device_type="cuda")[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.matrix, id=one) for one in KINDS]
)
def test_the_rows_fit_by_the_plan_of_the_run(bench, name):
    _, gpus, nodes = KINDS[name]
    cluster = {"gpus": gpus, "nodes": nodes}
    free = [("trainer_args.global_batch_size", "null")] if name == "global" else []
    low, high = (peak(planned(name, cluster, *free, (ROWS, rows))) for rows in ("2", "24"))
    drawn = random.Random(name)
    # Of a device, much of the memory is for what no trace sees.
    held = {"saving": 1.6, "replicated": 2.1}.get(name, 3.1) * 2**30
    limits = [low, drawn.randint(low, high), 2 * high][: 1 if name in QUICK else 3]
    rooms = [Room(**cluster, limits=(limit,)) for limit in limits]
    device = Hardware(name="small", title="a small device", memory_bytes=int(held + 20 * high))
    rooms += [Room(**cluster, devices=(Device(device),))]
    for room in rooms:
        (value,) = find_values(Project(name, ".", trust=True), room)
        plan = planned(name, cluster, (ROWS, value.text))
        if room.limits:
            assert peak(plan) <= room.limits[0]
        else:
            assert {"fits"} == {rank["verdict"] for rank in fit_on(plan, room.devices[0])["ranks"]}


def test_the_data_bounds_the_rows(bench):
    (value,) = find_values(Project("saving", ".", trust=True), Room(gpus=1, nodes=1, limits=(10**12,)))
    plan = planned("saving", {"gpus": 1, "nodes": 1}, (ROWS, value.text))
    assert str(plan["most_rows"]) == value.text
    assert value.reason.endswith(f"; the data has no more than {value.text} for each replica")


@pytest.mark.matrix
def test_rows_that_need_more_than_was_traced_are_bisected_and_said(bench):
    lines = []
    (value,) = find_values(
        Project("growing", ".", trust=True), Room(gpus=1, nodes=1, limits=(5 * 10**6,)), lines.append
    )
    assert ("70", "4.8 MiB of 4.8 MiB") == (value.text, value.reason)
    first, *others = [int(line.split()[1]) for line in lines]
    assert {70, 71} < {first, *others}
    assert (78, True) == (first, len(others) <= first.bit_length())
    # Of the rows that make an update, 24 do not fit.
    project = Project("growing", ".", trust=True, overrides=[("trainer_args.global_batch_size", "48")])
    lines.clear()
    (value,) = find_values(project, Room(gpus=1, nodes=1, limits=(1_590_000,)), lines.append)
    assert ("16", "16 would fit; 3 micro-batches make an update of 48 rows") == (value.text, value.reason)
    assert {24, 16} < {int(line.split()[1]) for line in lines} <= {24, 16, 12, 8, 6, 4, 3, 2, 1}
    with pytest.raises(PlanError, match="1 row needs"):
        find_values(Project("growing", ".", trust=True), Room(gpus=1, nodes=1, limits=(1000,)), lines.append)
