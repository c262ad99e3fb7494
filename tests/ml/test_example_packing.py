"""Packing of whole examples: every example once and whole, rows nearly full, and what cannot be packed is refused."""

import logging
import operator

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import DataError, pack_examples, tokenize_chats, tokenize_examples
from forgather.ml.data.example_packing import best_fit
from tests.ml.chat_cases import CONVERSATIONS
from tests.ml.packed_rows import symbols
from tests.ml.test_chat_tokens import byte_pairs, conversations


def rows_by_hand(lengths, size):
    """Best-fit decreasing, by a look at every row for every example."""
    rows = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        fitting = [row for row in rows if sum(lengths[one] for one in row) + lengths[number] <= size]
        if fitting:
            max(fitting, key=lambda row: sum(lengths[one] for one in row)).append(number)
        else:
            rows.append([number])
    return rows


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=30), st.integers(12, 20))
def test_every_example_is_placed_once_where_it_fits_best(lengths, size):
    packed = best_fit(lengths, size)
    assert list(range(len(lengths))) == sorted(number for row in packed for number in row)
    assert all(sum(lengths[number] for number in row) <= size for row in packed)
    assert packed == best_fit(lengths, size) == sorted(map(sorted, packed))
    # Which of several rows with equal room is taken does not change how full the rows are.
    by_hand = rows_by_hand(lengths, size)
    filled = [sorted(sum(lengths[number] for number in row) for row in rows) for rows in (packed, by_hand)]
    assert filled[0] == filled[1]


def test_rows_of_chats_are_nearly_full():
    """5,000 lengths as those of chat data: a median of 350 tokens, a long tail, cut to 2,048."""
    drawn = np.random.default_rng(0).normal(np.log(350), 0.9, 5000)
    lengths = np.clip(np.exp(drawn).astype(int), 8, 2048)
    packed = best_fit(lengths, 2048)
    assert 0.95 <= lengths.sum() / (len(packed) * 2048)
    # The negative control: filled in the order in which examples come, rows are emptier.
    rows, room = 0, 0
    for length in lengths:
        rows, room = (rows, room - length) if length <= room else (rows + 1, 2048 - length)
    assert lengths.sum() / (rows * 2048) < 0.95


def examples():
    made = []
    for number, length in enumerate([5, 2, 4, 1, 3, 6, 2, 2]):
        ids = [10 * (number + 1) + place for place in range(length)]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]] if number % 2 else list(ids)})
    return made


def separated(rows):
    """Divides packed rows where positions restart."""
    for row in rows:
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        for begin, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert list(range(end - begin)) == row["position_ids"][begin:end]
            yield {name: row[name][begin:end] for name in ("input_ids", "labels")}


@pytest.mark.parametrize("mask", [False, True])
def test_rows_hold_whole_examples_whose_first_label_is_ignored(tmp_path, caplog, mask):
    caplog.set_level(logging.INFO)
    rows = examples()
    given = [{**row, "attention_mask": [1] * len(row["labels"])} if mask else row for row in rows]
    packed = pack_examples(given, 7, cache_dir=tmp_path)
    assert ["input_ids", "labels", "position_ids"] == packed.column_names
    expected = [{"input_ids": row["input_ids"], "labels": [-100, *row["labels"][1:]]} for row in rows]
    assert expected == sorted(separated(packed), key=lambda row: row["input_ids"][0])
    assert all(len(row["input_ids"]) <= 7 for row in packed)
    assert "8 examples packed into 4 rows of at most 7 tokens, 89.3% filled" in caplog.text
    # Found in the cache, it is reported again.
    caplog.clear()
    assert packed._fingerprint == pack_examples(given, 7, cache_dir=tmp_path)._fingerprint
    assert "89.3% filled" in caplog.text


def test_each_change_is_an_entry_of_its_own(tmp_path):
    def changed(**values):
        return Dataset.from_list([{**row, **values} if number == 3 else row for number, row in enumerate(examples())])

    made = [
        pack_examples(changed(), 7, cache_dir=tmp_path),
        pack_examples(changed(), 8, cache_dir=tmp_path),
        pack_examples(changed(input_ids=[1, 2], labels=[1, -100]), 7, cache_dir=tmp_path),
        pack_examples(changed(input_ids=[1, 2], labels=[1, 2]), 7, cache_dir=tmp_path),
        pack_examples(changed().select(range(7)), 7, cache_dir=tmp_path),
    ]
    assert (
        len(made) == len({rows._fingerprint for rows in made}) == len(list((tmp_path / "packed").glob("*/rows.arrow")))
    )
    parts = pack_examples(DatasetDict(a=changed(), b=changed()), 7, cache_dir=tmp_path)
    assert made[0]._fingerprint == parts["a"]._fingerprint == parts["b"]._fingerprint


def test_conversations_and_examples_are_packed_where_they_are_tokenized(tmp_path):
    chats, tokenizer = conversations(*(case[0] for case in CONVERSATIONS.values())), byte_pairs("qwen2.5")
    alone = tokenize_chats(chats, tokenizer, 90, cache_dir=tmp_path)
    packed = tokenize_chats(chats, tokenizer, 90, packing=True, cache_dir=tmp_path)
    assert len(packed) < len(alone)
    whole = [{name: row[name] for name in ("input_ids", "labels")} for row in alone]
    by_tokens = operator.itemgetter("input_ids", "labels")
    assert sorted(whole, key=by_tokens) == sorted(separated(packed), key=by_tokens)
    assert packed[:] == tokenize_chats(chats, tokenizer, 90, packing=True, num_proc=2, cache_dir=tmp_path / "b")[:]
    texts = Dataset.from_dict({"text": ["abc", "de", "f"]})
    (row,) = tokenize_examples(texts, symbols(), 9, packing=True, cache_dir=tmp_path)
    assert [0, 1, 2, 3, 0, 1, 2, 0, 1] == row["position_ids"]


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [5]}, {"input_ids": [5, 6, 7, 8, 9]}], "row 1 has 5 tokens, and a row holds 1 to 4"),
        ([{"input_ids": IDS}, {"input_ids": []}], "row 1 has 0 tokens"),
        (
            [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS, "labels": [5]}],
            "row 1 does not have one value of 'la",
        ),
        (
            [{"input_ids": IDS, "labels": [-100, 6, 7]}, {"input_ids": IDS, "labels": [5, 0, 7]}],
            "row 1 has labels that",
        ),
        ([{"input_ids": IDS, "labels": 1}], "'labels' of row 0 is not a list"),
        ([{"input_ids": IDS, "attention_mask": [1, 1, 0]}], "an attention_mask is 0"),
        ([{"input_ids": IDS, "position_ids": [0, 1, 2]}], "they are packed already"),
        ([{"input_ids": IDS, "token_type_ids": IDS}], "the column 'token_type_ids' is not of tokens"),
        ([{"chosen_ids": IDS}], "no column 'input_ids'"),
        ([], "no column 'input_ids'"),
    ],
)
def test_what_cannot_be_packed_is_refused(rows, message, tmp_path):
    with pytest.raises(DataError, match=message) as error:
        pack_examples(rows, 4, cache_dir=tmp_path)
    assert ("FG943", "dataset") == (error.value.code, error.value.argument)


class Net(nn.Module):
    """A model that knows no positions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Embedding(99, 99)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.weight(input_ids).flatten(0, 1), labels.flatten())


def test_a_model_that_mixes_examples_is_refused_however_rows_were_selected(tmp_path):
    packed = pack_examples(examples(), 7, cache_dir=tmp_path).shuffle(seed=1).select(range(3))
    args = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", per_device_train_batch_size=1)
    with pytest.raises(TrainingError, match="does not keep them apart") as error:
        Trainer(Net(), args, train_dataset=packed).train()
    assert ("FG944", "train_dataset") == (error.value.code, error.value.argument)
