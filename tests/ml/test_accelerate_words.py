"""Words of Accelerate's plugins and of its config file, and of DeepSpeed next to its stage: each becomes a setting, is
said to belong to the launch, or is refused with a reason."""

import dataclasses
import importlib.util
import logging
import re
from pathlib import Path

import accelerate
import pytest
from accelerate.commands.config.config_args import ClusterConfig

from forgather.aliases import alias_of
from forgather.cli.parsing import build_parser
from forgather.errors import DistributedError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, TrainingArguments
from forgather.ml.trainer.accelerate_words import refuse_other_processes
from forgather.ml.trainer.argument_checks import SettingError
from forgather.translation import translate_inside

ASKED = (Path(accelerate.__file__).parent / "commands" / "config" / "cluster.py").read_text(encoding="utf-8")
"""The source of the dialog of `accelerate config`, which has every key that a file can have."""


def arguments(folder, **settings):
    return AccelTrainingArguments(str(folder / "out"), **settings)


def of_file(folder, text, **settings):
    file = folder / "accelerate.yaml"
    file.write_text(text)
    return arguments(folder, accelerate_config=str(file), **settings)


FSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, dynamo_use_dynamic: false}
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_multinode_launcher: standard
fsdp_config: {}
mixed_precision: no
"""


def test_a_file_of_accelerate_with_fsdp_is_read(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        args = of_file(tmp_path, FSDP)
    assert (True, True, "inductor") == (args.fsdp, args.bf16, args.torch_compile_backend)
    expected = {
        "activation_checkpointing": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "cpu_offload": True,
        "reshard_after_forward": False,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "version": 2,
    }
    assert expected == args.fsdp_config
    (launch,) = (line for line in caplog.messages if "machine_rank=0" in line)
    assert "num_machines=2" in launch
    assert "--nnodes" in launch
    assert "accelerate_config.offload_params was taken as fsdp_config.cpu_offload: true" in caplog.messages
    assert (args.fsdp_config, args.bf16) == (args.replace(seed=1).fsdp_config, args.replace(seed=1).bf16)


def test_a_file_of_accelerate_with_deepspeed_is_read(tmp_path):
    args = of_file(tmp_path, DEEPSPEED)
    assert (2, 0.5, False) == (args.gradient_accumulation_steps, args.max_grad_norm, args.bf16)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": True}
    assert {"zero_optimization": zero} == args.deepspeed
    # Accelerate reads no section of an engine that the file does not ask for.
    assert None is of_file(tmp_path, FSDP.replace("FSDP\n", "MULTI_GPU\n", 1)).fsdp
    assert "auto" == of_file(tmp_path, "distributed_type: DEEPSPEED\n").deepspeed


@pytest.mark.parametrize(
    ("text", "settings", "message", "hint"),
    [
        ("mixed_precision: fp8", {}, "mixed_precision='fp8' of accelerate is not available", "bf16: true"),
        ("mixed_precision: bf16", {"fp16": True}, "fp16 and bf16 are both on", "keep one"),
        ("use_cpu: maybe", {}, "use_cpu is 'maybe'", "true or false"),
        ("distributed_type: MEGATRON_LM", {}, "distributed_type='MEGATRON_LM'", "Megatron-LM"),
        ("megatron_lm_config: {a: 1}", {}, "'megatron_lm_config' of accelerate is not available", "Megatron-LM"),
        ("num_proceses: 4", {}, "has no 'num_proceses'", "num_processes"),
        ("fp16: true\nfp16: true", {}, "cannot be read: a key is given twice", "accelerate config"),
        ("- 1", {}, "contains no mapping", "accelerate config"),
        ("compute_environment: AMAZON_SAGEMAKER", {}, "AMAZON_SAGEMAKER", "torchrun"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}",
            {"deepspeed": "ds.json"},
            "zero_stage is 2, and deepspeed is 'ds.json'",
            "keep one",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: nvme}",
            {},
            "offload_param_device='nvme'",
            "write cpu",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 0.5}",
            {"max_grad_norm": 0.3},
            "gradient_clipping is 0.5, and max_grad_norm is 0.3",
            "keep one",
        ),
    ],
)
def test_a_word_of_a_file_that_cannot_be_followed_is_refused(tmp_path, text, settings, message, hint):
    with pytest.raises(SettingError, match=re.escape(message)) as caught:
        of_file(tmp_path, text, **settings)
    assert hint in caught.value.hint


def test_only_the_named_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    hidden = tmp_path / "accelerate" / "default_config.yaml"
    hidden.parent.mkdir()
    hidden.write_text("mixed_precision: bf16\n")
    assert not arguments(tmp_path).bf16
    with pytest.raises(SettingError, match="cannot be read: No such file") as caught:
        arguments(tmp_path, accelerate_config="nowhere.yaml")
    assert "FG723" == caught.value.code


def test_the_number_of_processes_of_a_file_is_that_of_the_run(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("num_processes: 4\nnum_machines: 2\n")
    refuse_other_processes(str(file), 4)
    refuse_other_processes(None, 4)
    with pytest.raises(DistributedError, match="asks for 4 processes, and the run has 1") as caught:
        refuse_other_processes(str(file), 1)
    assert "FG724" == caught.value.code
    assert "--nproc-per-node 2` --nnodes 2" in caught.value.hint


def test_every_key_that_accelerate_config_writes_has_an_answer():
    outer = [field.name for field in dataclasses.fields(ClusterConfig)]
    sections = {
        "FullyShardedDataParallelPlugin": re.findall(r'fsdp_config\["fsdp_(\w+)"\]', ASKED),
        "DeepSpeedPlugin": re.findall(r'deepspeed_config\["(\w+)"\]', ASKED),
        "TorchDynamoPlugin": re.findall(r'dynamo_config\[prefix \+ "(\w+)"\]', ASKED),
        "ParallelismConfig": re.findall(r'parallelism_config\[prefix \+ "(\w+)"\]', ASKED),
        "ClusterConfig": outer,
    }
    for owner, words in sections.items():
        assert len(words) > 3, owner
        for word in words:
            found = translate_inside(owner, {word: "a value"}, tool="accelerate")
            assert [] == [one for one in found.violations if one.code == "FG810"], (owner, word)
            assert all(one.hint for one in found.violations), (owner, word)


def test_the_arguments_of_plugins_become_settings(tmp_path):
    plugin = {"zero_stage": 2, "gradient_clipping": 0.7, "offload_optimizer_device": "cpu"}
    args = arguments(tmp_path, accelerator_args={"deepspeed_plugin": plugin})
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert ({"zero_optimization": zero}, 0.7) == (args.deepspeed, args.max_grad_norm)
    args = arguments(tmp_path, accelerator_args={"fsdp_plugin": {"sharding_strategy": 2}}, fsdp=True)
    assert (True, {"sharding_strategy": "SHARD_GRAD_OP"}) == (args.fsdp, args.fsdp_config)
    mesh = {"dp_replicate_size": 2, "dp_shard_size": 2}
    args = arguments(tmp_path, accelerator_args={"parallelism_config": mesh}, data_parallel_size=4)
    assert (True, {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}) == (args.fsdp, args.fsdp_config)
    project = {"total_limit": 2, "logging_dir": "logs", "automatic_checkpoint_naming": True}
    args = arguments(tmp_path, accelerator_args={"project_config": project})
    assert (2, "logs") == (args.save_total_limit, args.logging_dir)
    with pytest.raises(SettingError, match="'ignored_modules' of accelerate is not available") as caught:
        arguments(tmp_path, accelerator_args={"fsdp_plugin": {"ignored_modules": ["lm_head"]}})
    assert "FG723" == caught.value.code


def test_words_next_to_a_stage_are_settings_of_deepspeed(tmp_path, caplog):
    words = {
        "zero_stage": 3,
        "offload_optimizer": True,
        "offload_param": True,
        "communication_data_type": "fp32",
        "allgather_base_size": 5,
        "reduce_scatter_base_size": 6,
        "gather_16bit_weights_on_model_save": True,
    }
    with caplog.at_level(logging.WARNING):
        args = arguments(tmp_path, **words)
    zero = {
        "stage": 3,
        "offload_optimizer": True,
        "offload_param": True,
        "allgather_bucket_size": 5,
        "reduce_bucket_size": 6,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert {"zero_optimization": zero, "communication_data_type": "fp32"} == args.deepspeed
    assert len(words) == len(caplog.messages)
    assert "'zero_stage' is called 'deepspeed.zero_optimization.stage'; 3 is used for it" in caplog.messages[0]
    assert {"zero_optimization": {"stage": 2}} == arguments(tmp_path, deepspeed="auto", zero_stage=2).deepspeed


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"offload_optimizer": True}, "FG811", "a setting inside of deepspeed, and deepspeed is not set"),
        ({"zero_stage": 2, "deepspeed": "ds.json"}, "FG812", "deepspeed is the file 'ds.json'"),
        ({"zero_stage": 2, "deepspeed": {"zero_optimization": {"stage": 3}}}, "FG812", "'zero_stage' and"),
        ({"split_batches": True}, "FG723", "would split a batch"),
        ({"fsdp": "full_shard no_shard"}, "FG812", "asks for both full_shard and no_shard"),
        ({"fsdp": "full_shard auto_rap"}, "FG813", "fsdp is 'full_shard auto_rap'"),
        ({"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": False}}, "FG812", "fsdp_config.cpu_offload"),
    ],
)
def test_words_that_contradict_or_stand_alone_are_refused(tmp_path, settings, code, message):
    with pytest.raises(SettingError, match=re.escape(message)) as caught:
        arguments(tmp_path, **settings)
    assert code == caught.value.code


def test_a_switch_of_deepspeed_that_is_off_asks_for_nothing(tmp_path):
    assert None is arguments(tmp_path, offload_optimizer=False, overlap_comm=False).deepspeed


@pytest.mark.parametrize(
    ("fsdp", "expected"),
    [
        ("full_shard auto_wrap", ("full_shard", None)),
        ("shard_grad_op,offload", ("shard_grad_op", {"cpu_offload": True})),
        (["hybrid_shard_zero2", "auto_wrap"], ("hybrid_shard", {"reshard_after_forward": False})),
        ("offload", (True, {"cpu_offload": True})),
        ("FULL_SHARD", ("FULL_SHARD", None)),
        ("", (False, None)),
    ],
)
def test_the_words_of_transformers_fsdp_are_read(tmp_path, fsdp, expected):
    args = arguments(tmp_path, fsdp=fsdp)
    assert expected == (args.fsdp, args.fsdp_config)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("zero_stage", "DeepSpeed trains with trainers/accel_trainer.yaml"),
        ("offload_optimizer", "DeepSpeed trains with trainers/accel_trainer.yaml"),
        ("even_batches", "it is called 'accelerator_args.even_batches'"),
        ("strict", "trainers/accel_trainer.yaml"),
        ("accelerate_config", "trainers/accel_trainer.yaml"),
    ],
)
@pytest.mark.parametrize("kind", [TrainingArguments, PipelineTrainingArguments])
def test_another_trainer_names_the_one_that_has_the_setting(tmp_path, kind, word, hint):
    with pytest.raises(SettingError, match=f"has no setting '{word}'") as caught:
        kind(str(tmp_path), **{word: True})
    assert "FG810" == caught.value.code
    assert hint in caught.value.hint


def test_activation_checkpointing_of_deepspeed_is_a_switch(tmp_path):
    off = {"partition_activations": False, "cpu_checkpointing": False}
    assert arguments(tmp_path, activation_checkpointing={"enabled": True, **off}).gradient_checkpointing
    assert not arguments(tmp_path, activation_checkpointing={"enabled": False}).gradient_checkpointing
    for key in ("partition_activations", "cpu_checkpointing"):
        with pytest.raises(SettingError, match=f"'{key}' of activation_checkpointing is not available") as caught:
            arguments(tmp_path, activation_checkpointing={key: True})
        assert ("FG811", True) == (caught.value.code, "gradient_checkpointing: true" in caught.value.hint)


def test_every_option_of_the_deepspeed_launcher_has_an_answer():
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("deepspeed is not installed")
    source = Path(found.origin).parent / "launcher" / "runner.py"
    words = re.findall(r'add_argument\((?:"-\w",\s*)?"--(\w+)"', source.read_text(encoding="utf-8"))
    assert {"num_gpus", "hostfile", "include", "autotuning"} <= set(words)
    ours = {word.lstrip("-") for action in build_parser("train")[1]._actions for word in action.option_strings}
    # Options that mean the same in both.
    known = {word for word in words if word.replace("_", "-") in ours}
    assert [] == [word for word in words if word not in known and not alias_of("option", word)]


def test_two_words_of_a_plugin_for_one_setting_are_an_error_unless_they_agree():
    words = {"cpu_offload": True, "offload_params": False}
    found = translate_inside("FullyShardedDataParallelPlugin", words, tool="accelerate")
    assert ["FG812"] == [one.code for one in found.violations]
    agreeing = {"cpu_offload": True, "offload_params": True}
    assert [] == translate_inside("FullyShardedDataParallelPlugin", agreeing, tool="accelerate").violations
