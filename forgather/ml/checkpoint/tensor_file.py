"""Safetensors files: streamed when written, located errors when read.

Takes tensors by name; gives the bytes of the file in chunks, one tensor at a time. At most one tensor is copied to the
host at a time. Equal tensors give equal bytes, whatever the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.manifest import malformed_file, missing_file
from forgather.ml.checkpoint.storage import Bytes

# The type names of the safetensors format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPE_OF = {word: dtype for dtype, word in DTYPES.items()}


def refuse_unknown_type(name: str, tensor: Tensor) -> None:
    """Raises an error for a tensor whose type safetensors cannot store; of a DTensor, the local shard is checked.

    Args:
        name: of the tensor, for the message.
        tensor: a plain tensor or a DTensor.

    Shapes:
        tensor: any.

    Raises:
        CheckpointError: FG606.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A wrapper subclass (torchao's quantized tensors, for example) holds several tensors and has no bytes of its own.
    of_several = is_traceable_wrapper_subclass(local)
    if of_several or local.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} is a {type(local).__name__ if of_several else local.dtype}, which a checkpoint cannot hold",
            code="FG606",
            hint="a checkpoint holds plain tensors of the types that safetensors has",
        )


def file_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[Bytes]:
    """Yields the bytes of a safetensors file: the header, then one tensor at a time.

    Args:
        tensors: by name, on any device.
        metadata: strings that are stored in the header.

    Shapes:
        tensors: any.
    """
    # Larger element types first, so that each tensor starts at a multiple of its element size: readers map the file.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        tensor = tensors[name]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with blanks, which keeps the data section aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield tensor_bytes(tensors[name])


def tensor_bytes(tensor: Tensor) -> Bytes:
    """Returns the values of a tensor in row-major order; a view where the tensor is contiguous and on the CPU already.

    Shapes:
        tensor: any.
    """
    if not tensor.numel():
        return b""
    # Conjugation and negation are lazy flags of a view; the file has no field for them.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(file: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """Returns the tensors of one safetensors file by name.

    Args:
        file: the safetensors file.
        device: where the tensors are put.

    Raises:
        CheckpointError: FG604 when the file is missing, FG611 when it is not a safetensors file.
    """
    try:
        return load_file(file, device=device)
    except FileNotFoundError:
        raise missing_file(file) from None
    except (SafetensorError, ValueError, OSError) as error:
        raise malformed_file(file, f"it is no safetensors file ({error!s:.80})") from None
