"""Texts with labels: what is read, how labels become numbers, and what is refused with its row."""

import json

import pytest
from transformers import LlamaConfig

from forgather.errors import ForgatherError
from forgather.ml.classifiers import classifier_from_config
from forgather.ml.data import PaddingCollator, class_names, labelled_rows, tokenize_labelled
from forgather.ml.data.tokenizer import train_bpe
from forgather.ml.data.train_eval_split import split


@pytest.fixture
def write(tmp_path):
    def make(rows, name="rows.jsonl"):
        file = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        file.write_text(text, encoding="utf-8")
        return str(file)

    return make


def rows_of(*labels):
    return [{"text": f"text {number}", "label": label, "more": 1} for number, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("task", "labels", "given", "names", "read"),
    [
        ("classification", None, ("b", "a", "b"), ["a", "b"], [1, 0, 1]),
        ("classification", None, (10, 9, 10), ["9", "10"], [1, 0, 1]),
        ("classification", ["no", "yes"], ("yes", 0, 1), ["no", "yes"], [1, 0, 1]),
        ("classification", None, (True, False, True), ["false", "true"], [1, 0, 1]),
        ("multi_label", None, (["b", "a"], [], "b"), ["a", "b"], [[1, 0], [], [1]]),
        ("regression", None, (1, 2.5, "3"), None, [1.0, 2.5, 3.0]),
        ("regression", None, ([1, 2], [3, 4]), None, [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_labels_become_numbers(task, labels, given, names, read, write):
    rows = labelled_rows(write(rows_of(*given)), task=task, labels=labels)

    assert (names, read) == (class_names(rows), list(rows["label"]))
    assert ["text", "label"] == rows.column_names


def test_a_csv_file_gives_the_rows_of_the_json_lines(write):
    lines = labelled_rows(
        write([{"body": 'a, "b"\nc', "kind": "x"}, {"body": "d", "kind": "y"}]), text_column="body", label_column="kind"
    )
    table = labelled_rows(
        write('kind,body\nx,"a, ""b""\nc"\ny,d\n', "rows.csv"), text_column="body", label_column="kind"
    )

    assert lines.to_list() == table.to_list() and lines._fingerprint == table._fingerprint


def test_a_csv_file_may_number_the_classes(write):
    rows = labelled_rows(write("text,label\na,yes\nb,0\nc,1\n", "rows.csv"), labels=["no", "yes"])

    assert [1, 0, 1] == list(rows["label"])


@pytest.mark.parametrize(
    ("options", "rows", "code", "told"),
    [
        ({"labels": ["a", "b"]}, rows_of("a", "c"), "FG876", "jsonl:2: "),
        ({"labels": ["a", "b"]}, rows_of("a", 2), "FG876", "the label 2 is none of the 2 classes"),
        ({"labels": ["1", "2"]}, rows_of("1", 0), "FG876", "the label 0 is none of the 2 classes"),
        ({"task": "multi_label", "labels": ["a", "b"]}, rows_of(["a"], ["a", "bb"]), "FG876", "jsonl:2: "),
        ({}, rows_of("a", None), "FG877", "jsonl:2: "),
        ({}, rows_of("a", 1.5), "FG877", "its label is 1.5"),
        ({}, rows_of("a", ["a"]), "FG877", "its label is ['a']"),
        ({}, rows_of("a", "a"), "FG877", "only the label 'a'"),
        ({"task": "multi_label"}, rows_of(["a"], 3), "FG877", "jsonl:2: "),
        ({"task": "regression"}, rows_of(1, "high"), "FG877", "its label is 'high', which is not a number"),
        ({"task": "regression"}, rows_of(1, [1, 2]), "FG877", "its label is 2 numbers"),
        ({}, [*rows_of("a"), {"text": " ", "label": "b"}], "FG877", "jsonl:2: "),
        ({}, [*rows_of("a"), {"text": "t"}], "FG831", "has no column 'label'"),
        ({}, '{"text": "a", "label": "b"}\n[1]\n', "FG834", "jsonl:2 cannot be read: it is not a JSON object"),
        ({}, '{"text": "a", "label"\n', "FG834", "jsonl:1 cannot be read: it is not JSON"),
        ({}, "\n", "FG832", "no rows"),
        ({}, rows_of("a", ""), "FG877", "its label is empty"),
        ({"task": "regression"}, rows_of(10**400), "FG877", "which is not a number"),
        ({"task": "topic"}, rows_of("a"), "FG878", "task is 'topic'"),
        ({}, '{"text": "\\ud800", "label": "a"}\n', "FG877", "half of a surrogate pair"),
        ({"task": "regression"}, rows_of([[1], [2]]), "FG877", "its label is [[1], [2]], which is not a number"),
        ({"labels": ["a"]}, rows_of("a"), "FG878", "two different names"),
        ({"labels": "ab"}, rows_of("a"), "FG878", "labels is 'ab'"),
        ({"task": "regression", "labels": ["a", "b"]}, rows_of(1), "FG878", "a regression has none"),
    ],
)  # fmt: skip
def test_what_is_not_a_label_is_refused_with_its_row(options, rows, code, told, write):
    with pytest.raises(ForgatherError) as caught:
        labelled_rows(write(rows), **options)
    assert code == caught.value.code and told in caught.value.message


def test_a_list_and_a_byte_order_mark_are_read(write):
    rows = rows_of("a", "b")
    lines = labelled_rows(write(rows))
    for text in (json.dumps(rows), "\ufeff" + "\n".join(map(json.dumps, rows))):
        assert labelled_rows(write(text, "rows.json")).to_list() == lines.to_list()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("text,label,text\na,b,c\n", "two columns have the name 'text'"),
        ("text,label\na\n", "csv:2 cannot be read: it does not have one value"),
        ('text,label\n"a\nb",c\n"d,e\n', "csv:4 cannot be read: in the row that begins here, unexpected end of data"),
    ],
)
def test_a_csv_file_with_unclear_columns_is_refused(text, told, write):
    with pytest.raises(ForgatherError, match=told) as caught:
        labelled_rows(write(text, "rows.csv"))
    assert "FG834" == caught.value.code


def test_rows_for_a_model_have_tokens_and_targets(write, caplog):
    read = labelled_rows(
        write([{"text": "one two " * 20, "label": ["a"]}, {"text": "one", "label": []}]),
        task="multi_label",
        labels=["a", "b"],
    )
    tokenizer = train_bpe(read, vocab_size=260)

    rows = tokenize_labelled(read, tokenizer, 8)
    batch = PaddingCollator(tokenizer)(list(rows))

    assert [[1.0, 0.0], [0.0, 0.0]] == batch["labels"].tolist()
    assert (2, 8) == batch["input_ids"].shape and [8, len(rows[1]["input_ids"])] == batch["attention_mask"].sum(
        1
    ).tolist()
    assert "1 cut to 8 tokens" in caplog.text
    # Single labels are class numbers, also in the parts of a split.
    parts = tokenize_labelled(split(labelled_rows(write(rows_of(*"abab"))), 0.5), tokenizer)
    assert {0, 1} == {label for part in parts.values() for label in part["labels"]}
    tokenizer.pad_token = None
    with pytest.raises(ForgatherError, match="no padding token"):
        tokenize_labelled(read, tokenizer, 9)


def test_a_classifier_names_its_classes():
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }

    model, again = (classifier_from_config(LlamaConfig(**sizes), labels=["no", "yes"], seed=3) for _ in range(2))

    assert ({0: "no", 1: "yes"}, "single_label_classification") == (model.config.id2label, model.config.problem_type)
    assert all((one == other).all() for one, other in zip(model.parameters(), again.parameters(), strict=True))
    for task, labels in (("regression", ["a", "b"]), ("classification", None), ("topics", ["a", "b"])):
        with pytest.raises(ForgatherError) as caught:
            classifier_from_config(LlamaConfig(**sizes), task=task, labels=labels)
        assert "FG879" == caught.value.code
    with pytest.raises(ForgatherError) as caught:
        classifier_from_config(object(), labels=["a", "b"])
    assert "FG842" == caught.value.code
