"""`fgcli compare`: its output, its files, and one sentence for each bad input."""

import json

import pytest

from forgather.cli.main import main
from tests.isolation import private_folders  # noqa: F401
from tests.runs.compared import Runs

TEXT = """\
learning_rate 0.5 is best: eval_loss 1 at step 20, 1 (50 %) lower than learning_rate 0.01.
  args.learning_rate: 0.5 (--set) instead of 0.01 (templates/base.yaml:2)
eval_loss: lower is better; it is measured on evaluation rows. The value of a run is its best one at any step.
Each config ran once: how much of a difference is chance, only runs with other seeds can say.

Runs by eval_loss, the best one first
    run                  learning_rate   best   at step   last   status     steps
─────────────────────────────────────────────────────────────────────────────────
1   learning_rate 0.5    0.5                1        20      1   finished      20
2   learning_rate 0.01   0.01               2        10    2.5   finished      20

metric      best   at step   of run              last values of all runs
────────────────────────────────────────────────────────────────────────
eval_loss      1        20   learning_rate 0.5   1 to 2.5

config value         is     set by                  in
──────────────────────────────────────────────────────────────────────
args.learning_rate   0.01   templates/base.yaml:2   learning_rate 0.01
                     0.5    --set                   learning_rate 0.5

The same in all runs: code, versions, data and hardware.
"""


def evaluated(first, second):
    return [{"step": 10, "eval_loss": first}, {"step": 20, "eval_loss": second}]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    found = Runs(tmp_path)
    done = {"status": "finished", "max_steps": 20}
    found.add(lines=evaluated(2.0, 2.5), summary=done)
    found.add(lines=evaluated(1.5, 1.0), overrides=[("args.learning_rate", "0.5")], summary=done)
    monkeypatch.chdir(found.project)
    return found


@pytest.fixture
def command(capsys):
    def run(*words):
        status = main(["compare", *words])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_result_comes_first_and_each_value_has_its_line(runs, command):
    assert (0, TEXT, "") == command("out")
    assert (0, TEXT, "") == command(*(f"out/runs/{folder.name}" for folder in sorted(runs.folder.iterdir())))


def test_the_data_has_each_metric_of_each_run(runs, command):
    status, out, _ = command("out", "--json")
    facts = json.loads(out)
    best, other = facts["runs"]
    assert (0, "eval_loss", False) == (status, facts["metric"]["name"], facts["metric"]["is_higher_better"])
    expected = {"best": 2.0, "best_step": 10, "last": 2.5, "last_step": 20, "not_finite": 0}
    assert {"eval_loss": expected} == other["metrics"]
    (row,) = facts["differences"]
    assert {"text": "0.5", "place": "--set"} == row["values"][best["folder"]]


@pytest.mark.parametrize(
    ("file", "start"), [("x.html", "<!doctype html>"), ("x.json", "{"), ("x.txt", "learning_rate")]
)
def test_the_ending_of_the_file_decides_what_is_written(runs, command, file, start):
    status, out, err = command("out", "-o", file)
    assert (0, "", f"wrote {file}\n") == (status, out, err)
    assert (runs.project / file).read_text().startswith(start)


BAD = [
    (["out", "-o", "x.pdf"], "FG450", "-o x.html"),
    (["out", "-o", "x.html", "--json"], "FG450", "leave out --json"),
    (["out", "--open"], "FG450", "-o x.html"),
    (["out", "--full"], "FG450", "-o x.html"),
    (["out", "--metric", "eval_los"], "FG541", "did you mean 'eval_loss'?"),
    (["templates"], "FG540", "fgcli train"),
    (["missing"], "FG500", "newest first"),
    (["meta.yaml"], "FG437", "runs there"),
    (["out", "-o", "no/folder/x.html"], "FG418", "folder that exists"),
]


@pytest.mark.parametrize(
    ("words", "code", "hint"), BAD, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_bad_input_is_one_sentence_and_what_to_do(runs, command, words, code, hint):
    status, out, err = command(*words)
    assert (True, True, True) == (status != 0, f"error[{code}]" in err, hint in err)
    # With --json, the error is data on the standard output, too.
    assert ("--json" in words) == bool(out)
    assert len(err.splitlines()) <= 4


def test_a_damaged_line_is_a_warning_on_the_side(runs, command):
    file = next(runs.folder.iterdir()) / "metrics.jsonl"
    file.write_text("{torn\n" + file.read_text())
    status, out, err = command("out")
    assert (0, TEXT, True) == (status, out, "warning[FG542]" in err)


def test_a_config_is_refused_because_runs_are_compared(runs, capsys):
    with pytest.raises(SystemExit):
        main(["-t", "plain", "compare", "out"])
    assert "takes no config" in capsys.readouterr().err
