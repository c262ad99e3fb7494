"""The table of settings with adapters, preferences, quantized models, modules and transformers' `Trainer` is true."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
import transformers

from forgather.lightning.module_settings import REFUSED
from forgather.lightning.trainer_words import KNOWN
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments, PipelineTrainingArguments
from forgather.ml.trainer.trainer import Trainer
from forgather.quantized import Quantized, refusal
from forgather.rule_conditions import SOMETHING

ROOT = Path(__file__).parents[2]
PAIRS = json.loads((ROOT / "forgather/ml/setting_pairs.json").read_text())
SETTINGS = PAIRS["settings"]
BEFORE = set(json.loads((ROOT / "tests/ml/recorded/settings_before_pairs.json").read_text()))
"""The settings of the releases before the table."""
FIELDS = {
    one.name
    for arguments in (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)
    for one in dataclasses.fields(arguments)
}
THEIRS = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}
VALUES = {
    "activation_memory_budget": 0.5,
    "context_parallel_size": 2,
    "fp8": "rowwise",
    "optim": "adamw_torch_8bit",
    "z_loss_coefficient": 1e-4,
}
ELSEWHERE = {("context_parallel_size", "preferences"), ("fp8", "quantized"), ("initial_weights", "quantized")}
"""Refused at the start, by the family and the loss of the model, or by what the model is: see the pages of the codes."""
GIVEN = {
    "adapters": {"adapter": SOMETHING},
    "preferences": {"adapter": None, "loss_fn": SOMETHING, "loss_fn.calls": "forgather.ml.preference_losses:dpoloss"},
}


def refused(world):
    return [(name, of[world]["refused"]) for name, of in SETTINGS.items() if "refused" in of[world]]


def test_the_page_is_written_out_of_the_data():
    spec = importlib.util.spec_from_file_location("setting_pairs_table", ROOT / "scripts/setting_pairs_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text()
    assert script.page_with(text, script.table(PAIRS)) == text, "run scripts/setting_pairs_table.py"


def test_every_setting_that_is_new_has_a_row():
    rows = {name.partition(":")[0] for name in SETTINGS}
    assert FIELDS - BEFORE == rows - BEFORE, "add a row to forgather/ml/setting_pairs.json"
    assert rows <= FIELDS
    assert all(of.keys() == PAIRS["worlds"].keys() for of in SETTINGS.values())


def test_every_test_that_the_table_names_exists():
    named = {of["equal"] for verdicts in SETTINGS.values() for of in verdicts.values() if "equal" in of}
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), name
    kinds = {kind for verdicts in SETTINGS.values() for of in verdicts.values() for kind in of}
    assert {"equal", "refused", "independent"} == kinds


@pytest.mark.parametrize("world", GIVEN)
def test_what_is_refused_with_adapters_and_preferences_is_a_rule(world):
    for name, code in refused(world):
        if (name, world) in ELSEWHERE:
            continue
        facts = {f"args.{one}": value for one, value in TrainingArguments().to_dict().items()}
        facts |= {"loss_fn": None, **GIVEN[world], f"args.{name}": VALUES.get(name, True)}
        assert code in {one.code for one in Trainer.RULES.broken(facts)}, name


def test_what_is_refused_with_quantized_models_has_its_code():
    model = Quantized("bits4")
    assert refusal(model, {"trainer": "single"}, has_adapter=True, processes=1) is None
    for name, code in refused("quantized"):
        if (name, "quantized") in ELSEWHERE:
            continue
        setting = name.partition(":")[0]
        given = {"trainer": "single", setting: VALUES.get(setting, True)}
        assert refusal(model, given, has_adapter=True, processes=1).code == code


def test_what_modules_and_transformers_refuse_is_what_they_do_not_take():
    for name, of in SETTINGS.items():
        setting = name.partition(":")[0]
        assert ("FG865" == of["modules"].get("refused")) is (setting in REFUSED), name
        assert ("FG810" == of["modules"].get("refused")) is (setting not in KNOWN), name
        assert ("refused" in of["transformers"]) is (setting not in THEIRS), name
