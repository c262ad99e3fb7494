"""Prepared tokens: the rows of `tokenize` from memory-mapped shards, written in parallel, resumable, verified."""

import json
import os
import pickle
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import (
    DataError,
    DataFileError,
    PreparedDocuments,
    prepare_tokens,
    prepared,
    shard_writer,
    tokenize,
)
from forgather.ml.data.prepared_manifest import draft_of, read_manifest
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.shards import ShardedRows, ShardReader
from forgather.ml.trainer.row_fit import refuse_unfit_rows
from tests.ml.fixtures import tiny_llama
from tests.ml.packed_rows import SYMBOLS, VOCAB, symbols


def texts(number=151):
    draw = np.random.default_rng(3)
    return ["".join(draw.choice(list(SYMBOLS), size=draw.integers(0, 40))) for _ in range(number - 1)] + [None]


@pytest.fixture(scope="module")
def source():
    return Dataset.from_dict({"text": texts(), "other": list(range(151))})


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    place = tmp_path_factory.mktemp("data") / "tokens"
    done = prepare_tokens(source, symbols(), place, num_proc=2, num_shards=5)
    assert 5 == done.written == len(done.manifest.shards) and not draft_of(place).exists()
    return place


def copied(folder, tmp_path):
    place = tmp_path / "tokens"
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize("block_size", [2, 7, 64, 1500])
@pytest.mark.parametrize("document_boundaries", [True, False])
def test_rows_are_those_of_tokenize(source, folder, tmp_path, block_size, document_boundaries):
    options = {"document_boundaries": document_boundaries}
    expected = tokenize(source, symbols(), block_size, cache_dir=tmp_path, **options)
    found = prepared(folder, block_size, tokenizer=symbols(), **options)
    assert len(expected) == len(found) and expected.column_names == found.column_names
    sent = pickle.loads(pickle.dumps(found))  # as a worker process gets it
    for number in {*range(0, len(found), max(1, len(found) // 40)), len(found) - 1}:
        row = sent[number]
        assert list(expected[number]) == list(row)
        assert all(
            value.dtype == row[name].dtype and torch.equal(value, row[name]) for name, value in expected[number].items()
        )
    assert torch.equal(found[-1]["labels"], found[len(found) - 1]["labels"])
    assert ["labels"] == list(found.select_columns(["labels"])[0]) == list(found.select_columns(["labels"])[0:2])
    with pytest.raises(IndexError):
        found[len(found)]


def test_a_killed_preparation_goes_on_with_the_shards_that_are_missing(source, folder, tmp_path, monkeypatch):
    place, write = tmp_path / "tokens", shard_writer._write_shard

    def dies(job, number, of):
        if number == 3:
            (job.draft / "shard-00003.arrow").write_bytes(b"half")
            os._exit(9)
        write(job, number, of)

    monkeypatch.setattr(shard_writer, "_write_shard", dies)
    with pytest.raises(DataFileError, match="FG589.*a process that tokenizes has ended"):
        prepare_tokens(source, symbols(), place, num_proc=2, num_shards=5)
    monkeypatch.undo()
    with pytest.raises(DataFileError, match="FG779.*is not ready: its shards are being prepared"):
        prepared(place)
    finished = {file.name: file.stat().st_mtime_ns for file in draft_of(place).glob("*.json")}
    with pytest.raises(DataFileError, match="FG787.*was begun with 5 shards, and 4 are asked for"):
        prepare_tokens(source, symbols(), place, num_shards=4)
    with pytest.raises(DataFileError, match="FG787.*prepared with another texts"):
        prepare_tokens(source.select(range(20)), symbols(), place)
    done = prepare_tokens(source, symbols(), place, num_proc=1)  # the plan of the draft says how many shards
    assert 5 - (len(finished) - 1) == done.written and done.manifest == read_manifest(folder)
    for file in folder.iterdir():
        assert file.read_bytes() == (place / file.name).read_bytes()
    assert 0 == prepare_tokens(source, symbols(), place).written
    with pytest.raises(DataFileError, match="FG787.*prepared with another texts"):
        prepare_tokens(source.select(range(20)), symbols(), place)


def test_two_preparations_and_a_full_disk_are_refused(source, tmp_path, monkeypatch):
    place = tmp_path / "tokens"
    draft_of(place).mkdir()
    with FileLock(draft_of(place) / "lock"), pytest.raises(DataFileError, match="FG787.*another process is preparing"):
        prepare_tokens(source, symbols(), place)
    monkeypatch.setattr(shard_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
    with pytest.raises(DataFileError, match=r"FG786.*the tokens need about 0\.0 GB"):
        prepare_tokens(source, symbols(), place)


class Changed:
    """A tokenizer that does with texts what a function does, and is another one in all else."""

    def __init__(self, encode):
        self.inner, self.encode = symbols(), encode

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __call__(self, texts, **options):
        return {"input_ids": [self.encode(text) for text in texts]}


def breaks(text):
    if text == "c":
        raise RuntimeError("no such rule\nfor c")
    return [1] * len(text)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_that_cannot_be_tokenized_are_named(tmp_path, processes):
    rows = Dataset.from_dict({"text": ["ab", "b", "c", "d"] * 2})
    options = {"num_proc": processes, "num_shards": 2}
    with pytest.raises(
        DataError, match=r"FG833.*row 2: the tokenizer cannot encode the text: RuntimeError: no such rule"
    ):
        prepare_tokens(rows, Changed(breaks), tmp_path / "a", **options)
    for wrong in (70_000, -1):
        with pytest.raises(DataError, match=rf"FG784.*row 1: the tokenizer gives the id {wrong}, and its vocabulary"):
            prepare_tokens(
                rows, Changed(lambda text, wrong=wrong: [wrong if text == "b" else 1]), tmp_path / "b", **options
            )
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_vocabulary_with_gaps_has_ids_of_four_bytes(tmp_path):
    tokenizer = Changed(lambda text: [70_000])
    tokenizer.get_vocab = lambda: {"a": 70_000}
    done = prepare_tokens(Dataset.from_dict({"text": ["a"]}), tokenizer, tmp_path / "tokens")
    assert ("int32", 70_000) == (done.manifest.dtype, done.manifest.largest_id)


@pytest.mark.parametrize(("values", "kind"), [([1, 0], "int64"), ([["a"], ["b"]], "List"), ([False, True], "bool")])
def test_columns_without_text_are_refused_by_name(tmp_path, values, kind):
    rows = Dataset.from_dict({"text": values})
    for act in (
        lambda: prepare_tokens(rows, symbols(), tmp_path / "tokens"),
        lambda: tokenize(rows, symbols(), 4, cache_dir=tmp_path),
    ):
        with pytest.raises(DataError, match=f"FG833.*column 'text' holds {kind}, not text"):
            act()
    # Values that are made while they are read have no declared kind.
    made = rows.with_transform(lambda batch: {"text": [0] * len(batch["text"])})
    with pytest.raises(DataError, match="FG833.*row 0: column 'text' holds int, not text"):
        prepare_tokens(made, symbols(), tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_a_file_is_no_folder_and_an_empty_folder_is_written(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataFileError, match="FG747.*file' is a file"):
        prepare_tokens(source, symbols(), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert 2 == prepare_tokens(source, symbols(), tmp_path / "empty", num_shards=2).written
    assert read_manifest(tmp_path / "empty").num_documents == len(source)


def test_a_disk_that_becomes_full_keeps_finished_shards(source, tmp_path):
    place, limits = tmp_path / "tokens", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        with pytest.raises(DataFileError, match=r"FG747.*cannot be prepared: .*File too large"):
            prepare_tokens(source, symbols(), place, num_shards=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not place.exists()
    assert 3 == len(prepare_tokens(source, symbols(), place).manifest.shards)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def change(place, **facts):
    known = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps(known | facts))


BAD = {
    "a truncated shard": (
        lambda at: os.truncate(at / "shard-00002.arrow", 700),
        "FG781.*shard-00002.arrow' has 700 byt",
    ),
    "a missing shard": (lambda at: (at / "shard-00001.arrow").unlink(), "FG781.*shard-00001.arrow' is missing"),
    "a flipped bit": (lambda at: flip(at / "shard-00003.arrow"), "FG782.*shard-00003.arrow' is not what was written"),
    "a foreign version": (lambda at: change(at, format=7), "FG780.*has the format 7, and this release reads 1"),
    "another kind": (lambda at: change(at, kind="megatron"), "FG780.*is not one of 'forgather tokens'"),
    "other counts": (lambda at: change(at, num_tokens=5), "FG780.*contradicts itself"),
    "no shards": (lambda at: change(at, shards=[{"file": "x"}]), "FG780.*is not complete"),
    "a path": (
        lambda at: change(at, shards=[dict(file="../x", documents=1, tokens=1, bytes=1, xxh3="", largest_id=1)]),
        "FG780.*another kind",
    ),
    "a text for a number": (lambda at: change(at, vocab_size="9"), "FG780.*another kind .vocab_size"),
    "no JSON": (lambda at: (at / "manifest.json").write_text("{"), "FG780.*is no JSON"),
    "a deep nest": (lambda at: (at / "manifest.json").write_text("[" * 100_000), "FG780.*is no JSON"),
    "no manifest": (lambda at: (at / "manifest.json").unlink(), "FG779.*has no manifest.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_told_in_one_sentence(name, folder, tmp_path):
    place = copied(folder, tmp_path)
    prepared(place, 8, verify=True)
    spoil, said = BAD[name]
    spoil(place)
    with pytest.raises(DataFileError, match=said):
        prepared(place, 8, verify=True)


def test_a_shard_that_is_replaced_after_it_was_opened_is_noticed(folder, tmp_path):
    place = copied(folder, tmp_path)
    rows = prepared(place, 8)
    (place / "shard-00000.arrow").write_bytes((place / "shard-00001.arrow").read_bytes())
    with pytest.raises(DataFileError, match="FG781.*manifest says otherwise"):
        rows[0]
    (place / "shard-00000.arrow").write_bytes(b"no arrow at all")
    with pytest.raises(DataFileError, match="FG781.*cannot be read"):
        rows[0]


def test_other_tokenizers_and_short_data_are_refused(folder, tmp_path):
    other = symbols().__class__(tokenizer_object=symbols().backend_tokenizer, eos_token="<unk>")
    with pytest.raises(DataError, match="FG783.*those of another tokenizer"):
        prepared(folder, 8, tokenizer=other)
    with pytest.raises(DataError, match="FG836.*less than one block of 100000"):
        prepared(folder, 100_000)
    with pytest.raises(DataFileError, match="FG779.*does not exist"):
        prepared(tmp_path / "nothing")
    with pytest.raises(DataError, match="FG832"):
        prepare_tokens(Dataset.from_dict({"text": []}), symbols(), tmp_path / "empty")


def test_documents_are_read_shard_by_shard_from_any_offset(source, folder):
    shards = PreparedDocuments(folder)
    found = [row["input_ids"].tolist() for shard in range(shards.num_shards) for row in shards.open(shard)]
    assert [[*symbols()(text or "", add_special_tokens=False)["input_ids"], 0] for text in source["text"]] == found
    reader = shards.open(1)
    next(reader), next(reader)
    assert [row["input_ids"].tolist() for row in reader] == [row["input_ids"].tolist() for row in shards.open(1, 2)]
    assert sum(shards.shard_size(shard) for shard in range(5)) == sum(map(len, found))
    assert "shard-00004.arrow" == shards.shard_name(4)


def losses(rows, output, **given):
    model = tiny_llama(vocab_size=VOCAB, max_position_embeddings=64)
    args = TrainingArguments(
        str(output), use_cpu=True, per_device_train_batch_size=4, max_steps=6, logging_steps=1, seed=5, **given
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, processing_class=symbols())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_losses_are_those_of_the_config_that_tokenizes_and_runs_go_over(source, folder, tmp_path):
    tokenized = tokenize(source, symbols(), 16, cache_dir=tmp_path)
    expected = losses(tokenized, tmp_path / "a", save_steps=3)
    assert 6 == len(expected) and expected == losses(prepared(folder, 16), tmp_path / "b", dataloader_num_workers=1)
    # The fingerprint of the rows is the same, so that a checkpoint of the one continues with the other.
    resumed = losses(prepared(folder, 16), tmp_path / "a", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert expected[3:] == resumed[-3:]


def test_tokens_and_rows_beyond_the_model_are_refused(folder, tmp_path):
    with pytest.raises(
        TrainingError, match=f"FG784.*ids up to {VOCAB - 1}, and the vocabulary of LlamaFor.* ends at 8"
    ):
        refuse_unfit_rows(tiny_llama(vocab_size=9), prepared(folder, 16))
    table = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(TrainingError, match="FG785.*rows have 16 tokens, and GPT2LMHeadModel has 8 positions"):
        Trainer(
            model=table,
            args=TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1),
            train_dataset=prepared(folder, 16),
        ).train()
    refuse_unfit_rows(table, prepared(folder, 8))
    refuse_unfit_rows(
        tiny_llama(vocab_size=VOCAB, max_position_embeddings=8), prepared(folder, 16)
    )  # rotary: a warning


def test_prepared_documents_are_shards_for_streams(folder):
    shards = PreparedDocuments(folder)
    assert isinstance(shards, ShardedRows) and isinstance(shards.open(0), ShardReader)
    expected = sorted(row["input_ids"].tolist() for row in shards)
    stream = RowStream.of_shards(shards, buffer_size=16, seed=1)
    stream.set_epoch(2)
    assert 151 == len(expected) and expected == sorted(row["input_ids"].tolist() for row in stream)


TEXTS = {"text": ["ab", "ba", "a", "b"]}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 1}', "null"])
def test_a_damaged_record_of_a_shard_lets_the_shard_be_written_again(tmp_path, content):
    place = tmp_path / "tokens"
    draft_of(place).mkdir()
    (draft_of(place) / "shard-00000.json").write_text(content)
    done = prepare_tokens(Dataset.from_dict(TEXTS), symbols(), place, num_shards=2)
    assert (2, 4) == (done.written, read_manifest(place).num_documents)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"num_shards": 2}'])
def test_a_damaged_plan_is_refused_with_the_folder_to_remove(tmp_path, content):
    place = tmp_path / "tokens"
    draft_of(place).mkdir()
    (draft_of(place) / "plan.json").write_text(content)
    with pytest.raises(DataFileError, match="FG787.*plan.json' is damaged.*preparing"):
        prepare_tokens(Dataset.from_dict(TEXTS), symbols(), place)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataFileError, match="FG747.*cannot be prepared.*Not a directory"):
        prepare_tokens(Dataset.from_dict(TEXTS), symbols(), tmp_path / "file" / "tokens")
    assert "x" == (tmp_path / "file").read_text()


def test_a_link_to_a_folder_that_is_not_there_yet_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "tokens")
    prepare_tokens(Dataset.from_dict(TEXTS), symbols(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert 4 == read_manifest(tmp_path / "tokens").num_documents


@pytest.mark.parametrize("name", [None, 3, [], "../x"])
def test_a_manifest_whose_shard_has_no_name_is_damaged(tmp_path, name):
    place = tmp_path / "tokens"
    prepare_tokens(Dataset.from_dict(TEXTS), symbols(), place)
    found = json.loads((place / "manifest.json").read_text())
    found["shards"][0]["file"] = name
    (place / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(DataFileError, match="FG780.*value of another kind"):
        read_manifest(place)
