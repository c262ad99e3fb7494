"""The folder of a past run: read back, compared with another one and with what its config gives now."""

import json
import os
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.config.equality import same_graph
from forgather.config.insight.diff import diff
from forgather.config.path import format_path
from forgather.errors import ProjectError
from forgather.launch import plan_run, prepare_run
from forgather.project.comparison import compare
from forgather.project.comparison_sides import open_sides
from forgather.project.dependencies import changed_data
from forgather.project.dynamic_args import without_options
from forgather.project.project import Project
from forgather.project.run_reader import open_run
from tests.project.test_template_globals import VALUES
from tests.project.workbench import make_project

BASE = """\
meta: {host: {{ hostname }}, at: {{ isotime() | toyaml }}, word: {{ env('BENCH_DIR', 'none') }}}
dynamic_args:
  lr: {names: --lr, type: float}
args: &args !singleton:toy.py:Arguments
-- block args
  output_dir: {{ project_dir }}/out
  lr: {{ lr | default(0.1) }}
  secret: !env BENCH_SECRET
-- endblock args
main: !singleton:toy.py:Trainer
  args: *args
  run_dir: !var {name: run_dir, default: ~}
"""
TOY = """\
import helper, my_secrets

class Arguments:
    def __init__(self, output_dir=None, lr=0.5, secret=None, fused=None):
        pass

class Trainer:
    def __init__(self, args, run_dir=None, extra=None):
        pass

    def train(self):
        pass
"""
FILES = {
    "templates/base.yaml": BASE,
    "templates/configs/a.yaml": "-- extends 'base.yaml'\n",
    "toy.py": TOY,
    "helper.py": "import os\n",
    "my_secrets.py": "KEY = 'hunter2'\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", FILES)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    return folder


def recorded(folder, **given):
    return prepare_run(plan_run(Project("a", folder, **given)), ["fgcli", "train"])


def told(*words):
    old, new = open_sides(*words, *(None,) * (2 - len(words)), None, None)
    return [
        (str(d.change), format_path(d.path), d.old.text, d.new.text)
        + tuple(
            side.origin and f"{view.place(side.origin.span.file)}:{side.origin.span.line}"
            for view, side in ((old, d.old), (new, d.new))
        )
        for d in compare(old, new)
    ]


def test_a_run_is_what_its_config_gives_now_options_and_clock_included(bench, monkeypatch):
    monkeypatch.setenv("BENCH_DIR", "word")
    run = recorded(bench, overrides=[("args.lr", "0.3"), ("+args.more", "[1]")], lr=0.2)

    assert [] == told(run)
    assert same_graph(open_run(run).built, open_run(run).graph)


def test_a_run_knows_the_lines_of_its_templates_as_they_were(bench):
    run = recorded(bench)
    (bench / "templates/base.yaml").write_text("\n" + BASE.replace("0.1", "0.2"))

    assert [("value", "args.lr", "0.1", "0.2", "templates/base.yaml:7", "templates/base.yaml:8")] == told(run)


def test_the_templates_of_a_run_see_every_standard_name_as_they_did(bench, monkeypatch):
    monkeypatch.setenv("GLOBALS_TEST_DIR", "set here")
    monkeypatch.setenv("NOT_SET_GLOBALS_DIR", "set here")
    lines = [f"v{number}: {{{{ ({expression}) | string | toyaml }}}}" for number, expression in enumerate(VALUES)]
    (bench / "templates/configs/a.yaml").write_text("\n".join(lines) + "\nmain: !partial:builtins:dict\n  a: 1\n")
    run = open_run(recorded(bench))
    monkeypatch.setattr("forgather.project.versions.sys.version", "2.7.1 (old)")
    again = diff(run.built, without_options(run.rendered_again))

    assert [] == [(format_path(item.path), item.old.text, item.new.text) for item in again]
    assert run.graph is not run.built


def test_two_runs(bench):
    one, two = recorded(bench), recorded(bench, overrides=[("args.lr", "7")])

    assert ["args.lr"] == [item[1] for item in told(one, two) if item[1] != "meta.at"]
    assert ("value", "args.lr", "0.1", "7") == next(item[:4] for item in told(one, two) if item[1] == "args.lr")


def test_a_run_and_another_config(bench):
    (bench / "templates/configs/b.yaml").write_text("-- extends 'base.yaml'\n[args]\n  == super()\n  lr: 9\n")
    run = recorded(bench)

    assert ("0.1", "9") == next(item[2:4] for item in told(run, "b") if item[1] == "args.lr")
    assert ("9", "0.1") == next(item[2:4] for item in told("b", run) if item[1] == "args.lr")


def test_a_default_and_a_source_file_that_have_changed_are_reported(bench):
    run = recorded(bench)
    (bench / "toy.py").write_text(TOY.replace("fused=None", "fused=True, eps=1").replace(", extra=None", ""))

    assert [
        ("code", "args", "toy.py", "has changed"),
        ("default", "args.fused", "Arguments(fused=) had default None,", "now True"),
        ("default", "args.eps", "Arguments(eps=) is new,", "with default 1"),
        ("default", "main.extra", "Trainer(extra=) is gone,", "had default None"),
    ] == [item[:4] for item in told(run)]


def test_a_default_that_the_call_gives_is_not_a_difference(bench):
    run = recorded(bench)
    (bench / "toy.py").write_text(TOY.replace("lr=0.5", "lr=0.6"))

    assert ["code"] == [item[0] for item in told(run)]


def test_nothing_secret_is_in_the_folder_and_code_is_kept_with_what_it_imports(bench):
    run = Path(recorded(bench))
    texts = [file.read_text() for file in run.rglob("*") if file.is_file()]
    facts = json.loads((run / "run.json").read_text())

    assert "hunter2" not in "".join(texts)
    assert {"BENCH_SECRET": True} == facts["environment_needed"]
    assert {"templates/project/toy.py", "templates/project/helper.py", "graph.yaml"} <= facts["files"].keys()


def test_data_that_arguments_name_is_known_by_content(bench):
    (bench / "data/inner").mkdir(parents=True)
    (bench / "data/inner/a.txt").write_text("a")
    (bench / "rows.jsonl").write_text("{}")
    (bench / "templates/configs/a.yaml").write_text(
        "-- extends 'base.yaml'\n[args]\n  == super()\n  rows: [rows.jsonl, data/*/*.txt, nowhere/x, /, '..']\n  data: data/inner\n"
    )
    run = Path(recorded(bench))
    data = json.loads((run / "run.json").read_text())["data"]

    assert ["rows.jsonl", "data/*/*.txt", "data/inner"] == [item["named"] for item in data]
    assert [1, 1, 1] == [len(item["files"]) for item in data]
    assert 1 == next(iter(data[1]["files"].values()))["size"]


def test_a_folder_of_an_older_format_says_so_and_is_compared(bench):
    run = Path(recorded(bench))
    facts = json.loads((run / "run.json").read_text())
    for name in ("form", "instant", "uname", "template", "workspace_root", "library", "files"):
        facts.pop(name)
    (run / "run.json").write_text(json.dumps(facts))
    (run / "signatures.json").unlink()
    (bench / "templates/base.yaml").write_text(BASE.replace("0.1", "0.2"))
    old, _ = open_sides(str(run), None, None, None)

    (note,) = old.notes
    assert ("FG435", "warning") == (note.code, note.severity)
    assert "older format: it has no form number" in note.message
    assert ("value", "args.lr", "0.1", "0.2") in [item[:4] for item in told(str(run))]


def test_a_folder_of_a_newer_format_says_so(bench):
    run = Path(recorded(bench))
    facts = json.loads((run / "run.json").read_text()) | {"form": 99}
    (run / "run.json").write_text(json.dumps(facts))

    assert "a newer format: form 99" in open_run(str(run)).notes[0].message


@pytest.mark.parametrize("name", ["run.json", "graph.yaml", "overrides.yaml"])
@pytest.mark.parametrize("text", ["[1", "", "\0"])
def test_a_damaged_folder_is_reported_by_its_file(bench, name, text):
    run = Path(recorded(bench))
    (run / name).write_text(text)

    with pytest.raises(ProjectError, match=rf"\[FG438\] the record of the run .* is damaged: {name}"):
        told(str(run))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", "2"),
        ("form", True),
        ("project_dir", 5),
        ("project_dir", "a\0b"),
        ("workspace_root", "a\ud800b"),
        ("instant", "yesterday"),
        ("instant", [1]),
        ("search_path", "x"),
        ("system_path", [5]),
        ("environment_read", []),
        ("versions", {"python": 3}),
        ("data", [{}]),
        ("data", [{"named": "a.txt", "files": 5}]),
        ("data", [{"named": "a.txt", "files": {"/a.txt": {}}}]),
    ],
)
def test_a_fact_of_another_kind_is_reported_by_its_name(bench, name, value):
    run = Path(recorded(bench))
    facts = json.loads((run / "run.json").read_text()) | {name: value}
    (run / "run.json").write_text(json.dumps(facts))

    with pytest.raises(ProjectError, match=rf"\[FG438\] the record .* is damaged: run.json: '{name}' "):
        open_run(str(run))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_too_deep_is_a_damaged_record(bench, text):
    run = Path(recorded(bench))
    (run / "signatures.json").write_text(text)
    (note,) = open_run(str(run)).notes
    assert ("FG438", "defaults of signatures are not compared") == (note.code, note.hint)
    assert {} == open_run(str(run)).defaults

    (run / "run.json").write_text(text)
    with pytest.raises(ProjectError, match=r"\[FG438\] .* run.json: it is not a JSON object"):
        open_run(str(run))


@pytest.mark.parametrize("name", ["run.json", "graph.yaml", "overrides.yaml"])
@pytest.mark.parametrize("device", ["pipe", "/dev/zero", "gone"])
def test_what_is_not_a_file_is_not_waited_for(bench, name, device):
    run = Path(recorded(bench))
    (run / name).unlink()
    if device == "pipe":
        os.mkfifo(run / name)
    elif device != "gone":
        (run / name).symlink_to(device)

    with pytest.raises(ProjectError, match="FG43[78]"):
        told(str(run))


def test_a_link_to_a_run_is_that_run(bench):
    run = Path(recorded(bench))
    Path("latest").symlink_to(run)

    assert str(run) == open_run("latest/").folder
    assert str(bench / "out") == open_run("latest").output_dir


def test_a_project_that_is_gone_is_reported(bench, monkeypatch):
    run = recorded(bench)
    (bench / "meta.yaml").unlink()

    with pytest.raises(ProjectError, match="FG401") as caught:
        told(run)
    assert f"the config of the run {Path(run).name}" in caught.value.context


def test_a_folder_around_runs_names_them(bench):
    run = Path(recorded(bench))

    for word in ("out", "out/runs", "out/runs/nothing"):
        with pytest.raises(ProjectError) as caught:
            open_run(word)
        assert "FG437" == caught.value.code
        assert f"runs there, newest first: out/runs/{run.name}" == caught.value.hint


def test_the_folder_of_a_project_names_the_runs_in_its_output_folders(bench):
    run = Path(recorded(bench))
    kept = bench / "output_models" / "small" / "runs" / run.name
    kept.parent.mkdir(parents=True)
    run.rename(kept)

    with pytest.raises(ProjectError) as caught:
        open_run(".")
    assert f"runs there, newest first: output_models/small/runs/{run.name}" == caught.value.hint


def test_the_folder_of_a_run_that_nothing_was_recorded_of_is_reported_as_one(bench):
    folder = bench / "out/runs/20260101T000000Z-1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")

    for opens in (open_run, lambda word: open_sides(word, None, None, None)):
        with pytest.raises(ProjectError, match="was not started by 'fgcli train'") as caught:
            opens("out/runs/20260101T000000Z-1")
        assert "FG437" == caught.value.code
        assert "no config" in caught.value.hint


def test_files_of_data_that_changed_are_named(bench):
    folder = bench / "rows"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text("a")
    (bench / "templates/configs/a.yaml").write_text("-- extends 'base.yaml'\n[args]\n  == super()\n  rows: ./rows\n")
    run = open_run(recorded(bench))
    for number in range(6):
        (folder / f"{number}.txt").write_text("b")
    (folder / "7.txt").unlink()

    ((_, then, now),) = changed_data(run.listed("data"), str(bench))
    assert "8 files" == then
    assert "6 changed (0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 1 more), 1 gone (7.txt)" == now


def test_a_file_that_is_too_large_for_a_digest_is_known_by_size_and_time(bench, monkeypatch):
    monkeypatch.setattr("forgather.project.dependencies._MAX_DIGESTED", 3)
    (bench / "rows.txt").write_text("large")
    (bench / "few.txt").write_text("1")
    (bench / "templates/configs/a.yaml").write_text(
        "-- extends 'base.yaml'\n[args]\n  == super()\n  rows: [rows.txt, few.txt]\n"
    )
    run = open_run(recorded(bench))
    assert [True, False] == [fact["digest"] is None for item in run.listed("data") for fact in item["files"].values()]
    assert [] == changed_data(run.listed("data"), str(bench))

    for name in ("rows.txt", "few.txt"):
        os.utime(bench / name, (1, 1))

    assert [("rows.txt", "1 file", "1 changed")] == changed_data(run.listed("data"), str(bench))


def test_a_run_is_called_by_a_path_that_can_be_typed(bench, monkeypatch):
    run = recorded(bench)
    assert f"out/runs/{Path(run).name}" == open_sides(run, None, None, None)[0].title
    (bench / "elsewhere").mkdir()
    monkeypatch.chdir(bench / "elsewhere")
    assert run == open_sides(run, None, None, None)[0].title


def test_an_option_that_two_runs_were_given_is_named(bench, capsys):
    runs = [recorded(bench, lr=lr) for lr in (0.5, 0.7)]

    assert 1 == main(["diff", *runs])
    assert "  ~ lr: 0.5 -> 0.7  option --lr\n" in capsys.readouterr().out
    assert 1 == main(["diff", *runs, "--json"])
    ((old, new),) = [(item["old"], item["new"]) for item in json.loads(capsys.readouterr().out)["differences"]]
    assert (0.5, 0.7, "--lr", "--lr") == (old["value"], new["value"], old["option"], new["option"])
    assert 1 == main(["diff", runs[0], "a"])
    assert "  ~ lr: 0.5 -> 0.1  option --lr -> templates/base.yaml:7\n" in capsys.readouterr().out
