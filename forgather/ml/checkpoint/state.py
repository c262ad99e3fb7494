"""A state tree as two files: its tensors in safetensors, everything else in JSON.

Takes and gives nested dicts, lists, tuples, scalars and tensors. Keeps true: nothing is pickled, so
reading a foreign checkpoint cannot run code; what is read equals what was written, types of keys and
tuples included; a tensor that several places share is written once and shared again when read.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forgather.errors import CheckpointError

_TENSOR = "$tensor"
_TUPLE = "$tuple"
_ITEMS = "$items"
_BYTES = "$bytes"
_MARKS = (_TENSOR, _TUPLE, _ITEMS, _BYTES)


def write_state(folder: Path, name: str, tree: Any) -> None:
    """Writes `tree` as `<name>.json` and `<name>.safetensors`.

    Raises:
        CheckpointError: FG606 for a value that neither format holds.
    """
    tensors: dict[str, Tensor] = {}
    plain = _pack(tree, name, "", tensors, {})
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    write_tensors(folder / f"{name}.safetensors", tensors)


def read_state(folder: Path, name: str, *, device: str = "cpu") -> Any:
    """Returns the tree that `write_state` wrote.

    Raises:
        CheckpointError: FG603 where a file cannot be read, FG604 where one is missing.
    """
    file = folder / f"{name}.json"
    tensors = read_tensors(folder / f"{name}.safetensors", device=device)
    try:
        return _unpack(json.loads(file.read_text(encoding="utf-8")), tensors)
    except FileNotFoundError:
        raise missing_file(file) from None
    except (ValueError, KeyError) as error:
        raise corrupt_file(file, f"it cannot be read ({error})") from None


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors as one safetensors file that other users of the machine may read as usual."""
    compact = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(compact, file, metadata={"format": "pt", **(metadata or {})})
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def read_tensors(file: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """Returns the tensors of one safetensors file.

    Raises:
        CheckpointError: FG603 where the file cannot be read, FG604 where it is missing.
    """
    try:
        return load_file(file, device=device)
    except FileNotFoundError:
        raise missing_file(file) from None
    except (SafetensorError, ValueError, OSError) as error:
        raise corrupt_file(file, f"it is no safetensors file ({error})") from None


def read_metadata(file: Path) -> dict[str, str]:
    """Returns the texts that lie beside the tensors of a safetensors file."""
    with safe_open(file, framework="pt") as stream:
        return dict(stream.metadata() or {})


def corrupt_file(file: Path, what: str) -> CheckpointError:
    """Returns the error for a file of a checkpoint that is not what was written."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is corrupt: {what}",
        code="FG603",
        hint="remove this checkpoint folder and resume from an earlier one (resume_from_checkpoint: auto does that)",
    )


def missing_file(file: Path) -> CheckpointError:
    """Returns the error for a file that a checkpoint should have."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is missing",
        code="FG604",
        hint="restore the file, or resume from another checkpoint (resume_from_checkpoint: auto does that)",
    )


def _pack(value: Any, root: str, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: _store(value, path or root, tensors, seen)}
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
        hint="state_dict() may hold tensors, numbers, texts, lists, tuples and dicts: nothing is pickled",
    )


def _pack_mapping(
    value: Mapping[Any, Any], root: str, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]
) -> Any:
    packed = [(key, _pack(item, root, f"{path}.{key}", tensors, seen)) for key, item in value.items()]
    if all(isinstance(key, str) and key not in _MARKS for key, _ in packed):
        return dict(packed)
    return {_ITEMS: [[_pack(key, root, f"{path}.key", tensors, seen), item] for key, item in packed]}


def _store(tensor: Tensor, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    shared = identity_of(tensor)
    if shared in seen:
        return seen[shared]
    name = path.lstrip(".") or "value"
    while name in tensors:
        name += "_"
    # A view of a larger storage is written as what it shows, never as the storage.
    tensors[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    if tensor.numel():
        seen[shared] = name
    return name


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common exactly when they are the same memory, seen the same way."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == _TENSOR:
            return tensors[content]
        if mark == _TUPLE:
            return tuple(_unpack(item, tensors) for item in content)
        if mark == _ITEMS:
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
        if mark == _BYTES:
            return base64.b64decode(content)
    return {key: _unpack(item, tensors) for key, item in value.items()}


def split_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Returns the tensors of a model's state, the names that share one, and what is no tensor.

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
        elif value.numel() and (shared := identity_of(value)) in seen:
            aliases[name] = seen[shared]
        else:
            seen[identity_of(value)] = name
            tensors[name] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    return tensors, aliases, rest
