"""The state that a checkpoint holds, read as far as somebody asks for it.

Takes the folder of a checkpoint; gives what it holds by name, with types and shapes, and puts values where they belong:
into whole tensors, and into the slices (DTensors) that lie in this process. Keeps true: of a tensor that is sliced here
only that slice is read, however it was sliced when it was written; no process needs another to read; nothing is
unpickled; no file is opened that the manifest does not list; the pieces of a tensor fill each place of it once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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

from forgather.ml.checkpoint.boxes import Box, fault_of
from forgather.ml.checkpoint.files import EXTRA_STATE, INDEX, MODEL, OPTIMIZER
from forgather.ml.checkpoint.manifest import (
    MANIFEST,
    corrupt_file,
    is_regular,
    missing_file,
    read_manifest,
    small_file,
    unlike_a_run,
)
from forgather.ml.checkpoint.state import unpacked
from forgather.ml.checkpoint.tensor_file import DTYPE_OF


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    Args:
        section: what it belongs to.
        name: its name there.
        dtype: of the file.
        shape: of all of it.
    """

    section: str
    name: str
    dtype: torch.dtype
    shape: torch.Size


class Saved:
    """What a checkpoint holds; the files stay open until `close`.

    Attributes:
        weights: parameters and buffers by every name that they have.
        aliases: further names of weights, with the first ones.
        extra: what of the model's state is no tensor, by name.
        optimizer: as `Held.optimizer`, with a `Stored` in the place of each tensor; None where there is none, or where
            one of its files is missing.

    Args:
        folder: of a verified checkpoint.
        sections: what is looked at; files of others are not opened, and may be damaged.

    Raises:
        CheckpointError: FG603 where a file cannot be read, FG604 where one is missing, FG611 where one is not as a run
            writes it.
    """

    def __init__(self, folder: Path, *, sections: Collection[str] = (MODEL, EXTRA_STATE, OPTIMIZER)) -> None:
        self.folder = folder
        self._listed = read_manifest(folder).files
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            self._read_index(sections)
            self.extra = self._tree(EXTRA_STATE, self.whole) or {}
            self.optimizer = self._tree(OPTIMIZER, lambda stored: stored)
        except BaseException:
            self.close()
            raise

    def _read_index(self, sections: Collection[str]) -> None:
        self._stored: dict[str, dict[str, Stored]] = {}
        self._chunks: dict[Stored, list[tuple[str, str]]] = {}
        self._used: set[tuple[str, str]] = set()
        self._metadata = Metadata({})
        index = self._json(INDEX)
        try:
            for section, tensors in index["tensors"].items():
                if section not in sections or (section == OPTIMIZER and not self._is_there(section, tensors)):
                    continue
                self._stored[section] = {}
                for name, facts in tensors.items():
                    self._add(section, name, facts)
            self.aliases: dict[str, str] = index["aliases"]
            first = self._stored[MODEL]
            if both := first.keys() & self.aliases.keys():
                raise ValueError(f"{min(both)!r} is a weight, and a further name of one")
            self.weights = {**first, **{name: first[of] for name, of in self.aliases.items()}}
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise unlike_a_run(self.folder / INDEX, f"{type(error).__name__}: {error!s:.80}") from None

    def _is_there(self, section: str, tensors: Mapping[str, Any]) -> bool:
        files = {chunk["file"] for facts in tensors.values() for chunk in facts["chunks"]} | {f"{section}.json"}
        return all(file in self._listed and (self.folder / file).exists() for file in files)

    def _json(self, name: str) -> Any:
        file = self.folder / name
        if name not in self._listed:
            raise missing_file(file)
        _refuse_special(file)
        try:
            return json.loads(small_file(file))
        except FileNotFoundError:
            raise missing_file(file) from None
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise unlike_a_run(file, f"it cannot be read ({error!s:.80})") from None

    def _tree(self, section: str, what: Any) -> Any:
        if section not in self._stored:
            return None
        stored = self._stored[section]
        plain = self._json(f"{section}.json")
        try:
            return unpacked(plain, {name: what(one) for name, one in stored.items()})
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
            raise unlike_a_run(self.folder / f"{section}.json", f"{type(error).__name__}: {error!s:.80}") from None

    def _add(self, section: str, name: str, facts: Mapping[str, Any]) -> None:
        dtype, shape = DTYPE_OF[facts["dtype"]], torch.Size(facts["shape"])
        stored = self._stored.setdefault(section, {})[name] = Stored(section, name, dtype, shape)
        chunks = facts["chunks"]
        self._chunks[stored] = [(chunk["file"], chunk["key"]) for chunk in chunks]
        if fault := fault_of(facts["shape"], [Box(one["offsets"], one["sizes"]) for one in chunks]):
            raise unlike_a_run(self.folder / INDEX, f"of {name!r:.80}, {fault}")
        boxes = [ChunkStorageMetadata(torch.Size(one["offsets"]), torch.Size(one["sizes"])) for one in chunks]
        properties = TensorProperties(dtype=dtype)
        self._metadata.state_dict_metadata[_fqn(stored)] = TensorStorageMetadata(properties, shape, boxes)
        for (file, key), box in zip(self._chunks[stored], boxes, strict=True):
            if (file, key) in self._used:
                raise unlike_a_run(self.folder / INDEX, f"it names {key!r:.80} of {file!r:.80} twice")
            self._used.add((file, key))
            found = self._file(file)
            try:
                there = found.get_slice(key)
            except SafetensorError:
                raise unlike_a_run(self.folder / file, f"it does not hold {key!r:.80}") from None
            if (there.get_dtype(), list(there.get_shape())) != (facts["dtype"], list(box.sizes)):
                raise unlike_a_run(self.folder / file, f"{key!r:.80} has another type or shape than {INDEX} says")

    def _file(self, name: str) -> Any:
        if name not in self._files:
            file = self.folder / name
            # No link either: what one points to was compared with nothing.
            if name not in self._listed or file.parent != self.folder or file.is_symlink():
                raise unlike_a_run(
                    self.folder / INDEX, f"it names {name!r:.80}, which is no file that {MANIFEST} lists"
                )
            _refuse_special(file)
            try:
                self._files[name] = self._open.enter_context(safe_open(file, framework="pt"))
            except FileNotFoundError:
                raise missing_file(file) from None
            except (SafetensorError, ValueError, OSError) as error:
                raise unlike_a_run(file, f"it is no safetensors file ({error!s:.80})") from None
        return self._files[name]

    def close(self) -> None:
        """Gives the files back."""
        self._files.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @torch.no_grad()
    def read(self, stored: Stored, into: Tensor) -> None:
        """Puts a tensor of the checkpoint into one of the same shape, as far as that lies here; types are converted."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({_fqn(stored): into}, self._metadata)
        for item in planner.create_local_plan().items:
            number = item.storage_index.index
            assert number is not None  # noqa: S101 - the plan names the chunk by its place
            file, key = self._chunks[stored][number]
            box = zip(item.storage_offsets, item.lengths, strict=True)
            part = tuple(slice(begin, begin + length) for begin, length in box)
            found = self._file(file)
            value = found.get_slice(key)[part] if part else found.get_tensor(key)
            planner.resolve_tensor(item).copy_(value)

    def whole(self, stored: Stored) -> Tensor:
        """Returns a tensor of the checkpoint, on the host."""
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(stored, value)
        return value


def _refuse_special(file: Path) -> None:
    if os.path.lexists(file) and not is_regular(file):
        raise corrupt_file(file, "it is no regular file")


def _fqn(stored: Stored) -> str:
    return f"{stored.section}/{stored.name}"


def whole_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a checkpoint by the first of their names, each whole, one at a time.

    Neither a model nor other processes are needed, however many wrote the checkpoint. Further names of tied weights are
    `Saved.aliases`.

    Raises:
        CheckpointError: FG603 where a file cannot be read, FG604 where one is missing.
    """
    with Saved(folder, sections=(MODEL,)) as saved:
        for name, stored in saved.weights.items():
            if name not in saved.aliases:
                yield name, saved.whole(stored)
