"""A run that fails, on one rank or on all, calls the hooks for errors and leaves no rank waiting."""

import os

import pytest

import forgather.lightning as L
from forgather.errors import ForgatherError
from tests.lightning import scripts
from tests.ml.distributed.gang import run_ranks


def test_a_failed_run_calls_on_exception_of_callbacks_and_data_and_can_be_saved(tmp_path):
    heard = []

    class Hearing(L.Callback):
        def on_exception(self, trainer, module, error):
            heard.append(("callback", str(error)))

    class Rows(L.LightningDataModule):
        def train_dataloader(self):
            return scripts.loaders()[0]

        def on_exception(self, error):
            heard.append(("data", str(error)))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 2:
            raise ZeroDivisionError("on purpose")

    model = scripts.regression(L, on_train_batch_end=on_train_batch_end)()
    made = scripts.trainer(L, tmp_path, max_epochs=1, callbacks=[Hearing()])
    with pytest.raises(ZeroDivisionError):
        made.fit(model, datamodule=Rows())
    assert [("callback", "on purpose"), ("data", "on purpose")] == heard
    assert not made.training


@pytest.mark.parametrize(
    "name", ["callback_metrics", "estimated_stepping_batches", "num_training_batches", "num_val_batches"]
)
def test_what_a_run_alone_knows_is_refused_before_it(tmp_path, name):
    made = scripts.trainer(L, tmp_path)
    with pytest.raises(ForgatherError, match=r"FG865.*before fit"):
        getattr(made, name)
    with pytest.raises(ForgatherError, match=r"FG865.*should_stop is set before fit"):
        made.should_stop = True


class Prepared(L.LightningDataModule):
    """Data that is prepared by some of the ranks, each of them on a machine of its own."""

    def __init__(self, folder, **options):
        super().__init__()
        self.folder = folder
        vars(self).update(options)

    def prepare_data(self):
        (self.folder / f"rank-{os.environ['RANK']}").touch()
        if self.fails:
            raise OSError("the disk is full")

    def train_dataloader(self):
        return scripts.loaders()[0]


def of_a_machine(folder, per_node, fails):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    data = Prepared(folder, prepare_data_per_node=per_node, fails=fails)
    made = scripts.trainer(L, folder, max_epochs=1, strategy=L.DDPStrategy(), devices=1, num_nodes=2)
    try:
        made.fit(scripts.regression(L)(), datamodule=data)
    except (OSError, ForgatherError) as error:
        return str(error)


@pytest.mark.parametrize(("per_node", "prepared"), [(True, ["rank-0", "rank-1"]), (False, ["rank-0"])])
def test_data_is_prepared_on_each_machine_or_on_one(tmp_path, per_node, prepared):
    assert [None, None] == run_ranks(2, of_a_machine, tmp_path, per_node, False)
    assert prepared == sorted(file.name for file in tmp_path.glob("rank-*"))


def test_a_failed_preparation_ends_the_ranks_that_wait_for_it(tmp_path):
    first, second = run_ranks(2, of_a_machine, tmp_path, False, True)
    assert "the disk is full" == first
    assert "rank 0" in second
    assert "the disk is full" in second
