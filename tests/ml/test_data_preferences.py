"""Rows of preferences: tokens of prompts and answers, one entry per row in a batch, and errors that name a row."""

import pytest
import torch
from datasets import Dataset, DatasetDict

from forgather.errors import TrainingError
from forgather.ml.data import PreferenceCollator, tokenize_feedback, tokenize_preferences, train_bpe

PAIRS = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "five"},
    {"prompt": "3 + 4 = ", "chosen": "7", "rejected": "8, or so"},
    {"prompt": "why", "chosen": "a text", "rejected": "none"},
]
JUDGED = [
    {"prompt": "2 + 2 = ", "completion": "4", "label": True},
    {"prompt": "3 + 4 = ", "completion": "8", "label": False},
    {"prompt": "1 + 1 = ", "completion": "two", "label": True},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(Dataset.from_list([{"text": row["prompt"] + row["rejected"]} for row in PAIRS]), vocab_size=280)


def decoded(tokenizer, row, names):
    return {name: tokenizer.decode(row[name]) for name in names}


def test_prompts_and_answers_are_tokenized_apart(tokenizer, tmp_path):
    found = tokenize_preferences(Dataset.from_list(PAIRS), tokenizer, cache_dir=tmp_path)
    end = tokenizer.eos_token
    for row, text in zip(found, PAIRS, strict=True):
        assert decoded(tokenizer, row, row) == {
            "prompt_ids": text["prompt"],
            "chosen_ids": text["chosen"] + end,
            "rejected_ids": text["rejected"] + end,
        }


def test_a_judged_answer_comes_with_that_of_the_next_row(tokenizer, tmp_path):
    parts = DatasetDict({"train": Dataset.from_list(JUDGED), "eval": Dataset.from_list(JUDGED[:1])})
    found = tokenize_feedback(parts, tokenizer, cache_dir=tmp_path)
    rows = list(found["train"])
    assert [row["label"] for row in rows] == [1, 0, 1]
    assert [row["kl_ids"] for row in rows] == [rows[place]["completion_ids"] for place in (1, 2, 0)]
    assert found["eval"][0]["kl_ids"] == found["eval"][0]["completion_ids"]


def test_the_answer_of_the_next_row_is_cut_to_the_room_of_its_new_prompt(tokenizer, tmp_path):
    rows = [{**JUDGED[0], "prompt": "abcdefgh"}, {**JUDGED[1], "prompt": "?", "completion": "vwxyz"}]
    found = list(tokenize_feedback(Dataset.from_list(rows), tokenizer, 10, cache_dir=tmp_path))
    assert [tokenizer.decode(row["kl_ids"]) for row in found] == ["vw", "4" + tokenizer.eos_token]
    assert max(len(row["prompt_ids"]) + len(row["kl_ids"]) for row in found) <= 10


def test_an_answer_gets_one_end_of_text_token(tokenizer, tmp_path):
    end = tokenizer.eos_token
    rows = [{**PAIRS[0], "chosen": "4" + end}]
    found = tokenize_preferences(Dataset.from_list(rows), tokenizer, cache_dir=tmp_path)[0]
    assert decoded(tokenizer, found, ["chosen_ids", "rejected_ids"]) == {
        "chosen_ids": "4" + end,
        "rejected_ids": "five" + end,
    }


@pytest.mark.parametrize("num_proc", [None, 2])
def test_margins_are_kept_with_their_rows(tokenizer, tmp_path, num_proc):
    rows = [{**row, "margin": 0.1 + place} for place, row in enumerate(PAIRS)]
    # The prompt fills the second row, which is left out.
    rows[1]["prompt"] = "abcdefghijklmnopqrstuvwxyz" * 4
    parts = [Dataset.from_list(rows), Dataset.from_list(PAIRS)]
    found, without = (
        tokenize_preferences(part, tokenizer, 40, num_proc=num_proc, cache_dir=tmp_path) for part in parts
    )
    assert found["margin"][:] == [0.1, 2.1]
    assert "margin" not in without.column_names
    batch = PreferenceCollator(tokenizer)(list(found))
    assert batch["margin"].tolist() == pytest.approx([0.1, 2.1])


@pytest.mark.parametrize("margin", [None, float("inf")])
def test_a_margin_is_a_number(tokenizer, tmp_path, margin):
    rows = [{**PAIRS[0], "margin": 1.0}, {**PAIRS[1], "margin": margin}]
    with pytest.raises(TrainingError, match="row 1 of the data set has .* in 'margin', which is not a number") as error:
        tokenize_preferences(Dataset.from_list(rows), tokenizer, cache_dir=tmp_path)
    assert error.value.code == "FG913"


def test_long_answers_are_cut_and_rows_without_a_difference_left_out(tokenizer, tmp_path, caplog):
    rows = [
        {"prompt": "ab", "chosen": "cdefgh", "rejected": "cdefxy"},
        {"prompt": "ab", "chosen": "x", "rejected": "cdefxy"},
        {"prompt": "abcdefgh", "chosen": "x", "rejected": "y"},
        {"prompt": "", "chosen": "x", "rejected": "y"},  # nothing would predict the first token of an answer
    ]
    found = tokenize_preferences(Dataset.from_list(rows), tokenizer, 6, cache_dir=tmp_path)
    assert [decoded(tokenizer, row, ["chosen_ids", "rejected_ids"]) for row in found] == [
        {"chosen_ids": "x" + tokenizer.eos_token, "rejected_ids": "cdef"}
    ]
    assert "1 row of preferences; 1 cut to 6 tokens, 3 left out" in caplog.text


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"rejected": None}, "FG910", "row 1 of the data set has no text in 'rejected'"),
        ({"chosen": "  "}, "FG911", "row 1 of the data set has an empty answer in 'chosen'"),
        ({"chosen": "x", "rejected": "x"}, "FG912", "row 1 of the data set has equal texts in 'chosen' and 'rejected'"),
    ],
)
def test_a_row_that_is_no_pair_is_named(tokenizer, tmp_path, change, code, message):
    rows = [PAIRS[0], {**PAIRS[1], **change}, PAIRS[2]]
    with pytest.raises(TrainingError, match=message) as error:
        tokenize_preferences(Dataset.from_list(rows), tokenizer, cache_dir=tmp_path)
    assert error.value.code == code


def test_messages_are_not_text(tokenizer, tmp_path):
    rows = [{**row, "chosen": [{"role": "assistant", "content": "4"}]} for row in PAIRS]
    with pytest.raises(TrainingError, match="row 0 of the data set has a list, not text, in 'chosen'") as error:
        tokenize_preferences(Dataset.from_list(rows), tokenizer, cache_dir=tmp_path)
    assert (error.value.code, "datasets/preferences.yaml" in error.value.hint) == ("FG910", True)


@pytest.mark.parametrize("label", ["good", 2, 0.5])
def test_a_judgment_is_true_or_false(tokenizer, tmp_path, label):
    rows = [{**JUDGED[0], "label": label}]
    with pytest.raises(TrainingError, match="in 'label', which is not a judgment") as error:
        tokenize_feedback(Dataset.from_list(rows), tokenizer, cache_dir=tmp_path)
    assert error.value.code == "FG913"


def test_a_missing_column_is_named(tokenizer, tmp_path):
    rows = Dataset.from_list(PAIRS).remove_columns("rejected")
    with pytest.raises(TrainingError, match="no column 'rejected'") as error:
        tokenize_preferences(rows, tokenizer, cache_dir=tmp_path)
    assert error.value.code == "FG831"


def test_a_batch_has_one_entry_per_pair():
    rows = [
        {"prompt_ids": [5, 6], "chosen_ids": [7, 2], "rejected_ids": [8, 9, 2], "margin": 0.5},
        {"prompt_ids": [4], "chosen_ids": [3, 2], "rejected_ids": [2], "margin": 1.0},
    ]
    batch = PreferenceCollator(pad_to_multiple_of=4)(rows)
    assert {name: tuple(item.shape) for name, item in batch.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), (2, 2, 8)),
        "labels": (2,),
        "margin": (2,),
    }
    assert batch["input_ids"][1].tolist() == [[4, 3, 2, 0, 0, 0, 0, 0], [4, 2, 0, 0, 0, 0, 0, 0]]
    assert batch["completion_mask"][0].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0]]
    assert torch.equal(batch["attention_mask"].sum(-1), torch.tensor([[4, 5], [3, 2]]))


def test_rows_of_another_kind_are_refused():
    with pytest.raises(TrainingError, match="the columns 'input_ids', which are not those of preferences") as error:
        PreferenceCollator()([{"input_ids": [1]}])
    assert error.value.code == "FG914"
