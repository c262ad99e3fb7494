"""A row that cannot be used is named by its file and line, or by its index where it has no line."""

import csv
import json

import pytest
from datasets import Dataset

from forgather.errors import ForgatherError
from forgather.ml.data import (
    as_chats,
    chats,
    image_rows,
    labelled_rows,
    preference_pairs,
    rollout_prompts,
    seq2seq_rows,
    tagged_rows,
    tokenize_chats,
    tokenize_preferences,
)
from tests.ml.chat_cases import byte_pairs

TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
# For each reader of files: a row that it reads, and one that it refuses.
READERS = [
    (chats, {"messages": TURNS}, {"messages": 3}),
    (preference_pairs, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": 1}),
    (labelled_rows, {"text": "a", "label": "x"}, {"text": None, "label": "y"}),
    (tagged_rows, {"tokens": ["a"], "tags": ["O"]}, {"tokens": "a b", "tags": ["X"]}),
    (seq2seq_rows, {"source": "a", "target": "b"}, {"source": "a", "target": ""}),
    (image_rows, {"image": "one.png", "label": "x"}, {"image": "two.png", "label": "y"}),
]


@pytest.fixture
def refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.png").touch()

    def refused(read, name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ForgatherError) as caught:
            read(name)
        return caught.value

    return refused


@pytest.mark.parametrize(("read", "sound", "bad"), READERS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_reader_names_the_line_or_the_index(refused, read, sound, bad):
    lines = f"{json.dumps(sound)}\n\n{json.dumps(bad)}\n"
    assert refused(read, "rows.jsonl", lines).message.startswith("rows.jsonl:3: ")
    assert refused(read, "rows.json", json.dumps([sound, bad])).message.startswith("row 1 of rows.json: ")
    assert refused(read, "rows.jsonl", f"{json.dumps(sound)}\n7\n").message.startswith("rows.jsonl:2")
    cut = refused(read, "rows.jsonl", f"{json.dumps(sound)}\n{json.dumps(sound)[:-3]}")
    assert ("FG834", "rows.jsonl:2 cannot be read") == (cut.code, cut.message[:27])
    assert cut.hint.startswith("the file ends inside a row")
    inside = refused(read, "rows.jsonl", f"{json.dumps(sound)[:-3]}\n{json.dumps(sound)}\n")
    assert "ends inside" not in inside.hint


@pytest.mark.parametrize(
    ("read", "columns"), [(labelled_rows, ("text", "label")), (seq2seq_rows, ("source", "target"))]
)
def test_rows_of_tables_have_lines_too(refused, tmp_path, read, columns):
    with open(tmp_path / "table.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([columns, ("a", "b"), ("", "c")])
    text = (tmp_path / "table.csv").read_text()
    assert refused(read, "rows.csv", text).message.startswith("rows.csv:3: ")
    assert refused(read, "rows.csv", text + "one\n").message.startswith("rows.csv:4 cannot be read")


def test_rows_of_data_sets_are_counted_as_they_are_indexed(tmp_path):
    def told(make):
        with pytest.raises(ForgatherError) as caught:
            make()
        return caught.value.message.partition(":")[0].partition(" has ")[0]

    place = "row 1 of the data set"
    assert place == told(lambda: as_chats(Dataset.from_dict({"question": ["a", None], "answer": ["b", "c"]})))
    assert place == told(lambda: rollout_prompts(Dataset.from_dict({"prompt": ["a", " "]})))
    pairs = Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": ["c", None]})
    assert place == told(lambda: tokenize_preferences(pairs, byte_pairs("chatml"), cache_dir=tmp_path))


def test_a_conversation_without_a_source_is_counted_over_all_batches(tmp_path):
    fitting, calls = json.dumps({"messages": TURNS}), {"type": "function", "function": {"name": "f", "arguments": {}}}
    with_tools = json.dumps({"messages": TURNS, "tools": [calls]})
    rows = Dataset.from_dict({"conversation": [fitting] * 300 + [with_tools]})
    with pytest.raises(ForgatherError, match="^.FG897. row 300 of the data set: the conversation uses tools"):
        tokenize_chats(rows, byte_pairs("chatml"), cache_dir=tmp_path)
