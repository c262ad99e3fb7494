"""The plan of a run beside its start: one line, a file in the run folder, and nothing that the run has to wait for."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from forgather.cli.commands.train import configure
from forgather.cli.plan_start import _is_first, plan_words
from forgather.interrupt import Interrupt, handle_signals
from forgather.launch import plan_run, prepare_run, run
from forgather.launch.plan_check import PlanCheck, fit_line, is_out_of_memory, note_largest_row
from forgather.launch.planning import Device, fit_on
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.peer import Peer
from forgather.planner.hardware import Hardware
from forgather.project.project import Project
from tests.patience import patience
from tests.project.workbench import COLLATOR_OF_TOYS, TINY_TRAINING, fgcli, make_project

GIB = 2**30
ROWS = [{"name": "logits", "num_bytes": 3 * GIB}, {"name": "parameters", "num_bytes": GIB}]
PLAN = {
    "mesh": {"replicate": 1},
    "strategy": "SingleDevice",
    "parameters": 1,
    "trainable": 1,
    "settings": {"per_device_train_batch_size": 4},
    "ranks": [{"ranks": [0, 0], "phases": [{"phase": "training step", "at": "update", "rows": ROWS}]}],
}
# A launcher's variables would make the planning process a worker, and a visible GPU would lose memory to its context.
PRINTS = f"""
import os
assert "RANK" not in os.environ and "SLURM_PROCID" not in os.environ and "MASTER_PORT" not in os.environ
assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["KEPT"] == "yes"
print({json.dumps(PLAN)!r})
"""


def device(memory, held_bytes=0):
    return Device(Hardware(name="x", title="our device", kind="cpu", memory_bytes=memory), held_bytes)


def check(code, folder, lines, memory=16 * GIB):
    return PlanCheck([sys.executable, "-IS", "-c", code], device(memory), str(folder), lines.append)


def test_the_line_and_the_file(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "SLURM_PROCID": "0", "MASTER_PORT": "1", "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    lines = []
    planned = check(PRINTS, tmp_path, lines)
    assert planned.wait(patience(60))
    planned.end()
    assert ["plan: fits, 4.0 GiB of the 16.0 GiB that are free on our device"] == lines
    written = json.loads((tmp_path / "plan.json").read_text())
    assert ("fits", PLAN["ranks"]) == (written["fit"]["ranks"][0]["verdict"], written["ranks"])
    assert ["plan.json"] == [file.name for file in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("memory", "held_bytes", "line"),
    [
        (
            5 * GIB,
            2 * GIB,
            "plan: does not fit, 4.0 GiB of the 3.0 GiB that are free on our device",
        ),
        (None, 0, "plan: the memory of our device is unknown"),
    ],
)
def test_the_line_of_other_answers(memory, held_bytes, line):
    assert fit_line(fit_on(PLAN, device(memory, held_bytes))).startswith(line)


def test_a_plan_that_fails_is_skipped_with_its_reason(tmp_path):
    lines = []
    code = "import sys; print('error[FG300]: no such thing', file=sys.stderr); print('  --> x', file=sys.stderr); sys.exit(1)"
    assert check(code, tmp_path, lines).wait(patience(60))
    assert ["plan: skipped (error[FG300]: no such thing)"] == lines
    assert [] == list(tmp_path.iterdir())


def test_the_end_of_a_run_ends_a_slow_plan_without_a_word(tmp_path):
    lines, began = [], time.monotonic()
    planned = check("import time; time.sleep(600)", tmp_path, lines)
    assert not planned.wait(0.01)
    planned.end()
    assert time.monotonic() - began < 60
    assert [] == lines


@pytest.mark.parametrize(
    ("typed", "planned"),
    [
        ("-t a.yaml train", "-t a.yaml plan"),
        ("train --lr 3 --resume auto --no-check", "plan --lr 3"),
        ("-p d -t a.yaml train --hardware h200 --set a.b=1 --set c=x=y", "-p d -t a.yaml plan --set a.b=1 --set c=x=y"),
        ("-t train train --nproc-per-node 4 --json --no-plan -- --rdzv-backend c10d", "-t train plan"),
    ],
)
def test_the_command_that_plans_the_same_config(typed, planned):
    assert plan_words(typed.split(), configure, gpus=4, nodes=2, device_type="cuda") == [
        *planned.split(),
        "--gpus",
        "4",
        "--nodes",
        "2",
        "--device-type",
        "cuda",
    ]


def test_the_plan_of_known_hardware_has_times():
    words = plan_words(
        ["train", "--hardware", "a.json"], configure, gpus=1, nodes=1, device_type="cpu", hardware="a.json"
    )
    assert ["--device-type", "cpu", "--hardware", "a.json"] == words[-4:]


WAYS = f"""
import json, sys
free = float(sys.argv[sys.argv.index("--free") + 1].removesuffix("KiB")) * 1024
way = {{"title": "less", "peak_bytes": 1, "least": 1, "most": 1, "available": free, "verdict": "fits",
       "seconds": None, "reason": None, "words": "--set a=1"}}
plan = json.loads({json.dumps(json.dumps(PLAN))})
print(json.dumps({{**plan, "fit": {{"ways_out": [way]}}}}))
"""
EITHER = f"import sys\nif '--no-ways-out' in sys.argv:\n    print({json.dumps(PLAN)!r})\nelse:\n    exec({WAYS!r})"
# The exit status of a plan that does not fit.
EITHER += "\nraise SystemExit(1)"
LESS = "less: fits. The planned peak is 1 B; it needs 1 B of"


def test_a_run_that_does_not_fit_gets_ways_out(tmp_path):
    lines = []
    planned = check(EITHER, tmp_path, lines, memory=3 * GIB)
    planned.wait_for_ways(patience(60))
    planned.end()
    assert "plan: does not fit, 4.0 GiB of the 3.0 GiB that are free on our device" == lines[0]
    assert [f"plan: the nearest way out is {LESS} 3.0 GiB:  --set a=1"] == lines[1:]
    (way,) = json.loads((tmp_path / "plan.json").read_text())["fit"]["ways_out"]
    assert 3 * GIB == way["available"]


def _noted(error, folder, **options):
    usual = {"command": ["-t", "a", "plan"], "patience": 0.0, "seconds": patience(60), "is_first": lambda: True}
    note_largest_row(error, str(folder), **usual | options)


def noted(folder, **options):
    error = RuntimeError("out of memory")
    _noted(error, folder, **options)
    return "\n".join(error.__notes__).splitlines()


def stored(folder, memory, code, **fit):
    command = [sys.executable, "-IS", "-c", code]
    plan = {**PLAN, "fit": {**fit_on(PLAN, device(memory)), **fit}, "command": command}
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


def test_an_out_of_memory_error_names_the_largest_row_and_plans_ways_out(tmp_path):
    # Of a run that was planned to fit, the ways out need less than it.
    stored(tmp_path, 16 * GIB, WAYS.replace('"less"', 'f"{free:.0f}"'))
    first, way, words = noted(tmp_path)
    assert "a peak of 4.0 GiB, and its largest row is logits, 3.0 GiB. The nearest ways out, each planned:" in first
    assert way.startswith(f"{4 * GIB - 1}: fits.")
    assert "  --set a=1" == words


def test_of_all_processes_that_lack_memory_one_plans_ways_out(tmp_path):
    stored(tmp_path, 16 * GIB, f"open({str(tmp_path / 'planned')!r}, 'a').write('once ')\n{WAYS}")
    store, notes = HashStore(), {}

    def lack(rank):
        member = Peer(ProcessFacts(rank=rank, local_rank=rank, world_size=3, local_world_size=3), store, 5.0)
        notes[rank] = noted(tmp_path, is_first=lambda: _is_first(member))

    threads = [threading.Thread(target=lack, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "once " == (tmp_path / "planned").read_text()
    assert notes[0] == notes[1] == notes[2]
    assert notes[0][1].startswith(LESS)


def test_ways_out_that_another_process_plans_are_waited_for(tmp_path):
    # Of a run that does not fit, the check plans them, and not the process that lacks memory first.
    plan = stored(tmp_path, GIB, f"open({str(tmp_path / 'planned')!r}, 'w')")
    (way,) = json.loads(subprocess.check_output([sys.executable, "-c", WAYS, "--free", "1KiB"]))["fit"]["ways_out"]
    whole = json.dumps({**plan, "fit": {**plan["fit"], "ways_out": [way]}})
    draft = tmp_path / "plan.json.draft"
    draft.write_text(whole)
    writing = threading.Timer(0.3, draft.replace, [tmp_path / "plan.json"])
    writing.start()
    assert noted(tmp_path)[1].startswith("less: fits.")
    writing.join()
    assert not (tmp_path / "planned").exists()


@pytest.mark.parametrize(
    ("memory", "fit", "code"),
    [
        (16 * GIB, {}, "raise SystemExit(3)"),
        (16 * GIB, {}, "import time; time.sleep(600)"),
        # The planning process has ended, and one that it started has its output open.
        (16 * GIB, {}, "import subprocess; subprocess.Popen(['sleep', '600'])"),
        # They are never written: the main process was ended.
        (GIB, {}, "raise SystemExit(3)"),
        # They were planned, and there are none.
        (GIB, {"ways_out": []}, WAYS),
        (16 * GIB, {"ways_out": []}, WAYS),
    ],
)
def test_ways_out_that_cannot_be_planned_leave_the_row_and_the_command(tmp_path, memory, fit, code):
    stored(tmp_path, memory, code, **fit)
    began = time.monotonic()
    (line,) = noted(tmp_path, seconds=0.2)
    assert time.monotonic() - began < patience(30)
    assert line.endswith("its largest row is logits, 3.0 GiB. Changes that make it smaller: fgcli -t a plan")


def test_a_check_without_ways_out_says_why_and_stores_that_there_are_none(tmp_path):
    lines = []
    code = f"import sys\nif '--no-ways-out' in sys.argv:\n    print({json.dumps(PLAN)!r})\nelse:\n    sys.exit('error[FG300]: x')"
    planned = check(code, tmp_path, lines, memory=3 * GIB)
    planned.wait_for_ways(patience(60))
    planned.end()
    assert ["plan: no ways out are known (error[FG300]: x)"] == lines[1:]
    assert [] == json.loads((tmp_path / "plan.json").read_text())["fit"]["ways_out"]


# What cannot be started is a folder here; without memory for another process, the system answers in the same way.
def test_a_plan_that_cannot_be_started_is_skipped(tmp_path):
    lines = []
    planned = PlanCheck([str(tmp_path)], device(GIB), str(tmp_path), lines.append)
    assert planned.wait(patience(60))
    planned.end()
    assert lines[0].startswith("plan: skipped (planning could not be started: [Errno 13]")


def test_of_ways_out_that_cannot_be_started_other_processes_do_not_wait(tmp_path):
    script, lines = tmp_path / "once", []
    script.write_text(f"#!{sys.executable}\nimport os\nos.remove({str(script)!r})\nprint({json.dumps(PLAN)!r})\n")
    script.chmod(0o755)
    planned = PlanCheck([str(script)], device(3 * GIB), str(tmp_path), lines.append)
    planned.wait_for_ways(patience(60))
    planned.end()
    assert lines[1].startswith("plan: no ways out are known (planning could not be started: [Errno 2]")
    assert [] == json.loads((tmp_path / "plan.json").read_text())["fit"]["ways_out"]


def test_an_out_of_memory_error_is_kept_if_ways_out_cannot_be_started(tmp_path):
    plan = stored(tmp_path, 16 * GIB, "")
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "command": [str(tmp_path)]}))
    (line,) = noted(tmp_path)
    assert line.endswith("its largest row is logits, 3.0 GiB. Changes that make it smaller: fgcli -t a plan")
    assert [] == json.loads((tmp_path / "plan.json").read_text())["fit"]["ways_out"]


def test_a_plan_that_cannot_be_stored_is_said(tmp_path):
    lines = []
    planned = check(PRINTS.replace("assert", "0 and"), tmp_path / "none", lines)
    assert planned.wait(patience(60))
    planned.end()
    assert lines[0].startswith("plan: not stored in the run folder ([Errno 2]")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"fit": null}', '{"fit": {"ranks": []}}'])
def test_without_a_plan_the_note_names_the_command(tmp_path, content):
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    (line,) = noted(tmp_path)
    assert line.startswith("there is no plan of this run.")
    assert line.endswith("fgcli -t a plan")


def test_another_process_waits_for_the_plan(tmp_path):
    stored(tmp_path, GIB, "", ways_out=[])
    plan = (tmp_path / "plan.json").rename(tmp_path / "later")
    writing = threading.Timer(0.3, plan.rename, [tmp_path / "plan.json"])
    writing.start()
    assert "largest row is logits" in noted(tmp_path, patience=patience(60))[0]
    writing.join()


def test_a_failed_run_is_explained_before_its_folder_is_removed(tmp_path, monkeypatch):
    config = "main: !singleton:toy.py:fail {}\n"
    toy = "def fail():\n    raise MemoryError('too little')\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/one.yaml": config, "toy.py": toy})
    monkeypatch.setenv("FORGATHER_TRUST", f"{folder}/")
    plan = plan_run(Project("one", str(folder)))
    run_dir = prepare_run(plan, ["fgcli"])
    found = []
    with pytest.raises(MemoryError, match="too little"):
        run(plan, run_dir, failed=lambda error: found.append((str(error), os.path.exists(run_dir))))
    assert [("too little", True)] == found
    assert not os.path.exists(run_dir)
    # The error of the run is not lost if it cannot be explained.
    with pytest.raises(MemoryError, match="too little") as caught:
        run(plan, prepare_run(plan, ["fgcli"]), failed=lambda error: os.stat(folder / "none"))
    assert any("FileNotFoundError: [Errno 2]" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ways_out_are_planned_leaves_the_error_of_the_run(tmp_path, monkeypatch, number):
    config = "main: !singleton:toy.py:fail {}\n"
    toy = "def fail():\n    raise MemoryError('too little')\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/one.yaml": config, "toy.py": toy})
    monkeypatch.setenv("FORGATHER_TRUST", f"{folder}/")
    plan = plan_run(Project("one", str(folder)))
    stored(tmp_path, 16 * GIB, f"import os, time; os.kill({os.getpid()}, {int(number)}); time.sleep(600)")
    began = time.monotonic()
    with handle_signals(Interrupt()), pytest.raises(MemoryError, match="too little") as caught:
        run(plan, prepare_run(plan, ["fgcli"]), failed=lambda error: _noted(error, tmp_path))
    assert time.monotonic() - began < patience(60)
    assert caught.value.__notes__[-1].startswith("interrupted while")


LIMITING = """\
import sys

class Limited:
    def __init__(self, collator):
        self.collator = collator

    def __call__(self, items):
        if "train" in sys.argv:
            raise MemoryError("too little")
        return self.collator(items)
"""
LIMITED = COLLATOR_OF_TOYS.format(name="Limited")


@pytest.mark.matrix
def test_a_run_without_memory_for_its_first_step_prints_its_plan_and_ways_out(tmp_path):
    config = f"{TINY_TRAINING}{LIMITED}"
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    folder = make_project(
        tmp_path / "bench", {"templates/configs/one.yaml": config, "toy.py": LIMITING, "rows.jsonl": rows}
    )
    trusted = {"FORGATHER_TRUST": f"{folder}/"}
    ended = fgcli("-t", "one", "train", "--hardware", "l4", cwd=folder, env=trusted)
    assert "plan: " in ended.stderr
    assert "note: the plan of this run has a peak of" in ended.stderr
    assert "The nearest ways out, each planned:" in ended.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("the shapes 3 and 4 do not fit"), False),
        (KeyError("memory"), False),
    ],
)
def test_errors_of_too_little_memory(error, expected):
    assert expected is is_out_of_memory(error)


def test_the_error_of_the_host_is_one():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
