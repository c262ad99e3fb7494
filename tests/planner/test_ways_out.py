"""Ways out of a plan that does not fit: only changes that the run does not use, in the order of how near they are."""

import pytest

from forgather.planner.fit import Verdict
from forgather.planner.ways_out import WayOut, changes_of, nearest_first, way_lines

GIB = 2**30
ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1}


def titles(
    *,
    given=None,
    optimizer=None,
    world=1,
    mesh=None,
    strategy="DataParallel",
    largest="update",
    at="optimizer step",
    device="cuda",
    **settings,
):
    usual = {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "bf16": False, "fp16": False}
    phases = [
        {"phase": "evaluation", "at": "evaluation", "num_bytes": 2},
        {"phase": "training step", "at": at, "num_bytes": 1},
    ]
    ranks = [{"phases": phases if largest == "evaluation" else phases[1:]}]
    plan = {"settings": usual | settings, "mesh": mesh or {}, "strategy": strategy, "world_size": world, "ranks": ranks}
    plan["device_type"] = device
    return [change.title for change in changes_of(plan, given or {}, optimizer)]


ACCEL = {"trainer": "forgather.ml:AccelTrainer"}
SHARDS = {"replicate": 1, "shard": 2}
BOTH = "weights sharded by FSDP2, in host memory"
EVAL = "evaluation of one row at a time"
OFFLOAD, WHOLE = "activations in host memory", "layers recomputed as a whole"
FREED = "gradients freed in the backward pass"
UNCLIPPED = f"{FREED}, whose norm is not clipped"
EIGHT, OTHER = "8-bit AdamW, which rounds its state", "Adafactor, another optimizer"
# What a run may have that the cases below are not about.
USED = {"activation_offloading": True, "optimizer_in_backward": True}
FSDP, HOST, ZERO = "weights sharded by FSDP2", "weights and optimizer in host memory", "ZeRO 3"


BOTH_SMALLER = ["smaller micro-batches", "recomputed activations"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["smaller micro-batches", "recomputed activations", OFFLOAD, UNCLIPPED, "bfloat16"]),
        ({"device": "cpu"}, ["smaller micro-batches", "recomputed activations", UNCLIPPED, "bfloat16"]),
        ({"given": USED}, ["smaller micro-batches", "recomputed activations", "bfloat16"]),
        ({"per_device_train_batch_size": 1, "fp16": True}, ["recomputed activations", OFFLOAD]),
        ({"gradient_checkpointing": True, "bf16": True, "given": USED}, ["smaller micro-batches"]),
        ({"given": {"accumulate_grad_batches": {0: 2}}, "bf16": True}, ["recomputed activations", OFFLOAD]),
        ({"gradient_accumulation_steps": 2, "bf16": True, "given": {"activation_offloading": True}}, BOTH_SMALLER),
        ({"mesh": {"tensor": 2}, "bf16": True, "given": {"activation_offloading": True}}, BOTH_SMALLER),
        ({"mesh": {"pipeline": 2}, "bf16": True, "given": {"pipeline_chunks": 4}}, [*BOTH_SMALLER, OFFLOAD]),
        ({"strategy": "DeepSpeedZero", "bf16": True}, BOTH_SMALLER),
        ({"given": {"trainer": "forgather.ml:HFTrainer"}, "bf16": True}, BOTH_SMALLER),
        ({"given": {"max_grad_norm": 0}, "bf16": True}, [*BOTH_SMALLER, OFFLOAD, FREED]),
        (
            {"given": {**USED, "gradient_checkpointing_kwargs": {"mode": "selective"}}, "gradient_checkpointing": True},
            ["smaller micro-batches", WHOLE, "bfloat16"],
        ),
        (
            {"largest": "evaluation", "given": USED, "gradient_checkpointing": True},
            [EVAL, "smaller micro-batches", "bfloat16"],
        ),
        (
            {
                "largest": "evaluation",
                "given": {**USED, "per_device_eval_batch_size": 1},
                "gradient_checkpointing": True,
            },
            ["smaller micro-batches", "bfloat16"],
        ),
    ],
)
def test_a_change_is_one_that_the_run_does_not_use(options, found):
    assert found == titles(**options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"world": 2, "given": ACCEL}, [FSDP, BOTH]),
        ({"world": 2, "given": ACCEL, "device": "cpu"}, [FSDP]),
        ({"world": 2, "given": {"trainer": "forgather.ml:PipelineTrainer"}}, []),
        ({"given": ACCEL}, []),
        ({"world": 2, "mesh": SHARDS, "strategy": "Sharded", "given": {**ACCEL, "fsdp": "full_shard"}}, [HOST]),
        (
            {"world": 2, "mesh": SHARDS, "given": {**ACCEL, "fsdp": True, "fsdp_config": {"shard_size": 1}}},
            [FSDP, HOST],
        ),
        ({"world": 2, "mesh": SHARDS, "given": {**ACCEL, "fsdp": True, "fsdp_config": {"cpu_offload": True}}}, []),
        ({"world": 2, "strategy": "DeepSpeedZero", "given": {**ACCEL, "deepspeed": {}}}, [ZERO]),
        (
            {
                "world": 2,
                "strategy": "DeepSpeedZero",
                "given": {**ACCEL, "deepspeed": {"zero_optimization": {"stage": 3}}},
            },
            [],
        ),
        ({"world": 2, "strategy": "DeepSpeedZero", "given": {**ACCEL, "deepspeed": "zero.json"}}, []),
    ],
)
def test_what_can_be_divided_further_is(options, found):
    used = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "bf16": True}
    assert found == titles(**used, **{**options, "given": {**USED, **options["given"]}})


def test_a_smaller_optimizer_keeps_decay_and_betas():
    plan = {"settings": {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "bf16": True, "fp16": False}}
    whole = {**plan, "mesh": {}, "strategy": "", "world_size": 1, "ranks": [], "device_type": "cuda"}
    eight, other, factor = changes_of(whole, USED, {**ADAMW, "fused": True})
    # Two libraries have it.
    assert ("adamw_torch_8bit", eight.title) == (other.settings["optim"], other.title)
    assert {"optim": "adamw_8bit", "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95} == eight.settings
    assert {"optimizer_factory": "null"} == eight.of_main
    assert "adafactor {weight_decay: 0.1}" in factor.of_main["optimizer_factory"]
    assert eight.sets & factor.sets
    # The trainer's own weight decay stays where the factory gives none; other arguments cannot be carried over.
    eight, _, factor = changes_of(whole, USED, {"betas": None})
    assert {"optim": "adamw_8bit", "adam_beta1": 0.9, "adam_beta2": 0.999} == eight.settings
    assert factor.of_main["optimizer_factory"].endswith("adafactor {}")
    assert [] == changes_of(whole, USED, {"lr": 0.1})
    both = titles(per_device_train_batch_size=1, optimizer=None)
    assert OTHER not in both


def test_a_change_that_needs_another_setting_sets_it():
    plan = {"settings": {"per_device_train_batch_size": 1, "gradient_checkpointing": False, "bf16": True}}
    plan |= {"mesh": {}, "strategy": "", "world_size": 1, "ranks": [], "device_type": "cuda"}
    plan["settings"]["fp16"] = False
    recomputed, offloaded, freed = changes_of(plan, {"activation_memory_budget": 0.5}, None)
    # Both decide what a compiled block keeps, and a norm is known only after the backward pass.
    assert {"gradient_checkpointing": True, "activation_memory_budget": None} == recomputed.settings
    assert {"activation_offloading": True} == offloaded.settings
    assert {"optimizer_in_backward": True, "max_grad_norm": 0.0} == freed.settings
    plan["settings"]["gradient_checkpointing"] = True
    given = {**USED, "gradient_checkpointing_kwargs": {"mode": "selective", "preserve_rng_state": False}}
    (whole,) = changes_of(plan, given, None)
    assert {"gradient_checkpointing_kwargs": {"mode": "full", "preserve_rng_state": False}} == whole.settings


def test_a_fused_adamw_is_a_way_out_of_an_optimizer_step_on_a_gpu():
    used = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "bf16": True}
    fused = "fused AdamW, without a copy of the weights"
    whole = {**ADAMW, "no_decay": ["bias", "norm"]}
    used["given"] = USED
    assert [fused, EIGHT, EIGHT, OTHER] == titles(optimizer=whole, **used)
    others = [{"at": "backward pass"}, {"device": "cpu"}, {"optimizer": {**whole, "fused": True}}, {"optimizer": None}]
    assert not any(fused in titles(**{"optimizer": whole, **used, **other}) for other in others)
    # What leaves other weights out of the decay cannot be said with `optim`.
    assert [fused] == titles(optimizer={**ADAMW, "no_decay": ["bias"]}, **used)


def way(title, least, verdict, **facts):
    return WayOut(
        title=title,
        assignments=((f"a.{title}", "x y"),),
        peak_bytes=least - 1,
        least=least,
        most=least + GIB,
        available=10 * GIB,
        verdict=verdict,
        **facts,
    )


def test_what_fits_comes_first_and_what_cannot_be_used_last():
    ways = [
        way("refused", 0, Verdict.TOO_LARGE, reason="no"),
        way("far", 14 * GIB, Verdict.TOO_LARGE),
        way("near", 11 * GIB, Verdict.TOO_LARGE),
        way("may", 10 * GIB, Verdict.MAY_FIT),
        way("second", 9 * GIB, Verdict.FITS),
        way("first", 9 * GIB, Verdict.FITS),
    ]
    ordered = nearest_first(ways)
    assert ["second", "first", "may", "near", "far", "refused"] == [one.title for one in ordered]
    lines = way_lines([one.as_data() for one in ordered[2:]])
    assert 6 == len(lines)
    assert "may: may fit. The planned peak is 10.0 GiB; it needs 10.0 GiB to 11.0 GiB of 10.0 GiB" == lines[0]
    assert "  --set 'a.may=x y'" == lines[1]
    assert lines[2].startswith("near: does not fit, 1.0 GiB too much")
    assert not any("refused" in line for line in lines)
    (line, _) = way_lines([way("moved", 9 * GIB, Verdict.FITS, host_bytes=2 * GIB).as_data()])
    assert line.endswith("it needs 9.0 GiB to 10.0 GiB of 10.0 GiB, and 2.0 GiB of the host")
