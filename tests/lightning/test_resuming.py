"""A module's run that goes on from a checkpoint does what the run without an interruption does."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import forgather.lightning as L
from forgather.errors import CheckpointError, ForgatherError
from tests.lightning import scripts
from tests.ml.distributed.gang import run_ranks


def run(folder, *, epochs=3, ckpt_path=None, data=None, words=None, changes=None, until=None):
    """Trains, with a checkpoint after every third step; returns the losses of the batches from the third step on."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == until:
            raise KeyboardInterrupt

    L.seed_everything(7 if ckpt_path is None else 8)
    stopping = {} if until is None else {"on_train_batch_end": on_train_batch_end}
    model = scripts.regression(L, configure_optimizers=scripts._with_schedule, **(changes or {}), **stopping)()
    checkpoints = L.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    made = scripts.trainer(L, folder, max_epochs=epochs, callbacks=[checkpoints], **(words or {}))
    with pytest.raises(KeyboardInterrupt) if until is not None else scripts.quiet():
        made.fit(model, *(data or scripts.loaders()), ckpt_path=ckpt_path)
    return scripts.outcome(made, model)


def after(outcome, batches):
    """An outcome without the batches before a checkpoint, and without the validations: their number differs."""
    trained = {name: outcome[name][batches:] for name in ("losses", "rates")}
    return {
        **trained,
        **{name: outcome[name] for name in ("epoch", "step", "weights")},
        "val": outcome["validated"][-3:],
    }


def test_a_run_goes_on_within_an_epoch_with_the_batches_and_dropout_that_follow(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", until=5)
    found = run(tmp_path / "cut", ckpt_path=str(tmp_path / "cut/checkpoint-3"))
    assert after(whole, 3) == after(found, 0)


def test_accumulated_batches_and_last_go_on_in_the_same_way(tmp_path):
    words = {"accumulate_grad_batches": 2}
    whole = run(tmp_path / "whole", words=words)
    run(tmp_path / "cut", words=words, until=4)
    found = run(tmp_path / "cut", words=words, ckpt_path="last")
    # The third step is the first one of the second epoch.
    assert after(whole, 6) == after(found, 0)


def test_a_generator_of_the_loader_is_put_back(tmp_path):
    def data():
        return scripts.loaders(generator=torch.Generator().manual_seed(3))

    whole = run(tmp_path / "whole", data=data())
    run(tmp_path / "cut", data=data(), until=5)
    found = run(tmp_path / "cut", data=data(), ckpt_path="last")
    assert after(whole, 3) == after(found, 0)


def logging_step(self, batch, batch_idx):
    loss = self.loss(batch)
    self.losses.append(loss.item())
    self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
    for how in ("sum", "max", "min"):
        self.log(how, loss, on_step=False, on_epoch=True, reduce_fx=how, add_dataloader_idx=how != "max")
    return loss


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


# Four batches are an epoch. The checkpoint of step 8 is written before the hooks at the end of the epoch.
@pytest.mark.parametrize("step", [3, 6, 8])
def test_metrics_of_the_epoch_of_a_checkpoint_are_those_of_all_its_batches(tmp_path, step):
    def on_train_epoch_end(self):
        self.epochs[self.current_epoch] = {name: float(of) for name, of in self.trainer.callback_metrics.items()}

    def trained(folder, ckpt_path=None):
        changes = {"training_step": logging_step, "on_train_epoch_end": on_train_epoch_end, "epochs": {}}
        L.seed_everything(7)
        model = scripts.regression(L, configure_optimizers=plateau, **changes)()
        checkpoints = L.ModelCheckpoint(every_n_train_steps=step, save_top_k=-1)
        made = scripts.trainer(L, folder, max_epochs=3, callbacks=[checkpoints], check_val_every_n_epoch=2)
        made.fit(model, *scripts.loaders(), ckpt_path=ckpt_path)
        return model.epochs, scripts.outcome(made, model)

    epochs, whole = trained(tmp_path / "whole")
    further, found = trained(tmp_path / "further", str(tmp_path / f"whole/checkpoint-{step}"))
    assert {epoch: of for epoch, of in epochs.items() if epoch >= (step - 1) // 4} == further
    assert [whole[name] for name in ("metrics", "weights")] == [found[name] for name in ("metrics", "weights")]


class Mean:
    """A metric in the form of torchmetrics."""

    def __init__(self):
        self.values = []

    def compute(self):
        return sum(self.values) / len(self.values)

    def reset(self):
        self.values = []


def test_a_metric_object_that_misses_batches_before_a_checkpoint_is_reported(tmp_path, caplog):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.values.append(loss.item())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    run(tmp_path, epochs=1, changes={"training_step": training_step, "mean": Mean()})
    assert "after the checkpoint" not in caplog.text
    run(
        tmp_path / "further",
        epochs=1,
        changes={"training_step": training_step, "mean": Mean()},
        ckpt_path=str(tmp_path / "checkpoint-3"),
    )
    assert "'mean' of this epoch is that of the batches after the checkpoint" in caplog.text


def test_other_rows_after_a_checkpoint_are_an_error(tmp_path):
    run(tmp_path, until=5)
    other = DataLoader(TensorDataset(*(2 * part for part in scripts.rows().tensors)), batch_size=8, shuffle=True)
    with pytest.raises(CheckpointError, match="FG610.*batch 3 of epoch 0 has other rows"):
        run(tmp_path, data=[other, scripts.loaders()[1]], ckpt_path="last")


def test_another_number_of_batches_is_an_error(tmp_path):
    run(tmp_path, until=5)
    with pytest.raises(CheckpointError, match="FG610.*an epoch had 4 batches, and has 8 now"):
        run(tmp_path, data=scripts.loaders(batch_size=4), ckpt_path="last")


def test_another_schedule_than_that_of_the_checkpoint_is_an_error(tmp_path):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    run(tmp_path, until=5)
    model = scripts.regression(L, configure_optimizers=configure_optimizers)()
    with pytest.raises(ForgatherError, match=r"StepLR"):
        scripts.trainer(L, tmp_path, max_epochs=3).fit(model, *scripts.loaders(), ckpt_path="last")


def test_a_checkpoint_in_a_step_is_written_at_its_end_and_resumes_there(tmp_path):
    path = tmp_path / "asked.ckpt"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.rates.append(0)
        if self.global_step == 4 and self.trainer.is_global_zero:
            self.trainer.save_checkpoint(path)
        return loss

    changes = {"training_step": training_step}
    whole = run(tmp_path / "whole", changes=changes)
    assert ["checkpoint-5"] == [folder.name for folder in path.iterdir()]
    found = run(tmp_path / "further", changes=changes, ckpt_path=path)
    assert after(whole, 5) == after(found, 0)


def test_a_checkpoint_of_the_last_hooks_is_written(tmp_path):
    def saving(name):
        return lambda self, *args: self.trainer.save_checkpoint(tmp_path / name)

    run(tmp_path / "run", epochs=1, changes={name: saving(name) for name in ("on_train_end", "on_validation_end")})
    found = {
        name: [folder.name for folder in (tmp_path / name).iterdir()] for name in ("on_train_end", "on_validation_end")
    }
    assert {"on_train_end": ["checkpoint-4"], "on_validation_end": ["checkpoint-4"]} == found


def best_of(folder, words):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float({1: 0.5, 2: 1.0}.get(self.current_epoch, 2.0)))

    def on_train_epoch_end(self):
        self.kept[self.current_epoch] = [weight.detach().clone() for weight in self.parameters()]

    L.seed_everything(7)
    kind = scripts.regression(L, validation_step=validation_step, on_train_epoch_end=on_train_epoch_end, kept={})
    model = kind()
    checkpoints = L.ModelCheckpoint(monitor="val_loss", save_top_k=1)
    made = scripts.trainer(L, folder, max_epochs=3, callbacks=[checkpoints], **words)
    made.fit(model, *scripts.loaders())
    return made, model, kind


def test_best_is_the_checkpoint_with_the_best_metric(tmp_path):
    made, model, kind = best_of(tmp_path, {})
    assert [] != made.validate(model, scripts.loaders()[1], ckpt_path="best", verbose=False)
    assert all(map(torch.equal, model.parameters(), kind.kept[1]))
    assert not all(map(torch.equal, model.parameters(), kind.kept[2]))


def test_the_checkpoint_callback_has_the_paths_that_scripts_read(tmp_path):
    made, model, kind = best_of(tmp_path, {})
    found = made.checkpoint_callback
    assert found.monitor == "val_loss"
    best, last = Path(found.best_model_path), Path(found.last_model_path)
    assert ("checkpoint-8", "checkpoint-12") == (best.name, last.name)
    assert 0.5 == found.best_model_score
    assert all(map(torch.equal, kind.load_from_checkpoint(found.best_model_path).parameters(), kind.kept[1]))
    assert L.Trainer(enable_checkpointing=False).checkpoint_callback is None
    assert ("", "") == (L.ModelCheckpoint().best_model_path, L.Trainer().checkpoint_callback.last_model_path)


def test_a_module_is_loaded_with_its_hyperparameters(tmp_path):
    L.seed_everything(7)
    kind = scripts.regression(L)
    model = kind(lr=0.125)
    made = scripts.trainer(L, tmp_path / "run", max_epochs=1)
    made.fit(model, *scripts.loaders())
    made.save_checkpoint(tmp_path / "end.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "end.ckpt")
    assert 0.125 == loaded.hparams.lr
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    assert 0.5 == kind.load_from_checkpoint(tmp_path / "end.ckpt", lr=0.5).hparams.lr


def test_weights_and_hyperparameters_of_a_file_of_lightning_are_loaded(tmp_path):
    kind = scripts.regression(L)
    model = kind(lr=0.25)
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"lr": 0.25}}, tmp_path / "theirs.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "theirs.ckpt")
    assert 0.25 == loaded.hparams.lr
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    with pytest.raises(ForgatherError, match=r"FG865.*a run resumes from a folder"):
        scripts.trainer(L, tmp_path / "run", max_epochs=1).fit(
            model, *scripts.loaders(), ckpt_path=tmp_path / "theirs.ckpt"
        )


def of_a_rank(folder, words, ckpt_path):
    scripts.on_two_ranks(L, folder, ckpt_path=ckpt_path, strategy=L.DDPStrategy(), devices=2, **words)
    with open(os.path.join(folder, f"rank-{os.environ['RANK']}.json"), encoding="utf-8") as file:
        return json.load(file)


def test_two_ranks_go_on_within_an_epoch(tmp_path):
    words = {"callbacks": [L.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)]}
    whole = run_ranks(2, of_a_rank, str(tmp_path), words, None)
    found = run_ranks(2, of_a_rank, str(tmp_path), {}, str(tmp_path / "checkpoint-3"))
    for expected, rank in zip(whole, found, strict=True):
        assert expected["losses"][6:] == rank["losses"]
        assert expected["weights"] == rank["weights"]
        assert expected["metrics"] == rank["metrics"]
