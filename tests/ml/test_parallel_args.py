"""What the arguments of runs in several processes take, beside those of one."""

import inspect
import pickle

import pytest

from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.trainer import argument_checks as door
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.run_start import refuse_combination
from forgather.pipeline_schedules import SCHEDULES


@pytest.mark.parametrize("arguments", [AccelTrainingArguments, PipelineTrainingArguments])
def test_they_take_what_one_process_takes(arguments):
    args = arguments("out", evaluation_strategy="steps", eval_steps=0.5, data_parallel_size=2)
    assert ("steps", 0.5, 2) == (args.eval_strategy, args.eval_steps, args.data_parallel_size)
    assert isinstance(args, TrainingArguments)
    assert args == pickle.loads(pickle.dumps(args))
    assert args.replace(max_steps=3).data_parallel_size == 2
    assert type(args) is type(args.replace(max_steps=3))
    assert {"tensor_parallel_size", "learning_rate"} <= set(inspect.signature(arguments).parameters)


def test_fp16_is_a_setting_of_accelerate_alone():
    assert AccelTrainingArguments("out", fp16=True).fp16
    with pytest.raises(SettingError, match="fp16 and bf16 are both on"):
        AccelTrainingArguments("out", fp16=True, bf16=True)
    with pytest.raises(SettingError) as caught:
        TrainingArguments("out", fp16=True)
    assert "FG811" == caught.value.code


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split_spec": "even"}, "split_spec is 'even'"),
        ({"schedule_class": "Schedule2F2B"}, "schedule_class is 'Schedule2F2B'"),
        ({"pipeline_chunks": 0}, "pipeline_chunks is 0"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(settings, words):
    with pytest.raises(SettingError, match=words) as caught:
        PipelineTrainingArguments("out", **settings)
    assert "FG813" == caught.value.code


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fsdp": "full_shard"}, [("FG825", "fsdp")]),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}, [("FG825", "fsdp_config")]),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": 2}}, [("FG734", "fsdp_config")]),
        ({"fsdp": "full_shard", "schedule_class": "ScheduleZBVZeroBubble"}, [("FG770", "fsdp")]),
        ({"fsdp": "shard_grad_op"}, []),
        ({"fsdp": True}, []),
    ],
)
def test_weights_that_are_to_be_gathered_anew_within_a_step_of_a_pipeline_are_answered(settings, told):
    rules = PipelineTrainingArguments.RULES
    settings = {"output_dir": "out", "data_parallel_size": 2, "per_device_train_batch_size": 8, **settings}
    whole = rules.complete(settings)
    assert told == [(breach.code, breach.argument) for breach in rules.broken(whole, given=settings)]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data_parallel_size": 4}, []),
        ({"data_parallel_size": 3}, ["does not divide 3 replicas"]),
        ({"tensor_parallel_size": 2}, ["only without tensor parallelism"]),
    ],
)
def test_groups_of_ranks_that_keep_weights_fit_the_ranks(settings, told):
    rules = AccelTrainingArguments.RULES
    settings = {"output_dir": "out", "fsdp": True, "fsdp_config": {"reshard_after_forward": 2}, **settings}
    broken = list(rules.broken(rules.complete(settings), given=settings))
    assert len(told) == len(broken)
    for breach, words in zip(broken, told, strict=True):
        assert "FG734" == breach.code and words in breach.message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"checkpoint_sequential": True}, "checkpoint_sequential"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": "full"}}, "fsdp_config"),
        ({"checkpoint_sequential": False, "fsdp": True, "fsdp_config": {"activation_checkpointing": "none"}}, None),
    ],
)
def test_recomputation_under_a_schedule_that_divides_backward_passes_is_warned_of(schedule, settings, argument):
    rules = PipelineTrainingArguments.RULES
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "per_device_train_batch_size": 8}
    settings = {"output_dir": "out", "pipeline_chunks": 8, "schedule_class": schedule, **sizes, **settings}
    told = [one for one in rules.broken(rules.complete(settings), given=settings) if one.code == "FG777"]
    is_expected = argument is not None and SCHEDULES[schedule].splits_backward
    assert ([(argument, "warning")] if is_expected else []) == [(one.argument, one.severity) for one in told]


def test_a_missing_attribute_names_the_class():
    with pytest.raises(AttributeError, match="PipelineTrainingArguments has no attribute 'nothing'"):
        PipelineTrainingArguments("out").nothing  # noqa: B018


def test_a_collator_that_flattens_does_not_go_with_a_pipeline():
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening()
    rules = door.rules("pipeline_trainer", "forgather.ml:PipelineTrainer")
    with pytest.raises(door.SettingError, match="flattens a batch to one row") as caught:
        refuse_combination(rules, PipelineTrainingArguments("out"), data_collator=collator)
    assert "FG770" == caught.value.code
    refuse_combination(rules, PipelineTrainingArguments("out"), data_collator=None)
    for trainer, args in ((AccelTrainer, AccelTrainingArguments("out")), (Trainer, TrainingArguments("out"))):
        refuse_combination(trainer.RULES, args, data_collator=collator)


def test_a_trainer_of_one_process_refuses_arguments_of_several():
    with pytest.raises(door.SettingError, match="'Trainer' is given the arguments of another trainer") as caught:
        Trainer(args=AccelTrainingArguments("out"))
    assert "FG775" == caught.value.code
