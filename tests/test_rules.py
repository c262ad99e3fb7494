"""Rules about settings: conditions on what is known, values, names; the data of the shipped rules."""

import dataclasses
import json
from pathlib import Path

import pytest

from forgather.errors import Severity
from forgather.rule_conditions import SOMETHING, UNKNOWN, holds, misfit, names_of
from forgather.rules import Rules, read_rules

FOLDER = Path(__file__).parents[1] / "forgather" / "ml" / "rules"
ALL = [(file.stem, rules) for file in sorted(FOLDER.glob("*.json")) for rules in read_rules(str(file))]


def rules_about(constructor):
    return next(rules for _, rules in ALL if constructor in rules.about and rules.settings)


@pytest.mark.parametrize(
    ("condition", "facts", "expected"),
    [
        ("a == 1", {"a": 1}, True),
        ("a == 1", {}, UNKNOWN),
        ("a == 1 and b == 2", {"a": 2}, False),
        ("a == 1 and b == 2", {"a": 1}, UNKNOWN),
        ("a == 1 or b == 2", {"b": 2}, True),
        ("not (a or b)", {"a": 0, "b": ""}, True),
        ("x.y != 'no' and d == None", {"x.y": "steps", "d": None}, True),
        ("d == None", {"d": SOMETHING}, False),
        ("d != None", {"d": SOMETHING}, True),
        ("d == 3", {"d": SOMETHING}, UNKNOWN),
        ("not d", {"d": SOMETHING}, UNKNOWN),
        ("a % b != 0", {"a": 10, "b": 4}, True),
        ("a % b != 0", {"a": 10, "b": 0}, UNKNOWN),
        ("a % b != 0", {"a": "ten", "b": 4}, UNKNOWN),
        ("a < b", {"a": 1, "b": "2"}, UNKNOWN),
        ("abs(a / b - round(a / b)) > 1e-9", {"a": 0.3, "b": 0.1}, False),
        ("a in ('x', 'y')", {"a": "x"}, True),
        ("'a' not in given", {"given": ()}, True),
        ("-a // 2 + 1 == -1", {"a": 3}, True),
    ],
)
def test_a_condition_is_decided_by_what_is_known(condition, facts, expected):
    assert holds(condition, facts) is expected


@pytest.mark.parametrize("condition", ["open('x')", "a.b()", "[x for x in a]", "a[0]", "1 < a < 3", "lambda: 1"])
def test_a_condition_outside_the_language_is_refused(condition):
    with pytest.raises(ValueError, match="a rule cannot say"):
        holds(condition, {"a": 1})


def test_the_names_of_a_condition_are_whole():
    assert {"args.lr", "b", "c"} == set(names_of("args.lr > b and abs(c) == 1"))


@pytest.mark.parametrize(
    ("value", "rule", "expected"),
    [
        (3, {"type": "whole", "minimum": 1}, None),
        (0, {"type": "whole", "minimum": 1}, "a whole number from 1"),
        (True, {"type": "whole", "minimum": 1}, "a whole number from 1"),
        (-1, {"type": "whole", "minimum": 1, "also": [-1]}, None),
        (
            False,
            {"type": "steps", "also": [0]},
            "a whole number of steps from 1, or a share of all steps between 0 and 1",
        ),
        (1.0, {"type": "number", "minimum": 0, "below": 1}, "a number from 0 below 1"),
        (2, {"type": "number", "minimum": 0, "maximum": 1}, "a number from 0 to 1"),
        (float("nan"), {"type": "number"}, "a number"),
        (float("inf"), {"type": "steps"}, "a whole number of steps from 1, or a share of all steps between 0 and 1"),
        (0.25, {"type": "steps"}, None),
        (None, {"type": "text"}, "a text"),
        (None, {"type": "text", "optional": True}, None),
        ("a", {"type": ["flag", "text"]}, None),
        (3, {"type": ["flag", "text"]}, "true or false or a text"),
        (3, {"type": ["flag", "text"], "expected": "this or that"}, "this or that"),
        ({1: 2}, {"type": "mapping"}, "a mapping"),
    ],
)
def test_a_value_fits_or_says_what_was_expected(value, rule, expected):
    assert expected == misfit(value, rule)


def test_a_misspelt_word_gets_the_nearest_one():
    rules = Rules(about=("m:C",), settings={"kind": {"type": "word", "choices": ["linear", "cosine"]}})
    (breach,) = rules.values({"kind": "cosin"})
    assert ("FG813", "kind") == (breach.code, breach.argument)
    assert breach.hint.startswith("did you mean 'cosine'?")


def test_unknown_values_break_nothing():
    for _, rules in ALL:
        settings = {name: UNKNOWN for name in (*rules.settings, *rules.defaults)}
        assert [] == [*rules.values(settings), *rules.broken(settings, ("output_dir",))]


def test_what_keeps_a_rule_from_being_judged_is_named():
    rules = next(rules for _, rules in ALL if "transformers:Trainer" in rules.about)
    assert {"args.eval_strategy"} == set(rules.undecided({"eval_dataset": None, "train_dataset": SOMETHING}))


def test_names_are_translated_refused_or_without_effect():
    rules = rules_about("forgather.ml:TrainingArguments")
    settings, found = rules.names(
        {"warmup_ratio": 0.1, "use_cache": True, "learing_rate": 1, "fp16": True}, {"fp16": False}
    )
    assert {"warmup_steps": 0.1} == settings
    assert [("FG825", "warning"), ("FG825", "warning"), ("FG810", "error"), ("FG811", "error")] == [
        (breach.code, str(breach.severity)) for breach in found
    ]
    assert "did you mean 'learning_rate'?" == found[2].hint


def test_without_the_names_of_transformers_nothing_is_said_about_an_unknown_one():
    rules = rules_about("forgather.ml:TrainingArguments")
    assert ({}, []) == rules.names({"fp16": True}, None)


def test_a_rule_about_who_wrote_a_setting_is_judged_only_where_that_is_known():
    rules = rules_about("forgather.ml:TrainingArguments")
    facts = rules.complete({"eval_steps": 3})
    assert "FG457" not in [breach.code for breach in rules.broken(facts)]
    found = rules.broken(facts, stands=lambda rule: rule["argument"] == "eval_steps")
    found = [breach for breach in found if breach.code == "FG457"]
    assert [("eval_steps", Severity.WARNING)] == [(breach.argument, breach.severity) for breach in found]


def test_saving_without_a_folder_is_a_warning():
    rules = rules_about("forgather.ml:TrainingArguments")
    found = [breach for breach in rules.broken(rules.complete({}), ()) if breach.code == "FG826"]
    assert [Severity.WARNING] == [breach.severity for breach in found]
    assert [] == [breach for breach in rules.broken(rules.complete({}), ("output_dir",)) if breach.code == "FG826"]


_OF_A_CALL = {
    "fsdp_config": {},
    "sets": ("a",),
    "rows": ("tokenize",),
    "takes": ("a",),
    "calls": "module:name",
    "lr_scheduler_type": "linear",
}


@pytest.mark.parametrize(("name", "rules"), ALL, ids=[f"{name}-{rules.about[0]}" for name, rules in ALL])
def test_the_data_is_sound(name, rules):
    known = {*rules.settings, *rules.complete({}), "nproc_per_node"}
    for rule in rules.settings.values():
        misfit(object(), rule)
    for conflict in rules.conflicts:
        assert {"code", "argument", "when", "message", "hint"} <= set(conflict)
        assert not {"after", "beside"} & set(conflict) or Severity.WARNING == conflict["severity"]
        names = set(names_of(conflict["when"])) - {"given"}
        assert not rules.closed or names <= known
        facts = {name: _OF_A_CALL.get(name.rpartition(".")[2], 1) for name in names}
        assert holds(conflict["when"], facts | {"given": ()}) in (True, False)
        shown = Rules(about=("m:C",), conflicts=({**conflict, "when": "1 == 1"},))
        shown = shown.broken(facts, stands=lambda rule: True)
        assert "{" not in next(iter(shown)).message


def test_the_data_is_written_for_people():
    for file in FOLDER.glob("*.json"):
        assert max(len(line) for line in file.read_text().splitlines() if '"choices"' not in line) <= 300
        assert isinstance(json.loads(file.read_text()), list)


def test_the_heads_of_a_model_share_its_width():
    (rules,) = [rules for _, rules in ALL if "transformers:LlamaConfig" in rules.about]
    (breach,) = rules.broken({"hidden_size": 100, "num_attention_heads": 3})
    assert ("FG827", "hidden_size 100 is not a multiple of num_attention_heads 3") == (breach.code, breach.message)


# Against the libraries that the rules are about.


def test_the_words_are_those_of_transformers():
    enums = pytest.importorskip("transformers.trainer_utils")
    optimizers = pytest.importorskip("transformers.training_args").OptimizerNames
    theirs, ours = rules_about("transformers:TrainingArguments"), rules_about("forgather.ml:TrainingArguments")
    words = {name: rule["choices"] for name, rule in theirs.settings.items() if "choices" in rule}
    assert [kind.value for kind in enums.SchedulerType] == words["lr_scheduler_type"]
    assert [kind.value for kind in optimizers] == words["optim"]
    assert (
        {kind.value for kind in enums.IntervalStrategy} == set(words["eval_strategy"]) == set(words["logging_strategy"])
    )
    assert {kind.value for kind in enums.SaveStrategy} == set(words["save_strategy"])
    assert set(words["lr_scheduler_type"]) - {"greedy"} == set(ours.settings["lr_scheduler_type"]["choices"])
    assert set(ours.settings["optim"]["choices"]) <= set(words["optim"])


@pytest.mark.parametrize("name", ["TrainingArguments", "AccelTrainingArguments", "PipelineTrainingArguments"])
def test_the_defaults_are_those_of_the_class(name):
    arguments = getattr(pytest.importorskip("forgather.ml"), name)
    fields = {field.name: field.default for field in dataclasses.fields(arguments)}
    assert fields == arguments.RULES.defaults
    assert set(fields) == set(arguments.RULES.settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6},
        {"lr_scheduler_type": "cosin"},
        {"optim": "adamx"},
        {"eval_strategy": "step"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"lr_scheduler_type": "greedy"},
        {"dataloader_prefetch_factor": 2},
        {"logging_steps": 0},
        {"logging_steps": 1.5},
        {"eval_strategy": "steps", "eval_steps": 2.5},
        {"save_steps": 2.5},
        {"fp16": True, "bf16": True, "use_cpu": True},
        {"fp16_full_eval": True, "bf16_full_eval": True, "use_cpu": True},
        {"torch_empty_cache_steps": 0},
        {"warmup_steps": -1},
    ],
    ids=str,
)
def test_what_breaks_a_rule_is_refused_by_transformers(settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    rules = rules_about("transformers:TrainingArguments")
    defaults = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    plain = {name: getattr(value, "value", value) for name, value in defaults.items()}
    found = [*rules.values(settings), *rules.broken(rules.complete({**plain, **settings}), ("output_dir",))]
    assert 1 == len(found)
    assert found[0].severity in (Severity.ERROR, Severity.WARNING)
    with pytest.raises(ValueError):
        transformers.TrainingArguments(output_dir=str(tmp_path), **settings)
    assert [] == list(rules.broken(rules.complete(plain), ("output_dir",)))


@pytest.mark.parametrize("name", ["optim", "lr_scheduler_type"])
def test_a_word_that_another_release_of_transformers_may_know_is_a_warning(name):
    breaches = {
        rules.about[0]: [breach.severity for breach in rules.values({name: "of_tomorrow"})]
        for rules in (rules_about("transformers:TrainingArguments"), rules_about("forgather.ml:TrainingArguments"))
    }
    assert {"transformers:TrainingArguments": ["warning"], "forgather.ml:TrainingArguments": ["error"]} == breaches
