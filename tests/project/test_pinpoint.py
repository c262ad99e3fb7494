import functools

import pytest
import torch

from forgather.errors import TrainingError
from forgather.launch import plan_run, run
from forgather.ml.losses import loss_rule
from forgather.project.project import Project
from tests.project.workbench import make_project

TOY = """\
from forgather.errors import ArgumentError, TrainingError

class Arguments:
    def __init__(self, **settings):
        for name in settings:
            if name.endswith("z"):
                raise ArgumentError(f"Arguments has no setting {name!r}", code="FG810")

class Trainer:
    def __init__(self, args, data=None, message="", own_loss=None):
        self.args, self.message = args, message

    def train(self):
        error = TrainingError(self.message, code="FG804")
        raise error.about("args.engine") if "engine" in self.message else error
"""
CONFIG = """\
args: &args !singleton:toy.py:Arguments
  max_steps: 3
  {extra}
.own_loss: &own_loss !partial:toy.py:Arguments
main: !singleton:toy.py:Trainer
  args: *args
  data: 1
  message: "{message}"
  own_loss: *own_loss
"""


def failure(tmp_path, extra="", message=""):
    make_project(tmp_path, {"templates/configs/a.yaml": CONFIG.format(extra=extra, message=message), "toy.py": TOY})
    project = Project("a", tmp_path)
    with pytest.raises((TrainingError, TypeError)) as caught:
        run(plan_run(project), str(tmp_path))
    return caught.value


def test_a_setting_that_a_constructor_refuses_is_shown_where_it_is_written(tmp_path):
    error = failure(tmp_path, extra="max_stepz: 4")

    assert (3, "args.max_stepz") == (error.span.line, error.path)
    assert ("config a.yaml",) == error.context


def test_a_setting_that_a_run_reports_is_shown_where_it_is_written(tmp_path):
    error = failure(tmp_path, message="max_steps is 3, and that is too few")

    assert (2, "args.max_steps") == (error.span.line, error.path)


@pytest.mark.parametrize("message", ["the data has no rows", "learning_rate is wrong"])
def test_a_bare_word_and_an_unknown_name_are_not_taken_for_a_setting(tmp_path, message):
    error = failure(tmp_path, message=message)

    assert (None, ("config a.yaml",)) == (error.span, error.context)


def test_an_argument_that_an_error_is_about_is_a_setting_though_it_is_a_bare_word(tmp_path):
    error = failure(tmp_path, extra="engine: {max_steps: 1}", message="the engine has no setting 'max_steps'")

    assert (3, "args.engine") == (error.span.line, error.path)


def test_a_setting_behind_an_alias_is_shown_where_its_value_is_written(tmp_path):
    error = failure(tmp_path, message="own_loss is wrong")

    assert (4, "main.own_loss") == (error.span.line, error.path)


def test_what_a_loss_or_a_model_does_wrong_is_about_the_setting_that_names_it():
    def focal(logits, labels):
        return logits.mean()

    with pytest.raises(TrainingError, match=r"'focal' \(test_pinpoint.py:\d+\)") as caught:
        loss_rule(torch.nn.Identity(), functools.partial(focal))
    assert "loss_fn" == caught.value.argument
    for output, loss_fn in (({"out": 1}, torch.nn.MSELoss()), (torch.ones(2, 2), None)):
        with pytest.raises(TrainingError, match="FG809") as caught:
            loss_rule(torch.nn.Identity(), loss_fn).total(lambda *_, out=output, **__: out, {"labels": torch.ones(2)})
        assert "model" == caught.value.argument


def test_an_error_of_a_call_deep_in_main_has_the_path_of_its_own_target(tmp_path):
    text = "rows: &rows !call:own.py:rows []\nmain: !call:dict {model: {dataset: [*rows]}}\n"
    source = (
        "from forgather.errors import TrainingError\ndef rows(n=1):\n    raise TrainingError('no rows').about('n')\n"
    )
    make_project(tmp_path, {"templates/configs/a.yaml": text, "own.py": source})
    with pytest.raises(TrainingError) as caught:
        Project("a", tmp_path)()
    assert "rows" == caught.value.path
