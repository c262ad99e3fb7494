"""Weights of a loaded model, of which each rank reads its slices from the files of the model itself.

`stored_weights` builds the model of a recipe with the library's own loader, without values, and returns where its
weights are. It does so only for models whose files have every weight under its own name and in its shape, so that the
values are those that the library would load. For any other model it returns None: one process then loads the whole
model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from forgather.ml.checkpoint.files import WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.log import get_logger
from forgather.ml.meta_loading import loading_on_meta
from forgather.ml.strategy.fill_record import FillRecord, UnrecordedError
from forgather.ml.strategy.meta_model import tensors_of
from forgather.ml.strategy.state import Box

_log = get_logger(__name__)


class _File:
    """A safetensors file, of which parts of tensors are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._file = safe_open(self._path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        self._read = 0

    @property
    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> list[int]:
        found: list[int] = self._file.get_slice(name).get_shape()
        return found

    def part(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        # Pages of a mapped file count as memory of the process for as long as it is mapped.
        if self._read > _REMAP_BYTES:
            self._open()
        # A scalar has no slices.
        found: Tensor = self._file.get_slice(name)[box] if box else self._file.get_tensor(name)
        self._read += found.nbytes
        return found.to(dtype, copy=True)


_REMAP_BYTES = 16 << 20


class StoredWeights:
    """The weights of a model in the safetensors files of its folder. Only the parts that are asked for are read.

    Args:
        model: the model on the meta device.
        files: the open file of each stored name.
        tables: the values of the buffers that no file has, by name.
    """

    def __init__(self, model: nn.Module, files: dict[str, _File], tables: dict[str, Tensor]) -> None:
        self.model = model
        self._files = files
        self.tables = tables
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._stored_as: dict[str, str] = {}
        first: dict[int, str] = {}
        tensors = [(fqn, tensor) for fqn, _, _, tensor in tensors_of(model)]
        for fqn, tensor in tensors:
            if fqn in files:
                first.setdefault(id(tensor), fqn)
        for fqn, tensor in tensors:
            self._shapes[fqn], self._dtypes[fqn] = tensor.shape, tensor.dtype
            self._stored_as[fqn] = first.get(id(tensor), fqn)
        self.names = list(self._shapes)

    def is_complete(self) -> bool:
        """Returns whether the files have every weight in its shape, and nothing else."""
        for fqn, name in self._stored_as.items():
            table = self.tables.get(fqn)
            if table is not None and (table.shape, table.dtype) == (self._shapes[fqn], self._dtypes[fqn]):
                continue
            if name not in self._files or list(self._shapes[fqn]) != self._files[name].shape(name):
                return False
        return set(self._files) <= set(self._stored_as)

    def facts(self) -> str:
        """Returns names, shapes and dtypes as text, to compare the ranks."""
        return repr([(fqn, tuple(shape), self._dtypes[fqn]) for fqn, shape in self._shapes.items()])

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of a weight; see `WeightSource`."""
        return self._shapes[fqn]

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of a weight; see `WeightSource`."""
        wanted = self._dtypes[fqn] if dtype is None else dtype
        name = self._stored_as[fqn]
        if name not in self._files:
            return self.tables[fqn][box].to(wanted, copy=True)
        # The library converts to the dtype of the model, too.
        return self._files[name].part(name, box, self._dtypes[fqn]).to(wanted)


def stored_weights(make_model: Callable[[], nn.Module], folder: Path) -> StoredWeights | None:
    """Returns the weights of a model that is loaded from a folder, or None if they cannot be read slice by slice.

    Args:
        make_model: a function that loads the model from the folder by `forgather.ml.models.from_pretrained`.
        folder: the folder.
    """
    before = capture_rng()
    try:
        with loading_on_meta():
            model = make_model()
        if not isinstance(model, PreTrainedModel) or not all(tensor.is_meta for *_, tensor in tensors_of(model)):
            return None
        if any(type(step) is not WeightRenaming for step in get_model_conversion_mapping(model)):
            return None
        files = _open_files(folder)
        # The library ties two stored weights if their values are equal, which are not read here.
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        if any(one in files and other in files for one, other in tied.items()):
            return None
        missing = [fqn for fqn, owner, name, _ in tensors_of(model) if name in owner._buffers and fqn not in files]
        found = StoredWeights(model, files, _tables(model, missing))
        if found.is_complete():
            return found
    except Exception as error:  # noqa: BLE001 - the border of a library's loader: what fails is loaded with values
        _log.info("one process loads the model: reading it slice by slice failed with %r", error)
    restore_rng(before)
    return None


def _open_files(folder: Path) -> dict[str, _File]:
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        placed = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"]
        names = sorted({Path(name).name for name in placed.values()})
    found: dict[str, _File] = {}
    for name in names:
        file = _File(folder / name)
        for key in file.names:
            if key in found:
                raise SafetensorError(f"{key} is in two files")
            found[key] = file
    return found


def _tables(model: PreTrainedModel, names: list[str]) -> dict[str, Tensor]:
    """Returns the values of buffers, which the constructor of the model computes without random numbers.

    Raises:
        UnrecordedError: if a buffer is computed in another way.
    """
    if not names:
        return {}
    with FakeTensorMode(allow_non_fake_inputs=True), FillRecord() as record:
        bare = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)  # type: ignore[no-untyped-call]
    by_name = {fqn: tensor for fqn, _, _, tensor in tensors_of(bare)}
    found = {}
    for name in names:
        formula = record.formula(by_name[name])
        if formula.is_random or formula.draws:
            raise UnrecordedError(f"{name} is drawn at random")
        found[name] = record.replay(by_name[name])
    return found
