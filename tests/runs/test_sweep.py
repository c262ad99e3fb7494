"""`fgcli sweep`: what it plans, runs, ends early, survives and writes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments
from forgather.sweeps.best_config import config_text
from forgather.sweeps.journal import Outcome, read_history
from forgather.sweeps.progress import TrialProgress
from forgather.sweeps.space import Choice, Parameter
from forgather.sweeps.spec import SweepSpec
from forgather.sweeps.trials import Trials
from tests.patience import patience
from tests.project.workbench import TINY_TRAINING, make_project

WORK = """\
import json, os, time

def run(run_dir, x, y, steps, seconds, fails):
    if fails:
        raise ValueError("no such luck")
    with open(os.path.join(run_dir, "metrics.jsonl"), "a") as stream:
        for step in range(1, steps + 1):
            time.sleep(seconds)
            stream.write(json.dumps({"step": step, "eval_loss": (x - 2) ** 2 + y / step}) + "\\n")
            stream.flush()
"""
CONFIG = """\
.run_dir: &run_dir !var {{name: run_dir, default: ~}}
meta:
    config_name: work
    output_dir: out
main: !partial:work.py:run
    run_dir: *run_dir
    x: 1
    y: 1
    steps: {steps}
    seconds: {seconds}
    fails: false
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    def make(*, steps=3, seconds=0.0, more=""):
        text = CONFIG.format(steps=steps, seconds=seconds) + more
        folder = make_project(tmp_path / "work", {"work.py": WORK, "templates/configs/work.yaml": text})
        monkeypatch.chdir(folder)
        return Path(folder)

    return make


def swept(capsys, *words):
    status = main(["-t", "work", "sweep", *words, "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out), printed.err


def test_a_grid_runs_every_combination_and_names_the_best(work, capsys):
    work(more="sweep:\n    parameters:\n        main.x: [0, 2]\n        main.y: [1, 3]\n")
    status, found, said = swept(capsys, "--slots", "2", "--name", "a")
    assert (0, {"main.x": "2", "main.y": "1"}) == (status, found["best"]["values"])
    assert [(4 * (x == 0) + y / 3) for x in (0, 2) for y in (1, 3)] == pytest.approx(
        [one["value"] for one in sorted(found["trials"], key=lambda one: one["number"])]
    )
    assert {"finished"} == {one["outcome"] for one in found["trials"]}
    assert "4 of 4 done" in said
    page = Path(found["page"]).read_text()
    assert "Sweep a: 4 trials" in page
    assert all(one["run_dir"].rsplit("/", 1)[1] in page for one in found["trials"])
    # It is over: nothing is run again.
    status, again, said = swept(capsys, "--resume")
    assert (0, found["best"]) == (status, again["best"])
    assert "starts" not in said


def test_the_plan_names_errors_and_duplicates_before_anything_runs(work, capsys):
    folder = work()
    words = ["--grid", "main.x=1,2,1", "--grid", "main.steps=3", "--grid", "main.fails=false", "--dry-run"]
    status, plan, _ = swept(capsys, *words)
    assert (0, 2, [None, None, 0]) == (status, plan["num_runs"], [one["same_as"] for one in plan["trials"]])
    assert not (folder / "out").exists()
    status = main(["-t", "work", "sweep", "--grid", "main.speed=1", "--dry-run"])
    assert 1 == status
    assert "[FG562]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        ("eval_loss", "minimize"), ("f1_loss", "minimize"), ("score_error", "minimize"), ("eval_ppl", "minimize"),
        ("eval_precision", "maximize"), ("eval_recall_macro", "maximize"), ("eval_f1_macro", "maximize"),
        ("tokens_per_second", "maximize"), ("eval_precision:minimize", "minimize"), ("grad_norm", "minimize"),
    ],
)  # fmt: skip
def test_the_goal_follows_from_the_name_as_in_comparisons(work, capsys, metric, goal):
    work()
    assert goal == swept(capsys, "--grid", "main.x=1", "--metric", metric, "--dry-run")[1]["goal"]


def test_the_check_of_many_trials_says_how_far_it_is(work, capsys, monkeypatch):
    work()
    monkeypatch.setattr("forgather.cli.commands.sweep._QUIET_SECONDS", 0.0)
    assert "2 trials are checked" in swept(capsys, "--grid", "main.x=1,2,3", "--dry-run")[2]


def test_a_trial_that_cannot_run_is_skipped_and_said(tmp_path, capsys, monkeypatch):
    files = {"rows.jsonl": '{"text": "abc"}\n' * 64, "templates/configs/work.yaml": TINY_TRAINING}
    monkeypatch.chdir(make_project(tmp_path / "tiny", files))
    status, plan, _ = swept(
        capsys, "--grid", "optimizer.weight_decay=0.1,[1]", "--grid", "learning_rate=1e-3,2e-3", "--dry-run"
    )
    assert (0, 2) == (status, plan["num_runs"])
    refused = [one for one in plan["trials"] if one["error"]]
    assert ["[FG242]"] * 2 == [one["error"].split()[0] for one in refused]
    assert {"trainer_args.learning_rate", "optimizer.weight_decay"} == set(plan["trials"][0]["values"])
    status = main(["-t", "work", "sweep", "--grid", "optimizer.weight_decay=[[1]]", "--dry-run"])
    assert 1 == status
    assert "[FG568]" in capsys.readouterr().err


def test_a_failed_trial_has_its_cause_and_the_others_go_on(work, capsys):
    work()
    status, found, said = swept(capsys, "--grid", "main.fails=true,false", "--name", "a")
    by_number = {one["number"]: one for one in found["trials"]}
    assert (0, "failed", "finished", 1) == (
        status,
        by_number[0]["outcome"],
        by_number[1]["outcome"],
        found["best"]["number"],
    )
    assert "no such luck" in by_number[0]["note"]
    assert 1 == main(["-t", "work", "sweep", "--grid", "main.fails=true", "--name", "b"])
    assert "no trial has logged 'eval_loss' (failed)" in capsys.readouterr().out


def test_a_metric_that_no_trial_logs_is_said_before_the_next_trial_starts(work, capsys):
    work()
    status, found, said = swept(capsys, "--grid", "main.x=1,2", "--metric", "evalloss", "--name", "a")
    assert (1, None) == (status, found["best"])
    assert 1 == said.count("logged no 'evalloss', by which trials are compared: did you mean 'eval_loss'?")
    assert said.index("did you mean") < said.index("trial 1 starts")


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], (False, False)),
        ([{"step": 1, "loss": 2.0}], (False, True)),
        ([{"step": 1, "loss": 2.0}, {"step": 1, "eval_f1": 0.5}], (False, True)),
        ([{"step": 1, "eval_f1": 0.5}, {"step": 2, "loss": 2.0}], (True, True)),
        ([{"step": 1, "eval_f1": 0.5}, {"step": 1, "eval_loss": 1.0}, {"step": 2, "loss": 2.0}], (False, False)),
        ([{"step": 1, "eval_loss": "nan"}, {"step": 2, "loss": 2.0}], (False, False)),
    ],
)
def test_a_metric_is_missed_after_an_evaluation_or_at_the_end(tmp_path, records, expected):
    run = tmp_path / "runs" / "20260101T000000Z"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    progress = TrialProgress(str(tmp_path), "eval_loss")
    progress.update()
    assert expected == (progress.lacks_metric(is_over=False), progress.lacks_metric(is_over=True))


def test_bad_trials_end_early(work, capsys):
    early = "    early_terminate: {type: asha, min_steps: 2, eta: 2}\n"
    # Of two trials that may end early, the second one is drawn to start first.
    work(steps=40, seconds=0.05, more=f"sweep:\n    parameters:\n        main.x: [0, 2]\n{early}")
    status, found, _ = swept(capsys)
    good, bad = found["trials"]
    assert (0, "finished", 40, "stopped") == (status, good["outcome"], good["step"], bad["outcome"])
    assert bad["step"] < 40
    assert "not among the best 1 of 2 trials at step" in bad["note"]


def test_a_sweep_file_of_another_tool_is_read(work, capsys):
    folder = work()
    (folder / "wandb.yaml").write_text(
        "program: train.py\nmethod: random\nrun_cap: 3\nmetric: {name: eval_loss, goal: minimize}\n"
        "parameters:\n  main:\n    parameters:\n      x: {distribution: q_uniform, min: 0, max: 4, q: 0.5}\n"
    )
    status, plan, said = swept(capsys, "--file", "wandb.yaml", "--dry-run")
    assert (0, "random", 3) == (status, plan["method"], len(plan["trials"]))
    assert "without effect in this sweep: program" in said
    assert all(one["values"]["main.x"] in [half / 2 for half in range(9)] for one in plan["trials"])
    assert plan == swept(capsys, "--file", "wandb.yaml", "--dry-run")[1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "FG561"),
        (["--file", "none.yaml"], "FG560"),
        (["--grid", "main.x="], "FG560"),
        (["--grid", "main.x"], "FG313"),
        (["--method", "random", "--grid", "main.x=1"], "FG560"),
        (["--grid", "main.x=1", "--trials", "0"], "FG560"),
        (["--grid", "main.x=1", "--slots", "0"], "FG565"),
        (["--grid", "main.x=1", "--set", "+main.api_key=s3cr3tvalue99"], "FG531"),
        (["--grid", "+main.api_key=s3cr3tvalue99,s3cr3tvalue98"], "FG531"),
        (["--grid", "main.x=1", "--slurm=--export=MY_API_KEY=s3cr3tvalue99"], "FG531"),
        (["--grid", "main.x=1", "--slots", "9999999"], "FG565"),
        (["--grid", "main.x=1", "--slurm", '"'], "FG565"),
        (["--grid", "main.x=1", "--grid", "main.x=2"], "FG560"),
        (["--grid", "main.x=1", "--set", "main.x=2"], "FG560"),
        (["--grid", "main.x=1", "--metric", ":maximize"], "FG560"),
        (["--grid", "main.x=1", "--method", "random", "--trials", "99999999"], "FG560"),
        (["--grid", "main.x=1", "--set", "meta.output_dir=work.py"], "FG563"),
        (["--grid", "main.x=1", "--name", "x" * 300], "FG563"),
        (["--resume"], "FG563"),
        (["--resume", "nowhere"], "FG563"),
        *((["--grid", "main.x=1", "--name", name], "FG563") for name in ("../x", "/tmp/x", "a/b", "..", "", "a\nb")),
        (["--grid", "main.x=1", "--write", "work"], "FG567"),
        (["--grid", "main.x=1", "--write", "../new"], "FG567"),
        (["--grid", "main.x=2", "--write", "new"], "FG567"),  # no block contains main.x
    ],
)
def test_what_has_no_meaning_is_refused_by_name(work, capsys, words, code):
    folder = work()
    status = main(["-t", "work", "sweep", *words])
    printed = capsys.readouterr()
    assert 1 == status
    assert f"[{code}]" in printed.err
    assert "s3cr3t" not in printed.err
    assert not list(folder.glob("out/sweeps/*/trials.jsonl"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep: 3\n", "is 3"),
        ("sweep: {}\n", "has no parameter"),
        ("sweep: {parameters: {main.x: [1]}, methd: grid}\n", "did you mean 'method'"),
        ("sweep: {parameters: {main.x: [1]}, method: gird}\n", "did you mean 'grid'"),
        ("sweep: {parameters: {main.x: [1]}, metric: {goal: minimize}}\n", "give {name"),
        ("sweep: {parameters: {main.x: [1]}, metric: {name: a, goal: min}}\n", "'min'"),
        ("sweep: {parameters: {main.x: [1]}, early_terminate: {type: asha}}\n", "from which step"),
        ("sweep: {parameters: {main.x: [1]}, early_terminate: {type: asha, min_steps: 2, eta: 1}}\n", "'eta'"),
        ("sweep: {parameters: {main.x: [1]}, early_terminate: {type: asha, rung: 2}}\n", "'rung'"),
        ("sweep: {parameters: {main.x: [1]}, run_cap: -1}\n", "'run_cap'"),
        ("sweep: {parameters: {main.x: [1]}, method: random, run_cap: 99999999}\n", "from 1 to 100,000"),
        ("sweep: {parameters: {main.x: [1]}, metric: {name: a, target: 1}}\n", "the key 'target'"),
    ],
)
def test_a_malformed_sweep_is_refused_at_its_line(work, capsys, text, said):
    work(more=text)
    assert 1 == main(["-t", "work", "sweep", "--dry-run"])
    printed = capsys.readouterr().err
    assert "[FG560]" in printed
    assert said in printed
    assert "templates/configs/work.yaml:" in printed


def test_a_trial_of_an_earlier_process_is_known(work):
    work()
    trials = Trials(Project("work", "."), SweepSpec(parameters=(Parameter("main.x", Choice((1, 2))),)))
    trials.remember(4, {"main.x": "2"})
    assert [None, 4] == [trials.judged(7 + x, {"main.x": x}).same_as for x in (1, 2)]


@pytest.mark.matrix
def test_what_optuna_proposes_again_is_run_once_also_after_the_sweep_went_on(work, capsys):
    work(steps=1, more="sweep:\n    method: optuna\n    run_cap: 3\n    parameters:\n        main.x: [0, 2]\n")
    swept(capsys, "--name", "a")
    status, found, _ = swept(capsys, "--resume", "--trials", "6")
    assert (0, 6) == (status, len(found["trials"]))
    values = [one["values"]["main.x"] for one in found["trials"] if one["outcome"] == "finished"]
    assert len(set(values)) == len(values) <= 2
    same = [one for one in read_history("out/sweeps/a").trials.values() if one.skipped is not None]
    assert all(one.skipped == f"builds the same as trial {one.same_as}" for one in same) and len(same) >= 4


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("3\n", 1, "is 3"),
        ("method: grid\nparameters:\n  main.x: [1]\n  main.x: [2]\n", 4, "appears twice"),
        ("method: grid\nparameters:\n  main.x: {min: 1, max: b}\n", 3, "is 'b'"),
        ("method: grid\nparameters:\n  main.x: [1]\n3: 4\n", 4, "has the key 3"),
        ("parameters:\n  main.x: [1]\nearly_terminate:\n  min_iter: 2\n  min_steps: 3\n", 3, "keep one"),
        ("parameters:\n  main.x: [1]\nearly_terminate:\n  type: median\n  min_steps: 3\n  eta: 3\n", 6, "no effect"),
    ],
)
def test_a_malformed_sweep_file_is_refused_at_its_own_line(work, capsys, text, line, said):
    (work() / "s.yaml").write_text(text)
    assert 1 == main(["-t", "work", "sweep", "--file", "s.yaml", "--dry-run"])
    printed = capsys.readouterr().err
    assert said in printed
    assert f"s.yaml:{line}" in printed


def test_trials_have_output_folders_of_their_own(work, capsys):
    work()
    assert 1 == main(["-t", "work", "sweep", "--grid", "meta.output_dir=a,b", "--dry-run"])
    assert "each trial has an output folder of its own" in capsys.readouterr().err


def test_a_sweep_does_not_go_on_with_another_config(work, capsys):
    folder = work()
    swept(capsys, "--grid", "main.x=1", "--name", "a")
    configs = folder / "templates/configs"
    shutil.copy(configs / "work.yaml", configs / "other.yaml")
    assert 1 == main(["-t", "other", "sweep", "--resume", "out/sweeps/a"])
    assert "was started with --config work.yaml, not with --config other.yaml" in capsys.readouterr().err


def test_a_sweep_whose_working_folder_is_gone_fails_no_trial(work, capsys, monkeypatch, tmp_path):
    project = work()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != str(gone) and isdir(path))
    assert 1 == main(["-p", str(project), "-t", "work", "sweep", "--grid", "main.x=1", "--name", "a"])
    assert "error[FG563]: the working folder does not exist any more" in capsys.readouterr().err
    (trial,) = read_history(str(next(tmp_path.rglob("sweeps/a")))).trials.values()
    assert (0, None) == (trial.attempts, trial.outcome)


def test_what_cannot_be_written_at_the_end_costs_no_result(work, capsys, monkeypatch):
    def full():
        raise OSError("full")

    folder = work()
    for name in ("best.yaml", "comparison.html"):
        (folder / "out/sweeps/a" / name).mkdir(parents=True)
    status, found, said = swept(capsys, "--grid", "main.x=1,2", "--name", "a")
    assert (0, None) == (status, found["page"])
    assert "comparison.html' cannot be written: Is a directory" in said
    assert 2 == len(found["trials"])
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    status, found, said = swept(capsys, "--resume")
    assert (0, 2) == (status, len(found["trials"]))
    assert "the best config cannot be written: full" in said


def test_a_changed_config_is_not_continued(work, capsys):
    folder = work()
    swept(capsys, "--grid", "main.x=1", "--name", "a")
    file = folder / "templates/configs/work.yaml"
    file.write_text(file.read_text().replace("y: 1", "y: 2"))
    assert 1 == main(["-t", "work", "sweep", "--resume"])
    assert "[FG569]" in capsys.readouterr().err


def test_a_sweep_goes_on_as_it_was_started(work, capsys):
    work()
    swept(capsys, "--grid", "main.x=1", "--name", "a")
    assert 0 == main(["-t", "work", "sweep", "--resume", "--grid", "main.x=1"])
    capsys.readouterr()
    for words, said in [
        (["--grid", "main.x=1,3"], "--grid main.x=1, not with --grid main.x=1,3"),
        (["--set", "main.y=2"], "no --set, not with --set main.y=2"),
        (["--metric", "loss", "--dry-run"], "no --metric, not with --metric loss"),
        (["--sweep-seed", "1"], "no --sweep-seed, not with --sweep-seed 1"),
    ]:
        assert 1 == main(["-t", "work", "sweep", "--resume", *words])
        assert f"error[FG569]: this sweep was started with {said}\n" in capsys.readouterr().err


def test_an_option_that_the_config_declares_is_not_dropped_when_a_sweep_goes_on(work, capsys):
    declared = "dynamic_args:\n    --tag: {type: int, default: 1}\n    --other: {type: int, default: 1}\n"
    work(more=declared)
    swept(capsys, "--grid", "main.x=1", "--name", "a", "--tag", "2")
    assert 0 == main(["-t", "work", "sweep", "--resume"])
    assert 0 == main(["-t", "work", "sweep", "--resume", "--tag", "2"])
    capsys.readouterr()
    for words, said in [
        (["--tag", "3"], "--tag 2, not with --tag 3"),
        (["--tag", "2", "--other", "1"], "no --other, not with --other 1"),
    ]:
        assert 1 == main(["-t", "work", "sweep", "--resume", *words])
        assert f"error[FG569]: this sweep was started with {said}\n" in capsys.readouterr().err


def test_a_dry_run_of_a_sweep_that_goes_on_says_what_is_left_and_runs_nothing(work, capsys):
    folder = work()
    random = ["--method", "random", "--grid", "main.x=1,2,3,4,5,6,7", "--trials", "2"]
    swept(capsys, *random, "--name", "a", "--slots", "2")
    swept(capsys, "--grid", "main.y=5", "--name", "b")
    journal = folder / "out/sweeps/a/trials.jsonl"
    before = journal.read_bytes()
    status, plan, _ = swept(capsys, "--resume", "--name", "a", "--trials", "3", "--dry-run")
    assert (0, 1, 2, [2]) == (status, plan["num_runs"], plan["num_done"], [one["number"] for one in plan["trials"]])
    assert 0 == main(["-t", "work", "sweep", "--resume", str(journal.parent), "--trials", "3", "--dry-run"])
    assert capsys.readouterr().out.startswith("1 trial to run, 2 done; compared by eval_loss (minimize)\n")
    assert before == journal.read_bytes()
    # The number of slots is that of the start: the second trial does not wait for the first one.
    said = swept(capsys, "--resume", "--name", "a", "--trials", "4")[2]
    assert ["trial 2 starts", "trial 3 starts"] == [line.split(":")[0] for line in said.splitlines()[1:3]], said


def test_more_trials_continue_the_total(work, capsys, monkeypatch):
    folder = work()
    first = swept(capsys, "--method", "random", "--trials", "2", "--grid", "main.x=1,2,3,4,5,6,7", "--name", "a")[1]
    # Values that are paths mean the same from any folder.
    monkeypatch.chdir(folder.parent)
    assert 0 == main(["-p", "work", "-t", "work", "sweep", "--resume", "work/out/sweeps/a", "--trials", "4", "--json"])
    printed = capsys.readouterr()
    second, said = json.loads(printed.out), printed.err
    records = [json.loads(Path(one["run_dir"], "run.json").read_text()) for one in second["trials"]]
    assert {str(folder)} == {one["working_dir"] for one in records}
    assert (2, 4) == (len(first["trials"]), len(second["trials"]))
    assert "trial 1 starts" not in said
    values = {one["number"]: one["values"] for one in second["trials"]}
    assert {one["number"]: one["values"] for one in first["trials"]} == {n: values[n] for n in (0, 1)}


def test_the_best_values_become_a_config_that_has_them(tmp_path, capsys, monkeypatch):
    files = {"rows.jsonl": '{"text": "abc"}\n' * 64, "templates/configs/work.yaml": TINY_TRAINING}
    folder = Path(make_project(tmp_path / "tiny", files))
    monkeypatch.chdir(folder)

    project = Project("work", str(folder), overrides=[("trainer_args.seed", "7")], max_steps=5)
    text = config_text(project, {"trainer_args.learning_rate": "0.004", "optimizer.weight_decay": "0.3"}, "tuned")
    (folder / "templates/configs/tuned.yaml").write_text(text)
    written = Project("tuned", str(folder)).graph

    found = trainer_arguments(written)
    assert (0.004, 7, 5) == tuple(found.plain(name) for name in ("learning_rate", "seed", "max_steps"))
    assert 5 != trainer_arguments(Project("tuned", str(folder), max_steps=6).graph).plain("max_steps")
    assert len(text.splitlines()) <= 16


def killed_sweep(folder, words, seconds):
    """Runs a sweep in a process of its own and kills it after some seconds; returns whether it ended by itself."""
    command = [sys.executable, "-m", "forgather", "-t", "work", "sweep", *words]
    with open(folder / "said.txt", "ab") as stream:
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def running_trials(folder):
    """Returns the process of each running trial, by the trial's folder."""
    found = subprocess.run(["pgrep", "-af", f"{folder}/out/sweeps/"], capture_output=True, text=True, check=False)
    lines = [line.split() for line in found.stdout.splitlines()]
    return {
        word: int(words[0])
        for words in lines
        for word in words
        if f"{folder}/out/sweeps/" in word and "trials/" in word
    }


@pytest.mark.matrix
@pytest.mark.parametrize(("kills", "trials"), [(2, 4), pytest.param(20, 16, marks=pytest.mark.matrix)])
def test_kills_of_the_sweep_and_of_its_trials_lose_and_repeat_nothing(work, record_property, kills, trials):
    values = ", ".join(str(number / 2) for number in range(trials))
    # Trials that end too soon leave none to kill: sweeps are killed after a time of the same unit.
    seconds = 0.1 * patience(1) if trials == 4 else 0.15
    folder = work(steps=10, seconds=seconds, more=f"sweep:\n    parameters:\n        main.x: [{values}]\n")
    numbers = random.Random(kills)
    words, of_sweep = ["--slots", "2", "--name", "a"], 0
    while of_sweep < kills:
        is_over = killed_sweep(folder, words, patience(1) / 2 * numbers.uniform(0.5, 1.5))
        if is_over and "--resume" in words:
            break
        of_sweep += not is_over
        if (folder / "out/sweeps/a/trials.jsonl").exists():
            words = ["--resume"]
    command = [sys.executable, "-m", "forgather", "-t", "work", "sweep", *words, "--json"]
    last = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    killed: dict[str, int] = {}
    while last.poll() is None:
        # A trial that is killed at the same step three times in a row has failed.
        candidates = {name: pid for name, pid in running_trials(folder).items() if killed.get(name, 0) < 2}
        if candidates and sum(killed.values()) < kills:
            name = numbers.choice(sorted(candidates))
            with suppress(ProcessLookupError):
                os.kill(candidates[name], signal.SIGKILL)
                killed[name] = killed.get(name, 0) + 1
        time.sleep(0.1)
    found = json.loads(last.communicate(timeout=patience(60))[0])
    history = read_history(str(folder / "out/sweeps/a"))
    assert list(range(trials)) == sorted(history.trials)
    assert {Outcome.FINISHED} == {one.outcome for one in history.trials.values()}
    journal = (folder / "out/sweeps/a/trials.jsonl").read_text().splitlines()
    assert trials == sum('"outcome": "finished"' in line for line in journal)
    assert {"main.x": "2.0" if trials > 4 else "1.5"} == found["best"]["values"]
    assert sum(killed.values()) > 0
    record_property("kills_of_sweep", of_sweep)
    record_property("kills_of_trials", sum(killed.values()))


def test_values_that_no_block_contains_are_shown_as_options(work, capsys):
    work()
    assert 0 == main(["-t", "work", "sweep", "--grid", "main.x=2", "--name", "a"])
    assert "run it with --set main.x=2" in capsys.readouterr().err
    assert 0 == main(["-t", "work", "sweep", "--resume"])
    with pytest.raises(ProjectError) as caught:
        config_text(Project("work", "."), {"main.x": "2"}, "b")
    assert "FG567" == caught.value.code
