"""A resumed run goes on with the same data, or not at all: any change of count, content or order is named."""

import copy
import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset

from forgather.errors import CheckpointError, DistributedError
from forgather.ml import Trainer
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.rng import capture_rng
from forgather.ml.data import tokenize
from forgather.ml.distributed import collectives
from forgather.ml.trainer import data_fingerprint as module
from forgather.ml.trainer.data_fingerprint import (
    SAMPLED,
    Fingerprint,
    fingerprint,
    refuse_other_data,
    row_digest,
    sampled_rows,
)
from tests.ml.fixtures import StopAt, rows, tiny_llama
from tests.ml.test_data_packing import letters  # noqa: F401 - a fixture

ALONE = {"num_workers": 0}
TEXTS = ["abcde" * (3 + number % 4) for number in range(40)]


def packed(letters, place, *, texts=TEXTS, block_size=12):  # noqa: F811
    return tokenize(Dataset.from_dict({"text": texts}), letters, block_size, cache_dir=place)


class Stream(IterableDataset):
    def __init__(self, found):
        self.found = found

    def __iter__(self):
        return iter(self.found)


def trainer(settings, data, *callbacks, **given):
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **given}
    return Trainer(tiny_llama(num_hidden_layers=1), settings(**given), train_dataset=data, callbacks=callbacks)


def go_on(settings, before, now, **given):
    trainer(settings, before, StopAt(3)).train()
    later = trainer(settings, now, **given)
    later.train(resume_from_checkpoint=True)
    return later


def other_letters(letters):  # noqa: F811
    found = copy.deepcopy(letters)
    found.add_tokens(["ab"])
    return found


CHANGES = {
    "a row more": (lambda data: rows(13), "num_rows 12, now 13"),
    "a row less": (lambda data: data[:-1], "num_rows 12, now 11"),
    "one row": (
        lambda data: [*data[:5], {**data[5], "labels": data[5]["labels"] + 1}, *data[6:]],
        "1 of 12 compared rows differ in 'labels', the first of them row 5",
    ),
    "the order": (lambda data: data[::-1], "12 of 12 compared rows are the same in another order"),
    "a column": (lambda data: [{**row, "position_ids": row["labels"]} for row in data], "column 'position_ids' is new"),
    "no labels": (lambda data: [{"input_ids": row["input_ids"]} for row in data], "the column 'labels' is gone"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_rows_are_refused_by_what_has_changed(settings, name):
    change, said = CHANGES[name]
    with pytest.raises(CheckpointError, match=rf"\[FG610\] the training data changed .*{said}.*--allow-changed data"):
        go_on(settings, rows(12), change(rows(12)))


@pytest.mark.parametrize("name", ["one row", "a row less"])
def test_other_rows_are_taken_where_they_are_meant(settings, caplog, name):
    change, said = CHANGES[name]
    assert 6 == go_on(settings, rows(12), change(rows(12)), allow_changed=["data"]).state.global_step
    assert f"{said}" in caplog.text and "rows may be read twice" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_seed": 7}, "seed 42, now 7"),
        ({"train_sampling_strategy": "sequential"}, "shuffled True, now False"),
    ],
)
def test_another_order_of_the_same_rows_is_refused(settings, given, said):
    with pytest.raises(CheckpointError, match=rf"FG610.*{said}"):
        go_on(settings, rows(12), rows(12), **given)


def test_the_same_data_from_another_place_go_on(settings, letters, tmp_path):  # noqa: F811
    one, two = (packed(letters, tmp_path / name) for name in ("one", "two"))
    assert one.cache_files != two.cache_files
    later = go_on(settings, one, two)
    assert 6 == later.state.global_step
    facts = read_manifest(tmp_path / "out/checkpoint-6").facts["data"]
    assert facts == fingerprint(one, ALONE).facts and len(one) == facts["rows"]


@pytest.mark.parametrize("kind", ["tokenizer", "block_size", "documents", "another document"])
def test_what_makes_packed_rows_is_part_of_them(letters, tmp_path, kind):  # noqa: F811
    before = fingerprint(packed(letters, tmp_path), ALONE)
    now = {
        "tokenizer": lambda: packed(other_letters(letters), tmp_path),
        "block_size": lambda: packed(letters, tmp_path, block_size=10),
        "documents": lambda: packed(letters, tmp_path, texts=TEXTS[::-1]),
        "another document": lambda: packed(letters, tmp_path, texts=["z" + TEXTS[0][1:], *TEXTS[1:]]),
    }[kind]()
    assert [] != before.differences(fingerprint(now, ALONE))
    assert [] == before.differences(fingerprint(packed(letters, tmp_path), ALONE))


@pytest.mark.parametrize("change", ["content", "order", "same"])
def test_a_stream_is_known_by_its_first_rows(settings, change):
    data = rows(12)
    now = {"content": rows(12, seed=1), "order": data[::-1], "same": list(data)}[change]
    if change == "same":
        assert 6 == go_on(settings, Stream(data), Stream(now)).state.global_step
        return
    said = {"content": "compared rows differ", "order": "."}[change]
    with pytest.raises(CheckpointError, match=rf"FG610.*{said}"):
        go_on(settings, Stream(data), Stream(now))


def test_a_stream_of_other_rows_is_taken_where_that_is_meant(settings, caplog):
    go_on(settings, Stream(rows(12)), Stream(rows(12, seed=1)), allow_changed=["data"])
    assert "compared rows differ" in caplog.text


def test_a_checkpoint_of_an_earlier_release_says_that_its_rows_are_not_known(settings, caplog):
    batches = trainer(settings, rows(12))._train_batches()
    state = batches.state_dict()
    del state["fingerprint"]
    batches.load_state_dict(state)
    assert "written by an earlier release, which recorded no digests" in caplog.text


def test_packed_rows_of_an_earlier_release_are_made_again_or_refused(settings, letters, tmp_path):  # noqa: F811
    rows_of = {
        bounds: tokenize(
            Dataset.from_dict({"text": TEXTS}), letters, 12, cache_dir=tmp_path, document_boundaries=bounds
        )
        for bounds in (True, False)
    }
    state = trainer(settings, rows_of[False])._train_batches().state_dict()
    del state["fingerprint"]
    trainer(settings, rows_of[False])._train_batches().load_state_dict(state)
    # A model that takes no positions does not get them; their labels tell.
    for found in (rows_of[True], rows_of[True].select_columns(["input_ids", "labels"])):
        with pytest.raises(CheckpointError, match="FG610.*document_boundaries: false"):
            trainer(settings, found)._train_batches().load_state_dict(state)
    trainer(settings, rows_of[True], allow_changed=["data"])._train_batches().load_state_dict(state)


class Drawing:
    """Rows that draw: from the global numbers, from numbers of their own, or both."""

    def __init__(self, content, own):
        self.content, self.own = content, own

    def __len__(self):
        return 20

    def __getitem__(self, index):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        entropy = float(np.random.default_rng().random()) if self.own else 0.0
        return {"x": self.content[index] + drawn[0] + entropy, "y": self.content[index], "z": drawn}


def test_rows_that_draw_are_compared_as_far_as_they_are_repeatable():
    content = [float(number) for number in range(20)]
    other = [*content[:-1], -1.0]
    before = capture_rng()
    seeded, own = (fingerprint(Drawing(content, own), ALONE) for own in (False, True))
    assert str(before) == str(capture_rng())
    assert ({"x", "y", "z"}, ()) == (set(seeded.columns), own.columns["x"])
    for kind, known in ((False, seeded), (True, own)):
        assert [] == known.differences(fingerprint(Drawing(content, kind), ALONE))
        assert [] != known.differences(fingerprint(Drawing(other, kind), ALONE))
    assert [] == Fingerprint(20, {"x": own.columns["x"]}).differences(Fingerprint(20, {"x": seeded.columns["x"]}))


class Opened:
    """Rows of a file that is opened by whoever reads first, as those of large files are."""

    def __init__(self, file):
        self.file, self.handle = file, None

    def __len__(self):
        return 200

    def __getitem__(self, index):
        self.handle = self.handle or open(self.file, "rb")  # noqa: SIM115
        self.handle.seek(index)
        return {"x": self.handle.read(1)[0]}


def test_rows_that_workers_read_are_sampled_in_a_worker(tmp_path):
    (tmp_path / "rows").write_bytes(bytes(range(200)))
    data = Opened(tmp_path / "rows")
    in_worker = fingerprint(data, {"num_workers": 2})
    assert data.handle is None
    assert in_worker == fingerprint(data, ALONE) and data.handle is not None
    data.handle.close()


def test_slow_rows_and_rows_that_cannot_be_read_are_left_out(monkeypatch):
    class Broken(list):
        def __getitem__(self, index):
            if index == 0:
                raise OSError
            return super().__getitem__(index)

    data = [{"x": number} for number in range(1000)]
    whole = fingerprint(data, ALONE)
    seconds = itertools.count(0, 0.25)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    known = fingerprint(Broken(data), ALONE)
    assert 1 + 2 / 0.25 == len(known.columns["x"]) and known.columns["x"][0] is None
    assert [] == known.differences(whole) == whole.differences(known)
    assert [] != known.differences(fingerprint([{"x": -number} for number in range(1000)], ALONE))


def test_the_sample_spreads_over_all_rows_and_has_both_ends():
    found = sampled_rows(10**6)
    assert SAMPLED == len(set(found)) and {0, 10**6 - 1} <= set(found)
    assert {number // 250_000 for number in found} == {0, 1, 2, 3}


@dataclasses.dataclass
class Point:
    x: int
    y: list


class Image:
    mode, size = "L", (2, 2)

    def __init__(self, data):
        self.data = data

    def tobytes(self):
        return self.data


EQUAL = [
    ([1, 2, 3], torch.tensor([1, 2, 3]), np.array([1, 2, 3], dtype=np.int16), (1, 2, 3), range(1, 4)),
    ([[1.5, 2.0]], torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16), np.array([[1.5, 2.0]])),
    ("/home/a/cache/7.png", "/data/7.png"),
    ({"a": 1, "b": [None, "c"]}, {"b": (None, "c"), "a": 1}),
    (Point(1, [2]), Point(1, [2])),
    (Image(b"abcd"), Image(b"abcd")),
    ({"é", "b"}, {"b", "é"}),
    (np.array(["a", None], dtype=object), ["a", None]),
]
OTHER = [
    [1, 2],
    [2, 1],
    [[1, 2]],
    [1.0, 2.0],
    "12",
    b"12x",
    None,
    {"a": 1},
    {"a": 2},
    {"b": 1},
    Point(1, [2]),
    Point(2, [1]),
    Image(b"abcd"),
    Image(b"abce"),
    [["a"], ["b", "c"]],
    [["a", "b"], ["c"]],
    torch.zeros(400_000),
    torch.zeros(400_001),
    torch.cat([torch.zeros(399_999), torch.ones(1)]),
    "x" * 3_000_000,
    "x" * 2_999_999 + "y",
]


@pytest.mark.parametrize("equal", EQUAL, ids=lambda values: str(type(values[0]).__name__))
def test_equal_content_has_one_digest_whatever_holds_it(equal):
    assert 1 == len({row_digest(value) for value in equal}) and row_digest(equal[0]) is not None


def test_other_content_has_another_digest():
    assert len(OTHER) == len({row_digest(value) for value in OTHER})


def test_nothing_is_said_of_what_cannot_be_known():
    deep = []
    for _ in range(100):
        deep = ["x", deep]
    assert {None} == {row_digest(value) for value in (object(), [object()], deep, 10**30, lambda: 0)}


def test_many_columns_are_few_digests():
    known = fingerprint([{f"c{number:03}": number for number in range(500)}] * 3, ALONE)
    other = fingerprint([{f"c{number:03}": number % 499 for number in range(500)}] * 3, ALONE)
    assert len(known.columns) <= 32 and [] != known.differences(other)
    assert known == Fingerprint.from_state(known.to_state())


def test_processes_that_hold_other_rows_are_refused(monkeypatch):
    one, other = (fingerprint(rows(12, seed=seed), ALONE) for seed in range(2))
    monkeypatch.setattr(collectives, "all_gather", lambda own: [one, own])
    refuse_other_data("the training data", one)
    with pytest.raises(DistributedError, match="FG855.*rank 0 to rank 1, 12 of 12 compared rows differ"):
        refuse_other_data("the training data", other)
