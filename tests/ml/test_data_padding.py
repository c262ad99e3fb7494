"""Rows of different length become batches: labels survive, padding counts for nothing, and what is not known is refused."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import CausalLMCollator, DataError, PaddingCollator, tokenize_examples
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.collation import default_collate
from tests.ml.fixtures import tiny_llama
from tests.ml.packed_rows import symbols

PAD = symbols().pad_token_id


def test_the_tokenizer_of_these_tests_pads_with_its_end_of_text_token():
    assert symbols().pad_token_id == symbols().eos_token_id


def prompted(tmp_path):
    source = Dataset.from_dict({"q": ["abcdefgh", "abcde"], "a": ["xyz", "uv"]})
    return tokenize_examples(source, symbols(), 12, prompt_column="q", completion_column="a", cache_dir=tmp_path)


def test_masked_prompts_stay_masked(tmp_path):
    rows = prompted(tmp_path)
    masked = sum(label == -100 for row in rows for label in row["labels"])
    assert (13, 20) == (masked, sum(map(len, rows["labels"])))
    batch = CausalLMCollator(symbols())(list(rows))
    kept = batch["attention_mask"].bool()
    assert 13 == int((batch["labels"][kept] == -100).sum())
    assert (4 * [-100]) == batch["labels"][~kept].tolist()
    ends = [row["labels"][-1] for row in rows]
    assert [PAD, PAD] == ends == [int(row[seen][-1]) for row, seen in zip(batch["labels"], kept, strict=True)]


ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 5), st.booleans())
def test_every_row_is_found_again_and_the_rest_is_padding(ids, multiple, has_labels):
    rows = [{"input_ids": row, "token_type_ids": [1] * len(row)} for row in ids]
    if has_labels:
        rows = [{**row, "labels": [-100 if token % 2 else token for token in row["input_ids"]]} for row in rows]
    batch = CausalLMCollator(symbols(), pad_to_multiple_of=multiple)(rows)
    length = max(map(len, ids))
    assert {(len(ids), length + -length % multiple)} == {tuple(value.shape) for value in batch.values()}
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        for name, values in ({"labels": row["input_ids"]} | row).items():
            assert values == batch[name][number, :size].tolist()
        assert {PAD} >= {*batch["input_ids"][number, size:].tolist()}
        assert {-100} >= {*batch["labels"][number, size:].tolist()}
        assert [1] * size == batch["attention_mask"][number].nonzero().flatten().add(1).clamp(max=1).tolist()


@pytest.mark.parametrize("loss_fn", [None, nn.CrossEntropyLoss()])
def test_a_padded_batch_has_the_loss_of_its_rows(loss_fn):
    model = tiny_llama().eval()
    rows = [{"input_ids": list(range(3, 3 + size)), "labels": [-100, *range(4, 3 + size)]} for size in (4, 9, 6)]
    rule, collate = loss_rule(model, loss_fn), CausalLMCollator(symbols())
    alone = sum(rule.total(model, rule.prepared(collate([row]))).item() for row in rows)
    assert alone == pytest.approx(rule.total(model, rule.prepared(collate(rows))).item(), rel=1e-6)


def test_positions_stand_for_the_mask():
    rows = [{"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, {"input_ids": [8], "position_ids": [0]}]
    batch = CausalLMCollator(symbols())(rows)
    assert {"input_ids", "labels", "position_ids"} == set(batch)
    assert [[0, 1, 0], [0, 0, 0]] == batch["position_ids"].tolist()
    assert "attention_mask" in PaddingCollator(symbols())(rows)


def test_rows_for_a_classifier_keep_one_label_a_row():
    rows = [{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}]
    batch = PaddingCollator(symbols())(rows)
    assert ([1, 0], torch.int64) == (batch["labels"].tolist(), batch["labels"].dtype)
    scores = PaddingCollator(symbols())([{**row, "label": float(row["label"])} for row in rows])["labels"]
    assert ([1.0, 0.0], torch.float32) == (scores.tolist(), scores.dtype)
    several = PaddingCollator()(
        [{"input_ids": [5, 6, 7], "labels": [1.0, 0.0]}, {"input_ids": [7], "labels": [0.0, 1.0]}]
    )
    assert [[1.0, 0.0], [0.0, 1.0]] == several["labels"].tolist()


def test_labels_of_a_sequence_of_their_own_are_padded_by_their_own_length():
    batch = PaddingCollator()([{"input_ids": [5, 6, 7], "labels": [1, 2]}, {"input_ids": [7], "labels": [3]}])
    assert [[1, 2], [3, -100]] == batch["labels"].tolist()


def test_a_column_gets_the_padding_that_it_was_given():
    rows = [{"input_ids": [5, 6], "weights": [0.5, 1.0]}, {"input_ids": [7], "weights": [2.0]}]
    batch = PaddingCollator(pad_values={"weights": 0})(rows)
    assert [[0.5, 1.0], [2.0, 0.0]] == batch["weights"].tolist()


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        ("weights", [{"input_ids": [5, 6], "weights": [1, 1]}, {"input_ids": [7], "weights": [1]}]),
        ("labels", [{"input_ids": [5, 6], "labels": [0.5, 1.5]}, {"input_ids": [7], "labels": [0.5]}]),
        ("text", [{"input_ids": [5], "text": "a"}, {"input_ids": [7], "text": "b"}]),
        ("labels", [{"input_ids": [5], "labels": [5]}, {"input_ids": [7]}]),
        ("labels", [{"input_ids": [5, 6], "labels": [5]}]),
        ("labels", [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5], "labels": None}]),
        ("input_ids", [{"text": "a"}]),
    ],
)
def test_what_cannot_be_padded_is_refused_by_name(column, rows):
    with pytest.raises(DataError, match=f"'{column}'") as excinfo:
        CausalLMCollator(symbols())(rows)
    assert "FG847" == excinfo.value.code


def test_the_default_collator_pads_rows_with_labels_and_makes_none():
    collate = default_collate(symbols())
    batch = collate([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])
    assert [[-100, 6], [7, -100]] == batch["labels"].tolist()
    assert "labels" not in collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])


def test_examples_train_without_a_collator_as_with_one(tmp_path):
    losses = []
    for collator in (None, CausalLMCollator(symbols())):
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=2, save_strategy="no", per_device_train_batch_size=2
        )
        trainer = Trainer(
            tiny_llama(),
            args,
            train_dataset=prompted(tmp_path / "cache"),
            processing_class=symbols(),
            data_collator=collator,
        )
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1]
