"""Files that torch has pickled, read without running code that they contain.

The input is a file of another program; the output is the mapping in it, of tensors and plain values. Anything else in
the file is refused, and a damaged file is an error with its name, whatever the damage is.
"""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forgather.errors import CheckpointError, first_line
from forgather.ml.checkpoint.manifest import is_regular, malformed_file

# What torch raises for damaged bytes depends on where the damage is.
_DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


def read_pickled(file: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Returns the mapping in a file that `torch.save` wrote.

    Args:
        file: the file, which exists.
        map_location: where the tensors are read to.

    Raises:
        CheckpointError: FG611 if the file is damaged, holds no mapping or is no regular file; FG615 if it holds more
            than tensors and plain values.
    """
    if not is_regular(file.resolve()):
        raise malformed_file(file, "it is not a regular file")
    try:
        with warnings.catch_warnings():
            # What torch warns of in a foreign file ends in an error, or does not matter.
            warnings.simplefilter("ignore")
            found = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{str(file)!r} holds more than tensors and plain values, and is not loaded: it could run code "
            f"({first_line(error)[:80]})",
            code="FG615",
            hint="resume without it, if you can: allow_missing names the parts; or continue with the program that "
            "wrote it",
        ) from None
    except _DAMAGED as error:
        raise malformed_file(file, f"{type(error).__name__}: {first_line(error)[:80]}") from None
    if not isinstance(found, Mapping):
        raise malformed_file(file, f"it holds a {type(found).__name__}, and no mapping")
    return dict(found)
