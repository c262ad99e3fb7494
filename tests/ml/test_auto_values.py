"""`auto` in place of a number: found before the run, recorded, kept by a resumed run, and the same in every process."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from forgather.cli.auto_start import auto_values_of_all
from forgather.cli.invocation import Invocation
from forgather.cli.main import main
from forgather.errors import ForgatherError, PlanError
from forgather.launch.auto_values import auto_settings, find_values, rows_of_update, values_of_checkpoint
from forgather.launch.planning import Device, rows_within, traced_plan
from forgather.launch.room import Room, room_of
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.peer import Peer
from forgather.planner.hardware import Hardware
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments
from tests.project.workbench import TINY_TRAINING, make_project

AUTO = TINY_TRAINING.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: auto")
SAVING = f"{AUTO}    save_strategy: steps\n    save_steps: 2\n"
LIMITED = SAVING.replace("[raw_dataset]", "[meta]\n    == super()\n    device_memory: 1.5MB\n[raw_dataset]")
PIPELINE = TINY_TRAINING.replace("trainers/trainer", "trainers/pipeline_trainer").replace("_layers: 1", "_layers: 3")
ACCELERATED = TINY_TRAINING.replace("trainers/trainer", "trainers/accel_trainer")
ENGINE = ACCELERATED.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: auto")
ROWS = "trainer_args.per_device_train_batch_size"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    files = {
        "rows.jsonl": rows,
        "templates/configs/limited.yaml": LIMITED,
        "templates/configs/unlimited.yaml": SAVING,
        "templates/configs/rate.yaml": f"{TINY_TRAINING}    learning_rate: auto\n",
        "templates/configs/wrong.yaml": LIMITED.replace("1.5MB", "much"),
        "templates/configs/mixed.yaml": f"{ACCELERATED}    accelerator_args: {{mixed_precision: auto}}\n",
        "templates/configs/zero.yaml": f"{ACCELERATED}    deepspeed: {{train_micro_batch_size_per_gpu: auto}}\n",
        "templates/configs/engine.yaml": f"{ENGINE}    deepspeed: {{train_batch_size: 12, zero_optimization: {{stage: 1, reduce_bucket_size: 1000}}}}\n",
        "templates/configs/stages.yaml": f"{PIPELINE}    split_spec: auto\n    pipeline_chunks: auto\n",
    }
    folder = make_project(tmp_path / "bench", files)
    monkeypatch.chdir(folder)
    return folder


def codes(config):
    return [found.code for found in check_project(Project(config, ".")).findings if found.severity == "error"]


def test_check_accepts_auto_where_it_is_found_and_nowhere_else(bench):
    assert [] == codes("limited") == codes("unlimited") == codes("stages")
    # DeepSpeed's own word keeps its meaning.
    assert ("per_device_train_batch_size",) == auto_settings(Project("limited", "."))
    assert () == auto_settings(Project("zero", "."))
    (found,) = check_project(Project("rate", ".")).findings
    assert ("FG813", "learning_rate is 'auto'") == (found.code, found.message)
    assert found.hint.endswith("nothing finds one for this setting")
    with pytest.raises(ForgatherError) as caught:
        Project("unlimited", ".", trust=True)("main")
    assert "FG813" == caught.value.code
    assert "only `fgcli train` finds one" in caught.value.hint


ROOM = Room(gpus=1, nodes=1, limits=(1_500_000,))


def with_update(rows, steps):
    changes = [("trainer_args.global_batch_size", str(rows)), ("trainer_args.gradient_accumulation_steps", steps)]
    return Project("limited", ".", trust=True, overrides=changes)


def recorded(folder):
    """Returns the number of rows in the record of each run, oldest first."""
    texts = [file.read_text() for file in sorted(Path(folder, "out", "runs").glob("*/overrides.yaml"))]
    return [int(found[1]) for text in texts for found in re.finditer(rf'path: "{ROWS}"\n  value: "(\d+)"', text)]


@pytest.mark.matrix
def test_the_largest_batch_is_printed_recorded_and_kept_by_a_resumed_run(bench, capsys):
    assert 1 == main(["-t", "unlimited", "train"])
    assert "device_memory: 22GB in meta, or --memory 22GB" in capsys.readouterr().err
    assert 1 == main(["-t", "wrong", "train"])
    assert "'device_memory' of target 'meta' is 'much'" in capsys.readouterr().err

    assert 0 == main(["-t", "limited", "train"])
    (rows,) = recorded(bench)
    assert rows > 1
    assert f"auto: per_device_train_batch_size is {rows} (" in capsys.readouterr().err
    project = Project("limited", ".", trust=True, overrides=[(ROWS, "1")])
    answer = rows_within(project, gpus=1, nodes=1, limit=1_500_000, device_type="cuda")
    assert answer["num_bytes"] <= 1_500_000 < answer["next_bytes"]
    assert 23 == rows == answer["size"]

    # With another memory, a run would get another number; a resumed one keeps its own.
    assert 0 == main(["-t", "limited", "train", "--resume", "--memory", "3MB", "--set", "trainer_args.max_steps=3"])
    assert "(as in checkpoint-2)" in capsys.readouterr().err
    assert [rows, rows] == recorded(bench)


@pytest.mark.matrix
def test_memory_is_the_limit_of_a_dry_run_and_is_refused_where_nothing_is_to_be_found(bench, capsys):
    assert 0 == main(["-t", "unlimited", "train", "--dry-run", "--memory", "1.5MB"])
    assert "auto: per_device_train_batch_size is 23 (" in capsys.readouterr().err
    for words in (["--dry-run"], ["--dry-run", "--json"], ["--print", "slurm"], []):
        assert 1 == main(
            ["-t", "mixed", "train", "--memory", "3MB", *words, "--set", "trainer_args.accelerator_args={}"]
        )
        assert "[FG948]: --memory is for values 'auto', and config 'mixed.yaml' has none" in capsys.readouterr().err


def test_where_no_row_fits_the_command_that_shows_why_is_named_and_works(bench, capsys):
    box = Hardware(name="box", title="box", kind="cpu", memory_bytes=2**20)
    room = Room(gpus=1, nodes=1, devices=(Device(box, held_bytes=2**20 - 2**14),))
    with pytest.raises(PlanError, match=r"1 row needs \S+ KiB of the \S+ KiB that .* leave of 1\.0 MiB") as caught:
        find_values(Project("unlimited", ".", trust=True), room)
    (command,) = re.findall("`fgcli (.*?)`", caught.value.hint)
    assert "FG948" == caught.value.code
    assert 0 == main(["-t", "unlimited", *command.split()])
    assert "peak" in capsys.readouterr().out


@pytest.mark.matrix
def test_the_rows_divide_the_global_batch(bench):
    # Of 23 rows that fit, 20 make an update of 40, in two micro-batches.
    (found,) = find_values(with_update(40, "null"), ROOM)
    assert ("20", "22 would fit; 2 micro-batches make an update of 40 rows") == (found.text, found.reason)
    # No number of rows makes it in one.
    with pytest.raises(PlanError, match="no number up to 23, which fits") as caught:
        rows_of_update(40, 1, 23, 1)
    assert "FG948" == caught.value.code


@pytest.mark.matrix
def test_the_rows_divide_the_batch_of_a_deepspeed_mapping(bench):
    project = Project("engine", ".", trust=True)
    (found,) = find_values(project, Room(gpus=2, nodes=1, limits=(10**7,)))
    assert ("6", "update of 12 rows") == (found.text, found.reason[-17:])
    planned = Project("engine", ".", trust=True, overrides=[(found.path, found.text)])
    plan, work = traced_plan(planned, gpus=2, nodes=1, device_type="cuda")
    assert (12, 6) == (work.rows_per_update, plan["settings"]["per_device_train_batch_size"])
    # A resumed run keeps the number of micro-batches that a trial has changed.
    Path("checkpoint-2").mkdir()
    trained = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    Path("checkpoint-2/training_args.json").write_text(json.dumps(trained))
    steps = [("trainer_args.gradient_accumulation_steps", "1"), ("+trainer_args.auto_find_batch_size", "true")]
    kept = values_of_checkpoint(Project("engine", ".", overrides=steps), "checkpoint-2")
    assert ["3", "2"] == [value.text for value in kept]


def test_meta_names_devices_and_an_option_replaces_them(bench):
    changes = [("meta.device_memory", "[1GB, 2GiB]"), ("+meta.hardware", "[a100, h100-sxm]")]
    room = room_of(Project("limited", ".", overrides=changes), gpus=2, nodes=1)
    assert ((10**9, 2**31), ["a100-80", "h100"]) == (room.limits, [one.hardware.name for one in room.devices])
    one = room_of(Project("limited", ".", overrides=changes), gpus=2, nodes=1, hardware="t4", memory=5)
    assert ((5,), ["t4"]) == (one.limits, [device.hardware.name for device in one.devices])
    # What is assumed on top of tensors is left free.
    (left,) = room_of(Project("unlimited", "."), gpus=1, nodes=1, hardware="t4").limits_of(
        trainer_arguments(Project("unlimited", ".").graph)
    )
    assert 0.65 < left / one.devices[0].hardware.memory_bytes < 0.95


def test_mixed_precision_is_the_type_of_all_devices(bench):
    assert [] == codes("mixed")
    project = Project("mixed", ".")
    for changes, dtype in (
        ("[h100-sxm]", "bf16"),
        ("[h100-sxm, t4]", "fp16"),
        ("null", '"no"'),
    ):
        room = room_of(Project("mixed", ".", overrides=[("+meta.hardware", changes)]), gpus=1, nodes=1)
        (found,) = find_values(project, room)
        assert ("trainer_args.accelerator_args.mixed_precision", dtype) == (found.path, found.text)
    (bench / "checkpoint-7").mkdir()
    (bench / "checkpoint-7" / "training_args.json").write_text('{"accelerator_args": {"mixed_precision": "fp16"}}')
    (kept,) = values_of_checkpoint(project, str(bench / "checkpoint-7"))
    assert ('"fp16"', "as in checkpoint-7") == (kept.text, kept.reason)
    with pytest.raises(ForgatherError) as caught:
        Project("mixed", ".", trust=True)("main")
    assert "only `fgcli train` finds one" in caught.value.hint


def test_one_process_finds_the_values_and_all_have_them(bench, capsys):
    store = HashStore()
    project = Project("stages", ".", trust=True)
    options = Namespace(hardware=None, memory=None)
    texts = []
    for rank in range(2):
        facts = ProcessFacts(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        project = Project("stages", ".", trust=True)
        member = Peer(facts, store, 5.0)
        auto_values_of_all(project, Invocation(options=options), output_dir=str(bench / "out"), member=member)
        texts.append(dict(project.overrides))
    assert texts[0] == texts[1]
    assert {"trainer_args.pipeline_chunks": "2", "trainer_args.split_spec": '{"model.layers.1": "end"}'} == texts[0]
    # Only rank 0 prints.
    assert 2 == capsys.readouterr().err.count("auto: ")
    assert not find_values(Project("rate", "."), Room(gpus=1, nodes=1))


def staged(rows, **settings):
    paths = {"pipeline_chunks": "2", "split_spec": "auto"} | settings
    changes = [(f"trainer_args.{name}", text) for name, text in paths.items()]
    return Project("stages", ".", trust=True, overrides=[*changes, (ROWS, rows)])


def test_the_rows_of_a_pipeline_need_a_number_of_micro_batches(bench):
    with pytest.raises(ForgatherError, match="pipeline_chunks is 'auto'") as caught:
        find_values(staged("auto", pipeline_chunks="auto"), Room(gpus=2, nodes=1, limits=(10**6,)))
    assert "FG997" == caught.value.code


@pytest.mark.matrix
def test_the_largest_batch_of_a_pipeline_fits_on_the_worst_rank_and_one_more_does_not(bench):
    limit = 700_000

    def peak(rows):
        plan, _ = traced_plan(staged(str(rows)), gpus=2, nodes=1, device_type="cuda")
        return [max(phase["num_bytes"] for phase in rank["phases"]) for rank in plan["ranks"]]

    found = rows_within(staged("4"), gpus=2, nodes=1, limit=limit, device_type="cuda")
    rows = found["size"]
    assert (2, 2, True) == (found["unit"], found["pipeline_chunks"], found["is_exact"])
    assert rows > 4
    assert rows % 2 == 0
    assert found["num_bytes"] == max(peak(rows)) <= limit < max(peak(rows + 2)) == found["next_bytes"]
    # The other rank would have room for more.
    assert min(peak(rows + 2)) <= limit
    assert len(found["traced"]) <= 3
    (value,) = [one for one in find_values(staged("auto"), Room(gpus=2, nodes=1, limits=(limit,))) if one.path == ROWS]
    assert str(rows) == value.text
