import sys

import pytest

from forgather import Project, from_project
from forgather.errors import ForgatherError, ProjectError, UnboundVarError, UnknownTargetError
from tests.project.workbench import make_project

CONFIG = """\
-- set lr = lr | default(0.5)
optimizer: &optimizer !singleton:builtins:dict
  lr: {{ lr }}
  seed: !var {name: seed, default: 7}
pair: !call:builtins:list
  - [*optimizer, *optimizer]
run: !var run_dir
main: !call:builtins:dict
  optimizer: *optimizer
"""


@pytest.fixture
def folder(tmp_path):
    return make_project(tmp_path / "bench", {"templates/configs/a.yaml": CONFIG})


def test_every_template_sees_the_standard_variables(tmp_path):
    (tmp_path / "forgather_workspace").mkdir()
    text = "main: [{{ project_dir | toyaml }}, {{ workspace_root | toyaml }}, {{ hostname == uname.node }}]\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})

    assert [str(folder), str(tmp_path), True] == Project("a", folder)()


def test_a_call_without_names_builds_main(folder):
    assert {"optimizer": {"lr": 0.5, "seed": 7}} == Project("a", folder)()


def test_several_names_give_a_tuple_of_one_construction(folder):
    optimizer, pair = Project("a.yaml", str(folder))("optimizer", "pair")

    assert optimizer is pair[0] is pair[1]


def test_a_list_of_names_gives_a_dict(folder):
    built = Project("a", folder)(["optimizer", "pair"])

    assert ["optimizer", "pair"] == list(built)
    assert ["optimizer"] == list(Project("a", folder)(["optimizer"]))


def test_every_call_builds_new_objects(folder):
    project = Project("a", folder)

    assert project("optimizer") is not project("optimizer")


def test_keywords_of_a_call_are_values_for_var(folder):
    project = Project("a", folder)

    assert 1 == project("optimizer", seed=1)["seed"]
    assert 7 == project("optimizer")["seed"]


def test_keywords_of_a_project_are_jinja_variables(folder):
    assert 0.1 == Project("a", folder, lr=0.1)("optimizer")["lr"]


def test_two_projects_in_one_process_do_not_influence_each_other(folder):
    first = Project("a", folder, lr=0.1)
    second = Project("a", folder)

    assert (0.1, 0.5) == (first("optimizer")["lr"], second("optimizer")["lr"])


def test_overrides_change_the_graph_and_not_the_text(folder):
    project = Project("a", folder, overrides=[("optimizer.lr", "3e-4")])

    assert 3e-4 == project("optimizer")["lr"]
    assert "lr: 0.5" in project.rendered.text
    assert 0.5 == Project("a", folder)("optimizer")["lr"]


def test_the_parts_are_there_to_look_at(folder):
    project = Project("a", folder)

    assert ("a.yaml", "Bench") == (project.config_name, project.meta.name)
    assert ("optimizer", "pair", "run", "main") == project.targets


def test_an_unknown_target_lists_the_targets(folder):
    with pytest.raises(UnknownTargetError, match="optimzer") as caught:
        Project("a", folder)("optimzer")

    assert "optimizer" in caught.value.hint


def test_an_unbound_variable_names_the_config(folder):
    with pytest.raises(UnboundVarError) as caught:
        Project("a", folder)("run")

    assert ("config a.yaml",) == caught.value.context


def test_nothing_is_built_from_a_config_with_errors(tmp_path):
    folder = make_project(
        tmp_path / "p",
        {
            "templates/base.yaml": "-- block lr_scheduler\nlr: 1\n-- endblock lr_scheduler\nmain: !call:builtins:print [x]\n",
            "templates/configs/a.yaml": "-- extends 'base.yaml'\n[lr_schedulr]\nlr: 2\n",
        },
    )

    with pytest.raises(ForgatherError, match="lr_schedulr"):
        Project("a", folder)()


def test_the_project_above_the_working_folder_is_found(folder, monkeypatch):
    monkeypatch.chdir(folder / "templates")

    assert str(folder) == Project("a").meta.project_dir


def test_modules_of_the_system_path_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = make_project(
        tmp_path / "p",
        {
            "templates/configs/a.yaml": "main: !call:bench_extra_module:value\n",
            "src/bench_extra_module.py": "def value(): return 41\n",
        },
        meta="system_path: src\n",
    )

    assert 41 == Project(None, folder)()


def other(tmp_path, text):
    return make_project(tmp_path / "other", {"templates/configs/b.yaml": text}, meta="")


def test_from_project_is_relative_to_the_project_of_the_config(tmp_path, monkeypatch):
    other(tmp_path, "value: {{ n | default(1) }}\nmain: !var {name: x, default: 2}\n")
    folder = make_project(
        tmp_path / "p",
        {
            "templates/configs/a.yaml": (
                "main: !call:forgather:from_project\n"
                "  project_dir: ../other\n  config_template: b.yaml\n  targets: [value, main]\n"
                "  pp_kwargs: {n: 5}\n  x: 6\n"
            )
        },
    )
    monkeypatch.chdir("/")

    assert {"value": 5, "main": 6} == Project("a", folder)()


def test_from_project_gives_one_object_for_one_name(tmp_path):
    folder = other(tmp_path, "value: 3\n")

    assert 3 == from_project(str(folder), "b", "value")


def test_projects_that_build_each_other_are_refused(tmp_path):
    call = "main: !call:forgather:from_project {{project_dir: {0}, config_template: {1}, targets: main}}\n"
    other(tmp_path, call.format("../p", "a"))
    folder = make_project(tmp_path / "p", {"templates/configs/a.yaml": call.format("../other", "b")})

    with pytest.raises(ProjectError, match="builds itself: a.yaml -> b.yaml -> a.yaml") as caught:
        Project("a", folder)()

    assert "FG416" == caught.value.code
