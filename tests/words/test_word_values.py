"""No value of another tool's word is dropped: it changes the arguments, is noted in a line, or is refused with a way out."""

import json

import pytest

from scripts.write_words import SECTIONS, WORDS

pytest.importorskip("torch")
from forgather.errors import ForgatherError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, TrainingArguments
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.deepspeed_settings import ABSENT, value_of
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.trainer.accelerate_words import PLUGINS
from forgather.ml.trainer.argument_checks import TRANSFORMERS_DEFAULTS
from forgather.ml.trainer.parallel_arguments import accelerator_settings
from tests.matrix import thinned

KINDS = {kind.__name__: kind for kind in (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)}
BY_TYPE = {
    "flag": True,
    "whole": 3,
    "steps": 5,
    "count": 3,
    "number": 0.5,
    "text": "x",
    "path": "x",
    "word": "x",
    "texts": ["x"],
    "list": ["x"],
    "mapping": {"x": 1},
}


def other(rule, default):
    """Returns a value of the right type that is not the default."""
    if "choices" in rule:
        return next(choice for choice in rule["choices"] if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    kinds = rule.get("type", "text")
    return BY_TYPE[kinds if isinstance(kinds, str) else kinds[0]]


@pytest.fixture
def outcome(caplog, tmp_path):
    def outcome(make, *given):
        """Returns what becomes of settings: "refused", "noted", "changed" or "silent"."""
        plain = make(*(type(one)() for one in given))
        caplog.clear()
        try:
            made = make(*given)
        except ForgatherError as error:
            assert error.code and error.hint, error
            return "refused"
        if caplog.messages:
            return "noted"
        return "silent" if made == plain else "changed"

    return outcome


@pytest.mark.parametrize(
    ("kind", "word"),
    thinned(
        [(kind, word) for kind in KINDS for word in WORDS["transformers"]["words"]["TrainingArguments"]],
        # A third of the words, whatever their order.
        lambda kind, word: kind == "AccelTrainingArguments" and len(word) % 3 == 0,
    ),
)
def test_a_setting_of_transformers_is_not_dropped(kind, word, outcome, tmp_path):
    rules = KINDS[kind].RULES
    value = other(rules.settings.get(word, {}), TRANSFORMERS_DEFAULTS[word])

    def made(settings):
        fields = KINDS[kind](**{"output_dir": str(tmp_path), "logging_dir": str(tmp_path), **settings}).to_dict()
        return fields

    assert outcome(made, {word: value}) != "silent"


# The run does what these values ask for, with or without them.
ANYWAY = {
    "device_placement": True,
    "cpu": False,
    "split_batches": False,
    "dispatch_batches": False,
    "mixed_precision": "no",
    "gradient_accumulation_plugin.sync_with_dataloader": True,
    "gradient_accumulation_plugin.sync_each_batch": False,
    "dataloader_config.split_batches": False,
    "dataloader_config.dispatch_batches": False,
    "dataloader_config.use_seedable_sampler": True,
    "dataloader_config.non_blocking": True,
    "dataloader_config.use_stateful_dataloader": False,
    "step_scheduler_with_optimizer": True,
}


def keys_inside(rule, before=()):
    for key, inner in rule["keys"].items():
        if "keys" in inner:
            yield from keys_inside(inner, (*before, key))
        elif inner["type"] != "list" and key not in PLUGINS:
            choices = inner.get("choices") or ([True, False] if inner["type"] == "flag" else [other(inner, None)])
            yield from (((*before, key), choice) for choice in choices)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        pytest.param(keys, value, id=f"{'.'.join(keys)}-{value}")
        for keys, value in keys_inside(AccelTrainingArguments.RULES.settings["accelerator_args"])
    ],
)
def test_an_argument_of_accelerate_is_not_dropped(keys, value, outcome, tmp_path):
    asked = nested(keys, value)

    def made(given):
        args = AccelTrainingArguments(str(tmp_path), logging_dir=str(tmp_path), accelerator_args=given)
        fields = {name: of for name, of in args.to_dict().items() if name != "accelerator_args"}
        return fields, accelerator_settings(given)

    name = ".".join(keys)
    expected = "silent" if name in ANYWAY and ANYWAY[name] == value else {"changed", "noted", "refused"}
    found = outcome(made, asked)
    assert found == expected if isinstance(expected, str) else found in expected


OF_PLUGINS = {
    **{"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": True},
    **{"offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_save_16bit_model": True},
    **{"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False, "cpu_offload": True},
    **{"activation_checkpointing": True, "min_num_params": 100, "backend": "inductor", "mode": "max-autotune"},
    **{"use_regional_compilation": True, "total_limit": 3, "dp_shard_size": 2, "dp_replicate_size": 2, "tp_size": 2},
    **{"project_dir": "elsewhere", "logging_dir": "elsewhere"},
}
"""Values of fields of Accelerate's plugins; of others, a text."""
FIELDS = [(plugin, word) for plugin, owner in PLUGINS.items() for word in WORDS["accelerate"]["words"].get(owner, ())]


@pytest.mark.parametrize(("plugin", "word"), thinned(FIELDS, lambda plugin, word: plugin == "deepspeed_plugin"))
def test_a_field_of_a_plugin_of_accelerate_is_not_dropped(plugin, word, outcome, tmp_path):
    first = {"deepspeed_plugin": {"zero_stage": 1}, "fsdp_plugin": {"min_num_params": 5}}.get(plugin, {})

    def made(asked):
        given = {plugin: {**first, **asked}} if asked or first else {}
        args = AccelTrainingArguments(str(tmp_path), logging_dir=str(tmp_path), accelerator_args=given)
        return {name: of for name, of in args.to_dict().items() if name != "accelerator_args"}

    assert outcome(made, {word: OF_PLUGINS.get(word, "x")}) != "silent"


def nested(keys, value):
    for key in reversed(keys):
        value = {key: value}
    return value


FSDP = AccelTrainingArguments.RULES.settings["fsdp_config"]["keys"]
# FSDP2 does these anyway.
USUAL = {"backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True, "reshard_after_forward": True}
USUAL |= {"wrap_embeddings": True}
VALUES = {
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "auto_wrap_policy": "NO_WRAP",
    "mixed_precision": "autocast",
    "min_num_params": 1000,
    "shard_size": 2,
    "backward_prefetch": "BACKWARD_POST",
    "limit_all_gathers": False,
    "reshard_after_forward": False,
    "forward_prefetch": 2,
    "activation_checkpointing": "full",
    "sharding_strategy": "SHARD_GRAD_OP",
    "version": 1,
    "use_orig_params": False,
    "wrap_embeddings": False,
}


@pytest.mark.parametrize("key", FSDP)
def test_a_key_of_fsdp_config_is_not_dropped(key, outcome):
    def made(config):
        return Sharding.from_arguments(True, config)

    assert outcome(made, {key: VALUES.get(key, True)}) != "silent"
    if key in USUAL:
        assert outcome(made, {key: USUAL[key]}) == "silent"


# What DeepSpeed reads: a value for each type of its own defaults is in the record.
DEEPSPEED = [(place, key) for place, keys in WORDS["deepspeed"]["words"].items() for key in keys]
GIVEN = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "device": "cpu",
    "pin_memory": True,
}
SECTIONS_OF_CONFIG = {"fp16", "bf16", "optimizer", "activation_checkpointing", "aio", "zero_optimization"}


@pytest.mark.parametrize(
    ("place", "key"), thinned(DEEPSPEED, lambda place, key: place in ("config", "zero_optimization.offload_param"))
)
def test_a_key_of_deepspeed_reaches_its_config_or_is_refused(place, key, tmp_path):
    args = AccelTrainingArguments(str(tmp_path), logging_dir=str(tmp_path), use_cpu=True)
    keys = (key,) if place == "config" else (*place.split("."), key)
    value = GIVEN.get(key, {"enabled": True} if keys[-1] in SECTIONS_OF_CONFIG or place == "config" else 7)
    config = {"zero_optimization": {"stage": 3}}
    into = config
    for section in keys[:-1]:
        into = into.setdefault(section, {})
    into[key] = value
    if place.startswith("zero_optimization.offload"):
        into.setdefault("device", "cpu")
    before = json.dumps(config, sort_keys=True)
    try:
        found = zero_config(config, args, processes=1, on_cpu=True)
    except ForgatherError as error:
        assert error.code in ("FG741", "FG742", "FG743", "FG744")
        assert error.hint
        return
    assert before == json.dumps(config, sort_keys=True)
    reached = value_of(found.config, keys)
    # A section that is not used as a whole is noted under its own name.
    assert reached is not ABSENT or any(keys[0] in note or key in note for note in found.notes), found.notes
    if reached is not ABSENT and not isinstance(value, dict):
        assert value == reached or any(key in note for note in found.notes)


def test_a_key_that_deepspeed_does_not_read_is_refused_wherever_it_would_be_dropped(tmp_path):
    args = AccelTrainingArguments(str(tmp_path), logging_dir=str(tmp_path), use_cpu=True)
    for section in ("deepspeed", "activation_checkpointing", "aio", "optimizer"):
        assert section in SECTIONS
        keys = ("quantum",) if section == "deepspeed" else (section, "quantum")
        with pytest.raises(ForgatherError, match="DeepSpeed has no setting 'quantum'"):
            zero_config(nested(keys, 1), args, processes=1, on_cpu=True)
