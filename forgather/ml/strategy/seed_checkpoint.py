"""The initial weights that one process makes, in a file that the other processes of its machine read.

`seed_checkpoint` makes the model of a recipe on the CPU and writes its weights into a folder; `SeedWeights` reads parts
of them. Folders are cached up to a size limit, for later runs with the same recipe. A model that is too large for the
cache is written to a temporary folder.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forgather.available_memory import available_bytes
from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import read_state, split_tensors, write_state, write_tensors
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.data.cache import cached_folder, default_cache_dir, prune
from forgather.ml.log import get_logger
from forgather.ml.model_class import is_quantized
from forgather.ml.number_format import format_bytes
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.initial_room import lack_of_room
from forgather.ml.strategy.meta_model import is_plain, meta_model, move_to_meta, tensors_of, without_memory
from forgather.ml.strategy.state import Box

_log = get_logger(__name__)

KIND = "initial"
# The limits of the cache, as a number of bytes and a number of folders.
MAX_BYTES = 8 << 30
MAX_FOLDERS = 16
_ALIAS = "alias."
_WEIGHTS, _RNG = "weights.safetensors", "random"


@dataclass(frozen=True, slots=True)
class SeedCheckpoint:
    """The initial weights of a model, stored in a folder.

    Args:
        folder: the folder of the files.
        model: the model, which is on the meta device.
        rng: the random state after the model was made.
        is_kept: True if the folder is in the cache and stays for later runs. False if it can be removed.
    """

    folder: Path
    model: nn.Module
    rng: dict[str, Any]
    is_kept: bool


class SeedWeights:
    """The weights in a seed checkpoint, by name. The file stays open, so the folder may be removed.

    Args:
        folder: the folder of the seed checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._file = safe_open(folder / _WEIGHTS, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        found = dict(self._file.metadata() or {})
        self._aliases = {name.removeprefix(_ALIAS): of for name, of in found.items() if name.startswith(_ALIAS)}
        self._known = set(self._file.keys())
        self.names = sorted(self._known | set(self._aliases))

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of one weight, see `WeightSource`."""
        return torch.Size(self._file.get_slice(self._stored_name(fqn)).get_shape())

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of one weight, of which only this part is read; see `WeightSource`."""
        name = self._stored_name(fqn)
        # A scalar has no slices.
        found: Tensor = self._file.get_slice(name)[box] if box else self._file.get_tensor(name)
        return found.to(found.dtype if dtype is None else dtype, copy=True)

    def _stored_name(self, fqn: str) -> str:
        original: str = self._aliases.get(fqn, fqn)
        if original not in self._known:
            raise KeyError(fqn)
        return original

    def fits(self, model: nn.Module) -> bool:
        """Returns whether the weights are those of a model: the same names and shapes."""
        shapes = {fqn: tensor.shape for fqn, _, _, tensor in tensors_of(model) if is_plain(tensor)}
        return shapes == {fqn: self.shape(fqn) for fqn in self.names}


def seed_checkpoint(recipe: Recipe) -> SeedCheckpoint:
    """Returns the initial weights of a recipe, from the cache if an earlier run made them.

    Args:
        recipe: the recipe that makes the model.

    Raises:
        TrainingError: FG733 if the model does not fit into the memory of this machine.
    """
    key = recipe.model_key() if recipe.model_key is not None else None
    if key is not None:
        kept = _from_cache(recipe, key)
        if kept is not None:
            return kept
    model = _make_model(recipe)
    rng = _rng_state()
    folder = Path(tempfile.mkdtemp(prefix="forgather-initial-"))
    try:
        _write_weights(folder, model)
    except BaseException:
        # Also after an interrupt: the folder may be as large as the model, and nothing else removes it.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SeedCheckpoint(folder, model, rng, is_kept=False)


def _from_cache(recipe: Recipe, key: str) -> SeedCheckpoint | None:
    """Returns the initial weights from the cache, and makes and caches them first if the cache does not have them.

    Returns None if the weights cannot be cached.
    """
    made: list[nn.Module] = []
    is_making = False
    before = capture_rng()

    def build(folder: Path) -> None:
        nonlocal is_making
        is_making = True
        made.append(_make_model(recipe, max_bytes=MAX_BYTES))
        is_making = False
        write_state(Draft(LocalStorage(), folder), _RNG, _rng_state())
        _write_weights(folder, made[0])

    try:
        folder = cached_folder(KIND, key, build)
        rng = read_state(folder, _RNG)
        model = made[0] if made else meta_model(recipe.make_model)
        if not SeedWeights(folder).fits(model):
            raise ValueError("the cached ones are those of another model")
    except _TooLarge:
        return None
    except (OSError, SafetensorError, CheckpointError, ValueError) as error:
        if is_making:  # an error of the model itself
            raise
        _log.warning("initial weights are not cached for later runs: %s", error)
        # The caller makes the model again, which must draw the same random numbers.
        restore_rng(before)
        return None
    prune(KIND, max_bytes=MAX_BYTES, max_folders=MAX_FOLDERS)
    return SeedCheckpoint(folder, model, rng, is_kept=default_cache_dir() in folder.parents)


class QuantizedModel(Exception):  # noqa: N818 - no error: every process loads the model
    """Raised if a model is quantized: its weights have parts that a file of tensors lacks.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _TooLarge(Exception):  # noqa: N818 - no error: the model is made, and not kept
    """Raised if a model is too large for the cache."""


def _make_model(recipe: Recipe, *, max_bytes: int | None = None) -> nn.Module:
    needed = _size_of(recipe.make_model)
    if needed is not None:
        _refuse_too_large(needed)
        if max_bytes is not None and needed > max_bytes:
            raise _TooLarge
        if max_bytes is None and (lacks := lack_of_room(needed)) is not None:
            _log.warning("initial weights: %s", lacks)
    model = recipe.make_model()
    # Known only now: the files of a model may say that it is quantized, where the config does not.
    if is_quantized(model):
        raise QuantizedModel(model)
    return model


def _rng_state() -> dict[str, Any]:
    # The model is made on the CPU, which draws nothing from CUDA's generators.
    return {name: state for name, state in capture_rng().items() if name != "cuda"}


def _write_weights(folder: Path, model: nn.Module) -> None:
    """Writes the tensors of a model into a folder, and moves the model to the meta device."""
    tensors, aliases, _ = split_tensors(move_to_meta(model))
    write_tensors(Draft(LocalStorage(), folder), _WEIGHTS, tensors, {_ALIAS + name: of for name, of in aliases.items()})


def _size_of(make_model: Callable[[], nn.Module]) -> int | None:
    """Returns the memory that a model needs, or None if the model cannot be made without values.

    The random state is not changed.

    Units:
        bytes.
    """
    before = capture_rng()
    model = without_memory(make_model)
    restore_rng(before)
    if model is None:
        return None
    return sum(tensor.nbytes for tensor in {id(t): t for _, _, _, t in tensors_of(model)}.values())


def _refuse_too_large(needed: int) -> None:
    """Raises an error if a model would use up the memory of this machine while it is made.

    Args:
        needed: the memory that the model needs, in bytes.

    Raises:
        TrainingError: FG733 if the model needs more memory than is available.
    """
    # The system would kill the process without a message.
    available = available_bytes()
    if available is not None and needed > available:
        raise TrainingError(
            f"the model takes {format_bytes(needed)}, and this machine has {format_bytes(available)} of free memory",
            code="FG733",
            hint="set initial_weights: counter, by which each process computes its slices of the weights, start from a "
            "checkpoint (forgather.ml.models:from_pretrained), or set a smaller dtype",
        )


def pickled_skeleton(model: nn.Module) -> bytes | None:
    """Returns a model without values as bytes for other ranks, or None if it cannot be pickled."""
    try:
        return pickle.dumps(model)
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("every rank builds the model itself: it cannot be pickled (%s)", error)
        return None


def unpickled_skeleton(sent: bytes | None) -> nn.Module | None:
    """Returns the model that `pickled_skeleton` made bytes of; None if it did not, or if they cannot be read."""
    if sent is None:
        return None
    try:
        model: nn.Module = pickle.loads(sent)  # noqa: S301 - of a peer of this run, over the run's own group
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("this rank builds the model itself: the pickled model cannot be read (%s)", error, all_ranks=True)
        return None
    return model
