"""Words of other tools become our settings, or an error that says why not."""

import logging

import pytest

from forgather.aliases import read_aliases
from forgather.rules import shipped_rules
from forgather.translation import translate

KNOWN = shipped_rules()["forgather.ml:TrainingArguments"][0].settings
TABLE = read_aliases()["setting"]


def test_a_word_that_means_a_setting_gives_its_value():
    found = translate({"max_epochs": 3, "gradient_clip_val": 0.5, "seed": 7}, tool="lightning", known=KNOWN)
    assert {"num_train_epochs": 3, "max_grad_norm": 0.5, "seed": 7} == found.settings
    assert ["max_epochs=3 is num_train_epochs: 3", "gradient_clip_val=0.5 is max_grad_norm: 0.5"] == found.notes
    assert [] == found.violations


def test_none_means_not_given():
    assert ({}, [], [], {}) == translate({"max_epochs": None, "nobody_knows": None}, tool="lightning", known=KNOWN)


def test_a_word_that_nobody_knows_and_one_without_a_counterpart_are_errors():
    found = translate({"max_epoch": 3, "assistant_only_loss": True}, tool="lightning", known=KNOWN).violations
    assert [("FG810", "max_epoch"), ("FG811", "assistant_only_loss")] == [(one.code, one.argument) for one in found]
    assert found[1].hint == TABLE["assistant_only_loss"]["why"]


def test_two_words_for_one_setting_must_agree():
    agreed = translate({"max_epochs": 3, "num_train_epochs": 3}, tool="lightning", known=KNOWN)
    assert ({"num_train_epochs": 3}, []) == (agreed.settings, agreed.violations)
    (found,) = translate({"max_epochs": 3, "num_train_epochs": 4}, tool="lightning", known=KNOWN).violations
    assert ("FG812", "num_train_epochs") == (found.code, found.argument)


def test_the_values_of_a_record_name_settings_that_exist():
    every = {name for known in shipped_rules().values() for rules in known for name in rules.settings}
    records = [record for _, record in TABLE.items()]
    records += [{**record, **one} for record in records for one in record.get("by_tool", {}).values()]
    for record in records:
        for meant in record.get("values", {}).values():
            assert isinstance(meant, str) or set(meant) <= every, (record, meant)


def test_a_config_takes_a_word_that_means_one_of_our_settings(caplog, tmp_path):
    pytest.importorskip("torch")
    from forgather.ml import TrainingArguments

    with caplog.at_level(logging.WARNING):
        args = TrainingArguments(output_dir=str(tmp_path), max_epochs=2)
    assert args.num_train_epochs == 2
    assert "TrainingArguments: 'max_epochs' is called 'num_train_epochs'; 2 is used for it" in caplog.text


def test_a_word_below_our_own_name_replaces_its_value_as_below_a_template(caplog, tmp_path):
    pytest.importorskip("torch")
    from forgather.ml import TrainingArguments
    from forgather.ml.trainer.argument_checks import SettingError

    with caplog.at_level(logging.WARNING):
        args = TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=5, max_epochs=2, max_grad_norm=0.5, max_norm=None
        )
    assert (2, 0.5) == (args.num_train_epochs, args.max_grad_norm)
    assert "'max_epochs' is called 'num_train_epochs'; 2 is used in place of 5" in caplog.text
    for given in ({"max_epochs": 2, "num_train_epochs": 5}, {"max_norm": 1.0, "gradient_clip_val": 0.5}):
        with pytest.raises(SettingError, match="is given twice"):
            TrainingArguments(output_dir=str(tmp_path), **given)
