"""Words with tags: what is read, which token has the label of a word, and what is refused with its row."""

import json

import pytest
from transformers import BertConfig

from forgather.errors import ForgatherError
from forgather.ml.classifiers import classifier_from_config
from forgather.ml.data import PaddingCollator, class_names, tagged_rows, tokenize_tagged
from forgather.ml.data.tokenizer import train_bpe

ROW = {"tokens": ["Anna", "saw", "New", "York"], "tags": ["B-PER", "O", "B-LOC", "I-LOC"]}


@pytest.fixture
def write(tmp_path):
    def make(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return make


def test_the_first_token_of_a_word_has_its_tag_and_no_other_token_has_a_label(write, tmp_path, caplog):
    caplog.set_level("INFO", "forgather")
    rows = tagged_rows(write(ROW, {"tokens": ["x" * 9], "tags": ["O"]}))
    tokenizer = train_bpe(rows, 262, add_prefix_space=True, cache_dir=tmp_path)

    made = tokenize_tagged(rows, tokenizer, 32, cache_dir=tmp_path)
    cut = tokenize_tagged(rows, tokenizer, 5, cache_dir=tmp_path)

    names = ["B-LOC", "B-PER", "I-LOC", "O"]
    assert names == class_names(rows) and ["Anna saw New York", "x" * 9] == rows["text"][:]
    for row, words, tags in zip(made, rows["tokens"], rows["tags"], strict=True):
        place = 0
        for word, tag in zip(words, tags, strict=True):
            # An oracle that does not ask the tokenizer to which word a token belongs.
            own = tokenizer(word, add_special_tokens=False)["input_ids"]
            assert own == row["input_ids"][place : place + len(own)] and len(own) > 0
            assert [tag, *[-100] * (len(own) - 1)] == row["labels"][place : place + len(own)]
            place += len(own)
        assert place == len(row["input_ids"])
    assert [row["labels"][:5] for row in made] == cut["labels"][:]
    count = sum(len(ids) > 5 for ids in made["input_ids"])
    assert count and f"2 rows; {count} cut to 5 tokens" in caplog.text and "a pretrained model" not in caplog.text
    # The loss of the model is the mean over words: padding and later tokens are not counted.
    batch = PaddingCollator(tokenizer)([made[0], made[1]])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0)
    model = classifier_from_config(config, task="token_classification", labels=names, tokenizer=tokenizer).eval()
    output = model(**batch)
    log_p = output.logits.log_softmax(-1)
    losses = [
        -log_p[n, t, tag] for n, row in enumerate(batch["labels"].tolist()) for t, tag in enumerate(row) if tag >= 0
    ]
    assert 5 == len(losses) and sum(losses).item() / 5 == pytest.approx(output.loss.item(), rel=1e-5)


def test_a_tokenizer_without_blanks_before_words_is_noted(write, tmp_path, caplog):
    rows = tagged_rows(write(ROW, ROW), labels=["O", "B-PER", "B-LOC", "I-LOC"])
    tokenize_tagged(rows, train_bpe(rows, 260, cache_dir=tmp_path), cache_dir=tmp_path)
    assert "give the tokenizer add_prefix_space: true" in caplog.text


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [
        ({"tokens": ["a"], "tags": ["O", "O"]}, "FG877", "jsonl:2: .*1 word and 2 tags"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "FG877", "jsonl:2: .*its words are 'a b'"),
        ({"tokens": [], "tags": []}, "FG877", "jsonl:2: .*its words are"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "FG877", "jsonl:2: .*its word is empty"),
        ({"tokens": ["a"], "tags": [None]}, "FG877", "jsonl:2: .*its label is None"),
        ({"tokens": ["a"], "tags": ["\ud800"]}, "FG877", "jsonl:2: .*surrogate"),
        ({"tokens": ["a"], "tags": ["B-ORG"]}, "FG876", "jsonl:2: .*'B-ORG' is none of the 4 classes"),
        ({"words": ["a"], "tags": ["O"]}, "FG831", "jsonl:2: .*no column 'tokens'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_number(row, code, told, write):
    with pytest.raises(ForgatherError, match=told) as found:
        tagged_rows(write(ROW, row), labels=["O", "B-PER", "B-LOC", "I-LOC"])
    assert code == found.value.code


def test_arguments_that_cannot_be_used_are_refused(write, tmp_path):
    rows = tagged_rows(write(ROW))
    tokenizer = train_bpe(rows, 260, cache_dir=tmp_path)
    with pytest.raises(ForgatherError, match="max_length is 0"):
        tokenize_tagged(rows, tokenizer, 0)
    tokenizer.pad_token = None
    with pytest.raises(ForgatherError, match="no padding token"):
        tokenize_tagged(rows, tokenizer)
    with pytest.raises(ForgatherError, match="two different names"):
        tagged_rows(write(ROW), labels=["O"])
    for labels, told in [
        ([["O"], ["B-PER"]], "labels has \\['O'\\]"),
        ([None, "O"], "has None"),
        ([1, "1"], "two different"),
    ]:
        with pytest.raises(ForgatherError, match=told):
            tagged_rows(write(ROW), labels=labels)
