"""What the function that makes a model tells about it: whether it is new, where it is stored, and its cache key.

`model_key` returns a key for `ml/data/cache.py`. Two models with equal keys have equal initial weights, also in
different runs. A key is computed from everything that determines the initial weights and the state of the random
generators after initialization. If a part of this is unknown, the model has no key.
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
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from forgather import __version__
from forgather.errors import TrainingError
from forgather.ml.adapters import Adapter
from forgather.ml.data.cache import content_key
from forgather.ml.models import from_config, from_pretrained
from forgather.ml.trainer.arguments import TrainingArguments


def is_made_anew(model: Any) -> bool:
    """Returns whether one process can make a model, and write its weights for the other processes.

    Weights that are quantized while they are loaded have parts that a file of weights lacks: every process loads them.

    Args:
        model: the model, or the function that makes it, or None.
    """
    if model is None or isinstance(model, nn.Module):
        return False
    return _unwrapped_partial(model)[2].get("quantization_config") is None


def initial_weights(args: TrainingArguments, model: Any) -> str:
    """Returns how the model gets its weights: "sequential" or "counter".

    Args:
        args: the training arguments.
        model: the model, or the function that makes it, or None.

    Raises:
        TrainingError: FG620 if the model exists already or is loaded, and its weights should be computed by position.
    """
    if args.initial_weights == "sequential" or model is None:
        return "sequential"
    if isinstance(model, nn.Module):
        raise TrainingError(
            "initial_weights is 'counter', and the model was made before the trainer, with weights",
            code="FG620",
            hint="give the trainer a function that makes the model: in a config, extend 'trainers/accel_trainer.yaml' "
            "(also for one process), or write !partial before the constructor of the model",
        ).about("args.initial_weights")
    if not is_made_anew(model) or getattr(_unwrapped_partial(model)[0], "__name__", "").endswith("from_pretrained"):
        raise TrainingError(
            "initial_weights is 'counter', and the model is loaded with the weights of its files",
            code="FG620",
            hint="remove initial_weights: a loaded model has no weights to compute, and each process of a sharded "
            "strategy reads its own slices of the files; or make a new model by from_config",
        ).about("args.initial_weights")
    return "counter"


_OPTIONS_OF_LOADING = frozenset(("pretrained_model_name_or_path", "tokenizer", "dtype", "attn_implementation"))


def stored_in(model: Any, adapter: Adapter | None) -> Path | None:
    """Returns the folder from which a function loads a model as it is; None if the function does anything else.

    Args:
        model: the model, or the function that makes it, or None.
        adapter: the adapter of the model.
    """
    if adapter is not None or isinstance(model, nn.Module):
        return None
    function, args, kwargs = _unwrapped_partial(model)
    if function is not from_pretrained:
        return None
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    given |= given.pop("options", {})
    folder = Path(given["pretrained_model_name_or_path"]).expanduser()
    is_plain = given.keys() <= _OPTIONS_OF_LOADING and not (folder / "adapter_config.json").exists()
    return folder if is_plain and folder.is_dir() else None


# Part of every key: a change of the key's content makes keys of earlier releases invalid.
_FORM = 1
_PACKAGES = ("torch", "transformers", "numpy")


class _Unknown(Exception):  # noqa: N818 - no error: there is no key
    """Raised if the cache key cannot be computed because it would depend on an unknown value."""


def model_key(make: Callable[..., Any] | None, seed: int, adapter: Adapter | None = None) -> str | None:
    """Returns the cache key of the model that `make()` builds after seeding; None if the key cannot be determined.

    The key can be determined if `make` is `from_config`, or `from_pretrained` of a local folder, with plain data as
    arguments, possibly wrapped in `functools.partial` or `!partial`. The model's class must belong to transformers,
    whose version then determines the code of the class.

    Args:
        make: the function that builds the model.
        seed: the seed that is set before the model is built.
        adapter: the adapter of the model. With an adapter there is no key, because the digest of the base model is
            computed from its values.

    Example:
        >>> model_key(lambda: None, 42) is None
        True
    """
    if adapter is not None:
        return None
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
    """Returns the innermost function of nested partials, with all positional and keyword arguments of the partials."""
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
    """Returns a value as data that can be stored as JSON.

    Raises:
        _Unknown: if the value contains an object that cannot be described completely by such data.
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
