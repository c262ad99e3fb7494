"""Float8: the recorded distances of runs with torchao from a plain loop, and what is refused by name."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapters import lora
from forgather.ml.float8 import compute_in_float8
from forgather.ml.preference_losses import DPOLoss
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.fixtures import tiny_llama
from tests.project.workbench import TINY_TRAINING, make_project

RECORD = json.loads((Path(__file__).parent / "recorded" / "float8_runs.json").read_text())
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def test_the_record_is_of_the_versions_that_are_tested():
    assert RECORD["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_equals_a_plain_loop_in_float8(recipe):
    figures = RECORD["figures"][recipe]
    assert 14 == figures["layers in float8"]
    # The control: float8 is far from float32, so a run that did not compute in it would be seen.
    assert figures["float32, from a plain loop"] > 0.1
    for what in ("one process, from a plain loop", "resumed, from one run", "recomputed, from one run"):
        assert figures[what] <= 1e-6
    assert figures["compiled, from one run"] <= 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", ["DDP", "FSDP2"])
def test_ranks_equal_one_process_where_a_scale_is_that_of_a_row(recipe, strategy):
    found = RECORD["figures"][recipe][f"{strategy} on two ranks, from one process"]
    # One scale for a tensor is that of the rows of a rank: no closer than float8 is to float32.
    assert found <= (0.3 if recipe == "tensorwise" else 1e-5)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_float8_goes_with_counted_weights_recomputation_and_a_loss_without_logits(recipe):
    assert RECORD["figures"][recipe]["FSDP2 with what is new together, from one process"] <= 1e-5


SIZES = {"hidden_size": 32, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("model", "words", "code", "told"),
    [
        (lambda: tiny_llama(**SIZES), {"emulate": False}, "FG792", "does not multiply float8 matrices"),
        (lambda: tiny_llama(**SIZES), {"exclude": ["mpl"]}, "FG793", "fp8_exclude has 'mpl'"),
        (lambda: tiny_llama(**SIZES), {"exclude": ["proj"]}, "FG793", "no linear layer in a block"),
        (lambda: tiny_llama(intermediate_size=44), {}, "FG793", "has 32 inputs and 44 outputs"),
        (lambda: nn.Linear(16, 16), {}, "FG793", "no linear layer in a block of Linear"),
        (lambda: lora(r=4).apply(tiny_llama(**SIZES), seed=0), {}, "FG793", "fp8 with an adapter"),
    ],
    ids=["hardware", "unknown name", "nothing left", "sizes", "no blocks", "adapter"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may multiply float8 matrices")
def test_what_cannot_compute_in_float8_is_one_located_sentence(model, words, code, told):
    with pytest.raises(TrainingError) as caught:
        compute_in_float8(model(), **{"recipe": "rowwise", "exclude": (), "emulate": True, **words})
    assert (code, True) == (caught.value.code, told in caught.value.message)
    assert caught.value.hint


def test_without_torchao_it_is_one_located_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(TrainingError, match="torchao is not installed") as caught:
        compute_in_float8(tiny_llama(**SIZES), recipe="rowwise", exclude=(), emulate=True)
    assert ("FG793", "args.fp8") == (caught.value.code, caught.value.argument)


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [("fp8", "rowwise", "FG793"), ("use_liger_kernel", True, "FG790"), ("bf16_stochastic_round", True, "FG708")],
)
def test_a_loss_that_was_not_compared_is_refused_by_the_trainer_and_by_the_check(tmp_path, setting, value, code):
    args = TrainingArguments(str(tmp_path), use_cpu=True, optim="adamw_torch", **{setting: value})
    with pytest.raises(TrainingError, match="(?=.*DPOLoss).*was not compared") as caught:
        Trainer(tiny_llama(**SIZES), args, train_dataset=[], loss_fn=DPOLoss())
    assert (code, f"args.{setting}") == (caught.value.code, caught.value.argument)
    config = f"""\
-- extends 'project.yaml'
[trainer_args]
    == super()
    optim: adamw_torch
    {setting}: {str(value).lower()}
[loss_fn]
    !singleton:forgather.ml.preference_losses:DPOLoss@loss_fn
"""
    files = {"templates/project.yaml": TINY_TRAINING, "templates/configs/a.yaml": config}
    folder = make_project(tmp_path / "bench", files)
    found = check_project(Project("a.yaml", str(folder))).errors
    assert [5] == [one.span.line for one in found if one.code == code]


def test_a_plan_leaves_it_out_and_says_so(caplog):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model = tiny_llama(**SIZES)
    with caplog.at_level(logging.WARNING):
        compute_in_float8(model, recipe="rowwise", exclude=(), emulate=False)
    assert "fp8 is left out of this plan" in caplog.text
    assert all(type(module).__name__ != "Float8Linear" for module in model.modules())
