"""What a safetensors file holds, read from its header.

Takes a file; gives names, types and shapes. Keeps true: no torch, and no weight, is read; a header that cannot be is
one located error.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.ml.checkpoint.manifest import corrupt_file, missing_file

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U8": 8, "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "C64": 64,
}  # fmt: skip
_MOST_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What is known of a tensor without its values.

    Args:
        name: in its file.
        dtype: in the words of the format.
        shape: of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return self.numel * BITS.get(self.dtype, 0) // 8


def read_header(file: Path) -> tuple[list[TensorFact], dict[str, str]]:
    """Returns the tensors of a safetensors file, in the order of the file, and the texts that lie beside them.

    Raises:
        CheckpointError: FG603 for a file that is none, FG604 for a missing one.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MOST_BYTES:
                raise corrupt_file(file, f"it is no safetensors file (a header of {length} bytes)")
            header: dict[str, Any] = json.loads(stream.read(length))
        texts = header.pop("__metadata__", {})
        found = [(fact["data_offsets"], _fact(name, fact)) for name, fact in header.items()]
        ordered = [fact for _, fact in sorted(found, key=lambda item: (item[0], item[1].name))]
        return ordered, {str(name): str(text) for name, text in texts.items()}
    except FileNotFoundError:
        raise missing_file(file) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file(file, f"it is no safetensors file ({type(error).__name__})") from None


def _fact(name: str, fact: dict[str, Any]) -> TensorFact:
    shape = tuple(fact["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no shape: {shape}")
    return TensorFact(name, str(fact["dtype"]), shape)
