"""What a checkpoint decides, whatever the config says.

Takes the optimizer and the schedule of a config and what a checkpoint holds of them; gives a run that goes on as
the checkpoint has it. Keeps true: a setting of the config that has no effect in a resumed run is said in one line.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from forgather.errors import CheckpointError
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.checkpoint.files import DATA, METER, OPTIMIZER, PROGRESS, RNG, SCHEDULE, TRAINER_STATE
from forgather.ml.checkpoint.lineage import NONE_INTACT, newest_verified, origin_of, passed_over
from forgather.ml.checkpoint.manifest import MANIFEST, read_manifest, small_file, verify
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.rng import try_rng
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.checkpoint_parts import (
    AllowedMissing,
    explained,
    numbers,
    read_parts,
    schedule_state,
    used,
    words,
)
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.data_rng import own_rng
from forgather.ml.trainer.meter import Meter
from forgather.ml.trainer.resume_checks import Meanings, refuse_impossible
from forgather.ml.trainer.rewind import LeftOut

_log = get_logger(__name__)

# What moves while a run goes on: none of it is a setting.
_MOVING = frozenset({"base_lrs", "best", "cooldown_counter", "last_epoch", "last_lr", "lr", "num_bad_epochs", "params"})
_CYCLING = frozenset({"betas", "momentum"})


def announce(folder: Path, max_steps: int) -> None:
    """Says, in one line, which checkpoint a run goes on from, or that nothing is left to train."""
    step = read_manifest(folder).step
    if step >= max_steps:
        place = f"is already at max_steps={max_steps}" if step == max_steps else f"is past max_steps={max_steps}"
        _log.warning("%s %s: nothing to train", folder, place)
        return
    written = origin_of(folder).written or (folder / MANIFEST).stat().st_mtime
    moment = time.localtime(written)
    is_today = moment[:3] == time.localtime()[:3]
    when = time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)
    _log.warning("resuming from %s (step %d of %d, written %s)", folder, step, max_steps, when)


def refuse_unseen(folder: Path) -> None:
    """Raises, on every process, where one of them does not see the checkpoint that all go on from.

    Raises:
        CheckpointError: FG856.
    """
    blind = [rank for rank, is_seen in enumerate(collectives.gathered((folder / MANIFEST).is_file())) if not is_seen]
    if blind:
        ranks = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} is not there for rank{'s' if len(blind) > 1 else ''} {ranks}",
            code="FG856",
            hint="every process reads it: put output_dir on a file system that all machines share",
        )


def settings(optimizer: Any, schedule: Any) -> dict[str, list[Any]]:
    """Returns the settings that a checkpoint brings along, of each group of parameters and of the schedule."""
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        moving = _MOVING | _CYCLING if "max_momentum" in group else _MOVING
        for name, value in group.items():
            if name not in moving and _is_plain(value):
                found.setdefault("lr" if name == "initial_lr" else name, []).append(_comparable(value))
    for name, value in schedule.state_dict().items():
        if name not in _MOVING and not name.startswith("_") and _is_plain(value):
            found[name] = [_comparable(value)]
    return found


def mention(configured: dict[str, list[Any]], restored: dict[str, list[Any]]) -> None:
    """Says which settings of the config lost against those of the checkpoint."""
    lost = [
        f"{name} {_shown(restored[name])} (the config says {_shown(value)})"
        for name, value in configured.items()
        if name in restored and restored[name] != value
    ]
    if lost:
        _log.warning(
            "resuming with the settings of the checkpoint: %s; to change them, begin a new run from its model "
            "('fgcli ckpt export' writes it)",
            ", ".join(lost),
        )


def refuse_other(what: str, present: Any, written_by: str) -> None:
    """Raises where a part of a checkpoint was written by another class.

    Raises:
        CheckpointError: FG605.
    """
    if written_by != type(present).__name__:
        raise _misfit(what, present, f"it was written by {written_by}")


def refuse_others(classes: Mapping[str, str], optimizer: Any, schedule: Any) -> None:
    """Raises where a checkpoint was written by another optimizer or schedule.

    Raises:
        CheckpointError: FG605.
    """
    for what, present in (("optimizer", optimizer), ("schedule", schedule)):
        if (written_by := classes.get(what)) is not None:
            refuse_other(what, present, written_by)


def advance(schedule: Any, steps: int) -> None:
    """Brings a new schedule to where it is after so many updates; one that follows a metric stays at its beginning.

    It is for a checkpoint that does not hold the schedule: before the rate of the checkpoint is put back.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer takes no step meanwhile is meant
        for _ in range(steps):
            schedule.step()


def restore_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Goes on with a schedule; the next update takes the rate that its present plan gives at its step.

    The rate of the old plan lies in the optimizer: at the end of a run that is now made longer, that is zero. Where the
    checkpoint had fewer groups of parameters, the optimizer has the rates of each present one by now.

    Raises:
        CheckpointError: FG605 where it is the state of another schedule.
    """
    groups = schedule.optimizer.param_groups
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if isinstance(state.get(name), list) and len(state[name]) != len(groups):
            state = state | {name: [group.get(key) for group in groups]}
    try:
        schedule.load_state_dict(state)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise _misfit("schedule", schedule, f"{type(error).__name__}: {error}") from None
    if isinstance(schedule, LambdaLR):
        for group, base, rate in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * rate(schedule.last_epoch))
            else:
                group["lr"] = base * rate(schedule.last_epoch)


def _misfit(what: str, present: Any, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the {what} state does not fit {type(present).__name__}: {reason}",
        code="FG605",
        hint=f"resume with the {what} that the checkpoint was written with",
    )


def found_again(best: str | None, *folders: Path) -> str | None:
    """Returns where the best checkpoint lies now: by its name, in the first of `folders` that has it."""
    if best is None:
        return None
    name = Path(best).name
    found = next((folder / name for folder in folders if (folder / name).is_dir()), None)
    if found is None:
        _log.warning("the best checkpoint so far, %s, is gone: a later one will be the best", best)
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


def _shown(values: list[Any]) -> str:
    different = list(dict.fromkeys(repr(value) for value in values))
    return different[0] if len(different) == 1 else "/".join(different)


def mention_earlier_run(output_dir: Path) -> None:
    """Says that the output folder holds checkpoints that this run does not go on from."""
    if earlier := list_checkpoints(output_dir):
        _log.warning(
            "%s holds %d checkpoints of an earlier run, up to step %d: this run begins anew, keeps them, and "
            "replaces one where it saves the same step",
            output_dir,
            len(earlier),
            earlier[-1][0],
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run remembers of the checkpoint that it goes on from.

    Args:
        progress: how far the run was; of the step alone where the checkpoint does not hold more.
        rng: random states of this process; None where there are none for it.
        owed: what was due at the step, and not done.
        guard: what judgments of steps depend on.
        skips: the steps that were left out.
    """

    progress: TrainerState
    rng: dict[str, Any] | None
    owed: list[str]
    guard: dict[str, Any]
    skips: list[LeftOut]


def put_back(
    folder: Path,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    *,
    meanings: Meanings | None = None,
) -> Loaded:
    """Puts a checkpoint back into the parts of a run.

    Args:
        folder: of a verified checkpoint.
        args: of the run.
        strategy: gets weights and optimizer state.
        schedule: of the learning rate.
        data: gets the position.
        meter: gets the mean loss.
        meanings: what the numbers of the run mean; None where the checkpoint is its own.

    Raises:
        CheckpointError: FG605 where it is one of another model, optimizer or schedule; FG608 where a part is missing
            that may not be; FG613 where tokens, labels or the model's settings are others; FG675 where one is not as a
            run writes it.
    """
    with collectives.run_collectively(lambda: CheckpointReader(folder)) as saved:
        return _put_back(folder, saved, args, strategy, schedule, data, meter, meanings)


def _put_back(
    folder: Path,
    saved: CheckpointReader,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    meanings: Meanings | None,
) -> Loaded:
    progress = collectives.run_collectively(lambda: read_progress(folder))
    held = {name for name, part in ((PROGRESS, progress), (OPTIMIZER, saved.optimizer)) if part is not None}
    parts = collectives.run_collectively(lambda: read_parts(folder, held, frozenset(args.allow_missing or ())))
    step = read_manifest(folder).step
    present = {"groups": getattr(strategy.optimizer, "param_groups", ()), "schedule": schedule.state_dict()}
    collectives.run_collectively(
        lambda: refuse_impossible(folder, step, origin_of(folder), progress, saved.optimizer, parts, **present)
    )
    if meanings is not None:
        with used("meanings", folder):
            recorded = parts.get("meanings", {})
            collectives.run_on_main(lambda: meanings.refuse_others(folder, recorded, args.allow_changed or ()))
    with used(SCHEDULE, folder):
        refuse_others(parts.get("classes", {}), strategy.optimizer, schedule)
    configured = settings(strategy.optimizer, schedule)
    if SCHEDULE not in parts:
        advance(schedule, step)
    with used(OPTIMIZER, folder):
        strategy.restore(saved)
        strategy.restore_optimizer(saved)
    if SCHEDULE in parts:
        with used(SCHEDULE, folder):
            restore_schedule(schedule, schedule_state(schedule, parts[SCHEDULE]))
    mention(configured, settings(strategy.optimizer, schedule))
    if DATA in parts:
        with used(DATA, folder):
            collectives.run_collectively(functools.partial(data.load_state_dict, parts[DATA]))
            numbers({"epoch": data.epoch, "row": data.row}, whole=True)
    if METER in parts:
        with used(METER, folder):
            meter.load_state_dict(dict(numbers(parts[METER])))
    with used(RNG, folder):
        rng = own_rng(parts[RNG], strategy.topology) if RNG in parts else None
        if rng is not None:
            try_rng(rng)
    with used("owed", folder):
        owed = words(parts.get("owed", []))
    # Earlier releases kept neither: their runs left no step out.
    with used("guard", folder):
        norms = parts.get("guard", {}).get("norms", [])
        guard = {"norms": list(numbers({str(place): norm for place, norm in enumerate(norms)}).values())}
    with used("skips", folder):
        skips = [LeftOut.of(facts) for facts in parts.get("skips", ())]
    return Loaded(progress or TrainerState(global_step=step), rng, owed, guard, skips)


def read_progress(folder: Path) -> TrainerState | None:
    """Returns the state for people that a checkpoint holds; None where it has none.

    Raises:
        CheckpointError: FG675 where it is not as a run writes it.
    """
    file, manifest = folder / TRAINER_STATE, read_manifest(folder)
    if TRAINER_STATE not in manifest.files or not file.exists():
        return None
    with used(PROGRESS, folder):
        small_file(file)
        state: TrainerState = TrainerState.load_from_json(str(file))
        if state.global_step != manifest.step:
            raise ValueError(f"it is that of step {state.global_step}")
        if not all(isinstance(line, dict) for line in state.log_history):
            raise TypeError("its log has lines that are no tables")
        state.epoch = float(state.epoch or 0.0)
    return state


def resolve_resume(
    request: bool | str | os.PathLike[str] | None,
    output_dir: Path,
    allow_missing: Sequence[str] = (),
    *,
    storage: Storage | None = None,
) -> Path | None:
    """Returns the verified checkpoint to go on from; None to begin anew.

    Args:
        request: true or "auto" for the newest intact one, a folder, or nothing.
        output_dir: where checkpoints of the run lie.
        allow_missing: parts whose files may be missing.
        storage: see `newest_verified`.

    Raises:
        CheckpointError: FG601 to FG604 for a named folder; FG607 where there are checkpoints and none
            is intact.
    """
    if request is None or request is False:
        return None
    if request is not True and str(request) != "auto":
        folder = Path(request).expanduser()
        try:
            verify(folder, without=AllowedMissing(allow_missing))
        except CheckpointError as failure:
            raise explained(failure, allow_missing) from None
        return folder
    newest, skipped = newest_verified(output_dir, without=AllowedMissing(allow_missing), storage=storage)
    for error in skipped:
        _log.warning("skipped a checkpoint: %s", error.message)
    if newest is None and skipped:
        several = f"none of the {len(skipped)} checkpoints in {str(output_dir)!r} is intact; of the newest, "
        only = f"the only checkpoint in {str(output_dir)!r} is not intact: "
        raise CheckpointError(
            f"{several if len(skipped) > 1 else only}{skipped[0].message}",
            code="FG607",
            hint=NONE_INTACT,
        )
    if newest is None:
        _log.warning("no checkpoint in %s: the run begins anew", output_dir)
    elif others := passed_over(newest):
        _log.warning("resume_from_checkpoint: auto passed over %s", others)
    return newest
