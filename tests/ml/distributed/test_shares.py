"""Every number of processes reads the same rows in the same order, and each row once."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import TrainingArguments
from forgather.ml.losses import SHIFTED, loss_rule
from forgather.ml.model_inputs import DOCUMENTS
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.evaluation import eval_batches
from forgather.ml.types import PaddingBatch, Topology
from tests.matrix import thinned
from tests.ml.fixtures import Regression, rows, tiny_llama

ALONE = Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)


class Stream(torch.utils.data.IterableDataset):
    """Rows in their own order, divided among workers."""

    def __init__(self, count):
        self.base = rows(count)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from self.base if worker is None else self.base[worker.id :: worker.num_workers]


def collate(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def read(data, tmp_path, *, of=1, batch_size, fixed=False, model=None, epochs=2, **given):
    """Returns, for each rank, the windows of two epochs."""
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch_size, max_steps=9, use_cpu=True, seed=3, **given
    )
    rule = loss_rule(model or tiny_llama())
    found = []
    for rank in range(of):
        batches = TrainBatches(
            data, args, collate, topology=replace(ALONE, rank=rank, dp_rank=rank, dp_size=of, fixed_rows=fixed)
        )
        windows = []
        for _ in range(epochs):
            windows += batches.windows(rule)
            batches.next_epoch()
        found.append(windows)
    return found


def own(batch):
    """Rows of a batch that count."""
    if isinstance(batch, PaddingBatch):
        return batch.batch["input_ids"][:0]
    return batch["input_ids"]


def together(windows_of_ranks):
    """Returns each micro-batch of all ranks as one."""
    pairs = zip(
        *[[batch for window in windows for batch in window.batches] for windows in windows_of_ranks], strict=True
    )
    return [torch.cat([own(batch) for batch in batches]) for batches in pairs]


@pytest.mark.parametrize(
    ("kind", "workers", "accumulation"),
    thinned(
        itertools.product(["rows", "stream"], [0, 2], [1, 3]),
        lambda *case: case in (("rows", 2, 3), ("stream", 2, 1), ("stream", 0, 3)),
    ),
)
def test_processes_read_the_batches_of_one_process(kind, workers, accumulation, tmp_path):
    data = {"rows": rows, "stream": Stream}[kind](13)
    given = {"gradient_accumulation_steps": accumulation, "dataloader_num_workers": workers}
    (alone,) = read(data, tmp_path, batch_size=4, **given)
    for count, size in ((2, 2), (4, 1)):
        several = read(data, tmp_path, of=count, batch_size=size, **given)
        for one, other in zip(together([alone]), together(several), strict=True):
            assert torch.equal(one, other)
        for name in ("num_valid", "num_tokens", "num_rows"):
            sums = [sum(getattr(window, name) for window in windows) for windows in zip(*several, strict=True)]
            assert [getattr(window, name) for window in alone] == sums


def test_a_process_without_rows_takes_part_with_weight_zero(tmp_path):
    for data in (rows(5), Stream(5)):
        *_, (*_, last) = read(data, tmp_path, of=2, batch_size=2, epochs=1)
        (batch,) = last.batches
        assert isinstance(batch, PaddingBatch)
        assert (0, 0, 0) == (last.num_valid, last.num_tokens, last.num_rows)
        model = tiny_llama()
        loss = loss_rule(model).total(model, to_device(batch, torch.device("cpu")))
        loss.backward()
        assert 0 == loss.item()
        assert {0.0} == {float(parameter.grad.abs().max()) for parameter in model.parameters()}


@pytest.mark.parametrize("loss_fn", [None, nn.MSELoss()])
def test_a_weight_of_zero_needs_no_label_that_can_be_ignored(loss_fn):
    torch.manual_seed(0)
    if loss_fn is None:
        model, batch = Regression(), {"x": torch.randn(2, 4), "y": torch.randn(2)}
    else:
        model, batch = nn.Linear(4, 1), {"input": torch.randn(2, 4), "labels": torch.randn(2, 1)}
    rule = loss_rule(model, loss_fn)
    loss = rule.total(model, rule.prepared(PaddingBatch(batch)))
    loss.backward()
    assert 0 == loss.item() == rule.count(PaddingBatch(batch))
    assert {0.0} == {float(parameter.grad.abs().max()) for parameter in model.parameters()}


@pytest.mark.parametrize("data", [rows(5), Stream(5)], ids=["rows", "stream"])
def test_batches_of_one_size_are_filled_up_with_rows_whose_labels_are_ignored(data, tmp_path):
    (alone,) = read(data, tmp_path, batch_size=4)
    several = read(data, tmp_path, of=2, batch_size=2, fixed=True)
    assert {2} == {len(batch["input_ids"]) for windows in several for window in windows for batch in window.batches}
    assert {2} == {batch[DOCUMENTS].rows for windows in several for window in windows for batch in window.batches}
    for name in ("num_valid", "num_tokens", "num_rows"):
        sums = [sum(getattr(window, name) for window in windows) for windows in zip(*several, strict=True)]
        assert [getattr(window, name) for window in alone] == sums
    last = several[1][-1].batches[0][SHIFTED]
    assert torch.equal(torch.full_like(last, -100), last)


def test_a_loss_without_a_label_to_ignore_cannot_be_filled_up(tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
    batches = TrainBatches(rows(6), args, collate, topology=replace(ALONE, fixed_rows=True))
    with pytest.raises(TrainingError, match=r"FG852.*the last micro-batch has 2 of 4 rows"):
        batches.windows(loss_rule(nn.Linear(4, 1), nn.MSELoss()))
    numbers = [{"x": torch.ones(4), "labels": torch.tensor(0.5)}] * 3
    evaluated = eval_batches(numbers, args, collate, replace(ALONE, fixed_rows=True))
    assert [3] == [ready.num_rows for ready in evaluated.read(loss_rule(Regression()))], "a forward pass takes any size"


def test_rows_that_are_split_already_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": [1, 2, 3, 4]}).to_iterable_dataset()
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True)
    with pytest.raises(TrainingError, match=r"FG853.*this is part 1 of 2"):
        TrainBatches(split_dataset_by_node(stream, 1, 2), args, collate, topology=ALONE)


def test_a_batch_of_all_replicas_that_is_larger_than_the_data_is_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
    with pytest.raises(TrainingError, match=r"FG804.*is 4 on each of 2 replicas.*has 6 rows.*to 3 or less"):
        TrainBatches(rows(6), args, collate, topology=replace(ALONE, dp_size=2))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_evaluation_reads_each_row_once(count, tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, use_cpu=True)
    rule, found = loss_rule(tiny_llama()), 0
    for data in (rows(7), Stream(7)):
        found = 0
        for rank in range(count):
            topology = replace(ALONE, dp_rank=rank, dp_size=count)
            found += sum(ready.num_rows for ready in eval_batches(data, args, collate, topology).read(rule))
        assert 7 == found


def test_a_position_is_that_of_the_row_where_micro_batches_changed(tmp_path, caplog):
    def position(batch_size, of, state=None):
        args = TrainingArguments(str(tmp_path), per_device_train_batch_size=batch_size, use_cpu=True)
        batches = TrainBatches(rows(24), args, collate, topology=replace(ALONE, dp_size=of))
        if state is None:
            batches.row = 8
        else:
            batches.load_state_dict(state)
        return batches.state_dict()

    before = position(4, 1)
    assert 2 == position(2, 2, before)["batch"] and 2 == position(1, 4, before)["batch"]
    assert 8 == position(4, 1, {name: before[name] for name in ("epoch", "batch", "seed")})["row"]
    assert "written by an earlier release, which recorded no digests" in caplog.text
    assert (8, 4) == (position(2, 1, before)["row"], position(2, 1, before)["batch"])
    assert "an optimizer step uses 2 rows, and used 4 before the checkpoint" in caplog.text
    assert (8, 2) == (position(5, 1, before)["row"], position(5, 1, before)["batch"])
    assert "the training data changed" not in caplog.text
    with pytest.raises(CheckpointError, match=r"\[FG610\] the training data changed .*: num_rows 25, now 24"):
        position(4, 1, before | {"num_rows": 25})
