"""Constructors that build a model, called so that the model takes no memory.

A config may build its model before the trainer exists. `without_memory_for_models` wraps such constructors while the
objects of a config are built. Every other constructor, such as one of data sets, is called as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import AutoQuantizationConfig

from forgather.ml.planner.packed_weights import packing_fakes
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.planner.value_readings import ReadingZeros
from forgather.ml.strategy.meta_model import replacing_conversions

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def without_memory_for_models(function: Callable[..., Any], fake: FakeTensorMode) -> Callable[..., Any]:
    """Returns a constructor that makes fake tensors if the given one builds a module, and the given one otherwise.

    Args:
        function: a class or a function that a config calls.
        fake: the mode in which the module is built.
    """
    if not builds_module(function):
        return function

    @functools.wraps(function)
    def build(*args: Any, **kwargs: Any) -> Any:
        with building(fake):
            return function(*args, **kwargs)

    return build


@contextlib.contextmanager
def building(fake: FakeTensorMode) -> Iterator[None]:
    """Context manager in which models are built with fake tensors.

    Args:
        fake: the mode that makes them.
    """
    with fake, RealIntegers(), ReadingZeros():  # type: ignore[no-untyped-call]
        yield


def builds_module(function: Callable[..., Any]) -> bool:
    """Returns whether a constructor builds a `torch.nn.Module`, as far as its class or its annotations tell.

    Args:
        function: a class or a function that a config calls.
    """
    if isinstance(function, type):
        return issubclass(function, nn.Module)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and function.__name__ in ("from_config", "from_pretrained", "_from_config"):
        # The automatic classes of transformers have no base class in common with the models that they make.
        return issubclass(owner, nn.Module) or hasattr(owner, "_model_mapping")
    try:
        result = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        # Annotations that refer to names which exist for type checkers only.
        return False
    return isinstance(result, type) and issubclass(result, nn.Module)


@contextlib.contextmanager
def loading_fakes() -> Iterator[None]:
    """Context manager in which libraries can make, load, convert and quantize models of fake tensors.

    Trainers of transformers and of libraries that extend it make no output folder in it.
    """
    # Their constructor makes the folder if this is true, and uses it for nothing else.
    no_folder = mock.patch.object(TrainingArguments, "should_save", new=False)
    with replacing_conversions(), packing_fakes(), _loading_shapes(), no_folder:
        yield


@contextlib.contextmanager
def _loading_shapes() -> Iterator[None]:
    """Context manager in which models of transformers are loaded by the shapes of their config, and no file is read.

    This holds within a `FakeTensorMode`. Quantization is that of the library. Weights that were stored quantized are
    quantized anew.
    """
    kept = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def load(kind: type[PreTrainedModel], /, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """Stands for `from_pretrained`: the model has the shapes of its config."""
        if active_fake_mode() is None or options.get("state_dict") is not None:
            return kept(kind, name, *args, config=config, **options)
        if not isinstance(config, PreTrainedConfig):
            config = kind.config_class.from_pretrained(config or name)  # type: ignore[union-attr]
        quantized = config.__dict__.pop("quantization_config", None)
        if quantized is not None:
            options.setdefault("quantization_config", AutoQuantizationConfig.from_dict(quantized))
        with torch.device("meta"), no_init_weights():
            made = kind(config, *args)
        # A tied weight is stored once. If both of its names were there, transformers would compare the values.
        shapes = {name: one for name, one in made.state_dict().items() if name not in made.all_tied_weights_keys}
        dtype = config.dtype or _stored_dtype(name)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        fakes = {
            key: torch.empty(one.shape, dtype=dtype if one.is_floating_point() else one.dtype, device="cpu")
            for key, one in shapes.items()
        }
        found = kept(kind, None, *args, config=config, state_dict=fakes, **options)
        model = found[0] if isinstance(found, tuple) else found
        model.name_or_path = model.config._name_or_path = str(name)
        return found

    PreTrainedModel.from_pretrained = classmethod(load)  # type: ignore[assignment,method-assign]
    # In a thread of its own, no mode would be active.
    with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = classmethod(kept)  # type: ignore[assignment,method-assign]


def _stored_dtype(folder: Any) -> torch.dtype:
    """Returns the dtype of the first weight that a folder stores, float32 if it stores none as safetensors.

    Args:
        folder: the folder; the name of a model on the Hub has no files here.
    """
    for file in sorted(Path(str(folder)).expanduser().glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                return _DTYPES.get(stored.get_slice(name).get_dtype(), torch.float32)
    return torch.float32
