"""Stores tensors in safetensors files, and nested state dicts in one safetensors file and one JSON file.

`file_chunks` yields the bytes of a safetensors file, one tensor at a time, so that at most one tensor is copied to the
host at a time. Equal tensors with equal names give equal bytes; the order in which they are passed has no effect.

`write_state` and `read_state` write and read nested dicts, lists, tuples, scalars and tensors (a state tree). Nothing
is pickled, so reading an untrusted checkpoint cannot run code. The tree that is read equals the tree that was written,
including key types and tuples. A tensor that occurs in several places of the tree is written once, and is a single
object again after reading. Scalar tensors are stored in the JSON file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.manifest import malformed_file, missing_file, read_small_file
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

MALFORMED_DATA = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError)
"""The errors that Python and torch raise for malformed JSON data of a checkpoint. Its digest may still be correct."""


def refuse_unknown_type(name: str, tensor: Tensor) -> None:
    """Raises an error if safetensors cannot store a tensor.

    Args:
        name: the name of the tensor, which the message gives.
        tensor: a plain tensor, or a DTensor whose local shard is checked.

    Shapes:
        tensor: any.

    Raises:
        CheckpointError: FG606 if the tensor has a dtype or a class that cannot be stored.
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
    """Yields the bytes of a safetensors file: first the header, then the values of one tensor at a time.

    Args:
        tensors: the tensors by name, on any device.
        metadata: the strings that are stored in the header.

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
    """Returns the values of a tensor as bytes in row-major order; a view if the tensor is contiguous and on the CPU.

    Shapes:
        tensor: any.
    """
    if not tensor.numel():
        return b""
    # Conjugation and negation are lazy flags of a view; the file has no field for them.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(file: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, by name.

    Args:
        file: the path of the safetensors file.
        device: the device on which the tensors are created.

    Shapes:
        Returns tensors of any shape.

    Raises:
        CheckpointError: FG604 if the file is missing; FG611 if it is not a safetensors file.
    """
    try:
        return load_file(file, device=device)
    except FileNotFoundError:
        raise missing_file(file) from None
    except (SafetensorError, ValueError, OSError) as error:
        raise malformed_file(file, f"it is not a safetensors file ({error!s:.80})") from None


_TENSOR = "$tensor"
_NUMBER = "$number"
_TUPLE = "$tuple"
_ITEMS = "$items"
_BYTES = "$bytes"
_MARKS = (_TENSOR, _NUMBER, _TUPLE, _ITEMS, _BYTES)


def write_state(draft: Draft, name: str, tree: Any) -> None:
    """Writes a state tree as `<name>.json` and `<name>.safetensors`.

    Args:
        draft: the draft into which the files are written.
        name: the stem of the file names.
        tree: the state tree: nested dicts, lists, tuples, scalars and tensors.

    Raises:
        CheckpointError: FG606 if the tree contains a value that neither format can store.
    """
    plain, tensors = pack_tree(tree, name)
    draft.write(f"{name}.json", [json_bytes(plain)])
    write_tensors(draft, f"{name}.safetensors", tensors)


def pack_tree(tree: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns a state tree as JSON-compatible data, and the tensors to which the data refers, by name.

    Args:
        tree: the state tree: nested dicts, lists, tuples, scalars and tensors.
        name: the name of the tree, which error messages give.

    Shapes:
        The tensors have any shape. The values of scalar tensors are contained in the JSON-compatible data.

    Raises:
        CheckpointError: FG606 if the tree contains a value that neither format can store.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, name, "", tensors, {}), tensors


def read_state(folder: Path, name: str, *, device: str = "cpu") -> Any:
    """Returns the state tree that `write_state` wrote.

    Args:
        folder: the folder of the checkpoint.
        name: the stem of the file names.
        device: the device on which the tensors are created.

    Raises:
        CheckpointError: FG604 if a file is missing; FG611 if a file does not have the form in which a run writes it.
    """
    file = folder / f"{name}.json"
    tensors = read_tensors(folder / f"{name}.safetensors", device=device)
    try:
        return unpack_tree(json.loads(read_small_file(file)), tensors)
    except FileNotFoundError:
        raise missing_file(file) from None
    except (OSError, MemoryError, *MALFORMED_DATA) as error:
        raise malformed_file(file, f"{type(error).__name__}: {error!s:.80}") from None


def write_tensors(
    draft: Draft, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as one safetensors file.

    Args:
        draft: the draft into which the file is written.
        name: the name of the file.
        tensors: the tensors by name, on any device.
        metadata: the strings that are stored in the header.

    Shapes:
        tensors: any.
    """
    draft.write(name, file_chunks(tensors, metadata))


def _pack(value: Any, root: str, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    if isinstance(value, Tensor):
        # Optimizers keep a step count per parameter as a 0-d tensor; in safetensors each would cost a header entry.
        if not value.ndim and not value.is_complex() and value.dtype in DTYPES:
            return {_NUMBER: [DTYPES[value.dtype], value.item()]}
        return {_TENSOR: _store(value, path or root, tensors, seen)}
    # NumPy scalars, recognized without importing NumPy; `json` cannot write them.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _pack_mapping(value, root, path, tensors, seen)
    if isinstance(value, list | tuple):
        items = [_pack(item, root, f"{path}.{i}", tensors, seen) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise CheckpointError(
        f"{root}{path} is a {type(value).__name__}, which a checkpoint cannot hold",
        code="FG606",
        hint="state_dict() may hold tensors, numbers, strings, lists, tuples and dicts: nothing is pickled",
    )


def _pack_mapping(
    value: Mapping[Any, Any], root: str, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]
) -> Any:
    packed = [(key, _pack(item, root, f"{path}.{key}", tensors, seen)) for key, item in value.items()]
    if all(isinstance(key, str) and key not in _MARKS for key, _ in packed):
        return dict(packed)
    # JSON keys are strings; a dict with other keys, or with one of our marks as a key, is stored as a list of pairs.
    return {_ITEMS: [[_pack(key, root, f"{path}.key", tensors, seen), item] for key, item in packed]}


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    shared = identity_of(tensor)
    if shared in seen:
        return seen[shared]
    name = path.lstrip(".") or "value"
    # Distinct paths can give one name, since a key may contain dots itself.
    while name in tensors:
        name += "_"
    tensors[name] = tensor
    seen[shared] = name
    return name


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two tensors exactly if they are the same view of the same memory.

    For DTensors and empty tensors the key is the identity of the Python object. Their memory cannot be compared, and a
    rank whose shard is empty must find the same tied tensors as every other rank.

    Shapes:
        tensor: any.
    """
    if isinstance(tensor, DTensor) or not tensor.numel():
        return (id(tensor),)
    # Type, shape and stride as well: a slice that begins at the same address is another tensor.
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def unpack_tree(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the state tree from which `pack_tree` made the given data and tensors.

    Args:
        value: the JSON-compatible data that `pack_tree` returned.
        tensors: the tensors by name. Objects of any other type can be given, which then replace the tensors in the
            tree.
    """
    if isinstance(value, list):
        return [unpack_tree(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    # A mark is the only key of its dict; `_pack_mapping` never writes a user's dict of that form.
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == _TENSOR:
            return tensors[content]
        if mark == _NUMBER:
            return torch.tensor(content[1], dtype=DTYPE_OF[content[0]])
        if mark == _TUPLE:
            return tuple(unpack_tree(item, tensors) for item in content)
        if mark == _ITEMS:
            return {unpack_tree(key, tensors): unpack_tree(item, tensors) for key, item in content}
        if mark == _BYTES:
            return base64.b64decode(content)
    return {key: unpack_tree(item, tensors) for key, item in value.items()}


def split_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Returns a model's state dict as (tensors, aliases, other values), with one tensor for each tied weight.

    The aliases map each further name of a tied weight to its first name.

    Args:
        state: the state dict of a model.

    Shapes:
        state: any.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2)
        >>> split_tensors({"a": weight, "b": weight, "n": 3})
        ({'a': tensor([0., 0.])}, {'b': 'a'}, {'n': 3})
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            rest[name] = value
        elif (shared := identity_of(value)) in seen:
            aliases[name] = seen[shared]
        else:
            seen[shared] = name
            tensors[name] = value
    return tensors, aliases, rest
