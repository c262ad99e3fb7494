"""Reads the training state of a checkpoint by part (optimizer, schedule, data, ...), and checks each part.

A missing part is an error that names the part, unless the user allowed it to be missing. In that case a warning states
what the run does without the part. A part that does not have the form in which a run writes it is an FG675 error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError, ForgatherError
from forgather.ml.checkpoint.files import DATA, METER, OPTIMIZER, PROGRESS, RNG, SCHEDULE, TRAINING_STATE, parts_in
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.state import read_state
from forgather.ml.log import get_logger

_log = get_logger(__name__)

EFFECTS_OF_MISSING = {
    OPTIMIZER: "the optimizer starts without its moments",
    SCHEDULE: "the learning rate follows the schedule of the config",
    DATA: "the data starts at its first row",
    RNG: "random numbers are drawn from the seed again",
    METER: "the mean loss starts at this step",
    PROGRESS: "the log and the best metric start empty",
}
"""The parts of the training state, each with what a resumed run does if the part is missing."""


# Checkpoints are untrusted input. 2**53 is the largest count that a float holds exactly; no run reaches it.
_MOST = 2**53
_MOST_OF_ALL = 1e300


class AllowedMissing:
    """A container of the names of checkpoint files that may be missing.

    Args:
        allowed: the parts that may be missing. A file may be missing if all parts that it stores may be missing.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def __contains__(self, name: object) -> bool:
        parts = parts_in(str(name))
        return bool(parts) and self._allowed.issuperset(parts)


def with_missing_hint(error: CheckpointError, allowed: Collection[str]) -> CheckpointError:
    """Returns the error. If the error reports a missing file, its hint names the `--allow-missing` option.

    Args:
        error: the error that was raised while the checkpoint was verified.
        allowed: the parts that the user already allowed to be missing.
    """
    # Only a missing file: a changed one may be the sign of a damaged disk, and no option accepts it.
    parts = parts_in(str(error.found)) if error.code == "FG604" and error.found else ()
    if parts:
        error.hint = f"restore the file, or resume without its content: --allow-missing {_option_value(parts, allowed)}"
    return error


def read_parts(folder: Path, present: Collection[str], allowed: Collection[str]) -> dict[str, Any]:
    """Returns the training state of a checkpoint, by part; warns about missing parts that are allowed to be missing.

    Args:
        folder: the folder of a verified checkpoint.
        present: the parts that are stored in other files of the checkpoint.
        allowed: the parts that may be missing.

    Raises:
        CheckpointError: FG608 if required parts are missing (the message names all of them); FG611 if a file cannot be
            read.
    """
    listed = read_manifest(folder).files
    files = [f"{TRAINING_STATE}.json", f"{TRAINING_STATE}.safetensors"]
    # Both conditions: a file that the manifest does not list is not part of the checkpoint and was not verified.
    has_state = all(name in listed and (folder / name).exists() for name in files)
    state = read_state(folder, TRAINING_STATE) if has_state else {}
    # Treated as empty, so that the error names the parts that are missing.
    if not isinstance(state, dict):
        state = {}
    missing = [part for part in EFFECTS_OF_MISSING if part not in present and part not in state]
    lacking = [part for part in missing if part not in allowed]
    if lacking:
        raise missing_parts_error(folder, lacking, allowed, is_model_alone=not has_state and OPTIMIZER in missing)
    if missing:
        effects = "; ".join(EFFECTS_OF_MISSING[part] for part in missing)
        _log.warning("resuming from %s without %s: %s", folder, _enumerated(missing), effects)
    return state


def missing_parts_error(
    folder: Path, lacking: list[str], allowed: Collection[str], *, is_model_alone: bool = False
) -> CheckpointError:
    """Returns the FG608 error for parts that are missing from a checkpoint.

    Args:
        folder: the folder of the checkpoint.
        lacking: the missing parts, which are not allowed to be missing.
        allowed: the parts that may be missing.
        is_model_alone: whether the checkpoint holds weights and nothing else.
    """
    alone = "holds only the model: it " if is_model_alone else ""
    return CheckpointError(
        f"the checkpoint {str(folder)!r} {alone}has no {_enumerated(lacking)}",
        code="FG608",
        hint="resume from another checkpoint, or without these parts: --allow-missing "
        + _option_value(lacking, allowed)
        + ("; save_only_model: true writes such checkpoints" if alone else ""),
    )


def _option_value(parts: Collection[str], allowed: Collection[str]) -> str:
    return ",".join(part for part in EFFECTS_OF_MISSING if part in parts or part in allowed)


def checked_numbers(state: Mapping[str, Any], *, whole: bool = False) -> Mapping[str, Any]:
    """Returns a part of the training state unchanged, after a check that all its values are finite numbers.

    Args:
        state: the values of the part, by name.
        whole: whether all values must be non-negative integers below 2**53.

    Raises:
        ValueError: if a value is not such a number.
    """
    for name, value in state.items():
        # `type(...) is int`: JSON's `true` is an instance of int, and would count as 1.
        fits = type(value) is int and 0 <= value < _MOST if whole else _is_finite(value)
        if not fits:
            raise ValueError(f"{name} is {value!r:.40}")
    return state


def _is_finite(value: Any) -> bool:
    # Also false for NaN, of which every comparison is false.
    return isinstance(value, int | float) and abs(value) < _MOST_OF_ALL


def checked_strings(state: Any) -> list[str]:
    """Returns a part of the training state unchanged, after a check that it is a list of strings.

    Raises:
        TypeError: if the part is not a list of strings.
    """
    if not isinstance(state, list) or not all(isinstance(word, str) for word in state):
        raise TypeError(f"it is {state!r:.40}")
    return state


def schedule_state(schedule: Any, state: Any) -> dict[str, Any]:
    """Returns the state of a learning rate schedule unchanged, after a check that it sets only data attributes.

    Args:
        schedule: the learning rate schedule into which the state will be loaded.
        state: the state as it was read from the checkpoint.

    Raises:
        TypeError: if the state is not a mapping, or if one of its keys is the name of a method.
    """
    if not isinstance(state, dict):
        raise TypeError(f"it is a {type(state).__name__}")
    for name in state:
        # `LRScheduler.load_state_dict` updates `__dict__` with it: a key "step" would replace the method.
        if not isinstance(name, str) or callable(getattr(type(schedule), name, None)):
            raise TypeError(f"{name!r:.40} is not a data attribute of a schedule")
    return state


def _enumerated(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


@contextmanager
def restoring(part: str, folder: Path) -> Iterator[None]:
    """Context manager that converts errors of its body into one error that names the part and the checkpoint.

    Args:
        part: the name of the part that the body restores.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: FG675 if the body raises any error other than a `ForgatherError`.
    """
    try:
        yield
    # Errors of our own are located already, and say more than this function knows.
    except ForgatherError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the part {part!r} of the checkpoint {str(folder)!r} does not have the form that a run writes: "
            f"{type(error).__name__}: {error!s:.80}",
            code="FG675",
            hint=f"resume from another checkpoint, or see 'fgcli ckpt show {folder}'",
        ) from error
