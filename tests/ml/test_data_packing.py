import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, default_data_collator

from forgather.ml.data import DataError, pack, tokenize, tokenize_examples
from forgather.ml.data.cache import content_key
from forgather.ml.data.packing import document_positions
from forgather.ml.data.tokenizer import tokenizer_digest

EOS = 1


@pytest.fixture(scope="module")
def letters():
    """A tokenizer that gives each letter its own id: a is 2, b is 3, ..."""
    vocab = {"<pad>": 0, "<eos>": EOS} | {chr(ord("a") + i): i + 2 for i in range(26)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="z"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def stream_of(documents):
    return [token for document in documents for token in [*document, EOS]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(2, 99), max_size=9), max_size=4), min_size=1, max_size=5), st.integers(2, 7)
)
def test_blocks_and_tail_are_the_token_stream(batches, block_size):
    expected = stream_of(document for batch in batches for document in batch)
    packed = list(pack(batches, block_size, EOS))
    blocks = [block.tolist() for part in packed for block in part.ids_BT]
    tail = packed[-1].tail_N.tolist()
    assert expected == [token for block in blocks for token in block] + tail
    assert {len(block) for block in blocks} <= {block_size}
    assert len(tail) < block_size


def blocks_by_hand(documents, size):
    """Rows of (ids, labels, positions), token by token."""
    rows, ids, positions, labels = [], [], [], []
    for document in documents:
        for place, token in enumerate([*document, EOS]):
            at = 0 if place == 0 or not ids else positions[-1] + 1
            ids.append(token)
            positions.append(at)
            labels.append(token if at else -100)
            if len(ids) == size:
                rows.append((ids, labels, positions))
                ids, positions, labels = [], [], []
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc<", max_size=9), max_size=12), st.integers(2, 7))
def test_positions_restart_at_documents_and_blocks_and_their_first_labels_are_ignored(letters, texts, size):
    ids = [letters(text, add_special_tokens=False)["input_ids"] for text in texts]
    packed = list(pack([ids[:5], ids[5:]], size, EOS))
    found = [(one.ids_BT, one.starts_BT) for one in packed]
    found = [np.concatenate(part) for part in zip(*found, strict=True)]
    positions = document_positions(found[1])
    rows = zip(found[0].tolist(), np.where(positions == 0, -100, found[0]).tolist(), positions.tolist(), strict=True)
    assert blocks_by_hand(ids, size) == list(rows)


def test_tokenize_equals_a_reference_by_hand(letters, tmp_path):
    # An end-of-text token within a text ends no document.
    texts = ["abc" * (n % 9) + "<eos>ab" * (n % 2) for n in range(700)]
    expected = blocks_by_hand(letters(texts, add_special_tokens=False)["input_ids"], 16)
    rows = tokenize(Dataset.from_dict({"text": texts}), letters, 16, cache_dir=tmp_path)
    columns = [rows[name][:].tolist() for name in ("input_ids", "labels", "position_ids")]
    assert expected == list(zip(*columns, strict=True))
    assert {torch.int64} == {rows[0][name].dtype for name in rows.column_names}


def test_without_boundaries_rows_and_cache_are_what_they_were_before_there_were_any(letters, tmp_path):
    texts = ["abc" * n for n in range(700)]
    stream = stream_of([ord(c) - ord("a") + 2 for c in text] for text in texts)
    expected = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
    source = Dataset.from_dict({"text": texts})
    rows = tokenize(source, letters, 16, document_boundaries=False, cache_dir=tmp_path)
    assert ["input_ids", "labels"] == rows.column_names
    assert expected == rows["input_ids"][:].tolist() == rows["labels"][:].tolist()
    key = content_key(
        format=1, rows=source._fingerprint, text_column="text", tokenizer=tokenizer_digest(letters), block_size=16
    )
    assert key == Path(rows.cache_files[0]["filename"]).parent.name
    assert rows.cache_files != tokenize(source, letters, 16, cache_dir=tmp_path).cache_files


def test_positions_take_four_bytes_a_token_on_disk(letters, tmp_path):
    rows = tokenize(Dataset.from_dict({"text": ["abc" * 40]}), letters, 16, cache_dir=tmp_path)
    assert {pa.list_(pa.int32(), 16)} == {rows.data.schema.field(name).type for name in rows.column_names}


def test_several_processes_give_the_same_blocks(letters, tmp_path):
    rows = Dataset.from_dict({"text": ["abc" * n for n in range(40)]})
    one = tokenize(rows, letters, 16, cache_dir=tmp_path / "one")
    two = tokenize(rows, letters, 16, num_proc=2, cache_dir=tmp_path / "two")
    assert one["input_ids"][:].tolist() == two["input_ids"][:].tolist()


def test_the_tail_is_logged(letters, tmp_path, caplog):
    caplog.set_level(logging.INFO, "forgather")
    tokenize(Dataset.from_dict({"text": ["abcd", "abcd"]}), letters, 4, cache_dir=tmp_path)
    assert "2 documents, 10 tokens: 2 blocks, 2 tokens left over" in caplog.text


def test_each_part_of_a_dataset_dict_is_packed_on_its_own(letters, tmp_path):
    parts = DatasetDict({"train": Dataset.from_dict({"text": ["abc"]}), "eval": Dataset.from_dict({"text": ["bcd"]})})
    packed = tokenize(parts, letters, 4, cache_dir=tmp_path)
    assert {name: part["input_ids"][:].tolist() for name, part in packed.items()} == {
        "train": [[2, 3, 4, EOS]],
        "eval": [[3, 4, 5, EOS]],
    }


def test_the_second_time_comes_from_the_cache_and_settings_make_a_new_entry(letters, tmp_path):
    rows = Dataset.from_dict({"text": ["abcdefgh"]})
    first = tokenize(rows, letters, 4, cache_dir=tmp_path)
    again = tokenize(Dataset.from_dict({"text": ["abcdefgh"]}), letters, 4, cache_dir=tmp_path)
    assert again.cache_files == first.cache_files
    assert again._fingerprint == first._fingerprint
    assert tokenize(rows, letters, 3, cache_dir=tmp_path).cache_files != first.cache_files


def test_whatever_changes_the_rows_makes_a_new_entry(letters, tmp_path):
    """Each of these gives other rows; an entry that two of them share would give one of them those of the other."""
    texts = Dataset.from_dict({"text": ["abcdefgh", "ab"], "other": ["hgfedcba", "ba"]})
    longer = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer, eos_token="z", pad_token="<pad>")
    changes = [{}, {"block_size": 3}, {"text_column": "other"}, {"document_boundaries": False}, {"tokenizer": longer}]
    given = {"dataset": texts, "tokenizer": letters, "block_size": 4, "cache_dir": tmp_path}
    every = [*changes, {"dataset": texts.select([1, 0])}]
    found = [tokenize(**{**given, **change}) for change in every]
    assert len(every) == len({rows.cache_files[0]["filename"] for rows in found})
    assert len(every) == len({str([rows[name][:].tolist() for name in rows.column_names]) for rows in found})


def test_padding_state_of_the_tokenizer_does_not_change_the_entry(letters, tmp_path):
    rows = Dataset.from_dict({"text": ["abcdefgh"]})
    first = tokenize(rows, letters, 4, cache_dir=tmp_path)
    letters(["a", "bc"], padding="max_length", truncation=True, max_length=3)
    assert tokenize(rows, letters, 4, cache_dir=tmp_path).cache_files == first.cache_files


def test_packed_rows_go_through_the_default_collator(letters, tmp_path):
    rows = tokenize(Dataset.from_dict({"text": ["abcdefg"]}), letters, 4, cache_dir=tmp_path)
    batch = default_data_collator([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[2, 3, 4, 5], [6, 7, 8, EOS]]
    assert batch["labels"].tolist() == [[-100, 3, 4, 5], [-100, 7, 8, EOS]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("FG831", {"text_column": "body"}),
        ("FG836", {"block_size": 64}),
        ("FG839", {"block_size": 1}),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(letters, tmp_path, code, change):
    with pytest.raises(ValueError) as excinfo:
        tokenize(Dataset.from_dict({"text": ["abc"]}), letters, **{"block_size": 4, "cache_dir": tmp_path} | change)
    assert excinfo.value.code == code
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_column_of_examples_that_is_missing_is_told_by_the_argument_to_mend(letters, tmp_path):
    rows = Dataset.from_dict({"prompt": ["abc"], "completion": ["abcabc"]})
    with pytest.raises(DataError, match="FG831.*'body' .give prompt_column one of the columns: prompt, completion"):
        tokenize_examples(rows, letters, 8, prompt_column="body", completion_column="completion", cache_dir=tmp_path)


def test_the_answers_of_examples_are_not_packed_without_a_word(letters, tmp_path, caplog):
    rows = Dataset.from_dict({"prompt": ["abc"], "completion": ["abcabc"]})
    tokenize(rows, letters, 4, "completion", cache_dir=tmp_path)
    tokenize_examples(rows, letters, 8, prompt_column="prompt", completion_column="completion", cache_dir=tmp_path)
    assert 1 == sum("'completion' alone is read, without 'prompt'" in line for line in caplog.messages)


def test_a_tokenizer_without_end_of_text_is_refused(letters, tmp_path):
    bare = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer)
    with pytest.raises(DataError) as excinfo:
        tokenize(Dataset.from_dict({"text": ["abc"]}), bare, 2, cache_dir=tmp_path)
    assert excinfo.value.code == "FG837"


def test_examples_carry_loss_on_the_completion_only(letters, tmp_path, caplog):
    rows = Dataset.from_dict({"q": ["ab", "a", "abcdef"], "a": ["cd", "bcdefg", "x"]})
    done = tokenize_examples(rows, letters, 5, prompt_column="q", completion_column="a", cache_dir=tmp_path)
    assert done["input_ids"][:] == [[2, 3, 4, 5, EOS], [2, 3, 4, 5, 6]]
    assert done["labels"][:] == [[-100, -100, 4, 5, EOS], [-100, 3, 4, 5, 6]]
    assert "2 examples; 1 cut to 5 tokens, 1 left out" in caplog.text


def test_examples_of_different_lengths_go_through_the_padding_collator(letters, tmp_path):
    rows = tokenize_examples(Dataset.from_dict({"text": ["abc", "a"]}), letters, cache_dir=tmp_path)
    batch = DataCollatorForSeq2Seq(letters)([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[2, 3, 4, EOS], [2, EOS, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, EOS], [2, EOS, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
