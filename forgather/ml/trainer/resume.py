"""Resumes a run: finds the checkpoint, and restores each of its parts into the run.

`resolve_resume` returns the folder of the requested checkpoint after verifying it. `restore_checkpoint` restores
weights, optimizer state, schedule, data position, metrics and random states. Settings of the optimizer and schedule
that a checkpoint stores take precedence over the config, and one warning lists the settings of the config that
therefore have no effect.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from forgather.errors import CheckpointError
from forgather.ml.adapter_base import refuse_checkpoint_of_another_base
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.checkpoint.files import (
    DATA,
    METER,
    OPTIMIZER,
    PROGRESS,
    RNG,
    SCHEDULE,
    TRAINER_STATE,
    TRANSFORMERS,
    is_of_transformers,
)
from forgather.ml.checkpoint.lineage import NONE_INTACT, describe_passed_over, newest_verified, origin_of
from forgather.ml.checkpoint.manifest import MANIFEST, read_manifest, read_small_file, verify
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.rng import check_rng, rank_rng
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.checkpoint.transformers_folder import TransformersFolder
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.loss_path import LossPath
from forgather.ml.number_format import plural
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.checkpoint_parts import (
    AllowedMissing,
    checked_numbers,
    checked_strings,
    read_parts,
    restoring,
    schedule_state,
    with_missing_hint,
)
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.meter import Meter
from forgather.ml.trainer.rate_change import LEARNING_RATE, change_rates
from forgather.ml.trainer.resume_checks import Meanings, refuse_impossible
from forgather.ml.trainer.rewind import SkippedStep
from forgather.ml.trainer.weight_average import WeightAverage
from forgather.value_text import can_be_path, shown

_log = get_logger(__name__)

# State that changes during a run, not settings: a difference to the config means nothing.
_MOVING = frozenset({"base_lrs", "best", "cooldown_counter", "last_epoch", "last_lr", "lr", "num_bad_epochs", "params"})
# `OneCycleLR` and `CyclicLR` change these, too; other schedules leave them as settings.
_CYCLING = frozenset({"betas", "momentum"})


def announce(folder: Path, max_steps: int) -> None:
    """Logs the checkpoint that the run resumes from, or that no steps are left to train.

    Args:
        folder: the folder of the checkpoint.
        max_steps: the number of optimizer steps of the whole run.
    """
    theirs = TransformersFolder(folder) if is_of_transformers(folder) else None
    step = theirs.step if theirs else read_manifest(folder).step
    if step >= max_steps:
        place = f"is already at max_steps={max_steps}" if step == max_steps else f"is past max_steps={max_steps}"
        _log.warning("%s %s: nothing to train", folder, place)
        return
    # Checkpoints of earlier releases have no time in the manifest.
    record = folder / (TRAINER_STATE if theirs else MANIFEST)
    written = origin_of(folder).written or record.stat().st_mtime
    moment = time.localtime(written)
    is_today = moment[:3] == time.localtime()[:3]
    when = time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)
    by = f", by {TRANSFORMERS}" if theirs else ""
    _log.warning("resuming from %s (step %d of %d, written %s%s)", folder, step, max_steps, when, by)
    before = theirs or read_progress(folder)
    if before is not None and before.max_steps not in (0, max_steps):
        _log.warning(
            "the checkpoint is of a run of %d steps, and this run has %d: a learning rate schedule that depends on the "
            "length, such as linear or cosine, is that of %d steps from here on",
            before.max_steps,
            max_steps,
            max_steps,
        )


def refuse_unreadable(folder: Path) -> None:
    """Raises an error on every process if one process cannot see the checkpoint.

    Collective: every process must call it.

    Raises:
        CheckpointError: FG856 if the manifest of the checkpoint does not exist for one process.
    """
    record = TRAINER_STATE if is_of_transformers(folder) else MANIFEST
    # Without a shared file system each machine would see its own folder, and ranks would resume at different steps.
    blind = [rank for rank, is_seen in enumerate(collectives.all_gather((folder / record).is_file())) if not is_seen]
    if blind:
        ranks = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} is not visible to rank{'s' if len(blind) > 1 else ''} {ranks}",
            code="FG856",
            hint="every process reads it: put output_dir on a file system that all machines share",
        )


def restored_settings(optimizer: Any, schedule: Any) -> dict[str, list[Any]]:
    """Returns the current values of all settings that a checkpoint overwrites, by name.

    A setting of the optimizer has one value per parameter group, and a setting of the schedule has one value.

    Args:
        optimizer: the optimizer whose parameter groups are read.
        schedule: the learning rate schedule whose state is read.
    """
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        # `max_momentum` is written into the groups only by schedules that cycle the momentum.
        moving = _MOVING | _CYCLING if "max_momentum" in group else _MOVING
        for name, value in group.items():
            if name not in moving and _is_plain(value):
                found.setdefault("lr" if name == "initial_lr" else name, []).append(_comparable(value))
    for name, value in schedule.state_dict().items():
        if name not in _MOVING and not name.startswith("_") and _is_plain(value):
            found[name] = [_comparable(value)]
    return found


def warn_of_overridden(configured: dict[str, list[Any]], restored: dict[str, list[Any]]) -> None:
    """Warns about settings of the config that the checkpoint has overwritten.

    Args:
        configured: the result of `restored_settings` before the checkpoint was restored.
        restored: the result of `restored_settings` after the checkpoint was restored.
    """
    lost = [
        shown
        for name, values in configured.items()
        if name in restored
        for shown in _overridden(name, restored[name], values)
    ]
    if lost:
        _log.warning(
            "resuming with the settings of the checkpoint: %s; to change them, begin a new run from its model "
            "('fgcli ckpt export' writes it)%s",
            ", ".join(lost),
            "; allow_changed: [learning_rate] takes the learning rate of the config"
            if any(one.startswith("lr ") for one in lost)
            else "",
        )


def refuse_other_classes(classes: Mapping[str, str], optimizer: Any, schedule: Any) -> None:
    """Raises an error if a checkpoint was written with another class of optimizer or schedule.

    Args:
        classes: the class names that the checkpoint stores under "optimizer" and "schedule".
        optimizer: the optimizer of the resumed run.
        schedule: the learning rate schedule of the resumed run.

    Raises:
        CheckpointError: FG605 if a class differs.
    """
    for what, present in (("optimizer", optimizer), ("schedule", schedule)):
        # Checkpoints of earlier releases do not name the classes.
        if (written_by := classes.get(what)) not in (None, type(present).__name__):
            raise _misfit(what, present, f"it was written by {written_by}")


def advance_schedule(schedule: Any, steps: int) -> None:
    """Advances a new learning rate schedule to the step of a checkpoint that does not store the schedule.

    This must be done before the optimizer state is restored. `ReduceLROnPlateau`, which is stepped by evaluations, is
    not advanced.

    Args:
        schedule: the new schedule.
        steps: the number of optimizer steps at the checkpoint.
    """
    # Its steps are evaluations, and their metrics are not known here.
    if isinstance(schedule, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no optimizer step precedes; here that is intended
        for _ in range(steps):
            schedule.step()


def restore_schedule(schedule: Any, state: dict[str, Any], *, optimizer: Any = None) -> None:
    """Restores the state of a schedule, and sets the learning rate that the current schedule gives for the next step.

    The restored optimizer state contains the learning rate of the earlier schedule. If a finished run is extended, that
    rate can be zero, so it must not be used. If the checkpoint has another number of parameter groups, the rates in the
    optimizer's current groups are used.

    Args:
        schedule: the learning rate schedule of the resumed run.
        state: the schedule state that the checkpoint stores, which is that of its main process.
        optimizer: the stored optimizer state, from which the groups of the optimizer have been restored by the names of
            their parameters; None if they have not.

    Raises:
        CheckpointError: FG605 if the state does not fit the schedule.
    """
    groups = schedule.optimizer.param_groups
    if optimizer is not None and "base_lrs" in state and all("initial_lr" in group for group in groups):
        # The groups of a pipeline's stages differ, also where their number is the same.
        state = state | {"base_lrs": [group["initial_lr"] for group in groups]}
    # transformers also makes groups that are empty, or that differ in nothing.
    for name in ("lr_lambdas", "min_lrs", "max_lrs"):
        each = state.get(name)
        if isinstance(each, list) and len(each) != len(groups) and all(one == each[0] for one in each):
            state = state | {name: each[:1] * len(groups)}
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        # A length that differs would make `zip` in the schedule drop groups silently.
        if isinstance(state.get(name), list) and len(state[name]) != len(groups):
            state = state | {name: [group.get(key) for group in groups]}
    try:
        schedule.load_state_dict(state)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise _misfit("schedule", schedule, f"{type(error).__name__}: {error}") from None
    # Only `LambdaLR` (all schedules of transformers) is a function of the step; others compute a rate from the previous
    # one.
    if isinstance(schedule, LambdaLR):
        for group, base, rate in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            if isinstance(group["lr"], Tensor):  # a compiled or capturable optimizer keeps reading this tensor
                group["lr"].fill_(base * rate(schedule.last_epoch))
            else:
                group["lr"] = base * rate(schedule.last_epoch)


def _misfit(what: str, present: Any, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the {what} state does not fit {type(present).__name__}: {reason}",
        code="FG605",
        hint=f"resume with the {what} that the checkpoint was written with",
    )


def current_folder(best: str | None, *folders: Path) -> str | None:
    """Returns the folder in which the best checkpoint is now; None, with a warning, if it was removed.

    Args:
        best: the folder in which the best checkpoint was when the restored checkpoint was written, possibly on another
            machine; None if there was no best checkpoint.
        *folders: the folders in which a checkpoint folder of the same name is searched, in this order.
    """
    if best is None:
        return None
    # By name: the output folder may have been moved or copied since the checkpoint was written.
    name = Path(best).name
    found = next((folder / name for folder in folders if (folder / name).is_dir()), None)
    if found is None:
        _log.warning("the best checkpoint so far, %s, was removed: a later one will be the best", best)
        return None
    return str(found)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and not value.ndim)
    )


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_comparable(item) for item in value] if isinstance(value, list | tuple) else value


def _overridden(name: str, restored: list[Any], configured: list[Any]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    for number, (found, given) in enumerate(zip_longest(restored, configured)):
        if found != given:
            groups.setdefault((repr(found), repr(given)), []).append(number)
    for (found, given), numbers in groups.items():
        # Groups are named only if others differ: most settings have one value for all parameters.
        several = "s" if len(numbers) > 1 else ""
        where = f" in parameter group{several} {', '.join(map(str, numbers))}" if len(numbers) < len(restored) else ""
        yield f"{name} {found}{where} (the config says {given})"


def warn_of_earlier_run(output_dir: Path) -> None:
    """Warns if the output folder contains checkpoints of an earlier run, from which the new run does not resume."""
    if earlier := list_checkpoints(output_dir):
        _log.warning(
            "%s holds %s of an earlier run, up to step %d: this run starts from the beginning, keeps %s",
            output_dir,
            plural(len(earlier), "checkpoint"),
            earlier[-1][0],
            "it, and replaces it if it saves the same step"
            if len(earlier) == 1
            else "them, and replaces one if it saves the same step",
        )


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The parts of a restored checkpoint that `Run` puts back itself.

    Args:
        progress: the trainer state. If the checkpoint does not store one, only the step is set.
        rng: the random states of this process; None if the checkpoint does not contain them.
        pending: the names of the flags of actions that were due and not done, see `pending_actions`.
        guard: the state of the step guard.
        skips: the skipped steps.
        control: the settings that the user changed while the run went on.
    """

    progress: TrainerState
    rng: dict[str, Any] | None
    pending: list[str]
    guard: dict[str, Any]
    skips: list[SkippedStep]
    control: dict[str, Any]


def restore_checkpoint(
    folder: Path,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    *,
    meanings: Meanings | None = None,
    average: WeightAverage | None = None,
) -> RestoredState:
    """Restores a checkpoint into the parts of a run. Collective: every process must call it.

    Args:
        folder: the folder of a verified checkpoint.
        args: the training arguments of the resumed run.
        strategy: the strategy, whose weights and optimizer state are restored.
        schedule: the learning rate schedule, whose state is restored.
        data: the training data, whose position is restored.
        meter: the meter, whose sums of losses are restored.
        meanings: the description of the resumed run's tokenizer, labels and model settings. It is compared with the
            description in the checkpoint. None, which skips the comparison, if the same run wrote the checkpoint.
        average: the moving average of the weights, which is restored; None if there is none.

    Raises:
        CheckpointError: FG605 if the checkpoint belongs to another model, optimizer or schedule; FG608 if a required
            part is missing; FG613 if the tokenizer, the labels or the model's settings changed; FG675 if a part does
            not have the form in which a run writes it.
    """
    with collectives.run_collectively(lambda: CheckpointReader(folder)) as saved:
        return _restore_parts(folder, saved, args, strategy, schedule, data, meter, meanings, average)


def _restore_parts(
    folder: Path,
    saved: CheckpointReader,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    meanings: Meanings | None,
    average: WeightAverage | None,
) -> RestoredState:
    progress = collectives.run_collectively(lambda: read_progress(folder))
    held = {name for name, part in ((PROGRESS, progress), (OPTIMIZER, saved.optimizer)) if part is not None}
    parts = collectives.run_collectively(lambda: read_parts(folder, held, frozenset(args.allow_missing or ())))
    step = read_manifest(folder).step
    present = {"groups": getattr(strategy.optimizer, "param_groups", ()), "schedule": schedule.state_dict()}
    collectives.run_collectively(
        lambda: refuse_impossible(folder, step, origin_of(folder), progress, saved.optimizer, parts, **present)
    )
    _refuse_other_meanings(folder, parts, args, strategy, meanings)
    with restoring(SCHEDULE, folder):
        refuse_other_classes(parts.get("classes", {}), strategy.optimizer, schedule)
    # Recorded now: restoring overwrites these values in place.
    configured = restored_settings(strategy.optimizer, schedule)
    # Before the optimizer is restored: stepping a schedule writes learning rates into the parameter groups.
    if SCHEDULE not in parts:
        advance_schedule(schedule, step)
    with restoring(OPTIMIZER, folder):
        strategy.restore(saved)
        strategy.restore_optimizer(saved)
        _restore_average(average, saved, parts)
    if SCHEDULE in parts:
        with restoring(SCHEDULE, folder):
            restore_schedule(schedule, schedule_state(schedule, parts[SCHEDULE]), optimizer=saved.optimizer)
    _change_rates(args, schedule, configured, parts, step)
    warn_of_overridden(configured, restored_settings(strategy.optimizer, schedule))
    if DATA in parts:
        with restoring(DATA, folder):
            collectives.run_collectively(functools.partial(data.load_state_dict, parts[DATA]))
            checked_numbers({"epoch": data.epoch, "row": data.row}, whole=True)
    if METER in parts:
        with restoring(METER, folder):
            meter.load_state_dict(dict(checked_numbers(parts[METER])))
    with restoring(RNG, folder):
        rng = rank_rng(parts[RNG], strategy.topology) if RNG in parts else None
        if rng is not None:
            check_rng(rng)
    path: LossPath | None = getattr(strategy.rule, "path", None)
    if path is not None:
        with restoring("loss", folder):
            path.load_state_dict(parts.get("loss"))
    with restoring("owed", folder):
        pending = checked_strings(parts.get("owed", []))
    # Checkpoints of earlier releases hold neither guard nor skips.
    with restoring("skips", folder):
        skips = [SkippedStep.from_dict(facts) for facts in parts.get("skips", ())]
    present_step = progress or TrainerState(global_step=step)
    return RestoredState(present_step, rng, pending, parts.get("guard", {}), skips, parts.get("control", {}))


def _change_rates(
    args: TrainingArguments, schedule: Any, configured: Mapping[str, Any], parts: Mapping[str, Any], step: int
) -> None:
    if LEARNING_RATE in (args.allow_changed or ()):
        factor = parts.get("control", {}).get("schedule", {}).get("factor", 1.0)
        change_rates(schedule, configured["lr"], step=step, run_dir=str(args.logging_dir), factor=factor)


def _refuse_other_meanings(
    folder: Path, parts: Mapping[str, Any], args: TrainingArguments, strategy: Strategy, meanings: Meanings | None
) -> None:
    if meanings is not None:
        with restoring("meanings", folder):
            recorded = parts.get("meanings", {})
            # On the main process, which alone has the files that describe model and tokenizer.
            collectives.run_on_main(lambda: meanings.refuse_others(folder, recorded, args.allow_changed or ()))
    # On the main process, which alone is sure to know the digest of the base model.
    collectives.run_on_main(lambda: refuse_checkpoint_of_another_base(folder, strategy.model))


def _restore_average(average: WeightAverage | None, saved: CheckpointReader, parts: Mapping[str, Any]) -> None:
    if average is not None:
        average.restore(saved, checked_numbers(parts.get("average", {}), whole=True))
    elif "average" in parts:
        _log.warning("the checkpoint has averaged weights, which are left out: ema_decay is not set")


def read_progress(folder: Path) -> TrainerState | None:
    """Returns the trainer state of a checkpoint; None if the checkpoint does not store one.

    Raises:
        CheckpointError: FG675 if the trainer state does not have the form in which a run writes it.
    """
    file, manifest = folder / TRAINER_STATE, read_manifest(folder)
    # A file that the manifest does not list was not verified.
    if TRAINER_STATE not in manifest.files or not file.exists():
        return None
    with restoring(PROGRESS, folder):
        read_small_file(file)  # refuses a file too large for what it should hold, before it is parsed
        state: TrainerState = TrainerState.load_from_json(str(file))
        # The file is meant for people and may have been edited; the manifest has a digest of itself.
        if state.global_step != manifest.step:
            raise ValueError(f"it belongs to step {state.global_step}")
        if not all(isinstance(line, dict) for line in state.log_history):
            raise TypeError("its log has lines that are not objects")
        state.epoch = float(state.epoch or 0.0)
    return state


def is_expected(request: bool | str | os.PathLike[str] | None, output_dir: Path) -> bool:
    """Returns whether `resolve_resume` is expected to find a checkpoint of this library. No file is verified.

    Args:
        request: see `resolve_resume`.
        output_dir: see there.
    """
    if request is None or request is False:
        return False
    if request is not True and str(request) != "auto":
        folders = [Path(request).expanduser()] if can_be_path(request) else []
    else:
        folders = [folder for _, folder in list_checkpoints(output_dir)]
    return any((folder / MANIFEST).is_file() for folder in folders)


def resolve_resume(
    request: bool | str | os.PathLike[str] | None,
    output_dir: Path,
    allow_missing: Sequence[str] = (),
    *,
    storage: Storage | None = None,
) -> Path | None:
    """Returns the verified checkpoint to resume from; None if the run must start from the beginning.

    Args:
        request: true or "auto" for the newest intact checkpoint in `output_dir`; the folder of a checkpoint; or None or
            false for no resume.
        output_dir: the folder that contains the run's checkpoint folders.
        allow_missing: the parts of the training state whose files may be missing.
        storage: the storage, see `newest_verified`.

    Raises:
        CheckpointError: FG601 to FG604 if the given folder is not an intact checkpoint; FG607 if `output_dir` contains
            checkpoints and none is intact.
    """
    if request is None or request is False:
        return None
    if request is not True and not can_be_path(request):
        raise CheckpointError(
            f"resume_from_checkpoint is {shown(request)}", code="FG601", hint='give true, "auto" or a folder'
        )
    if request is not True and str(request) != "auto":
        folder = Path(request).expanduser()
        if is_of_transformers(folder):
            return folder
        try:
            verify(folder, without=AllowedMissing(allow_missing))
        except CheckpointError as failure:
            raise with_missing_hint(failure, allow_missing) from None
        return folder
    newest, skipped = newest_verified(output_dir, without=AllowedMissing(allow_missing), storage=storage)
    # Only where this run has not saved yet: its own checkpoints come later than those that it was begun from.
    if newest is None and (
        theirs := [folder for _, folder in list_checkpoints(output_dir) if is_of_transformers(folder)]
    ):
        return theirs[-1]
    for error in skipped:
        _log.warning("skipped a checkpoint: %s", error.message)
    # An error, not a new start: training again from the beginning would look like a successful resume.
    if newest is None and skipped:
        several = f"none of the {len(skipped)} checkpoints in {str(output_dir)!r} is intact; of the newest, "
        only = f"the only checkpoint in {str(output_dir)!r} is not intact: "
        raise CheckpointError(
            f"{several if len(skipped) > 1 else only}{skipped[0].message}",
            code="FG607",
            hint=NONE_INTACT,
        )
    if newest is None:
        _log.warning("no checkpoint in %s: the run starts from the beginning", output_dir)
    elif others := describe_passed_over(newest):
        _log.warning("resume_from_checkpoint: auto passed over %s", others)
    return newest
