"""Answers on several ranks are those of one process, each row once, and generating them changes nothing in the training."""

import numpy as np
import pytest
import torch
from transformers import BartConfig, T5Config

from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.data import CausalLMCollator, PaddingCollator
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.models import seq2seq_from_config
from forgather.ml.trainer.argument_checks import SettingError
from tests.matrix import thinned
from tests.ml.callback_scene import letters
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.distributed.pipeline_runs import make_gpt2, make_llama
from tests.ml.fixtures import Recorder
from tests.patience import patience

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
    # The layers of T5 return a view of the position bias, which nothing changes in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
ROWS, POSITIONS, STOP = 9, 64, 1
"""With batches of two, four ranks have an uneven tail: one has one row, and two have none."""
ADAPTER = {"r": 2, "lora_alpha": 8, "modules_to_save": ["lm_head"]}
LAYOUTS = {
    "one": (1, {}, None),
    "DDP": (4, {}, None),
    "FSDP2": (4, {"fsdp": "full_shard"}, None),
    "FSDP2, LoRA": (2, {"fsdp": "full_shard"}, ADAPTER),
    "FSDP2, hybrid": (4, {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}, None),
    "FSDP2, GPT-2": (4, {"fsdp": "full_shard"}, None),
    "ZeRO-1": (2, {"deepspeed": {"zero_optimization": {"stage": 1}}}, None),
    "ZeRO-2, LoRA": (2, {"deepspeed": {"zero_optimization": {"stage": 2}}}, ADAPTER),
    "ZeRO-3": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}, None),
    "ZeRO-3, LoRA": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}, ADAPTER),
    # With an encoder, which `generate` would call without the forward pass of the whole model.
    "DDP, BART": (4, {}, None),
    "FSDP2, T5": (2, {"fsdp": "full_shard"}, None),
    "FSDP2, BART": (4, {"fsdp": "full_shard"}, None),
    "FSDP2, BART, LoRA": (2, {"fsdp": "full_shard"}, {"r": 2, "lora_alpha": 8}),
    "FSDP2, hybrid, T5": (4, {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}, None),
    "ZeRO-1, T5": (2, {"deepspeed": {"zero_optimization": {"stage": 1}}}, None),
    "ZeRO-2, T5, LoRA": (2, {"deepspeed": {"zero_optimization": {"stage": 2}}}, {"r": 2, "lora_alpha": 8}),
    "ZeRO-3, T5": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}, None),
    "ZeRO-3, BART": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}, None),
}
MODELS = ("GPT-2", "T5", "BART")


def rows():
    generator, made = torch.Generator().manual_seed(5), []
    for number in range(ROWS):
        # Some prompts leave less room than the longest answer: those rows end at another step on each rank.
        prompt = [3 + number] * (POSITIONS - 3 if number in (1, 6) else 1 + (7 * number) % 11)
        prompt = torch.randint(2, 10, (len(prompt),), generator=generator).tolist()
        answer = [2 + number % 7, STOP]
        made.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return made


def sources():
    """Rows of a source and a target of other lengths."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1 + (7 * number) % 11 for number in range(ROWS)]
    texts = [torch.randint(2, 10, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": text, "labels": [2 + number % 7, 9, STOP]} for number, text in enumerate(texts)]


def with_encoder(config, dtype):
    """Returns a model whose next token depends on the source; `letters` is its tokenizer."""
    model = seq2seq_from_config(config, tokenizer=letters(), dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    model.generation_config.eos_token_id = [STOP, 6]  # which some rows generate early, and others never
    return model


def make_model(layout, dtype):
    if "T5" in layout:
        return with_encoder(T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0), dtype)
    if "BART" in layout:
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        return with_encoder(BartConfig(d_model=16, max_position_embeddings=16, dropout=0.0, **heads, **sizes), dtype)
    return scattered(make_gpt2 if "GPT-2" in layout else make_llama, dtype)


def scattered(make, dtype):
    model = make(layers=2, dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)
    # A token that some rows generate early, and others never.
    model.generation_config.eos_token_id = [STOP, 12 if make is make_gpt2 else 13, 17, 21]
    return model


def part(folder, layout, generates=True, steps=2):
    """Trains as one of the processes; returns what `compute_metrics` got each time, the metrics, and the losses."""
    ranks, given, adapter = LAYOUTS[layout]
    has_encoder = "T5" in layout or "BART" in layout
    read = sources() if has_encoder else rows()
    got, recorder = [], Recorder()

    def compute(prediction):
        got.append((prediction.predictions, prediction.label_ids))
        return {"rows": len(prediction.predictions)}

    several = {"distributed_env": DistributedEnvironment(timeout_seconds=patience(30))} if ranks > 1 else {}
    args = (AccelTrainingArguments if ranks > 1 else TrainingArguments)(
        str(folder / f"{generates}"),
        use_cpu=True,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4 // ranks,
        per_device_eval_batch_size=2,
        predict_with_generate=generates,
        generation_max_new_tokens=7 if generates else None,
        **given,
    )
    dtype = torch.float32 if "ZeRO" in layout else torch.float64  # DeepSpeed has no other
    trainer = (AccelTrainer if ranks > 1 else Trainer)(
        lambda: make_model(layout, dtype),
        args,
        train_dataset=read,
        eval_dataset=read,
        data_collator=PaddingCollator(letters()) if has_encoder else CausalLMCollator(letters()),
        processing_class=letters(),
        compute_metrics=compute if generates else None,
        adapter=adapter,
        callbacks=[recorder],
        **several,
    )
    # Before any forward pass, so that sharded weights were not gathered by another one.
    first = [answer.ids for answer in trainer.answered(read).answers] if generates else []
    trainer.train()
    assert first == ([tuple(row[row != -100].tolist()) for row in got[0][0]] if generates else [])
    lines = trainer.state.log_history
    named = [[line.get(f"eval_{name}") for name in ("gen_len", "stopped")] for line in lines if "eval_loss" in line]
    return got, named, [line["loss"] for line in lines if "loss" in line]


def run(folder, layout, generates=True):
    if layout.startswith("ZeRO"):
        import_engine()
    return run_ranks(LAYOUTS[layout][0], part, folder, layout, generates)


@pytest.mark.parametrize(
    "layout", thinned([name for name in LAYOUTS if name != "one"], lambda name: name == "FSDP2, T5")
)
def test_answers_are_those_of_one_process_and_the_training_is_the_same(layout, tmp_path, monkeypatch):
    ranks, settings, adapter = LAYOUTS[layout]
    kind = next((f", {name}" for name in MODELS if name in layout), "")
    plain = f"one{kind}{', ZeRO' if 'deepspeed' in settings else ''}"
    monkeypatch.setitem(LAYOUTS, plain, (1, {}, adapter))
    expected, figures, losses = part(tmp_path / "one", plain)
    monkeypatch.undo()

    found = run(tmp_path, layout)
    without = run(tmp_path, layout, generates=False)

    for got, named, of_rank in found:
        assert 2 == len(got) and figures == named and 0 < named[0][1] < 1
        for (answers, labels), (wanted, wanted_labels) in zip(got, expected, strict=True):
            assert ROWS == len(wanted) and len({tuple(row) for row in wanted.tolist()}) > 4
            assert np.array_equal(answers, wanted) and np.array_equal(labels, wanted_labels)
        assert losses == pytest.approx(of_rank, rel=1e-5)
    assert [of_rank for _, _, of_rank in found] == [of_rank for _, _, of_rank in without]


@pytest.mark.parametrize(
    ("arguments", "given"), [(PipelineTrainingArguments, {}), (AccelTrainingArguments, {"tensor_parallel_size": 2})]
)
def test_a_model_that_is_cut_answers_nothing(arguments, given, tmp_path):
    with pytest.raises(SettingError, match="predict_with_generate is true, and no answers are generated") as refused:
        arguments(str(tmp_path), predict_with_generate=True, **given)
    assert "FG963" == refused.value.code
