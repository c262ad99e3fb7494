"""`fgcli plan --hardware` and the note of an out-of-memory error, on configs that are built."""

import contextlib
import json
import re
import shlex

import pytest

from forgather.cli.dry_run_output import machines_of
from forgather.cli.main import main
from forgather.cli.plan_time_output import device_count_lines, time_lines
from forgather.errors import ProjectError
from forgather.launch.process_request import ProcessRequest
from forgather.planner.fit import lacks_memory
from forgather.planner.hardware import hardware
from tests.matrix import thinned
from tests.project.workbench import TINY_TRAINING, make_project

PASSES = ["forward", "backward", "update", "evaluation"]
OUT_OF_MEMORY = """\
import torch
from transformers import TrainerCallback

class Trainer:
    class args:
        output_dir = "out"

    def train(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

class TooLarge(TrainerCallback):
    def on_step_begin(self, args, state, control, **arguments):
        Trainer().train()
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    files = {
        "toy.py": OUT_OF_MEMORY,
        "rows.jsonl": rows,
        "templates/configs/tiny.yaml": f"{TINY_TRAINING}    save_strategy: steps\n    save_steps: 2\n    eval_strategy: epoch\n",
    }
    files["templates/configs/large.yaml"] = "main: !singleton:toy.py:Trainer\n"
    folder = make_project(tmp_path / "bench", files)
    (folder / "box.json").write_text('{"title": "our box", "memory_mib": 1}')
    rates = {"memory_gb_per_second": 1, "dense_tflops": {"fp32": 0.01}, "links_gb_per_second": {"network": 1}}
    (folder / "fast.json").write_text(json.dumps({"memory_mib": 4096, **rates}))
    (folder / "small.json").write_text(json.dumps({"memory_mib": 1, **rates}))
    monkeypatch.chdir(folder)
    return folder


def test_a_plan_says_whether_the_run_fits(bench, capsys):
    assert 1 == main(["-t", "tiny", "plan", "--hardware", "box.json", "--no-ways-out", "--json"])
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["fit"]["ranks"]
    assert (2**20, "does not fit") == (rank["memory_bytes"], rank["verdict"])
    assert rank["peak_bytes"] == max(phase["num_bytes"] for phase in found["ranks"][0]["phases"])
    (planned,) = found["ranks"]
    sums = [sum(place["uses"].values()) for place in planned["timeline"]]
    assert rank["peak_bytes"] == max(sums)
    peak = max(planned["phases"], key=lambda phase: phase["num_bytes"])
    assert peak["at"] == planned["timeline"][sums.index(max(sums))]["at"]
    assert re.match(r"\w+(\.\w+)+: \d+ x ", peak["made_by"])
    course = {name: [place["block"] for place in planned["timeline"] if place["phase"] == name] for name in PASSES}
    assert [-1, 0, 1] == course["forward"] == course["evaluation"][:3]
    # The end of a backward pass is outside of the blocks.
    assert [1, 0] == course["backward"][:2]
    assert [PASSES.index(place["phase"]) for place in planned["timeline"]] == sorted(
        PASSES.index(place["phase"]) for place in planned["timeline"]
    )
    assert 2 == found["settings"]["per_device_train_batch_size"]
    # AdamW in 32 bits: two values for each weight.
    assert 4 * found["parameters"] == found["model_bytes"] == found["weights_bytes"]
    assert 8 * found["parameters"] == found["optimizer_bytes"]
    assert found["weights_bytes"] + found["optimizer_bytes"] == found["disk"][0]["least"]

    assert found["time"] is None
    assert "ways_out" not in found["fit"]


def test_a_dry_run_says_whether_the_run_fits_and_writes_nothing(bench, capsys):
    assert 1 == main(["-t", "tiny", "train", "--dry-run", "--hardware", "box.json"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("project ")
    assert re.match(
        r"plan: does not fit, .* of the 1\.0 MiB that are free on our box \(1 process\); 'fgcli plan", said[-1]
    )
    assert 0 == main(["-t", "tiny", "train", "--dry-run", "--hardware", "fast.json", "--world-size", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ["fits"] == [rank["verdict"] for rank in found["fit"]["ranks"]]
    assert 1 == found["world_size"]
    # The constructor of transformers' trainer makes its output folder.
    text = (bench / "templates/configs/tiny.yaml").read_text()
    (bench / "templates/configs/hf.yaml").write_text(text.replace("trainers/trainer.yaml", "trainers/hf_trainer.yaml"))
    assert 0 == main(["-t", "hf", "train", "--dry-run", "--hardware", "fast.json"])
    assert not list(bench.glob("**/runs"))
    assert not (bench / "out").exists()


def test_a_dry_run_plans_the_processes_of_the_run(bench, capsys):
    accel = TINY_TRAINING.replace("trainers/trainer.yaml", "trainers/accel_trainer.yaml")
    (bench / "templates/configs/accel.yaml").write_text(accel)
    dry = ["-t", "accel", "train", "--dry-run", "--hardware", "small.json"]
    eight = ["--nproc-per-node", "8"]
    assert 1 == main([*dry, *eight, "--world-size", "16"])
    assert "(16 processes); 'fgcli plan --gpus 8 --nodes 2'" in capsys.readouterr().out.splitlines()[-1]
    assert 1 == main([*dry, "--nproc-per-node", "gpu", "--world-size", "12", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (12, 6, 2) == (found["world_size"], found["fit"]["gpus"], found["fit"]["nodes"])
    for words, what in (
        ([*eight, "--world-size", "12"], "--world-size is 12, and each machine has 8 processes (--nproc-per-node)"),
        (["--nproc-per-node", "gpu"], "depends on the machine: one for each GPU"),
        (["--nproc-per-node", "2", "--nnodes", "1:4", "--master-addr", "x"], "on each of 1:4 machines"),
        (["--world-size", "-1"], "--world-size is -1"),
    ):
        assert 1 == main([*dry, *words])
        said = capsys.readouterr()
        assert "FG462" in said.err and what in said.err and not said.out


@pytest.mark.parametrize("per_node", [1, 2, 3, 8, "gpu"])
def test_a_dry_run_has_all_processes_or_is_refused(per_node):
    for world_size in range(1, 65):
        fits = isinstance(per_node, str) or world_size < per_node or world_size % per_node == 0
        with contextlib.nullcontext() if fits else pytest.raises(ProjectError):
            machines = machines_of(ProcessRequest(per_node=per_node), world_size)
            assert world_size == machines["gpus"] * machines["nodes"]


@pytest.mark.matrix
def test_a_device_of_meta_is_that_of_all_plans(bench, capsys):
    for name, hardware_of_meta in (("named", "fast.json"), ("mixed", "[fast.json, small.json]")):
        text = TINY_TRAINING.replace(
            "[raw_dataset]", f"[meta]\n    == super()\n    hardware: {hardware_of_meta}\n[raw_dataset]", 1
        )
        (bench / f"templates/configs/{name}.yaml").write_text(text)
    assert 0 == main(["-t", "named", "plan", "--tokens", "1e6", "--price", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("fast.json", 1e6) == (
        found["fit"]["hardware"]["name"],
        pytest.approx(found["time"]["run"]["tokens"], rel=0.1),
    )
    assert 0 == main(["-t", "named", "plan", "--find", "--json"])
    assert json.loads(capsys.readouterr().out)["ranking"]
    # The option takes precedence.
    assert 1 == main(["-t", "named", "plan", "--find", "--hardware", "small.json"])
    assert "FG992" in capsys.readouterr().err
    note = "hardware of meta names several devices (fast.json, small.json)"
    for words, code in (([], ""), (["--tokens", "1e6"], "FG991"), (["--find"], "FG993")):
        assert bool(code) == main(["-t", "mixed", "plan", *words])
        said = capsys.readouterr().err
        assert note in said and code in said
    assert 0 == main(["-t", "mixed", "plan", "--hardware", "fast.json", "--json"])
    said = capsys.readouterr()
    assert note not in said.err and json.loads(said.out)["fit"]


def test_a_plan_says_how_long_the_run_takes_and_on_how_many_devices(bench, capsys):
    asked = ["--hardware", "fast.json", "--tokens", "1e6", "--price", "2", "--days", "1"]
    assert 0 == main(["-t", "tiny", "plan", "--json", *asked])
    found = json.loads(capsys.readouterr().out)
    step, run, count = found["time"]["step"], found["time"]["run"], found["devices"]
    assert 0 < step["seconds"]["low"] < step["seconds"]["high"]
    assert {"matrix products", "elementwise", "optimizer"} <= set(step["rows"])
    assert sum(row["high"] for row in step["rows"].values()) == pytest.approx(step["seconds"]["high"])
    # A model of about 6 FLOPs a weight and token, and its attention.
    tokens = found["rows_per_update"] * found["tokens_per_row"]
    assert 5 < step["model_flops"] / tokens / found["parameters"] < 9
    assert run["tokens"] >= 1e6
    assert run["price"]["low"] == pytest.approx(2 * run["gpu_hours"]["low"])
    assert (1, 1, "fits") == (count["planned"], count["by_memory"], count["verdict"])
    assert {"low": 1, "high": 1} == count["by_time"]
    lines = "\n".join([*time_lines(found["time"], 1), *device_count_lines(count, 1)])
    assert f"{run['num_updates']:,} steps" in lines
    assert "by memory  at least 1 machine (1 device)" in lines
    assert "more could not be planned" not in lines


@pytest.mark.matrix
def test_where_no_way_surely_fits_the_search_on_the_same_devices_is_named(bench, capsys):
    assert 1 == main(["-t", "tiny", "plan", "--hardware", "box.json", "--free", "1KiB", "--gpus", "1"])
    (told,) = re.findall("all strategies are searched by: fgcli (.*)", capsys.readouterr().out)
    assert told.endswith("--hardware box.json --free 1KiB --find")
    # It ends with the nearest way, as nothing fits here either.
    assert 1 == main(shlex.split(told))
    assert "error[FG992]" in capsys.readouterr().err


def test_a_trainer_of_one_process_on_several_devices_names_the_search(bench, capsys):
    assert 0 != main(["-t", "tiny", "plan", "--hardware", "fast.json", "--gpus", "2"])
    said = capsys.readouterr().err
    assert "error[FG703]" in said and "--find" in said


def test_a_deadline_of_a_config_of_one_process_says_why_no_more_were_planned(bench, capsys):
    words = ["--hardware", "fast.json", "--tokens", "1e6", "--days", "1e-4", "--free", "1KiB", "--no-ways-out"]
    assert 1 == main(["-t", "tiny", "plan", *words])
    told = capsys.readouterr().out
    assert "more could not be planned: the trainer of the config runs in one process" in told
    assert "  1 machine (1 device): " in told
    # What other processes hold counts there as well.
    assert "memory: does not fit" in told


@pytest.mark.parametrize(
    "settings", [(), pytest.param(("--set", "trainer_args.global_batch_size=12"), marks=pytest.mark.matrix)]
)
def test_a_deadline_says_whether_the_step_follows_the_number_of_devices(bench, capsys, settings):
    accel = TINY_TRAINING.replace("trainers/trainer.yaml", "trainers/accel_trainer.yaml")
    (bench / "templates/configs/accel.yaml").write_text(accel)
    words = ["-t", "accel", "plan", "--hardware", "fast.json", "--gpus", "1", "--tokens", "1e6", *settings]
    assert 0 == main([*words, "--json"])
    hours = json.loads(capsys.readouterr().out)["time"]["run"]["hours"]["high"]
    assert 0 == main([*words, "--days", f"{hours / 24 / 2.5}"])
    told = capsys.readouterr().out
    assert "  3 machines (3 devices): " in told
    grown = "the step follows the number of devices: 96 tokens in place of the config's 32; global_batch_size keeps"
    assert (grown in told) == (not settings)


def test_a_time_that_was_asked_for_needs_rates(bench, capsys):
    (bench / "rows.jsonl").unlink()  # the error comes before anything is built
    assert 1 == main(["-t", "tiny", "plan", "--hardware", "box.json", "--tokens", "1e6"])
    assert "error[FG990]" in capsys.readouterr().err


@pytest.mark.matrix
def test_a_plan_finds_the_largest_batch_below_a_limit(bench, capsys):
    assert 0 == main(["-t", "tiny", "plan", "--memory", "1MiB", "--json"])
    found = json.loads(capsys.readouterr().out)["largest_batch"]
    assert found["is_exact"]
    assert found["num_bytes"] <= 2**20 < found["next_bytes"]

    assert 0 == main(["-t", "tiny", "plan", "--memory", "1GB"])
    told = capsys.readouterr().out
    assert "rows for each replica: 'fgcli train' refuses a micro-batch of 4,096 rows (FG804)" in told
    assert "; more are not tried" in told


@pytest.mark.parametrize(
    ("words", "status"),
    thinned(
        [
            (["plan", "--memory", "1KiB"], 1),
            (["plan", "--memory", "1KiB", "--json"], 1),
            (["plan", "--memory", "1KiB", "--longest", "16", "--no-ways-out"], 1),
            (["plan", "--hardware", "fast.json"], 0),
            (["plan", "--hardware", "fast.json", "--free", "1KiB", "--no-ways-out"], 1),
            (["plan", "--find", "--memory", "1KiB"], 1),
            (["train", "--dry-run", "--hardware", "fast.json"], 0),
            (["train", "--dry-run", "--hardware", "box.json"], 1),
            (["train", "--dry-run", "--hardware", "fast.json", "--free", "1KiB"], 1),
            (["train", "--dry-run", "--free", "1KiB"], 1),
            (["train", "--dry-run", "--free", "1GiB", "--json"], 0),
            (["train", "--dry-run", "--free", "9GiB"], 0),
            (["select", "--model-family", "text_generation", "--model-name", "opt-30b", "--max-memory-gb", "1"], 1),
            (["select", "--model-family", "text_generation", "--model-name", "gpt2"], 0),
        ],
        # The others search ways out, and plan for what the first ones plan for.
        lambda words, status: (
            words[0] == "select" or words[:3] == ["plan", "--hardware", "fast.json"] or words[-2:] == ["--free", "1KiB"]
        ),
    ),
)
def test_the_exit_status_says_whether_what_was_asked_for_fits(bench, capsys, words, status):
    assert status == main(words if words[0] == "select" else ["-t", "tiny", *words])
    told = capsys.readouterr()
    if words[0] != "select" and "--find" not in words:
        assert "error" not in told.err


@pytest.mark.parametrize(("verdicts", "lacks"), [(["fits", "may fit"], False), (["fits", "does not fit"], True)])
def test_a_process_that_may_fit_does_not_lack_memory(verdicts, lacks):
    assert lacks == lacks_memory({"ranks": [{"verdict": verdict} for verdict in verdicts]})
    assert not lacks_memory(None)


@pytest.mark.parametrize("text", ["24", "-1GB", "0GB", "nanGB", "infGB", "24 apples"])
def test_a_limit_is_a_number_with_a_unit(bench, capsys, text):
    with pytest.raises(SystemExit):
        main(["-t", "tiny", "plan", f"--memory={text}"])
    assert "is not a size above 0 with a unit" in capsys.readouterr().err


def test_unknown_hardware_is_refused_before_anything_is_built(bench, capsys):
    for command in ("plan", "train"):
        assert 1 == main(["-t", "large", command, "--hardware", "h200s"])
        assert "error[FG994]" in capsys.readouterr().err


def test_an_out_of_memory_error_says_how_to_go_on(bench, capsys):
    assert 1 == main(["-t", "large", "train", "--no-check"])
    told = capsys.readouterr().err
    assert "CUDA out of memory" in told
    assert "there is no plan of this run" in told
    assert "fgcli -t large plan --gpus 1 --nodes 1 --device-type cpu" in told


@pytest.mark.matrix
def test_an_out_of_memory_error_names_the_largest_row_and_what_was_planned(bench, capsys):
    callback = "[trainer_callbacks]\n    - !singleton:toy.py:TooLarge\n"
    (bench / "templates/configs/full.yaml").write_text(f"-- extends 'configs/tiny.yaml'\n{callback}")
    assert 1 == main(["-t", "full", "train", "--hardware", "fast.json"])
    told = capsys.readouterr().err
    assert "plan: fits" in told
    assert re.search(r"the plan of this run has a peak of \S+ KiB, and its largest row is \w+, \S+ KiB", told)
    ways = re.findall(r"^ +note: (.+): (fits|does not fit|may fit)[^\n]*\n +note: +(--set .*)$", told, re.MULTILINE)
    assert 3 == len(ways)
    # Run as it is told, a way is planned with the peak that was told.
    (told_peak,) = re.findall(rf"{re.escape(ways[0][0])}: .*The planned peak is (\S+ \S+);", told)
    capsys.readouterr()
    assert 0 == main(["-t", "full", "plan", "--gpus", "1", "--hardware", "fast.json", *shlex.split(ways[0][2])])
    assert f"each process: peak {told_peak}" in capsys.readouterr().out


@pytest.mark.matrix
def test_a_plan_is_written_as_a_page(bench, capsys):
    assert 1 == main(["-t", "tiny", "plan", "--free", "60KiB", "--device-type", "cpu", "-o", "plan.html"])
    page = (bench / "plan.html").read_text()
    assert "<h1>tiny.yaml</h1>" in page
    assert '<b class="bad">does not fit</b>' in page
    assert "The nearest ways out, each planned" in page
    assert "--set trainer_args.per_device_train_batch_size=1" in page


@pytest.mark.matrix
def test_a_run_is_compared_with_the_hardware_that_is_named(bench, capsys):
    settings = ("max_steps=4", "logging_steps=1", "save_steps=4")
    steps = [word for setting in settings for word in ("--set", f"trainer_args.{setting}")]
    assert 0 == main(["-t", "tiny", "train", "--hardware", "small.json", *steps])
    told = capsys.readouterr().err
    assert "plan: does not fit" in told
    (file,) = bench.glob("out/runs/*/plan.json")
    plan = json.loads(file.read_text())
    assert "does not fit" == plan["fit"]["ranks"][0]["verdict"]
    # What the plan says of a checkpoint is what is written, but for the headers of the files.
    for name, planned in (("model", plan["weights_bytes"]), ("optimizer", plan["optimizer_bytes"])):
        (file,) = bench.glob(f"out/checkpoint-*/{name}.safetensors")
        assert planned == len(file.read_bytes()) - 8 - int.from_bytes(file.read_bytes()[:8], "little")
    run = _run_of(plan["time"]["step"], bench)
    _calibrate(run, capsys)


def _run_of(step, bench):
    """Asserts that the log and the report of the run use the FLOPs and the peak rate of its plan; returns the run."""
    (run,) = bench.glob("out/runs/2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if "mfu" in line)
    width, tokens = 8, 2 * 16
    # Four products of width x width and three of width x 16, and the vocabulary. Attention is that inside of documents.
    products, per_token = 3 * 2 * tokens * (4 * width**2 + 3 * width * 16 + width * 260), 3 * 2 * tokens * width
    assert 1 < step["document_length"] < 16
    assert step["model_flops"] == pytest.approx(products + per_token * step["document_length"], rel=0.005)
    counted = line["mfu"] * 0.01e12 / line["tokens_per_second"] * tokens
    assert products + per_token < counted < products + per_token * 16
    assert not any("mfu" in line for line in (run / "loss.jsonl").read_text().splitlines())
    report = (run / "report.html").read_text()
    assert "Time of a step" in report
    assert "Model FLOPs utilization" in report
    return run


def _calibrate(run, capsys):
    """Asserts that later plans use what a calibration has learned from the run, and say so."""
    assert 0 == main(["-t", "tiny", "plan", "--calibrate", str(run), "--hardware", "fast.json", "--json"])
    found = json.loads(capsys.readouterr().out)
    (one,) = found["runs"]
    assert one["planned"] == pytest.approx(one["measured"], rel=1e-3)
    assert [] == found["hardware"]["efficiency"]["fitted"]
    steps = ["--set", "trainer_args.max_steps=4"]
    assert 0 == main(["-t", "tiny", "plan", "--hardware", "calibrated.json", "--json", *steps])
    step = json.loads(capsys.readouterr().out)["time"]["step"]
    assert step["seconds"] == pytest.approx({"low": one["planned"], "high": one["planned"]}, rel=1e-3)
    assert "fitted to 1 run on" in step["assumptions"][0]
    assert "all by one common factor" in step["assumptions"][0]
    # Without a name, the processors of this machine are measured.
    assert 0 == main(["plan", "--calibrate", str(run), "-o", "here.json"])
    told = capsys.readouterr().out
    assert "thread" in told
    here = hardware("here.json")
    assert ("cpu", "measured on") == (here.kind, here.sources["fp32"][:11])
    assert here.memory_bytes > 0
    assert 1 == main(["-t", "large", "plan", "--calibrate", str(run)])
    assert "is a run of 'tiny.yaml', and -t names 'large'" in capsys.readouterr().err
    assert 1 == main(["plan", "--calibrate", str(run), "--tokens", "1e6"])
    assert "error[FG983]" in capsys.readouterr().err


@pytest.mark.matrix
def test_the_comparison_can_be_turned_off(bench, capsys):
    assert 0 == main(["-t", "tiny", "train", "--hardware", "box.json", "--no-plan"])
    assert "plan:" not in capsys.readouterr().err
    assert [] == list(bench.glob("out/runs/*/plan.json"))


@pytest.mark.matrix
def test_a_run_is_compared_with_the_memory_that_is_free(bench, capsys):
    assert 0 == main(["-t", "tiny", "train", "--free", "1KiB", "--set", "trainer_args.max_steps=1"])
    assert "plan: does not fit" in capsys.readouterr().err
