"""The words of Lightning's `Trainer` in a script, as what our trainers take.

The input is the keyword arguments of a `Trainer`, with objects of Lightning or of `forgather.lightning` among them; the
output is a `TrainerWords` whose callbacks our trainers can call, or a `SettingError`. What the words mean is decided in
`forgather.lightning.meaning`; this module knows the machine and the process.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs

from forgather.errors import ForgatherError
from forgather.lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from forgather.lightning.checkpoint_names import CheckpointNames
from forgather.lightning.foreign import given_of
from forgather.lightning.meaning import meaning_of
from forgather.lightning.run_limits import RunLimits, TorchSwitches
from forgather.lightning.seeds import given_seed
from forgather.lightning.trainer_words import Given, TrainerWords
from forgather.ml.callbacks.progress import ProgressCallback
from forgather.ml.distributed.env import process_facts
from forgather.ml.log import get_logger
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.argument_checks import SettingError
from forgather.rules import Violation
from forgather.value_text import is_one_of, shown

__all__ = ["TrainerWords", "read_words"]

_log = get_logger(__name__)
_OBJECTS = ("callbacks", "logger", "plugins", "strategy", "profiler", "accelerator")


def read_words(**words: Any) -> TrainerWords:
    """Returns what the words of Lightning's `Trainer` mean for our trainers.

    Args:
        **words: the words, with their values; None means "not given".

    Raises:
        SettingError: FG810 to FG814 for the first word that is unknown, refused, or in conflict with another one; the
            further ones are its notes. FG704 if the processes that a launcher started are not those that `devices` and
            `num_nodes` state.
    """
    plain = {name: _plain(value) if name in _OBJECTS else value for name, value in words.items()}
    found, refused = meaning_of(plain, _count_devices)
    refused += _missing_devices(words.get("accelerator"))
    _raise(refused)
    _compare_processes(found)
    settings = _with_group(found)
    seed = given_seed()
    if seed is not None:
        settings.setdefault("seed", seed)
    if seed is None and "seed" not in settings:
        found.notes.append("seed_everything was not called: the seed of the run is 42, so that it can be repeated")
    words_read = dataclasses.replace(found, settings=settings, callbacks=_callbacks(found))
    for note in words_read.notes:
        _log.info("%s", note)
    return words_read


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [given_of(one) or one for one in value]
    return given_of(value) or value


def _raise(refused: list[Violation]) -> None:
    if not refused:
        return
    try:
        argument_checks.raise_first_error(refused)
    except ForgatherError as error:
        for other in refused[1:]:
            error.add_note(f"also [{other.code}] {other.message}{f' ({other.hint})' if other.hint else ''}")
        raise


def _count_devices(accelerator: str) -> int:
    facts = process_facts()
    if facts.world_size > 1:
        return facts.local_world_size
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return 1
    return torch.accelerator.device_count()


def _missing_devices(accelerator: Any) -> list[Violation]:
    if not is_one_of(accelerator, ("gpu", "cuda")) or torch.accelerator.is_available():
        return []
    message = f"accelerator={shown(accelerator)}, and this machine has no GPU"
    hint = 'write accelerator="auto" to train on what there is, or accelerator="cpu"'
    return [Violation("FG811", message, "accelerator", hint, found=accelerator)]


def _compare_processes(found: TrainerWords) -> None:
    """Raises an error if a launcher has started other processes than the words state."""
    facts = process_facts()
    if (
        facts.world_size == 1
        or found.num_processes == facts.world_size
        and (found.processes_per_node == facts.local_world_size)
    ):
        return
    nodes = facts.world_size // facts.local_world_size
    message = (
        f"devices={found.processes_per_node} and {found.num_processes} processes in all are stated, and "
        f"{facts.launcher or 'the launcher'} started {facts.world_size}, {facts.local_world_size} on this machine"
    )
    hint = f"devices counts the processes of one machine: write devices={facts.local_world_size}, num_nodes={nodes}"
    raise SettingError(message, code="FG704", hint=hint).about("devices")


def _with_group(found: TrainerWords) -> dict[str, Any]:
    """Returns the settings, with those of the process group in Accelerate's form."""
    settings = dict(found.settings)
    accelerator: dict[str, Any] = {}
    if "backend" in found.group:
        accelerator["backend"] = found.group["backend"]
    if "timeout_seconds" in found.group:
        timeout = datetime.timedelta(seconds=found.group["timeout_seconds"])
        accelerator["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timeout)]
    if accelerator:
        settings["accelerator_args"] = accelerator
    return settings


def _callbacks(found: TrainerWords) -> list[Any]:
    """Returns the callbacks that our trainers call: the user's own, and those that stand for a word."""
    called = [_called(one) for one in found.callbacks]
    if found.shows_progress and not any(isinstance(one, ProgressCallback) for one in called):
        called.append(ProgressCallback())
    if found.switches:
        called.append(TorchSwitches(**found.switches))
    if found.max_seconds is not None:
        called.append(Timer({"seconds": found.max_seconds}))
    limits = found.limits
    # With steps alone or epochs alone, the trainer's own count ends the run.
    both = limits.max_epochs if limits.max_steps > 0 else None
    if both is not None or limits.min_epochs or limits.min_steps:
        called.append(RunLimits(max_epochs=both, min_epochs=limits.min_epochs, min_steps=limits.min_steps))
    return called


def _called(one: Any) -> Any:
    if not isinstance(one, Given):
        return one
    if one.name == "ModelCheckpoint":
        return CheckpointNames(ModelCheckpoint(**one.options))
    if one.name == "EarlyStopping":
        return one.source if isinstance(one.source, EarlyStopping) else EarlyStopping(**one.options)
    return one.source if isinstance(one.source, Timer) else Timer(**one.options)
