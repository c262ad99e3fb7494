"""What one of two ranks alone wants, measures or reads: both come to the same step, rate and weights, and none waits."""

import logging
import os

import pytest
import torch
from torch.utils.data import DataLoader

import forgather.lightning as L
from forgather.errors import ForgatherError
from tests.lightning import scripts
from tests.ml.distributed.gang import run_ranks


def on_each_rank(folder, changes, words, count=30):
    """Trains on this rank of two; returns what it came to, with a learning rate for each batch."""
    L.seed_everything(7)
    model = scripts.regression(L, **changes)()
    words = {"max_epochs": 3, "num_sanity_val_steps": 0, **words}
    made = scripts.trainer(L, folder, strategy=L.DDPStrategy(), devices=2, **words)
    data = DataLoader(scripts.rows(count), batch_size=4, shuffle=True)
    made.fit(model, data, DataLoader(scripts.rows(18, seed=1), batch_size=8))
    return scripts.outcome(made, model)


def on_two(tmp_path, changes=None, words=None):
    first, second = run_ranks(2, on_each_rank, str(tmp_path), changes or {}, words or {})
    for name in ("step", "epoch", "rates", "weights"):
        assert first[name] == second[name], name
    return first


def stopping(at):
    """A hook in which rank 1 wants to stop; rank 0, which writes checkpoints and logs, does not."""

    def hook(self, *args):
        if self.global_rank == 1 and self.global_step >= at:
            self.trainer.should_stop = True

    return hook


@pytest.mark.parametrize(
    ("hook", "at", "steps"),
    # Four steps are an epoch: a stop at its end begins no further one.
    [
        ("on_before_zero_grad", 1, 2),
        ("on_train_batch_end", 2, 2),
        ("on_validation_epoch_end", 2, 2),
        ("on_train_epoch_end", 4, 4),
    ],
)
def test_a_stop_that_one_rank_asks_for_ends_the_run_of_both(tmp_path, hook, at, steps):
    assert steps == on_two(tmp_path, {hook: stopping(at)}, {"val_check_interval": 2})["step"]


def own_loss(self, batch, batch_idx):
    # It falls on rank 0 and rises on rank 1.
    self.log("val_loss", float(self.current_epoch) * (2 * self.global_rank - 1))


def with_plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def test_a_schedule_follows_the_metric_of_the_main_process(tmp_path):
    found = on_two(tmp_path, {"validation_step": own_loss, "configure_optimizers": with_plateau})
    assert {0.4} == set(found["rates"])


@pytest.mark.parametrize(("mode", "steps"), [("min", 12), ("max", 8)])
def test_early_stopping_and_checkpoints_follow_the_metric_of_the_main_process(tmp_path, mode, steps):
    callbacks = [L.EarlyStopping("val_loss", patience=1, mode=mode), L.ModelCheckpoint(monitor="val_loss", mode=mode)]
    assert steps == on_two(tmp_path, {"validation_step": own_loss}, {"callbacks": callbacks})["step"]


def warned(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("forgather.lightning.steps").addHandler(handler)
    changes = {"validation_step": own_loss}
    on_each_rank(folder, changes, {"callbacks": [L.EarlyStopping("val_loss", patience=9)]})
    return [line for line in lines if "'val_loss'" in line]


def test_a_warning_says_once_that_the_processes_have_different_values(tmp_path):
    first, second = run_ranks(2, warned, str(tmp_path))
    assert [1, 0] == [len(first), len(second)]
    assert "sync_dist=True" in first[0]


def test_the_clock_of_the_main_process_ends_the_run_of_both(tmp_path):
    batches = []

    def seconds():
        # After the first batch, the clock of rank 1 is far ahead.
        return 3600.0 if os.environ["RANK"] == "1" and batches else 0.0

    def on_train_batch_start(self, batch, batch_idx):
        batches.append(batch_idx)

    timer = L.Timer("00:00:00:50", now=seconds)
    assert 12 == on_two(tmp_path, {"on_train_batch_start": on_train_batch_start}, {"callbacks": [timer]})["step"]


def reading(name):
    def hook(self, *args):
        if name == "on_train_epoch_end":
            self.log("at_end", float(self.global_rank), sync_dist=True)
        if self.global_rank == 0:
            self.read = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        # Rank 1 would meet rank 0 here while that is still reducing.
        assert 2 == len(self.all_gather(torch.ones(1)))

    return hook


def logging_step(self, batch, batch_idx):
    loss = self.loss(batch)
    self.log("rank", float(self.global_rank), sync_dist=True, on_epoch=True, on_step=False)
    return loss


def read_on_rank_0(folder, hook):
    seen = []

    def validation_step(self, batch, batch_idx):
        self.log("val_rank", float(self.global_rank), sync_dist=True)

    def on_train_end(self):
        seen.append(getattr(self, "read", None))

    changes = {"training_step": logging_step, "validation_step": validation_step, "on_train_end": on_train_end}
    on_each_rank(folder, {**changes, hook: reading(hook)}, {"max_epochs": 1})
    return seen[0]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("on_train_epoch_end", {"rank": 0.5, "val_rank": 0.5, "at_end": 0.5}),
        ("on_validation_epoch_end", {"val_rank": 0.5}),
    ],
)
def test_the_main_process_alone_may_read_metrics_that_are_those_of_all(tmp_path, hook, expected):
    assert [expected, None] == run_ranks(2, read_on_rank_0, str(tmp_path), hook)


def of_own_samplers(folder, count):
    """The rows that this rank trains on, and predicts, with samplers of the script."""
    rank, seen = int(os.environ["RANK"]), []

    def training_step(self, batch, batch_idx):
        seen.extend(batch[0][:, 0].tolist())
        return self.loss(batch)

    words = {"max_epochs": 1, "use_distributed_sampler": False, "strategy": L.DDPStrategy(), "devices": 2}
    made = scripts.trainer(L, folder, **words)
    model = scripts.regression(L, training_step=training_step)()
    # Not one of torch's, so that it would be refused, or replaced.
    sampler = list(range(rank, count, 2))
    data = DataLoader(scripts.rows(count), batch_size=4, sampler=sampler)
    made.fit(model, data)
    return seen == scripts.rows(count).tensors[0][sampler, 0].tolist()


def test_without_use_distributed_sampler_each_rank_reads_what_its_own_sampler_gives(tmp_path):
    assert [True, True] == run_ranks(2, of_own_samplers, str(tmp_path), 16)


def predicting(folder, count):
    made = scripts.trainer(L, folder, strategy=L.FSDPStrategy(), devices=2)
    model = scripts.regression(L)()
    data = DataLoader(scripts.rows(count).tensors[0], batch_size=1)
    if count % 2:
        with pytest.raises(ForgatherError, match="FG865.*the data of predict has 3, 2 batches on the ranks"):
            made.predict(model, data)
        return None
    return len(made.predict(model, data))


@pytest.mark.parametrize(("count", "expected"), [(4, 2), (5, None)])
def test_sharded_weights_predict_the_same_number_of_batches_on_each_rank(tmp_path, count, expected):
    assert [expected, expected] == run_ranks(2, predicting, str(tmp_path), count)


def of_other_lengths(folder):
    rank = int(os.environ["RANK"])
    model = scripts.regression(L)()
    made = scripts.trainer(L, folder, max_epochs=1, strategy=L.DDPStrategy(), devices=2, num_sanity_val_steps=0)
    sampler = torch.utils.data.DistributedSampler(scripts.rows(), num_replicas=2, rank=rank)
    data = DataLoader(scripts.rows(), batch_size=4 + rank, sampler=sampler)
    with pytest.raises(ForgatherError, match="FG865.*the training data has 4, 3 batches on the ranks"):
        made.fit(model, data)


def test_loaders_of_different_lengths_are_refused_before_one_rank_waits(tmp_path):
    assert [None, None] == run_ranks(2, of_other_lengths, str(tmp_path))
