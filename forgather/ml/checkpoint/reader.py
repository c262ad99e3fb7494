"""Checkpoint reader: validates the index of a checkpoint, and reads its tensors as whole tensors or local shards.

A checkpoint may be read with another sharding than the one with which it was written. The chunks of each
tensor must cover the tensor exactly once. The reader detects chunks that overlap, leave a gap or are outside of the
tensor, in time linear in the number of chunks. Files stay open until the reader is closed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from forgather.ml.checkpoint.files import EXTRA_STATE, INDEX, MODEL, OPTIMIZER
from forgather.ml.checkpoint.manifest import (
    MANIFEST,
    corrupt_file,
    is_regular,
    malformed_file,
    missing_file,
    read_manifest,
    read_small_file,
)
from forgather.ml.checkpoint.state import DTYPE_OF, MALFORMED_DATA, unpack_tree

_PRIME = 2**61 - 1
_MAX_ELEMENTS = 2**63


class Box(NamedTuple):
    """The region of a tensor that a chunk covers, as `offsets` and `sizes` with one number per dimension."""

    offsets: Any
    sizes: Any


def chunk_problem(shape: Any, boxes: Sequence[Box]) -> str | None:
    """Returns a description of what is wrong with a tensor's chunks; None if they cover each element exactly once.

    Args:
        shape: the shape of the tensor, which was read from a file and may be malformed.
        boxes: the regions that the chunks cover, which were read from a file and may be malformed.

    Example:
        >>> chunk_problem([4], [Box([0], [2]), Box([2], [2])]) is None
        True
        >>> chunk_problem([4], [Box([0], [2]), Box([1], [2])])
        'its chunks overlap or leave a gap'
    """
    # An index may come from elsewhere; without the limit, torch would overflow on the number of elements.
    if not _are_sizes(shape) or math.prod(shape) >= _MAX_ELEMENTS:
        return f"its shape is {shape!r:.60}"
    for box in boxes:
        if not (_are_sizes(box.offsets) and _are_sizes(box.sizes) and len(box.offsets) == len(box.sizes) == len(shape)):
            return f"a chunk has the offsets {box.offsets!r:.60} and the sizes {box.sizes!r:.60}"
        if any(begin + size > whole for begin, size, whole in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"a chunk at {box.offsets!r:.60} of the sizes {box.sizes!r:.60} is outside of {shape!r:.60}"
    return None if _cover_once(shape, boxes) else "its chunks overlap or leave a gap"


def _are_sizes(found: Any) -> bool:
    # `type(...) is int` and not `isinstance`: JSON's `true` is a bool, which is an int.
    return isinstance(found, list | tuple) and all(type(one) is int and 0 <= one < _MAX_ELEMENTS for one in found)


def _cover_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Returns whether boxes that lie inside a shape cover each element exactly once.

    Every coordinate of a dimension gets a random number. The weight of an interval is the difference of the random
    numbers of its two ends, and the weight of a box is the product over its dimensions. Weights are additive, so boxes
    that cover the shape exactly once have the total weight of the shape. Any other set of boxes has this weight with a
    probability of 2**-58 only, because the two sums are different polynomials in the random numbers (Schwartz-Zippel).
    """
    weights: list[dict[int, int]] = [{} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for known, begin, size in zip(weights, offsets, sizes, strict=True):
            # One random number per distinct coordinate, so that adjacent boxes cancel at their common border.
            ends = [known.setdefault(end, secrets.randbelow(_PRIME)) for end in (begin, begin + size)]
            product = product * (ends[1] - ends[0]) % _PRIME
        return product

    return (sum(weight(*box) for box in boxes) - weight([0] * len(shape), shape)) % _PRIME == 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in a checkpoint. `CheckpointReader.read` reads the values.

    Args:
        section: the section of the checkpoint: "model", "model_extra_state" or "optimizer".
        name: the name of the tensor in the section.
        dtype: the type in which the values are stored.
        shape: the shape of the whole (not sharded) tensor.
    """

    section: str
    name: str
    dtype: torch.dtype
    shape: torch.Size


class CheckpointReader:
    """Reads the weights and the optimizer state of a checkpoint.

    Attributes:
        weights: the descriptions of all parameters and buffers, by name. A tied weight has an entry for each name.
        aliases: a mapping from each further name of a tied weight to its first name.
        extra: the entries of the model's state dict that are not tensors, by name.
        optimizer: the optimizer state, in the form of `LocalState.optimizer` with a `StoredTensor` in place of each
            tensor. None if the checkpoint contains no optimizer state, or if a file of that state is
            missing.

    Args:
        folder: the folder of a verified checkpoint.
        sections: the sections to read. Files of other sections are not opened and may be damaged.

    Raises:
        CheckpointError: FG603 if a file cannot be read; FG604 if a file is missing; FG611 if a file does not have the
            form in which a run writes it.
    """

    def __init__(self, folder: Path, *, sections: Collection[str] = (MODEL, EXTRA_STATE, OPTIMIZER)) -> None:
        self.folder = folder
        # Only files that the manifest lists are opened: others were not verified.
        self._listed = read_manifest(folder).files
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            self._read_index(sections)
            self.extra = self._tree(EXTRA_STATE, self.whole) or {}
            self.optimizer = self._tree(OPTIMIZER, lambda stored: stored)
        # The caller gets no reader that it could close, so the files that are open by now are closed here.
        except BaseException:
            self.close()
            raise

    def _read_index(self, sections: Collection[str]) -> None:
        self._stored: dict[str, dict[str, StoredTensor]] = {}
        self._chunks: dict[StoredTensor, list[tuple[str, str]]] = {}
        self._used: set[tuple[str, str]] = set()
        self._metadata = Metadata({})
        index = self._json(INDEX)
        try:
            for section, tensors in index["tensors"].items():
                # A missing optimizer file is allowed here; `--allow-missing` decides later whether the run may continue
                # without it.
                if section not in sections or (section == OPTIMIZER and not self._is_there(section, tensors)):
                    continue
                self._stored[section] = {}
                for name, facts in tensors.items():
                    self._add(section, name, facts)
            self.aliases: dict[str, str] = index["aliases"]
            first = self._stored[MODEL]
            # An alias that hides a weight would silently replace its values.
            if both := first.keys() & self.aliases.keys():
                raise ValueError(f"{min(both)!r} is both a weight and an alias")
            # Both names of a tied weight: a model without the tie reads each of them.
            self.weights = {**first, **{name: first[of] for name, of in self.aliases.items()}}
        # An index with a correct digest may still be crafted: every type error in it is one located message.
        except MALFORMED_DATA as error:
            raise malformed_file(self.folder / INDEX, f"{type(error).__name__}: {error!s:.80}") from None

    def _is_there(self, section: str, tensors: Mapping[str, Any]) -> bool:
        files = {chunk["file"] for facts in tensors.values() for chunk in facts["chunks"]} | {f"{section}.json"}
        return all(file in self._listed and (self.folder / file).exists() for file in files)

    def _json(self, name: str) -> Any:
        file = self.folder / name
        if name not in self._listed:
            raise missing_file(file)
        _refuse_special(file)
        try:
            return json.loads(read_small_file(file))
        except FileNotFoundError:
            raise missing_file(file) from None
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise malformed_file(file, f"it cannot be read ({error!s:.80})") from None

    def _tree(self, section: str, what: Any) -> Any:
        if section not in self._stored:
            return None
        stored = self._stored[section]
        plain = self._json(f"{section}.json")
        try:
            return unpack_tree(plain, {name: what(one) for name, one in stored.items()})
        except MALFORMED_DATA as error:
            raise malformed_file(self.folder / f"{section}.json", f"{type(error).__name__}: {error!s:.80}") from None

    def _add(self, section: str, name: str, facts: Mapping[str, Any]) -> None:
        dtype, shape = DTYPE_OF[facts["dtype"]], torch.Size(facts["shape"])
        stored = self._stored.setdefault(section, {})[name] = StoredTensor(section, name, dtype, shape)
        chunks = facts["chunks"]
        self._chunks[stored] = [(chunk["file"], chunk["key"]) for chunk in chunks]
        if fault := chunk_problem(facts["shape"], [Box(one["offsets"], one["sizes"]) for one in chunks]):
            raise malformed_file(self.folder / INDEX, f"tensor {name!r:.80}: {fault}")
        boxes = [ChunkStorageMetadata(torch.Size(one["offsets"]), torch.Size(one["sizes"])) for one in chunks]
        properties = TensorProperties(dtype=dtype)
        self._metadata.state_dict_metadata[_fqn(stored)] = TensorStorageMetadata(properties, shape, boxes)
        for (file, key), box in zip(self._chunks[stored], boxes, strict=True):
            # Each chunk is used once. Otherwise a small file could claim to be a tensor of any size.
            if (file, key) in self._used:
                raise malformed_file(self.folder / INDEX, f"it names {key!r:.80} of {file!r:.80} twice")
            self._used.add((file, key))
            found = self._file(file)
            try:
                # Type and shape come from the header of the file; no values are read.
                there = found.get_slice(key)
            except SafetensorError:
                raise malformed_file(self.folder / file, f"it does not hold {key!r:.80}") from None
            if (there.get_dtype(), list(there.get_shape())) != (facts["dtype"], list(box.sizes)):
                raise malformed_file(self.folder / file, f"{key!r:.80} has another type or shape than {INDEX} says")

    def _file(self, name: str) -> Any:
        if name not in self._files:
            file = self.folder / name
            # A symbolic link is refused as well: its target was not compared with the manifest.
            if name not in self._listed or file.parent != self.folder or file.is_symlink():
                raise malformed_file(self.folder / INDEX, f"it names {name!r:.80}, which {MANIFEST} does not list")
            _refuse_special(file)
            try:
                self._files[name] = self._open.enter_context(safe_open(file, framework="pt"))
            except FileNotFoundError:
                raise missing_file(file) from None
            except (SafetensorError, ValueError, OSError) as error:
                raise malformed_file(file, f"it is not a safetensors file ({error!s:.80})") from None
        return self._files[name]

    def close(self) -> None:
        """Closes all files of the checkpoint."""
        self._files.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @torch.no_grad()
    def read(self, stored: StoredTensor, into: Tensor) -> None:
        """Copies the values of a stored tensor into another tensor. For a DTensor, only the local shard is read.

        Args:
            stored: the description of the stored tensor, from this reader.
            into: the tensor to fill, on any device. Values are converted to the dtype of this tensor.

        Shapes:
            into: `stored.shape`, which is the global shape of a DTensor.
        """
        # torch's planner computes the overlap of the stored chunks with the local shard, whatever the two shardings
        # are.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({_fqn(stored): into}, self._metadata)
        for item in planner.create_local_plan().items:
            number = item.storage_index.index
            assert number is not None  # noqa: S101 - the plan names the chunk by its place
            file, key = self._chunks[stored][number]
            box = zip(item.storage_offsets, item.lengths, strict=True)
            part = tuple(slice(begin, begin + length) for begin, length in box)
            found = self._file(file)
            # A tensor without dimensions cannot be sliced.
            value = found.get_slice(key)[part] if part else found.get_tensor(key)
            planner.resolve_tensor(item).copy_(value)

    def whole(self, stored: StoredTensor) -> Tensor:
        """Returns the whole stored tensor on the CPU, in the dtype in which it is stored.

        Shapes:
            Returns a tensor of the shape `stored.shape`.
        """
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(stored, value)
        return value


def _refuse_special(file: Path) -> None:
    """Raises an error if a path is a link, a pipe or a device: reading a pipe or a device could block for ever."""
    if os.path.lexists(file) and not is_regular(file):
        raise corrupt_file(file, "it is not a regular file")


def _fqn(stored: StoredTensor) -> str:
    return f"{stored.section}/{stored.name}"


def whole_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) for each weight of a checkpoint, one at a time.

    Neither a model nor a process group is needed, even if several ranks wrote the checkpoint. A tied weight is yielded
    once, under its first name; `CheckpointReader.aliases` contains the other names.

    Shapes:
        Yields tensors of any shape, on the CPU.

    Raises:
        CheckpointError: FG603 if a file cannot be read; FG604 if a file is missing; FG611 if a file does not have the
            form in which a run writes it.
    """
    with CheckpointReader(folder, sections=(MODEL,)) as saved:
        for name, stored in saved.weights.items():
            if name not in saved.aliases:
                yield name, saved.whole(stored)
