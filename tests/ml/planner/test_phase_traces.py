"""Generated answers and saving need the memory that their phases of a plan say."""

import functools

import pytest
from torch.profiler import record_function

import forgather.ml as ml
from forgather.ml.data import CausalLMCollator
from forgather.ml.planner.memory import plan_run
from forgather.ml.trainer.loop import loss_divisor
from tests.matrix import thinned
from tests.ml.callback_scene import letters
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import tiny_llama
from tests.ml.planner.live_bytes import profiled

LAYOUTS = {
    "one": (1, {}),
    "one, bf16": (1, {"bf16": True}),
    "one, bf16, words": (1, {"bf16": True}),
    "DDP": (2, {}),
    "FSDP2": (2, {"fsdp": "full_shard"}),
    "FSDP2 on 4, bf16": (4, {"fsdp": "full_shard", "bf16": True}),
}
NEW_TOKENS, ROWS = 48, 8


def row(length):
    return {"input_ids": [3] * length + [4, 1], "labels": [-100] * length + [4, 1]}


def make_trainer(layout, output_dir, hook=None, eval_rows=None):
    world_size, given = LAYOUTS[layout]
    kind, arguments = (
        (ml.Trainer, ml.TrainingArguments) if world_size == 1 else (ml.AccelTrainer, ml.AccelTrainingArguments)
    )
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    if "words" in layout:
        # The logits of a token are the peak.
        sizes["vocab_size"] = 4000
    tokenizer = letters()
    args = {
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": ROWS,
        "max_steps": 1,
        "eval_strategy": "epoch",
        "predict_with_generate": True,
        "generation_max_new_tokens": NEW_TOKENS,
    }
    return kind(
        model_init=functools.partial(tiny_llama, **sizes),
        args=arguments(output_dir, **args, **given),
        train_dataset=[row(8)] * 8,
        # One batch of prompts on each rank.
        eval_dataset=[row(length) for length in eval_rows or [40, *[24] * (ROWS * world_size - 2), 8]],
        data_collator=CausalLMCollator(tokenizer),
        processing_class=tokenizer,
    )


def _measured(layout, output_dir, phase):
    with profiled([phase]) as found:
        trainer = make_trainer(layout, output_dir)
        strategy = trainer.strategy
        strategy.build_optimizer()
        window = next(trainer._train_batches().windows(strategy.rule))
        strategy.forward_backward(window, denom=loss_divisor(window.num_valid))
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: False, after_step=lambda: None)
        del window
        with record_function(phase):
            if phase == "generation":
                answered = trainer.answer_generator.answer(trainer.eval_dataset, after_batch=lambda: None)
            else:
                for _ in strategy.export():
                    pass
    assert phase != "generation" or NEW_TOKENS == max(len(answer.ids) for answer in answered.answers)
    return found.num_bytes


def planned(layout, output_dir, **given):
    world_size, _ = LAYOUTS[layout]
    plan, _ = plan_run(
        lambda hook: make_trainer(layout, output_dir, hook, **given), world_size=world_size, local_world_size=world_size
    )
    return plan, {phase["phase"]: phase for phase in plan["ranks"][0]["phases"]}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: layout == "one"))
def test_answers_need_what_is_planned(layout, tmp_path):
    plan, phases = planned(layout, tmp_path)
    real = run_ranks(LAYOUTS[layout][0], _measured, layout, tmp_path, "generation")
    # The rank with the longest prompt.
    assert -0.01 <= phases["generation"]["num_bytes"] / max(real) - 1 <= 0.03, (phases["generation"], real)
    rows = {row["name"]: row["num_bytes"] for row in phases["generation"]["rows"]}
    # Autocast computes keys and values in 32 bits; FSDP2 casts the model.
    element = 2 if "FSDP2" in layout and "bf16" in layout else 4
    # Keys and values of 4 heads with 16 elements in 4 blocks; the cache of a block is copied as it grows.
    cache = 2 * 4 * ROWS * (40 + NEW_TOKENS - 1) * 64 * element
    assert cache * (1 - 1 / 40) <= rows["cache of keys and values"] <= cache * 1.3
    assert not any("generated answers" in note for note in plan["notes"])


@pytest.mark.matrix
def test_longer_answers_need_more(tmp_path):
    _, long = planned("one", tmp_path)
    _, short = planned("one", tmp_path, eval_rows=[8] * 8)
    assert long["generation"]["num_bytes"] > short["generation"]["num_bytes"]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["one", "DDP", "FSDP2"])
def test_saving_needs_what_is_planned(layout, tmp_path):
    _, phases = planned(layout, tmp_path)
    for size in run_ranks(LAYOUTS[layout][0], _measured, layout, tmp_path, "saving"):
        assert -0.02 <= phases["saving"]["num_bytes"] / size - 1 <= 0.1, (phases["saving"], size)
