"""What runs with optimizers of torchao were recorded to do, and what is refused by name without torchao."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import forgather.ml
from forgather.errors import ForgatherError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.adapters import lora
from forgather.ml.low_bit_optim import _COMPARED, NAMES, adopted, is_quantized, plain_parts
from forgather.ml.trainer.hf import HFTrainer
from forgather.ml.trainer.optimizers import make_optimizer
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import rows, tiny_llama
from tests.project.workbench import TINY_TRAINING, make_project

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests/ml/recorded/low_bit_optimizers.json").read_text())
FIGURES = RECORD["figures"]
CONFIG = """\
-- extends 'project.yaml'

[optimizer]
    !partial:torchao.optim:AdamW8bit
    lr: 1.0e-3

[trainer_args]
    == super()
    {setting}
"""
# A difference of rounding in a gradient may select the next of 16 or 256 values of a state.
LIMITS = {"adamw_torch_8bit": 1e-3, "adamw_torch_4bit": 2e-2}


def test_the_record_has_both_optimizers_and_the_versions_that_are_tested():
    assert list(NAMES) == list(FIGURES)
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "transformers"):
        assert pinned[name] == RECORD["versions"][name].partition("+")[0]


@pytest.mark.parametrize("optim", NAMES)
def test_one_process_has_the_bits_of_a_plain_loop_over_the_class_of_torchao(optim):
    assert 0 == FIGURES[optim]["one process, from a plain loop"]
    assert 0 == FIGURES[optim]["one process, updated in the backward pass"]


@pytest.mark.parametrize("optim", NAMES)
def test_two_processes_equal_one_and_every_layout_resumes_every_checkpoint(optim):
    figures = FIGURES[optim]
    layouts = ("one process", "DDP", "FSDP2")
    for layout in layouts:
        assert 0 == figures[f"{layout}, resumed from {layout}"]
        for other in layouts:
            assert figures[f"{other}, resumed from {layout}"] <= LIMITS[optim]
    for name in ("DDP, from one process", "FSDP2, from one process", "FSDP2, updated in the backward pass"):
        assert 0 < figures[name] <= LIMITS[optim]


@pytest.mark.parametrize(("optim", "bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4)])
def test_a_state_has_the_bytes_of_its_bits_and_scales_and_is_divided(optim, bits):
    whole = FIGURES[optim]["one process, bytes of state"] / RECORD["trained values"]
    # The vectors of the norms, a thousandth of the values, have states in float32.
    assert whole == pytest.approx(2 * (bits / 8 + 4 / 256), rel=0.01)
    assert FIGURES[optim]["FSDP2, bytes of state"] == pytest.approx(
        FIGURES[optim]["one process, bytes of state"] / 2, rel=0.01
    )


def test_classes_that_a_config_names_are_saved_and_sharded_too():
    for figures in RECORD["factories"].values():
        assert 0 == figures["FSDP2, resumed"]
        assert 0 == figures["one process, from a plain loop"]
        assert figures["FSDP2, from one process"] <= 1e-2
    assert set(_COMPARED) == RECORD["factories"].keys()


def test_adapters_and_preferences_equal_a_plain_loop():
    figures = RECORD["adapters and preferences"]
    assert 2 * 4 * 3 == len(figures)
    for case, figure in figures.items():
        assert figure <= LIMITS[case.partition(",")[0]], case
        # The states of a matrix whose rows are shorter than a block are in float32: no value of a state is selected.
        assert "rank 4" not in case or figure <= 1e-6, case


def test_a_class_of_a_later_release_is_refused():
    later = type("AdamW2bit", (torch.optim.SGD,), {"__module__": "torchao.optim.adam", "_new_buffer": None})
    with pytest.raises(ForgatherError, match="AdamW2bit of torchao was not compared with a plain loop") as caught:
        adopted(later([torch.zeros(2)], lr=0.1))
    assert "FG708" == caught.value.code


def test_random_rounding_keeps_updates_that_bfloat16_cannot_hold_and_resumes():
    rounding = RECORD["rounding"]
    assert 0 == rounding["kept, to nearest"]
    assert 1 == pytest.approx(rounding["kept, at random"], abs=0.02)
    resumed = {name: value for name, value in rounding.items() if name.endswith("resumed")}
    assert 4 == len(resumed)
    assert {0} == set(resumed.values())
    assert ["FG708", "FG708"] == [rounding["DDP"], rounding["float32"]]


def test_a_flag_on_the_device_leaves_out_a_step():
    assert RECORD["left out by a flag"] is True


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((64, 256), 256, True),
        ((64, 128), 256, False),  # a block would end in the next row, which another process may have
        ((8192,), 256, False),
        ((8, 256), 256, False),  # as in bitsandbytes, small states are not worth it
        ((2, 8, 512), 256, True),
        ((64, 256), float("inf"), False),
    ],
)
def test_a_state_is_quantized_by_the_shape_of_the_whole_weight(shape, block, expected):
    assert expected == is_quantized(torch.Size(shape), block)
    assert not is_quantized(torch.Size(()), block)


LOW = {"optim": "adamw_torch_8bit"}
ROUNDED = {"optim": "adamw_torch", "bf16_stochastic_round": True}


@pytest.mark.parametrize(
    ("arguments", "more", "word"),
    [
        (TrainingArguments, {"bf16_stochastic_round": True}, "does not round at random"),
        (AccelTrainingArguments, {**LOW, "tensor_parallel_size": 2}, "sliced layers"),
        (AccelTrainingArguments, {**LOW, "deepspeed": {"zero_optimization": {"stage": 2}}}, "under DeepSpeed"),
        (AccelTrainingArguments, {**ROUNDED, "tensor_parallel_size": 2}, "sliced layers"),
        (AccelTrainingArguments, {**LOW, "context_parallel_size": 2}, "divided rows"),
        (PipelineTrainingArguments, {**LOW, "split_spec": "auto"}, "stages of a pipeline"),
    ],
    ids=str,
)
def test_what_was_not_shown_is_refused(tmp_path, arguments, more, word):
    with pytest.raises(ForgatherError, match=word) as caught:
        arguments(str(tmp_path), **{"use_cpu": True, **more})
    assert "FG708" == caught.value.code


def test_a_factory_is_not_given_the_rounding_of_the_arguments(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, **ROUNDED)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(8), optimizer_factory=torch.optim.AdamW)
    with pytest.raises(ForgatherError, match="an optimizer_factory makes the optimizer") as caught:
        trainer.train()
    assert "FG708" == caught.value.code


def test_an_optimizer_of_another_library_stays_as_it_is_and_one_that_holds_others_is_refused():
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    assert adopted(optimizer) is optimizer
    assert torch.optim.SGD is type(optimizer)
    offloading = type("CPUOffloadOptimizer", (torch.optim.SGD,), {"__module__": "torchao.optim.cpu_offload"})
    with pytest.raises(ForgatherError, match="no checkpoint here can hold") as caught:
        adopted(offloading([torch.zeros(2)], lr=0.1))
    assert "FG708" == caught.value.code


class Adam8bit(torch.optim.SGD):
    """An optimizer with the methods by which one of torchao is recognized."""

    __module__ = "torchao.optim.adam"
    _new_buffer = None


class Composite(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.inner = Adam8bit(parameters, lr=0.1)


def made_by_a_factory(folder, kind, factory, **settings):
    arguments = getattr(forgather.ml, kind.replace("Trainer", "TrainingArguments"))
    args = arguments(str(folder), use_cpu=True, max_steps=1, save_strategy="no", **settings)
    try:
        getattr(forgather.ml, kind)(
            model_init=tiny_llama, args=args, train_dataset=rows(16), optimizer_factory=factory
        ).train()
    except ForgatherError as error:
        return error.code, error.message
    return None


@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        ("PipelineTrainer", {"pipeline_parallel_size": 2}, "in the stages of a pipeline"),
        ("AccelTrainer", {"context_parallel_size": 2}, "with divided rows"),
        ("AccelTrainer", {"deepspeed": {"zero_optimization": {"stage": 1}}}, "under DeepSpeed"),
    ],
    ids=["pipeline", "context parallel", "DeepSpeed"],
)
def test_a_class_that_a_config_names_is_refused_where_the_names_of_optim_are(tmp_path, kind, settings, word):
    if "deepspeed" in settings:
        pytest.importorskip("deepspeed")
    run = functools.partial(made_by_a_factory, tmp_path, kind, functools.partial(Adam8bit, lr=0.1), **settings)
    for code, message in run_ranks(2, run, timeout=120):
        assert ("FG708", True) == (code, message.endswith(word))


def test_rounding_at_random_is_refused_with_an_adapter(tmp_path):
    model = lora(r=4).apply(tiny_llama().to(torch.bfloat16), seed=0)
    args = TrainingArguments(str(tmp_path), use_cpu=True, **ROUNDED)
    with pytest.raises(ForgatherError, match="not compared with a plain loop with an adapter") as caught:
        make_optimizer(model, args)
    assert "FG708" == caught.value.code


def test_a_class_that_a_config_names_is_refused_with_a_quantized_base_model(tmp_path):
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ForgatherError, match="not shown to be right with a quantized base model") as caught:
        make_optimizer(model, args, functools.partial(Adam8bit, lr=0.1))
    assert "FG708" == caught.value.code


def test_an_optimizer_that_contains_one_of_torchao_is_refused(tmp_path):
    code, message = made_by_a_factory(tmp_path, "Trainer", Composite)
    assert ("FG708", "Adam8bit of torchao was not shown to be right inside of Composite") == (code, message)


@pytest.mark.parametrize(
    ("trainer", "setting", "is_refused"),
    [
        ("accel", "fsdp: full_shard", False),
        ("accel", "tensor_parallel_size: 2", True),
        ("accel", "context_parallel_size: 2", True),
        ("accel", "context_parallel_size: 2\n    context_parallel_method: ring", True),
        ("pipeline", "seed: 1", True),
    ],
)
def test_the_check_refuses_a_class_that_a_config_names(tmp_path, monkeypatch, trainer, setting, is_refused):
    library = {"optim.py": "class AdamW8bit:\n    def __init__(self, params, lr=1e-3):\n        pass\n"}
    make_project(tmp_path / "library" / "torchao", {"__init__.py": "", **library})
    make_project(tmp_path / "library" / "torchao-0.18.0.dist-info", {"METADATA": "Name: torchao\nVersion: 0.18.0\n"})
    monkeypatch.syspath_prepend(tmp_path / "library")
    base = TINY_TRAINING.replace("'trainers/trainer.yaml'", f"'trainers/{trainer}_trainer.yaml'")
    config = CONFIG.format(setting=setting)
    folder = make_project(tmp_path / "bench", {"templates/project.yaml": base, "templates/configs/a.yaml": config})
    try:
        found = {one.path for one in check_project(Project("a.yaml", str(folder))).errors if one.code == "FG708"}
    finally:
        for name in ("torchao.optim", "torchao"):
            sys.modules.pop(name, None)
    assert ({"trainer.optimizer_factory"} if is_refused else set()) == found


def test_a_plain_tensor_is_its_own_part():
    tensor = torch.zeros(2)
    assert plain_parts(tensor) == [tensor]


class Rounding(Adam8bit):
    """One that rounds weights at random."""

    bf16_stochastic_round = True


def rounded_by_transformers(folder):
    args = transformers.TrainingArguments(str(folder), use_cpu=True, max_steps=1, save_strategy="no", report_to="none")
    try:
        HFTrainer(
            model=tiny_llama(),
            args=args,
            train_dataset=rows(16),
            optimizer_factory=functools.partial(Rounding, lr=0.1),
        ).train()
    except ForgatherError as error:
        return error.code, error.message
    return None


def test_copies_that_transformers_trains_are_not_rounded_at_random(tmp_path):
    for code, message in run_ranks(2, rounded_by_transformers, tmp_path, timeout=120):
        assert ("FG708", True) == (code, "transformers' Trainer with 2 processes has copies of weights" in message)
