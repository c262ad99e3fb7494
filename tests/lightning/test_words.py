"""Every public word of Lightning is a setting, a limit or a callback of ours, is without effect with a note, or is refused
with a reason; and what is read is what Lightning itself makes of it (words.json, recorded with Lightning's version)."""

import copy
import datetime
import json
from pathlib import Path

import pytest

from forgather.aliases import alias_of
from forgather.lightning.callback_words import read_callback
from forgather.lightning.meaning import _READERS, meaning_of
from forgather.lightning.strategies import STRATEGIES
from forgather.lightning.strategy_words import deepspeed_config, meaning_of_strategy
from forgather.lightning.trainer_words import KNOWN, Given, Reading
from tests.lightning.word_cases import DEEPSPEED_OPTIONS

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "words.json").read_text(encoding="utf-8"))
WORDS = json.loads((HERE.parents[0] / "words/recorded/words.json").read_text(encoding="utf-8"))["lightning"]["words"]
# Base classes, of which no object can be made.
ABSTRACT = {"Callback", "CheckpointIO", "LayerSync", "Logger", "ParallelStrategy", "Precision", "Strategy"}


def one(words, count_devices=lambda accelerator: 1):
    found, refused = meaning_of(words, count_devices)
    assert [] == refused
    return found


def refused(words, count_devices=lambda accelerator: 1):
    return [(one.code, one.argument) for one in meaning_of(words, count_devices)[1]]


# Values of each word of the Trainer, so that each way to be answered occurs.
VALUES = {
    "accelerator": ["auto", "cpu", "gpu", "cuda", "mps", "tpu", "quantum"],
    "strategy": [*RECORDED["strategies"], "dppp", 3, Given("DDPStrategy", {}), Given("XLAStrategy", {})],
    "devices": [1, 2, "2", "auto", -1, [0, 1], [2, 3], "0,1", 0, "all"],
    "num_nodes": [1, 2, 0],
    "precision": [*RECORDED["precisions"], 16, 32, 64, "fp8"],
    "logger": [
        True,
        False,
        Given("WandbLogger", {"project": "p"}),
        Given("CSVLogger", {}),
        [Given("WandbLogger", {"id": 1})],
    ],
    "callbacks": [[], Given("LearningRateMonitor", {}), [Given("StochasticWeightAveraging", {"swa_lrs": 1})]],
    "fast_dev_run": [True, False, 3, -1],
    **dict.fromkeys(("max_epochs", "min_epochs", "max_steps", "min_steps"), [1, 3, -1, "x", -2]),
    "max_time": ["00:01:00:00", datetime.timedelta(1), {"hours": 1}, "1h", {"fortnights": 1}],
    **{f"limit_{kind}_batches": [5, 0.5, 1.5, -1, "x"] for kind in ("train", "val", "test", "predict")},
    "overfit_batches": [5, 0.5, 1.5],
    "val_check_interval": [5, 0.5, "00:00:30:00"],
    "check_val_every_n_epoch": [2, 0],
    "num_sanity_val_steps": [0, 2, -1, -2],
    "log_every_n_steps": [10, 0],
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), [True, False]),
    "accumulate_grad_batches": [4, {0: 8, 5: 4}],
    "gradient_clip_val": [0, 0.5],
    "gradient_clip_algorithm": ["norm", "value", "mean"],
    "deterministic": [True, False, "warn", "x"],
    **dict.fromkeys(("benchmark", "inference_mode", "detect_anomaly", "use_distributed_sampler"), [True, False, "x"]),
    "profiler": ["pytorch", "simple", "advanced", "x"],
    "barebones": [True, False],
    "plugins": [Given("AsyncCheckpointIO", {}), [Given("SLURMEnvironment", {})], "x"],
    "sync_batchnorm": [True, False],
    "reload_dataloaders_every_n_epochs": [0, 1],
    "default_root_dir": ["here"],
    "enable_autolog_hparams": [True, False],
    "model_registry": ["x"],
}


# Values that mean what None means, and the number of processes that there are anyway.
QUIET = [("logger", True), ("enable_progress_bar", True), ("devices", 1), ("devices", -1)]


def test_the_values_are_those_of_every_word():
    assert set(WORDS["Trainer"]) == set(VALUES) == set(RECORDED["defaults"])
    assert set(_READERS) <= set(VALUES)


@pytest.mark.parametrize("word", VALUES)
def test_every_word_of_the_trainer_is_answered(word):
    """Each value of it gives a setting, a limit, a note about it, or an error with a hint, on one process and on two."""
    alias = alias_of("setting", word, "lightning")
    assert (alias is not None and "lightning" in alias.tools and (alias.why or alias.name)) or word in KNOWN
    for value in VALUES[word]:
        for count in (1, 2):
            plain = meaning_of({}, lambda accelerator, count=count: count)[0]
            found, errors = meaning_of({word: value}, lambda accelerator, count=count: count)
            assert all(error.hint for error in errors), value
            told = [note for note in found.notes if note not in plain.notes]
            changed = [
                name
                for name in ("settings", "limits", "switches", "strategy", "callbacks", "shows_progress")
                if getattr(found, name) != getattr(plain, name)
            ]
            default = RECORDED["defaults"][word]
            quiet = value == default and type(value) is type(default)
            quiet |= value in ([], "auto", "norm", "value") or (word, value) in QUIET
            # The number of the machine's devices, and the number that None stands for.
            quiet |= count == 2 and value in ([0, 1], "2", "0,1", 2)
            quiet |= (word, value) == ("num_sanity_val_steps", 2)
            assert errors or told or changed or quiet, value


def test_a_value_that_is_refused_says_so():
    assert [("FG811", "precision")] == refused({"precision": "bf16-true"})
    assert [("FG811", "precision")] == refused({"precision": "transformer-engine"})
    assert [("FG811", "precision")] == refused({"precision": 64})
    assert [("FG813", "gradient_clip_algorithm")] == refused({"gradient_clip_algorithm": "mean"})
    assert [("FG810", "max_epoch")] == refused({"max_epoch": 3})
    assert [("FG811", "strategy")] == refused({"strategy": "ddp_spawn"})
    assert "torchrun" in meaning_of({"strategy": "ddp_notebook"})[1][0].hint
    assert [("FG811", "devices")] == refused({"devices": [2, 3]})
    assert [("FG814", "strategy")] == refused({"strategy": "single_device", "devices": 2})
    assert [("FG811", "max_epochs")] == refused({"max_epochs": -1})
    assert [("FG811", "sync_batchnorm")] == refused({"sync_batchnorm": True, "devices": 2})
    assert [] == refused({"sync_batchnorm": True, "devices": 1})
    assert [("FG813", "val_check_interval")] == refused({"val_check_interval": 0})


def test_gradients_are_clipped_by_their_norm_or_number_by_number():
    by_value = one({"gradient_clip_algorithm": "value", "gradient_clip_val": 0.5})
    assert (0.5, 0.0) == (by_value.clip_value, by_value.settings["max_grad_norm"])
    by_norm = one({"gradient_clip_algorithm": "norm", "gradient_clip_val": 0.5})
    assert (None, 0.5) == (by_norm.clip_value, by_norm.settings["max_grad_norm"])


def test_mixed_precision_is_that_of_both_spellings():
    for value in ("bf16", "bf16-mixed"):
        assert one({"precision": value}).settings["bf16"] is True
    for value in ("16", 16, "16-mixed"):
        found = one({"precision": value})
        # The single trainer has no loss scaling.
        assert (True, "ddp", "forgather.ml:AccelTrainer") == (found.settings["fp16"], found.strategy, found.trainer)
    assert not {"bf16", "fp16"} & set(one({"precision": "32-true"}).settings)


def test_defaults_are_those_of_lightning():
    found = one({})
    settings = {"max_grad_norm": 0.0, "num_train_epochs": 1000, "logging_steps": 50, "save_strategy": "epoch"}
    assert {**settings, "save_total_limit": 1, "report_to": "tensorboard"} == found.settings
    defaults, limits = RECORDED["defaults"], found.limits
    for name in ("overfit_batches", "check_val_every_n_epoch", "max_steps", "min_epochs", "min_steps", "fast_dev_run"):
        assert defaults[name] == getattr(limits, name), name
    # Lightning resolves these when they are None.
    assert (1.0, 1.0, 1.0, 1.0, 1.0, 2, 1000) == (
        limits.limit_train_batches,
        limits.limit_val_batches,
        limits.limit_test_batches,
        limits.limit_predict_batches,
        limits.val_check_interval,
        limits.num_sanity_val_steps,
        limits.max_epochs,
    )


def test_a_run_ends_at_the_first_of_its_limits():
    both = one({"max_epochs": 3, "max_steps": 100})
    assert (100, 3, 100) == (both.settings["max_steps"], both.limits.max_epochs, both.limits.max_steps)
    assert "num_train_epochs" not in both.settings
    steps = one({"max_steps": 100})
    assert (None, 100) == (steps.limits.max_epochs, steps.settings["max_steps"])
    timed = one({"max_time": "00:01:00:00"})
    assert (3600.0, None) == (timed.max_seconds, timed.limits.max_epochs)
    assert 0 == one({"max_epochs": 0}).settings["num_train_epochs"]


def test_processes_are_those_of_all_machines():
    found = one({"devices": 4, "num_nodes": 2})
    assert (8, 4, "ddp", "forgather.ml:AccelTrainingArguments") == (
        found.num_processes,
        found.processes_per_node,
        found.strategy,
        found.arguments,
    )
    assert (2, "ddp") == ((two := one({}, lambda accelerator: 2)).num_processes, two.strategy)
    assert (1, "single") == ((cpu := one({"accelerator": "cpu"}, lambda name: 1)).num_processes, cpu.strategy)
    assert (None, "single") == ((unknown := one({}, None)).num_processes, unknown.strategy)
    assert (1, "ddp") == ((alone := one({"strategy": "ddp", "devices": 1})).num_processes, alone.strategy)


def test_a_trial_run_writes_nothing():
    checkpoint = Given("ModelCheckpoint", {"monitor": "val_loss", "save_top_k": 3, "filename": "x"})
    words = {
        "fast_dev_run": 2,
        "max_epochs": 9,
        "callbacks": [checkpoint, Given("EarlyStopping", {"monitor": "val_loss"})],
    }
    found = one(words)
    assert {"max_grad_norm": 0.0, "logging_steps": 50, "save_strategy": "no", "report_to": "none", "max_steps": 2} == {
        name: value for name, value in found.settings.items() if name != "greater_is_better"
    }
    assert [] == found.callbacks
    assert (2, 2, 0, 1) == (
        found.limits.limit_train_batches,
        found.limits.limit_val_batches,
        found.limits.num_sanity_val_steps,
        found.limits.max_epochs,
    )


# options of strategies and callbacks

OPTION_VALUES = {
    "process_group_backend": "gloo",
    "timeout": datetime.timedelta(seconds=90),
    "bucket_cap_mb": 50,
    "sharding_strategy": "NO_SHARD",
    "auto_wrap_policy": {"Block"},
    "activation_checkpointing": ["Block"],
    "activation_checkpointing_policy": {"Block"},
    "mixed_precision": {"param_dtype": "bfloat16"},
    "device_mesh": (2, 4),
    "state_dict_type": "sharded",
    "stage": 3,
    "config": {"zero_optimization": {"stage": 1}},
    "nvme_path": "/local",
    "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme",
    "backward_prefetch": "BACKWARD_PRE",
    "mode": "max",
    "monitor": "loss",
    "duration": "00:01:00:00",
    "interval": "epoch",
    "logging_interval": "epoch",
    "scheduling": {0: 4},
    "filename": "x",
    "dirpath": "here",
    "train_time_interval": datetime.timedelta(minutes=5),
}


def probe(name, option):
    if option in OPTION_VALUES:
        return OPTION_VALUES[option]
    field = STRATEGIES[name].__dataclass_fields__.get(option) if name in STRATEGIES else None
    default = field.default if field is not None else None
    return not default if isinstance(default, bool) else default + 1 if isinstance(default, int | float) else 7


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_of_a_strategy_is_answered(name):
    plain = meaning_of_strategy(name, {})
    for option in {*WORDS[name], *STRATEGIES[name].__dataclass_fields__}:
        assert alias_of("inner", f"{name}.{option}", "lightning") is not None, option
        options = {option: probe(name, option)}
        if option.startswith(("offload_", "params_", "max_in_cpu", "nvme_path", "optimizer_buffer", "pin_memory")):
            options |= {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
            options |= {"offload_optimizer_device": "nvme"} if option == "nvme_path" else {}
        found = meaning_of_strategy(name, options)
        assert all(error.hint for error in found.violations), option
        assert found.violations or found.notes or found.group or found.settings != plain.settings, option


OPTIONS_OF = ("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "Timer", "GradientAccumulationScheduler")


@pytest.mark.parametrize("name", OPTIONS_OF)
def test_every_option_of_a_callback_is_answered(name):
    for option in [*WORDS.get(name, ("duration", "interval", "verbose")), "nonsense"]:
        if option != "nonsense":
            assert alias_of("inner", f"{name}.{option}", "lightning") is not None, option
        value = probe(name, option)
        options = {option: value, **({"monitor": "loss"} if name == "EarlyStopping" else {})}
        options |= {"monitor": "loss"} if option == "mode" else {}
        # What a callback does itself is tested with it; it gets the option as it is.
        found, errors = meaning_of({"callbacks": Given(name, options)}, lambda accelerator: 1)
        assert all(error.hint is not None for error in errors), option
        plain = meaning_of(
            {"callbacks": Given(name, {"monitor": "x"} if name == "EarlyStopping" else {})}, lambda a: 1
        )[0]
        told = [note for note in found.notes if note not in plain.notes]
        kept = found.callbacks and option in found.callbacks[0].options
        assert errors or told or kept or found.settings != plain.settings, option


@pytest.mark.parametrize("kind", ["callbacks", "loggers", "plugins", "strategy_classes"])
def test_every_public_class_is_answered(kind):
    for name in set(RECORDED[kind]) - ABSTRACT - {"Checkpoint", "SingleDeviceStrategy"}:
        assert alias_of("constructor", f"*:{name}", "lightning") is not None, name
    word = {"callbacks": "callbacks", "loggers": "logger", "plugins": "plugins", "strategy_classes": "strategy"}[kind]
    for name in RECORDED[kind]:
        options = {"monitor": "loss"} if name == "EarlyStopping" else {"scheduling": {0: 2}} if "Accum" in name else {}
        found, errors = meaning_of({word: Given(name, options)}, lambda accelerator: 1)
        plain = meaning_of({}, lambda accelerator: 1)[0]
        answered = found.notes != plain.notes or found.callbacks or found.settings != plain.settings
        assert answered or (errors and all(error.hint for error in errors)), name


def test_two_checkpoint_callbacks_that_differ_are_refused():
    best = Given("ModelCheckpoint", {"monitor": "val_loss"})
    assert [] == refused({"callbacks": [best, best]})
    assert ("FG812", "callbacks") in refused({"callbacks": [best, Given("ModelCheckpoint", {"save_top_k": -1})]})
    assert ("FG812", "callbacks") in refused({"callbacks": best, "enable_checkpointing": False})


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"save_strategy": "epoch", "save_total_limit": 1}),
        ({"save_top_k": -1}, {"save_strategy": "epoch"}),
        ({"save_top_k": 0}, {"save_strategy": "no"}),
        ({"save_top_k": 3}, {"save_strategy": "epoch", "save_total_limit": 3}),
        ({"every_n_train_steps": 5}, {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}),
        (
            {"train_time_interval": {"minutes": 5}, "save_top_k": -1},
            {"save_strategy": "steps", "save_steps": 2**31, "save_minutes": 5.0},
        ),
        (
            {"monitor": "val_loss", "save_top_k": 3},
            {"save_strategy": "best", "save_top_k": 3, "metric_for_best_model": "val_loss", "greater_is_better": False},
        ),
        (
            {"monitor": "acc", "mode": "max", "save_last": True},
            {"save_strategy": "epoch", "save_top_k": 1, "metric_for_best_model": "acc", "greater_is_better": True},
        ),
    ],
)
def test_checkpoints_are_kept_as_lightning_keeps_them(options, settings):
    found = one({"callbacks": Given("ModelCheckpoint", options)}).settings
    assert settings == {name: found[name] for name in found if name.startswith(("save", "metric", "greater"))}


def test_a_folder_of_checkpoints_is_output_dir():
    found = one({"default_root_dir": "logs", "callbacks": Given("ModelCheckpoint", {"dirpath": "ckpts"})}).settings
    assert ("ckpts", "logs") == (found["output_dir"], found["logging_dir"])
    assert "logs" == one({"default_root_dir": "logs"}).settings["output_dir"]


# what Lightning itself makes of its words


@pytest.mark.parametrize("options", DEEPSPEED_OPTIONS, ids=str)
def test_the_deepspeed_config_is_that_of_lightning(options):
    (theirs,) = [copy.deepcopy(config) for given, config in RECORDED["deepspeed"] if given == options]
    plain = RECORDED["deepspeed"][0][1]
    ours = deepspeed_config(options)
    for section in ("aio", "activation_checkpointing"):
        # The defaults of DeepSpeed, which Lightning writes out.
        assert theirs.pop(section) == {**plain[section], **ours.pop(section, {})}
    if not options.get("zero_optimization", True):
        assert ({"zero_optimization": {"stage": 0}}, {}) == (ours, theirs)
        return
    for name in ("offload_optimizer", "offload_param"):
        offload = theirs["zero_optimization"].get(name)
        if offload is not None and offload["device"] == "cpu":
            # Read for NVMe alone.
            del offload["nvme_path"]
    assert theirs == ours


def test_the_named_strategies_are_the_objects_with_these_options():
    named = {
        "deepspeed": {},
        "deepspeed_stage_1": {"stage": 1},
        "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
        "deepspeed_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    }
    for name, options in named.items():
        found = one({"strategy": name})
        assert ("deepspeed", {"deepspeed": deepspeed_config(options)}) == (
            found.strategy,
            {"deepspeed": found.settings["deepspeed"]},
        )
    assert {"fsdp": "full_shard", "fsdp_config": {"cpu_offload": True}} == {
        key: value for key, value in one({"strategy": "fsdp_cpu_offload"}).settings.items() if key.startswith("fsdp")
    }


@pytest.mark.parametrize("name", RECORDED["options"])
def test_what_is_read_from_an_object_of_lightning_means_what_was_given(name):
    for given, read in RECORDED["options"][name]:
        if name in STRATEGIES:
            expected, found = meaning_of_strategy(name, given), meaning_of_strategy(name, read)
            same = [(one.settings, one.group, len(one.violations)) for one in (expected, found)]
        else:
            made = [Reading({}, (), None), Reading({}, (), None)]
            kept = [read_callback(one, name, options) for one, options in zip(made, (given, read), strict=True)]
            same = [(one.settings, len(one.violations), keeps) for one, keeps in zip(made, kept, strict=True)]
        assert same[0] == same[1], given
    assert len(RECORDED["options"]["FSDPStrategy"]) == 10


def test_layers_of_a_policy_are_the_units_of_sharding():
    found = meaning_of_strategy(
        "FSDPStrategy", {"auto_wrap_policy": {"B", "A"}, "activation_checkpointing_policy": ["A", "B"]}
    )
    config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["A", "B"]}
    assert {"fsdp": "full_shard", "fsdp_config": {**config, "activation_checkpointing": True}} == found.settings
    (error,) = meaning_of_strategy(
        "FSDPStrategy", {"auto_wrap_policy": {"A"}, "activation_checkpointing_policy": {"B"}}
    ).violations
    assert ("FG811", "strategy.activation_checkpointing_policy") == (error.code, error.argument)
    assert "FG811" == meaning_of_strategy("FSDPStrategy", {"auto_wrap_policy": lambda module: True}).violations[0].code


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"filename": "a/{epoch}"}, "dirpath"),
        ({"filename": "{epoch}-{val/loss:.2f}"}, "auto_insert_metric_name=False"),
        ({"filename": "loss={val/loss:.2f}", "auto_insert_metric_name": False}, None),
    ],
)
def test_the_name_of_a_checkpoint_has_no_folders(options, hint):
    found = meaning_of({"callbacks": [Given("ModelCheckpoint", options)]}, lambda accelerator: 1)[1]
    assert ([] if hint is None else [True]) == [hint in str(error.hint) for error in found]


def test_words_without_effect_on_one_process_say_so():
    for words in ({"sync_batchnorm": True}, {"use_distributed_sampler": False}, {"inference_mode": False}):
        (word,) = words
        assert [True] == [bool(note) for note in one(words).notes if note.startswith(f"{word}=")]
    assert not one({"use_distributed_sampler": False, "devices": 2}).replaces_samplers
