"""Streams whose shards change while a run is stopped: refused with the name of the file, and never other rows in silence."""

import json
import os
import shutil
from itertools import islice

import pytest
import torch
from datasets import IterableDataset, load_dataset

from forgather.errors import CheckpointError
from forgather.ml import TrainingArguments
from forgather.ml.data import json_lines, read_log, text_files
from forgather.ml.data.row_stream import RowStream
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.data_rng import seed_of
from forgather.ml.types import Topology
from tests.matrix import thinned
from tests.ml.fixtures import tiny_llama

ALONE = Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)
RULE = loss_rule(tiny_llama())


def text(number):
    return f"{number:04d} " + "ab" * (number % 7)


def write_json(folder, file, count, first=0):
    lines = [json.dumps({"text": text(first + number)}) for number in range(count)]
    (folder / file).write_text("\n".join(lines) + "\n")


def of_json_lines(folder):
    return json_lines(sorted(map(str, folder.glob("*.jsonl"))), streaming=True, buffer_size=16)


def of_lines(folder):
    return text_files(sorted(map(str, folder.glob("*.jsonl"))), "line", streaming=True, buffer_size=16)


def of_datasets(folder):
    return load_dataset("json", data_files=sorted(map(str, folder.glob("*.jsonl"))), split="train", streaming=True)


def of_shuffled_datasets(folder):
    return of_datasets(folder).shuffle(seed=1, buffer_size=10)


def rows_of_files(files):
    for file in files:
        with open(file) as opened:
            yield from map(json.loads, opened)


def of_generator(folder):
    files = sorted(map(str, folder.glob("*.jsonl")))
    return IterableDataset.from_generator(rows_of_files, gen_kwargs={"files": files})


SOURCES = {
    one.__name__.removeprefix("of_"): one
    for one in (of_json_lines, of_lines, of_datasets, of_shuffled_datasets, of_generator)
}


def collate(rows):
    ids = torch.tensor([[seed_of(*row["text"].encode()) % 2**62] for row in rows])
    return {"input_ids": ids, "labels": ids}


def batches_of(data, folder, *, rows=2, **settings):
    settings = {"max_steps": 999, "use_cpu": True, "data_streams": 2, **settings}
    args = TrainingArguments(f"{folder}/out", per_device_train_batch_size=rows, **settings)
    return TrainBatches(data, args, collate, topology=ALONE)


def ids_of(windows):
    return [window.batches[0]["input_ids"][:, 0].tolist() for window in windows if hasattr(window.batches[0], "keys")]


def stopped(data, folder, steps, **settings):
    """Returns the state of a run after some steps, as a checkpoint stores it, and the rows of the steps after it."""
    own = batches_of(data, folder, **settings)
    windows = own.windows(RULE)
    for window in islice(windows, steps):
        own.advance(window)
    state = json.loads(json.dumps(own.state_dict()))
    return state, ids_of(windows)


def resumed(data, folder, state, **settings):
    own = batches_of(data, folder, **settings)
    own.load_state_dict(state)
    return ids_of(own.windows(RULE))


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        write_json(tmp_path, f"{number}.jsonl", 40, 100 * number)
    return tmp_path


def replace_in(file, old, new):
    """Replaces a text in a file, whose size and time of change stay the same."""
    before = os.stat(file)
    found = file.read_text()
    assert old in found
    file.write_text(found.replace(old, new))
    assert os.stat(file).st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_one_row(folder):
    for file in folder.glob("*.jsonl"):
        replace_in(file, f"{file.stem}02 ", f"{file.stem}92 ")


def edit_at_position(folder):
    for file in folder.glob("*.jsonl"):
        for number in range(16, 40):
            replace_in(file, f"{file.stem}{number} ", f"{file.stem}{number + 50} ")


def exchange_lines(folder):
    for file in folder.glob("*.jsonl"):
        lines = file.read_text().splitlines()
        lines[1], lines[-1] = lines[-1], lines[1]
        file.write_text("\n".join(lines) + "\n")


def append(folder):
    with (folder / "2.jsonl").open("a") as file:
        file.write(json.dumps({"text": "9999"}) + "\n")


def shrink(folder):
    file = folder / "1.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:-3]))


def remove(folder):
    (folder / "1.jsonl").unlink()


def add(folder):
    write_json(folder, "4.jsonl", 40, 400)


def exchange_files(folder):
    (folder / "1.jsonl").rename(folder / "x")
    (folder / "2.jsonl").rename(folder / "1.jsonl")
    (folder / "x").rename(folder / "2.jsonl")


def rename(folder):
    (folder / "1.jsonl").rename(folder / "11.jsonl")


CHANGES = [
    edit_one_row,
    edit_at_position,
    exchange_lines,
    append,
    shrink,
    remove,
    add,
    exchange_files,
    rename,
]


CASES = [(source, change) for source in SOURCES for change in CHANGES]


@pytest.mark.parametrize(
    ("source", "change"),
    thinned(CASES, lambda source, change: source == "datasets" and change in (exchange_lines, shrink)),
)
def test_a_change_is_refused_with_the_name_of_a_file(folder, source, change):
    # Within a shard: the streams have read 20 rows of their first one, and 2 blocks.
    state, _ = stopped(SOURCES[source](folder), folder, 20)
    change(folder)
    with pytest.raises(CheckpointError, match=r"FG610.*training data changed") as refused:
        resumed(SOURCES[source](folder), folder, state)
    assert "jsonl" in str(refused.value) or change in (add, remove)


@pytest.mark.parametrize("source", thinned(list(SOURCES), lambda source: source == "datasets"))
def test_copied_files_and_other_workers_go_on_with_the_same_rows(folder, source):
    state, expected = stopped(SOURCES[source](folder), folder, 20)
    assert expected == resumed(SOURCES[source](folder), folder, state)
    for file in folder.glob("*.jsonl"):
        shutil.copy(file, folder / "copy")
        os.replace(folder / "copy", file)
        os.utime(file, (1, 1))
    assert expected == resumed(SOURCES[source](folder), folder, state)


class Stamped:
    """Shards of numbers with a stamp, which count the rows that are read."""

    num_shards = 2

    def __init__(self, count=30, *, stamp="one", changed=(), bad=(), fails=()):
        self.rows = {shard: list(range(1000 * shard, 1000 * shard + count)) for shard in range(2)}
        for number in changed:
            self.rows[0][number] += 500_000
        self.stamp, self.bad, self.fails = stamp, bad, fails
        self.num_read = 0

    def shard_size(self, shard):
        return 1

    def shard_name(self, shard):
        return f"stamped {shard}"

    def shard_stamp(self, shard):
        return self.stamp

    def open(self, shard, offset=None):
        return StampedReader(self, shard, offset or 0)


class StampedReader:
    goes_on = True

    def __init__(self, owner, shard, offset):
        self.owner, self.shard, self.offset = owner, shard, offset

    def __iter__(self):
        return self

    def __next__(self):
        if self.offset == len(self.owner.rows[self.shard]):
            raise StopIteration
        self.offset += 1
        if self.offset - 1 in self.owner.fails and self.shard == 0:
            raise RuntimeError("no row can be read of this")
        if self.offset - 1 in self.owner.bad:
            raise ValueError("a bad row")
        self.owner.num_read += 1
        return {"text": str(self.owner.rows[self.shard][self.offset - 1])}


class Unstamped(Stamped):
    shard_stamp = None


def stream(shards):
    made = RowStream.of_shards(shards, buffer_size=16, seed=3)
    shards.num_read = 0
    return made


def position(count=30, steps=20, kind=Stamped, **given):
    """Returns the state of a run that is in the second block of 16 rows, and the rows after it."""
    return stopped(stream(kind(count, **given)), "unused", steps, **({"bad_rows": "skip"} if given.get("bad") else {}))


@pytest.mark.parametrize(
    ("now", "found"),
    [
        ({}, None),
        ({"stamp": "two"}, None),
        ({"changed": [3]}, "stamped 0 has other rows before the position"),
        ({"changed": [3], "stamp": ""}, "stamped 0 has other rows before the position"),
        ({"changed": [20]}, "stamped 0 has other rows at the position"),
        ({"changed": [3], "fails": [25]}, "stamped 0 has other rows before the position"),
        ({"count": 10}, "stamped . has other rows before the position"),
    ],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_rows_that_were_read_are_compared(now, found, workers):
    state, expected = position()
    data = stream(Stamped(**now))
    if found is None:
        assert expected == resumed(data, "unused", state, dataloader_num_workers=workers)
        return
    with pytest.raises(CheckpointError, match=rf"FG610.*stream \d gives other rows at the same place: {found}"):
        resumed(data, "unused", state, dataloader_num_workers=workers)


@pytest.mark.parametrize(
    ("kind", "stamp", "is_read"),
    [(Stamped, "one", False), (Stamped, "two", True), (Stamped, "", True), (Unstamped, "", False)],
)
def test_many_rows_are_read_again_only_if_the_shard_was_written_again(monkeypatch, kind, stamp, is_read):
    monkeypatch.setattr(read_log, "ALWAYS_COMPARED", 10)
    state, expected = position(60, 50, kind)
    again = kind(60, stamp=stamp)
    assert expected == resumed(stream(again), "unused", state)
    left = sum(map(len, expected)) + 2 * (50 % 16)
    assert left + 2 * 48 * is_read == again.num_read
    changed = stream(kind(60, stamp=stamp, changed=[3]))
    if is_read:
        with pytest.raises(CheckpointError, match=r"FG610.*stamped 0 has other rows before the position"):
            resumed(changed, "unused", state)
    else:
        assert expected == resumed(changed, "unused", state)


def test_bad_rows_before_the_position_are_neither_a_change_nor_counted_again():
    state, expected = position(bad=[2, 9, 22])
    own = batches_of(stream(Stamped(bad=[2, 9, 22])), "unused", bad_rows="skip")
    own.load_state_dict(state)
    assert expected == ids_of(own.windows(RULE))
    assert 2 * 3 == own.bad_rows.count
    # One more of them: other rows follow.
    with pytest.raises(CheckpointError, match=r"FG610.*has other rows before the position"):
        resumed(stream(Stamped(bad=[2, 8, 9, 22])), "unused", state, bad_rows="skip")


def test_a_change_that_is_allowed_is_a_warning_once(caplog):
    state, _ = position()
    own = batches_of(stream(Stamped(changed=[3])), "unused", allow_changed=["data"])
    own.load_state_dict(state)
    windows = own.windows(RULE)
    for window in islice(windows, 2):
        own.advance(window)
    assert 1 == caplog.text.count("has other rows before the position")
    # The rows as they are now are those of the next resume.
    state, expected = json.loads(json.dumps(own.state_dict())), ids_of(windows)
    assert expected == resumed(stream(Stamped(changed=[3])), "unused", state)


def test_a_checkpoint_of_an_earlier_release_has_none_of_it():
    state, expected = position()
    for block in state["blocks"].values():
        del block["raw"]
    state["fingerprint"]["columns"] = {"shard": state["fingerprint"]["columns"]["shard"]}
    assert expected == resumed(stream(Stamped()), "unused", state)
