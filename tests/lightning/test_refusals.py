"""What a module asks of a trainer and ours does not do is an error that names it, before the first step."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import forgather.lightning as L
from forgather.errors import ForgatherError
from forgather.lightning import hooks, loaders, schedules
from forgather.lightning.logged import LoggedValues
from forgather.ml.types import Topology
from tests.lightning import scripts


def fit(folder, *, changes=None, words=None, data=None):
    model = scripts.regression(L, **(changes or {}))()
    made = scripts.trainer(L, folder, max_epochs=1, **(words or {}))
    made.fit(model, *(data if data is not None else scripts.loaders()))
    return model


@pytest.mark.parametrize("name", sorted(hooks.REFUSED))
def test_a_method_that_would_never_be_called_is_refused(tmp_path, name):
    with pytest.raises(ForgatherError, match=f"FG865.*Regression defines '{name}', which would never be called"):
        fit(tmp_path, changes={name: lambda self, *args, **kwargs: {}})


def test_a_callback_that_stores_its_state_in_a_checkpoint_is_refused(tmp_path):
    class Storing(L.Callback):
        def state_dict(self):
            return {}

    with pytest.raises(ForgatherError, match="FG865.*Storing defines 'state_dict'"):
        fit(tmp_path, words={"callbacks": [Storing()]})


def two_optimizers(self):
    return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


def of_another(self):
    other = torch.optim.SGD(self.parameters(), lr=0.1)
    return [torch.optim.SGD(self.parameters(), lr=0.1)], [torch.optim.lr_scheduler.StepLR(other, 1)]


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


def plateau_of_nothing(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_los"}


def scheduled(**keys):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **keys}]

    return configure_optimizers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"automatic_optimization": False}, "sets automatic_optimization = False"),
        ({"configure_optimizers": two_optimizers}, "returns 2 optimizers, and the loop steps one"),
        ({"configure_optimizers": lambda self: None}, "configure_optimizers returns nothing"),
        ({"configure_optimizers": lambda self: 3}, "configure_optimizers returns a int"),
        ({"configure_optimizers": lambda self: {"optimiser": 3}}, "configure_optimizers returns 'optimiser'"),
        ({"configure_optimizers": of_another}, "a learning rate schedule has another optimizer"),
        ({"configure_optimizers": plateau}, "ReduceLROnPlateau without monitor"),
        ({"configure_optimizers": plateau_of_nothing}, "follows 'val_los', which was not logged.*val_loss"),
        ({"configure_optimizers": scheduled(interval="batch")}, "interval of a learning rate schedule is 'batch'"),
        ({"configure_optimizers": scheduled(frequence=2)}, "has the key 'frequence'.*frequency"),
        ({"training_step": lambda self, batch, batch_idx: 3.0}, "training_step returned 3.0"),
        ({"training_step": lambda self, batch, batch_idx: {"los": 1}}, "a dict without a loss"),
        ({"on_train_batch_start": lambda self, batch, batch_idx: -1}, "on_train_batch_start returned -1"),
        ({"on_fit_start": lambda self: self.log("a", 1.0)}, "log.*'a'.* is called in on_fit_start"),
    ],
)
def test_what_the_loop_does_not_do_is_refused(tmp_path, change, message):
    with pytest.raises(ForgatherError, match=f"(?s)FG865.*{message}"):
        fit(tmp_path, changes=change)


def logging(*args, **options):
    def training_step(self, batch, batch_idx):
        self.log(*args, **options)
        return self.loss(batch)

    return {"training_step": training_step}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (logging("a", torch.ones(2)), "is given 2 values"),
        (logging("a", "high"), "is given a str"),
        (logging("a", {"b": 1.0}), "is given a mapping"),
        (logging("a", 1.0, reduce_fx="median"), "reduce_fx='median'"),
        (logging("a", 1.0, on_step=False, on_epoch=False), "logs nothing"),
        (logging("a", 1.0, enable_graph=True), "enable_graph"),
    ],
)
def test_a_value_that_cannot_be_logged_is_refused(tmp_path, change, message):
    with pytest.raises(ForgatherError, match=f"FG865.*{message}"):
        fit(tmp_path, changes=change)


def test_the_same_value_with_other_options_is_refused():
    values = LoggedValues(is_training=True)
    values.log("training_step", "a", 1.0)
    with pytest.raises(ForgatherError, match="FG865.*called twice in training_step with other options"):
        values.log("training_step", "a", 1.0, on_epoch=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "within an optimizer step of 2"),
        ({"val_check_interval": 9}, "val_check_interval is 9, and an epoch has 4 batches"),
        ({"limit_train_batches": 0.01}, "less than one of 4 batches"),
        ({"devices": 2}, "FG776.*this script is one process, and devices and num_nodes state 2"),
    ],
)
def test_words_that_the_data_or_the_processes_do_not_fit_are_refused(tmp_path, words, message):
    with pytest.raises(ForgatherError, match=message):
        fit(tmp_path, words=words)


def test_scaled_gradients_are_not_read(tmp_path):
    words = {"precision": "16-mixed"}
    with pytest.raises(ForgatherError, match="FG865.*those of 16-mixed are scaled then"):
        fit(tmp_path, words=words, changes={"on_before_optimizer_step": lambda self, optimizer: None})
    with pytest.raises(ForgatherError, match="FG865.*those of 16-mixed are scaled then"):
        fit(tmp_path, words={**words, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"})


def test_a_run_without_data_or_a_second_run_is_refused(tmp_path):
    with pytest.raises(ForgatherError, match="FG802.*there is no training data"):
        fit(tmp_path, data=[])
    model, made = scripts.regression(L)(), scripts.trainer(L, tmp_path, max_epochs=1)
    made.fit(model, *scripts.loaders())
    with pytest.raises(ForgatherError, match="FG865.*fit is called twice"):
        made.fit(model, *scripts.loaders())
    with pytest.raises(ForgatherError, match="FG865.*has no test_step"):
        made.test(model, scripts.loaders()[1])
    model.eval()
    with pytest.raises(ForgatherError, match="FG865.*evaluation mode"):
        scripts.trainer(L, tmp_path, max_epochs=1).fit(model, *scripts.loaders())


SECOND_OF_TWO = Topology(rank=1, world_size=2, device=torch.device("cpu"), is_writer=False, dp_rank=1, dp_size=2)


def test_a_batch_sampler_cannot_be_distributed():
    rows = scripts.rows()
    loader = DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 4, drop_last=False))
    with pytest.raises(ForgatherError, match="FG865.*batch sampler BatchSampler, which cannot be replaced"):
        loaders.prepared(loader, "train", SECOND_OF_TWO)
    weighted = DataLoader(rows, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 30, 30))
    with pytest.raises(ForgatherError, match="FG865.*sampler WeightedRandomSampler, and 2 ranks share its rows"):
        loaders.prepared(weighted, "train", SECOND_OF_TWO)


def test_predictions_of_two_ranks_are_not_repeated():
    loader = loaders.prepared(DataLoader(range(5), batch_size=2), "predict", SECOND_OF_TWO)
    assert [[1, 3]] == [batch.tolist() for batch in loader]


def test_a_schedule_is_read_from_every_form_of_lightning():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"scheduler": schedule, "interval": "step"}
    forms = [optimizer, [optimizer], ([optimizer], []), {"optimizer": optimizer}]
    assert [[]] * 4 == [schedules.read_optimizers(form)[1] for form in forms]
    forms = [([optimizer], [schedule]), {"optimizer": optimizer, "lr_scheduler": schedule}]
    assert ["epoch", "epoch"] == [schedules.read_optimizers(form)[1][0].interval for form in forms]
    forms = [([optimizer], [config]), {"optimizer": optimizer, "lr_scheduler": config}]
    assert ["step", "step"] == [schedules.read_optimizers(form)[1][0].interval for form in forms]


def test_a_class_of_lightning_that_is_not_here_is_answered_at_its_import():
    for name, hint in {"WandbLogger": "leave it out", "RichProgressBar": "ProgressCallback"}.items():
        with pytest.raises(ForgatherError, match="FG865") as error:
            exec(f"from forgather.lightning import {name}", {})
        assert hint in error.value.hint
    assert not hasattr(L, "no_such_name")
