"""Pipelines in the search of `fgcli plan --find`: what is planned, written, checked and trained."""

import json
from dataclasses import replace

import pytest

from forgather.launch.choice_project import ChoiceProjects
from forgather.launch.finding import Found, Search, _Planner, _unverified
from forgather.launch.in_process import MAIN
from forgather.launch.planning import Device
from forgather.launch.written_choice import write_best
from forgather.ml.planner.memory import plan_run
from forgather.planner.fit import Verdict
from forgather.planner.foreign_configs import FORMS, foreign_text
from forgather.planner.hardware import Hardware
from forgather.planner.pipeline_choices import TITLES
from forgather.planner.ranking import Cell
from forgather.project.project import Project
from tests.project.workbench import TINY_TRAINING, fgcli, make_project

RATES = {"memory_bytes_per_second": 1e12, "peak_flops": {"fp32": 1e13}, "links": {"pcie": 1e10}}
BOX = Device(Hardware(name="box", title="our box", memory_bytes=2**33, **RATES))
ROWS = 8


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many rows"}) + "\n" for number in range(64))
    deep = TINY_TRAINING.replace("num_hidden_layers: 1", "num_hidden_layers: 12")
    few = TINY_TRAINING.replace("num_hidden_layers: 1", "num_hidden_layers: 4")
    files = {"rows.jsonl": rows, "templates/configs/deep.yaml": deep, "templates/configs/few.yaml": few}
    folder = make_project(tmp_path / "bench", files)
    monkeypatch.chdir(folder)
    return folder


def planned(config, *titles, device=BOX, state=None, said=None):
    """Returns the cells of some pipelines on two devices, and the choices by title."""
    search = Search(gpus=2, nodes=1, device=device, rows=ROWS, say=(lambda line: None) if said is None else said.append)
    with ChoiceProjects(Project(config), 2, 1) as projects:
        planner = _Planner(search, projects, ROWS, ())
        planner._state = state
        pipelines = planner.pipelines()
        cells = []
        for choice in pipelines.choices:
            if not titles or choice.title in titles:
                cells += pipelines.cells_of(choice, cells)
    return cells, {choice.title: choice for choice in pipelines.choices}


def written(cell, choices, name):
    found = Found(cells=(cell,), ranking=(cell,), choices=choices, rows=ROWS, traced=1)
    return write_best(Project("deep"), found, Search(gpus=2, nodes=1, device=BOX, rows=ROWS), name, "config")


def assert_plan_of_the_leaf_is_that_of_the_cell(name, cell):
    """Without bf16, and with tied weights: both differ from what `test_pipeline_plans.py` compares."""
    project = Project(name)
    plan, work = plan_run(
        lambda hook: project.build_with(hook, MAIN), world_size=2, local_world_size=2, device_type=BOX.type
    )
    own = max(phase["num_bytes"] for phase in plan["ranks"][0]["phases"])
    assert own == pytest.approx(sum(size for _, size in cell.largest), rel=0.001)
    assert ROWS == work.rows_per_update


ALTERNATING = "pipeline 2, 1F1B"


@pytest.mark.matrix
def test_a_pipeline_is_planned_written_and_checked(bench):
    plain, again = f"{ALTERNATING} without recomputation", f"{ALTERNATING}, recomputed"
    said = []
    cells, choices = planned("deep", plain, again, said=said)
    # One trace of stages serves all cells; recomputation could only make them slower.
    assert 1 == len(said), said
    assert [(plain, 8), (plain, 2), (again, 8), (again, 2)] == [
        (cell.title, cell.settings["pipeline_chunks"]) for cell in cells
    ]
    assert ["fits", "fits"] == [str(cell.verdict) for cell in cells[:2]]
    assert {"the pipeline fits without it, which is faster"} == {cell.reason for cell in cells[2:]}
    # More micro-batches of a run wait for a smaller part of it, and keep more.
    assert cells[0].tokens_per_second.high > cells[1].tokens_per_second.high
    assert cells[0].least > cells[1].least
    # A pipeline is never marked as traced at its own size, and never traced again.
    assert not any(cell.is_verified for cell in cells)
    assert [] == _unverified(cells)
    file, _ = written(cells[0], choices, "staged")
    checked = fgcli("-t", "staged", "check", "--strict", cwd=bench)
    assert 0 == checked.returncode, checked.stdout
    assert_plan_of_the_leaf_is_that_of_the_cell("staged", cells[0])
    given = {"bf16": None, "fp16": None, "max_grad_norm": 1.0}
    for form in FORMS:
        sizes = (cells[0].rows, cells[0].micro_batches)
        assert foreign_text(form, cells[0].settings, *sizes, gpus=2, nodes=1, given=given) is None


def test_what_cannot_fit_by_its_state_or_is_refused_is_not_traced(bench):
    small = Device(Hardware(name="small", title="a small box", memory_bytes=2**31, **RATES))
    gib = 2**30
    said = []
    cells, _ = planned("deep", device=small, state=(4 * gib, 4 * gib, 8 * gib), said=said)
    assert [] == said
    assert {(Verdict.TOO_LARGE, True)} == {(cell.verdict, cell.is_bound) for cell in cells}
    # Half of the state, and what a device needs besides.
    assert all(cell.least >= 8 * gib for cell in cells)
    fp16 = Project("deep", overrides=[("+trainer_args.fp16", "true")])
    with ChoiceProjects(fp16, 2, 1) as projects:
        pipelines = _Planner(Search(gpus=2, nodes=1, device=BOX, rows=ROWS), projects, ROWS, ()).pipelines()
        refused = pipelines.cells_of(pipelines.choices[0], [])
    assert all("fp16 with a pipeline" in cell.reason for cell in refused)
    odd = Search(gpus=2, nodes=1, device=BOX, rows=1)
    with ChoiceProjects(Project("deep"), 2, 1) as projects:
        pipelines = _Planner(odd, projects, 1, ()).pipelines()
        (cell,) = pipelines.cells_of(pipelines.choices[0], [])
    assert "1 rows of an update are no number of micro-batches" in cell.reason


@pytest.mark.matrix
def test_of_a_model_with_few_blocks_only_1f1b_is_traced(bench):
    said = []
    titles = [f"pipeline 2, {name} without recomputation" for name in ("1F1B", "ZBV")]
    (first, *_, second), _ = planned("few", *titles, said=said)
    assert (titles[0], True, None) == (first.title, first.is_verified, first.reason)
    assert "the model has fewer than 10 blocks" in second.reason
    # The trace of a family that fails is not tried again.
    assert 1 == sum("planning stages" in line and "one part" in line for line in said)


@pytest.mark.matrix
def test_each_pipeline_that_is_written_is_checked_and_trains_two_steps(bench, record_property):
    cells, choices = planned("deep")
    # The same choices with recomputation, which was not planned because all fit without.
    ways: dict[str, Cell] = {}
    for cell in cells:
        ways.setdefault(cell.title, cell)
    assert 2 * len(TITLES) == len(ways)
    for number, cell in enumerate(ways.values()):
        name = f"way_{number}"
        file, _ = written(replace(cell, reason=None), choices, name)
        checked = fgcli("-t", name, "check", "--strict", cwd=bench)
        assert 0 == checked.returncode, (cell.title, checked.stdout)
        if cell.reason is None:
            assert_plan_of_the_leaf_is_that_of_the_cell(name, cell)
        trained = fgcli("-t", name, "train", cwd=bench)
        assert 0 == trained.returncode, (cell.title, trained.stderr[-2000:])
    record_property("figure: configs", len(ways))
