"""The names of Lightning's checkpoint files, as links to our checkpoint folders.

The input is a `ModelCheckpoint` and the events of a run; the output is a link for each checkpoint that is kept, next to
its folder, with the name that Lightning would give the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather.lightning.callbacks import ModelCheckpoint
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl, TrainerState
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder


class CheckpointNames(TrainerCallback):
    """Gives checkpoints the names of Lightning's files, as links, and skips epochs between checkpoints.

    Args:
        options: the `ModelCheckpoint`.
    """

    def __init__(self, options: ModelCheckpoint) -> None:
        self._options = options

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Cancels the checkpoint of an epoch that `every_n_epochs` skips."""
        every = self._options.every_n_epochs or 1
        if args.save_strategy == "epoch" and round(state.epoch or 0) % every:
            control.should_save = False

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Makes the links of a checkpoint, and removes those of checkpoints that are no longer kept."""
        if not state.is_world_process_zero:
            return
        folder = checkpoint_folder(Path(args.output_dir), state.global_step)
        for link in folder.parent.glob("*.ckpt"):
            if link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)
        if self._options.filename is not None:
            values = {
                **_last_values(state),
                "epoch": max(math.ceil(state.epoch or 0) - 1, 0),
                "step": state.global_step,
            }
            name = checkpoint_name(
                self._options.filename, values, auto_insert_metric_name=self._options.auto_insert_metric_name
            )
            self._link(folder, name, replaces=not self._options.enable_version_counter)
        if self._options.save_last:
            self._link(folder, "last", replaces=True)

    @staticmethod
    def _link(folder: Path, name: str, *, replaces: bool) -> None:
        link, version = folder.parent / f"{name}.ckpt", 0
        while link.is_symlink() and not replaces:
            if link.readlink() == Path(folder.name):
                return
            version += 1
            link = folder.parent / f"{name}-v{version}.ckpt"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name, target_is_directory=True)


def checkpoint_name(pattern: str, values: Mapping[str, Any], *, auto_insert_metric_name: bool = True) -> str:
    """Returns the name of a checkpoint, without its ending. A value that is not known is 0, as in Lightning.

    Args:
        pattern: the pattern, as "model-{epoch:02d}-{val_loss:.2f}".
        values: the values by name.
        auto_insert_metric_name: whether each value is preceded by its name and "=".

    Source:
        `ModelCheckpoint._format_checkpoint_name` of Lightning 2.6.

    Example:
        >>> checkpoint_name("model-{epoch:02d}", {"epoch": 3})
        'model-epoch=03'
    """

    def filled(found: re.Match[str]) -> str:
        name, form = found["name"], found["form"] or ""
        value = format(values.get(name, 0), form)
        return f"{name}={value}" if auto_insert_metric_name else value

    return re.sub(r"\{(?P<name>[^:{}]+)(:(?P<form>[^{}]*))?\}", filled, pattern)


def _last_values(state: TrainerState) -> dict[str, Any]:
    """Returns the newest value of each metric; an evaluation's also without its "eval_"."""
    found: dict[str, Any] = {}
    for line in state.log_history:
        found |= line
        found |= {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
    return found
