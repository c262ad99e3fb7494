"""Each key of the settings of engines refuses a value that it does not have: none is dropped without a word."""

import pytest

from forgather.errors import TrainingError
from forgather.ml import AccelTrainingArguments
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.deepspeed_settings import ELSEWHERE, KEYS, SECTIONS
from forgather.ml.strategy.deepspeed_values import RULES, wrong_values
from forgather.rules import shipped_rules

NONSENSE = "no such value"
ACCEL = shipped_rules()["forgather.ml:AccelTrainingArguments"][0]

# Names that only others know: of folders, classes and modules (FG883), repositories, metrics, trackers, compilers.
# torch refuses a wrong determinism_check, and FG889 is about what accumulate_grad_batches says.
FREE = set(
    """deepspeed accelerate_config fsdp_config.auto_wrap_policy fsdp_config.transformer_layer_cls_to_wrap
    accelerator_args.dynamo_backend accelerator_args.log_with accelerator_args.project_dir output_dir logging_dir run_name
    accumulate_grad_batches torch_compile_backend gradient_checkpointing_kwargs.context_fn
    gradient_checkpointing_kwargs.determinism_check report_to hub_model_id hub_token hub_revision project
    metric_for_best_model resume_from_checkpoint""".split()
)
# Mappings whose keys are modules of the model, or arguments of a function or class of a library.
OPEN = {"tp_plan", "lr_scheduler_kwargs", "liger_kernel_config"} | {
    f"accelerator_args.{name}_plugin" for name in ("deepspeed", "fsdp", "torch_tp", "dynamo")
}
OPEN |= {"accelerator_args.parallelism_config", "accelerator_args.project_config"}


def keys_of(settings, outer=""):
    for name, rule in settings.items():
        yield f"{outer}{name}", rule
        yield from keys_of(rule.get("keys", {}), f"{outer}{name}.")


ALL_KEYS = [name for name, _ in keys_of(ACCEL.settings) if name not in FREE]


def nested(path, value):
    for key in reversed(path.split(".")[1:]):
        value = {key: value}
    return {path.split(".")[0]: value}


def test_every_key_of_an_engine_refuses_a_word_that_it_does_not_have():
    assert len(ALL_KEYS) > 60 and "fsdp_config.state_dict_type" in ALL_KEYS
    accepted = [name for name in ALL_KEYS if not [*ACCEL.values(nested(name, NONSENSE))]]
    assert [] == accepted
    unknown = [name for name in ALL_KEYS if not [*ACCEL.values(nested(name, {NONSENSE: 1}))]]
    assert [] == [name for name in unknown if name not in OPEN]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"state_dict_type": "nope"}, "state_dict_type is 'nope'"),
        ({"fsdp_version": 3}, "fsdp_version is 3"),
        ({"backward_prefetch": "nope"}, "backward_prefetch is 'nope'"),
        ({"mixed_precision": {"reduce_dtype": "nope"}}, "reduce_dtype is 'nope'"),
        ({"mixed_precision": "fp16"}, "mixed_precision is 'fp16' (float16 gradients underflow"),
    ],
)
def test_a_wrong_value_of_fsdp_stops_the_arguments(tmp_path, config, said):
    with pytest.raises(ValueError, match="FG813") as raised:
        AccelTrainingArguments(tmp_path, fsdp=True, fsdp_config=config)
    assert said in str(raised.value)


def test_each_key_of_deepspeed_has_a_constraint():
    assert set(KEYS) == set(RULES[""])
    assert not set(RULES[""]) & set(ELSEWHERE)
    for section in ("activation_checkpointing", "aio", "optimizer"):
        assert set(SECTIONS[section]) == set(RULES[section])


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section, rules in RULES.items() if section != "zero_optimization" for key in rules],
)
def test_each_value_that_deepspeed_would_misread_is_refused(tmp_path, section, key):
    # A text is a type of optimizer, whichever; a list is none.
    value = [NONSENSE] if (section, key) == ("optimizer", "type") else NONSENSE
    asked = {section: {key: value}} if section else {key: value}
    args = AccelTrainingArguments(tmp_path)
    with pytest.raises(TrainingError, match=f"{key} is ") as raised:
        zero_config(asked, args, processes=2, on_cpu=True)
    assert "FG741" == raised.value.code
    assert [] == [*wrong_values({section: {key: "auto"}} if section else {key: "auto"})]


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps_per_print", 1e5), ("steps_per_print", float("inf")), ("communication_data_type", "BF16")],
)
def test_values_that_deepspeed_reads_as_they_are_meant_are_accepted(key, value):
    assert [] == [*wrong_values({key: value})]


def test_all_wrong_values_of_deepspeed_are_reported_together(tmp_path):
    asked = {"dump_state": "no", "gradient_clipping": "small", "steps_per_print": 0}
    with pytest.raises(TrainingError) as raised:
        zero_config(asked, AccelTrainingArguments(tmp_path), processes=2, on_cpu=True)
    said = [raised.value.message, *(one.message for one in raised.value.others)]
    assert ["dump_state is 'no'", "steps_per_print is 0", "gradient_clipping is 'small'"] == said


def test_deepspeed_itself_refuses_wrong_values_of_its_other_sections():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    own = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for section, kind in own.items():
        for key in set(SECTIONS[section]) & kind.model_fields.keys():
            with pytest.raises((ValueError, TypeError)):
                kind(**{key: NONSENSE})
