"""Every setting of every trainer with values of every kind: refused in one sentence, or of the declared type."""

import collections.abc
import dataclasses
import math
import types
import typing

import pytest

from forgather import Project
from forgather.errors import ForgatherError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.trainer.model_setup import compile_model
from forgather.project.check import check_project
from forgather.rules import shipped_rules
from tests.bad_values import BAD_VALUES
from tests.ml.fixtures import assert_same_weights, rows, tiny_llama, weights
from tests.project.workbench import make_project

KINDS = (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)
VALUES = [
    *BAD_VALUES.values(), {}, {"a": 1}, [], [1], ["a"], 1e30, -1, 0, 3, 0.5, True, False, "8", "zzz", 10**30, 2**63,
    {"enabled": 1}, {"enabled": "auto"}, {"enabled": {}},
]  # fmt: skip
# Words that other tools write in this place, and that the rules translate.
TRANSLATED = {"fsdp": (list, tuple, str), "report_to": (str, list, tuple), "output_dir": (str,), "control": (bool,)}
IN_YAML = {
    "{}": (), "{a: 1}": ("Mapping",), "[]": ("Sequence",), "[1]": (), "-1": (), ".nan": (), ".inf": (),
    '""': (), "1.0e+30": ("float",), f"1{'0' * 30}": (), "!dict {}": (),
}  # fmt: skip


def is_of(value, declared):
    """Returns whether a value is of a declared type, by the annotation alone."""
    if declared is typing.Any:
        return True
    if isinstance(declared, types.UnionType):
        return any(is_of(value, one) for one in declared.__args__)
    origin = typing.get_origin(declared) or declared
    if origin is collections.abc.Mapping:
        return isinstance(value, collections.abc.Mapping)
    if origin is collections.abc.Sequence:
        return isinstance(value, list | tuple)
    if origin is float:
        return type(value) in (int, float) and math.isfinite(value) and (abs(value) < 2**63 or type(value) is float)
    if origin is int:
        return type(value) is int and abs(value) < 2**63
    return type(value) is origin or (value is None and origin is types.NoneType)


def fields_of(kind):
    hints = typing.get_type_hints(kind)
    inherited = set() if kind is TrainingArguments else {one.name for one in dataclasses.fields(TrainingArguments)}
    return [(one.name, hints[one.name]) for one in dataclasses.fields(kind) if one.name not in inherited]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_refused_in_one_sentence_or_has_the_declared_type(kind, tmp_path):
    refused = 0
    for name, declared in fields_of(kind):
        for value in VALUES:
            given = {"output_dir": str(tmp_path), "use_cpu": True, name: value}
            try:
                kind(**given)
            except ForgatherError as error:
                refused += 1
                # A value of the right type may be refused beside another setting.
                assert name in str(error) or error.code != "FG813", (name, error)
                assert str(error).isprintable()
                assert len(str(error)) < 1500
                continue
            assert is_of(value, declared) or isinstance(value, TRANSLATED.get(name, ())), (name, value)
    assert refused > 20 * len(fields_of(kind))


def test_a_section_is_no_switch_unless_it_says_enabled(tmp_path):
    assert TrainingArguments(str(tmp_path), torch_compile={"enabled": False}).torch_compile is False
    assert TrainingArguments(str(tmp_path), gradient_checkpointing={"enabled": True}).gradient_checkpointing is True
    for section in ({}, {"partition_activations": False}):
        with pytest.raises(ForgatherError, match="gradient_checkpointing is {") as caught:
            TrainingArguments(str(tmp_path), gradient_checkpointing=section)
        assert ("FG813", "expected true or false") == (caught.value.code, caught.value.hint)


def kind_words(declared):
    return {
        word for word in ("Mapping", "Sequence", "float")
        if word in str(declared) or (word == "float" and declared is float)
    } | ({"Any"} if "Any" in str(declared) and "Mapping" not in str(declared) else set())  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", IN_YAML)
def test_the_check_finds_each_of_them_at_its_line(kind, text, tmp_path):
    fields = dict(fields_of(kind))
    lines = "".join(f"        {name}: {text}\n" for name in fields)
    config = f"main: !dict\n    args: !singleton:forgather.ml:{kind.__name__}\n{lines}"
    found = check_project(
        Project("main.yaml", str(make_project(tmp_path, {"templates/configs/main.yaml": config})))
    ).findings
    told = {one.path.removeprefix("main.args.").partition(".")[0]: one.span.line for one in found if one.path}
    silent = {name for name in fields if name not in told}
    # What may stay is a mapping or list without items, a large number, and `max_steps: -1`.
    allowed = {name for name, declared in fields.items() if kind_words(declared) & {"Any", *IN_YAML[text]}}
    allowed |= {name for name, declared in fields.items() if text in ("{}", "!dict {}") and "Mapping" in str(declared)}
    allowed |= {"max_steps"} if text == "-1" else set()
    # One of the two is told in the name of both.
    allowed |= {"gradient_accumulation_steps"} if "accumulate_grad_batches" in told else set()
    allowed |= {"fsdp"} if text in ("[]", '""') else set()  # transformers' word for no sharding
    assert silent <= allowed
    numbers = {name: 3 + list(fields).index(name) for name in told if name in fields}
    assert numbers == {name: line for name, line in told.items() if name in fields}


def extremes():
    """Yields each number of the plain trainer with the least and the largest value that its rule accepts."""
    rules = shipped_rules()["forgather.ml:TrainingArguments"][0]
    for name, rule in rules.settings.items():
        kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if set(kinds) & {"whole", "number", "steps"} and name not in ("max_steps", "dataloader_num_workers"):
            yield name, rule.get("minimum", 1e-300)
            yield name, rule.get("maximum", 2**63 - 1)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "value"), list(extremes()))
def test_a_run_with_an_extreme_number_trains_or_is_refused(name, value, settings):
    beside = {"ema_decay": 0.5} if name in ("ema_every", "ema_update_after_step") else {}
    beside |= {"eval_strategy": "steps"} if name.startswith(("eval", "per_device_eval")) else {}
    try:
        args = settings(max_steps=2, **beside, **{name: value})
        Trainer(model=tiny_llama(), args=args, train_dataset=rows(), eval_dataset=rows()).train()
    except ForgatherError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ({"lr_scheduler_kwargs": {"num_cycels": 2}}, "FG813", "does not take lr_scheduler_kwargs {'num_cycels': 2}"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "a"}}, "FG813", "{'num_cycles': 'a'}"),
    ],
)
def test_what_only_a_run_can_see_is_one_error_with_its_place(settings, given, code, told):
    with pytest.raises(ForgatherError) as caught:
        Trainer(model=tiny_llama(), args=settings(max_steps=1, **given), train_dataset=rows()).train()
    assert (code, "args.lr_scheduler_kwargs") == (caught.value.code, caught.value.argument)
    assert told in str(caught.value)


def test_a_mode_that_only_another_release_of_torch_has_is_refused_at_start(monkeypatch):
    monkeypatch.setattr("torch._inductor.list_mode_options", lambda: {"default": {}})
    with pytest.raises(ForgatherError, match="torch_compile_mode is 'lite'") as caught:
        compile_model(tiny_llama(), backend="inductor", mode="lite", by_blocks=True)
    assert ("FG823", "one of: default") == (caught.value.code, caught.value.hint)


def test_a_beta_of_zero_may_be_written_as_a_whole_number(settings):
    models = [tiny_llama(), tiny_llama()]
    for model, beta in zip(models, (0, 0.0), strict=True):
        args = settings(max_steps=2, adam_beta1=beta)
        Trainer(model=model, args=args, train_dataset=rows()).train()
    assert_same_weights(weights(models[0]), weights(models[1]))


def test_a_setting_that_has_no_effect_is_told(tmp_path):
    text = "{output_dir: out, liger_kernel_config: {rope: true}, linear_cross_entropy: false"
    text += ", linear_cross_entropy_chunk_size: 8, save_strategy: 'no'}"
    config = f"main: !dict\n    args: !singleton:forgather.ml:TrainingArguments {text}\n"
    meta = make_project(tmp_path, {"templates/configs/main.yaml": config})
    found = check_project(Project("main.yaml", str(meta))).findings
    assert {"liger_kernel_config", "linear_cross_entropy_chunk_size"} <= {
        one.path.rpartition(".")[2] for one in found if one.code == "FG457"
    }
