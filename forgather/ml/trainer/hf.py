"""`transformers.Trainer`, driven by what drives our own trainer.

Takes the keywords of `forgather.ml:Trainer` with the arguments of transformers; gives a
`transformers.Trainer`. Keeps true: without factories, loss and callbacks the numbers are those of
`transformers.Trainer`; what the arguments ask for happens, also where transformers leaves it to a script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from forgather.errors import CheckpointError
from forgather.interrupt import SAME_OF_SEVERAL_SECONDS, SAME_SECONDS, Interrupt, heard
from forgather.ml.callbacks.speed import SpeedCallback
from forgather.ml.checkpoint.files import TRAINER_STATE
from forgather.ml.distributed import agreement
from forgather.ml.log import get_logger
from forgather.ml.losses import UserLoss, is_causal_lm, loss_rule
from forgather.ml.quiet import without_progress_bars
from forgather.ml.run_place import own_run_folder
from forgather.ml.task import Task, task_of
from forgather.ml.trainer import arguments_check as door
from forgather.ml.trainer.columns import keeping_rows, tell_mixed_rows
from forgather.ml.trainer.optimizers import make_optimizer, make_schedule
from forgather.ml.trainer.run_start import RunStart

# `transformers.TrainingArguments` takes any value and fails later, elsewhere.
_RULES = door.rules("hf_trainer", "forgather.ml.trainer.hf:HFTrainer")

_log = get_logger(__name__)


class HFTrainer(Trainer):
    """A `transformers.Trainer` whose optimizer, schedule and loss may come from a config.

    Args:
        model: what is trained.
        args: `transformers.TrainingArguments`.
        optimizer_factory: as in `forgather.ml:Trainer`; None takes `args.optim`.
        lr_scheduler_factory: as in `forgather.ml:Trainer`; None takes `args.lr_scheduler_type`.
        loss_fn: called with (logits, labels); None takes the model's own loss.
        callbacks: they stand in for the progress bar and printer of transformers; speed and memory join their logs.
        **others: keywords of `transformers.Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        optimizer_factory: Callable[..., Optimizer] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **others: Any,
    ) -> None:
        door.refuse(_RULES.values({name: getattr(args, name.removeprefix("args.")) for name in _RULES.settings}))
        if not torch.accelerator.is_available():
            args.dataloader_pin_memory = False  # there is nothing to pin for, and the loader would say so
        if getattr(args, "logging_dir", None) is None:  # callbacks write there; transformers has no such setting now
            args.logging_dir = str(own_run_folder(str(args.output_dir)))  # type: ignore[attr-defined]
        self._start = RunStart()
        self._optimizer_factory = optimizer_factory
        self._scheduler_factory = lr_scheduler_factory
        if "compute_loss_func" not in others:
            args.task = _task(model, args, loss_fn)  # type: ignore[attr-defined] # callbacks are handed no more
        if loss_fn is not None:
            others["compute_loss_func"] = _OutputLoss(UserLoss(model, loss_fn))
        super().__init__(
            model=model, args=args, callbacks=[SpeedCallback(), *callbacks] if callbacks else None, **others
        )
        self.data_collator = keeping_rows(self.data_collator, model)
        for rows in (self.train_dataset, self.eval_dataset):
            tell_mixed_rows(model, rows)
        if callbacks:
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)

    def train(self, resume_from_checkpoint: bool | str | None = None, *others: Any, **named: Any) -> Any:
        """Trains to the end of the run.

        Args:
            resume_from_checkpoint: true or "auto" for the newest checkpoint of `output_dir`, or a folder; that of
                the arguments by default, which `transformers.Trainer` does not look at.
            *others: further arguments of `transformers.Trainer.train`.
            **named: its keywords.

        Raises:
            CheckpointError: FG601 where the folder does not exist.
            DistributedError: FG776 for one process where the config asks for several.
            KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGUSR1, on all processes alike, when the state was saved.
        """
        self._start.begin(self.args.world_size, self.args.device)
        # transformers seeds where a trainer is made, and draws the order of the rows here: what was drawn between the
        # two, and the caller's own numbers, would change it.
        set_seed(self.args.seed)
        request = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = _resume_folder(request, str(self.args.output_dir))
        if folder is not None:
            _log.warning("resuming from %s", folder)
        several = self.args.world_size > 1
        same = SAME_OF_SEVERAL_SECONDS if several else SAME_SECONDS
        with heard(same_within=same, speaks=self.args.process_index == 0) as interrupt:
            stop = _StopAfterStep(interrupt, saves=self.args.save_strategy != "no")
            self.add_callback(stop)
            try:
                result = super().train(folder, *others, **named)
            except BaseException as error:
                if stop.began:
                    self._close(error)
                raise
            finally:
                self.remove_callback(stop)
        if (asked := stop.asked()) is not None:
            raise asked
        return result

    def _close(self, error: BaseException) -> None:
        """Lets callbacks close what they opened."""
        try:
            self.callback_handler.call_event("on_train_end", self.args, self.state, self.control, error=error)  # type: ignore[no-untyped-call]
        except Exception as failure:  # noqa: BLE001 - callback border: the first error is the one to show
            error.add_note(f"on_train_end failed too: {failure!r}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with without_progress_bars():
            super()._save(output_dir, state_dict)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Returns the factory's optimizer, or that of transformers."""
        if self.optimizer is None and self._optimizer_factory is not None:
            trained = cast(nn.Module, self.model if model is None else model)
            self.optimizer = make_optimizer(trained, self.args, self._optimizer_factory)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Returns the factory's schedule, or that of transformers."""
        if self.lr_scheduler is None and self._scheduler_factory is not None:
            scheduled = cast(Optimizer, self.optimizer if optimizer is None else optimizer)
            self.lr_scheduler = make_schedule(scheduled, self.args, num_training_steps, self._scheduler_factory)
        return super().create_scheduler(num_training_steps, optimizer)


def _task(model: Any, args: TrainingArguments, loss_fn: Callable[..., Any] | None) -> Task:
    """Returns what the numbers of a run mean; transformers adds the loss of a router to that of an evaluation."""
    if not isinstance(model, nn.Module):  # made later, by model_init
        return Task()
    smoothing = args.label_smoothing_factor if loss_fn is None and is_causal_lm(model) else 0.0
    task = task_of(model, loss_rule(model, loss_fn, label_smoothing=smoothing))
    adds_router = loss_fn is None and getattr(getattr(model, "config", None), "output_router_logits", False)
    return Task(counts_tokens=task.counts_tokens, has_perplexity=task.has_perplexity and not adds_router)


def _resume_folder(request: bool | str | None, output_dir: str) -> str | None:
    if request is None or request is False:
        return None
    if request is True or request == "auto":
        return _newest_whole_checkpoint(Path(output_dir))
    folder = os.path.expanduser(request)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"there is no checkpoint folder {folder!r}",
            code="FG601",
            hint="give a folder named checkpoint-<step>, or resume_from_checkpoint: auto",
        )
    return folder


def _newest_whole_checkpoint(output_dir: Path) -> str | None:
    """Returns the newest checkpoint whose state, the file that transformers writes last, can be read."""
    folders = {folder: folder.name.removeprefix("checkpoint-") for folder in output_dir.glob("checkpoint-*")}
    for folder in sorted((f for f, step in folders.items() if step.isdigit()), key=lambda f: -int(folders[f])):
        try:
            json.loads((folder / TRAINER_STATE).read_text())
        except (OSError, ValueError):
            _log.warning("passed over %s: it is not complete", folder)
        else:
            return str(folder)
    return None


class _StopAfterStep(TrainerCallback):
    """Ends the run after the step in which a signal came to any process, with a checkpoint where saving is on."""

    def __init__(self, interrupt: Interrupt, *, saves: bool) -> None:
        self.began = False
        self._asked: KeyboardInterrupt | None = None
        self._interrupt = interrupt
        self._saves = saves

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Notes that callbacks have something to close."""
        self.began = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Notes that from here on there is something to save."""
        self._interrupt.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> TrainerControl:
        """Asks for the end."""
        if self.asked() is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or self._saves
        return control

    def asked(self) -> KeyboardInterrupt | None:
        """Returns what to raise where a process was asked to stop; all of them ask after the same steps."""
        self._asked = self._asked or self._interrupt.told(agreement.total(self._interrupt.wish))
        return self._asked


class _OutputLoss:
    """A loss of logits and labels, in the form in which `transformers.Trainer` calls one."""

    def __init__(self, rule: UserLoss) -> None:
        self._rule = rule

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        batch = {"labels": labels}
        denom = self._rule.count(batch) if num_items_in_batch is None else num_items_in_batch
        return self._rule.total(lambda **_: outputs, batch, denom=denom) / denom
