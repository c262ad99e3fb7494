"""Fingerprints of models before training: equal keys mean equal initial weights, in this run and in later ones.

Takes the function that makes a model; gives a key for `ml/data/cache.py`, or None. A key covers everything that the
weights, and the random numbers drawn after them, depend on. A function whose dependencies are not fully known has no
key.
"""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from forgather import __version__
from forgather.ml.data.cache import content_key
from forgather.ml.models import from_config, from_pretrained

# Part of every key: a change of the key's content makes keys of earlier releases invalid.
_FORM = 1
_PACKAGES = ("torch", "transformers", "numpy")


class _Unknown(Exception):  # noqa: N818 - no error: there is no key
    """Raised for a value that a key cannot describe."""


def model_key(make: Callable[..., Any] | None, seed: int) -> str | None:
    """Returns the key of the model that `make()` returns after seeding; None if it cannot be determined.

    Known functions are `from_config`, and `from_pretrained` of a local folder, with plain data as arguments, directly
    or in `functools.partial` and `!partial`. Only classes of transformers count: its version determines their code.

    Args:
        make: makes the model.
        seed: set before.

    Example:
        >>> model_key(lambda: None, 42) is None
        True
    """
    try:
        function, args, kwargs = _unwrapped_partial(make)
        if function not in (from_config, from_pretrained):
            return None
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        given |= given.pop("options", {})
        facts = _facts_of_config(given) if function is from_config else _facts_of_folder(given)
        return content_key(form=_FORM, maker=function.__name__, given=facts, seed=seed, machine=_environment_facts())
    except (_Unknown, TypeError, ValueError, KeyError, OSError):
        return None


def _unwrapped_partial(make: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function at the core of nested partials, and all its arguments."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    # By attributes, not by class: a `!partial` of a config has them too.
    while hasattr(make, "func") and hasattr(make, "keywords"):
        args = (*make.args, *args)
        kwargs = {**make.keywords, **kwargs, **getattr(make, "latent", {})}
        make = make.func
    return make, args, kwargs


def _facts_of_config(given: dict[str, Any]) -> dict[str, Any]:
    config = given["config"]
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if not all(kind.__module__.startswith("transformers.") for kind in (type(config), model)):
        raise _Unknown
    return {"class": model.__name__, **_plain(given)}


def _facts_of_folder(given: dict[str, Any]) -> dict[str, Any]:
    folder = Path(given.pop("pretrained_model_name_or_path")).expanduser()
    # An adapter's base weights are in another folder.
    if not folder.is_dir() or (folder / "adapter_config.json").exists():
        raise _Unknown
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in folder.iterdir() if file.is_file()}
    return {"folder": str(folder.resolve()), "files": files, **_plain(given)}


def _plain(value: Any) -> Any:
    """Returns a value as plain data.

    Raises:
        _Unknown: for a value with more than plain data.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        # Remote code can do anything, whatever its arguments are.
        if value.get("trust_remote_code") or not all(isinstance(key, str) for key in value):
            raise _Unknown
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, PretrainedConfig):
        facts = value.to_dict()
        json.dumps(facts)  # a TypeError where it holds more than data
        return {"class": type(value).__name__, "attention": value._attn_implementation, **facts}
    if isinstance(value, PreTrainedTokenizerBase):  # what `from_config` takes of it
        return [len(value), value.bos_token_id, value.eos_token_id, value.pad_token_id]
    raise _Unknown


def _environment_facts() -> dict[str, Any]:
    return {
        "versions": {"forgather": __version__, **{package: version(package) for package in _PACKAGES}},
        "dtype": str(torch.get_default_dtype()),
        "processor": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }
