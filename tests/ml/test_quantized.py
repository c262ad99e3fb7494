"""Quantized base models: what is refused, what a checkpoint leaves out, and the recorded distances from plain torch."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from forgather.ml.adapter_base import names_of_base
from forgather.ml.adapters import lora
from forgather.ml.model_class import num_parameters
from forgather.ml.models import ModelSourceError, from_pretrained
from forgather.ml.trainer.model_source import is_made_anew
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.quantized import Quantized, quantized_as, refusal
from tests.ml.fixtures import tiny_llama
from tests.project.workbench import TINY_TRAINING, make_project

ROOT = Path(__file__).parents[2]
RECORD = json.loads((Path(__file__).parent / "recorded" / "quantized_models.json").read_text())
METHODS = {
    "nf4": Quantized("bits4"),
    "nf4 in float32": Quantized("bits4", "float32"),
    "nf4, bf16": Quantized("bits4", "bfloat16"),
    "int8": Quantized("bits8"),
    "torchao int8": Quantized("torchao"),
}
CELLS = [
    (method, strategy, figure)
    for method, figures in RECORD["figures"].items()
    for strategy, figure in figures.items()
    if strategy not in ("size of the adapter", "dequantized")
]


@pytest.fixture(scope="module")
def oracle():
    path = ROOT / "scripts" / "oracles" / "quantized_models.py"
    spec = importlib.util.spec_from_file_location("quantized_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(oracle, strategy, **more):
    kind = {"one process": "single", "1F1B": "pipeline"}.get(strategy, "accel")
    return {"trainer": kind, **oracle.STRATEGIES[strategy], **more}


def test_the_record_has_every_method_under_every_strategy(oracle):
    assert [(method, strategy) for method in METHODS for strategy in oracle.STRATEGIES] == [cell[:2] for cell in CELLS]


@pytest.mark.parametrize(("method", "strategy", "figure"), CELLS, ids=str)
def test_what_is_not_refused_equals_a_plain_loop(oracle, method, strategy, figure):
    processes = 1 if strategy == "one process" else 2
    asked = settings(oracle, strategy, bf16="bf16" in method)
    found = refusal(METHODS[method], asked, has_adapter=True, processes=processes)
    if isinstance(figure, str):
        assert found is not None and found.message in figure
    else:
        assert found is None
        size = RECORD["figures"][method]["size of the adapter"]
        assert figure <= (2e-3 if "bf16" in method else 1e-6) < size


def test_the_quantized_model_computes_what_the_dequantized_one_does():
    assert max(figures.get("dequantized", 0) for figures in RECORD["figures"].values()) <= 1e-6


def test_the_record_is_of_the_versions_that_are_tested():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "transformers", "peft"):
        assert pinned[name] == RECORD["versions"][name].partition("+")[0]


def test_the_page_has_the_recorded_figures(oracle):
    text = oracle.PAGE.read_text()
    assert oracle.page_with(text, oracle.table(RECORD)) == text, "run scripts/oracles/quantized_models.py --page"


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_packed_weights_that_a_strategy_would_cast_are_refused(storage):
    model = quantized_as({"load_in_4bit": True, "bnb_4bit_quant_storage": storage}, "BitsAndBytesConfig")
    asked = {"trainer": "accel", "fsdp": "full_shard"}
    assert refusal(model, asked, has_adapter=True, processes=2) is None
    found = refusal(model, {**asked, "bf16": True}, has_adapter=True, processes=2)
    assert ("FG955", storage in found.message) == (found.code, True)


@pytest.mark.parametrize(
    ("asked", "setting"),
    [
        ({"trainer": "accel", "context_parallel_size": 2}, "context_parallel_size"),
        (
            {"trainer": "accel", "context_parallel_size": 2, "context_parallel_method": "ring"},
            "context_parallel_size",
        ),
        ({"trainer": "single", "use_liger_kernel": True}, "use_liger_kernel"),
        ({"trainer": "single", "optim": "adamw_torch_8bit"}, "optim"),
        ({"trainer": "single", "bf16_stochastic_round": True}, "bf16_stochastic_round"),
        ({"trainer": "single", "torch_compile": True, "activation_memory_budget": 0.5}, "activation_memory_budget"),
        (
            {
                "trainer": "pipeline",
                "schedule_class": "Schedule1F1B",
                "gradient_checkpointing_kwargs": {"offload": True},
            },
            "gradient_checkpointing_kwargs",
        ),
        ({"trainer": "accel", "fsdp": "full_shard", "gradient_checkpointing_kwargs": {"offload": True}}, None),
        (
            {"trainer": "pipeline", "schedule_class": "Schedule1F1B", "torch_compile_backend": "aot_eager"},
            "torch_compile",
        ),
        ({"trainer": "pipeline", "schedule_class": "Schedule1F1B", "torch_compile": True}, "torch_compile"),
        ({"trainer": "pipeline", "schedule_class": "Schedule1F1B", "activation_offloading": True}, "activation_off"),
        (
            {"trainer": "accel", "deepspeed": {"zero_optimization": {"stage": 2}}, "torch_compile": True},
            "torch_compile",
        ),
        ({"trainer": "accel", "fsdp": "full_shard", "torch_compile": True}, None),
        ({"trainer": "single", "torch_compile": True, "activation_offloading": True}, None),
    ],
    ids=str,
)
def test_settings_that_were_not_compared_with_a_plain_loop_are_refused(asked, setting):
    found = refusal(METHODS["nf4"], asked, has_adapter=True, processes=2)
    assert (found is None) is (setting is None)
    assert found is None or ("FG955", True) == (found.code, f"with {setting}" in found.message)


def test_an_unknown_method_is_trained_in_one_process_only():
    other = quantized_as({}, "GPTQConfig")
    assert refusal(other, {"trainer": "single"}, has_adapter=True, processes=1) is None
    assert refusal(other, {"trainer": "accel"}, has_adapter=True, processes=2).code == "FG955"


BASE = TINY_TRAINING.replace("'trainers/trainer.yaml'", "'trainers/accel_trainer.yaml'")
CONFIG = """\
-- extends 'project.yaml'
[quantization]
    -- include 'quantization/{method}.yaml'
{more}[trainer_args]
    == super()
    fsdp: full_shard
"""
PRETRAINED = "[model]\n    -- include 'models/pretrained.yaml'\n    pretrained_model_name_or_path: some/model\n"
ADAPTER = "[adapter]\n    -- include 'adapters/lora.yaml'\n"


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("nf4", PRETRAINED + ADAPTER, set()),
        ("int8", PRETRAINED + ADAPTER, {("FG955", "trainer.model.quantization_config")}),
        ("nf4", PRETRAINED, {("FG956", "trainer.model.quantization_config")}),
        ("nf4", ADAPTER, {("FG956", "quantization")}),
    ],
)
def test_the_check_refuses_before_a_run(tmp_path, method, more, expected):
    files = {"templates/project.yaml": BASE, "templates/configs/a.yaml": CONFIG.format(method=method, more=more)}
    folder = make_project(tmp_path / "bench", files)
    found = {(one.code, one.path) for one in check_project(Project("a.yaml", str(folder))).errors}
    assert expected == {pair for pair in found if pair[0] in ("FG955", "FG956")}


STORED = {"load_in_4bit": False, "load_in_8bit": True, "quant_method": "bitsandbytes"}


@pytest.mark.parametrize(
    ("stored", "more", "expected"),
    [(STORED, ADAPTER, {"FG955"}), (STORED, "", {"FG956"}), (None, ADAPTER, set()), (None, "", set())],
)
def test_the_check_reads_that_a_model_was_saved_quantized(tmp_path, stored, more, expected):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"quantization_config": stored} if stored else {}))
    config = CONFIG.replace("[quantization]\n    -- include 'quantization/{method}.yaml'\n", "")
    config = config.format(more=PRETRAINED.replace("some/model", str(base)) + more)
    folder = make_project(tmp_path / "bench", {"templates/project.yaml": BASE, "templates/configs/a.yaml": config})
    found = [one for one in check_project(Project("a.yaml", str(folder))).errors if one.code in ("FG955", "FG956")]
    assert expected == {one.code for one in found}
    assert all(one.path == "trainer.model.pretrained_model_name_or_path" for one in found)
    assert all(one.span.line == 4 and one.span.file.endswith("a.yaml") for one in found)


def test_a_missing_library_is_an_error_with_a_place(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    from transformers import BitsAndBytesConfig

    with pytest.raises(ModelSourceError) as caught:
        from_pretrained(tmp_path / "base", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert ("FG957", "quantization_config") == (caught.value.code, caught.value.argument)


def test_every_process_loads_a_model_that_is_quantized():
    import functools

    assert is_made_anew(functools.partial(from_pretrained, "base"))
    assert not is_made_anew(functools.partial(from_pretrained, "base", quantization_config={"load_in_4bit": True}))
    assert not is_made_anew(nn.Linear(1, 1))


class Linear4bit(nn.Linear):
    """Stores its weight as bitsandbytes does: packed, with scales that only its state has."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        packed = linear.weight.detach().flatten()[: linear.weight.numel() // 8, None]
        self.weight = nn.Parameter(packed.clone(), requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(2)
        destination[prefix + "SCB"] = torch.ones(2)


def test_scales_are_left_out_with_their_weights_and_packed_values_are_counted():
    model = tiny_llama()
    whole = num_parameters(model)
    adapted = lora(r=2, target_modules=["q_proj"]).apply(model, seed=1)
    added = num_parameters(adapted) - whole
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer = Linear4bit(layer.base_layer)

    left_out, prefix = names_of_base(adapted), "base_model.model.model.layers.0.self_attn.q_proj."
    assert {f"{prefix}base_layer.{name}" for name in ("weight", "weight.absmax", "SCB")} <= left_out
    assert not [name for name in left_out if "lora_" in name]
    assert whole + added == num_parameters(adapted)
