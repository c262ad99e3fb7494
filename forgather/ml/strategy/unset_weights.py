"""Weights that are left unset until a checkpoint is restored, so that no rank makes weights that are replaced.

`unset_weights` builds the model of a recipe without memory, and returns an `UnsetWeights` that fills with NaN what the
checkpoint has, and computes the rest: buffers and tables that are in no state dict, and depend on no random numbers.
For any other model it returns None.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.ml.adapter_base import base_of
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.log import get_logger
from forgather.ml.model_class import is_quantized
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.fake_caches import alive, clear_caches
from forgather.ml.strategy.fill_record import FillRecord, UnrecordedError
from forgather.ml.strategy.meta_model import is_plain, move_to_meta, replacing_conversions, tensors_of
from forgather.ml.strategy.state import Box
from forgather.ml.strategy.stored_weights import stored_weights
from forgather.ml.strategy.unset_tensors import unset_value

_log = get_logger(__name__)


class UnsetWeights:
    """The tensors of a model whose weights are not made. It is a `WeightSource`.

    Args:
        model: the model on the meta device.
        tables: the values of the tensors that a checkpoint does not have, by name.

    Attributes:
        model: the model.
        names: the names of all tensors of the model.
        unset: the names of those that have no values.
    """

    def __init__(self, model: nn.Module, tables: Mapping[str, Tensor]) -> None:
        self.model = model
        self._tables = tables
        self._facts = {fqn: (tensor.shape, tensor.dtype) for fqn, _, _, tensor in tensors_of(model)}
        self.names = list(self._facts)
        self.unset = frozenset(self._facts) - tables.keys()

    def digest(self) -> str:
        """Returns a digest of names, shapes, dtypes and tables, to compare the ranks."""
        return hashlib.sha256(repr((list(self._facts.items()), sorted(self._tables))).encode()).hexdigest()

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of a tensor; see `WeightSource`."""
        return self._facts[fqn][0]

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of a tensor, see `WeightSource`. The part of an unset one is filled with `unset_value`."""
        dtype = self._facts[fqn][1] if dtype is None else dtype
        if fqn in self._tables:
            return self._tables[fqn][box].to(dtype, copy=True)
        return torch.full([one.stop - one.start for one in box], unset_value(dtype), dtype=dtype)


def unset_weights(recipe: Recipe) -> UnsetWeights | None:
    """Returns the model of a recipe without weights, or None if it must be made with them. The random state is kept.

    Args:
        recipe: the recipe that makes the model.
    """
    record, before = FillRecord(), capture_rng()
    found: UnsetWeights | str
    try:
        found = _of_files(recipe) if recipe.stored_in is not None else _recorded(recipe, record)
    except Exception as error:  # noqa: BLE001 - the border of a user's constructor: what fails is done with values
        found = f"building it without memory failed with {error!r:.160}"
    finally:
        restore_rng(before)
    if _is_any_kept(record.release()):
        found = (
            "something besides its modules keeps tensors that were made without values. If it uses them, the model "
            "cannot be built now: then set skip_initial_weights_on_resume: false"
        )
    if isinstance(found, UnsetWeights):
        return found
    _log.info("the model is made with its initial weights, which the checkpoint replaces: %s", found)
    return None


def _of_files(recipe: Recipe) -> UnsetWeights | str:
    """Returns the model that a library loads, or why it must be loaded."""
    assert recipe.stored_in is not None  # noqa: S101 - the caller has looked
    stored = stored_weights(recipe.make_model, recipe.stored_in)
    if stored is None:
        return "its files cannot be read slice by slice"
    if (reason := _obstacle(stored.model)) is not None:
        return reason
    return UnsetWeights(stored.model, stored.tables)


def _recorded(recipe: Recipe, record: FillRecord) -> UnsetWeights | str:
    """Returns the model that a constructor makes, or why it must be made with values."""
    with active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True), replacing_conversions(), record:
        model = recipe.make_model()
    if (reason := _obstacle(model)) is not None:
        return reason
    restored = {id(value) for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
    tables = {}
    for fqn, _, _, tensor in tensors_of(model):
        if id(tensor) in restored and is_plain(tensor):
            continue
        try:
            value = _table(tensor, record)
        except UnrecordedError as error:
            return f"{fqn!r} cannot be computed again: {error}"
        if value is None:
            return f"{fqn!r} is in no checkpoint, and is not computed from numbers alone"
        tables[fqn] = value
    move_to_meta(model)
    return UnsetWeights(model, tables)


def _obstacle(model: nn.Module) -> str | None:
    if is_quantized(model):
        return "it is quantized"
    return None if base_of(model) is None else "the base model of an adapter is in no checkpoint"


def _table(tensor: Tensor, record: FillRecord) -> Tensor | None:
    """Returns the values of a tensor that a checkpoint does not have, or None if they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach().clone() if is_plain(tensor) and not tensor.is_meta else None
    formula = record.formula(tensor)
    return None if formula.is_random or formula.draws else record.replay(tensor)


def _is_any_kept(made: list[weakref.ref[Tensor]]) -> bool:
    """Returns whether a list still has a tensor, which a forward pass would use without values. Caches are cleared."""
    if alive(made):
        gc.collect()
    if kept := alive(made):
        clear_caches(kept)
    return bool(alive(made))
