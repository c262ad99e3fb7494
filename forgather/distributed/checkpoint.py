"""`CheckpointManager`: the checkpoints of a training loop of the user's own, and the same settings for a trainer.

The input is an engine, an optimizer and a schedule at a step; the output is a folder `checkpoint-<step>` that is
complete or invisible. `to_config` gives the settings with which a trainer saves in the same places.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.distributed.arguments import COUNT, COUNT_OR_0, FLAG, PATH, refuse_without, refuse_wrong
from forgather.distributed.script_config import ScriptConfig
from forgather.errors import CheckpointError, TrainingError
from forgather.value_text import shown

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores an engine, its optimizer and its learning rate schedule.

    Args:
        save_dir: the folder of the checkpoints.
        save_interval: the number of steps between checkpoints: `save` writes nothing at other steps. None writes at
            each call.
        keep_interval: the number of checkpoints that are kept; None keeps all.
        async_save: whether files are written in the background. In a run of several processes they are written at once.
        save_function: a function of (engine, step, path), which may write a file or a folder at the path. What it
            writes becomes part of each checkpoint.

    Raises:
        TrainingError: FG813 if a number is not positive; FG819 if `save_function` is not callable.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "./checkpoints",
        save_interval: int | None = None,
        keep_interval: int | None = None,
        async_save: bool = False,
        save_function: Callable[[Any, int, Any], Any] | None = None,
    ) -> None:
        rules = {"save_dir": PATH, "save_interval": COUNT, "keep_interval": COUNT, "async_save": FLAG}
        refuse_wrong(locals(), rules)
        if save_function is not None and not callable(save_function):
            raise TrainingError(
                f"save_function is a {type(save_function).__name__}, which cannot be called",
                code="FG819",
                hint="give a function of (engine, step, path)",
            ).about("save_function")
        self.save_dir = Path(save_dir).expanduser()
        self.save_interval = save_interval
        self.keep_interval = keep_interval
        self.async_save = async_save
        self.save_function = save_function
        self._loop_checkpoints: Any = None
        self._has_warned = False

    def save(
        self, engine: Any, step: int, optimizer: Any = None, lr_scheduler: Any = None, *, force: bool = False
    ) -> Path | None:
        """Writes a checkpoint, and returns its folder; None if the step is no multiple of `save_interval`.

        Collective: every process must call it.

        Args:
            engine: the module, possibly inside of DDP or sharded by FSDP2, or a `DistributedTrainer`.
            step: the number of optimizer steps that were done.
            optimizer: the optimizer.
            lr_scheduler: the learning rate schedule.
            force: whether to save at any step, for example at the end.

        Raises:
            CheckpointError: FG609 if a file cannot be written, also that of an earlier save in the background; FG631
                if `save_function` fails.
        """
        refuse_wrong(locals(), {"step": COUNT_OR_0, "force": FLAG})
        refuse_without("state_dict", {"optimizer": optimizer, "lr_scheduler": lr_scheduler})
        if self.save_interval is not None and step % self.save_interval and not force:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "step %d is no multiple of save_interval %d, and is not saved; save(..., force=True) saves it",
                    step,
                    self.save_interval,
                )
            return None
        folder: Path = self._checkpoints.save(engine, step, optimizer, lr_scheduler)
        return folder

    def load(
        self, path: str | os.PathLike[str] | None, engine: Any, optimizer: Any = None, lr_scheduler: Any = None
    ) -> int:
        """Restores a checkpoint that `save` has written, and returns its step.

        Args:
            path: the folder of the checkpoint; None for the newest intact one in `save_dir`.
            engine: the module or trainer, as it was given to `save`.
            optimizer: the optimizer.
            lr_scheduler: the learning rate schedule.

        Raises:
            CheckpointError: FG601 to FG605 if there is no such checkpoint, or if it does not fit.
        """
        refuse_wrong(locals(), {"path": PATH})
        refuse_without("load_state_dict", {"optimizer": optimizer, "lr_scheduler": lr_scheduler})
        self.wait()
        folder = self.newest() if path is None else Path(path)
        if folder is None:
            raise CheckpointError(
                f"{shown(str(self.save_dir), 300)} has no intact checkpoint",
                code="FG601",
                hint="give the path of another folder",
            )
        step: int = self._checkpoints.load(folder, engine, optimizer, lr_scheduler)
        return step

    def newest(self) -> Path | None:
        """Returns the newest intact checkpoint in `save_dir`, or None."""
        self.wait()
        found, _ = import_module("forgather.ml.checkpoint.lineage").newest_verified(self.save_dir)
        return None if found is None else Path(found)

    def wait(self) -> None:
        """Waits until a checkpoint of the background is written.

        Raises:
            CheckpointError: FG609 if it could not be written.
        """
        if self._loop_checkpoints is not None:
            self._loop_checkpoints.wait()

    def to_config(self) -> str:
        """Returns the text of the config of a trainer that saves at the same steps into the same folder."""
        settings: dict[str, Any] = {"output_dir": self.save_dir, "save_strategy": "steps"}
        settings["save_steps"] = 1 if self.save_interval is None else self.save_interval
        if self.keep_interval is not None:
            settings["save_total_limit"] = self.keep_interval
        settings["async_save"] = self.async_save
        return ScriptConfig(
            name="checkpoints",
            settings=settings,
            blocks={"model": "!var model", "train_dataset": "!var train_dataset"},
            arguments={} if self.save_function is None else {"save_function": "!var save_function"},
        ).text

    @property
    def _checkpoints(self) -> Any:
        if self._loop_checkpoints is None:
            self._loop_checkpoints = import_module("forgather.ml.loop_checkpoint").LoopCheckpoints(
                self.save_dir,
                keep=self.keep_interval,
                in_background=self.async_save,
                save_function=self.save_function,
            )
        return self._loop_checkpoints
