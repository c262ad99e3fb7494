"""What `TrainingArguments` takes, translates and refuses."""

import dataclasses
import inspect
import pickle

import pytest
import transformers

from forgather.launcher_env import ProcessFacts
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, TrainingArguments
from forgather.ml.callbacks.effective_settings import effective_settings
from forgather.ml.distributed.env import exported_facts
from forgather.ml.trainer.argument_checks import TRANSFORMERS_DEFAULTS, SettingError
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import rows, tiny_llama

OURS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def refused(code, **given):
    with pytest.raises(SettingError) as caught:
        TrainingArguments(**given)
    assert code == caught.value.code
    assert "\n" not in str(caught.value)
    return caught.value


def test_every_default_is_that_of_transformers():
    on_purpose = {
        "output_dir": "trainer_output",
        "gradient_checkpointing": False,
        "include_for_metrics": None,
        "dataloader_num_workers": None,
    }
    expected = {name: TRANSFORMERS_DEFAULTS[name] for name in OURS if name in TRANSFORMERS_DEFAULTS} | on_purpose
    plain = {name: getattr(value, "value", value) for name, value in expected.items()}
    assert plain == {name: value for name, value in OURS.items() if name in expected}
    own = {
        "logging_dir",
        "global_batch_size",
        "accumulate_grad_batches",
        "profile",
        "torch_compile_regions",
        "allow_missing",
        "allow_changed",
        "control",
        "bad_rows",
        "data_retries",
        "shuffle_order",
        "dataloader_device_prefetch",
        "data_streams",
        "dispatch_rows",
        "communication_share",
        "skip_initial_weights_on_resume",
        "async_save",
        "eval_full_logits",
        "predict_with_generate",
        "generation_max_new_tokens",
        "generation_max_length",
        "generation_max_samples",
        "save_minutes",
        "save_on_best",
        "save_top_k",
        "keep_every_n_steps",
        "initial_weights",
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        "parameter_groups",
        "layer_lr_decay",
        "freeze",
        "ema_decay",
        "ema_update_after_step",
        "ema_every",
        "ema_evaluate",
        "bad_step_policy",
        "spike_threshold",
        "spike_window",
        "max_bad_steps",
        "fp8",
        "fp8_exclude",
        "fp8_emulate",
        "optimizer_in_backward",
        "bf16_stochastic_round",
        "z_loss_coefficient",
        "activation_offloading",
        "activation_memory_budget",
        "linear_cross_entropy",
        "linear_cross_entropy_chunk_size",
    }
    assert own == set(OURS) - set(TRANSFORMERS_DEFAULTS)


def test_building_arguments_touches_no_device_and_starts_no_process_group(monkeypatch):
    import torch

    def forbidden(*_, **__):
        raise AssertionError("a device was asked for")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", forbidden)
    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    monkeypatch.setattr(torch.distributed, "init_process_group", forbidden)
    assert 8 == TrainingArguments("out").train_batch_size


def test_the_signature_shows_every_setting_by_name():
    parameters = inspect.signature(TrainingArguments).parameters
    assert [*OURS, "older_names"] == list(parameters)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    error = refused("FG810", learing_rate=1e-3)
    assert "TrainingArguments has no setting 'learing_rate'" == error.message
    assert "did you mean 'learning_rate'?" == error.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("deepspeed", {"stage": 2}),
        ("fsdp", "full"),
    ],
)
def test_a_setting_of_transformers_that_is_missing_here_is_refused_by_name(name, value):
    error = refused("FG811", **{name: value})
    assert f"{name!r} is a setting of transformers.Trainer that this trainer does not have" in error.message
    assert error.hint


def test_every_setting_of_transformers_is_taken_or_refused_with_a_reason():
    translated = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    translated |= {"logging_nan_inf_filter", "disable_tqdm", "log_level", "use_cache"}
    for name in set(TRANSFORMERS_DEFAULTS) - set(OURS) - translated:
        assert refused("FG811", **{name: "a value that nobody has as a default"}).hint


@pytest.mark.parametrize("name", sorted(set(TRANSFORMERS_DEFAULTS) - set(OURS)))
def test_a_setting_that_asks_for_nothing_is_taken(name):
    assert TrainingArguments(**{name: TRANSFORMERS_DEFAULTS[name]}) == TrainingArguments()


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy"),
        ("warmup_ratio", 0.1, "warmup_steps"),
        ("no_cuda", True, "use_cpu"),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size"),
    ],
)
def test_an_old_spelling_is_translated_with_one_line(old, value, new, caplog):
    assert value == getattr(TrainingArguments(**{old: value}), new)
    assert [f"TrainingArguments: {old!r} is now {new!r}; {value!r} is used for it"] == caplog.messages


def test_the_newer_name_of_gradient_checkpointing_is_taken_without_a_word(caplog):
    args = TrainingArguments(activation_checkpointing=True)
    assert (True, True, []) == (args.gradient_checkpointing, args.activation_checkpointing, caplog.messages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_safetensors", True),
        ("overwrite_output_dir", True),
        ("disable_tqdm", True),
        ("log_level", "debug"),
        ("use_cache", True),
    ],
)
def test_a_setting_without_effect_is_said(name, value, caplog):
    TrainingArguments(**{name: value})
    assert f"TrainingArguments: {name!r} has no effect" in caplog.text


def test_pickled_weights_are_refused():
    assert "safetensors" in refused("FG811", save_safetensors=False).hint


def test_one_setting_under_two_names_is_refused():
    assert "'eval_strategy' is given twice" in refused("FG812", eval_strategy="no", evaluation_strategy="no").message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"learning_rate": "1e-4"}, "a number from 0"),
        ({"learning_rate": -1.0}, "a number from 0"),
        ({"learning_rate": float("nan")}, "a number from 0"),
        ({"adam_beta1": 1.0}, "a number from 0 below 1"),
        ({"per_device_train_batch_size": 0}, "a whole number from 1"),
        ({"per_device_train_batch_size": 2.0}, "a whole number from 1"),
        ({"max_steps": 0}, "a whole number from 1"),
        ({"logging_steps": 0}, "a whole number of steps from 1, or a share"),
        ({"save_steps": 1.5}, "a whole number of steps from 1, or a share"),
        ({"bf16": "yes"}, "true or false"),
        ({"eval_strategy": "step"}, "one of: no, steps, epoch"),
        ({"eval_strategy": False}, "one of: no, steps, epoch"),
        ({"lr_scheduler_type": "cosin"}, "one of: linear, cosine"),
        ({"lr_scheduler_kwargs": [1]}, "a mapping"),
        ({"save_total_limit": 0}, "a whole number from 1"),
        ({"report_to": 3}, "the name of a tracker"),
        ({"resume_from_checkpoint": 3}, "true, false"),
        ({"output_dir": ""}, "a path"),
        ({"optim": "adam8bit"}, "one of: adamw_torch_fused"),
        ({"seed": -1}, "a whole number from 0"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(given, expected):
    error = refused("FG813", **given)
    (name,) = given
    assert error.message.startswith(f"{name} is ")
    assert expected in error.hint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end with eval_strategy 'no'"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6},
            "save_steps 6 and eval_steps 4",
        ),
        ({"num_train_epochs": 0}, "neither max_steps nor num_train_epochs"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor needs workers"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers needs workers"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "gradient_checkpointing is off"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a metric"),
        ({"save_strategy": "best"}, "save_strategy 'best' needs evaluations"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(given, message):
    error = refused("FG814", **given)
    assert message in error.message
    assert error.hint


def test_derived_values_are_those_of_transformers(tmp_path):
    given = {
        "output_dir": str(tmp_path), "eval_strategy": "steps", "logging_steps": 7, "load_best_model_at_end": True,
        "save_steps": 14, "use_cpu": True, "warmup_steps": 0.25,
    }  # fmt: skip
    ours, theirs = TrainingArguments(**given), transformers.TrainingArguments(**given)
    for name in ("eval_steps", "metric_for_best_model", "greater_is_better", "report_to", "save_steps"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.get_warmup_steps(30) == ours.get_warmup_steps(30)


def test_arguments_do_not_change_and_can_be_copied():
    args = TrainingArguments("out", max_steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.max_steps = 4
    assert (4, "out") == (args.replace(max_steps=4).max_steps, args.replace(max_steps=4).output_dir)
    assert args == pickle.loads(pickle.dumps(args))


def test_an_attribute_that_nobody_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = TrainingArguments().nonsense


def test_the_missing_number_of_a_step_is_solved_for_the_processes_and_recorded():
    accelerator = {"gradient_accumulation_steps": 2}
    with exported_facts(ProcessFacts(rank=1, local_rank=1, world_size=4, local_world_size=4)):
        args = AccelTrainingArguments("out", global_batch_size=64, per_device_train_batch_size=4)
        moved = AccelTrainingArguments("out", global_batch_size=64, accelerator_args=accelerator)
        replaced = args.replace(per_device_train_batch_size=16)
        with pytest.raises(SettingError) as caught:
            args.replace(gradient_accumulation_steps=2)
    recorded = effective_settings(args)["arguments"]
    assert (64, 4, 4) == tuple(recorded[name] for name in BATCH)
    assert (64, 8, 2) == tuple(getattr(moved, name) for name in BATCH)
    assert (64, 16, 1) == tuple(getattr(replaced, name) for name in BATCH)
    assert ("FG949", "global_batch_size") == (caught.value.code, caught.value.argument)
    assert "4 rows (per_device_train_batch_size) x 2 micro-batches" in caught.value.message
    alone = AccelTrainingArguments("out", global_batch_size=64, per_device_train_batch_size=4)
    assert 16 == alone.gradient_accumulation_steps


BATCH = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


def test_the_fixed_number_next_to_a_schedule_is_its_largest():
    args = TrainingArguments("out", accumulate_grad_batches={0: 2, 3: 6, 5: 1}, gradient_accumulation_steps=1)
    assert (6, [2, 6, 1]) == (args.gradient_accumulation_steps, [count for _, count in args.accumulation.entries])
    assert 6 == args.replace(learning_rate=1e-4).gradient_accumulation_steps
    assert "FG888" == refused("FG888", accumulate_grad_batches={0: 2}, gradient_accumulation_steps=3).code


CLASSES = (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)


@pytest.mark.parametrize("arguments", CLASSES)
def test_every_field_of_transformers_has_an_answer_in_each_trainer(arguments):
    own = {field.name for field in dataclasses.fields(arguments)}
    answers = {name: "ours" for name in TRANSFORMERS_DEFAULTS if name in own}
    for name in TRANSFORMERS_DEFAULTS.keys() - own:
        settings, found = arguments.RULES.names({name: "a value that nobody has as a default"}, TRANSFORMERS_DEFAULTS)
        # A setting under another name, or a message with what to do instead: never nothing.
        assert settings or found, name
        answers[name] = "translated" if settings else found[0].code
        assert all(one.hint and one.code in ("FG811", "FG825") for one in found), name
    assert TRANSFORMERS_DEFAULTS.keys() == answers.keys()


def test_the_trainer_of_transformers_has_all_of_its_fields(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", auto_find_batch_size=True)
    trainer = HFTrainer(tiny_llama(), args, train_dataset=rows())
    changed = {"report_to", "logging_dir", "dataloader_pin_memory"}
    for name in TRANSFORMERS_DEFAULTS.keys() - changed:
        assert getattr(trainer.args, name) == getattr(args, name), name
    trainer.train()


def test_the_gone_spelling_of_grouping_is_translated(caplog):
    args = TrainingArguments(group_by_length=True)
    assert "group_by_length" == args.train_sampling_strategy
    assert ['TrainingArguments: group_by_length=True is train_sampling_strategy: "group_by_length"'] == caplog.messages
    assert "random" == TrainingArguments(group_by_length=False).train_sampling_strategy
    error = refused("FG812", group_by_length=True, train_sampling_strategy="random")
    assert "'train_sampling_strategy' is given twice" in error.message


def test_each_sampling_strategy_of_transformers_has_an_answer():
    choices = {f.name: f for f in dataclasses.fields(transformers.TrainingArguments)}["train_sampling_strategy"]
    for value in choices.metadata["choices"]:
        if value == "batch_rebalance":
            assert "take group_by_length" in refused("FG813", train_sampling_strategy=value).hint
        else:
            assert value == TrainingArguments(train_sampling_strategy=value).train_sampling_strategy
