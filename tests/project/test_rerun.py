"""A past run once more: verified first, with its own code, into another folder."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.project.comparison import compare
from forgather.project.comparison_sides import open_sides
from forgather.project.rerun import compare_losses
from forgather.project.run_reader import open_run
from tests.project.workbench import fgcli, make_project

TOY = """\
import json
import os

def loss(lr, step):
    return lr / (step + 1)

class Arguments:
    def __init__(self, output_dir=None, lr=0.5, secret=None, data=None):
        self.output_dir, self.lr, self.data = output_dir, lr, data

class Trainer:
    def __init__(self, args, run_dir=None):
        self.args, self.run_dir = args, run_dir

    def train(self):
        with open(os.path.join(self.run_dir, "loss.jsonl"), "w") as stream:
            for step in range(3):
                stream.write(json.dumps({"step": step, "loss": loss(self.args.lr, step)}) + "\\n")

    def save_model(self):
        os.makedirs(self.args.output_dir, exist_ok=True)
        with open(os.path.join(self.args.output_dir, "model"), "w") as stream:
            stream.write("weights")
"""
CONFIG = """\
args: &args !singleton:toy.py:Arguments
  output_dir: {{ project_dir }}/out
  lr: {{ lr | default(0.1) }}
  secret: !env BENCH_SECRET
  data: {{ project_dir }}/rows.txt
main: !singleton:toy.py:Trainer
  args: *args
  run_dir: !var {name: run_dir, default: ~}
"""
FILES = {
    "templates/configs/a.yaml": CONFIG,
    "toy.py": TOY,
    "rows.txt": "some rows",
}


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The folder of a run that has trained; the project is the working folder."""
    monkeypatch.chdir(make_project(tmp_path / "bench", FILES))
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    assert 0 == main(["-t", "a", "train", "--set", "args.lr=0.7"])
    (run,) = Path("out/runs").glob("2*")
    return run.resolve()


def again(run, *options):
    status = main(["rerun", str(run), *options])
    runs = [*run.parents[1].glob("reruns/*/runs/2*")]
    return status, runs[-1] if runs else None


def rows(run, capsys, *options):
    capsys.readouterr()
    status = main(["rerun", str(run), "--dry-run", "--json", *options])
    facts = json.loads(capsys.readouterr().out)
    told = [(row["fate"], row["what"], row["name"], row["now"]) for row in facts["rows"] if row["fate"] != "same"]
    return status, told


def test_a_run_is_repeated_to_the_same_loss_file_and_the_first_run_is_left_as_it_is(first, capsys):
    before = {file: file.read_bytes() for file in first.parents[1].rglob("*") if file.is_file()}

    status, second = again(first)

    assert 0 == status
    assert (first / "loss.jsonl").read_bytes() == (second / "loss.jsonl").read_bytes()
    assert "loss file   identical bytes, 3 lines" in capsys.readouterr().err
    assert before == {file: file.read_bytes() for file in before}
    assert "weights" == (second.parents[1] / "model").read_text()


def test_the_repeated_run_is_a_run_like_the_first(first):
    _, second = again(first)
    _, third = again(second, "--output-dir", "third")
    facts = json.loads((second / "run.json").read_text())
    old, now = open_sides(str(second), None, None, None)

    assert str(first) == facts["rerun_of"]
    assert "hunter2" not in "".join(file.read_text() for file in second.rglob("*") if file.is_file())
    assert () == compare(old, now)
    assert ["args.output_dir"] == [
        ".".join(str(s.name) for s in d.path) for d in compare(*open_sides(str(first), str(second), None, None))
    ]
    (third,) = Path("third/runs").glob("2*")
    assert (first / "loss.jsonl").read_bytes() == (third / "loss.jsonl").read_bytes()


def test_two_at_once_have_a_folder_each(first):
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda _: fgcli("rerun", str(first), cwd=Path.cwd()), range(3)))

    assert [] == [done.stderr for done in ended if done.returncode]
    assert 3 == len([*first.parents[1].glob("reruns/*/model")])


def test_links_and_pipes_in_the_folder_are_not_followed(first):
    kept = first / "templates/project"
    (kept / "endless.yaml").symlink_to("/dev/zero")
    (kept / "above").symlink_to(first)
    os.mkfifo(kept / "pipe.py")
    os.mkfifo(first / "pipe")

    status, second = again(first, "--anyway")

    assert 0 == status
    assert (second / "templates/project/endless.yaml").is_symlink()


def test_nothing_changed(first, capsys):
    assert (0, []) == rows(first, capsys)
    assert 0 == main(["rerun", str(first), "--dry-run"])
    assert "unchanged: 8 files of the record, 2 templates, " in capsys.readouterr().out


def test_the_code_of_then_is_used_where_the_project_has_another(first, capsys):
    Path("toy.py").write_text(TOY.replace("lr / (step + 1)", "0"))

    assert ("restored", "code", "toy.py", "changed; the run's copy is used") in rows(first, capsys)[1]
    status, second = again(first)
    assert (0, True) == (status, (first / "loss.jsonl").read_bytes() == (second / "loss.jsonl").read_bytes())


def test_the_copy_of_the_code_is_left_as_it_is(first, capsys, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    Path("toy.py").write_text(TOY.replace("lr / (step + 1)", "0"))
    before = sorted(first.rglob("*"))

    assert 0 == again(first)[0]
    assert before == sorted(first.rglob("*"))
    (first / "templates/project/__pycache__").mkdir()
    (first / "templates/project/__pycache__/toy.pyc").write_bytes(b"x")
    assert ["toy.py"] == [name for _, _, name, _ in rows(first, capsys)[1]]


def test_a_changed_template_does_not_matter(first, capsys):
    Path("templates/configs/a.yaml").write_text(CONFIG.replace("lr:", "learning_rate:"))

    assert ("restored", "template", "templates/configs/a.yaml", "changed; the run's copy is used") in rows(
        first, capsys
    )[1]
    assert 0 == again(first)[0]


def test_a_project_that_is_gone_does_not_matter_if_its_data_is_not_needed(first, capsys, monkeypatch, tmp_path):
    keep = tmp_path / "kept"
    first.parents[1].rename(keep)
    for name in ("toy.py", "meta.yaml"):
        Path(name).unlink()
    monkeypatch.chdir(tmp_path)
    run = keep / "runs" / first.name

    status, second = again(run)

    assert 0 == status
    assert (run / "loss.jsonl").read_bytes() == (second / "loss.jsonl").read_bytes()
    assert keep in second.parents


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_data_that_is_another_one_is_refused(first, capsys, change):
    if change == "gone":
        Path("rows.txt").unlink()
    else:
        Path("rows.txt").write_text("other rows")
    rows_file = os.path.abspath("rows.txt")

    assert (1, [("lost", "data", rows_file, f"1 {change}")]) == rows(first, capsys)
    assert (1, None) == again(first)
    assert "error[FG439]: 1 thing that the run depends on cannot be restored: data" in capsys.readouterr().err
    assert 0 == again(first, "--anyway")[0]


def test_a_variable_that_is_not_set_is_refused(first, capsys, monkeypatch):
    monkeypatch.delenv("BENCH_SECRET")

    assert (1, [("lost", "environment", "BENCH_SECRET", "not set")]) == rows(first, capsys)


def test_a_record_that_was_edited_is_refused(first, capsys):
    (first / "graph.yaml").write_text((first / "graph.yaml").read_text() + "\n# edited\n")

    assert (1, [("lost", "record", "graph.yaml", "changed")]) == rows(first, capsys)


def test_versions_processors_and_defaults_are_reported(first, capsys):
    facts = json.loads((first / "run.json").read_text())
    facts["versions"] |= {"torch": "0.1", "nothing-of-this-name": "1.0"}
    facts["processors"]["count"] = 999
    (first / "run.json").write_text(json.dumps(facts))
    table = json.loads((first / "signatures.json").read_text())
    table["toy.py:Trainer"]["run_dir"] = "'x'"
    table["toy.py:Arguments"]["lost"] = "1"
    text = json.dumps(table)
    (first / "signatures.json").write_text(text)

    status, told = rows(first, capsys)

    assert 1 == status
    assert ("lost", "version", "nothing-of-this-name", "none") in told
    assert "differs" == next(fate for fate, what, name, _ in told if (what, name) == ("version", "torch"))
    assert "differs" == next(fate for fate, what, name, _ in told if (what, name) == ("processors", "count"))
    assert ("differs", "default", "args.lost", "had default 1") in told


def test_a_constructor_that_is_gone_is_refused(first, capsys):
    graph = first / "graph.yaml"
    graph.write_text(graph.read_text().replace("toy.py:Arguments", "toy.py:Argument"))

    told = rows(first, capsys)[1]

    assert ("lost", "constructor", "toy.py:Argument") in [item[:3] for item in told]


def test_the_output_folder_of_the_first_run_is_never_taken(first, capsys):
    assert 1 == main(["rerun", str(first), "--output-dir", "out"])
    assert "error[FG439]: 'out' is the output folder of the first run" in capsys.readouterr().err
    assert 1 == main(["rerun", str(first), "--output-dir", str(first / "again")])
    assert "is in the folder of the first run" in capsys.readouterr().err


def test_a_folder_of_an_older_format_is_repeated_as_far_as_it_goes(first, capsys):
    facts = json.loads((first / "run.json").read_text())
    kept = {name: facts[name] for name in ("project", "project_dir", "config", "versions", "search_path", "started")}
    (first / "run.json").write_text(json.dumps(kept))
    (first / "signatures.json").unlink()

    status, second = again(first)

    assert 0 == status
    assert "warning[FG435]" in capsys.readouterr().err
    assert (first / "loss.jsonl").read_bytes() == (second / "loss.jsonl").read_bytes()


def test_a_run_that_went_on_from_a_checkpoint_is_reported(tmp_path, monkeypatch, capsys):
    config = CONFIG.replace(
        "data: {{ project_dir }}/rows.txt", "resume_from_checkpoint: {{ project_dir }}/checkpoint-3"
    )
    toy = TOY.replace("data=None):", "data=None, resume_from_checkpoint=None):")
    monkeypatch.chdir(make_project(tmp_path / "bench", {**FILES, "templates/configs/a.yaml": config, "toy.py": toy}))
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    Path("checkpoint-3").mkdir()
    main(["-t", "a", "train"])
    (run,) = Path("out/runs").glob("2*")

    assert (0, []) == rows(run.resolve(), capsys)
    Path("checkpoint-3").rmdir()
    assert ("lost", "checkpoint", "args", "does not exist") in rows(run.resolve(), capsys)[1]


def test_not_a_run(first, capsys):
    assert 1 == main(["rerun", "out"])
    assert f"help: runs there, newest first: out/runs/{first.name}" in capsys.readouterr().err


DRAWS = TOY.replace("import json", "import json\nimport random").replace(
    "loss(self.args.lr, step)", "random.random() if step > 0 else 1"
)


def test_losses_that_differ_end_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_project(tmp_path / "bench", {**FILES, "toy.py": DRAWS}))
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    assert 0 == main(["-t", "a", "train"])
    (first,) = Path("out/runs").glob("2*")

    assert 1 == again(first.resolve())[0]
    assert "loss file   differs from line 2 of 3 on" in capsys.readouterr().err
    assert 1 == main(["rerun", str(first), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (True, False, 2, 0) == tuple(told[key] for key in ("differs", "same_loss", "first_difference", "status"))


@pytest.mark.parametrize(("ours", "theirs", "differ"), [("a\nb\n", "a\nb\n", False), ("a\n", "a\nb\n", False),
    ("a\nb\n", "a\n", True), ("a\n", "b\n", True), (None, "a\n", False), ("a\n", None, True)])  # fmt: skip
def test_what_counts_as_a_difference(tmp_path, ours, theirs, differ):
    for name, text in (("first", ours), ("second", theirs)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "loss.jsonl").write_text(text)
    assert differ == compare_losses(str(tmp_path / "first"), str(tmp_path / "second")).differ


def test_a_run_that_kept_no_losses(first, capsys):
    (first / "loss.jsonl").unlink()
    again(first)
    assert "the first run kept none: nothing to compare" in capsys.readouterr().err
    assert open_run(str(first)).notes == ()


def test_the_report_is_laid_out_as_the_page_of_the_error_shows_it(tmp_path, monkeypatch, capsys):
    files = {**FILES, "templates/configs/a.yaml": CONFIG.replace("{{ project_dir }}/rows.txt", "data/*.json")}
    monkeypatch.chdir(make_project(tmp_path / "bench", {**files, "data/rows.json": "1", "data/b.json": "2"}))
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    assert 0 == main(["-t", "a", "train"])
    (run,) = Path("out/runs").glob("2*")
    Path("data/rows.json").write_text("3")
    capsys.readouterr()
    assert 1 == main(["rerun", str(run)])

    page = (Path(__file__).parents[2] / "docs/errors/FG439.md").read_text()
    shown = [line.removeprefix("    ") for line in page.split("\n") if line.startswith("    ")][1:]
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if not line.startswith(("unchanged", "output folder", "differs", "restored"))] == [
        line for line in shown if not line.startswith(("unchanged", "output folder"))
    ]
    assert [line[:12] for line in printed] == [line[:12] for line in shown]
