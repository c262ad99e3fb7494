"""`check` finds hooks of transformers' trainer in the user's trainer at their lines, and imports nothing."""

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
main: !singleton:{place}
  model: !singleton:torch.nn:Linear [2, 1]
  args: !singleton:forgather.ml:{arguments} {{output_dir: out}}
"""
MINE = """\
raise RuntimeError("nobody imports this")
from {module} import {trainer}

class Mixin:
    def create_optimizer(self):
        return None

class Mine(Mixin, {trainer}):
    steps = 0
    compute_metrics = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss

    def another(self):
        def log():
            pass

class Further(Mine):
    get_train_dataloader = None
"""


def findings(folder, trainer="Trainer", place="mine.py:Mine", module="forgather.ml", arguments="TrainingArguments"):
    files = {
        "templates/configs/a.yaml": CONFIG.format(place=place, arguments=arguments),
        "mine.py": MINE.format(trainer=trainer, module=module),
    }
    project = Project("a", make_project(folder, files))
    found = check_project(project).findings
    return [
        (one.code, one.message.partition(",")[0], one.span.file.rpartition("/")[2], one.span.line)
        for one in found
        if one.code in ("FG860", "FG861")
    ]


@pytest.mark.parametrize(
    ("trainer", "arguments"), [("Trainer", "TrainingArguments"), ("AccelTrainer", "AccelTrainingArguments")]
)
def test_a_hook_that_is_never_called_is_found_at_its_line(tmp_path, trainer, arguments):
    assert [
        ("FG860", "Mixin defines 'create_optimizer'", "mine.py", 5),
        ("FG860", "Mine defines 'training_step'", "mine.py", 12),
    ] == findings(tmp_path, trainer, arguments=arguments)


def test_a_class_that_derives_from_another_of_the_users_has_both(tmp_path):
    assert [5, 12, 22 + 1] == [line for *_, line in findings(tmp_path, place="mine.py:Further")]


def test_a_pipeline_does_not_call_a_loss_of_the_whole_model(tmp_path):
    found = findings(tmp_path, "PipelineTrainer", arguments="PipelineTrainingArguments")
    assert ("FG861", "Mine defines 'compute_loss'", "mine.py", 15) in found
    assert 3 == len(found)


@pytest.mark.parametrize(("module", "trainer"), [("transformers", "Trainer"), ("forgather.ml.trainer.hf", "HFTrainer")])
def test_the_trainer_of_transformers_calls_its_hooks(tmp_path, module, trainer):
    assert [] == findings(tmp_path, trainer, module=module)
