import json
from datetime import UTC, datetime

import pytest

from forgather.config.load import load_value
from forgather.errors import ForgatherError, ProjectError, UnknownTargetError
from forgather.launch import plan_run, prepare_run, run
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.run_writer import make_run_folder
from tests.project.workbench import make_project

TRAINER = """\
import os

class Arguments:
    def __init__(self, output_dir=None):
        self.output_dir = output_dir

class Trainer:
    def __init__(self, args, run_dir=None):
        self.args, self.run_dir, self.events = args, run_dir, []

    def train(self):
        self.events.append("train")
        with open(os.path.join(self.run_dir, "metrics.jsonl"), "w") as stream:
            stream.write("{}")

    def save_model(self):
        os.makedirs(self.args.output_dir, exist_ok=True)
        self.events.append("save_model")
        with open(os.path.join(self.args.output_dir, "model"), "w") as stream:
            stream.write(" ".join(self.events))

class Saving(Trainer):
    def train(self):
        super().train()
        self.save_model()
        self.saved_to = self.args.output_dir

class Interrupted(Trainer):
    def train(self):
        os.makedirs(os.path.join(self.args.output_dir, "checkpoint-3"))
        raise KeyboardInterrupt

class Unsaved(Trainer):
    def train(self):
        raise KeyboardInterrupt

class Broken(Trainer):
    def train(self):
        raise RuntimeError("out of memory")

def status(value):
    return value
"""
CONFIG = """\
-- set kind = kind | default('Trainer')
args: &args !singleton:toy.py:Arguments
  output_dir: !calc "1"
main: !singleton:toy.py:{{ kind }}
  args: *args
  run_dir: !var run_dir
"""


def project(folder, text=CONFIG, **settings):
    text = text.replace('!calc "1"', str(folder / "out"))
    make_project(folder, {"templates/configs/a.yaml": text, "toy.py": TRAINER})
    return Project("a", folder, **settings)


def ended(one):
    plan = plan_run(one)
    return run(plan, prepare_run(plan, ["fgcli", "train"]))


def test_a_trainer_is_trained_and_saved(tmp_path):
    outcome = ended(project(tmp_path))

    assert (0, str(tmp_path / "out"), False) == (outcome.status, outcome.model_dir, outcome.interrupted)
    assert "train save_model" == (tmp_path / "out" / "model").read_text()


def test_a_trainer_that_has_saved_is_not_made_to_save_again(tmp_path):
    outcome = ended(project(tmp_path, kind="Saving"))

    assert str(tmp_path / "out") == outcome.model_dir
    assert "train save_model" == (tmp_path / "out" / "model").read_text()


def test_the_run_folder_is_handed_to_the_construction(tmp_path):
    outcome = ended(project(tmp_path))

    assert outcome.run_dir.startswith(str(tmp_path / "out" / "runs"))
    assert (tmp_path / outcome.run_dir / "metrics.jsonl").exists()


def test_a_trainer_without_an_output_folder_is_not_saved(tmp_path):
    text = "main: !singleton:toy.py:Trainer\n  args: !singleton:toy.py:Arguments\n  run_dir: !var run_dir\n"

    assert ended(project(tmp_path, text)).model_dir is None


@pytest.mark.parametrize(("value", "status"), [("3", 3), ("0", 0), ("~", 0), ("true", 0), ("text", 0)])
def test_a_callable_is_called_and_a_number_is_the_exit_status(tmp_path, value, status):
    assert status == ended(project(tmp_path, f"main: !partial:toy.py:status [{value}]\n")).status


def test_what_can_neither_train_nor_be_called_is_an_error_with_its_place(tmp_path):
    with pytest.raises(ProjectError, match="'main' is of type dict, which can neither train nor be called") as caught:
        ended(project(tmp_path, "a: 1\nmain: !call:dict {lr: 1}\n"))

    assert ("FG412", 2) == (caught.value.code, caught.value.span.line)


def test_a_main_that_is_data_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ProjectError, match="'main' is a mapping, which can neither train nor be called") as caught:
        ended(project(tmp_path, "a: 1\nmain: {lr: 1}\n"))

    assert ("FG412", 2) == (caught.value.code, caught.value.span.line)
    assert not (tmp_path / "output_models").exists()


def test_ctrl_c_says_what_was_saved(tmp_path):
    outcome = ended(project(tmp_path, kind="Interrupted"))

    assert (130, True, str(tmp_path / "out/checkpoint-3")) == (outcome.status, outcome.interrupted, outcome.checkpoint)


def test_ctrl_c_with_nothing_saved_says_so(tmp_path):
    outcome = ended(project(tmp_path, kind="Unsaved"))

    assert (130, None) == (outcome.status, outcome.checkpoint)


def test_an_exception_of_the_run_reaches_the_caller(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        ended(project(tmp_path, kind="Broken"))


def test_a_config_without_main_cannot_run(tmp_path):
    with pytest.raises(UnknownTargetError, match="has no target 'main' to run") as caught:
        plan_run(project(tmp_path, "mian: 1\n"))

    assert "did you mean 'mian'? targets: mian" == caught.value.hint


def test_a_config_with_errors_is_refused_before_anything_is_written(tmp_path):
    text = "-- extends 'base.yaml'\n[lr_schedulr]\n  2\n"
    one = project(tmp_path, text)
    (tmp_path / "templates/base.yaml").write_text("main:\n-- block lr_scheduler\n  1\n-- endblock lr_scheduler\n")

    with pytest.raises(ForgatherError, match="lr_schedulr"):
        plan_run(one)

    assert not (tmp_path / "output_models").exists()


def test_a_plan_writes_nothing(tmp_path):
    plan = plan_run(project(tmp_path))

    assert (str(tmp_path / "out"), "!singleton:toy.py:Trainer") == (plan.output_dir, plan.constructor)
    assert not (tmp_path / "out").exists()


def test_without_a_trainer_the_folder_of_meta_is_taken_relative_to_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    text = "meta: {output_dir: models/x}\nmain: !partial:toy.py:status [0]\n"

    assert str(tmp_path / "models/x") == plan_run(project(tmp_path, text)).output_dir


def test_without_any_output_dir_the_config_names_the_folder(tmp_path):
    assert str(tmp_path / "output_models/a") == plan_run(project(tmp_path, "main: !partial:int\n")).output_dir


def test_an_output_dir_that_is_not_a_folder_is_an_error(tmp_path):
    with pytest.raises(ProjectError, match="'output_dir' of target 'meta' is 3") as caught:
        plan_run(project(tmp_path, "meta: {output_dir: 3}\nmain: !partial:int\n"))

    assert ("FG411", "meta.output_dir") == (caught.value.code, caught.value.path)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    folders = [make_run_folder(str(tmp_path), "exp/tiny.yaml", now) for _ in range(3)]

    assert [str(tmp_path / "runs" / f"20260102T030405Z-exp-tiny{suffix}") for suffix in ("", "-2", "-3")] == folders


RECORDED = """\
-- extends 'base.yaml'
[body]
optimizer: {lr: 1, seed: 42, secret: !env BENCH_SECRET }
word: {{ env('BENCH_DIR', 'none') }}
main: !partial:toy.py:status [0]
"""


def test_the_run_folder_holds_what_repeats_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_SECRET", "hunter2")
    monkeypatch.setenv("BENCH_DIR", "word")
    one = project(tmp_path, RECORDED, overrides=[("optimizer.lr", "3e-4"), ("+optimizer.betas", "[0.9, 0.95]")], n=3)
    (tmp_path / "templates/base.yaml").write_text("-- block body\n-- endblock body\n")

    folder = tmp_path / ended(one).run_dir

    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert [
        "config.yaml",
        "graph.yaml",
        "origins.txt",
        "overrides.yaml",
        "run.json",
        "signatures.json",
        "status.json",
        "templates/project/meta.yaml",
        "templates/project/templates/base.yaml",
        "templates/project/templates/configs/a.yaml",
        "templates/project/toy.py",
    ] == files
    assert one.rendered.text == (folder / "config.yaml").read_text()
    facts = json.loads((folder / "run.json").read_text())
    assert ("a.yaml", "fgcli train", {"optimizer.seed": 42}) == (facts["config"], facts["command"], facts["seeds"])
    assert {"BENCH_DIR": "word"} == facts["environment_read"]
    assert {"python", "torch", "forgather"} <= set(facts["versions"])
    assert "hunter2" not in "".join(file.read_text() for file in folder.rglob("*") if file.is_file())


def test_the_graph_that_is_kept_is_a_config_by_itself_and_runs_next_to_the_code_that_is_kept(tmp_path):
    text = "-- set n = n | default(1)\nword: '{{ \"{{\" }} -- ## {{ n }}'\nplain: 1\n"
    text += "dynamic_args: [{names: --n}]\nmain: !partial:toy.py:status [7]\n"
    one = project(tmp_path, text, overrides=[("plain", "5")], n=3)
    run_dir = tmp_path / ended(one).run_dir
    again = run_dir / "templates" / "project"
    (again / "templates" / "configs" / "b.yaml").write_text((run_dir / "graph.yaml").read_text())

    repeated = Project("b", again)

    assert {"word": "{{ -- ## 3", "plain": 5} == repeated(["word", "plain"])
    assert 7 == ended(repeated).status
    assert ["word", "plain", "main"] == list(repeated.targets)


def test_overrides_are_kept_as_paths_and_yaml_text_that_apply_again(tmp_path):
    overrides = [("optimizer.lr", "3e-4"), ("word", "'a: \"b\"'")]
    one = project(tmp_path, "optimizer: {lr: 1}\nword: x\nmain: !partial:toy.py:status [0]\n", overrides=overrides)
    folder = tmp_path / ended(one).run_dir

    kept = plain_value(load_value((folder / "overrides.yaml").read_text()), "overrides")

    assert overrides == [(item["path"], item["value"]) for item in kept["overrides"]]


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("return 4", 4), ("return 256", 1)]
)
def test_a_callable_may_end_as_a_script_does(tmp_path, ending, status):
    files = {
        "templates/configs/a.yaml": "main: !partial:script.py:main\n",
        "script.py": f"import sys\n\ndef main():\n    {ending}\n",
    }
    make_project(tmp_path, files)

    assert status == run(plan_run(Project("a", tmp_path)), str(tmp_path)).status


def test_the_record_says_what_the_config_and_the_command_line_change_against_the_parent(tmp_path):
    text = "-- extends 'base.yaml'\n[body]\n    == super()\n    lr: 2\n    new: {deep: [1]}\n"
    one = project(tmp_path, text, overrides=[("args.steps", "9")])
    base = "args:\n-- block body\n    lr: 1\n    steps: 3\n    same: 5\n-- endblock body\nmain: !partial:toy.py:status [0]\n"
    (tmp_path / "templates/base.yaml").write_text(base)

    changes = json.loads((tmp_path / ended(one).run_dir / "run.json").read_text())["changes"]

    assert "base.yaml" == changes["parent"]
    assert [("args.lr", "2", "1"), ("args.steps", "9", "3"), ("args.new.deep", "[1]", None)] == [
        (value["path"], value["value"], value["was"]) for value in changes["values"]
    ]
