"""`ModuleRun`: what the target `main` of a config with a `LightningModule` is, so that `fgcli train` can run it.

The input is a trainer of words, a module and its data; `train` fits the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from forgather.lightning.trainer import Trainer


@dataclass(frozen=True)
class RunFolder:
    """The arguments of a run that `fgcli train` reads.

    Args:
        output_dir: the folder of the checkpoints.
    """

    output_dir: str


class ModuleRun:
    """The training of a module: a trainer with what its `fit` takes.

    Args:
        trainer: the trainer.
        module: the `LightningModule`.
        train_dataloaders: the loader of the training data; by default the module's or the data module's.
        val_dataloaders: the loader or loaders of the validation data.
        datamodule: the `LightningDataModule`, in place of loaders.
        ckpt_path: the checkpoint to resume from: "last" or "auto" for the newest one, "best", or a folder.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        module: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | None = None,
    ) -> None:
        self.trainer, self.module = trainer, module
        self._data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders}
        self._data["datamodule"] = datamodule
        self._ckpt_path = ckpt_path

    @property
    def args(self) -> RunFolder:
        """The folder of the checkpoints."""
        return RunFolder(self.trainer.default_root_dir)

    def train(self) -> None:
        """Fits the module. Collective: every process must call it."""
        path = "last" if self._ckpt_path == "auto" else self._ckpt_path
        self.trainer.fit(self.module, ckpt_path=path, **self._data)
