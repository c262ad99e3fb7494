"""Rules are about a class or function, whatever module a config imports it from."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forgather
from forgather.project.check import check_project
from forgather.project.constructor_rules import home_of, rules_of
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.rules import shipped_rules
from tests.project.workbench import make_project

PACKAGE = Path(forgather.__file__).parent
RULED = {name.partition(":")[2]: rules for name, rules in shipped_rules().items() if name.startswith("forgather.")}


def imported_names():
    """Yields the names of ruled classes and functions in all modules that import them, with the module they name."""
    for file in sorted((PACKAGE / "ml").rglob("*.py")):
        parts = ("forgather", *file.relative_to(PACKAGE).with_suffix("").parts)
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forgather.ml"):
                for one in node.names:
                    if one.name in RULED:
                        yield f"{module}:{one.asname or one.name}", f"{node.module}:{one.name}"


EXPORTS = sorted({pair for pair in imported_names() if ":" in pair[0]})


def at_top_level(name):
    module = name.partition(":")[0].removeprefix("forgather.").split(".")
    file = PACKAGE.joinpath(*module).with_suffix(".py")
    tree = ast.parse((file if file.exists() else PACKAGE.joinpath(*module, "__init__.py")).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.ImportFrom)
        and any((one.asname or one.name) == name.partition(":")[2] for one in node.names)
        for node in tree.body
    )


def test_each_name_of_a_class_has_its_rules():
    names = [pair for pair in EXPORTS if at_top_level(pair[0])]
    assert len(names) > 30
    wrong = {name: source for name, source in names if rules_of(name) != rules_of(source) or not rules_of(name)}
    assert {} == wrong


def test_what_is_not_known_keeps_its_name():
    assert "forgather.ml.optim:adamw" == home_of("forgather.ml.optim:adamw")
    assert "forgather.ml.nowhere:Trainer" == home_of("forgather.ml.nowhere:Trainer")
    # The same name of another class.
    assert "transformers.trainer:Trainer" == home_of("transformers.trainer:Trainer")
    assert () == rules_of("mine:TrainingArguments")


def test_names_are_followed_without_importing_torch():
    code = """
import sys
from forgather.project.constructor_rules import home_of
print(home_of("forgather.ml.trainer.accel:AccelTrainingArguments"), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "forgather.ml.trainer.parallel_arguments:AccelTrainingArguments False\n" == done.stdout


ACCELERATED = """\
main: !call:forgather.ml:AccelTrainer
  model: !call:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
  train_dataset: [1]
  args: !call:CONSTRUCTOR
    output_dir: out
    SETTING
"""


@pytest.mark.parametrize(
    "constructor", ["forgather.ml:AccelTrainingArguments", "forgather.ml.trainer.accel:AccelTrainingArguments"]
)
@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("lerning_rate: 1", "FG810"),
        ("fsdp_config: {state_dict_type: nope}", "FG813"),
        ("fsdp_config: {fsdp_version: two}", "FG813"),
        ("deepspeed: {prescale_gradients: nope}", "FG741"),
        ("deepspeed: {aio: {block_size: nope}}", "FG741"),
        ("tensor_parallel_size: 0", "FG813"),
    ],
)
def test_a_check_finds_a_wrong_setting_under_each_name_of_the_arguments(tmp_path, constructor, setting, code):
    text = ACCELERATED.replace("CONSTRUCTOR", constructor).replace("SETTING", setting)
    project = Project("a.yaml", str(make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})))
    found = check_project(project, reader_for(project.meta)).findings
    assert (code, 6) == next((one.code, one.span.line) for one in found if one.severity == "error")
