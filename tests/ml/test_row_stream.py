"""Streamed rows are those of the stored data set: each one once, with the same tokens and labels, also after a resume."""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import (
    CausalLMCollator,
    DataError,
    as_chats,
    chat_prompts,
    chats,
    mix,
    pack_examples,
    pair_prompts,
    preference_pairs,
    rollout_prompts,
    row_texts,
    set_chat_template,
    split,
    tokenize_chats,
    tokenize_preferences,
    train_bpe,
)
from forgather.ml.data.example_packing import holds_packed_examples
from forgather.ml.data.row_stream import RowStream
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.types import Topology
from forgather.whole_rows import whole_row_hints
from tests.ml.chat_cases import byte_pairs, dialogue
from tests.ml.fixtures import StopAt, assert_same_weights, tiny_llama, weights
from tests.ml.test_conversations import FORMS, lines

ALONE = Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)
SAID = {"prompt": "1?", "chosen": "one", "rejected": "two"}
TURNS = {"prompt": dialogue("1?"), "chosen": dialogue("", "one")[1:], "rejected": dialogue("", "two")[1:]}


def numbered(tmp_path, count=40, name="chats.jsonl"):
    return lines(tmp_path, *({"messages": dialogue(f"{n}?", "x" * (n % 9) + str(n))} for n in range(count)), name=name)


def tokenizer():
    return set_chat_template(byte_pairs(), "chatml")


def tokens(tmp_path, data, **options):
    stored = {} if isinstance(data, RowStream) else {"cache_dir": tmp_path}
    return tokenize_chats(data, tokenizer(), 64, **stored, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("train_on", ["assistant", "completion", "everything"])
def test_tokens_and_labels_are_those_of_stored_rows(tmp_path, form, train_on):
    file = lines(tmp_path, *[row for row, *_ in FORMS[form]] * 12, {**FORMS[form][0][0]})
    stored = tokens(tmp_path, chats(file, system="S"), train_on=train_on)
    streamed = tokens(tmp_path, chats(file, system="S", streaming=True, buffer_size=0), train_on=train_on)
    assert list(stored) == list(streamed)
    assert stored.column_names == streamed.column_names


@pytest.mark.parametrize("row", [SAID, TURNS], ids=["texts", "turns"])
def test_pairs_are_those_of_stored_rows(tmp_path, row):
    # The answers of the last row are equal after the cut.
    rows = [{**row, "prompt": f"{n}?"} for n in range(40)] + [{**row, "chosen": "a" * 99, "rejected": "a" * 98}]
    file = lines(tmp_path, *rows)
    stored = tokenize_preferences(preference_pairs(file, as_turns=row is TURNS), tokenizer(), 32, cache_dir=tmp_path)
    stream = preference_pairs(file, as_turns=row is TURNS, streaming=True, buffer_size=0)
    assert list(stored) == list(tokenize_preferences(stream, tokenizer(), 32))
    assert 40 == len(stored)


def test_the_order_is_that_of_seed_and_epoch_and_each_row_is_in_it_once(tmp_path):
    files = [numbered(tmp_path), numbered(tmp_path, name="b.jsonl")]
    stored = [row["source"] for row in chats(files)]
    stream = chats(files, streaming=True, buffer_size=8)
    orders = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        assert list(stream) == list(stream)
        orders.append([row["source"] for row in stream])
    assert all(sorted(stored) == sorted(order) for order in orders)
    assert 4 == len({tuple(order) for order in (stored, *orders)})
    other = chats(files, streaming=True, buffer_size=8, seed=1)
    assert orders[0] != [row["source"] for row in other]
    assert stored == [row["source"] for row in chats(files, streaming=True, buffer_size=0)]


def test_persistent_workers_read_each_epoch_in_its_order(tmp_path):
    """As the trainer of transformers reads it, which sets the epoch in the main process alone."""
    stream = chats(numbered(tmp_path), streaming=True, buffer_size=8)
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        stream.set_epoch(epoch)
        assert [row["source"] for row in stream] == [row["source"] for row in loader]


def test_no_more_rows_are_read_than_the_buffer_holds():
    read = []

    def count(files):
        for number in range(1000):
            read.append(number)
            yield {"number": number}

    stream = RowStream(["a"], count, buffer_size=50, seed=0)
    read.clear()
    given = list(islice(stream, 10))
    assert len(given) + 50 >= len(read)


def test_a_bad_row_is_named_when_it_is_read_or_counted(tmp_path, caplog):
    file = lines(tmp_path, *[{"messages": dialogue("a", "b")}] * 40, {"messages": []}, {"messages": [{"role": "x"}]})
    rows = iter(chats(file, streaming=True, buffer_size=0))
    assert 40 == len(list(islice(rows, 40)))
    with pytest.raises(DataError, match=r"FG890.*chats\.jsonl:41: "):
        next(rows)
    assert 40 == len(list(chats(file, streaming=True, buffer_size=0, bad_rows="drop")))
    assert ["chats.jsonl:41" in line for line in caplog.messages] == [True, False]
    assert "2 rows of the epoch left out" == caplog.messages[1]


def test_rows_without_a_target_are_left_out_named_once_and_counted(tmp_path, caplog):
    rows = [{"messages": dialogue("a", "b")}, *[{"messages": dialogue("a")}] * 3]
    streamed = tokens(tmp_path, chats(lines(tmp_path, *rows), streaming=True, buffer_size=0))
    assert 1 == len(list(streamed))
    named, counted = caplog.messages
    assert named.endswith("chats.jsonl:2 is left out: it is a conversation without an answer")
    assert counted.endswith("left out: 3 without an answer")
    with pytest.raises(DataError, match=r"FG896.*3 without an answer"):
        list(tokens(tmp_path, chats(lines(tmp_path, *rows[1:]), streaming=True)))


def test_packed_rows_are_those_of_stored_rows(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    file = numbered(tmp_path)
    stored = tokens(tmp_path, chats(file), packing=True)
    streamed = tokens(tmp_path, chats(file, streaming=True, buffer_size=0), packing=True)
    assert list(stored) == list(streamed)
    assert holds_packed_examples(streamed)
    assert caplog.messages[-1] == caplog.messages[0]


def test_a_run_goes_on_with_the_row_after_the_last_one(tmp_path, settings):
    file = numbered(tmp_path)

    def make(*callbacks):
        model = tiny_llama(vocab_size=len(tokenizer()), num_hidden_layers=1)
        data = tokens(tmp_path, chats(file, streaming=True, buffer_size=16))
        # 40 rows are 10 steps: the run stops in the second epoch.
        args = settings(
            max_steps=14, per_device_train_batch_size=4, save_strategy="steps", save_steps=1, logging_steps=1
        )
        return Trainer(
            model, args, train_dataset=data, data_collator=CausalLMCollator(tokenizer()), callbacks=list(callbacks)
        )

    whole = make()
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    stopped = make(StopAt(12))
    stopped.train()
    resumed = make()
    resumed.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(whole.model), weights(resumed.model))
    with pytest.raises(AssertionError):
        assert_same_weights(weights(stopped.model), weights(resumed.model))


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_have_each_row_once(tmp_path, workers):
    data = tokens(tmp_path, chats(numbered(tmp_path, 39), streaming=True, buffer_size=16))
    found = []
    for rank in range(2):
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=9, use_cpu=True, dataloader_num_workers=workers
        )
        topology = replace(ALONE, rank=rank, dp_rank=rank, dp_size=2)
        batches = TrainBatches(data, args, CausalLMCollator(tokenizer()), topology=topology)
        for window in batches.windows(loss_rule(tiny_llama())):
            for batch in window.batches[:1] if window.num_rows else ():
                masks = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
                found += [[id_ for id_, kept in zip(ids, mask, strict=True) if kept] for ids, mask in masks]
    assert sorted(row["input_ids"] for row in data) == sorted(found)


FUNCTIONS = {
    "split": split,
    "mix": lambda stream: mix({"a": stream}),
    "as_chats": as_chats,
    "pack_examples": partial(pack_examples, max_length=9),
    "row_texts": row_texts,
    "train_bpe": train_bpe,
    "chat_prompts": partial(chat_prompts, tokenizer=None),
    "pair_prompts": partial(pair_prompts, tokenizer=None),
    "rollout_prompts": rollout_prompts,
}


def test_what_needs_all_rows_is_refused_by_name(tmp_path):
    stream = chats(numbered(tmp_path), streaming=True)
    assert FUNCTIONS.keys() == whole_row_hints().keys()
    for name, function in FUNCTIONS.items():
        with pytest.raises(DataError, match=rf"FG982.*{name} needs all of them") as caught:
            function(stream)
        assert caught.value.hint == whole_row_hints()[name]
    for given in ({"num_proc": 2}, {"cache_dir": tmp_path}):
        with pytest.raises(DataError, match="FG982"):
            tokenize_chats(stream, tokenizer(), **given)
    file = tmp_path / "list.jsonl"
    file.write_text(json.dumps([{"messages": dialogue("a", "b")}]))
    with pytest.raises(DataError, match=r"FG982.*is one list"):
        chats(file, streaming=True)


def test_evaluation_rows_are_given_and_not_streamed(tmp_path):
    file, held = numbered(tmp_path), numbered(tmp_path, 3, "held.jsonl")
    parts = split(chats(file, eval_paths=held, streaming=True))
    assert isinstance(parts["train"], RowStream)
    assert 3 == len(parts["eval"]) == len(tokens(tmp_path, parts["eval"]))
    pairs = lines(tmp_path, SAID, name="pairs.jsonl")
    given = preference_pairs(pairs, eval_paths=pairs, streaming=True)
    assert isinstance(given["train"], RowStream)
    assert isinstance(given["eval"], Dataset)
    assert list(given["train"]) == list(preference_pairs(pairs, eval_paths=pairs)["train"])
    with pytest.raises(DataError, match=r"FG982.*mix"):
        mix({"a": chats(file, eval_paths=held, streaming=True)})


def test_an_order_that_a_stream_does_not_have_is_refused(tmp_path, settings):
    for strategy, code in (("sequential", "FG982"), ("group_by_length", "FG946")):
        args = settings(max_steps=2, train_sampling_strategy=strategy)
        data = tokens(tmp_path, chats(numbered(tmp_path), streaming=True))
        with pytest.raises(TrainingError, match=code):
            TrainBatches(data, args, CausalLMCollator(tokenizer()), topology=ALONE)
    in_order = tokens(tmp_path, chats(numbered(tmp_path), streaming=True, buffer_size=0))
    TrainBatches(in_order, settings(max_steps=2, train_sampling_strategy="sequential"), list, topology=ALONE)
