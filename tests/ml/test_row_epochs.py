"""Rows that are others in each epoch are those of the epoch of the training, whatever process reads them."""

import pytest
from transformers import Trainer as TransformersTrainer

from forgather.ml.data.row_epoch import EpochDataset, reading_epoch
from forgather.ml.trainer.hf import HFTrainer
from tests.matrix import thinned
from tests.ml.epoch_cases import DATA_SETS, EPOCHS, ROWS, STEP, key_of, read_by, readings

PERSISTENT = 3


@pytest.fixture(autouse=True)
def workers_end_at_once(monkeypatch):
    # torch waits so many seconds for each worker before it ends it, and persistent workers of Accelerate do not leave.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


QUICK = {
    ("ours", "images", PERSISTENT),
    ("ours", "a subset of images", 0),
    ("transformers", "images", PERSISTENT),
    ("transformers", "noise", 0),
}


@pytest.mark.parametrize(
    ("kind", "name", "workers"),
    thinned(
        [(kind, name, workers) for kind in ("ours", "transformers") for name in DATA_SETS for workers in (0, 2, 3)],
        lambda *case: case in QUICK,
    ),
)
def test_rows_are_those_of_the_epoch(kind, name, workers, tmp_path):
    known, data = readings(name), DATA_SETS[name]

    trained, evaluated = read_by(kind, tmp_path, data, workers)
    again, _ = read_by(kind, tmp_path, data, workers, resume=str(tmp_path / f"checkpoint-{STEP}"))

    found = [known[key] for key in trained]
    for epoch in range(EPOCHS):
        here = found[epoch * ROWS : (epoch + 1) * ROWS]
        assert [(epoch, row) for row in range(ROWS)] == sorted(here)
    assert found[2 * STEP :] == [known[key] for key in again]
    if name != "set_epoch":  # whose state Accelerate sets for an evaluation
        assert {(0, row) for row in range(ROWS)} == {known[key] for key in evaluated}
    by_hand = data()
    if isinstance(by_hand, EpochDataset):
        with reading_epoch(2):
            assert (2, 1) == known[key_of(by_hand[1]["pixel_values"])]


def test_rows_of_another_epoch_are_noticed(tmp_path, monkeypatch):
    # The loader of transformers: an epoch that is set in one process is not seen in another one.
    monkeypatch.setattr(HFTrainer, "get_train_dataloader", TransformersTrainer.get_train_dataloader)
    known = readings("set_epoch")
    trained, _ = read_by("transformers", tmp_path, DATA_SETS["set_epoch"], PERSISTENT)
    assert {0} == {known[key][0] for key in trained}
