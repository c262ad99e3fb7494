"""A dry run of many processes: who holds what, found in one process; what a strategy refuses is refused here too."""

import os

import pytest
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaForCausalLM
from transformers import Trainer as TransformersTrainer

import forgather.ml as ml
from forgather.errors import DistributedError
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.env import fake_world
from forgather.ml.dry_run import dry_run, module_ranges
from forgather.ml.losses import CausalTokenLoss
from forgather.ml.number_format import format_bytes
from forgather.ml.strategy import initial_room
from tests.ml.fixtures import rows, tiny_llama

PLAIN = {"use_cpu": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}


def model_init():
    return tiny_llama(num_hidden_layers=16)


def trainer_of(tmp_path, kind="AccelTrainer", **given):
    args = getattr(ml, kind.replace("Trainer", "TrainingArguments"))(tmp_path, **{**PLAIN, **given})
    return lambda: getattr(ml, kind)(model_init=model_init, args=args, train_dataset=rows(1024))


def found(make, world_size=64):
    laid_out = dry_run(lambda hook: make(), world_size=world_size, local_world_size=8)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & {*os.environ}
    assert not dist.is_initialized()
    return laid_out


def test_a_model_that_the_config_builds_takes_no_memory(tmp_path):
    built = []

    def make(hook):
        built.append(hook(LlamaForCausalLM)(tiny_llama(num_hidden_layers=16).config))
        args = ml.TrainingArguments(tmp_path, **PLAIN)
        return ml.Trainer(model=built[0], args=args, train_dataset=rows(1024))

    laid_out = dry_run(make, world_size=1, local_world_size=8)

    assert all(isinstance(one, FakeTensor) or one.is_meta for one in built[0].parameters())
    assert laid_out["step_problem"] is None
    assert "(4, 12, 64) float32" == laid_out["step"]["output"]
    assert WHOLE == laid_out["parameters"]


WHOLE = sum(weight.numel() for weight in model_init().parameters())
ALL = ["model.embed_tokens", "model.layers.0-15", "model.norm", "lm_head"]


def test_replicas_are_whole_on_every_rank(tmp_path):
    laid_out = found(trainer_of(tmp_path))
    assert {"pipeline": 1, "replicate": 64, "shard": 1, "context": 1, "tensor": 1} == laid_out["mesh"]
    assert 512 == laid_out["rows_per_update"]
    assert [
        {
            "ranks": (0, 63),
            "stages": (),
            "modules": tuple(ALL),
            "parameters": WHOLE,
            "parameter_bytes": 4 * WHOLE,
            "of": WHOLE,
        }
    ] == [dict(holding) for holding in laid_out["holdings"]]
    assert {
        "input_ids": "(4, 12) int64",
        "after each of model.layers": "(4, 12, 32) float32",
        "output": "(4, 12, 64) float32",
    } == laid_out["step"]
    assert laid_out["step_problem"] is None


def test_weights_that_one_process_cannot_make_are_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr(initial_room, "available_bytes", lambda: 1 << 16)
    said = found(trainer_of(tmp_path, fsdp="full_shard"))["initial_weights"]
    size = format_bytes(4 * WHOLE + sum(buffer.nbytes for buffer in model_init().buffers()))
    assert f"the whole model of {size}, and 64.0 KiB of memory are free: set initial_weights" in said
    # Replicas have the whole model in any case, and slices that are computed need no room.
    assert found(trainer_of(tmp_path))["initial_weights"] is None
    assert found(trainer_of(tmp_path, fsdp="full_shard", initial_weights="counter"))["initial_weights"] is None
    monkeypatch.undo()
    assert found(trainer_of(tmp_path, fsdp="full_shard"))["initial_weights"] is None


def test_zero_3_shares_out_every_weight(tmp_path):
    laid_out = found(trainer_of(tmp_path, deepspeed={"zero_optimization": {"stage": 3}}))
    assert {"pipeline": 1, "replicate": 1, "shard": 64, "context": 1, "tensor": 1} == laid_out["mesh"]
    (holding,) = laid_out["holdings"]
    assert sum(-(-weight.numel() // 64) for weight in model_init().parameters()) == holding["parameters"]


def test_stages_of_a_pipeline_hold_their_layers(tmp_path):
    given = {"split_spec": "auto", "pipeline_parallel_size": 4, "schedule_class": "Schedule1F1B"}
    laid_out = found(trainer_of(tmp_path, "PipelineTrainer", **given), world_size=32)
    assert {"pipeline": 4, "replicate": 8, "shard": 1, "context": 1, "tensor": 1} == laid_out["mesh"]
    assert [(0, 7), (8, 15), (16, 23), (24, 31)] == [holding["ranks"] for holding in laid_out["holdings"]]
    assert [(0,), (1,), (2,), (3,)] == [holding["stages"] for holding in laid_out["holdings"]]
    held = [module for holding in laid_out["holdings"] for module in holding["modules"]]
    assert ("model.embed_tokens", "lm_head") == (held[0], held[-1])
    assert WHOLE == sum(holding["parameters"] for holding in laid_out["holdings"]) == laid_out["parameters"]
    assert "(1, 12) int64" == laid_out["step"]["input_ids"]


def test_what_a_strategy_refuses_is_refused(tmp_path):
    with pytest.raises(DistributedError, match="does not give the 64 processes") as caught:
        found(trainer_of(tmp_path, data_parallel_size=48))
    assert "FG704" == caught.value.code
    assert "(--world-size 48 in a dry run)" in caught.value.hint


def test_another_trainer_is_refused(tmp_path):
    with pytest.raises(DistributedError, match="main is a Other") as caught:
        found(lambda: type("Other", (TransformersTrainer,), {"__init__": lambda self: None})())
    assert "FG745" == caught.value.code


def test_a_model_that_looks_at_values_has_a_layout_all_the_same(tmp_path, monkeypatch):
    total = CausalTokenLoss._total

    def looking(self, model, batch, denom):
        loss = total(self, model, batch, denom)
        float(loss)
        return loss

    monkeypatch.setattr(CausalTokenLoss, "_total", looking)
    laid_out = found(trainer_of(tmp_path), world_size=2)
    assert laid_out["step_problem"].startswith("the model cannot be computed without values")
    assert [(0, 1)] == [holding["ranks"] for holding in laid_out["holdings"]]


def test_a_pretended_group_needs_a_process_without_one():
    with fake_world(ProcessFacts(rank=1, world_size=2)):
        assert (1, 2) == (dist.get_rank(), dist.get_world_size())
        with (
            pytest.raises(DistributedError, match="already has a process group"),
            fake_world(ProcessFacts(world_size=4)),
        ):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.weight", "h.0.x", "h.1.x", "h.3.x", "b"], ["a", "h.0-1,3", "b"]),
        (["h._checkpoint_wrapped_module.0.x", "h.1._orig_mod.x"], ["h.0-1"]),
    ],
)
def test_modules_in_short(names, expected):
    assert expected == module_ranges(names)


def test_more_processes_than_a_plan_can_have_are_refused():
    with (
        pytest.raises(DistributedError, match="FG462.*3,000,000,000 processes"),
        fake_world(ProcessFacts(world_size=3 * 10**9)),
    ):
        raise AssertionError("a group of so many processes was made")
    assert not dist.is_initialized()
