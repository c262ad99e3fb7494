"""Reads the files of a checkpoint that transformers' `Trainer` wrote, without running code that they contain.

Takes the folder of a checkpoint; gives the state of the trainer, the optimizer, the schedule and the random generators
as plain values and tensors. The pickled files are read with `torch.load(weights_only=True)`, which makes tensors, plain
values and, for the random states, NumPy arrays of numbers, and refuses everything else. `training_args.bin` is a pickle
of a class and is never read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.files import ADAPTER, TRAINER_STATE, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.manifest import is_regular, malformed_file, missing_file, read_small_file
from forgather.ml.checkpoint.pickled_tensors import read_pickled
from forgather.ml.checkpoint.state import read_tensors

_OPTIMIZERS, _SCHEDULE, _SCALER = ("optimizer.pt", "optimizer.bin"), "scheduler.pt", "scaler.pt"
_RNG, _RNG_OF_RANKS = "rng_state.pth", "rng_state_*.pth"
_NUMPY = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]
_OF_ENGINES = {"global_step*": "DeepSpeed", "pytorch_model_fsdp*": "FSDP", "optimizer_*": "FSDP"}


class TransformersFolder:
    """The files of a checkpoint of transformers' `Trainer`.

    Args:
        folder: the folder of the checkpoint.

    Attributes:
        folder: the folder of the checkpoint.
        step: the number of optimizer steps that were done.

    Raises:
        CheckpointError: FG604 if the state of the trainer is missing; FG611 if it cannot be read; FG614 if the weights
            or the optimizer state are in files of DeepSpeed or FSDP.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for sign, engine in _OF_ENGINES.items():
            if found := next(folder.glob(sign), None):
                raise CheckpointError(
                    f"the checkpoint {str(folder)!r} was written by transformers under {engine}, whose files "
                    f"({found.name}) are not read",
                    code="FG614",
                    hint="continue with trainers/hf_trainer.yaml, which is transformers' Trainer, or begin a new run "
                    "from the weights",
                )
        self._facts = self._read_facts()
        self.step: int = self._facts["global_step"]

    def _read_facts(self) -> dict[str, Any]:
        file = self.folder / TRAINER_STATE
        _refuse_special(file)
        try:
            facts = json.loads(read_small_file(file))
            step = facts["global_step"]
            if type(step) is not int or step < 0:
                raise ValueError(f"global_step is {step!r:.40}")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise malformed_file(file, f"{type(error).__name__}: {error!s:.80}") from None
        return dict(facts)

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps of the whole run; 0 if the checkpoint does not record it."""
        steps = self._facts.get("max_steps")
        return steps if type(steps) is int else 0

    @property
    def micro_batch_rows(self) -> int | None:
        """The number of rows of a micro-batch of one process; None in checkpoints of releases that do not record it."""
        rows = self._facts.get("train_batch_size")
        return rows if type(rows) is int and rows > 0 else None

    @property
    def world_size(self) -> int:
        """The number of processes that wrote the checkpoint, by the files of their random states."""
        return max(1, len(list(self.folder.glob(_RNG_OF_RANKS))))

    @property
    def weight_files(self) -> list[str]:
        """The names of the files that hold the weights; empty if there is none in the format of safetensors."""
        for name in (WEIGHTS, ADAPTER):
            if (self.folder / name).exists():
                return [name]
        if not (self.folder / WEIGHTS_INDEX).exists():
            return []
        try:
            placed = json.loads(read_small_file(self.folder / WEIGHTS_INDEX))["weight_map"]
            files = sorted({f"{name}" if isinstance(name, str) else "/" for name in placed.values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise malformed_file(self.folder / WEIGHTS_INDEX, f"{type(error).__name__}: {error!s:.80}") from None
        if outside := next((name for name in files if Path(name).name != name), None):
            raise malformed_file(self.folder / WEIGHTS_INDEX, f"it names {outside!r:.80}, which is another folder's")
        return files

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights by the names in the files.

        Shapes:
            Returns tensors of any shape, on the CPU.

        Raises:
            CheckpointError: FG604 if a file is missing; FG611 if one cannot be read.
        """
        found: dict[str, Tensor] = {}
        for name in self.weight_files:
            _refuse_special(self.folder / name)
            found |= read_tensors(self.folder / name)
        return found

    def optimizer(self) -> dict[str, Any] | None:
        """Returns the optimizer's state dict, whose parameters are numbers; None if the checkpoint has none.

        Raises:
            CheckpointError: FG611 if the file is damaged; FG615 if it holds more than tensors and plain values.
        """
        name = next((name for name in _OPTIMIZERS if (self.folder / name).exists()), None)
        return None if name is None else self._mapping(name, ("state", "param_groups"))

    def schedule(self) -> dict[str, Any] | None:
        """Returns the state dict of the learning rate schedule; None if the checkpoint has none.

        Raises:
            CheckpointError: as `optimizer`.
        """
        return self._mapping(_SCHEDULE) if (self.folder / _SCHEDULE).exists() else None

    def scaler(self) -> dict[str, Any] | None:
        """Returns the state of the loss scale of float16; None if the checkpoint has none.

        Raises:
            CheckpointError: as `optimizer`.
        """
        return self._mapping(_SCALER) if (self.folder / _SCALER).exists() else None

    def rng(self, rank: int) -> dict[str, Any] | None:
        """Returns the random states of a process, in the form of `capture_rng`; None if the checkpoint has none.

        Args:
            rank: the number of the process.

        Raises:
            CheckpointError: as `optimizer`.
        """
        name = _RNG if self.world_size == 1 and (self.folder / _RNG).exists() else f"rng_state_{rank}.pth"
        if not (self.folder / name).exists():
            return None
        found = self._mapping(name, ("python", "numpy", "cpu"))
        try:
            kind, keys, position, has_gauss, cached = found["numpy"]
            numpy = [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
        except (TypeError, ValueError) as error:
            raise malformed_file(self.folder / name, f"{type(error).__name__}: {error!s:.80}") from None
        state = {"torch": found["cpu"], "python": found["python"], "numpy": numpy}
        if isinstance(devices := found.get("cuda"), Tensor | list):
            state["cuda"] = devices if isinstance(devices, list) else [devices]
        return state

    def _mapping(self, name: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
        file = self.folder / name
        _refuse_special(file)
        with torch.serialization.safe_globals(_NUMPY):  # what the random states of NumPy need, and no more
            found = read_pickled(file)
        if any(key not in found for key in needed):
            raise malformed_file(file, f"it has no {' and '.join(needed)}")
        return found


def _refuse_special(file: Path) -> None:
    if not file.exists():
        raise missing_file(file)
    # Reading a pipe would block for ever.
    if not is_regular(file.resolve()):
        raise malformed_file(file, "it is not a regular file")
