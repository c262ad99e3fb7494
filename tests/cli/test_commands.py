import json
import re
import runpy
import shlex

import pytest

from forgather.cli.main import main
from forgather.cli.parsing import COMMANDS
from forgather.config.equality import same_graph
from forgather.config.load import load
from forgather.project.project import Project
from tests.project.workbench import make_project

FILES = {
    "templates/base.yaml": """\
meta:
  config_name: {{ ns_name | default("Base") }}
  config_description: The base
dynamic_args:
  steps: {names: [--steps, -n], type: int, default: 3, help: "100% of the steps"}
  fast: {names: --fast, type: bool}
  mode: {names: --mode, choices: [a, b]}
optimizer: &optimizer !singleton:builtins:dict@optimizer
-- block optimizer
  lr: 0.5
  steps: {{ steps | default(3) }}
  fast: {{ fast | default(false) | toyaml }}
  mode: {{ mode | default('a') }}
-- endblock optimizer
main: !call:builtins:list
  - [*optimizer, *optimizer]
""",
    "templates/configs/a.yaml": "-- extends 'base.yaml'\n[optimizer]\n  == super()\n  lr: 0.1\n",
    "templates/configs/b.yaml": "main: !partial:builtins:int [3]\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", FILES, meta="name: Bench\ndescription: A bench\ndefault_config: a\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def out(capsys):
    """Runs a command that succeeds and returns what it printed."""

    def run(*arguments, notes=False):
        status = main(list(arguments))
        printed = capsys.readouterr()
        assert (0, notes, False) == (status, "note[" in printed.err, "warning[" in printed.err), printed.err
        return printed.out

    return run


def test_ls_lists_configs_and_marks_the_default(bench, out):
    assert ".  Bench: A bench\n  * a.yaml  The base\n    b.yaml\n" == out("ls")


def test_ls_as_json(bench, out):
    (project,) = json.loads(out("ls", "--json"))["projects"]

    assert ("Bench", "a.yaml", ["a.yaml", "b.yaml"]) == (
        project["name"],
        project["default_config"],
        [config["name"] for config in project["configs"]],
    )


def test_ls_finds_projects_below_a_folder(bench, out, monkeypatch):
    make_project(bench.parent / "other", meta="")
    monkeypatch.chdir(bench.parent)

    assert ["bench", "other"] == [line.split()[0] for line in out("ls", "-r").split("\n") if line and line[0] != " "]


def test_ls_of_a_broken_config_names_the_reason_and_fails(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("main: {{ nope }}\n")

    assert 1 == main(["ls"])
    assert (
        "    c.yaml  ! error[FG111]: 'nope' is not defined  (templates/configs/c.yaml:1)\n" in capsys.readouterr().out
    )


def test_ls_of_a_broken_project_names_the_reason_and_fails(bench, capsys):
    (bench / "meta.yaml").write_text("nam: x\n")

    assert 1 == main(["ls"])
    assert "  ! error[FG402]: meta.yaml has no key 'nam'  (meta.yaml:1)\n" in capsys.readouterr().out


def test_ls_of_several_folders(bench, out):
    other = make_project(bench.parent / "other", meta="name: Other\n")

    assert ["Bench", "Other"] == [
        p["name"] for p in json.loads(out("ls", str(bench), str(other), "--json"))["projects"]
    ]


def test_ls_below_a_folder_without_projects_is_an_error(tmp_path, capsys):
    assert 1 == main(["ls", "-r", str(tmp_path)])
    assert "error[FG400]: no project at or below" in capsys.readouterr().err


def test_pp_prints_the_text(bench, out):
    assert Project("a", bench).rendered.text + "\n" == out("pp")


def test_pp_begins_with_text_on_a_terminal_alone(bench, out, monkeypatch):
    (bench / "templates/configs/c.yaml").write_text("-- set a = 1\n\n\nmain: 1\n")
    assert out("-t", "c", "pp").startswith("\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert out("-t", "c", "pp").startswith("main: 1\n")


def test_pp_writes_to_a_file_and_says_so(bench, capsys):
    assert 0 == main(["pp", "-o", "out.yaml"])
    printed = capsys.readouterr()
    assert ("", "wrote out.yaml\n") == (printed.out, printed.err)
    assert Project("a", bench).rendered.text + "\n" == (bench / "out.yaml").read_text()


def test_pp_map_names_template_and_line_beside_each_line(bench, out):
    lines = out("pp", "--map").split("\n")

    assert "templates/base.yaml:1      | meta:" == lines[0]
    assert "templates/configs/a.yaml:4 |   lr: 0.1" in lines


def test_pp_map_as_json(bench, out):
    lines = json.loads(out("pp", "--map", "--json"))["lines"]

    (line,) = [line for line in lines if line["text"] == "  lr: 0.1"]
    assert ("templates/configs/a.yaml", 4, "configs/a.yaml", False) == (
        line["file"],
        line["line"],
        line["template"],
        line["approximate"],
    )


def test_pp_with_set_prints_the_changed_graph(bench, out):
    text = out("pp", "--set", "optimizer.lr=0.25", notes=True)

    assert "lr: 0.25" in text
    assert "lr: 0.1" not in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "5"], "  steps: 5"),
        (["-n", "5"], "  steps: 5"),
        (["--steps=5"], "  steps: 5"),
        ([], "  steps: 3"),
        (["--fast"], "  fast: true"),
        (["--no-fast"], "  fast: false"),
        (["--mode", "b"], "  mode: b"),
    ],
)
def test_options_of_the_config_are_variables_of_its_templates(bench, out, arguments, line):
    assert line in out("pp", *arguments).split("\n")


@pytest.mark.parametrize("arguments", [["--steps", "x"], ["--mode", "c"], ["--stesp", "3"]])
def test_an_option_of_the_config_with_a_wrong_value_or_name_is_wrong_usage(bench, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["pp", *arguments])

    assert 2 == ended.value.code
    assert "" == capsys.readouterr().out


def test_help_lists_the_options_of_the_config(bench, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["-t", "a", "train", "--help"])

    printed = capsys.readouterr().out
    assert 0 == ended.value.code
    assert "options of a.yaml:" in printed
    assert "100% of the steps (default: 3)" in printed


@pytest.mark.parametrize("command", ["targets", "trefs"])
def test_options_of_a_config_are_told_at_length_where_they_matter_and_count_everywhere(bench, capsys, command):
    with pytest.raises(SystemExit):
        main(["-t", "a", command, "--help"])
    told = capsys.readouterr().out
    assert "a.yaml declares 3 options, which can be used here, too: see 'fgcli train --help'" in told
    assert "--steps" not in told
    assert 0 == main(["-t", "a", command, "--steps", "4"])


def test_code_that_may_have_been_edited_is_replaced_by_force_alone(bench, capsys):
    (bench / "train.py").write_text("my_own = 1\n")
    assert 1 == main(["code", "-o", "train.py"])
    assert "error[FG418]: 'train.py' exists already, and may have been edited" in capsys.readouterr().err
    assert "my_own = 1\n" == (bench / "train.py").read_text()

    assert 0 == main(["code", "-o", "train.py", "--force"])
    assert "wrote train.py\n" == capsys.readouterr().err
    assert "def build():" in (bench / "train.py").read_text()


LISTS = """\
meta: {output_dir: {{ project_dir }}/out}
main: !call:dict
  out: {{ project_dir }}/out/models
  root: {{ project_dir }}
  odd: {{ project_dir }}/a//b
  callbacks:
    - !call:app:Short
    - !call:app:Long {one: 'a text that is rather long', two: 'another text that is rather long', three: 'and one more'}
    - !call:app:Short {x: 1}
    - 7
"""


def test_paths_of_the_project_begin_at_its_folder_and_items_of_a_list_are_written_alike(bench, capsys):
    (bench / "templates/configs/lists.yaml").write_text(LISTS)
    assert 0 == main(["-t", "lists", "code", "--verify", "-o", "train.py"])
    text = (bench / "train.py").read_text()
    assert 'out=os.path.join(PROJECT_DIR, "out", "models"),' in text
    assert f'root="{bench}",' in text
    assert f'odd="{bench}/a//b",' in text
    assert "Its folders begin at `PROJECT_DIR`." in text
    assert "    callbacks_2 = Short()\n    callbacks = Long(" in text
    assert "    callbacks_3 = Short(x=1)\n" in text
    assert "callbacks=[callbacks_2, callbacks, callbacks_3, 7]" in text


def test_a_module_that_was_moved_away_from_its_project_says_what_to_change(bench, tmp_path, capsys):
    (bench / "toy.py").write_text("class Toy: pass\n")
    (bench / "templates/configs/file.yaml").write_text("main: !call:toy.py:Toy\n")
    assert 0 == main(["-t", "file", "code", "-o", "train.py"])
    moved = tmp_path / "elsewhere.py"
    moved.write_text((bench / "train.py").read_text())
    with pytest.raises(
        ModuleNotFoundError, match=f"no 'toy' in {tmp_path}: PROJECT_DIR, above, has to be the project's"
    ):
        runpy.run_path(str(moved))
    assert "Toy" in str(runpy.run_path(str(bench / "train.py"))["build"]())


def test_a_proof_on_the_terminal_prints_the_verdict_alone(bench, capsys):
    assert 0 == main(["code", "--verify"])
    assert "verified: " == capsys.readouterr().out[:10]
    assert 0 == main(["code", "--verify", "-o", "train.py"])
    printed = capsys.readouterr()
    assert ("", True, True) == (printed.out, "wrote train.py\n" in printed.err, "verified: " in printed.err)


@pytest.mark.parametrize(
    ("arguments", "status", "code", "path"),
    [
        (["blame", "nothing", "--json"], 1, "FG311", "nothing"),
        (["diff", "a", "nothing", "--json"], 2, "FG405", None),
        (["pp", "--json", "--set", "main=["], 1, "FG200", None),
        (["construct", "lost", "--json"], 1, "FG302", None),
    ],
)
def test_an_error_is_json_where_facts_were_asked_for(bench, capsys, arguments, status, code, path):
    assert status == main(arguments)
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert {"code", "severity", "message", "file", "line", "column", "path", "hint", "others"} == {*error}
    assert (code, path) == (error["code"], error["path"])
    assert f"error[{code}]: {error['message']}" in printed.err


def test_an_exception_of_a_constructor_is_json_without_a_code(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("main: !call:int [many]\n")
    assert 1 == main(["-t", "c", "construct", "main", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (None, "templates/configs/c.yaml", 1, "main") == tuple(
        error[key] for key in ("code", "file", "line", "path")
    )
    assert error["message"].startswith("ValueError: invalid literal for int()")


def test_help_of_a_broken_config_says_why_its_options_are_missing(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("main: {{ nope }}\n")

    with pytest.raises(SystemExit) as ended:
        main(["-t", "c", "train", "--help"])

    assert 0 == ended.value.code
    assert "The config's own options are not listed: 'nope' is not defined" in capsys.readouterr().out


def test_options_come_before_set(bench, out):
    graph = json.loads(out("graph", "--json", "--steps", "5", "--set", "optimizer.steps=6", notes=True))

    assert 6 == graph["targets"]["optimizer"]["kwargs"]["steps"]


def test_a_change_of_a_shared_value_says_so(bench, capsys):
    assert 0 == main(["graph", "--set", "optimizer.lr=2"])
    assert "note[FG314]: optimizer.lr is shared with main[0][0].lr, main[0][1].lr" == capsys.readouterr().err.strip()


def test_graph_as_tree(bench, out):
    assert "├─ lr: 0.1" in out("graph")


def test_graph_as_yaml_reads_back_to_an_equal_graph(bench, out):
    project = Project("a", bench)
    text = out("graph", "--format", "yaml")
    (bench / "templates/configs/frozen.yaml").write_text(text)

    assert same_graph(load(project.rendered), Project("frozen", bench).graph)


def test_graph_as_json_names_files_relative_to_the_project(bench, out, monkeypatch):
    monkeypatch.chdir("/")
    graph = json.loads(out("-p", str(bench), "graph", "--format", "json"))

    assert ("a.yaml", "templates/base.yaml") == (
        graph["config"],
        graph["targets"]["optimizer"]["span"]["file"],
    )


def test_targets_are_listed_with_kind_and_constructor(bench, out):
    assert [
        "meta          dict       2 items",
        "dynamic_args  dict       3 items",
        "optimizer     singleton  builtins:dict",
        "main          singleton  builtins:list",
    ] == out("targets").rstrip().split("\n")
    assert "templates/base.yaml" == json.loads(out("targets", "--json"))["targets"][0]["file"]


def test_trefs_shows_why_each_template_was_loaded(bench, out):
    assert ("configs/a.yaml         templates/configs/a.yaml\n└── extends base.yaml  templates/base.yaml\n") == out(
        "trefs"
    )
    assert ["config", "extends"] == [use["why"] for use in json.loads(out("trefs", "--json"))["templates"]]


def test_tlist_marks_templates_that_are_hidden(bench, out):
    (bench / "shared").mkdir()
    (bench / "shared/base.yaml").write_text("")
    (bench / "meta.yaml").write_text("searchdir: [templates, shared]\n")

    lines = [line.split("  ", 1) for line in out("tlist").split("\n")]

    assert ["templates/base.yaml", "shared/base.yaml  (hidden by the one above)"] == [
        line[1].strip() for line in lines if line[0] == "base.yaml"
    ]
    assert {"name": "base.yaml", "file": "shared/base.yaml", "hidden": True} in json.loads(out("tlist", "--json"))[
        "templates"
    ]


def test_tlist_outside_any_project_lists_the_library(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    assert "trainers/trainer.yaml" in {line.split()[0] for line in out("tlist").splitlines()}
    assert None is json.loads(out("tlist", "--json"))["project"]


def test_construct_prints_what_was_built(bench, out):
    assert "{'lr': 0.1, 'steps': 3, 'fast': False, 'mode': 'a'}\n" == out("construct", "optimizer")
    assert "optimizer: {'lr': 7" in out("construct", "optimizer", "main", "--set", "optimizer.lr=7", notes=True)
    assert {"type": "dict", "value": {"lr": 0.1, "steps": 3, "fast": False, "mode": "a"}} == json.loads(
        out("construct", "optimizer", "--json")
    )["targets"]["optimizer"]


def test_construct_takes_values_for_variables(bench, out):
    (bench / "templates/configs/c.yaml").write_text("main:\n  seed: !var seed\n")

    assert "{'seed': [1, 'x']}\n" == out("-t", "c", "construct", "main", "--var", "seed=[1, x]")


def test_a_dry_run_says_what_would_run_and_constructs_nothing(bench, out):
    (bench / "templates/configs/c.yaml").write_text("main: !call:builtins:print [9]\n")
    text = out("-t", "c", "train", "--dry-run", "--set", "main[0]=8")

    assert "main        !singleton:builtins:print" in text
    assert "changes     main[0]=8" in text
    facts = json.loads(out("-t", "c", "train", "--dry-run", "--json"))
    assert ("c.yaml", ["main"], []) == (facts["config"], facts["targets"], facts["overrides"])
    assert not (bench / "output_models").exists()


def test_train_ends_with_the_status_of_the_run(bench, capsys):
    assert 3 == main(["-t", "b", "train"])
    assert capsys.readouterr().err.startswith("run folder output_models/b/runs/")


def test_train_as_json(bench, capsys):
    assert 3 == main(["-t", "b", "train", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (3, False, None) == (facts["status"], facts["interrupted"], facts["model_dir"])
    assert (None, None, {}) == (facts["step"], facts["max_steps"], facts["metrics"])


def test_train_shows_warnings_and_goes_on(bench, capsys):
    (bench / "meta.yaml").write_text("searchdir: [templates, templatez]\n")

    assert 3 == main(["-t", "b", "train"])
    assert "warning[FG404]: search folder 'templatez' does not exist" in capsys.readouterr().err


def test_train_refuses_errors(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("-- extends 'base.yaml'\n[optimzer]\n  lr: 1\n")

    assert 1 == main(["-t", "c", "train"])
    assert "error[FG130]: the block 'optimzer' has no effect" in capsys.readouterr().err
    assert not (bench / "output_models").exists()


def test_pp_of_a_config_with_errors_prints_it_and_fails(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("-- extends 'base.yaml'\n[optimzer]\n  lr: 1\n")

    assert 1 == main(["-t", "c", "pp"])
    printed = capsys.readouterr()
    assert "lr: 0.5" in printed.out
    assert "error[FG130]" in printed.err


def test_new_project_makes_one_that_lists_and_prints(tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = out("new", "project", "my_project")

    assert "now: cd my_project && fgcli train" in printed
    assert ["default.yaml"] == [
        c["name"] for c in json.loads(out("ls", "my_project", "--json"))["projects"][0]["configs"]
    ]


def test_new_config_extends_what_it_is_told(bench, out):
    printed = out("new", "config", "exp/mine", "--extends", "base.yaml")

    assert "made templates/configs/exp/mine.yaml\nnow: fgcli -t exp/mine train\n" == printed
    assert '-- extends "base.yaml"' in (bench / "templates/configs/exp/mine.yaml").read_text()


@pytest.mark.parametrize(("parent", "set_here"), [("base.yaml", False), ("trainers/hf_trainer.yaml", True)])
def test_new_config_keeps_the_settings_of_a_template_of_the_project(bench, out, parent, set_here):
    out("new", "config", "mine", "--extends", parent)

    assert set_here is ("\n    max_steps: " in (bench / "templates/configs/mine.yaml").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "config", "a", "--extends", "base.yaml"], "error[FG414]: "),
        (["new", "config", "../a", "--extends", "base.yaml"], "error[FG414]: '..' cannot be the name of a config"),
        (["new", "config", "x", "--extends", "bas.yaml"], "error[FG419]: no template 'bas.yaml'"),
        (["new", "project", "templates"], "error[FG414]: 'templates' exists already"),
        (["new", "project", "a b"], "error[FG414]: 'a b' cannot be the name of a project"),
        (["new", "project", "meta.yaml/x"], "error[FG418]: "),
    ],
)
def test_new_overwrites_nothing_and_refuses_odd_names(bench, capsys, arguments, message):
    before = {str(file): file.read_bytes() for file in bench.rglob("*") if file.is_file()}

    assert 1 == main(arguments)
    assert capsys.readouterr().err.startswith(message)
    assert before == {str(file): file.read_bytes() for file in bench.rglob("*") if file.is_file()}


@pytest.mark.parametrize("code", ["FG405", "fg405", "405", "[FG405]"])
def test_explain_prints_the_page_of_a_code(out, code):
    assert out("explain", code).startswith("# FG405: the project has no such config\n")


@pytest.mark.parametrize("word", ["trainer_args.learning_rate", "learning_rate"])
def test_explain_prints_a_setting(out, word):
    told = out("explain", word)
    assert told.startswith("trainer_args.learning_rate: float = 5e-05\n")
    assert "AccelTrainer" in told and "forgather/ml/trainer/optimizers.py" in told


def test_explain_prints_a_template_with_an_example(out):
    assert "[raw_dataset]\n        -- include 'datasets/json_lines.yaml'" in out("explain", "datasets/json_lines.yaml")
    assert ["raw_dataset"] == [json.loads(out("explain", "datasets/json_lines.yaml", "--json"))["fills"]]


@pytest.mark.parametrize("word", ["trainer_args.lerning_rate", "lerning_rate", "datasets/json_line.yaml", "nonsense"])
def test_a_word_that_nothing_explains_is_an_error_with_a_hint(capsys, word):
    assert 1 == main(["explain", word])
    told = capsys.readouterr().err
    assert told.startswith("error[FG415]") and "help: " in told


def test_explain_alone_lists_every_code(out):
    assert "FG405  the project has no such config" in out("explain").split("\n")
    assert "the project has no such config" == json.loads(out("explain", "--json"))["FG405"]
    assert "FG405" == json.loads(out("explain", "FG405", "--json"))["code"]


def test_the_folder_named_by_p_is_the_project_itself(bench, capsys, monkeypatch):
    monkeypatch.chdir(bench / "templates")

    assert 1 == main(["-p", ".", "pp"])
    assert "error[FG401]: '.' is not a project" in capsys.readouterr().err


def test_the_name_of_an_option_that_collides_is_an_error(bench, capsys):
    (bench / "templates/configs/c.yaml").write_text("dynamic_args: [{names: --json}]\nmain: 1\n")

    assert 1 == main(["-t", "c", "pp", "--steps", "3"])
    assert "error[FG409]: option '--json' of this config is taken by the command line" in capsys.readouterr().err


def test_a_config_may_be_named_by_its_file(bench, out, monkeypatch):
    by_name = out("-t", "a", "targets")
    assert by_name == out("-t", "templates/configs/a.yaml", "targets")
    assert by_name == out("-t", str(bench / "templates/configs/a.yaml"), "targets")
    assert out("check", "a") == out("check", "templates/configs/a.yaml")
    monkeypatch.chdir(bench.parent)
    assert by_name == out("-t", f"{bench.name}/templates/configs/a.yaml", "targets")


def test_help_is_a_word_too(bench, capsys):
    for words, option in (
        ("help", "--help"),
        ("help pp", "pp --help"),
        ("-t a.yaml help train", "-t a.yaml train --help"),
    ):
        printed = []
        for line in (words, option):
            with pytest.raises(SystemExit) as ended:
                main(line.split())
            assert 0 == ended.value.code
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] != ""


def test_the_command_that_shows_all_errors_is_about_the_same_config(bench, capsys, monkeypatch):
    config = bench / "templates/configs/wrong.yaml"
    config.write_text("main: !call:dict\n" + "".join(f"  k{i}: !calc 'k{i} +'\n" for i in range(9)))
    monkeypatch.chdir(bench.parent)
    change = "main.k0=!calc 'a b'"
    assert 1 == main(["-p", bench.name, "-t", "wrong", "train", "--set", change])
    told = capsys.readouterr().err.split("\n")[-2]
    assert f"more: 'fgcli -p {bench.name} -t wrong check --set {shlex.quote(change)}' shows all" in told


@pytest.fixture
def help_text(capsys, monkeypatch):
    def help_text():
        with pytest.raises(SystemExit):
            main(["--help"])
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    return help_text


def test_the_help_lists_commands_by_what_one_wants_to_do_with_an_example_each(help_text):
    text = help_text()
    groups = re.findall(r"^  (\w+) +fgcli \S", text, re.M)
    assert ["write", "look", "run", "verify"] == groups
    assert sorted(COMMANDS) == sorted(re.findall(r"^    (\w+)  +\S", text, re.M))
    assert "\x1b" not in text


def test_the_help_has_colors_where_they_are_wanted(help_text, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "    \x1b[36mls\x1b[0m " in help_text()


@pytest.mark.parametrize("arguments", ["graph", "blame", "pp", "pp --map", "pp --annotate", "ls", "check", "targets"])
def test_colors_change_no_text(bench, out, monkeypatch, arguments):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = out(*arguments.split())
    monkeypatch.setenv("FORCE_COLOR", "1")
    colored = out(*arguments.split())
    assert "\x1b" not in plain
    assert "\x1b" in colored
    assert plain.strip("\n") == re.sub(r"\x1b\[\d+(;\d+)?m", "", colored).strip("\n")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_module_of_the_program_runs_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fgcli", "explain", "FG421"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("forgather.cli.main", run_name="__main__")
    assert (0, True) == (ended.value.code, "FG421" in capsys.readouterr().out)
