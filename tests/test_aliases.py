"""The table of other tools' words: every name exists, every verdict is one of few, and spelling speaks last."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import forgather.lightning
from forgather.aliases import KINDS, VERDICTS, alias_of, aliases_of, read_aliases, suggest, suggest_module
from forgather.cli.parsing import build_parser
from forgather.config.tags import TAGS
from forgather.ml.strategy.deepspeed_settings import SECTIONS, unknown_keys
from forgather.project.dynamic_args import FIELDS
from forgather.rules import shipped_rules
from forgather.signatures import Reader
from forgather.signatures.results import Callee

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "templatelib"
TABLE = read_aliases()
RECORDS = [(kind, word, record) for kind in KINDS for word, record in TABLE[kind].items()]


@pytest.fixture(scope="module")
def reader():
    return Reader(str(ROOT))


def library_words(opening):
    lines = [line for file in LIBRARY.rglob("*.yaml") for line in file.read_text().splitlines()]
    return {line.split(opening, 1)[1].split()[0].strip("[]") for line in lines if line.strip().startswith(opening)}


def blocks():
    return library_words("-- block ") | {
        line.strip("[]")
        for file in LIBRARY.rglob("*.yaml")
        for line in file.read_text().splitlines()
        if line[:1] == "["
    }


def settings():
    # The table answers words in the arguments of a trainer. Other constructors may use one of them as their own.
    rules = [one for name, known in shipped_rules().items() if name.lower().endswith("arguments") for one in known]
    return {name for one in rules for name in one.settings}


def options():
    return {
        word.lstrip("-")
        for command in ("train", "check", "ckpt")
        for action in build_parser(command)[1]._actions
        for word in action.option_strings
    }


def inner(name, rule):
    for key, nested in rule.get("keys", {}).items():
        yield f"{name}.{key}"
        yield from inner(key, nested)
        yield from inner(f"{name}.{key}", nested)


def inner_settings():
    rules = [rules for known in shipped_rules().values() for rules in known]
    found = {key for one in rules for name, rule in one.settings.items() for key in inner(name, rule)}
    found |= {f"{path.rpartition('.')[2]}.{key}" for path, keys in SECTIONS.items() for key in keys}
    # The path from the setting on, for words that a trainer takes next to `deepspeed`.
    return found | {f"deepspeed.{path}.{key}" for path, keys in SECTIONS.items() for key in keys}


EXISTING = {
    "setting": settings,
    "inner": inner_settings,
    "block": blocks,
    "template": lambda: {file.relative_to(LIBRARY).as_posix() for file in LIBRARY.rglob("*.yaml")},
    "variable": lambda: {"config_name", "config_description", "output_dir", "block_size", "nproc_per_node"},
    "meta": lambda: {"nproc_per_node", "fault_tolerance"},
    "option": options,
    "tag": lambda: set(TAGS),
    "field": lambda: set(FIELDS),
}


@pytest.mark.parametrize("kind", EXISTING)
def test_every_name_that_is_offered_exists(kind):
    offered = {record["to"].partition(":")[2] for *_, record in RECORDS if record.get("to", "").startswith(f"{kind}:")}
    assert set() == offered - EXISTING[kind]()


def test_an_inner_word_is_told_wherever_its_mapping_is_judged():
    known = shipped_rules()
    judges = [known[f"{of}TrainingArguments"][0] for of in ("forgather.ml:Accel", "transformers:")]
    for word, record in TABLE["inner"].items():
        owner, _, key = word.partition(".")
        # The arguments of a class of Accelerate are judged by their translation, and options of a class of Lightning by
        # `forgather.lightning` (tests/lightning).
        if owner[0].isupper() or owner in forgather.lightning.__all__:
            continue
        rules = next((rules for rules in judges if "keys" in rules.settings.get(owner, ())), None)
        if rules is not None:
            said = [breach.hint for breach in rules.values({owner: {key: 1}})]
        else:
            path = next(path for path in SECTIONS if path.rpartition(".")[2] == owner).replace("deepspeed", "")
            config = {key: 1}
            for outer in filter(None, reversed(path.split("."))):
                config = {outer: config}
            said = [unknown.hint for unknown in unknown_keys(config)]
        meant = record["why"] if "why" in record else repr(record["to"].rpartition(".")[2])
        assert [True] == [meant in hint for hint in said], (word, said)


def test_every_constructor_that_is_offered_exists(reader):
    offered = {
        record["to"].partition(":")[2] for kind, _, record in RECORDS if kind == "constructor" and "to" in record
    }
    for name in sorted(offered):
        if ":" not in name:
            assert importlib.util.find_spec(name), name
        elif not name.startswith("peft"):
            reader.read(name)


def test_what_a_reason_names_exists(reader):
    reasons = {record["why"] for *_, record in RECORDS if "why" in record}
    files = {name for why in reasons for name in re.findall(r"[a-z0-9_]+/[a-z0-9_]+\.yaml", why)}
    names = {name.rstrip(".") for why in reasons for name in re.findall(r"forgather(?:\.\w+)*:[\w.]+", why)}
    assert len(files) > 5
    assert set() == files - EXISTING["template"]()
    assert len(names) > 5
    for name in sorted(names):
        reader.read(name)


def test_every_group_of_keywords_has_one_that_its_constructor_takes(reader):
    for group in TABLE["keyword"]:
        callee = reader.read(group["of"])
        if isinstance(callee, Callee):
            known = {name for signature in callee.signatures for name in signature.parameters}
            assert known & set(group["names"]), group


def test_a_record_says_what_its_verdict_asks_for():
    for kind, word, record in RECORDS:
        known = {"verdict", "to", "why", "tools", "accepted", "values", "by_tool"}
        assert {"verdict", "tools"} <= set(record) <= known, word
        assert record["verdict"] == "same" or "values" in record or not record.get("accepted"), word
        assert record["verdict"] in VERDICTS, word
        assert record["tools"], word
        sort, _, name = record.get("to", "").partition(":")
        path, name = name, name.rpartition(".")[2] if sort == "inner" else name
        if record["verdict"] == "same":
            assert name, word
            assert path != word or kind in ("block", "template"), word
        elif record["verdict"] == "none":
            assert not name, word
            assert record["why"], word
        else:
            assert name in record["why"], word


def test_no_word_is_one_of_our_own_settings():
    # Of a word that only the trainers of Forgather know, a record says what another trainer takes.
    denied = {word for word, record in TABLE["setting"].items() if record["verdict"] in ("same", "none")}
    assert set() == settings() & denied - {"activation_checkpointing"}


def test_a_key_of_deepspeed_in_the_wrong_section_is_not_taken_for_another_one():
    assert ["torch.profiler" in unknown.hint for unknown in unknown_keys({"profile": True})] == [True]
    assert [] == list(unknown_keys({"activation_checkpointing": {"profile": True}}))


def test_no_old_spelling_and_nothing_deprecated_is_offered():
    renamed = {name for known in shipped_rules().values() for rules in known for name in rules.renamed}
    offered = {record["to"].partition(":")[2] for *_, record in RECORDS if "to" in record}
    assert set() == offered & renamed
    near = suggest(
        "keyword", "gradient_checkpointin", ["gradient_checkpointing"], owner="transformers:TrainingArguments"
    )
    assert None is near


WORDS = [
    ("setting", "batch_size", "per_device_train_batch_size"),
    ("setting", "gradient_clipping", "max_grad_norm"),
    ("setting", "lr", "learning_rate"),
    ("setting", "gradient_clip_val", "max_grad_norm"),
    ("setting", "epochs", "num_train_epochs"),
    ("setting", "--batch-size", "per_device_train_batch_size"),
    ("block", "callbacks", "trainer_callbacks"),
    ("tag", "object", "singleton"),
]


@pytest.mark.parametrize(("kind", "word", "name"), WORDS)
def test_a_word_of_another_tool_is_translated(kind, word, name):
    assert name == alias_of(kind, word).name


def test_a_setting_without_a_counterpart_is_explained_at_functions_of_data_alone():
    assert "take it where the rows are read" in suggest(
        "keyword", "streaming", ["paths"], owner="forgather.ml.data:chats"
    )
    assert "one of: paths" == suggest("keyword", "streaming", ["paths"], owner="own.py:chats")


def test_the_table_speaks_before_the_spelling_and_the_spelling_where_it_is_silent():
    known = ["per_gpu_eval_batch_size", "per_device_train_batch_size", "gradient_checkpointing", "max_grad_norm"]
    assert "did you mean 'per_device_train_batch_size'?" == suggest("setting", "micro_batch_size", known)
    assert "did you mean 'max_grad_norm'?" == suggest("setting", "gradient_clipping", known)
    assert "did you mean 'gradient_checkpointing'?" == suggest("setting", "gradient_checkpointin", known)


def test_a_module_of_the_package_is_found_under_a_wrong_path():
    found = suggest_module("forgather.ml.trainer.callbacks", "ProgressCallback")
    assert "did you mean 'forgather.ml.callbacks:ProgressCallback'?" == found


# Words of configs and calls of widely used tools that a newcomer brings along; each has a verdict.
LIGHTNING = """max_epochs devices accelerator strategy precision gradient_clip_val accumulate_grad_batches log_every_n_steps
    val_check_interval check_val_every_n_epoch limit_train_batches enable_checkpointing default_root_dir callbacks logger
    num_nodes sync_batchnorm deterministic benchmark profiler overfit_batches fast_dev_run num_sanity_val_steps
    detect_anomaly use_distributed_sampler enable_progress_bar enable_model_summary max_time min_epochs ckpt_path"""
DEEPSPEED = """train_batch_size train_micro_batch_size_per_gpu gradient_clipping zero_optimization steps_per_print
    wall_clock_breakdown communication_data_type offload_optimizer offload_param overlap_comm contiguous_gradients
    reduce_bucket_size partition_activations cpu_checkpointing loss_scale initial_scale_power"""
AXOLOTL = """base_model micro_batch_size num_epochs sequence_len sample_packing pad_to_sequence_len val_set_size
    datasets adapter lora_r lora_alpha lora_target_linear wandb_project flash_attention optimizer lr_scheduler
    saves_per_epoch evals_per_epoch train_on_inputs load_in_4bit warmup_ratio early_stopping_patience"""
TORCHTUNE = """batch_size epochs max_steps_per_epoch clip_grad_norm compile dtype device tokenizer dataset model loss
    checkpointer metric_logger log_every_n_steps enable_activation_checkpointing enable_activation_offloading
    max_seq_len profiler save_adapter_weights_only resume_from_checkpoint"""
TRL = """max_length packing dataset_text_field model_init_kwargs completion_only_loss assistant_only_loss eval_packing
    dataset_num_proc peft_config"""


@pytest.mark.parametrize("words", [LIGHTNING, DEEPSPEED, AXOLOTL, TORCHTUNE, TRL], ids=["PL", "DS", "AX", "TN", "TRL"])
def test_the_words_of_other_tools_are_known(words):
    known = settings() | {name for known in shipped_rules().values() for rules in known for name in rules.renamed}
    assert [] == [word for word in words.split() if not aliases_of(word) and word not in known]


def test_every_place_that_suggests_a_name_asks_the_table():
    """Names that a user types go through `suggest`, or through the table itself; only values go by spelling alone."""
    asking = [
        "rules",
        "config/lint/argument_check",
        "config/tags",
        "config/lint/file_suggestions",
        "config/override",
        "config/_jinja/template_lint",
    ]
    asking += [
        "config/_jinja/loader",
        "config/_jinja/unused_names",
        "config/lint/call_check",
        "cli/parsing",
        "project/dynamic_args",
    ]
    for name in asking:
        tree = ast.parse((ROOT / "forgather" / f"{name}.py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "forgather.aliases" in imported, name
