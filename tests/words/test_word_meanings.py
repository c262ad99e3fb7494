"""A name that tools use differently is explained with each meaning, and with the tool's own where the tool is known."""

import pytest

from forgather.aliases import alias_of, read_aliases
from forgather.cli.main import main
from forgather.rules import shipped_rules
from forgather.translation import translate

SETTINGS = shipped_rules()["forgather.ml:TrainingArguments"][0]


def names(record):
    """The settings that a record leads to: what is called the same, and the settings of its values."""
    values = [meant for meant in record.get("values", {}).values() if isinstance(meant, dict)]
    kind, _, name = record.get("to", "").partition(":")
    return frozenset({name for meant in values for name in meant} or ({name} if kind == "setting" else ()))


def meanings(record):
    return {names({**record, **one}) for one in record.get("by_tool", {}).values()} - {frozenset()}


DIFFERENT = {word: record for word, record in read_aliases()["setting"].items() if len(meanings(record)) > 1}


def test_there_are_names_that_tools_use_differently():
    assert {"batch_size", "train_batch_size", "mode", "decay", "logging_interval"} <= set(DIFFERENT)


@pytest.mark.parametrize("word", DIFFERENT)
def test_each_meaning_is_in_the_message_that_asks(word):
    hint = alias_of("setting", word).hint
    assert all(any(name in hint for name in one) for one in meanings(DIFFERENT[word])), hint
    said = SETTINGS.names({word: 1}, {})[1]
    # A name with two meanings must not be taken for one of them.
    assert {"FG810"} == {one.code for one in said}


@pytest.mark.parametrize(
    ("word", "value", "tool", "settings"),
    [
        ("batch_size", 8, "torch", {"per_device_train_batch_size": 8}),
        ("batch_size", 64, "composer", {"global_batch_size": 64}),
        ("train_batch_size", 16, "deepspeed", {"global_batch_size": 16}),
        ("train_batch_size", 4, "diffusers", {"per_device_train_batch_size": 4}),
        ("mode", "max", "lightning", {"greater_is_better": True}),
        ("mode", "max-autotune", "torch", {"torch_compile_mode": "max-autotune"}),
        ("logging_interval", "epoch", "lightning", {"logging_strategy": "epoch"}),
        ("logging_interval", 10, "torchtune", {"logging_steps": 10}),
        ("decay", 0.1, "torch", {"weight_decay": 0.1}),
        ("workers", 4, "torch", {"dataloader_num_workers": 4}),
    ],
)
def test_a_tool_means_its_own(word, value, tool, settings):
    found = translate({word: value}, tool=tool, known=SETTINGS.settings)
    assert [] == found.violations
    assert settings == found.settings


def test_a_meaning_without_a_counterpart_is_refused_for_its_tool():
    found = translate({"workers": True}, tool="lightning", known=SETTINGS.settings)
    assert {} == found.settings
    (refused,) = found.violations
    assert "seeds of their own" in refused.hint


def test_explain_shows_what_each_tool_means(capsys):
    assert 0 == main(["explain", "mode"])
    told = capsys.readouterr().out
    assert "in lightning: write greater_is_better" in told
    assert "in torch: here the setting torch_compile_mode" in told
    assert 0 == main(["explain", "mode", "--tool", "lightning"])
    assert "max   greater_is_better: true" in capsys.readouterr().out
    assert 0 == main(["explain", "lr"])
    assert "taken under this name, too" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["explain", "mode", "--tool", "lightening"])
    assert "'lightening' is none of the tools" in capsys.readouterr().err
