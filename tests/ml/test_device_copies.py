"""Batches are copied beside the step: the order of reads, copies and waits, and where nothing is read ahead."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from forgather.ml import TrainingArguments
from forgather.ml.data import CausalLMCollator
from forgather.ml.trainer.collation import default_collate
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.device_copies import copied_ahead
from forgather.ml.trainer.loader_options import usual_workers
from forgather.ml.types import PaddingBatch, Window
from tests.ml.distributed.test_shares import ALONE, collate

META, CPU = torch.device("meta"), torch.device("cpu")  # tensors of "meta" can be moved to without a device


class Recorded(torch.Tensor):
    """A tensor that stays what it is when it is moved, and notes what is asked of it."""

    @staticmethod
    def of(number, log):
        made = torch.tensor([number]).as_subclass(Recorded)
        made.log, made.number = log, number
        return made

    def to(self, *args, **kwargs):
        assert (META,) == args and kwargs == {"non_blocking": True}
        self.log.append(f"copy {self.number}")
        return self

    def record_stream(self, stream):
        self.log.append(f"keep {self.number} for {stream.name}")


class Stream:
    """The calls of a stream of torch that copies make."""

    def __init__(self, log, name):
        self.log, self.name, self.count = log, name, 0

    def __enter__(self):
        self.log.append(f"on {self.name}")
        return self

    def __exit__(self, *error):
        self.log.append(f"off {self.name}")

    def record_event(self):
        self.count += 1
        self.log.append(f"event {self.count}")
        return self.count

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def copies(log, number):
    streams = SimpleNamespace(
        Stream=lambda device: Stream(log, "side"),
        accelerator=SimpleNamespace(current_stream=lambda device: Stream(log, "main")),
    )

    def windows():
        for one in range(number):
            log.append(f"read {one}")
            batch = {"input_ids": Recorded.of(one, log), "name": "x"}
            yield Window(batches=[PaddingBatch(batch) if one == 2 else batch], num_valid=1, num_tokens=1, num_rows=1)

    for window in copied_ahead(windows(), META, streams=streams):
        batch = window.batches[0]
        log.append(f"step {(batch.batch if isinstance(batch, PaddingBatch) else batch)['input_ids'].number}")


def test_the_next_batch_is_copied_before_a_step_which_waits_for_its_own():
    log = []
    copies(log, 3)
    copied = ["read {0}", "on side", "copy {0}", "event {1}", "off side"]
    taken = ["main waits for {1}", "keep {0} for main", "step {0}"]
    copy, take = ([[line.format(one, one + 1) for line in part] for one in range(3)] for part in (copied, taken))
    assert [*copy[0], *copy[1], *take[0], *copy[2], *take[1], *take[2]] == log
    for number in (0, 1):
        copies(few := [], number)
        assert number == few.count("step 0") == few.count("main waits for 1")


@pytest.fixture
def rows():
    return Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8}).with_format("torch")


def test_workers_nobody_asked_for_are_those_of_rows_that_draw_nothing(rows):
    cuda = torch.device("cuda")
    assert 2 == usual_workers(rows, CausalLMCollator(), cuda) == usual_workers(rows, default_collate(None), cuda)
    assert 0 == usual_workers(rows, CausalLMCollator(), CPU)
    assert 0 == usual_workers(rows, collate, cuda)  # a collator of the user may mask at random
    assert 0 == usual_workers(rows.with_transform(dict), CausalLMCollator(), cuda)
    assert 0 == usual_workers(list(rows), CausalLMCollator(), cuda)


def test_only_rows_that_workers_read_by_number_are_read_ahead(rows, tmp_path):
    def made(device, data=rows, **given):
        args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, **given)
        return TrainBatches(data, args, CausalLMCollator(), topology=replace(ALONE, device=torch.device(device)))

    assert made("meta").copies_ahead and 2 == made("meta").loader.num_workers
    assert (
        made("meta").loader.persistent_workers and not made("meta", dataloader_num_workers=1).loader.persistent_workers
    )
    assert not made("cpu").copies_ahead and 0 == made("cpu").loader.num_workers
    assert not made("cpu", dataloader_num_workers=2).copies_ahead
    for given in ({"dataloader_num_workers": 0}, {"dataloader_device_prefetch": False}):
        assert not made("meta", **given).copies_ahead
    assert not made("meta", rows.to_iterable_dataset(), dataloader_num_workers=1).copies_ahead


def test_windows_are_read_before_their_step_where_no_collator_draws_a_number(tmp_path):
    stored = [{"x": torch.arange(3.0) + number, "labels": torch.tensor(number)} for number in range(8)]
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2)

    def noisy(found):
        return {"x": torch.stack([row["x"] for row in found]) + torch.rand(3)}

    def early_and_drawn(collator):
        data = TrainBatches(stored, args, collator, topology=ALONE)
        before = torch.get_rng_state()
        # The loader itself draws, of its own generator, when the first window is read.
        assert 4 == len(list(data.windows(SimpleNamespace(prepared=lambda batch: batch, count=len, ignore_index=-100))))
        return data.may_be_read_early, not torch.equal(before, torch.get_rng_state())

    assert (True, False) == early_and_drawn(torch.utils.data.default_collate) == early_and_drawn(default_collate(None))
    assert (False, True) == early_and_drawn(noisy)
