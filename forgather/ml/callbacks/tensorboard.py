"""TensorBoard logging: a callback that writes the metrics and settings of a run to event files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

from forgather.ml.callbacks.effective_settings import effective_settings
from forgather.ml.callbacks.output_target import is_selected_rank, report_only, run_folder
from forgather.ml.callbacks.run_record import read_record
from forgather.ml.metrics import as_json
from forgather.ml.tracking import Logged
from forgather.redaction import hidden, hide


class TBLogger(TrainerCallback):
    """A callback that writes each log to TensorBoard as scalars (`train/loss`, `eval/loss`, ...).

    The settings of the run and of the model are written as text, and so are its config and the line that set each
    value. After a resume, TensorBoard shows each step once, even if the resumed run writes to a new folder.

    Args:
        summary_writer: a `torch.utils.tensorboard.SummaryWriter`, or a function that returns one, such as a partial.
            The function is called at the start of training. Its argument `log_dir` is the folder of the run, or the
            `log_dir` of the partial if the partial sets one. None creates a `SummaryWriter` in the run's folder.
        experiment_info: the facts about the run that are shown as the text `experiment`.
        rank_filter: the rank or ranks that write, or None for all ranks.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        experiment_info: Mapping[str, Any] | str | None = None,
        *,
        rank_filter: int | Collection[int] | None = 0,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.summary_writer = summary_writer
        self.experiment_info = experiment_info
        self.rank_filter = rank_filter
        self.run_dir = run_dir
        self._is_elsewhere = False

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Opens the event file and writes the settings as text."""
        if not is_selected_rank(self.rank_filter, args):
            return
        writer = self._open(args, goes_on_after=state.global_step)
        # In a new folder the earlier steps are written again, from the history in the checkpoint.
        if state.log_history and self._is_elsewhere:
            for line in state.log_history:
                self._write(writer, {name: value for name, value in line.items() if name != "step"}, line["step"])
        settings = effective_settings(args, kwargs.get("optimizer"), kwargs.get("lr_scheduler"))
        texts = {"experiment": self.experiment_info, "args": settings.pop("arguments"), **settings}
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            texts["model_config"] = config.to_dict()
        for name, text in read_record(run_folder(args, self.run_dir)).texts.items():
            texts[name] = f"```\n{text}\n```"
        for name, text in texts.items():
            if text:
                writer.add_text(name, hide(text if isinstance(text, str) else _code_block(text)), state.global_step)

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Writes each number of a log as a scalar."""
        if not logs or not is_selected_rank(self.rank_filter, args):
            return
        writer = self._open(args)
        self._write(writer, logs, state.global_step)
        # TensorBoard otherwise shows a slow run up to two minutes late, and a killed run loses its last logs.
        writer.flush()

    @report_only
    def on_logged(self, args: Any, state: Any, control: Any, logged: Logged, **kwargs: Any) -> None:
        """Writes what the user's code logs: numbers, an image, or a text; a table is a text in Markdown."""
        if not is_selected_rank(self.rank_filter, args):
            return
        writer = self._open(args)
        if logged.kind == "numbers":
            self._write(writer, logged.content, logged.step)
        elif logged.kind == "image":
            writer.add_image(logged.name, _pixels(logged.file), logged.step, dataformats="HWC")
        else:
            text = logged.content if logged.kind == "text" else _markdown(*logged.content)
            writer.add_text(logged.name, text, logged.step)
        writer.flush()

    @report_only
    def on_rewind(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes TensorBoard hide the steps after the checkpoint to which the run was rewound."""
        writer = self.summary_writer
        if is_selected_rank(self.rank_filter, args) and isinstance(writer, SummaryWriter):
            writer.close()
            # `purge_step` is an argument of the constructor only, so a new writer replaces the old one.
            kept = {name: getattr(writer, name) for name in ("log_dir", "max_queue", "flush_secs", "filename_suffix")}
            self.summary_writer = SummaryWriter(**kept, purge_step=state.global_step + 1)

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the event file. A later log opens a new event file."""
        if (
            self.summary_writer is not None
            and not callable(self.summary_writer)
            and is_selected_rank(self.rank_filter, args)
        ):
            self.summary_writer.close()

    def _write(self, writer: Any, logs: Mapping[str, Any], step: int) -> None:
        for name, value in logs.items():
            # A user's callback may have logged tensors or NumPy scalars.
            number = value.item() if callable(getattr(value, "item", None)) else value
            if isinstance(number, int | float):
                writer.add_scalar(_scalar_tag(name), number, step)

    def _open(self, args: Any, *, goes_on_after: int = 0) -> Any:
        if self.summary_writer is None or callable(self.summary_writer):
            make = self.summary_writer or SummaryWriter
            given = getattr(make, "keywords", {})
            folder = Path(given.get("log_dir") or run_folder(args, self.run_dir))
            # Without event files, the steps before the checkpoint were written into another folder, or never.
            self._is_elsewhere = not any(folder.glob("events.out.tfevents.*"))
            settings: dict[str, Any] = {"log_dir": str(folder)}
            if goes_on_after and not self._is_elsewhere and "purge_step" not in given:
                # Hides what a killed run wrote after its checkpoint; those steps are trained again.
                settings["purge_step"] = goes_on_after + 1
            self.summary_writer = make(**settings)
        return self.summary_writer


def _scalar_tag(name: str) -> str:
    for group in ("eval", "test", "train"):
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"train/{name}"


def _pixels(file: Any) -> np.ndarray:
    """Returns the pixels of an image file.

    Shapes:
        Returns (H, W, 4): height, width; red, green, blue and opacity.
    """
    with Image.open(file) as image:
        return np.asarray(image.convert("RGBA"))


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(value).replace("|", "\\|") for value in line) + " |" for line in lines)


def _code_block(facts: Mapping[str, Any]) -> str:
    """Returns `facts` as a Markdown code block, which TensorBoard shows verbatim."""
    return "```\n" + json.dumps(hidden(as_json(facts)), indent=2) + "\n```"
