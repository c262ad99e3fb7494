"""`fgcli runs`: what is printed at any width, labels, archives, removals, and what is refused."""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace

import pytest

from forgather.cli.main import main
from forgather.cli.runs_output import table_lines
from forgather.interventions import Intervention, record
from forgather.run_control import Action
from forgather.run_status import Status
from forgather.runs.labels import change_labels, read_labels
from forgather.runs.run_table import read_table
from tests.runs.corpus import STARTED, make_run

NOW = STARTED + 3600 * 50


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A folder with four runs, in which the commands are typed."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "output_models" / "tiny"
    make_run(out, 0, lr=0.001, loss=2.0)
    make_run(out, 1, lr=0.003, loss=1.5)
    make_run(out, 2, lr=0.01, status=Status.FAILED, cause={"code": None, "message": "ValueError: bad row", "rank": 1})
    make_run(
        out,
        3,
        lr=0.01,
        optimizer="SGD",
        status=Status.RUNNING,
        pid=2**30,
        changes={"optimizer": "!partial:torch.optim:SGD (lr: 0.01)"},
    )
    return tmp_path


def run_of(bench, number):
    return bench / "output_models" / "tiny" / "runs" / f"20260101T000{number}00Z-tiny"


def lines_of(bench, width=None, most=None):
    return [line.text for line in table_lines(read_table(["."]), ".", width=width, most=most, now=NOW)]


TABLE = """\
run                    status       step  eval_loss  best     lr          optimizer  started  time  tok/s
20260101T000300Z-tiny  killed    200/200          2   1.8   0.01    torch.optim:SGD  2 d ago  1:40  1.00k
20260101T000200Z-tiny  failed    200/200          2   1.8   0.01  torch.optim:AdamW  2 d ago  1:40  1.00k
20260101T000100Z-tiny  finished  200/200        1.5  1.35  0.003  torch.optim:AdamW  2 d ago  1:30  1.00k
20260101T000000Z-tiny  finished  200/200          2   1.8  0.001  torch.optim:AdamW  2 d ago  1:30  1.00k
4 runs: 2 finished, 1 killed, 1 failed
x 20260101T000200Z-tiny: ValueError: bad row"""


def squeezed(lines):
    return [" ".join(line.split()) for line in lines]


def test_the_table_shows_what_each_run_did_and_which_values_differ(bench):
    assert squeezed(TABLE.split("\n")) == squeezed(lines_of(bench))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_what_is_left_out_is_named(bench, width):
    lines = lines_of(bench, width)
    assert max(map(len, lines[:5])) <= width
    titles = set(lines[0].split())
    assert {"run", "status"} <= titles
    left_out = lines[5].partition("narrow: ")[2].split(", ") if "narrow" in lines[5] else []
    assert {"run", "status", "step", "eval_loss", "best", "lr", "optimizer", "started", "time", "tok/s"} == (
        titles | set(left_out)
    )


def test_an_empty_folder_says_what_makes_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["runs"])
    out, err = capsys.readouterr()
    assert "no runs\n" == out
    assert "'fgcli train' makes one" in err


def test_json_and_csv_have_every_run_and_every_value_that_differs(bench, capsys):
    assert 0 == main(["runs", "--json", "--sort", "-best"])
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert 0 == main(["runs", "--csv", "--sort", "-best"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    assert ["1.8", "1.8", "1.8", "1.35"] == [row["best"] for row in rows]
    assert [run["run"] for run in runs] == [row["run"] for row in rows]
    assert {"optimizer.lr": 0.003, "optimizer": "torch.optim:AdamW"} == runs[3]["values"]
    assert ["0.003", "torch.optim:AdamW", "1.5"] == [
        rows[3][name] for name in ("optimizer.lr", "optimizer", "eval_loss")
    ]
    failed = next(run for run in runs if run["status"] == "failed")
    assert "ValueError: bad row" == failed["cause"]


def test_json_is_strict_also_for_numbers_that_are_not_finite(bench, capsys):
    run = run_of(bench, 0)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "nan", "grad_norm": "inf"}\n')
    assert 0 == main(["runs", "--json"])

    def refuse(text):
        raise AssertionError(text)

    runs = json.loads(capsys.readouterr().out, parse_constant=refuse)["runs"]
    assert {"nan", "inf"} == {runs[-1]["metrics"][name] for name in ("loss", "grad_norm")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--status", "killed,failed"], [3, 2]),
        (["--where", "optimizer.lr<5e-3", "--sort", "-eval_loss"], [0, 1]),
        (["--sort", "-time", "-n", "2", "--where", "status~finished|killed"], [3, 1]),
        (["ls", "output_models"], [3, 2, 1, 0]),
        (["output_models/tiny/runs/20260101T000100Z-tiny", "output_models/tiny/runs/20260101T000000Z-tiny"], [1, 0]),
        (["-n", "1"], [3]),
    ],
)
def test_options_choose_and_order_runs(bench, capsys, words, expected):
    assert 0 == main(["runs", *words, "--json"])
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run_of(bench, number).name for number in expected] == [run["run"] for run in runs]


def test_a_damaged_run_is_one_sentence_and_the_exit_status_is_1(bench, capsys):
    (run_of(bench, 1) / "summary.json").write_text("{")
    assert 1 == main(["runs"])
    out = capsys.readouterr().out
    assert "! 20260101T000100Z-tiny: summary.json: it is not JSON" in out
    assert 4 == out.count("Z-tiny  ")


def test_runs_that_lack_a_value_are_counted(bench, capsys):
    os.remove(run_of(bench, 0) / "graph.yaml")
    assert 0 == main(["runs", "--where", "dataset.seed=42"])
    assert "1 run without 'dataset.seed' is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["nowhere"], 1, "error[FG500]: 'nowhere' does not exist"),
        (["--sort", "evalloss"], 1, "error[FG501]: no run has 'evalloss'"),
        (["--json", "--csv"], 1, "error[FG450]: two formats are given: --json and --csv"),
        (["--where", "lr"], 1, "error[FG502]: 'lr' is not a condition"),
        (["--status", "dead"], 2, "'dead' is not one of running"),
        (["-n", "0"], 2, "'0' is not a number from 1"),
        (["show", "2026"], 1, "error[FG500]: '2026' is part of the names of 4 runs"),
        (["show", "20260101T000400Z-tiny"], 1, "error[FG500]: there is no run '20260101T000400Z-tiny'"),
        (["show", "output_models/tiny"], 1, "error[FG500]: 'output_models/tiny' is not the folder of a run"),
        (["rm", "last"], 1, "error[FG503]: there is no terminal to ask whether 1 run folder may be removed"),
        (["tag", "output_models/tiny", "last"], 1, "error[FG504]: 'output_models/tiny' is a folder"),
    ],
)
def test_wrong_words_are_refused_in_one_message(bench, capsys, words, status, message):
    try:
        assert status == main(["runs", *words])
    except SystemExit as ended:
        assert status == ended.code
    error = capsys.readouterr().err
    assert message in error
    assert "help:" in error
    assert "Traceback" not in error


def test_show_prints_what_is_known_about_a_run(bench, capsys):
    run = next(bench.glob("output_models/*/runs/*000200*"))
    record(str(run), [Intervention(step=13, action=Action.SET, name="learning_rate", value=0.002, factor=0.2)])
    assert 0 == main(["runs", "show", "000200"])
    out = capsys.readouterr().out
    for text in (
        "status   failed",
        "cause    ValueError: bad row",
        "best     eval_loss 1.8, at step 100",
        "optimizer.lr  0.01",
        "changed  learning_rate set to 0.002 after step 13",
    ):
        assert text in out
    assert 0 == main(["runs", "show", "last", "--json"])
    (last,) = json.loads(capsys.readouterr().out)["runs"]
    assert ("killed", "fgcli train", []) == (last["status"], last["command"], last["interventions"])
    (run / "interventions.jsonl").write_text("{}\n")
    assert 1 == main(["runs", "show", "000200"])
    assert "! " in (out := capsys.readouterr().out) and "the line is not an intervention" in out


def test_labels_are_given_taken_listed_and_found(bench, capsys):
    assert 0 == main(["runs", "tag", "good,paper", "000000", "000100"])
    assert 0 == main(["runs", "untag", "paper", "000000"])
    (bench / "sweep").mkdir()
    assert 0 == main(["runs", "group", "sweep", "000100", "last"])
    assert 0 == main(["runs", "note", "rate too high", "000200"])
    capsys.readouterr()

    def found(*words):
        assert 0 == main(["runs", *words, "--json"])
        return [run["run"][9:15] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert ["000100", "000000"] == found("--tag", "good")
    assert ["000100"] == found("--where", "tag=paper")
    assert ["000300", "000200", "000000"] == found("--where", "tag!=paper")
    assert ["000300", "000100"] == found("--group", "sweep")
    assert ["000200"] == found("--where", "note~high")
    assert {"group": None, "tags": ["good"], "note": None} == json.loads((run_of(bench, 0) / "labels.json").read_text())
    assert 0 == main(["runs", "untag", "good", "000000"])
    assert not (run_of(bench, 0) / "labels.json").exists()


def test_what_another_version_wrote_beside_the_labels_stays(bench):
    file = run_of(bench, 0) / "labels.json"
    file.write_text(json.dumps({"tags": ["a"], "stars": 5}))
    for words in (["tag", "b"], ["untag", "a,b"]):
        assert 0 == main(["runs", *words, str(run_of(bench, 0))])
    assert {"group": None, "tags": [], "note": None, "stars": 5} == json.loads(file.read_text())


def test_tags_that_are_given_at_the_same_time_are_all_kept(bench):
    folder = str(run_of(bench, 0))
    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            change_labels(folder, lambda labels, n=number: replace(labels, tags=(*labels.tags, f"tag{n}")))
            os._exit(0)
        children.append(child)
    assert [0] * 6 == [os.waitpid(child, 0)[1] for child in children]
    assert tuple(f"tag{number}" for number in range(6)) == read_labels(folder).tags


def test_labels_that_could_not_be_read_again_are_not_written(bench, capsys):
    assert 0 == main(["runs", "tag", "a", str(run_of(bench, 0))])
    assert 1 == main(["runs", "note", "x" * 1_000_000, str(run_of(bench, 0))])
    assert "error[FG504]" in capsys.readouterr().err
    assert ("a",) == read_labels(str(run_of(bench, 0))).tags


def test_damaged_labels_are_kept_and_no_other_label_is_written(bench, capsys):
    (run_of(bench, 1) / "labels.json").write_text("mine, not JSON")
    assert 1 == main(["runs", "tag", "x", "000000", "000100"])
    assert "error[FG504]" in capsys.readouterr().err
    assert "mine, not JSON" == (run_of(bench, 1) / "labels.json").read_text()
    assert not (run_of(bench, 0) / "labels.json").exists()


def test_rm_removes_the_run_folder_and_nothing_else(bench, capsys):
    out = bench / "output_models" / "tiny"
    (out / "checkpoint-100").mkdir()
    (out / "model.safetensors").write_text("weights")
    assert 0 == main(["runs", "rm", "000000", "--dry-run"])
    assert "stays: 1 checkpoint in output_models/tiny" in capsys.readouterr().out
    assert run_of(bench, 0).exists()

    assert 0 == main(["runs", "rm", "000000", "--yes"])
    assert "1 run removed" in capsys.readouterr().out
    assert not run_of(bench, 0).exists()
    assert {"checkpoint-100", "model.safetensors", "runs"} == set(os.listdir(out))
    assert 3 == len(os.listdir(out / "runs"))


def test_an_archive_has_every_byte_of_the_run_folder_and_restores_it(bench, capsys):
    run = run_of(bench, 1)
    (run / "templates").mkdir()
    (run / "templates" / "a.yaml").write_text("a: 1\n")
    (run / "link").symlink_to("run.json")
    before = {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert 0 == main(["runs", "archive", "000100", "--yes"])
    assert not run.exists()
    file = run.parent / "archive" / f"{run.name}.tar.gz"
    assert f"tar -xzf {os.path.relpath(file)}" in capsys.readouterr().out
    with tarfile.open(file) as archive:
        archive.extractall(run.parent, filter="data")
    assert before == {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert 1 == main(["runs", "archive", "000100", "--yes"])
    assert "exists" in capsys.readouterr().err
    assert run.exists()


def test_the_command_that_restores_an_archive_can_be_pasted(bench, capsys):
    run = make_run(bench / "my models", 9)
    assert 0 == main(["runs", "archive", "000900", "--yes"])
    command = capsys.readouterr().out.partition("(to restore: ")[2].strip().removesuffix(")")
    assert 0 == subprocess.run(command, shell=True, check=False).returncode
    assert (run / "run.json").exists()


def test_an_archive_that_cannot_be_written_leaves_the_run(bench, capsys):
    run = run_of(bench, 1)
    (run.parent / "archive").write_text("a file in place of the folder")
    assert 1 == main(["runs", "archive", "000100", "--yes"])
    assert "the run folder is unchanged" in capsys.readouterr().err
    assert (run / "run.json").exists()


@pytest.mark.parametrize("status", [Status.RUNNING, Status.PAUSED])
@pytest.mark.parametrize("action", ["rm", "archive"])
def test_a_run_that_goes_on_is_not_touched(bench, capsys, action, status):
    make_run(bench / "other", 9, status=status)
    assert 1 == main(["runs", action, "000900", "000000", "--yes"])
    assert "error[FG503]: 20260101T000900Z-tiny goes on" in capsys.readouterr().err
    assert run_of(bench, 0).exists()


def test_a_run_of_an_older_version_that_may_go_on_is_not_touched_while_its_files_are_young(bench, capsys):
    folder = make_run(bench / "other", 9, status=None)
    (folder / "summary.json").write_text('{"status": "running"}')
    assert 1 == main(["runs", "rm", "000900", "--yes"])
    for name in os.listdir(folder):
        os.utime(folder / name, (STARTED, STARTED))
    assert 0 == main(["runs", "rm", "000900", "--yes"])


def test_a_run_of_a_machine_whose_clock_is_behind_is_not_touched_while_its_heartbeat_is_young(bench, capsys):
    elsewhere = {"hostname": "another", "boot_id": "another"}
    for number, age, expected in ((8, 300, 1), (9, 700, 0)):
        make_run(bench / "other", number, status=Status.RUNNING, updated=time.time() - age, **elsewhere)
        assert expected == main(["runs", "rm", f"000{number}00", "--yes"])
    assert "20260101T000800Z-tiny goes on" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["rm", "archive"])
def test_a_folder_with_metrics_and_other_files_is_no_run_to_remove(bench, capsys, action):
    mine = bench / "mine"
    (mine / "thesis").mkdir(parents=True)
    (mine / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (mine / "thesis" / "chapter.tex").write_text("years of work")
    assert 1 == main(["runs", action, "mine", "000000", "--yes"])
    assert "mine has metrics and no record of a run" in capsys.readouterr().err
    assert "years of work" == (mine / "thesis" / "chapter.tex").read_text()
    assert run_of(bench, 0).exists()


def repeats(bench, other):
    return make_run(bench / "again", 8, record={"rerun_of": str(run_of(bench, other))}), "repeats it"


def resumes(bench, other):
    assert other == 3
    return make_run(bench / "output_models" / "tiny", 8, resume="auto"), "resumed after it"


def uses_model(bench, other):
    model = "output_models/tiny/checkpoint-5"
    record = {"project_dir": str(bench)}
    return make_run(bench / "elsewhere", 8, model=model, record=record), "uses tiny/checkpoint-5"


def resumes_from_another_folder(bench, other):
    path = str(bench / "output_models" / "tiny" / "checkpoint-5")
    return make_run(bench / "elsewhere", 8, resume=path), "uses tiny/checkpoint-5"


@pytest.mark.parametrize("refer", [repeats, resumes, uses_model, resumes_from_another_folder])
def test_a_run_that_others_refer_to_is_removed_only_together_with_them(bench, capsys, refer):
    referrer, how = refer(bench, 3)
    assert 1 == main(["runs", "rm", "000300", "--yes"])
    error = capsys.readouterr().err
    assert "error[FG503]: 1 of 1 cannot be removed, because others refer to it" in error
    assert f"{referrer.name} {how}" in " ".join(error.split())
    assert run_of(bench, 3).exists()
    assert 0 == main(["runs", "rm", "000000", "--dry-run"]), "the others are not referred to"
    assert 0 == main(["runs", "rm", "000300", referrer.name, "--yes"])
    assert not run_of(bench, 3).exists()
    assert not referrer.exists()


def test_a_user_who_says_no_keeps_the_run(bench, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert 0 == main(["runs", "rm", "000000"])
    assert run_of(bench, 0).exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert 0 == main(["runs", "rm", "000000"])
    assert not run_of(bench, 0).exists()


def test_the_data_frame_has_the_values_of_the_csv(bench, capsys):
    pandas = pytest.importorskip("pandas")
    import forgather

    assert 0 == main(["runs", "--csv", "--sort", "eval_loss"])
    expected = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    frame = forgather.runs(str(bench), sort="eval_loss")
    assert isinstance(frame, pandas.DataFrame)
    assert [row["run"] for row in expected] == list(frame["run"])
    assert list(expected[0]) == list(frame.columns)
    assert [0.003] == list(forgather.runs(bench, where=["eval_loss<1.9"])["optimizer.lr"])
    assert 2026 == frame["started"].dt.year[0]
    assert forgather.runs(bench / "output_models", where="eval_loss<0").empty


def test_without_pandas_one_error_says_what_to_do(bench):
    code = "import sys; sys.modules['pandas'] = None\nimport forgather\nforgather.runs('.')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[FG505] forgather.runs() needs pandas" in done.stderr
