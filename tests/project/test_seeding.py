"""What a construction draws follows from the seed of the trainer's arguments, and the caller's numbers go on as before."""

import importlib.util
import random
import sys

import pytest

from forgather.errors import GraphError
from forgather.project.project import Project
from forgather.project.seeding import written_seed
from tests.project.workbench import fgcli, make_project

if not importlib.util.find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)

import numpy
import torch

# A module that imports torch when it is called, as a light one does.
MAKE = """\
import random

class Arguments:
    def __init__(self, output_dir="out", seed=7):
        self.seed = seed

class Unseeded:
    pass

class Runner:
    def __init__(self, model, args):
        self.model, self.args = model, args
    def train(self):
        pass

def drawn(*others):
    import numpy, torch
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]

def fails():
    drawn()
    raise RuntimeError("no")

def number(value):
    return int(value)
"""
CONFIG = """\
trainer_args: &args !singleton:make.py:Arguments
  seed: 11
model: &model !singleton:make.py:drawn
main: !singleton:make.py:Runner
  model: *model
  args: *args
"""


def project(folder, config=CONFIG, **changes):
    make_project(folder, {"templates/configs/a.yaml": config, "make.py": MAKE})
    return Project("a", folder, **changes)


def by_hand(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_an_object_is_made_as_a_script_makes_it_that_sets_the_seed_first(tmp_path):
    ours = project(tmp_path)
    random.seed(1)
    first = ours("model")
    assert first == by_hand(11)
    assert first == ours("main").model == ours("main", "model")[1]


@pytest.mark.parametrize(
    ("change", "seed"),
    [
        (("seed: 11", "seed: !var {name: start, default: 3}"), 3),
        (("seed: 11", "seed: !calc 'base * 2'\nbase: 4"), 8),
        (("seed: 11", "seed: !call:make.py:number '9'"), 9),
        (("  seed: 11", "  output_dir: x"), 7),
        (("\n  model: *model\n  args: *args", " [*model, *args]"), 11),
        (("main: !singleton:make.py:Runner\n  model: *model\n  args: *args\n", ""), 11),
        (("make.py:Arguments\n  seed: 11", "forgather.ml:TrainingArguments\n  output_dir: x"), 42),
        (("make.py:Arguments\n  seed: 11", "transformers:TrainingArguments\n  output_dir: x"), 42),
    ],
    ids=["var", "calc", "call", "left-out", "by-place", "no-main", "ours", "transformers"],
)
def test_the_seed_is_that_which_the_arguments_will_have(tmp_path, change, seed):
    assert change[0] in CONFIG
    ours = project(tmp_path, CONFIG.replace(*change))
    expected = by_hand(seed)
    assert expected == ours("model")
    by_hand(1)
    assert expected == ours("model")


def test_what_is_set_and_given_counts(tmp_path):
    assert by_hand(5) == project(tmp_path, overrides=[("trainer_args.seed", "5")])("model")
    with_var = project(tmp_path, CONFIG.replace("seed: 11", "seed: !var {name: start, default: 3}"))
    assert by_hand(6) == with_var("model", start=6)


def test_a_seed_that_only_the_trainer_needs_need_not_be_given(tmp_path):
    ours = project(tmp_path, CONFIG.replace("seed: 11", "seed: !var start"))
    assert by_hand(7) == ours("model")
    with pytest.raises(NameError, match="'start' has no value"):
        ours("main")


def test_the_numbers_of_the_caller_go_on_as_if_nothing_had_been_drawn(tmp_path):
    ours = project(tmp_path, CONFIG + "fails: !singleton:make.py:fails\n")
    by_hand(3)
    before = states()
    ours("main")
    with pytest.raises(RuntimeError):
        ours("fails")
    assert before == states()


@pytest.mark.parametrize(
    "config", [CONFIG.replace("Arguments\n  seed: 11", "Unseeded"), CONFIG.replace("seed: 11", "seed: ~")]
)
def test_where_there_is_no_seed_nothing_is_seeded(tmp_path, config):
    ours = project(tmp_path, config)
    expected = by_hand(3)
    by_hand(3)
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    assert expected == ours("model")
    assert expected != ours("model")


@pytest.mark.parametrize("seed", ["'eleven'", "1.5", "true", "-1", str(2**64)])
def test_a_seed_that_is_none_is_refused_at_its_place(tmp_path, seed):
    ours = project(tmp_path, CONFIG.replace("seed: 11", f"seed: {seed}"))
    with pytest.raises(GraphError) as caught:
        ours("model")
    assert ("FG335", 2) == (caught.value.code, caught.value.span.line)


def test_a_project_within_a_project_has_its_own_seed(tmp_path):
    project(tmp_path / "inner", CONFIG.replace("seed: 11", "seed: 2"))
    nested = CONFIG.replace(
        "model: &model !singleton:make.py:drawn",
        "inner: &inner !singleton:forgather.project:from_project [inner, a, model]\n"
        "model: &model !singleton:make.py:drawn [*inner]",
    )
    ours = project(tmp_path, nested)
    assert by_hand(11) == ours("model")
    assert by_hand(2) == ours("inner")


def test_what_is_plain_is_built_without_torch(tmp_path):
    project(tmp_path, CONFIG + "plain: {a: [1, !var {name: b, default: 2}]}\n")
    code = "import sys; from forgather.project.project import Project; print(Project('a')('plain'), 'torch' in sys.modules)"
    done = __import__("subprocess").run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "{'a': [1, 2]} False\n" == done.stdout


def test_the_command_line_builds_what_python_builds(tmp_path):
    expected = project(tmp_path)("model")
    assert f"{expected}\n" == fgcli("-t", "a", "construct", "model", cwd=tmp_path).stdout.replace("\n ", " ")


@pytest.mark.parametrize(
    ("old", "new", "seed"),
    [
        ("", "", 11),
        ("  seed: 11", "  output_dir: x", 7),
        ("seed: 11", "seed: !var {name: start, default: 3}", 3),
        ("seed: 11", "seed: !calc '1 + 1'", None),
        ("Arguments\n  seed: 11", "Unseeded", None),
    ],
)
def test_generated_code_gets_the_seed_of_the_config(tmp_path, old, new, seed):
    ours = project(tmp_path, CONFIG.replace(old, new))
    assert seed == written_seed(ours.graph, ours.meta)
