"""`LightningModule` and `LightningDataModule`: the base classes that a script of Lightning derives from.

A module has the steps, the optimizer and the hooks; a data module has the loaders. A script that imports
`forgather.lightning` in place of `lightning` needs no further change. Modules of Lightning's own classes are accepted
by the trainer, too. Hooks without a body do nothing; `forgather.lightning.hooks` lists all that are called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from forgather.lightning.checkpoints import load_from_checkpoint
from forgather.lightning.hooks import LOGGED, unsupported
from forgather.lightning.hyperparameters import HyperParameters


class LightningModule(HyperParameters, nn.Module):
    """A model with its training step, its optimizer and its hooks."""

    automatic_optimization = True
    """Whether the loop does the optimizer step. Our loop refuses False."""
    strict_loading = True
    example_input_array: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._trainer: Any = None
        self._current_fx_name: str | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of a batch, a mapping with the entry "loss", or None to leave the batch out.

        Args:
            batch: what the loader gave, on the device.
            batch_idx: the number of the batch in its epoch.

        Shapes:
            The loss is a scalar tensor.
        """
        raise unsupported(f"{type(self).__name__} has no training_step", "define training_step(self, batch, batch_idx)")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluates a batch of the validation data. What it logs is averaged over the data.

        Args:
            batch: what the loader gave, on the device.
            batch_idx: the number of the batch.
            dataloader_idx: the number of the loader, if there are several.
        """

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluates a batch of the test data; the arguments are those of `validation_step`."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Returns the prediction for a batch: by default, what the module returns for it."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, with or without a learning rate schedule, in one of Lightning's forms."""
        raise unsupported(
            f"{type(self).__name__} has no configure_optimizers", "define it, and return an optimizer of torch"
        )

    def configure_callbacks(self) -> Any:
        """Returns further callbacks of the run."""
        return []

    @property
    def trainer(self) -> Any:
        """The trainer that runs the module.

        Raises:
            RuntimeError: if no trainer runs it.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a trainer")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 0; 0 without a trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """The number of optimizer steps that are done; 0 without a trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """The rank of this process; 0 without a trainer."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this machine; 0 without a trainer."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next((weight.dtype for weight in self.parameters()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """True if the weights are on CUDA."""
        return self.device.type == "cuda"

    @property
    def logger(self) -> Any:
        """None: metrics go to the trackers of the run."""
        return None

    @property
    def loggers(self) -> list[Any]:
        """Empty: metrics go to the trackers of the run."""
        return []

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Returns the optimizer of the run."""
        return self.trainer.optimizers[0]

    def lr_schedulers(self) -> Any:
        """Returns the learning rate schedule, a list of several, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def log(self, name: str, value: Any, prog_bar: bool = False, **options: Any) -> None:
        """Logs a value; see `forgather.lightning.logged.LogOptions`.

        Args:
            name: the name of the value.
            value: a number, a tensor with one element, or a metric of torchmetrics.
            prog_bar: whether the progress bar shows it.
            **options: `on_step`, `on_epoch`, `reduce_fx`, `sync_dist`, `batch_size`, `logger`, `add_dataloader_idx`
                and `rank_zero_only`.
        """
        if self._trainer is not None:
            self._trainer.log_value(name, value, prog_bar=prog_bar, **options)

    def log_dict(self, dictionary: Mapping[str, Any], prog_bar: bool = False, **options: Any) -> None:
        """Logs several values, see `log`."""
        for name, value in dictionary.items():
            self.log(name, value, prog_bar=prog_bar, **options)

    def print(self, *args: Any, sep: str = " ", end: str = "\n") -> None:
        """Writes values to the standard output of the main process; see `print` of the trainer."""
        self.trainer.print(*args, sep=sep, end=end)

    def all_gather(self, data: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns a tensor of all processes, stacked, or the tensor itself in a single process.

        Args:
            data: the tensor of this process.
            group: must be None.
            sync_grads: must be false.
        """
        if group is not None or sync_grads:
            raise unsupported("all_gather with group or sync_grads", "call torch.distributed's functions")
        return self.trainer.gathered(data)  # type: ignore[no-any-return]

    def freeze(self) -> Self:
        """Freezes all weights, and puts the module into evaluation mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Lets all weights be trained, and puts the module into training mode."""
        self.requires_grad_(True)
        return self.train()

    def manual_backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the loop calls `backward`."""
        raise unsupported("manual_backward is called, and the loop calls backward", "return the loss")

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns a module with the weights and hyper-parameters of a checkpoint, see `load_from_checkpoint`."""
        if hparams_file is not None:
            raise unsupported("hparams_file is given", "give the hyper-parameters as keyword arguments")
        return load_from_checkpoint(cls, checkpoint_path, map_location, strict=strict is not False, **kwargs)


class LightningDataModule(HyperParameters):
    """The data of a run: preparation, and a loader for each stage."""

    prepare_data_per_node = True
    """Whether `prepare_data` is called on each machine; on the main process alone otherwise."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def prepare_data(self) -> None:
        """Downloads or writes files. It is called on one process of each machine, see `prepare_data_per_node`."""

    def setup(self, stage: str) -> None:
        """Makes the data sets. It is called on every process, with "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Is called at the end of a stage."""

    def on_exception(self, exception: BaseException) -> None:
        """Is called if an error, or the user, has ended `fit`."""

    def train_dataloader(self) -> Any:
        """Returns the loader of the training data."""
        return None

    def val_dataloader(self) -> Any:
        """Returns the loader of the validation data, or a list of several."""
        return None

    def test_dataloader(self) -> Any:
        """Returns the loader of the test data, or a list of several."""
        return None

    def predict_dataloader(self) -> Any:
        """Returns the loader of the rows to predict, or a list of several."""
        return None


class Callback:
    """The base class of callbacks; each hook is called with the trainer, the module and the hook's arguments."""


def _nothing(self: Any, *args: Any) -> None:
    """Does nothing; a subclass may override it."""


# From the table, so that `super().on_train_start()` works in a subclass, and no hook is written twice.
for _name in LOGGED:
    if _name.startswith("on_") or _name in ("setup", "teardown", "configure_model"):
        setattr(LightningModule, _name, _nothing)
        setattr(Callback, _name, _nothing)
for _name in ("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
    setattr(LightningModule, _name, _nothing)
