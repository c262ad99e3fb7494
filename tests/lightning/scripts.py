"""Small scripts of Lightning, each a function of the module `L` that it imports as `lightning`.

`scripts/oracles/lightning_runs.py` runs them with Lightning itself and records what they return; the tests run them with
`forgather.lightning`. A script returns plain numbers and names: losses of each batch, learning rates, hooks, metrics.
"""

import contextlib
import json
import os
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_progress_bar": False}
LIGHTNINGS = {"enable_model_summary": False, "enable_checkpointing": False}
"""Words that only keep Lightning itself quiet."""

HOOKS = [
    "setup",
    "configure_model",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    *(
        f"on_{stage}_{name}"
        for stage in ("validation", "test")
        for name in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ),
]


def rows(count=30, seed=0):
    """Rows of a regression, the same in every process and with every tool."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def regression(L, **changes):
    """Returns a class of modules that record the losses of their batches and the learning rate of each of them."""

    class Regression(L.LightningModule):
        def __init__(self, lr=0.05, dropout=0.3):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))
            self.losses, self.rates, self.validated = [], [], []

        def forward(self, inputs):
            return self.net(inputs)

        def loss(self, batch):
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.validated.append((self.trainer.sanity_checking, loss.item()))
            self.log("val_loss", loss)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    for name, change in changes.items():
        setattr(Regression, name, change)
    return Regression


def loaders(batch_size=8, shuffle=True, validation=True, **options):
    train = DataLoader(rows(), batch_size=batch_size, shuffle=shuffle, **options)
    return [train, DataLoader(rows(18, seed=1), batch_size=8)] if validation else [train]


def trainer(L, folder, **words):
    """Returns the trainer of a script. Lightning itself gets further words, which keep it quiet."""
    further = LIGHTNINGS if L.__name__ == "lightning" else {}
    return L.Trainer(default_root_dir=str(folder), **{**QUIET, **further, **words})


def outcome(made, model):
    """What a run came to, as plain values."""
    return {
        "losses": model.losses,
        "rates": model.rates,
        "validated": [[bool(sanity), loss] for sanity, loss in model.validated],
        "metrics": {name: float(value) for name, value in sorted(made.callback_metrics.items())},
        "logged": {name: float(value) for name, value in sorted(made.logged_metrics.items())},
        "epoch": made.current_epoch,
        "step": made.global_step,
        "weights": [float(whole(weight).double().sum()) for weight in model.parameters()],
    }


def whole(weight):
    return weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach()


def fitted(L, folder, *, words=None, changes=None, data=None, **hparams):
    L.seed_everything(7)
    model = regression(L, **(changes or {}))(**hparams)
    made = trainer(L, folder, **{"max_epochs": 2, **(words or {})})
    made.fit(model, *(data if data is not None else loaders()))
    return outcome(made, model)


def adamw(L, folder):
    return fitted(L, folder)


def schedule_per_step(L, folder):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return fitted(L, folder, changes={"configure_optimizers": configure_optimizers})


def schedule_with_frequency(L, folder):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        slow = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        fast = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": slow, "interval": "step", "frequency": 2}, fast]

    changes = {"configure_optimizers": configure_optimizers}
    return fitted(L, folder, changes=changes, words={"max_epochs": 3, "accumulate_grad_batches": 2})


def schedule_per_epoch(L, folder):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)]

    return fitted(L, folder, changes={"configure_optimizers": configure_optimizers}, words={"max_epochs": 3})


def plateau(L, folder):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    return fitted(L, folder, changes={"configure_optimizers": configure_optimizers}, words={"max_epochs": 5})


def accumulation(L, folder):
    return fitted(L, folder, words={"accumulate_grad_batches": 3, "max_epochs": 3})


def clipped_by_norm(L, folder):
    return fitted(L, folder, words={"gradient_clip_val": 0.05})


def clipped_by_value(L, folder):
    return fitted(L, folder, words={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})


def mixed_precision(L, folder):
    return fitted(L, folder, words={"precision": "bf16-mixed", "gradient_clip_val": 0.5})


def checked_within_epochs(L, folder):
    words = {"val_check_interval": 2, "limit_val_batches": 2, "limit_train_batches": 3, "max_epochs": 3}
    return fitted(L, folder, words={**words, "val_check_interval": 0.5, "num_sanity_val_steps": 1})


def checked_across_epochs(L, folder):
    words = {"val_check_interval": 3, "check_val_every_n_epoch": None, "num_sanity_val_steps": -1}
    return fitted(L, folder, words={**words, "max_epochs": 3})


def trial(L, folder):
    return fitted(L, folder, words={"fast_dev_run": 2})


def overfitted(L, folder):
    return fitted(L, folder, words={"overfit_batches": 2, "max_epochs": 3})


def limited_steps(L, folder):
    return fitted(L, folder, words={"max_steps": 6, "max_epochs": 5})


def batches_left_out(L, folder):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return None if batch_idx == 1 else {"loss": loss, "further": 3}

    return fitted(L, folder, changes={"training_step": training_step})


def stopped(L, folder):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 5:
            self.trainer.should_stop = True

    return fitted(L, folder, changes={"on_train_batch_end": on_train_batch_end}, words={"max_epochs": 4})


def stream(L, folder):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([tuple(row) for row in rows(20)])

    data = [DataLoader(Rows(), batch_size=4), DataLoader(rows(18, seed=1), batch_size=8)]
    return fitted(L, folder, data=data, words={"max_steps": 7, "accumulate_grad_batches": 2})


def reductions(L, folder):
    """Each reduction, with and without a value per step, in several hooks; and two loaders."""
    seen = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        for name in ("mean", "sum", "max", "min"):
            self.log(name, float(batch_idx + 1) * 1.5, on_step=False, on_epoch=True, reduce_fx=name)
        self.log_dict({"weighted": loss, "number": batch_idx}, on_epoch=True, on_step=False, batch_size=batch_idx + 1)
        return loss

    def on_train_epoch_end(self):
        self.log("at_end", float(self.current_epoch))
        seen.append({name: float(of) for name, of in sorted(self.trainer.callback_metrics.items())})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("loss_of_outputs", outputs["loss"])
        seen.append({name: float(of) for name, of in sorted(self.trainer.callback_metrics.items())})

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch))
        self.log("val_sum", 1.0, reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.log("val_end", 2.0)
        seen.append({name: float(of) for name, of in sorted(self.trainer.callback_metrics.items())})

    changes = {name: of for name, of in locals().items() if callable(of) and name != "L"}
    train, validation = loaders()
    data = [train, [validation, DataLoader(rows(10, seed=2), batch_size=4)]]
    return {**fitted(L, folder, changes=changes, data=data), "seen": seen}


def hooks(L, folder):
    """All hooks of a run of two epochs, and of a test, with the epoch and the step at which they were called."""
    calls = []

    def noting(name, who):
        def hook(self, *args, **kwargs):
            made = self.trainer if who == "module" else args[0]
            calls.append([who, name, made.current_epoch, made.global_step])

        return hook

    class Noting(L.Callback):
        pass

    for name in HOOKS:
        setattr(Noting, name, noting(name, "callback"))
    for name in ("on_sanity_check_start", "on_sanity_check_end"):
        setattr(Noting, name, noting(name, "callback"))
    del Noting.configure_model
    changes = {name: noting(name, "module") for name in HOOKS}
    changes |= {name: noting(name, "module") for name in ("on_validation_model_zero_grad", "on_validation_model_eval")}
    L.seed_everything(7)
    kind = regression(L, **changes)
    step = kind.validation_step
    kind.test_step = lambda self, batch, batch_idx: step(self, batch, batch_idx)
    model = kind()
    words = {"accumulate_grad_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    made = trainer(L, folder, max_epochs=2, callbacks=[Noting()], **words)
    made.fit(model, *loaders())
    made.test(model, loaders()[1], verbose=False)
    return {**outcome(made, model), "calls": calls}


def data_module(L, folder):
    """A data module, its stages, and the results of validate, test and predict."""
    stages = []

    class Rows(L.LightningDataModule):
        def prepare_data(self):
            stages.append("prepare_data")

        def setup(self, stage):
            stages.append(f"setup {getattr(stage, 'value', stage)}")
            self.rows = rows()

        def train_dataloader(self):
            return DataLoader(self.rows, batch_size=8, shuffle=True)

        def val_dataloader(self):
            return DataLoader(rows(18, seed=1), batch_size=8)

        def test_dataloader(self):
            return DataLoader(rows(12, seed=2), batch_size=8)

        def predict_dataloader(self):
            return DataLoader(rows(5, seed=3).tensors[0], batch_size=2)

        def teardown(self, stage):
            stages.append(f"teardown {getattr(stage, 'value', stage)}")

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    L.seed_everything(7)
    model, data = regression(L, test_step=test_step)(), Rows()
    made = trainer(L, folder, max_epochs=1)
    made.fit(model, datamodule=data)
    found = outcome(made, model)
    found |= {"validate": made.validate(model, datamodule=data, verbose=False)}
    found |= {"test": made.test(model, datamodule=data, verbose=False)}
    predicted = made.predict(model, datamodule=data)
    return {**found, "predicted": torch.cat(predicted).flatten().tolist(), "stages": stages}


def resumed(L, folder):
    """Two epochs, a checkpoint, and a third epoch of a new trainer; without shuffling and dropout."""
    changes = {"configure_optimizers": _with_schedule}
    L.seed_everything(7)
    kind = regression(L, **changes)
    first = kind(dropout=0.0)
    made = trainer(L, folder, max_epochs=2)
    made.fit(first, *loaders(shuffle=False))
    path = os.path.join(folder, "two.ckpt")
    made.save_checkpoint(path)
    second = kind(dropout=0.0)
    made = trainer(L, folder, max_epochs=3)
    made.fit(second, *loaders(shuffle=False), ckpt_path=path)
    # Lightning's own class cannot read our folders: there a function does.
    own = getattr(L, "load_from_checkpoint", None)
    third = kind.load_from_checkpoint(path) if own is None else own(kind, path)
    return {**outcome(made, second), "loaded": [float(weight.detach().double().sum()) for weight in third.parameters()]}


def _with_schedule(self):
    optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


CASES = [
    adamw,
    schedule_per_step,
    schedule_with_frequency,
    schedule_per_epoch,
    plateau,
    accumulation,
    clipped_by_norm,
    clipped_by_value,
    mixed_precision,
    checked_within_epochs,
    checked_across_epochs,
    trial,
    overfitted,
    limited_steps,
    batches_left_out,
    stopped,
    stream,
    reductions,
    hooks,
    data_module,
    resumed,
]


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def on_two_ranks(L, folder, ckpt_path=None, **words):
    """What each rank of two comes to; it is written to a file, since Lightning starts the ranks itself."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        # Another weight on each rank: what is synchronized must not be the mean of the ranks' means.
        rows_of_rank = 3 * self.global_rank + 1
        self.log("train_loss", loss, sync_dist=True, on_epoch=True, on_step=True, batch_size=rows_of_rank)
        self.log("largest", float(self.global_rank), sync_dist=True, reduce_fx="max", on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.trainer.sanity_checking, self.loss(batch).item()))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_end(self):
        with open(os.path.join(folder, f"rank-{self.global_rank}.json"), "w") as file:
            json.dump(outcome(self.trainer, self), file)

    changes = {name: of for name, of in locals().items() if callable(of) and name != "L"}
    L.seed_everything(7)
    # 29 rows: one row is repeated, so that both ranks have the same number.
    train = DataLoader(TensorDataset(*rows()[:29]), batch_size=4, shuffle=True)
    model = regression(L, **changes)()
    made = trainer(L, folder, **{"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **words})
    made.fit(model, train, DataLoader(rows(18, seed=1), batch_size=8), ckpt_path=ckpt_path)
