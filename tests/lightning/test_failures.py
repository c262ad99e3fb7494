"""A run that fails calls the hooks for errors, and ends its stage."""

import pytest

import forgather.lightning as L
from tests.lightning import scripts


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
