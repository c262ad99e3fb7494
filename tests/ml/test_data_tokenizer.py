import json

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.ml.data import DataError, DataFileError, load_tokenizer, train_bpe
from forgather.ml.data.tokenizer import tokenizer_digest

TEXTS = [f"def function_{i}(value):\n    return value * {i}\n" for i in range(50)]


@pytest.fixture(scope="module")
def rows():
    return Dataset.from_dict({"text": TEXTS})


@pytest.fixture(scope="module")
def tokenizer(rows, tmp_path_factory):
    return train_bpe(rows, 280, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_vocabulary_has_the_size_that_was_asked_for(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 280
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|endoftext|>",
        "<|endoftext|>",
        "<|pad|>",
    )
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id}) == 2


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_every_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_training_twice_gives_the_same_tokenizer(rows, tokenizer, tmp_path):
    again = train_bpe(Dataset.from_dict({"text": TEXTS}), 280, cache_dir=tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)


def test_text_too_small_for_the_vocabulary_is_told(tmp_path, caplog):
    for _ in range(2):  # a plan makes it several times, and says it once
        tokenizer = train_bpe(Dataset.from_dict({"text": ["abab"]}), 1000, cache_dir=tmp_path)
    said = "the tokenizer learned 259 tokens: the texts are too short for more (vocab_size: 1000 is a limit)"
    assert [said] == caplog.messages
    assert len(tokenizer) == 259


def test_special_tokens_are_never_split(rows, tmp_path):
    tokenizer = train_bpe(rows, 280, special_tokens=["<|user|>"], cache_dir=tmp_path)
    assert tokenizer("<|user|>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<|user|>")]


def entry(folder):
    return next(file for file in folder.rglob("tokenizer.json"))


def test_the_cache_is_used_when_whole(rows, tmp_path):
    train_bpe(rows, 280, cache_dir=tmp_path)
    before = entry(tmp_path).stat().st_mtime_ns
    train_bpe(rows, 280, cache_dir=tmp_path)
    assert entry(tmp_path).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(file.read_text()[:100]),
        lambda file: file.write_bytes(file.read_bytes().replace(b"merges", b"merged", 1)),
        lambda file: file.unlink(),
        lambda file: (file.parent / "manifest.json").write_text("{}"),
        lambda file: (file.parent / "manifest.json").write_text("[]"),
        lambda file: (file.parent / "manifest.json").unlink(),
    ],
    ids=["cut", "flipped", "removed", "empty manifest", "odd manifest", "no manifest"],
)
def test_a_damaged_cache_entry_is_built_again(rows, tokenizer, tmp_path, caplog, damage):
    train_bpe(rows, 280, cache_dir=tmp_path)
    damage(entry(tmp_path))
    assert train_bpe(rows, 280, cache_dir=tmp_path).get_vocab() == tokenizer.get_vocab()
    assert "damaged" in caplog.text
    json.loads(entry(tmp_path).read_text())


def test_a_build_that_fails_leaves_no_entry(tmp_path):
    with pytest.raises(TypeError):
        train_bpe(Dataset.from_dict({"text": [["not text"]]}), 280, cache_dir=tmp_path)
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"] == []


def test_a_vocabulary_without_room_is_refused(rows, tmp_path):
    with pytest.raises(DataError) as excinfo:
        train_bpe(rows, 257, cache_dir=tmp_path)
    assert (excinfo.value.code, excinfo.value.hint) == ("FG838", "at least 258")


def test_a_saved_tokenizer_loads_with_the_same_ids(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded(TEXTS[3])["input_ids"] == tokenizer(TEXTS[3])["input_ids"]
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataFileError) as excinfo:
        load_tokenizer(tmp_path / "absent", local_files_only=True)
    assert excinfo.value.code == "FG844"
    assert "absent" in excinfo.value.message
