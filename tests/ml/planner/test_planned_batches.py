"""Plans are made for the largest batches of a run: those of its longest rows, and those of its evaluation."""

import functools

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import forgather.ml as ml
from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.planned_batches import MOST_READ, planned_batches
from forgather.ml.planner.rank_trace import trace_rank
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import tiny_llama
from tests.ml.planner.cells import measured_peak

LENGTHS = [*range(8, 40), *[8] * 200, 64, *[8] * 200]
SHORT = [8] * 40
ALONE = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)


def row(length):
    return {"input_ids": [5] * length, "labels": [5] * length}


def trainer(tmp_path, rows, hook=None, model=None, **given):
    sets = {"eval_dataset": given.pop("eval_dataset", None)}
    args = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no", "use_cpu": True, **given}
    backend = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    return ml.Trainer(
        model_init=model or functools.partial(tiny_llama, num_hidden_layers=1, vocab_size=512),
        args=ml.TrainingArguments(tmp_path, **args),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        **sets,
    )


def shape_of(batches):
    return [tuple(batch["input_ids"].shape) for batch in batches]


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_all_rows_of_the_planned_window_are_as_long_as_the_longest(kind, tmp_path):
    made = trainer(tmp_path, kind([row(length) for length in LENGTHS]), gradient_accumulation_steps=3)

    found = planned_batches(made)

    assert shape_of(found.longest.batches) == [(4, 64)] * 2
    assert all(length < 64 for _, length in shape_of(found.first.batches))
    assert found.notes == ()


def test_columns_may_have_their_longest_rows_apart(tmp_path):
    rows = [
        {"input_ids": [5] * source, "labels": [5] * target} for source, target in [(8, 8), (30, 8), (8, 50), (9, 9)] * 3
    ]

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = functools.partial(T5ForConditionalGeneration, T5Config(**sizes, decoder_start_token_id=0))

    (batch,) = planned_batches(trainer(tmp_path, Dataset.from_list(rows), model=model)).longest.batches

    assert (batch["input_ids"].shape, batch["labels"].shape) == ((4, 30), (4, 50))


def test_rows_of_equal_length_are_taken_as_they_come(tmp_path):
    found = planned_batches(trainer(tmp_path, [row(8) for _ in SHORT]))

    assert found.longest is found.first


@pytest.mark.parametrize(("present", "needs"), [(3, True), (11, False), (12, None)])
def test_an_update_is_planned_for_fewer_rows_than_it_takes(present, needs, tmp_path):
    made = trainer(tmp_path, Dataset.from_list([row(8)] * present), gradient_accumulation_steps=3)

    found = planned_batches(made)

    assert shape_of(found.first.batches) == [(4, 8)] * 3
    assert [needs] == ["FG804" in note for note in found.notes] if needs is not None else not found.notes
    assert all(f"{present} rows, fewer than the 12 of an update" in note for note in found.notes)


def test_an_update_of_more_rows_than_a_plan_makes_is_refused(tmp_path):
    made = trainer(tmp_path, Dataset.from_list([row(8)] * 3), per_device_train_batch_size=2 * 10**9)
    with pytest.raises(PlanError, match="FG804.*2,000,000,000 rows, and the training data has 3 rows"):
        planned_batches(made)


def test_what_is_not_known_about_longer_rows_is_said(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([row(8) for _ in SHORT])

    many = [row(8) for _ in range(MOST_READ + 1)]

    (streamed,) = planned_batches(trainer(tmp_path, Stream())).notes
    (read,) = planned_batches(trainer(tmp_path, many)).notes
    assert streamed.startswith("the training rows are streamed")
    assert read.startswith("the plan is for the longest of the first 1,000 training rows")
    assert planned_batches(trainer(tmp_path, Dataset.from_list(many))).notes == ()


def test_the_memory_is_that_of_the_longest_rows_and_the_work_that_of_the_first(tmp_path):
    rows = [row(length) for length in LENGTHS]
    (real,) = run_ranks(1, measured_peak, functools.partial(trainer, tmp_path, [row(64) for _ in LENGTHS]))

    plan, work = plan_run(lambda hook: trainer(tmp_path, rows, hook), world_size=1, local_world_size=1)

    (rank,) = plan["ranks"]
    assert -0.02 <= rank["phases"][0]["num_bytes"] / real - 1 <= 0.03
    assert (plan["tokens_per_row"], work.tokens_per_row < 64) == (64, True)


@pytest.mark.matrix
def test_the_evaluation_is_planned_with_its_own_batch(tmp_path):
    sets = {"short": [row(8) for _ in SHORT], "long": [row(length) for length in LENGTHS]}

    def peak(eval_strategy="epoch", **given):
        given["eval_strategy"] = eval_strategy
        trace = trace_rank(lambda hook: trainer(tmp_path, [row(8) for _ in SHORT], hook, **given), ALONE)
        return max((peak.num_bytes for at, peak in trace.peaks.items() if at.phase == "evaluation"), default=0)

    few, many = (peak(eval_dataset=sets, per_device_eval_batch_size=size) for size in (2, 32))
    logits = 4 * 512 * 64
    assert many - few >= 30 * logits
    assert peak(eval_dataset=sets["short"], per_device_eval_batch_size=32) < many
    assert 0 == peak("no", eval_dataset=sets) < peak("no", eval_dataset=sets, eval_on_start=True)
