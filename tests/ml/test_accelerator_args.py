"""`accelerator_args`: every setting of Accelerate has a place here, or is refused by name."""

import logging
import os
from datetime import timedelta

import pytest
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)

from forgather.errors import DistributedError
from forgather.ml import AccelTrainingArguments
from forgather.ml.distributed.env import DistributedEnvironment, ProcessFacts, accelerate_variables, exported_facts
from forgather.ml.strategy.registry import entry_of
from forgather.ml.trainer.accel import ddp_settings, report_unused_handlers, with_group_settings
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.parallel_arguments import accelerator_settings
from forgather.ml.trainer.run_start import refuse_another_engine


def arguments(folder, accelerator_args, **settings):
    return AccelTrainingArguments(output_dir=str(folder), accelerator_args=accelerator_args, **settings)


# What the documentation of the strategies shows.
BASIC = {"device_placement": True, "split_batches": False, "dispatch_batches": True}
ADVANCED = {
    "device_placement": True,
    "cpu": False,
    "split_batches": False,
    "dispatch_batches": True,
    "mixed_precision": "fp16",
    "gradient_accumulation_plugin": {"num_steps": 4, "adjust_scheduler": True},
    "dataloader_config": {"split_batches": False, "even_batches": True, "use_seedable_sampler": True},
}
COMMUNICATION = {
    "backend": "nccl",
    "dataloader_config": {"num_workers": 4, "pin_memory": True, "persistent_workers": True},
}
FEWER_MESSAGES = {"gradient_accumulation_steps": 8, "dataloader_config": {"num_workers": 2, "prefetch_factor": 2}}


def test_settings_are_taken_to_their_places(tmp_path):
    basic = arguments(tmp_path, BASIC)
    assert (False, 1, None) == (basic.fp16, basic.gradient_accumulation_steps, basic.dataloader_num_workers)
    advanced = arguments(tmp_path, ADVANCED)
    assert (True, False, 4) == (advanced.fp16, advanced.bf16, advanced.gradient_accumulation_steps)
    loading = arguments(tmp_path, COMMUNICATION)
    assert (4, True, True) == (
        loading.dataloader_num_workers,
        loading.dataloader_pin_memory,
        loading.dataloader_persistent_workers,
    )
    fewer = arguments(tmp_path, FEWER_MESSAGES, gradient_accumulation_steps=1)
    assert (8, 2, 2) == (
        fewer.gradient_accumulation_steps,
        fewer.dataloader_num_workers,
        fewer.dataloader_prefetch_factor,
    )


def test_each_setting_that_moved_is_said_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        arguments(tmp_path, {**ADVANCED, "log_with": "tensorboard", "dynamo_backend": "EAGER", "cpu": True})
    assert [
        "accelerator_args.cpu was taken as use_cpu: true",
        "accelerator_args.dispatch_batches true has no effect of its own: every process reads its own rows of the batch "
        "that dispatching would split",
        "accelerator_args.mixed_precision was taken as fp16: true",
        "accelerator_args.gradient_accumulation_plugin.num_steps was taken as gradient_accumulation_steps: 4",
        "accelerator_args.gradient_accumulation_plugin.adjust_scheduler true has no effect of its own: the schedule "
        "advances once per optimizer step, whatever the accumulation",
        "accelerator_args.dataloader_config.even_batches true has no effect of its own: each row is computed once, and "
        "padding at the end is not counted; no row is repeated or dropped",
        "accelerator_args.log_with was taken as report_to: tensorboard",
        "accelerator_args.dynamo_backend was taken as torch_compile_backend: eager",
    ] == caplog.messages


def test_what_asks_for_what_happens_anyway_is_not_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        quiet = {"device_placement": True, "cpu": False, "split_batches": False, "mixed_precision": "no"}
        loader = {"use_seedable_sampler": True, "non_blocking": True, "num_workers": None}
        args = arguments(tmp_path, {**quiet, "dynamo_backend": "no", "dataloader_config": loader})
    assert [] == caplog.messages
    assert not args.torch_compile


def test_a_copy_has_the_same_settings(tmp_path):
    args = arguments(tmp_path, ADVANCED).replace(seed=1)
    assert (True, 4, 1) == (args.fp16, args.gradient_accumulation_steps, args.seed)


@pytest.mark.parametrize(
    ("accelerator_args", "settings", "message"),
    [
        (
            {"gradient_accumulation_steps": 8},
            {"gradient_accumulation_steps": 4},
            "is 8, and gradient_accumulation_steps is 4",
        ),
        ({"gradient_accumulation_plugin": {"num_steps": 8}}, {"gradient_accumulation_steps": 4}, "num_steps is 8, and"),
        (
            {"gradient_accumulation_steps": 8, "gradient_accumulation_plugin": {"num_steps": 2}},
            {},
            "num_steps is 2, and gradient_accumulation_steps is 8",
        ),
        ({"dataloader_config": {"num_workers": 4}}, {"dataloader_num_workers": 2}, "num_workers is 4, and"),
        ({"mixed_precision": "fp16"}, {"bf16": True}, "mixed_precision is 'fp16', bf16 is True"),
        ({"mixed_precision": "no"}, {"fp16": True}, "mixed_precision is 'no'"),
        ({"split_batches": True}, {}, "would split a batch"),
        ({"dataloader_config": {"split_batches": True}}, {}, "would split a batch"),
        ({"device_placement": False}, {}, "is always placed on the device"),
        ({"step_scheduler_with_optimizer": False}, {}, "changes with each update"),
        ({"gradient_accumulation_plugin": {"sync_with_dataloader": False}}, {}, "never waits for the next epoch"),
    ],
)
def test_one_setting_in_two_places_is_refused(tmp_path, accelerator_args, settings, message):
    with pytest.raises(SettingError, match=message) as caught:
        arguments(tmp_path, accelerator_args, **settings)
    assert caught.value.code in ("FG723", "FG814")


@pytest.mark.parametrize(
    ("accelerator_args", "message", "hint"),
    [
        ({"mixed_precison": "bf16"}, "no setting 'mixed_precison'", "mixed_precision"),
        ({"dataloader_config": {"num_worker": 2}}, "dataloader_config has no setting 'num_worker'", "num_workers"),
        ({"fsdp_plugin": object()}, "fsdp_plugin is <object", "a mapping of its arguments, or fsdp and fsdp_config"),
        ({"mixed_precision": "fp8"}, "mixed_precision is 'fp8'", "expected one of: no, fp16, bf16"),
        ({"cpu": "yes"}, "cpu is 'yes'", "true or false"),
    ],
)
def test_names_and_values_are_checked(tmp_path, accelerator_args, message, hint):
    with pytest.raises(SettingError, match=message) as caught:
        arguments(tmp_path, accelerator_args)
    assert hint in caught.value.hint


def test_handlers_go_where_they_belong(tmp_path):
    told = accelerator_settings(
        {
            "backend": "gloo",
            "gradient_accumulation_plugin": {"sync_each_batch": True},
            "kwargs_handlers": [
                DistributedDataParallelKwargs(bucket_cap_mb=5),
                GradScalerKwargs(init_scale=8.0),
                InitProcessGroupKwargs(timeout=timedelta(seconds=7)),
            ],
        }
    )
    assert ("gloo", 7.0, 5, {"init_scale": 8.0}, True) == (
        told.backend,
        told.timeout_seconds,
        told.ddp.bucket_cap_mb,
        dict(told.scaling),
        told.sync_each_batch,
    )
    args = AccelTrainingArguments(output_dir=str(tmp_path), ddp_bucket_cap_mb=5)
    assert told.ddp is ddp_settings(args, told.ddp)
    alone = ddp_settings(args.replace(ddp_bucket_cap_mb=6))
    assert (6, True, None) == (alone.bucket_cap_mb, alone.gradient_as_bucket_view, alone.broadcast_buffers)
    asked = ddp_settings(args.replace(ddp_gradient_as_bucket_view=False, ddp_broadcast_buffers=True))
    assert (False, True) == (asked.gradient_as_bucket_view, asked.broadcast_buffers)
    with pytest.raises(SettingError, match="ddp_bucket_cap_mb is 6, and bucket_cap_mb .* is 5") as caught:
        ddp_settings(args.replace(ddp_bucket_cap_mb=6), told.ddp)
    assert caught.value.code == "FG723"
    with pytest.raises(SettingError, match="has a AutocastKwargs") as caught:
        accelerator_settings({"kwargs_handlers": [AutocastKwargs()]})
    assert caught.value.hint.startswith("write bf16: true")


def test_handlers_of_another_engine_are_reported_or_refused(caplog):
    given = accelerator_settings(
        {"kwargs_handlers": [DistributedDataParallelKwargs(), GradScalerKwargs(init_scale=8.0)]}
    )
    with caplog.at_level(logging.WARNING):
        report_unused_handlers(given, "FSDP2")
    assert ["kwargs_handlers: DistributedDataParallelKwargs has no effect: FSDP2 trains"] == [
        line.partition(".")[2].partition(",")[0] for line in caplog.messages
    ]
    with pytest.raises(SettingError, match="DeepSpeed scales the loss itself") as caught:
        report_unused_handlers(given, "DeepSpeed")
    assert "FG723" == caught.value.code
    with pytest.raises(SettingError, match="init_method of InitProcessGroupKwargs is 'env://'"):
        accelerator_settings({"kwargs_handlers": [InitProcessGroupKwargs(init_method="env://")]})


def test_the_backend_is_that_of_the_process_group(caplog):
    told = accelerator_settings({"backend": "nccl"})
    with caplog.at_level(logging.WARNING):
        assert "nccl" == with_group_settings(DistributedEnvironment(), told, use_cpu=True).backend
    assert ["accelerator_args.backend was taken as that of the process group: nccl; on the CPU that is gloo"] == (
        caplog.messages
    )
    with pytest.raises(SettingError, match="'nccl', and the backend of distributed_env is 'gloo'"):
        with_group_settings(DistributedEnvironment(backend="gloo"), told, use_cpu=True)


def test_another_engine_of_the_launcher_stops_the_run(tmp_path):
    args = AccelTrainingArguments(output_dir=str(tmp_path))
    for variable in ("USE_FSDP", "USE_DEEPSPEED", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG"):
        with pytest.raises(DistributedError, match="and the config trains with DistributedDataParallel") as caught:
            refuse_another_engine(args, {variable: "true"})
        assert caught.value.code == "FG724"
    refuse_another_engine(args, {"USE_FSDP": "false"})
    sharded = args.replace(fsdp=True)
    assert "FSDP2" == entry_of(sharded).engine
    refuse_another_engine(sharded, {"USE_FSDP": "true"})
    assert "DistributedDataParallel" == entry_of(args.replace(fsdp="NO_SHARD")).engine


def test_libraries_see_the_facts_and_no_wishes(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with exported_facts(ProcessFacts(rank=1, local_rank=1, world_size=2, local_world_size=2)):
        assert {} == accelerate_variables()
        assert ("1", "1", "2") == tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert {"MIXED_PRECISION": "bf16"} == accelerate_variables()
    assert "7" == os.environ["RANK"]
    assert "LOCAL_RANK" not in os.environ


NO_SHARD = {"fsdp": True, "fsdp_config": {"sharding_strategy": "NO_SHARD"}}
REQUESTS = [
    ("USE_DEEPSPEED", {"deepspeed": {}}, None),
    ("USE_FSDP", {"deepspeed": {}}, "FG724"),
    ("USE_FSDP", NO_SHARD, "FG724"),
    ("USE_DEEPSPEED", {"fsdp": True}, "FG724"),
    ("USE_FSDP", {"tensor_parallel_size": 2}, "FG724"),
]


@pytest.mark.parametrize(("variable", "settings", "code"), REQUESTS)
def test_the_engine_that_runs_is_the_one_that_the_launcher_is_compared_with(tmp_path, variable, settings, code):
    args = AccelTrainingArguments(output_dir=str(tmp_path), **settings)
    if code is None:
        refuse_another_engine(args, {variable: "true"})
        return
    with pytest.raises(DistributedError) as caught:
        refuse_another_engine(args, {variable: "true"})
    assert code == caught.value.code
