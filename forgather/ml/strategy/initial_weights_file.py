"""The first weights of a model as a file, made by one process of each machine and read by all of them.

Takes a recipe; gives a folder with the weights, the random numbers that come after them, and the model without values.
Keeps true: what lies in the cache is what making the model would give, or it is made again; the cache stays within
bounds, and a model that it cannot hold goes to a folder of this run alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import read_state, split_tensors, write_state, write_tensors
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.data.cache import cached_folder, default_cache_dir, prune
from forgather.ml.log import get_logger
from forgather.ml.memory import available_bytes
from forgather.ml.number_format import size
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.meta_model import emptied, is_plain, skeleton, tensors_of, without_memory

_log = get_logger(__name__)

KIND = "initial"
MAX_BYTES = 8 << 30
MAX_FOLDERS = 16
_ALIAS = "alias."
_WEIGHTS, _RNG = "weights.safetensors", "random"


@dataclass(frozen=True, slots=True)
class SeedCheckpoint:
    """The first weights of a model.

    Args:
        folder: where they lie.
        model: the model without values.
        rng: random numbers after the model was made.
        is_kept: True where the folder is for later runs, too.
    """

    folder: Path
    model: nn.Module
    rng: dict[str, Any]
    is_kept: bool


class SeedWeights:
    """The weights of a seed checkpoint by name; a file that is open here may lose its name.

    Args:
        folder: of the seed checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._file = safe_open(folder / _WEIGHTS, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        found = dict(self._file.metadata() or {})
        self._aliases = {name.removeprefix(_ALIAS): of for name, of in found.items() if name.startswith(_ALIAS)}
        self._known = set(self._file.keys())
        self.names = sorted(self._known | set(self._aliases))

    def find(self, fqn: str) -> Tensor:
        """Returns a weight, whole and on the CPU; raises KeyError for a name that is not there."""
        original = self._aliases.get(fqn, fqn)
        if original not in self._known:
            raise KeyError(fqn)
        found: Tensor = self._file.get_tensor(original)
        return found

    def fits(self, model: nn.Module) -> bool:
        """Tells whether these are the tensors of a model: by name, each of its shape."""
        shapes = {fqn: list(tensor.shape) for fqn, _, _, tensor in tensors_of(model) if is_plain(tensor)}
        known = {fqn: self._file.get_slice(self._aliases.get(fqn, fqn)).get_shape() for fqn in self.names}
        return shapes == known


def seed_checkpoint(recipe: Recipe) -> SeedCheckpoint:
    """Returns the first weights of a recipe: those of the cache, where an earlier run has made them.

    Raises:
        TrainingError: FG733 for a model that does not fit into the memory of this machine.
    """
    key = recipe.model_key() if recipe.model_key is not None else None
    if key is not None:
        kept = _kept(recipe, key)
        if kept is not None:
            return kept
    model = _made(recipe)
    rng = _random()
    folder = Path(tempfile.mkdtemp(prefix="forgather-initial-"))
    try:
        _write(folder, model)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SeedCheckpoint(folder, model, rng, is_kept=False)


def _kept(recipe: Recipe, key: str) -> SeedCheckpoint | None:
    """Returns the first weights out of the cache, made where they are missing; None where it cannot hold them."""
    made: list[nn.Module] = []
    is_making = False
    before = capture_rng()

    def build(folder: Path) -> None:
        nonlocal is_making
        is_making = True
        made.append(_made(recipe, max_bytes=MAX_BYTES))
        is_making = False
        write_state(Draft(LocalStorage(), folder), _RNG, _random())
        _write(folder, made[0])

    try:
        folder = cached_folder(KIND, key, build)
        rng = read_state(folder, _RNG)
        model = made[0] if made else skeleton(recipe.make_model)
        if not SeedWeights(folder).fits(model):
            raise ValueError("they are of another model")
    except _TooLarge:
        return None
    except (OSError, SafetensorError, CheckpointError, ValueError) as error:
        if is_making:  # the model itself is at fault
            raise
        _log.warning("first weights are not kept for later runs: %s", error)
        restore_rng(before)
        return None
    prune(KIND, max_bytes=MAX_BYTES, max_folders=MAX_FOLDERS)
    return SeedCheckpoint(folder, model, rng, is_kept=default_cache_dir() in folder.parents)


class _TooLarge(Exception):  # noqa: N818 - no error: the model is made, and not kept
    """A model that the cache does not hold."""


def _made(recipe: Recipe, *, max_bytes: int | None = None) -> nn.Module:
    needed = _bytes_of(recipe.make_model)
    if needed is not None:
        _refuse_too_large(needed)
        if max_bytes is not None and needed > max_bytes:
            raise _TooLarge
    return recipe.make_model()


def _random() -> dict[str, Any]:
    return {name: state for name, state in capture_rng().items() if name != "cuda"}


def _write(folder: Path, model: nn.Module) -> None:
    """Writes the tensors of a model into a folder, and leaves the model without them."""
    tensors, aliases, _ = split_tensors(emptied(model))
    write_tensors(Draft(LocalStorage(), folder), _WEIGHTS, tensors, {_ALIAS + name: of for name, of in aliases.items()})


def _bytes_of(make_model: Callable[[], nn.Module]) -> int | None:
    """Returns what a model takes; None where only making it tells. Random numbers stay as they were."""
    before = capture_rng()
    model = without_memory(make_model)
    restore_rng(before)
    if model is None:
        return None
    return sum(tensor.nbytes for tensor in {id(t): t for _, _, _, t in tensors_of(model)}.values())


def _refuse_too_large(needed: int) -> None:
    """Refuses a model that would use up the memory of this machine while it is made."""
    available = available_bytes()
    if available is not None and needed > available:
        raise TrainingError(
            f"the model takes {size(needed)}, and this machine has {size(available)} of free memory to make it in",
            code="FG733",
            hint="start from a checkpoint (forgather.ml.models:from_pretrained), make the first weights on a larger "
            "machine, or give a smaller dtype",
        )
