"""A model of one layer, a tokenizer of letters and both trainers, for the tests of callbacks."""

import os
import types

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainerControl, TrainerState

from forgather.ml.models import from_config

LETTERS = "abcdefgh"


def letters():
    vocab = {"<pad>": 0, "<eos>": 1} | {letter: number + 2 for number, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="h"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def tiny_model(seed=0):
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    return from_config(config, seed=seed)


def rows(number=16):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 10, (number, 8), generator=generator)]


def arguments(folder, **changes):
    """What a callback reads of arguments."""
    facts = {"output_dir": str(folder), "logging_dir": str(folder), "process_index": 0} | changes
    return types.SimpleNamespace(**facts, to_dict=lambda: dict(facts))


def state(step=0, **changes):
    return TrainerState(**{"global_step": step, "max_steps": 10} | changes)


def control():
    return TrainerControl()


def trainer(kind, folder, callbacks, factories=None, **settings):
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
    } | settings
    parts = {"train_dataset": rows(), "eval_dataset": rows(6), "processing_class": letters(), "callbacks": callbacks}
    parts |= factories or {}
    if kind == "ours":
        from forgather.ml import Trainer, TrainingArguments

        return Trainer(tiny_model(), TrainingArguments(os.fspath(folder), **settings), **parts)
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

    args = TrainingArguments(os.fspath(folder), include_num_input_tokens_seen="all", **settings)
    if factories:
        from forgather.ml.trainer.hf import HFTrainer

        return HFTrainer(tiny_model(), args, **parts)
    made = Trainer(tiny_model(), args, **parts)
    made.remove_callback(PrinterCallback)
    made.remove_callback(ProgressCallback)
    return made
