"""`fgcli blame` and `pp --annotate`: what people and tools read."""

import json
import re
from pathlib import Path

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

FILES = {
    "templates/base.yaml": """\
-- set name = 'Base'
-- block facts
-- endblock facts
meta: {config_name: "{{ name }}"}
dynamic_args:
  steps: {names: --steps, type: int}
.lr: &lr 5e-5
args: &args
-- block args
  learning_rate: *lr
  betas:
    - 0.9
    - 0.95
  steps: {{ steps | default(3) }}
-- endblock args
main: !call:dict {a: *args}
""",
    "templates/project.yaml": "-- extends 'base.yaml'\n[args]\n  == super()\n  learning_rate: 1e-3\n",
    "templates/configs/fast.yaml": """\
-- extends 'project.yaml'
[args]
  == super()
  learning_rate: 3e-4
  -- include 'betas.yaml'
""",
    "templates/betas.yaml": "\n  betas: [0.8, 0.9]\n",
}


@pytest.fixture
def out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_project(tmp_path / "bench", FILES, meta="name: Bench\n"))

    def run(*arguments, status=0):
        assert status == main(list(arguments))
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


def test_a_value_its_line_and_what_it_replaced(out):
    assert """\
args.learning_rate = 3e-4  templates/configs/fast.yaml:4
  was 1e-3                 templates/project.yaml:4
  was 5e-5                 templates/base.yaml:7
    alias *lr              templates/base.yaml:10
""" == out("blame", "args.learning_rate")


def test_a_container_prints_what_is_in_it_and_repeats_nothing(out):
    assert """\
args = {...} (3)           templates/base.yaml:8
args.learning_rate = 3e-4  templates/configs/fast.yaml:4
  was 1e-3                 templates/project.yaml:4
  was 5e-5                 templates/base.yaml:7
    alias *lr              templates/base.yaml:10
args.betas = [0.8, 0.9]    templates/betas.yaml:2
  via                      templates/configs/fast.yaml:5
  was [0.9, 0.95]          templates/base.yaml:11
args.steps = 3             templates/base.yaml:14
""" == out("blame", "args")


def test_a_value_inside_a_container_is_told_when_it_is_asked_for(out):
    assert """\
args.betas[1] = 0.9  templates/betas.yaml:2
  via                templates/configs/fast.yaml:5
  was 0.95           templates/base.yaml:13
""" == out("blame", "args.betas[1]")


def test_an_option_of_the_config_is_named(out):
    assert """\
args.steps = 7  templates/base.yaml:14
  set           option --steps, declared at templates/base.yaml:6
""" == out("blame", "args.steps", "--steps", "7")


def test_a_value_that_was_set_on_the_command_line_says_so(out):
    assert """\
args.steps = 9  --set
  was 3         templates/base.yaml:14
""" == out("blame", "args.steps", "--set", "args.steps=9")


def test_the_source_lines_are_printed_when_asked_for(out):
    assert """\
meta.config_name = Base  templates/base.yaml:4
      | meta: {config_name: "{{ name }}"}
  set                    templates/base.yaml:1
      | -- set name = 'Base'
""" == out("blame", "meta.config_name", "-v")


def test_without_a_path_everything_is_printed_once(out):
    lines = [line for line in out("blame").splitlines() if not line.startswith(" ")]
    paths = [line.split(" = ")[0] for line in lines]
    assert ["meta", "dynamic_args", "args", "main", ".lr"] == [path for path in paths if "." not in path[1:]]
    assert "args.steps" in paths
    assert "main.a" in paths
    assert "main.a.steps" not in paths


def test_the_way_to_a_line_is_nearest_first_in_all_facts(out):
    Path("templates/betas.yaml").rename("templates/deeper.yaml")
    Path("templates/betas.yaml").write_text("-- include 'deeper.yaml'\n")
    lines = json.loads(out("pp", "--annotate", "--json"))["lines"]
    ways = [(line["via"], value["via"]) for line in lines for value in line.get("values", ()) if len(line["via"]) > 1]
    assert ways
    assert all(of_line == of_value for of_line, of_value in ways)


def test_a_depth_that_is_no_count_is_refused(out, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["blame", "--depth", "-1"])
    assert 2 == ended.value.code
    assert "'-1' is not a number of steps" in capsys.readouterr().err


def test_depth_and_stars_choose(out):
    lines = [line.split(" = ")[0] for line in out("blame", "--depth", "0").splitlines() if not line.startswith(" ")]
    assert ["meta", "dynamic_args", "args", "main", ".lr"] == lines
    for pattern in ("*.learning_rate", "**.learning_rate", "args.l*"):
        assert out("blame", pattern) == out("blame", "args.learning_rate")
    assert "args.betas[0] = " in out("blame", "args.betas[*]")
    assert ".lr = 5e-5  templates/base.yaml:7\n" == out("blame", ".lr")


def test_a_value_seen_through_an_alias_is_the_value_in_its_place(out):
    assert """\
main.a.steps = 3  templates/base.yaml:14
  inside *args    templates/base.yaml:16
""" == out("blame", "main.a.steps")
    assert 1 == out("blame", "main.a").count("*args")


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("learning_rat", "the config has no value 'learning_rat'", "did you mean args.learning_rate?"),
        ("steps", "the config has no value 'steps'", "did you mean args.steps"),
        ("args.learning_rat", "'args.learning_rat': args is a mapping", "did you mean args.learning_rate?"),
        ("args.steps.x", "'args.steps.x': args.steps is the value '3'", "nothing is inside args.steps"),
        ("args.zzzzzz", "args is a mapping", "args has: learning_rate, betas, steps"),
        ("zzzzzz", "the config has no value 'zzzzzz'", "one of: args, dynamic_args, main, meta"),
        ("args..", "'args..' is not a graph path", "write it as trainer.args.lr"),
        ("*.zzz", "FG445", "`*` is one key"),
    ],
)
def test_a_path_that_does_not_exist_gets_the_nearest(out, path, message, hint):
    report = out("blame", path, status=1)
    assert message in report
    assert f"help: {hint}" in report


def test_blame_as_json(out):
    (value,) = json.loads(out("blame", "args.learning_rate", "--json"))["values"]
    assert ("args.learning_rate", 3e-4, "templates/configs/fast.yaml", 4) == (
        value["path"],
        value["value"],
        value["file"],
        value["line"],
    )
    assert [("1e-3", 4), ("5e-5", 7)] == [(was["text"], was["line"]) for was in value["was"]]
    assert ("lr", [{"file": "templates/base.yaml", "line": 10}]) == (
        value["was"][1]["alias"],
        value["was"][1]["through"],
    )


def test_values_as_json_are_what_they_are(out):
    values = {value["path"]: value for value in json.loads(out("blame", "--json"))["values"]}
    assert {"kind": "dict", "size": 3} == values["args"]["value"]
    assert {"kind": "singleton", "constructor": "dict"} == values["main"]["value"]
    assert [0.8, 0.9] == values["args.betas"]["value"]
    assert "[0.8, 0.9]" == values["args.betas"]["text"]
    long = json.loads(out("blame", "args.steps", "--set", f"args.steps={'word ' * 40}", "--json"))["values"][0]
    assert ("word " * 40).strip() == long["value"]
    assert long["text"].endswith("...")


def test_every_item_of_a_list_on_lines_of_its_own_is_printed(tmp_path, monkeypatch, out):
    text = "prompts:\n  - one of them\n  - another\nmain: {a: 1}\n"
    monkeypatch.chdir(make_project(tmp_path / "lists", {"templates/configs/a.yaml": text}))
    assert """\
prompts = [one of them, another]  templates/configs/a.yaml:1
prompts[0] = one of them          templates/configs/a.yaml:2
prompts[1] = another              templates/configs/a.yaml:3
main = {a: 1}                     templates/configs/a.yaml:4
""" == out("blame")


def test_a_source_line_that_is_cut_says_so(tmp_path, monkeypatch, out):
    text = f"main: {'word ' * 40}\n"
    monkeypatch.chdir(make_project(tmp_path / "long", {"templates/configs/a.yaml": text}))
    (source,) = [line for line in out("blame", "-v").splitlines() if line.startswith("      |")]
    assert source.endswith("...")
    assert 128 == len(source)


def test_an_option_as_json(out):
    (value,) = json.loads(out("blame", "args.steps", "--steps", "7", "--json"))["values"]
    assert [{"variable": "steps", "option": "--steps"}] == value["sets"]


def test_blame_to_a_file(out, tmp_path):
    out("blame", "args.steps", "-o", str(tmp_path / "blame.txt"))
    assert "args.steps = 3  templates/base.yaml:14\n" == (tmp_path / "blame.txt").read_text()


ANNOTATED = """\
templates/base.yaml:4         | meta: {config_name: "Base"}  # set at templates/base.yaml:1
templates/base.yaml:5         | dynamic_args:
templates/base.yaml:6         |   steps: {names: --steps, type: int}
templates/base.yaml:7         | .lr: &lr 5e-5
templates/base.yaml:8         | args: &args
templates/base.yaml:10        x   learning_rate: *lr  # overridden by templates/configs/fast.yaml:4; is 5e-5, templates/base.yaml:7
templates/base.yaml:11        x   betas:  # overridden by templates/betas.yaml:2
templates/base.yaml:12        x     - 0.9  # overridden by templates/betas.yaml:2
templates/base.yaml:13        x     - 0.95  # overridden by templates/betas.yaml:2
templates/base.yaml:14        |   steps: 3
                              |
templates/project.yaml:4      x   learning_rate: 1e-3  # overridden by templates/configs/fast.yaml:4
                              |
templates/configs/fast.yaml:4 |   learning_rate: 3e-4  # was 1e-3, 5e-5
                              |
templates/betas.yaml:2        |   betas: [0.8, 0.9]  # was [0.9, 0.95]
templates/base.yaml:16        | main: !call:dict {a: *args}
"""


def test_the_text_is_printed_with_places_winners_and_losers(out):
    assert ANNOTATED == out("pp", "--annotate")


def test_annotations_know_what_the_command_line_sets(out):
    assert "steps: 3  # overridden by --set: 9\n" in out("pp", "--annotate", "--set", "args.steps=9")
    assert "steps: 7  # set at option --steps" in out("pp", "--annotate", "--steps", "7")


def test_a_setting_under_an_old_name_overrides_the_new_name(tmp_path, capsys):
    text = (
        "-- extends 'trainers/trainer.yaml'\n[trainer_args]\n    == super()\n"
        "    evaluation_strategy: steps\n    warmup_ratio: 0.1\n"
    )
    folder = make_project(tmp_path / "old", {"templates/configs/a.yaml": text})
    assert 0 == main(["-p", str(folder), "pp", "--annotate"])
    shown = capsys.readouterr().out
    for new, old in (("warmup_steps: 0", "warmup_ratio: 0.1  # was 0"), ('eval_strategy: "no"', 'steps  # was "no"')):
        assert re.search(rf" x +{new}  # overridden by ", shown)
        assert old in shown


def test_annotations_as_json(out):
    lines = json.loads(out("pp", "--annotate", "--json"))["lines"]
    loser = next(line for line in lines if "1e-3" in line["text"])
    winner = next(line for line in lines if "3e-4" in line["text"])
    assert (False, True) == (loser["counts"], winner["counts"])
    assert (3e-4, 4) == (loser["values"][0]["overridden_by"]["value"], loser["values"][0]["overridden_by"]["line"])
    assert [1e-3, 5e-5] == [was["value"] for was in winner["values"][0]["was"]]


def test_on_a_terminal_what_does_not_count_stands_back(out, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    lines = out("blame", "args.steps", "--steps", "7").splitlines()
    assert "\x1b[36margs.steps\x1b[0m = \x1b[1m7\x1b[0m" in lines[0]
    assert [True] * (len(lines) - 1) == [line.startswith("\x1b[2m") for line in lines[1:]]


def test_map_and_annotate_are_one_or_the_other(out):
    with pytest.raises(SystemExit):
        out("pp", "--map", "--annotate")
