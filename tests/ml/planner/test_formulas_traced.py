"""The formulas for models by name, against what a trace of the same model allocates."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers

import forgather.ml as ml
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.rank_trace import trace_rank
from forgather.planner.formulas import Way, block_activations, memory
from forgather.planner.model_shapes import model_shape
from tests.matrix import thinned

ROWS, TOKENS, BLOCK = 4, 500, 1
QUICK = ("openai-community/gpt2", "bf16")
NAMES = [QUICK[0], "facebook/opt-125m", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen3-0.6B"]
PHI = {"microsoft/phi-1_5": 0.04, "microsoft/Phi-3-mini-4k-instruct": 0.2}
"""How far the formula may be off. Phi rotates parts of queries and keys, which stay in memory with the results."""
CELLS = [(name, dtype) for name in (*NAMES, *PHI) for dtype in ("bf16", "fp32")]


def make_trainer(shape, dtype, output_dir, hook):
    sizes = {name: value for name, value in shape.config.items() if name != "model_type"}
    # Without dropout: its masks have other types on a GPU.
    config = transformers.AutoConfig.for_model(
        shape.config["model_type"], **sizes, attn_pdrop=0.0, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    config.dropout = 0.0
    args = ml.TrainingArguments(
        output_dir,
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        bf16=dtype == "bf16",
        linear_cross_entropy=False,
    )
    ids = torch.arange(TOKENS)
    model = functools.partial(getattr(transformers, shape.model_class).from_config, config)
    return ml.Trainer(model_init=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * ROWS)


@pytest.mark.parametrize(("name", "dtype"), thinned(CELLS, lambda *cell: cell == QUICK))
def test_the_activations_of_a_block_are_those_of_the_trace(name, dtype, tmp_path):
    shape = model_shape(name)
    facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
    trace = trace_rank(functools.partial(make_trainer, shape, dtype, tmp_path), facts, depth=3)

    backward = next(one.born for one in trace.allocations if one.region.phase == "backward")
    kept = [
        one
        for one in trace.allocations
        if one.region == ("forward", BLOCK) and one.born < backward and (one.died is None or one.died > backward)
    ]
    # Autocast's copies of weights are in the formula for parameters.
    activations = sum(one.num_bytes for one in kept if one.shape[0] in (ROWS, ROWS * TOKENS))
    block = replace(shape.blocks[0], dropout=False)
    formula = ROWS * block_activations(block, TOKENS, wide=2 if dtype == "bf16" else 4, stream=4)
    assert formula == pytest.approx(activations, rel=PHI.get(name, 0.01))

    way = Way(tokens=TOKENS, micro_batch=ROWS, dtype=dtype)
    assert memory(shape, way).logits == trace.peaks["backward", 3].categories["logits"]


LLAMA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
SHARDED = [(name, *size) for name in (LLAMA, "Qwen/Qwen3-0.6B") for size in ((4, True), (4, False), (1, False))]


@pytest.mark.parametrize(("name", "rows", "recompute"), thinned(SHARDED, lambda *cell: False))
def test_the_peak_of_fsdp_is_close_above_that_of_the_trace(name, rows, recompute, tmp_path):
    whole = model_shape(name)
    shape = replace(whole, blocks=tuple(replace(block, count=3) for block in whole.blocks))
    config = transformers.AutoConfig.for_model(**{**shape.config, "num_hidden_layers": 3})
    ids = torch.arange(TOKENS)

    def make(hook):
        settings = {"bf16": True, "fsdp": "full_shard", "gradient_checkpointing": recompute, "save_strategy": "no"}
        args = ml.AccelTrainingArguments(tmp_path, use_cpu=True, per_device_train_batch_size=rows, **settings)
        model = functools.partial(getattr(transformers, shape.model_class).from_config, config)
        data = [{"input_ids": ids, "labels": ids}] * rows * 8
        return ml.AccelTrainer(model_init=model, args=args, train_dataset=data)

    trace = trace_rank(make, ProcessFacts(rank=0, local_rank=0, world_size=8, local_world_size=8))
    traced = max(sum(peak.categories.values()) for peak in trace.peaks.values())
    way = Way(strategy="FSDP", stage=3, gpus=8, tokens=TOKENS, micro_batch=rows, recompute=recompute)
    used = memory(shape, way)
    assert 1 < (used.peak - used.overhead) / traced < 1.2
