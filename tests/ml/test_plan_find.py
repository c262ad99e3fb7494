"""`fgcli plan --find` on a config that is built: what is ranked, written, checked and trained."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.cli.plan_find import _lines as plan_find_lines
from forgather.errors import PlanError
from forgather.launch.choice_project import ChoiceProjects
from forgather.launch.finding import VERIFIED, Found, Search, find
from forgather.launch.planning import Device, traced_plan
from forgather.launch.written_choice import refuse_writing, write_best
from forgather.ml.planner import rank_trace
from forgather.ml.planner.planned_batches import planned_batches
from forgather.planner.choices import choices
from forgather.planner.hardware import Hardware
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.targets import run_meta
from forgather.project.trainer_arguments import trainer_arguments
from tests.ml.large_search import counted
from tests.project.workbench import COLLATOR_OF_TOYS, TINY_TRAINING, fgcli, make_project

RATES = {"memory_bytes_per_second": 1e12, "peak_flops": {"fp32": 1e13}, "links": {"pcie": 1e10}}
BOX = Device(Hardware(name="box", title="our box", memory_bytes=2**33, **RATES))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many rows"}) + "\n" for number in range(64))
    other = "-- extends 'trainers/hf_trainer.yaml'\n[config_metadata]\n    -- set ns.config_name = \"other\"\n    == super()\n"
    files = {"rows.jsonl": rows, "templates/configs/tiny.yaml": TINY_TRAINING, "templates/configs/other.yaml": other}
    several = TINY_TRAINING.replace("trainers/trainer.yaml", "trainers/accel_trainer.yaml")
    folder = make_project(tmp_path / "bench", {**files, "templates/configs/several.yaml": several})
    box = {"memory_mib": 8192, "memory_gb_per_second": 1000, "dense_tflops": {"fp32": 10}}
    (folder / "box.json").write_text(json.dumps(box))
    monkeypatch.chdir(folder)
    return folder


def test_the_best_way_is_found_written_and_passes_the_check(bench, capsys):
    assert 0 == main(["-t", "tiny", "plan", "--find", "--hardware", "box.json", "--write", "best", "--json"])
    found = json.loads(capsys.readouterr().out)
    # Two rows of an update: two divisions, each with and without recomputation.
    # Offload is not planned where all fits without.
    assert (2, 8, 2) == (found["rows_per_update"], found["num_cells"], found["num_traced_choices"])
    ranking = found["ranking"]
    assert {"the model fits without it, which is faster"} == {cell["reason"] for cell in found["rejected"]}
    assert [True] * 4 == [cell["is_verified"] for cell in ranking]
    best = ranking[0]
    assert ("one process without recomputation", 2, 1) == (best["title"], best["rows"], best["micro_batches"])
    speeds = [sum(cell["tokens_per_second"].values()) for cell in ranking]
    assert speeds == sorted(speeds, reverse=True)
    assert (best["title"], {}) == (found["written"]["title"], found["written"]["missing_settings"])

    written = bench / "templates/configs/best.yaml"
    assert "-- extends 'configs/tiny.yaml'" in written.read_text()
    assert 0 == main(["-t", "best", "check"])
    # A config that extends it can have a name, and with it a folder, of its own.
    mine = "-- extends 'configs/best.yaml'\n[config_metadata]\n    == super()\n    -- set ns.config_name = \"Mine\"\n"
    (bench / "templates/configs/mine.yaml").write_text(mine)
    assert "Mine" == run_meta(Project("mine").graph).name
    capsys.readouterr()
    assert 1 == main(["-t", "tiny", "plan", "--find", "--hardware", "box.json", "--write", "best"])
    assert "error[FG993]: 'best' exists already" in capsys.readouterr().err


@pytest.mark.matrix
def test_ways_that_divide_the_positions_of_rows_stay_among_themselves(bench):
    overrides = [("+trainer_args.context_parallel_size", "2")]
    project = Project("several", trust=True, overrides=overrides)
    found = find(project, Search(gpus=2, nodes=1, device=BOX, rows=2, by="memory"))
    ends = (", recomputed", " without recomputation")
    ways = ("DDP, rows over 2", "FSDP2, rows over 2", "FSDP2, not resharded, rows over 2")
    offloaded = [f"{one}, offloaded" for one in ways[1:]]
    assert {f"{one}{end}" for one in (*ways, *offloaded) for end in ends} == {cell.title for cell in found.cells}
    assert [] == [cell for cell in found.cells if cell.reason]
    # Two ranks read the same rows: one replica has both rows of the update.
    assert {(1, 2), (2, 1)} == {(cell.rows, cell.micro_batches) for cell in found.ranking}
    assert {2} == {cell.settings["context_parallel_size"] for cell in found.cells}
    search = Search(gpus=2, nodes=1, device=BOX, rows=2)
    with pytest.raises(PlanError, match="FG993"):
        write_best(project, found, search, "x.json", "accelerate")
    _, best = write_best(project, found, search, "divided", "config")
    planned, _ = traced_plan(Project("divided", trust=True), gpus=2, nodes=1, device_type="cuda")
    assert (True, 2) == (best.is_verified, planned["mesh"]["context"]), planned["mesh"]
    assert max(phase["num_bytes"] for phase in planned["ranks"][0]["phases"]) == sum(size for _, size in best.largest)


def test_ctrl_c_leaves_the_ranking_of_what_was_planned(bench, capsys, monkeypatch):
    planned = []

    def say(line):
        planned.append(line)
        if "(2 of 6)" in line:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("forgather.cli.plan_find.print_note", say)
    words = ["-t", "tiny", "plan", "--find", "--hardware", "box.json", "--write", "best", "--json"]
    assert 130 == main(words)
    found = json.loads(capsys.readouterr().out)
    assert (False, None) == (found["is_complete"], found["written"])
    assert ["one process, recomputed"] == sorted({cell["title"] for cell in found["ranking"]})
    assert not (bench / "templates/configs/best.yaml").exists()
    assert planned[-1].startswith("interrupted: the ranking is that of the ways")


def test_a_leaf_switches_the_trainer_of_a_config(bench):
    with ChoiceProjects(Project("tiny"), 2) as projects:
        found = {one.title: one for one in choices(2, 1, projects.given)}
        assert 4 == projects.rows_per_update()
        for title, constructor, settings in (
            ("FSDP2, recomputed", "forgather.ml:AccelTrainer", {"fsdp": "full_shard", "gradient_checkpointing": True}),
            ("DDP without recomputation", "forgather.ml:AccelTrainer", {"per_device_train_batch_size": 1}),
        ):
            opened = projects.open(found[title], (1, 1))
            assert projects.refusal(opened, found[title]) is None
            main_call = opened.graph.targets["main"].value
            assert constructor == main_call.constructor
            arguments = {entry.key: entry.value for entry in main_call.kwargs}["args"]
            assert "forgather.ml:AccelTrainingArguments" == arguments.constructor
            values = {entry.key: getattr(entry.value, "value", None) for entry in arguments.kwargs}
            assert settings.items() <= values.items()
        fp16 = Project("tiny", overrides=[("+trainer_args.fp16", "true")])
    with ChoiceProjects(fp16, 2) as projects:
        choice = found["tensor 2, recomputed"]
        assert "FG770" in (projects.refusal(projects.open(choice, (1, 2)), choice) or "")


OWN_ZERO = {
    "# note": "of ours: a, b",
    "gradient_clipping": 1.0,
    "fp16": {"enabled": "auto", "loss_scale": 128},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-05, "betas": [0.9, 0.95], "eps": 1e-08}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 12345, "overlap_comm": False, "cpu_offload": True},
}


@pytest.mark.parametrize("form", ["mapping", "file"])
def test_a_leaf_of_zero_keeps_the_settings_that_no_choice_decides(bench, form):
    (bench / "zero.json").write_text(json.dumps(OWN_ZERO))
    given = "zero.json" if form == "file" else json.dumps(OWN_ZERO)
    project = Project("tiny", overrides=[("+trainer_args.deepspeed", given)])
    with ChoiceProjects(project, 2) as projects:
        found = {one.title: one for one in choices(2, 1, projects.given)}
        for stage in (1, 2, 3):
            opened = projects.open(found[f"ZeRO {stage}, recomputed"], (1, 1))
            written = plain_value(trainer_arguments(opened.graph).get("deepspeed"), "deepspeed")
            zero = {"stage": stage, "reduce_bucket_size": 12345, "overlap_comm": False}
            assert {**OWN_ZERO, "zero_optimization": zero} == written


@pytest.mark.parametrize("name", ["deepspeed", "fsdp_config"])
def test_settings_that_are_computed_cannot_be_kept_and_are_refused(bench, name):
    project = Project("tiny", overrides=[(f"+trainer_args.{name}", "!call:builtins:dict [[[a, 1]]]")])
    with ChoiceProjects(project, 2) as projects, pytest.raises(PlanError, match=f"{name} is computed") as caught:
        projects.rows_per_update()
    assert "FG993" == caught.value.code


@pytest.mark.matrix
def test_ways_with_and_without_recomputation_share_a_trainer(bench, monkeypatch):
    built = []
    monkeypatch.setattr(rank_trace, "planned_batches", counted(planned_batches, built))
    found = find(Project("tiny"), Search(gpus=1, nodes=1, device=BOX, rows=4))
    # Three divisions of an update, in two ways: one trainer for all of them, and one for each way in the first places.
    assert (6, 2) == (len(found.ranking), found.traced)
    verified = {cell.title for cell in found.ranking if cell.is_verified}
    assert len(built) == 1 + len(verified) == 3


def test_a_trainer_is_shared_only_where_nothing_but_recomputation_differs(bench):
    from forgather.planner.choices import choices

    with ChoiceProjects(Project("tiny"), 2) as projects:
        found = {one.title: one for one in choices(2, 1, projects.given)}
        recomputed = found["FSDP2, recomputed"]
        assert recomputed.without_recomputation(found.values()) is found["FSDP2 without recomputation"]
        assert found["FSDP2 without recomputation"].without_recomputation(found.values()) is None
        assert recomputed.without_recomputation([found["DDP without recomputation"]]) is None
        opened = projects.open(recomputed, (1, 2))
        for title, batch, is_shared in (
            ("FSDP2 without recomputation", (1, 2), True),
            ("FSDP2 without recomputation", (2, 1), False),
            ("DDP without recomputation", (1, 2), False),
        ):
            assert is_shared == projects.differ_in_recomputation_only(opened, projects.open(found[title], batch))


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("+trainer_args.deepspeed", "{train_batch_size: 6, zero_optimization: {stage: 1}}", 6),
        ("trainer_args.global_batch_size", "12", 12),
        ("trainer_args.gradient_accumulation_steps", "3", 3 * 2 * 2),
        ("trainer_args.global_batch_size", "!call:builtins:int ['12']", "global_batch_size is computed"),
        ("trainer_args.per_device_train_batch_size", "auto", "per_device_train_batch_size is auto"),
        ("main.args", "{a: 1}", "its args are no call"),
    ],
)
def test_the_rows_of_an_update_follow_from_the_config(bench, name, text, rows):
    with ChoiceProjects(Project("tiny", overrides=[(name, text)]), 2) as projects:
        if isinstance(rows, int):
            assert rows == projects.rows_per_update()
        else:
            with pytest.raises(PlanError, match=rows) as caught:
                projects.rows_per_update()
            assert "FG993" == caught.value.code


def test_what_a_file_of_another_tool_cannot_say_is_printed():
    found = Found(cells=(), ranking=(), choices={}, rows=2, traced=0)
    written = {"file": "a.json", "title": "ZeRO 3, recomputed", "rows": 2}
    missing = {"gradient_checkpointing": True}
    search = Search(gpus=1, nodes=1, device=BOX)
    lines = plan_find_lines(found, search, {**written, "missing_settings": missing})
    assert "such a file has no words for gradient_checkpointing true: set that" in lines[-1]
    assert plan_find_lines(found, search, {**written, "missing_settings": {}})[-1].startswith("written: a.json")


FAILING = """\
import os

class Limited:
    def __init__(self, collator):
        self.collator = collator

    def __call__(self, items):
        if "FAILS" in os.environ:
            raise ValueError("not with all blocks")
        return self.collator(items)
"""
LIMITED = COLLATOR_OF_TOYS.format(name="Limited")


@pytest.mark.matrix
def test_a_way_that_fails_when_it_is_verified_is_rejected_with_its_reason(bench, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", f"{bench}/")
    (bench / "toy.py").write_text(FAILING)
    (bench / "templates/configs/toy.yaml").write_text(f"{TINY_TRAINING}{LIMITED}")

    def say(line):
        if line.startswith("verifying"):
            monkeypatch.setenv("FAILS", "1")

    with pytest.raises(PlanError) as caught:
        find(Project("toy"), Search(gpus=1, nodes=1, device=BOX, rows=2, say=say))
    assert "ValueError: not with all blocks" in caught.value.hint


@pytest.mark.matrix
def test_a_fault_of_the_planner_itself_rejects_no_way(bench):
    stages = []

    class Price(float):
        def __rmul__(self, other):
            if stages[-1].startswith("verifying"):
                raise ZeroDivisionError("not of the model")
            return other * float(self)

    with pytest.raises(ZeroDivisionError, match="not of the model"):
        find(Project("tiny"), Search(gpus=1, nodes=1, device=BOX, rows=1, price=Price(2), say=stages.append))


PIPELINE = """-- extends 'trainers/pipeline_trainer.yaml'

[trainer_args]
    == super()
    output_dir: out
    max_steps: 2
    schedule_class: Schedule1F1B
    pipeline_chunks: 2
    checkpoint_sequential: true
"""


def test_a_leaf_undoes_a_pipeline_and_keeps_values_that_are_set(bench):
    from forgather.ml import AccelTrainingArguments

    (bench / "templates/configs/staged.yaml").write_text(PIPELINE)
    project = Project("staged", overrides=[("trainer_args.max_steps", "7"), ("trainer_args.pipeline_chunks", "4")])
    for gpus, title in ((2, "FSDP2, recomputed"), (1, "one process without recomputation")):
        with ChoiceProjects(project, gpus) as projects:
            choice = {one.title: one for one in choices(gpus, 1, projects.given)}[title]
            assert projects.refusal(projects.open(choice, (1, 1)), choice) is None
            lines = projects.text(choice, (1, 1), name="leaf").splitlines()
            assert {"    max_steps: 7", "    schedule_class: ~", "    pipeline_chunks: ~"} <= set(lines)
    assert AccelTrainingArguments(schedule_class=None)
    with pytest.raises(ValueError, match="no setting 'schedule_class'"):
        AccelTrainingArguments(schedule_class="ScheduleGPipe")


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("other", ["--hardware", "box.json"], "whose strategies are not searched"),
        ("tiny", ["--hardware", "box.json", "--global-batch", "0"], "--global-batch is 0"),
        (
            "tiny",
            ["--hardware", "box.json", "--write", "../elsewhere.yaml"],
            "not in the folder of the project's configs",
        ),
        (
            "tiny",
            ["--hardware", "box.json", "--write", "no/x.json", "--write-as", "deepspeed"],
            "there is no folder 'no'",
        ),
        ("tiny", [], "--find needs a device"),
        (
            "tiny",
            ["--hardware", "box.json", "--write", "b", "--set", "model_config.hidden_size=8"],
            "would not be part of 'b'",
        ),
        (
            "tiny",
            ["--hardware", "box.json", "--set", "trainer_args.accumulate_grad_batches={0: 2}"],
            "changes the rows of an update",
        ),
        (
            "several",
            ["--hardware", "box.json", "--gpus", "3", "--set", "+trainer_args.context_parallel_size=2"],
            "context_parallel_size is 2, and 3 devices cannot be divided by it",
        ),
    ],
)
def test_what_cannot_be_searched_or_written_is_refused(bench, config, options, words, capsys):
    assert 1 == main(["-t", config, "plan", "--find", *options])
    told = capsys.readouterr().err
    assert "error[FG993]" in told
    assert words in told


SHARDED = ("FSDP2", "FSDP2, offloaded", "FSDP2, not resharded", "FSDP2, not resharded, offloaded")
ZERO_OFFLOADED = ("ZeRO 2, optimizer offloaded", "ZeRO 3, optimizer offloaded", "ZeRO 3, offloaded")
TRAINED = ("DDP", *SHARDED, "tensor 2", "ZeRO 1", "ZeRO 2", "ZeRO 3", *ZERO_OFFLOADED)


@pytest.mark.matrix
def test_each_way_that_is_written_is_checked_and_trains_two_steps(bench, record_property):
    project = Project("tiny")
    search = Search(gpus=2, nodes=1, device=BOX, rows=4)
    found = find(project, search)
    titles = {f"{one}{end}" for one in TRAINED for end in (", recomputed", " without recomputation")}
    assert titles == {cell.title for cell in found.ranking}, [cell for cell in found.cells if cell.reason]
    # Of an offloaded way, one size of micro-batches is trained.
    first = {cell.title: cell.rows for cell in reversed(found.ranking)}
    ways = [cell for cell in found.ranking if not cell.host_bytes or first[cell.title] == cell.rows]
    for number, cell in enumerate(ways):
        name = f"way_{number}"
        only = type(found)(cells=(cell,), ranking=(cell,), choices=found.choices, rows=found.rows, traced=1)
        file, _ = write_best(project, only, search, name, "config")
        checked = fgcli("-t", name, "check", "--strict", cwd=bench)
        assert 0 == checked.returncode, (cell.title, checked.stdout)
        trained = fgcli("-t", name, "train", cwd=bench)
        assert 0 == trained.returncode, (cell.title, trained.stderr[-2000:])
        assert (bench / "out").is_dir()
    record_property("figure: configs", len(ways))


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["tokens", "memory"])
def test_what_fits_only_by_offload_is_found_and_written(bench, by):
    """The limit is between what the smallest way needs with and without offload, on one device: no way shares weights."""
    project = Project("tiny", overrides=[("model_config.hidden_size", "64"), ("model_config.intermediate_size", "256")])
    whole = find(project, Search(gpus=1, nodes=1, device=BOX, rows=2, by="memory"))
    host = [cell for cell in whole.ranking if cell.host_bytes]
    least = min(cell.most for cell in whole.ranking if not cell.host_bytes)
    limit = (least + min(cell.most for cell in host)) // 2
    assert min(cell.most for cell in host) < limit < least
    small = Device(Hardware(name="box", title="our box", memory_bytes=limit, **RATES))
    search = Search(gpus=1, nodes=1, device=small, rows=2, by=by)
    found = find(project, search)
    best = found.ranking[0]
    assert best.host_bytes > 0
    assert best.is_verified
    assert all(cell.host_bytes for cell in found.ranking if cell.verdict == "fits")
    file, cell = write_best(Project("tiny"), found, search, "offloaded", "config")
    assert cell is best
    assert "offload" in Path(file).read_text()
    assert 0 == main(["-t", "offloaded", "check", "--strict"])
    if by == "tokens":
        assert 0 == main(["-t", "offloaded", "train"])


@pytest.mark.matrix
def test_micro_batches_that_are_larger_than_the_data_are_rejected(bench):
    found = find(Project("tiny"), Search(gpus=1, nodes=1, device=BOX, rows=256))
    rejected = [cell for cell in found.cells if cell.reason and "offloaded" not in cell.title]
    assert {64, 128, 256} == {cell.rows for cell in rejected}
    assert all(cell.reason.startswith("[FG804]") and cell.reason.count("[FG804]") == 1 for cell in rejected)
    assert {1, 2, 4, 8, 16, 32} == {cell.rows for cell in found.ranking}
    assert [number < VERIFIED for number in range(12)] == [cell.is_verified for cell in found.ranking]


@pytest.mark.matrix
def test_a_ranking_of_a_large_model_shares_its_traces(bench, record_property):
    done = subprocess.run(
        [sys.executable, "-m", "tests.ml.large_search", str(bench), "8", "512"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("figure: cells", found["cells"])
    record_property("figure: CPU seconds", f"{found['seconds']:.0f}")
    record_property("figure: trainers", found["trainers"])
    record_property("figure: traced steps", found["steps"])
    assert found["cells"] >= 100
    verified = [title for title, is_verified in found["ranking"] if is_verified]
    # Two families of pipelines, of each of which two ranks are traced once. Two depths for each other way, which ways with
    # and without recomputation share, except for those of ZeRO 3; and one for each way among the first five.
    ways, of_pipelines = found["traced"] - 2, 4
    assert found["trainers"] == 2 * (ways // 2 + 1) + len(set(verified)) + of_pipelines
    # Three sizes for each way and depth.
    assert found["steps"] == 3 * 2 * ways + len(verified) + of_pipelines
    # Not one trace for each cell, and those of the first five in full.
    assert found["traced"] <= found["cells"] / 5
    assert [True] * VERIFIED == [is_verified for _, is_verified in found["ranking"][:VERIFIED]]


@pytest.mark.matrix
def test_other_tools_read_what_is_written_for_them(bench):
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments

    project = Project("tiny")
    search = Search(gpus=2, nodes=1, device=BOX, rows=4)
    found = find(project, search)
    write_best(project, found, search, "zero.json", "deepspeed")
    deepspeed = json.loads((bench / "zero.json").read_text())
    assert 4 == deepspeed["train_batch_size"]
    write_best(project, found, search, "accelerate.yaml", "accelerate")
    assert 2 == load_config_from_file(str(bench / "accelerate.yaml")).num_processes
    write_best(project, found, search, "arguments.json", "arguments")
    arguments = TrainingArguments(output_dir="out", use_cpu=True, **json.loads((bench / "arguments.json").read_text()))
    assert 4 == 2 * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    with pytest.raises(PlanError, match="exists already"):
        refuse_writing(project, "zero.json", "deepspeed")
