"""Virtual streams: the same global rows on any number of ranks and workers, each read once, and resumed in place."""

import json
import math
import os
import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import DataError, DataFileError, json_lines, parquet, text_files, tokenize
from forgather.ml.data.block_packer import BlockPacker
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.shards import Packer, Segment, ShardedRows
from forgather.ml.data.virtual_streams import (
    VirtualStream,
    automatic_streams,
    dealt,
    even_streams,
    reads_per_row,
    streams_of_rank,
)
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.types import Topology
from tests.ml.chat_cases import byte_pairs
from tests.ml.fixtures import StopAt, assert_same_weights, tiny_llama, weights

ALONE = Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)


class Numbers:
    """Shards of numbers, of different lengths; counts the rows that are read."""

    def __init__(self, lengths):
        self.lengths, self.num_read = lengths, 0

    @property
    def num_shards(self):
        return len(self.lengths)

    def shard_size(self, shard):
        return self.lengths[shard]

    def shard_name(self, shard):
        return f"numbers {shard}"

    def open(self, shard, offset=None):
        return NumberReader(self, shard, offset or 0)


class NumberReader:
    def __init__(self, owner, shard, offset):
        self.owner, self.shard, self.offset = owner, shard, offset

    def __iter__(self):
        return self

    def __next__(self):
        if self.offset == self.owner.lengths[self.shard]:
            raise StopIteration
        self.offset += 1
        self.owner.num_read += 1
        return {"x": 1000 * self.shard + self.offset - 1}


def collate(rows):
    return {
        "input_ids": torch.tensor([[row["x"]] for row in rows]),
        "labels": torch.tensor([[row["x"]] for row in rows]),
    }


def numbers(lengths=(7, 5, 9, 6, 8, 4, 7, 3), buffer_size=4):
    return RowStream.of_shards(Numbers(list(lengths)), buffer_size=buffer_size, seed=3)


def batches_of(data, tmp_path, *, rank=0, ranks=1, rows=2, **settings):
    settings = {"max_steps": 999, "use_cpu": True, "data_streams": 8, **settings}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=rows, **settings)
    topology = replace(ALONE, rank=rank, world_size=ranks, dp_rank=rank, dp_size=ranks)
    return TrainBatches(data, args, collate, topology=topology)


def rows_of(window):
    return (
        []
        if not window.num_rows
        else [x for batch in window.batches if not hasattr(batch, "batch") for x in batch["input_ids"][:, 0].tolist()]
    )


def global_rows(tmp_path, ranks, rows, count=1000, make=numbers, **settings):
    """Returns the rows of each window over all ranks, in order of places."""
    every = []
    for rank in range(ranks):
        own = batches_of(make(), tmp_path, rank=rank, ranks=ranks, rows=rows, **settings)
        every.append([rows_of(window) for window in islice(own.windows(loss_rule(tiny_llama())), count)])
    longest = max(map(len, every))
    return [sorted(x for one in every for x in (one[place] if place < len(one) else [])) for place in range(longest)]


def all_numbers(lengths=(7, 5, 9, 6, 8, 4, 7, 3)):
    return sorted(1000 * shard + x for shard, length in enumerate(lengths) for x in range(length))


@pytest.mark.parametrize("num_streams", [1, 3, 8, 12, 64])
def test_each_place_is_computed_by_one_rank_of_a_stream_that_it_reads_for_1_to_16_ranks(num_streams):
    for replicas in range(1, 17):
        mine = [set(streams_of_rank(num_streams, rank, replicas)) for rank in range(replicas)]
        for place in range(3 * num_streams * replicas):
            assert place % num_streams in mine[place % replicas]
        times = sum(map(len, mine)) / num_streams
        assert reads_per_row(num_streams, replicas) == times == replicas / math.gcd(num_streams, replicas)


def test_each_row_is_read_by_one_rank_under_the_automatic_number_for_1_to_512_ranks():
    for replicas in range(1, 513):
        number = automatic_streams(replicas)
        assert 1 == reads_per_row(number, replicas)
        assert number <= 1024
        assert 1 == reads_per_row(even_streams(replicas, 1000), replicas)
        assert 1 == reads_per_row(automatic_streams(replicas, 600), replicas)
    assert {64} == {automatic_streams(2**power) for power in range(7)}


def test_shards_are_dealt_evenly_and_each_once():
    sizes = [1 + (7 * number) % 13 for number in range(200)]
    streams = dealt(sizes, 16, np.random.Generator(np.random.PCG64(1)))
    assert list(range(200)) == sorted(shard for shards in streams for shard in shards)
    loads = [sum(sizes[shard] for shard in shards) for shards in streams]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ranks_and_workers_do_not_change_the_global_batches(tmp_path, workers):
    expected = global_rows(tmp_path, 1, 8)
    assert all_numbers() == sorted(x for rows in expected for x in rows)
    for ranks, rows in ((1, 8), (2, 4), (4, 2), (8, 1)) if workers < 2 else ((2, 4),):
        found = global_rows(tmp_path, ranks, rows, dataloader_num_workers=workers)
        assert expected == [one for one in found if one]


@pytest.mark.parametrize("ranks", [3, 5, 6])
def test_ranks_that_do_not_divide_the_streams_have_each_row_once(tmp_path, ranks, caplog):
    expected = global_rows(tmp_path, 1, ranks)
    found = global_rows(tmp_path, ranks, 1, dispatch_rows=False)
    assert [one for one in expected if one] == [one for one in found if one]
    assert f"each row is read by {reads_per_row(8, ranks)} of {ranks} replicas" in caplog.text
    batches_of(numbers(), tmp_path, ranks=ranks)
    assert "each row is read once on each machine and dealt out, and used by one of" in caplog.text
    assert f"data_streams: {ranks} (in a new run) lets each read its own" in caplog.text


def test_with_fewer_shards_than_ranks_the_advice_is_to_write_more_shards(tmp_path, caplog):
    batches_of(numbers([9, 9]), tmp_path, ranks=3, data_streams=2)
    assert "'fgcli data prepare --num-shards 3', since the data has 2 shards, lets each read its own" in caplog.text


@pytest.mark.parametrize("replicas", [1, 8, 64, 512])
def test_rows_read_per_row_used(replicas, record_property):
    """Counted with real readers, for the first ranks: 320 rows of each of them."""
    source = numbers([400] * 1024, buffer_size=512 * 4)
    number = automatic_streams(replicas)
    read = used = 0
    for rank in range(min(replicas, 8)):
        shards = Numbers([400] * 1024)
        orders = replace(source.source(number), shards=shards, block_rows=4).orders(number, 0)
        streams = {
            one: iter(VirtualStream(replace(source.source(number), shards=shards, block_rows=4), orders[one], one, 0))
            for one in streams_of_rank(number, rank, replicas)
        }
        places = (k for k in range(10**9) if k % replicas == rank)
        for place in islice(places, 320):
            next(streams[place % number])
            used += 1
        read += shards.num_read
    record_property("read_per_used", read / used)
    # A block is read at once, so up to three rows of a stream are read ahead.
    assert used <= read <= used + 3 * number * min(replicas, 8) / replicas


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_begins_at_shard_and_offset_with_the_same_rows(tmp_path, workers):
    settings = {"dataloader_num_workers": workers}
    rule = loss_rule(tiny_llama())
    for done in (1, 3, 5):
        whole = batches_of(numbers(), tmp_path, rows=4, **settings)
        windows = whole.windows(rule)
        for window in islice(windows, done):
            whole.advance(window)
        state = whole.state_dict()
        expected = [rows_of(window) for window in windows]
        data = numbers()
        resumed = batches_of(data, tmp_path, rows=4, **settings)
        data._shards.num_read = 0
        resumed.load_state_dict(state)
        assert expected == [rows_of(window) for window in resumed.windows(rule)]
        if not workers:
            # Of each of the 8 streams, the rows of one block of 4 before the position, at most.
            left = sum(map(len, expected))
            assert left <= data._shards.num_read <= left + 8 * 3


def test_a_resume_with_other_ranks_goes_on_with_the_global_batches(tmp_path):
    rule = loss_rule(tiny_llama())
    parts = [batches_of(numbers(), tmp_path, rank=rank, ranks=2, rows=4) for rank in range(2)]
    blocks = {}
    for own in parts:
        for window in islice(own.windows(rule), 3):
            own.advance(window)
        state = own.state_dict()
        blocks |= state["blocks"]
    state["blocks"] = blocks  # as the ranks exchange them when a checkpoint is written
    expected = global_rows(tmp_path, 1, 8)[3:]
    found = []
    for rank in range(4):
        own = batches_of(numbers(), tmp_path, rank=rank, ranks=4, rows=2, data_streams=None)
        own.load_state_dict(json.loads(json.dumps(state)))
        found.append([rows_of(window) for window in own.windows(rule)])
    merged = [
        sorted(x for one in found for x in (one[place] if place < len(one) else []))
        for place in range(max(map(len, found)))
    ]
    assert expected == [one for one in merged if one]


def test_a_checkpoint_of_a_run_that_read_everything_goes_on_so(tmp_path, caplog):
    old = batches_of(numbers(), tmp_path, rows=4, data_streams=0)
    rule = loss_rule(tiny_llama())
    windows = old.windows(rule)
    for window in islice(windows, 2):
        old.advance(window)
    state = old.state_dict()
    assert "streams" not in state
    resumed = batches_of(numbers(), tmp_path, rows=4, data_streams=None)
    resumed.load_state_dict(state)
    assert [rows_of(window) for window in windows] == [rows_of(window) for window in resumed.windows(rule)]
    assert "read all rows of the stream, and this run goes on so" in caplog.text
    for before, now, what in (
        (0, 8, "streams None, now 8 with"),
        (8, 0, "streams 8 with .*, now None"),
        (8, 4, "streams 8 with .*, now 4 with"),
    ):
        own = batches_of(numbers(), tmp_path, rows=4, data_streams=before)
        for window in islice(own.windows(rule), 2):
            own.advance(window)
        with pytest.raises(CheckpointError, match=rf"FG610.*{what}"):
            batches_of(numbers(), tmp_path, rows=4, data_streams=now).load_state_dict(own.state_dict())


def test_streams_that_the_data_does_not_have_are_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"FG919.*data_streams is 9, and the data has 8 shards"):
        batches_of(numbers(), tmp_path, data_streams=9)

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": 1}])

    with pytest.raises(TrainingError, match=r"FG909.*Rows can only be read as a whole"):
        batches_of(Rows(), tmp_path, data_streams=2)
    with pytest.raises(TrainingError, match="FG976"):
        batches_of(Rows(), tmp_path, data_streams=None, bad_rows="skip")


def test_the_protocols_are_those_of_the_classes():
    assert isinstance(Numbers([1]), ShardedRows)
    assert isinstance(BlockPacker(4, 0), Packer)


def words(number):
    return f"{number} " + "ab" * (number % 11)


def text_file(tmp_path, count=120, name="texts.jsonl", bad=()):
    lines = [json.dumps({"text": words(number)}) for number in range(count)]
    for number in bad:
        lines[number] = '{"text": '
    file = tmp_path / name
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def parted(tmp_path, **options):
    return json_lines(text_file(tmp_path), streaming=True, buffer_size=40, **options)


def streamed_rows(stream, num_streams=4, epoch=0):
    source = stream.source(num_streams)
    orders = source.orders(num_streams, epoch)
    return [[row for row, _ in VirtualStream(source, orders[one], one, epoch)] for one in range(num_streams)]


@pytest.mark.parametrize("num_streams", [1, 3, 7, 50])
def test_parts_of_a_file_have_each_line_once(tmp_path, num_streams):
    files = [text_file(tmp_path), text_file(tmp_path, 31, "b.jsonl")]
    stream = json_lines(files, streaming=True, buffer_size=40)
    found = [row["text"] for rows in streamed_rows(stream, num_streams) for row in rows]
    expected = [words(number) for count in (120, 31) for number in range(count)]
    assert sorted(expected) == sorted(found)
    again = [row["text"] for rows in streamed_rows(stream, num_streams, epoch=1) for row in rows]
    assert sorted(found) == sorted(again)
    assert found != again


def test_packed_blocks_hold_each_document_once_with_boundaries(tmp_path):
    tokenizer = byte_pairs()
    stream = tokenize(parted(tmp_path), tokenizer, 16)
    documents = []
    for rows in streamed_rows(stream):
        ids = np.concatenate([row["input_ids"] for row in rows])
        # A label is missing at the beginning of a document and of a block, and in the padding at the end.
        for row in rows:
            assert all(row["labels"][row["position_ids"] == 0] == -100)
            kept = row["labels"] != -100
            assert all(row["labels"][kept] == row["input_ids"][kept])
        text = tokenizer.decode(ids.tolist()).split(tokenizer.eos_token)
        documents += [one for one in text if one]
    assert sorted(map(words, range(120))) == sorted(documents)


def test_blocks_are_those_of_stored_rows_in_one_stream_in_order(tmp_path):
    tokenizer = byte_pairs()
    file = text_file(tmp_path)
    stored = tokenize(json_lines(file), tokenizer, 16, cache_dir=tmp_path / "cache")
    [streamed] = streamed_rows(tokenize(json_lines(file, streaming=True, buffer_size=0), tokenizer, 16), 1)
    assert 1 == len(streamed) - len(stored)  # the tail, which is filled with padding
    for one, other in zip(stored, streamed, strict=False):
        for name in one:
            assert one[name].tolist() == other[name].tolist()


class WholeDocuments:
    """A packer of a user: one row for two documents."""

    def __init__(self):
        self.held = []

    def add(self, segments):
        self.held += segments
        rows = [self.held[place : place + 2] for place in range(0, len(self.held) - 1, 2)]
        self.held = self.held[2 * len(rows) :]
        return [{"input_ids": np.concatenate([one.ids_N for one in row])} for row in rows]

    def finish(self):
        return [{"input_ids": one.ids_N} for one in self.held]

    def state_dict(self):
        return {"held": [one.ids_N.tolist() for one in self.held]}

    def load_state_dict(self, state):
        self.held = [Segment(np.array(ids)) for ids in state["held"]]


def test_a_packer_of_a_user_makes_the_rows(tmp_path):
    tokenizer = byte_pairs()
    rows = [
        row for one in streamed_rows(tokenize(parted(tmp_path), tokenizer, make_packer=WholeDocuments)) for row in one
    ]
    ends = [sum(id_ == tokenizer.eos_token_id for id_ in row["input_ids"].tolist()) for row in rows]
    assert 120 == sum(ends)
    assert {1, 2} >= set(ends)
    with pytest.raises(DataError, match=r"FG982.*make_packer is for streamed rows"):
        tokenize(json_lines(text_file(tmp_path)), tokenizer, make_packer=WholeDocuments)


def datasets_stream(tmp_path):
    files = [text_file(tmp_path, 30 + number, f"{number}.jsonl") for number in range(4)]
    return load_dataset("json", data_files=files, split="train", streaming=True)


def parquet_rows(tmp_path):
    Dataset.from_dict({"text": [words(number) for number in range(120)]}).to_parquet(
        tmp_path / "t.parquet", batch_size=20
    )
    return parquet(str(tmp_path / "t.parquet"), streaming=True, buffer_size=40)


def line_rows(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("\n".join(words(number) for number in range(120)))
    return text_files(str(file), "line", streaming=True, buffer_size=40)


SOURCES = {"json_lines": parted, "datasets": datasets_stream, "parquet": parquet_rows, "lines": line_rows}


@pytest.mark.parametrize(
    ("source", "workers"), [*((source, 0) for source in SOURCES), ("json_lines", 2), ("datasets", 2)]
)
def test_a_packed_run_that_is_resumed_ends_as_one_that_was_not(tmp_path, settings, source, workers):
    tokenizer = byte_pairs()

    def make(*callbacks):
        model = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1)
        data = tokenize(SOURCES[source](tmp_path), tokenizer, 24)
        args = settings(
            max_steps=12,
            per_device_train_batch_size=4,
            save_strategy="steps",
            save_steps=1,
            data_streams=2 if source != "datasets" else 4,
            dataloader_num_workers=workers,
            logging_steps=1,
        )
        return Trainer(model, args, train_dataset=data, callbacks=list(callbacks))

    whole = make()
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    make(StopAt(7)).train()
    resumed = make()
    resumed.train(resume_from_checkpoint="auto")
    assert_same_weights(weights(whole.model), weights(resumed.model))


def reads(tmp_path, policy, bad=(5, 50), **settings):
    data = json_lines(text_file(tmp_path, bad=bad), streaming=True, buffer_size=40)
    args = TrainingArguments(str(tmp_path), max_steps=99, use_cpu=True, data_streams=4, bad_rows=policy, **settings)

    def collator(rows):
        if any(row["text"].startswith("77 ") for row in rows):
            raise ValueError("seventy-seven")
        numbers = torch.tensor([[int(row["text"].split()[0])] for row in rows])
        return {"input_ids": numbers, "labels": numbers}

    return TrainBatches(data, args, collator, topology=ALONE)


def numbers_read(own):
    return sorted(x for window in own.windows(loss_rule(tiny_llama())) for x in rows_of(window))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_left_out_counted_and_named(tmp_path, caplog, workers):
    own = reads(tmp_path, "skip", dataloader_num_workers=workers)
    assert sorted(set(range(120)) - {5, 50, 77}) == numbers_read(own)
    assert 3 == own.bad_rows.count
    if not workers:
        assert "texts.jsonl:6 cannot be read" in caplog.text
        assert "texts.jsonl:51 cannot be read" in caplog.text
        assert "seventy-seven" in caplog.text
    assert numbers_read(reads(tmp_path, 3))
    with pytest.raises(TrainingError, match=r"FG958.*bad_rows is 2"):
        numbers_read(reads(tmp_path, 2))
    with pytest.raises(TrainingError, match=r"FG834.*texts\.jsonl:(6|51) cannot be read"):
        numbers_read(reads(tmp_path, "stop"))
    with pytest.raises(ValueError, match="seventy-seven"):
        numbers_read(reads(tmp_path, "stop", bad=()))


def test_another_order_of_the_files_is_named_and_not_a_damaged_line(tmp_path):
    """An offset of one part of a file is no beginning of a line in another one."""

    def batches(**settings):
        files = [text_file(tmp_path, 40, f"{number}.jsonl") for number in range(4)]
        seed = settings.pop("seed", 3)
        args = TrainingArguments(str(tmp_path), max_steps=99, use_cpu=True, data_streams=2, **settings)
        data = json_lines(files, streaming=True, buffer_size=20, seed=seed)

        def collator(rows):
            return {name: torch.ones(len(rows), 1, dtype=torch.long) for name in ("input_ids", "labels")}

        return TrainBatches(data, args, collator, topology=ALONE)

    rule = loss_rule(tiny_llama())
    own = batches()
    for window in islice(own.windows(rule), 5):
        own.advance(window)
    state = own.state_dict()
    with pytest.raises(CheckpointError, match=r"FG610.*in the order of seed 3.*in the order of seed 4"):
        batches(seed=4).load_state_dict(state)
    changed = batches(seed=4, allow_changed=["data"])
    changed.load_state_dict(state)
    assert 160 - own.row == sum(window.num_rows for window in changed.windows(rule))


@pytest.mark.parametrize("kind", ["json_lines", "parquet", "lines"])
def test_files_that_vanish_or_shrink_while_a_run_reads_them_are_named(tmp_path, kind):
    rule = loss_rule(tiny_llama())

    def collator(rows):
        return {name: torch.ones(len(rows), 1, dtype=torch.long) for name in ("input_ids", "labels")}

    for act in (os.remove, lambda file: os.truncate(file, 400), lambda file: os.truncate(file, 0)):
        data = SOURCES[kind](tmp_path)
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=1,
            max_steps=99,
            use_cpu=True,
            data_streams=2,
            **({} if kind == "parquet" else {"bad_rows": "skip"}),
        )
        batches = TrainBatches(data, args, collator, topology=ALONE)
        [file] = (one for one in tmp_path.iterdir() if one.is_file())
        act(file)
        with pytest.raises(DataFileError, match=rf"FG834.*{file.name}.*cannot be read"):
            list(batches.windows(rule))
        file.unlink(missing_ok=True)


def test_bad_rows_are_the_same_after_a_resume(tmp_path):
    own = reads(tmp_path, "skip", per_device_train_batch_size=4)
    windows = own.windows(loss_rule(tiny_llama()))
    for window in islice(windows, 15):
        own.advance(window)
    state = own.state_dict()
    left = sorted(x for window in windows for x in rows_of(window))
    resumed = reads(tmp_path, "skip", per_device_train_batch_size=4)
    resumed.load_state_dict(state)
    assert left == numbers_read(resumed)
    assert own.bad_rows.count == resumed.bad_rows.count


CHANGES = {
    "length": {"block_size": 12},
    "seed": {"seed": 5},
    "column": {"text_column": "other"},
    "labels": {"document_boundaries": False},
}


@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("workers", [0, 1])
def test_other_rows_at_the_same_places_are_refused_at_a_resume(tmp_path, change, workers):
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps({"text": words(n), "other": words(n + 1)}) + "\n" for n in range(120)))

    def stack(rows):
        return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}

    def batches(*, block_size=24, seed=3, text_column="text", **options):
        stream = json_lines(str(file), text_column, streaming=True, buffer_size=40, seed=seed)
        args = TrainingArguments(
            str(tmp_path), max_steps=99, use_cpu=True, data_streams=2, dataloader_num_workers=workers
        )
        return TrainBatches(tokenize(stream, byte_pairs(), block_size, **options), args, stack, topology=ALONE)

    rule = loss_rule(tiny_llama())
    own = batches()
    windows = own.windows(rule)
    for window in islice(windows, 3):
        own.advance(window)
    state = own.state_dict()
    resumed = batches(**CHANGES.get(change, {}))
    if change == "seed":
        with pytest.raises(CheckpointError, match=r"FG610.*in the order of seed 3, now 2 .* in the order of seed 5"):
            resumed.load_state_dict(state)
        del state["streams"]["order"]  # as in a checkpoint of an earlier release
    resumed.load_state_dict(state)
    if change is None:
        assert torch.equal(next(windows).batches[0]["input_ids"], next(resumed.windows(rule)).batches[0]["input_ids"])
        return
    with pytest.raises(CheckpointError, match=r"FG610.*gives other rows at the same place"):
        list(resumed.windows(rule))
    # A checkpoint of an earlier release has no digests.
    for block in state["blocks"].values():
        del block["digest"], block["raw"]
    resumed = batches(**CHANGES[change])
    resumed.load_state_dict(state)
    assert next(resumed.windows(rule)).num_rows
