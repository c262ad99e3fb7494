"""Numbers and switches of the constructors that fine-tuning uses: nonsense is refused, and none is without a rule."""

import importlib
import inspect
import re

import pytest

from forgather import Project
from forgather.ml.argument_values import ArgumentValueError
from forgather.project.check import check_project
from forgather.rule_conditions import misfit
from forgather.rules import shipped_rules
from tests.project.workbench import make_project

MODULES = (
    "callbacks", "classifiers", "data", "diffusion", "distillation", "entity_metrics", "label_metrics", "models",
    "preference_losses", "preference_metrics", "rewards", "text_metrics",
)  # fmt: skip
# What programs call or fill, and callbacks of every run, whose numbers are ranks and switches of a program.
NOT_OF_CONFIGS = {
    "Entity", "JsonLogger", "ProgressCallback", "RunSummaryCallback", "SpeedCallback", "TBLogger", "TrainerControl",
    "TrainerState", "refuse_missing_reference",
}  # fmt: skip
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NAN, INFINITE = float("nan"), float("inf")
NONSENSE = (NAN, INFINITE, -INFINITE, -(10**400), "x", [], object())


def public_parameters():
    """Yields name, object and parameter of each number and each switch that a config can give a constructor."""
    for short in MODULES:
        module = importlib.import_module(f"forgather.ml.{short}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", None) or own:
            made = getattr(module, name)
            if name.startswith("_") or name in NOT_OF_CONFIGS or not callable(made):
                continue
            for parameter in inspect.signature(made).parameters.values():
                if re.search(r"\b(int|float|bool)\b", str(parameter.annotation)) and "Iterable" not in str(parameter):
                    yield f"forgather.ml.{short}:{name}", made, parameter


PARAMETERS = list(public_parameters())


def rule_of(constructor, name):
    return next(rules.settings[name] for rules in shipped_rules()[constructor] if name in rules.settings)


def nonsense_for(parameter):
    words = str(parameter.annotation)
    return (
        *NONSENSE,
        *(() if "None" in words else (None,)),
        # A switch that is a number, and a number that is a switch.
        *((1, 0) if "bool" in words else (True, -1.5)),
    )


def test_each_number_and_each_switch_has_a_rule_under_every_name_of_its_constructor():
    assert len(PARAMETERS) > 80
    for constructor, made, parameter in PARAMETERS:
        rule = rule_of(constructor, parameter.name)
        if constructor.startswith(("forgather.ml.data:", "forgather.ml.diffusion:", "forgather.ml.callbacks:")):
            assert rule == rule_of(f"{made.__module__}:{made.__name__}", parameter.name)
        if parameter.default is not inspect.Parameter.empty:
            assert misfit(parameter.default, rule) is None


def test_nonsense_is_refused_before_anything_else_is_looked_at():
    for constructor, made, parameter in PARAMETERS:
        required = [one for one in inspect.signature(made).parameters.values() if one.default is one.empty]
        others = {one.name: 8 if "int" in str(one.annotation) else None for one in required if one.kind not in VARIADIC}
        for value in nonsense_for(parameter):
            if value == [] and re.search("tuple|Sequence", str(parameter.annotation)):
                continue  # its length is refused later
            with pytest.raises(ArgumentValueError) as caught:
                next(made(**{**others, parameter.name: value}))  # `pack` is a generator
            assert parameter.name == caught.value.argument, (constructor, value)
            assert caught.value.hint.startswith("expected ")


def test_numbers_of_training_arguments_and_adapters_are_finite():
    names = ("forgather.ml:TrainingArguments", "forgather.ml.adapters:lora", "transformers:Trainer")
    settings = [entry for name in names for rules in shipped_rules()[name] for entry in rules.settings.items()]
    numbers = [(name, rule) for name, rule in settings if rule["type"] in ("number", "whole", "steps")]
    assert len(numbers) > 30
    for name, rule in numbers:
        for value in (NAN, INFINITE, -INFINITE, True, "x", {}):
            assert misfit(value, rule) is not None, (name, value)


@pytest.mark.parametrize(
    ("text", "code", "message", "path"),
    [
        ("args: !singleton:forgather.ml:TrainingArguments {output_dir: out, loraplus_lr_ratio: .inf}",
         "FG813", "loraplus_lr_ratio is inf", "main.args.loraplus_lr_ratio"),
        ("args: !singleton:forgather.ml:TrainingArguments {output_dir: out, learning_rate: .nan}",
         "FG813", "learning_rate is nan", "main.args.learning_rate"),
        ("rows: !call:forgather.ml.data:tokenize_chats {dataset: ~, tokenizer: ~, max_length: -1}",
         "FG839", "max_length is -1", "main.rows.max_length"),
        ("rows: !call:forgather.ml.data:tokenize_chats {dataset: ~, tokenizer: ~, packing: 1}",
         "FG813", "packing is 1", "main.rows.packing"),
        ("rows: !call:forgather.ml.data:tokenize_chats {dataset: ~, tokenizer: ~, packing: 'yes'}",
         "FG242", "tokenize_chats takes bool as 'packing' but gets the text 'yes'", "main.rows.packing"),
        ("rows: !call:forgather.ml.data:mix {datasets: {a: ~}, weights: {a: -2}}",
         "FG945", "weights.a is -2", "main.rows.weights.a"),
        ("loss: !singleton:forgather.ml.preference_losses:DPOLoss {beta: .inf}",
         "FG917", "beta is inf", "main.loss.beta"),
        ("reward: !partial:forgather.ml.rewards:brevity {max_length: 0}",
         "FG813", "max_length is 0", "main.reward.max_length"),
    ],
)  # fmt: skip
def test_the_check_finds_it_at_its_line(tmp_path, text, code, message, path):
    meta = make_project(tmp_path, {"templates/configs/main.yaml": f"main: !dict\n    {text}\n"})
    found = check_project(Project("main.yaml", str(meta))).findings
    told = [(one.code, one.message, one.path, one.span.line) for one in found if one.path == path]
    assert [(code, message, path, 2)] == told
