"""Reads that fail for a passing reason: rows neither lost nor doubled, the same numbers, counted; the others at once."""

import logging

import datasets
import pytest
import torch
from PIL import UnidentifiedImageError
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from forgather.ml import Trainer
from forgather.ml.trainer import read_retries
from forgather.ml.trainer.read_retries import is_passing
from tests.matrix import thinned
from tests.ml.fixtures import Noisy, assert_same_weights, rows, tiny_llama, weights

ERRORS = [OSError("stale handle"), ConnectionResetError("reset"), TimeoutError("slow")]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(read_retries, "FIRST_PAUSE_SECONDS", 0.001)


class Failing(Noisy):
    """Rows of which some fail a number of times, in whichever process reads them, and draw numbers before they do."""

    def __init__(self, times, errors=ERRORS):
        super().__init__()
        self.times, self.errors = times, errors
        self.left = torch.zeros(8, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if self.left[index] > 0:
            self.left[index] -= 1
            raise self.errors[int(self.left[index]) % len(self.errors)]
        return found


class Arm(TrainerCallback):
    """Makes rows fail from the beginning of the training on: their digests have been taken before."""

    def __init__(self, data):
        self.data = data

    def on_train_begin(self, args, state, control, **kwargs):
        self.data.left[[1, 4, 7]] = self.data.times


class Positioned(IterableDataset):
    """A stream that breaks after some rows, and can say its position."""

    def __init__(self, broken=(), error=ConnectionError):
        self.rows, self.start, self.place = rows(16), 0, 0
        self.left, self.error = dict.fromkeys(broken, 2), error

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]

    def __iter__(self):
        self.place, self.start = self.start, 0
        while self.place < len(self.rows):
            row = self.rows[self.place]
            self.place += 1
            if self.left.get(self.place, 0):
                self.left[self.place] -= 1
                raise self.error("broken")
            yield row


def trained(settings, data, **given):
    args = {"max_steps": 6, "logging_strategy": "no", **given}
    callbacks = [Arm(data)] if isinstance(data, Failing) else []
    trainer = Trainer(tiny_llama(attention_dropout=0.1), settings(**args), train_dataset=data, callbacks=callbacks)
    result = trainer.train()
    return weights(trainer.model), result.metrics


@pytest.mark.parametrize("workers", thinned([0, 2], lambda workers: not workers))
def test_rows_are_those_of_a_data_set_that_never_fails(settings, caplog, workers):
    caplog.set_level(logging.WARNING)
    expected, _ = trained(settings, Noisy(), dataloader_num_workers=workers)
    found, metrics = trained(settings, Failing(3), dataloader_num_workers=workers, data_retries=3)
    assert_same_weights(expected, found)
    assert 9 == metrics["data_retries"]  # three rows, three times each, in the first epoch
    if not workers:
        assert "it is repeated in 0.001 s, 1 of 3" in caplog.text and "it is repeated in 0.004 s, 3 of 3" in caplog.text


def test_one_failure_too_many_is_the_error_of_the_read(settings):
    with pytest.raises((OSError, ConnectionError), match="slow|reset|stale"):
        trained(settings, Failing(3), data_retries=2)
    with pytest.raises(OSError, match="slow"):
        trained(settings, Failing(3))


def test_an_error_about_a_row_is_not_repeated(settings):
    data = Failing(1, [ValueError("bad row")])
    with pytest.raises(ValueError, match="bad row"):
        trained(settings, data, data_retries=3)
    assert not is_passing(UnidentifiedImageError("x"))
    assert all(map(is_passing, ERRORS))


def test_a_stream_goes_on_from_its_position(settings):
    expected, _ = trained(settings, Positioned())
    found, metrics = trained(settings, Positioned(broken=[1, 6, 12]), data_retries=2)
    assert_same_weights(expected, found)
    assert 6 == metrics["data_retries"]
    with pytest.raises(ConnectionError, match="broken"):
        trained(settings, Positioned(broken=[6]), data_retries=1)


def test_a_stream_without_a_position_is_not_restarted(settings):
    def broken():
        yield from rows(3)
        raise TimeoutError("gone")

    class Plain(IterableDataset):
        def __iter__(self):
            return broken()

    with pytest.raises(TimeoutError) as caught:
        trained(settings, Plain(), data_retries=3)
    assert "after row 3 is not repeated: Plain cannot say its position" in "".join(caught.value.__notes__)


def unsteady(state, broken=1):
    """A generator of `datasets` of which a shard fails some times when it is opened."""

    def generate(shards):
        for shard in shards:
            if shard == broken and state["left"]:
                state["left"] -= 1
                raise ConnectionError("no route")
            for number in range(4):
                yield {"value": 4 * shard + number}

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


def test_a_stream_of_datasets_goes_on_from_its_position():
    retries = read_retries.Retries(2)
    found = [row["value"] for row in read_retries.retried_rows(unsteady({"left": 2}), retries)]
    assert list(range(12)) == found
    assert 2 == retries.count
    # Rows in a shuffle buffer would be lost, so that one is not continued.
    with pytest.raises(ConnectionError) as caught:
        list(read_retries.retried_rows(unsteady({"left": 2}).shuffle(buffer_size=3), read_retries.Retries(2)))
    assert "shuffle buffer" in "".join(caught.value.__notes__)


def values(stream, retries):
    return [row["value"] for row in read_retries.retried_rows(stream, retries)]


@pytest.mark.parametrize("shard", [0, 1])
def test_an_iteration_after_one_that_failed_has_all_rows(shard):
    """An evaluation reads its stream again and again, each time in the same epoch."""
    left = {"left": 0}
    stream = unsteady(left, shard)
    for failures in (0, 1, 2, 0):
        left["left"] = failures
        assert list(range(12)) == values(stream, read_retries.Retries(2)), failures
    assert list(range(12)) == [row["value"] for row in stream]


def test_an_evaluation_is_that_of_a_stream_that_never_fails(settings):
    def losses(stream, **given):
        args = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, **given}
        trainer = Trainer(tiny_llama(), settings(**args), train_dataset=rows(), eval_dataset=stream)
        trainer.train()
        return [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]

    assert losses(Positioned()) == losses(Positioned(broken=[1, 6]), data_retries=2)


@pytest.mark.parametrize("mixed", [datasets.interleave_datasets, datasets.concatenate_datasets])
def test_a_mixture_with_a_shuffle_buffer_is_not_restarted(mixed):
    plain = unsteady({"left": 0})
    assert read_retries._why_not(mixed([plain, plain])) is None
    assert "shuffle buffer" in read_retries._why_not(mixed([plain, plain.shuffle(seed=1, buffer_size=4)]))
