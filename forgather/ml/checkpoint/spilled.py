"""Tensors on disk in place of memory, while a model that is larger than one machine's memory is collected in files.

`SpilledTensors` takes tensors one at a time. It returns the first ones as they are, and beyond a limit of bytes tensors
whose values are in files, which have no name and vanish with the process. The system reads them when they are used and
may drop them from memory at any time.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from forgather.ml.log import get_logger
from forgather.ml.number_format import format_bytes

_log = get_logger(__name__)

MAX_BYTES = 2 << 30
"""The bytes that stay in memory by default."""


_RELEASE_BYTES = 64 << 20


def _release_freed_memory() -> None:
    """Returns freed memory to the system, where the C library can do so."""
    # Blocks of up to 32 MiB stay with the process when they are freed, and small objects in between break them up, so
    # that the next weight does not fit: the process would grow as if all weights were kept.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class SpilledTensors:
    """A place for tensors, in memory up to a limit, and in files beyond it.

    Args:
        folder: the folder of the files. It must be on a disk: a file system in memory would save nothing.
        max_bytes: the bytes that stay in memory; None for `MAX_BYTES`.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        self._folder = folder
        self._room = MAX_BYTES if max_bytes is None else max_bytes
        self._since_release = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the values of another one, which the caller does not need any longer.

        If the disk is full, the tensor is returned as it is.

        Shapes:
            tensor: any shape. Returns the same shape, on the CPU.
        """
        tensor = tensor.detach().cpu()
        self._room -= tensor.nbytes
        if self._room >= 0 or not tensor.nbytes:
            return tensor
        try:
            found = self._in_file(tensor)
            self._since_release += tensor.nbytes
            if self._since_release >= _RELEASE_BYTES:
                self._since_release = 0
                _release_freed_memory()
            return found
        except OSError as error:
            _log.warning(
                "a weight of %s stays in memory: %s (%s)", format_bytes(tensor.nbytes), error.strerror, self._folder
            )
            return tensor

    def _in_file(self, tensor: Tensor) -> Tensor:
        descriptor, name = tempfile.mkstemp(prefix=".spilled-", dir=self._folder)
        try:
            # Before the file is mapped: to write into a mapped file on a full disk ends the process.
            os.posix_fallocate(descriptor, 0, tensor.nbytes)
            storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=tensor.nbytes)
        finally:
            os.close(descriptor)
            # The mapping keeps the file until nothing refers to it.
            os.unlink(name)
        there = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
        found: Tensor = there.copy_(tensor)
        return found
