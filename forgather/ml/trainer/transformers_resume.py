"""Restores a checkpoint of transformers' `Trainer` into the parts of a run, and says in one line what became of each.

Takes the folder of the checkpoint and the parts of a run; gives the `RestoredState` of a checkpoint of this library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from forgather.errors import CheckpointError
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.files import OPTIMIZER, PROGRESS, RNG, SCHEDULE, TRAINER_STATE
from forgather.ml.checkpoint.lineage import Origin
from forgather.ml.checkpoint.rng import check_rng
from forgather.ml.checkpoint.transformers_folder import TransformersFolder
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.checkpoint_parts import EFFECTS_OF_MISSING, missing_parts_error, restoring, schedule_state
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.rate_change import LEARNING_RATE, change_rates
from forgather.ml.trainer.resume import (
    RestoredState,
    advance_schedule,
    restore_schedule,
    restored_settings,
    warn_of_overridden,
)
from forgather.ml.trainer.resume_checks import Meanings, refuse_impossible
from forgather.ml.trainer.transformers_reader import TransformersReader, optimizer_by_name, weights_by_name
from forgather.rule_conditions import misfit
from forgather.value_text import shown

_log = get_logger(__name__)

_EPOCH_TOLERANCE = 1e-6


def restore_transformers(
    folder: Path,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    *,
    meanings: Meanings,
) -> RestoredState:
    """Restores a checkpoint of transformers' `Trainer`. Collective: every process must call it.

    Args:
        folder: the folder of the checkpoint.
        args: the training arguments of this run.
        strategy: the strategy, whose weights and optimizer state are restored.
        schedule: the learning rate schedule, whose state is restored.
        data: the training data, whose position is set.
        meanings: the description of this run's tokenizer, labels and model settings.

    Raises:
        CheckpointError: FG605 or FG616 if the checkpoint belongs to another model, optimizer or schedule; FG608 if a
            required part is missing; FG610 if the number of rows changed; FG613 if the tokenizer, the labels or the
            model's settings changed; FG611, FG614 or FG615 if a file cannot be read.
    """
    theirs = collectives.run_collectively(lambda: TransformersFolder(folder))
    collectives.run_on_main(lambda: meanings.refuse_other_model(folder, allowed=args.allow_changed or ()))
    model = getattr(strategy.model, "stands_for", strategy.model)
    groups = getattr(strategy.optimizer, "param_groups", ())
    progress, tree, rates = collectives.run_collectively(lambda: _read(theirs, args, model, groups, schedule))
    configured = restored_settings(strategy.optimizer, schedule)
    if rates is None:
        advance_schedule(schedule, theirs.step)
    weights = collectives.run_collectively(lambda: weights_by_name(theirs, model))
    with TransformersReader(folder, weights, tree) as saved, restoring(OPTIMIZER, folder):
        strategy.restore(saved)
        strategy.restore_optimizer(saved)
    say = _Lines()
    say.line("weights", f"taken over from {', '.join(theirs.weight_files[:2])}")
    _say_optimizer(say, tree)
    _restore_schedule(say, schedule, rates, folder)
    if LEARNING_RATE in (args.allow_changed or ()):
        change_rates(schedule, configured["lr"], step=theirs.step, run_dir=str(args.logging_dir))
    warn_of_overridden(configured, restored_settings(strategy.optimizer, schedule))
    rng = _rng(say, theirs, strategy, folder)
    seed = collectives.run_on_main(lambda: _seed_of_order(args, theirs))
    _set_position(say, theirs, progress, data, args, seed)
    say.line("log", f"taken over: {plural(len(progress.log_history), 'line')}; the mean loss of the run starts here")
    if (folder / "training_args.bin").exists():
        say.line("settings", "those of this run: training_args.bin is a pickle, and is not read")
    return RestoredState(progress, rng, [], {}, [], {})


def _read(
    theirs: TransformersFolder, args: TrainingArguments, model: nn.Module, groups: Any, schedule: Any
) -> tuple[TrainerState, dict[str, Any] | None, dict[str, Any] | None]:
    """Returns the trainer state, the optimizer state by name and the state of the schedule, after checks of each."""
    progress, optimizer, rates = _progress(theirs), theirs.optimizer(), theirs.schedule()
    held = {name for name, part in ((OPTIMIZER, optimizer), (SCHEDULE, rates)) if part is not None}
    _refuse_lacking(theirs, held, frozenset(args.allow_missing or ()))
    tree = None if optimizer is None else optimizer_by_name(optimizer, model, groups, theirs.folder)
    if tree is not None and (scale := theirs.scaler()) is not None:
        tree["scaler"] = scale
    parts = {} if rates is None else {SCHEDULE: rates}
    present = {"groups": groups, "schedule": schedule.state_dict()}
    refuse_impossible(theirs.folder, theirs.step, Origin(), progress, tree, parts, **present)
    return progress, tree, rates


class _Lines:
    """Logs what became of each part of a checkpoint, one line each."""

    def line(self, part: str, text: str) -> None:
        _log.warning("  %-9s %s", part, text)


def _progress(theirs: TransformersFolder) -> TrainerState:
    with restoring(PROGRESS, theirs.folder):
        state: TrainerState = TrainerState.load_from_json(str(theirs.folder / TRAINER_STATE))
        if not isinstance(state.log_history, list) or not all(isinstance(line, dict) for line in state.log_history):
            raise TypeError("its log has lines that are not objects")
        # Without the epoch, a run would begin the data again without a word.
        if misfit(state.epoch, {"type": "number", "minimum": 0}) is not None and (state.epoch or theirs.step):
            raise TypeError(f"its epoch is {shown(state.epoch)}")
        state.epoch = float(state.epoch or 0.0)
        # A folder of transformers cannot be loaded as the best checkpoint of this run, and a metric alone would keep
        # every later checkpoint from becoming the best one.
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None
        if not isinstance(state.stateful_callbacks, Mapping):
            state.stateful_callbacks = {}  # type: ignore[assignment]
        return state


def _refuse_lacking(theirs: TransformersFolder, held: set[str], allowed: frozenset[str]) -> None:
    missing = [part for part in (OPTIMIZER, SCHEDULE) if part not in held]
    if lacking := [part for part in missing if part not in allowed]:
        raise missing_parts_error(theirs.folder, lacking, allowed, is_model_alone=len(missing) == 2)


def _say_optimizer(say: _Lines, tree: Mapping[str, Any] | None) -> None:
    if tree is None:
        say.line("optimizer", f"not in the checkpoint: {EFFECTS_OF_MISSING[OPTIMIZER]}")
        return
    count = sum(len(group["params"]) for group in tree["param_groups"])
    say.line(
        "optimizer",
        f"taken over: {plural(count, 'weight')} in {plural(len(tree['param_groups']), 'group')}, named by the order of "
        "transformers, with equal shapes",
    )


def _restore_schedule(say: _Lines, schedule: Any, rates: dict[str, Any] | None, folder: Path) -> None:
    if rates is None:
        say.line("schedule", f"not in the checkpoint: {EFFECTS_OF_MISSING[SCHEDULE]}, from the same step")
        return
    with restoring(SCHEDULE, folder):
        own = schedule.state_dict()
        if lacking := sorted(own.keys() ^ rates.keys()):
            raise CheckpointError(
                f"the schedule state does not fit {type(schedule).__name__}: only one of them has {lacking[0]!r}",
                code="FG605",
                hint="resume with the schedule of that run, or allow_missing: [schedule]",
            )
        for name in own:
            if isinstance(own[name], int | float) and not isinstance(rates[name], int | float):
                raise TypeError(f"{name} is {shown(rates[name])}")
        restore_schedule(schedule, schedule_state(schedule, rates))
        now = [float(group["lr"]) for group in schedule.optimizer.param_groups]
        before = [float(rate) for rate in rates.get("_last_lr", now)]
    text = f"taken over: step {rates.get('last_epoch')}"
    same = len(now) != len(before) or all(math.isclose(*pair, rel_tol=1e-9) for pair in zip(now, before, strict=True))
    if same:
        say.line("schedule", f"{text}, learning rate {now[0]:g}")
    elif isinstance(schedule, LambdaLR):
        # The function of the step is not in the checkpoint: it is the one of this run.
        say.line(
            "schedule",
            f"{text}; the rate is {now[0]:g} from here on, and was {before[0]:g}: the schedule of this run has another "
            "form or length than that of the checkpoint",
        )


def _rng(say: _Lines, theirs: TransformersFolder, strategy: Strategy, folder: Path) -> dict[str, Any] | None:
    topology = strategy.topology
    own = None
    if theirs.world_size == topology.world_size:
        own = collectives.run_collectively(lambda: theirs.rng(topology.rank))
    if own is None:
        there = f"of {plural(theirs.world_size, 'process', 'processes')}, and there are {topology.world_size}"
        reason = "not in the checkpoint" if theirs.world_size == topology.world_size else there
        say.line("random", f"{reason}: {EFFECTS_OF_MISSING[RNG]}")
        return None
    with restoring(RNG, folder):
        check_rng(own)
    say.line("random", "taken over: numbers that are drawn (dropout) go on")
    return own


def _set_position(
    say: _Lines,
    theirs: TransformersFolder,
    progress: TrainerState,
    data: TrainBatches,
    args: TrainingArguments,
    seed: int,
) -> None:
    """Sets the position in the data from the epoch, which transformers counts in micro-batches."""
    rows = (theirs.micro_batch_rows or args.per_device_train_batch_size) * theirs.world_size
    if data.num_rows is None:
        row = data.accumulation.num_micro_batches(theirs.step) * rows
        data.continue_at(0, row)
        say.line("data", f"{plural(row, 'row')} of the stream are read past; an epoch of a stream is not counted")
        return
    batches = data.num_rows // rows if args.dataloader_drop_last else math.ceil(data.num_rows / rows)
    done = progress.epoch * batches
    if abs(done - round(done)) > _EPOCH_TOLERANCE * max(1.0, done) and "data" not in (args.allow_changed or ()):
        raise CheckpointError(
            f"the training data changed since the checkpoint: epoch {progress.epoch:g} is not a whole number of "
            f"micro-batches of {rows} rows, of which {data.num_rows} rows give {batches}",
            code="FG610",
            hint="use the data of that run, or go on with other rows: allow_changed: [data]",
        )
    epoch, batch = divmod(round(done), batches)
    is_grouped = args.train_sampling_strategy == "group_by_length"
    data.continue_at(epoch, batch * rows, order_seed=None if is_grouped else seed)
    theirs_order = f"in the order of transformers with the seed {seed}"
    order = {
        "random": theirs_order,
        "transformers_random": theirs_order,
        "sequential": "in the order of the data",
        "group_by_length": "by length in an order of our own, as that of transformers is not repeated: rows may be "
        "met twice or not at all in this epoch",
    }[args.train_sampling_strategy]
    say.line("data", f"epoch {epoch}, row {batch * rows} of {data.num_rows}, {order}; the rows are not compared")
    if theirs.world_size > 1 and data.num_rows % rows:
        say.line("", "transformers fills the last batch of an epoch with its first rows; here no row is repeated")
    accumulated = data.accumulation.largest
    steps = epoch * math.ceil(batches / accumulated) + math.ceil(batch / accumulated)
    if rows == data.share.all_rows and not data.accumulation.changes and steps != theirs.step:
        say.line(
            "",
            f"the checkpoint has {plural(theirs.step, 'step')} for these rows, and gradient_accumulation_steps "
            f"{accumulated} would have made {steps}: a step has another number of rows from here on",
        )


def _seed_of_order(args: TrainingArguments, theirs: TransformersFolder) -> int:
    """Returns the seed with which transformers shuffled: `data_seed`, or the last seed that its process was given."""
    rng = None if args.data_seed is not None else theirs.rng(0)
    if rng is None:
        return args.seed if args.data_seed is None else args.data_seed
    generator = torch.Generator()
    with restoring(RNG, theirs.folder):
        # The state of a generator holds its seed, too.
        generator.set_state(rng["torch"].cpu())
    return generator.initial_seed()
