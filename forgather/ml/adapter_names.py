"""The names and numbers in the settings of an adapter, compared with the modules of the base model.

Each function takes a model and the settings, and raises an error that names what exists: peft ignores most names that
match nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from forgather.errors import TrainingError, nearest
from forgather.ml.model_class import class_name
from forgather.ml.vocabulary import new_rows, vocabulary_layers

_SHOWN = 12
NEW_ROWS = "new"
"""The value of `trainable_token_indices` for the rows of the tokens that were added to the model's vocabulary."""


class AdapterError(TrainingError, ValueError):
    """Raised if an adapter cannot be made, or does not fit the base model."""

    code = "FG905"


def refuse_unmatched(model: nn.Module, config: Any) -> None:
    """Raises an error if a name in the settings of an adapter matches no module.

    Args:
        model: the base model.
        config: the `peft.LoraConfig`.

    Raises:
        AdapterError: FG900 with the names that exist.
    """
    modules = [name for name, _ in model.named_modules() if name]
    for setting in ("target_modules", "exclude_modules", "modules_to_save"):
        given = getattr(config, setting, None)
        if given is None or given == "all-linear":
            continue
        # As in peft: a text is a regular expression for whole names, an item of a list is a name or its end.
        for wanted in [given] if isinstance(given, str) else sorted(given):
            pattern = wanted if isinstance(given, str) else _end_of_name(wanted)
            _refuse_without_match(setting, wanted, pattern, modules, model)
    for setting in ("rank_pattern", "alpha_pattern"):
        # peft reads each key as a regular expression for the end of a name.
        for wanted in getattr(config, setting, None) or ():
            _refuse_without_match(setting, wanted, rf"(.*\.)?({wanted})", modules, model)
    tokens = getattr(config, "trainable_token_indices", None)
    for wanted in tokens if isinstance(tokens, Mapping) else ():
        _refuse_without_match("trainable_token_indices", wanted, _end_of_name(wanted), modules, model)
    _refuse_unknown_layers(model, config, modules)


def _end_of_name(wanted: str) -> str:
    return rf"(.*\.)?{re.escape(wanted)}"


def _refuse_without_match(setting: str, wanted: str, pattern: str, modules: Sequence[str], model: nn.Module) -> None:
    try:
        if any(re.fullmatch(pattern, name) for name in modules):
            return
    except re.error as error:
        raise AdapterError(
            f"{setting}: {wanted!r} is not a regular expression ({error})",
            code="FG900",
            hint="write a list of names, as in [q_proj, v_proj], or correct the expression",
        ).about(f"adapter.{setting}") from None
    raise _no_module(setting, wanted, model)


def _refuse_unknown_layers(model: nn.Module, config: Any, modules: Sequence[str]) -> None:
    """Raises FG900 if `layers_to_transform` has the number of a layer that does not exist: peft would ignore it."""
    given = getattr(config, "layers_to_transform", None)
    numbers = {int(part) for name in modules for part in name.split(".") if part.isdecimal()}
    for wanted in [given] if isinstance(given, int) else given or ():
        if wanted not in numbers:
            raise AdapterError(
                f"layers_to_transform has {wanted!r}, and {class_name(model)} has no layer with this number",
                code="FG900",
                hint=f"the numbers are {min(numbers)} to {max(numbers)}" if numbers else "remove it",
            ).about("adapter.layers_to_transform")


def _no_module(setting: str, wanted: str, model: nn.Module) -> AdapterError:
    names = list(dict.fromkeys(_layer_names(model)))
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    close = nearest(wanted.rpartition(".")[2], names)
    suggestion = f"{close} " if close and close.startswith("did") else ""
    if wanted in names:
        suggestion = f"a text is a regular expression for whole names: write the list [{wanted}]; "
    return AdapterError(
        f"{setting}: {wanted!r} matches no module of {class_name(model)}",
        code="FG900",
        hint=f"{suggestion}its layers with weights are called {listed}",
    ).about(f"adapter.{setting}")


def _layer_names(model: nn.Module) -> Iterator[str]:
    """Yields the last part of the name of each layer that has a weight of two dimensions or more."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name and weight is not None and weight.ndim > 1 and not any(module.children()):
            parts = name.split(".")
            yield next((part for part in reversed(parts) if not part.isdigit()), name)


def refuse_untrained(adapted: nn.Module, new: Iterable[str]) -> None:
    """Raises an error if weights that are random in the base model are neither trained nor saved with the adapter.

    Args:
        adapted: the model of peft.
        new: the names of the random weights, as in the base model.

    Raises:
        AdapterError: FG951 with the modules to add.
    """
    trained = {
        name.replace(".modules_to_save.default.", ".").removeprefix("base_model.model.")
        for name, weight in adapted.named_parameters()
        if weight.requires_grad
    }
    left = list(dict.fromkeys(name.rpartition(".")[0] for name in new if name not in trained))
    if left:
        config: Any = adapted.peft_config
        wanted = [*(config["default"].modules_to_save or ()), *left]
        raise AdapterError(
            f"{left[0]!r} is not in the files of the base model: its weights are random, and would neither be trained "
            "nor be saved with the adapter",
            code="FG951",
            hint=f"add modules_to_save: [{', '.join(wanted)}]",
        ).about("adapter.modules_to_save")


def refuse_unknown_tokens(model: nn.Module, config: Any) -> None:
    """Raises an error if an index of a trained token row is not one of the vocabulary.

    Args:
        model: the base model.
        config: the `peft.LoraConfig`.

    Raises:
        AdapterError: FG905 if the indices are not numbers; FG908 if one is outside of the vocabulary.
    """
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens is None:
        return
    by_module = tokens if isinstance(tokens, Mapping) else {"": tokens}
    for wanted, indices in by_module.items():
        if not isinstance(indices, list | tuple) or any(type(index) is not int for index in indices):
            raise AdapterError(
                f"trainable_token_indices has {indices!r:.80}, which is not a list of token ids",
                hint="a list of whole numbers, or a mapping from module names to such lists",
            ).about("adapter.trainable_token_indices")
        for name, module in model.named_modules():
            is_meant = (
                re.fullmatch(_end_of_name(wanted), name) is not None if wanted else module is _embedding_of(model)
            ) and isinstance(getattr(module, "weight", None), nn.Parameter)
            outside = [index for index in indices if not 0 <= index < len(module.weight)] if is_meant else []
            if outside:
                raise AdapterError(
                    f"trainable_token_indices has {outside[0]}, and {name!r} has {len(module.weight)} rows",
                    code="FG908",
                    hint="resize the embeddings of the model first, or correct the index",
                ).about("adapter.trainable_token_indices")


def train_new_rows(model: nn.Module, config: Any) -> None:
    """Replaces the word `new` by the rows of added tokens, and raises an error if these rows would stay frozen.

    Args:
        model: the base model.
        config: the `peft.LoraConfig`, whose `trainable_token_indices` may change.

    Raises:
        AdapterError: FG939 if the rows of added tokens would stay frozen.
    """
    rows, given = list(new_rows(model)), getattr(config, "trainable_token_indices", None)
    if given == NEW_ROWS:
        config.trainable_token_indices = dict.fromkeys(vocabulary_layers(model), rows) if rows else None
        return
    if not rows:
        return
    saved = getattr(config, "modules_to_save", None) or ()
    for layer in vocabulary_layers(model):
        by_name = given if isinstance(given, Mapping) else {}
        trained = [
            one for wanted, listed in by_name.items() if re.fullmatch(_end_of_name(wanted), layer) for one in listed
        ]
        if isinstance(given, list) and model.get_submodule(layer) is _embedding_of(model):
            trained += given
        if not set(rows) <= set(trained) and not any(re.fullmatch(_end_of_name(one), layer) for one in saved):
            raise AdapterError(
                f"the rows {rows[0]} to {rows[-1]} of {layer!r} are those of added tokens, and would stay frozen",
                code="FG939",
                hint="add trainable_token_indices: new, which trains these rows alone, or name the layer in "
                "modules_to_save",
            ).about("adapter.trainable_token_indices")


def _embedding_of(model: nn.Module) -> Any:
    get = getattr(model, "get_input_embeddings", None)
    return get() if callable(get) else None
