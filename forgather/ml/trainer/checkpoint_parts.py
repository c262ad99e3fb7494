"""The training state of a checkpoint, by part, and what a run does without one of them.

Takes a checkpoint folder and the parts that may be missing; gives the parts that are there. A missing part is an error
that names it, unless it is allowed to be missing; then one warning says what starts from the beginning. A part that has
another form than a run writes is an FG675 error.
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
"""Each part, and what a run does without it."""


# Checkpoints are untrusted input. 2**53 is the largest count that a float holds exactly; no run reaches it.
_MOST = 2**53
_MOST_OF_ALL = 1e300


class AllowedMissing:
    """The checkpoint files that a run can do without, as a container of file names.

    Args:
        allowed: parts that may be missing; a file is contained if everything in it is allowed.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def __contains__(self, name: object) -> bool:
        parts = parts_in(str(name))
        return bool(parts) and self._allowed.issuperset(parts)


def with_missing_hint(error: CheckpointError, allowed: Collection[str]) -> CheckpointError:
    """Returns the error for a missing file, with a hint that names the `--allow-missing` option.

    Args:
        error: raised while the checkpoint was verified.
        allowed: parts that may be missing already.
    """
    # Only a missing file: a changed one may be the sign of a damaged disk, and no option accepts it.
    parts = parts_in(str(error.found)) if error.code == "FG604" and error.found else ()
    if parts:
        error.hint = f"restore the file, or resume without its content: --allow-missing {_option_value(parts, allowed)}"
    return error


def read_parts(folder: Path, present: Collection[str], allowed: Collection[str]) -> dict[str, Any]:
    """Returns the training state of a checkpoint, by part, without the parts that are allowed to be missing.

    Args:
        folder: of a verified checkpoint.
        present: parts that other files of the checkpoint hold.
        allowed: parts that may be missing.

    Raises:
        CheckpointError: FG608, naming every missing part that is required; FG611 for a file that cannot be read.
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
        alone = "holds only the model: it " if not has_state and OPTIMIZER in missing else ""
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} {alone}has no {_enumerated(lacking)}",
            code="FG608",
            hint="resume from another checkpoint, or without these parts: --allow-missing "
            + _option_value(lacking, allowed)
            + ("; save_only_model: true writes such checkpoints" if alone else ""),
        )
    if missing:
        effects = "; ".join(EFFECTS_OF_MISSING[part] for part in missing)
        _log.warning("resuming from %s without %s: %s", folder, _enumerated(missing), effects)
    return state


def _option_value(parts: Collection[str], allowed: Collection[str]) -> str:
    return ",".join(part for part in EFFECTS_OF_MISSING if part in parts or part in allowed)


def checked_numbers(state: Mapping[str, Any], *, whole: bool = False) -> Mapping[str, Any]:
    """Returns a part whose values must all be finite numbers.

    Args:
        state: values by name.
        whole: require non-negative integers below 2**53.

    Raises:
        ValueError: a value is not such a number.
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
    """Returns a part that must be a list of strings.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(state, list) or not all(isinstance(word, str) for word in state):
        raise TypeError(f"it is {state!r:.40}")
    return state


def schedule_state(schedule: Any, state: Any) -> dict[str, Any]:
    """Returns the state of a learning rate schedule, after a check that it sets only data attributes.

    Args:
        schedule: that the state will be loaded into.
        state: as it was read.

    Raises:
        TypeError: it is not a mapping, or one of its keys is the name of a method.
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
    """Converts errors of its body into one that names the part and the checkpoint.

    Args:
        part: what the body restores.
        folder: of the checkpoint.

    Raises:
        CheckpointError: FG675.
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
