"""Adapters of peft: their settings, and the model that they are put into.

`lora` takes the settings of a low-rank adapter, under the names of peft or their common short forms, and returns an
`Adapter`. `as_adapter` accepts what a trainer may be given. `Adapter.apply` takes a base model with its weights and
returns peft's model around it, in which only the adapter is trained. Every name in the settings must match a module of
the base model: peft itself ignores a name that matches nothing if another name matches. A model is never wrapped twice.

peft is imported when an adapter is applied, because the import takes seconds.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forgather.errors import CheckpointError, first_line
from forgather.ml.adapter_base import BaseModel, describe_base, note_base, read_base
from forgather.ml.adapter_names import (
    NEW_ROWS,
    AdapterError,
    refuse_unknown_tokens,
    refuse_unmatched,
    refuse_untrained,
    train_new_rows,
)
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG
from forgather.ml.checkpoint.state import read_tensors
from forgather.ml.library_progress import without_peft_warnings
from forgather.ml.losses import is_causal_lm
from forgather.ml.model_class import class_name, new_weights_of
from forgather.ml.random_state import forked_random
from forgather.requirements import needed_distribution
from forgather.rules import Rules, shipped_rules

_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that a trainer puts into its model.

    Args:
        settings: the arguments of `peft.LoraConfig`; those that are missing have the defaults of peft.
        path: the folder of a trained adapter from which training starts; None for a new adapter.
        config: a `peft.LoraConfig` that replaces the settings; None to use the settings.
    """

    settings: Mapping[str, Any]
    path: Path | None = None
    config: Any = None

    def apply(self, model: nn.Module, *, seed: int) -> nn.Module:
        """Returns peft's model around a base model, whose own weights are frozen.

        Args:
            model: the base model, which is changed in place.
            seed: the seed of the adapter's initial weights. The caller's random state is not changed.

        Raises:
            AdapterError: FG900 if a name matches no module; FG901 if the model has an adapter already; FG902 to FG904
                if the adapter at `path` cannot be used; FG905 if peft refuses the settings; FG908 if a token index is
                outside of the vocabulary; FG951 if random weights of the base model would not be trained.
        """
        peft = _peft()
        refuse_adapted(model)
        base = describe_base(model)
        config = self.config_for(model, base)
        try:
            with forked_random(seed), without_peft_warnings():
                if self.path is None:
                    adapted: nn.Module = peft.get_peft_model(model, config)
                else:
                    adapted = _loaded(peft, model, self.path, config)
        except AdapterError:
            raise
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise _refused(error) from error
        refuse_untrained(adapted, new_weights_of(model))
        note_base(adapted, base)
        return adapted

    def config_for(self, model: nn.Module, base: BaseModel | None = None) -> Any:
        """Returns the `peft.LoraConfig` of this adapter, whose names and numbers all match a base model.

        Args:
            model: the base model, which is not changed.
            base: its description; None to make it if it is needed.

        Raises:
            AdapterError: as for `apply`, except FG951.
        """
        peft = _peft()
        refuse_adapted(model)
        config = self._config(peft, model, base)
        train_new_rows(model, config)
        refuse_unmatched(model, config)
        refuse_unknown_tokens(model, config)
        return config

    def _config(self, peft: Any, model: nn.Module, base: BaseModel | None) -> Any:
        if self.path is not None:
            return self._config_at_path(peft, self.path, base or describe_base(model))
        # Copies: peft appends the head of a classifier to the given list `modules_to_save`, and the model may be made
        # several times.
        if self.config is not None:
            return copy.deepcopy(self.config)
        given = copy.deepcopy(dict(self.settings))
        given.setdefault("task_type", _task_of(model))
        if given.get("target_modules") == "all-linear":
            given = {**_settings_of_head(model), **given}
        try:
            return peft.LoraConfig(**given)
        except (ValueError, TypeError) as error:
            raise _refused(error) from error

    def _config_at_path(self, peft: Any, path: Path, base: BaseModel) -> Any:
        refuse_unreadable(path)
        try:
            config = peft.PeftConfig.from_pretrained(str(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _unusable(path, first_line(error)) from error
        if not isinstance(config, peft.LoraConfig):
            raise _unusable(path, f"its kind is {config.peft_type}, and only LoRA is supported")
        refuse_another_base(path, config.base_model_name_or_path, base)
        for name, value in self.settings.items():
            stored = getattr(config, name)
            if value == NEW_ROWS:  # the rows are compared below, when they are known
                continue
            if (set(value) if isinstance(stored, set) and not isinstance(value, str) else value) != stored:
                shown = sorted(stored) if isinstance(stored, set) else stored
                raise AdapterError(
                    f"{name} is {value!r}, and the adapter in {str(path)!r} has {shown!r}",
                    code="FG904",
                    hint=f"remove {name}: an adapter that is trained further keeps its settings",
                ).about(f"adapter.{name}")
        config.inference_mode = False
        return config


def lora(**settings: Any) -> Adapter:
    """Returns a low-rank adapter (LoRA, and with further settings DoRA, rsLoRA or PiSSA).

    Args:
        **settings: the arguments of `peft.LoraConfig`, of which `r` may be written as `rank`, `lora_alpha` as `alpha`
            and `lora_dropout` as `dropout`; and `path`, the folder of a trained adapter that is trained further, with
            the settings that are stored there. `target_modules` is "all-linear" by default, which are all linear
            layers except the output layer.

    Raises:
        AdapterError: FG810 to FG814 if a name or a value is not allowed.

    Example:
        >>> dict(lora(rank=4, alpha=8).settings)
        {'target_modules': 'all-linear', 'r': 4, 'lora_alpha': 8}
    """
    rules = _rules()
    # The rules know the values of a config; Python code has paths, too.
    settings = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    current, found = rules.names(settings)
    found += list(rules.values(current))
    found += list(rules.broken(rules.complete(current), current))
    if found:
        first = found[0]
        raise AdapterError(first.message, code=first.code, hint=first.hint).about(first.argument)
    given = {name: value for name, value in current.items() if value is not None}
    path = given.pop("path", None)
    if path is not None:
        return Adapter(settings=given, path=Path(path).expanduser())
    return Adapter(settings={"target_modules": "all-linear", **given})


def _rules() -> Rules:
    return shipped_rules()["forgather.ml.adapters:lora"][0]


def as_adapter(given: Any) -> Adapter | None:
    """Returns the adapter for the argument `adapter` of a trainer.

    Args:
        given: None, an `Adapter`, a `peft.LoraConfig`, or a mapping of the arguments of `lora`.

    Raises:
        AdapterError: FG905 if it is anything else; FG810 to FG814 if a setting in a mapping is not allowed.
    """
    if given is None or isinstance(given, Adapter):
        return given
    if isinstance(given, Mapping):
        try:
            return lora(**given)
        except AdapterError as error:
            raise error.about(f"adapter.{error.argument}") from None
    peft = sys.modules.get("peft")  # an object of peft exists only if peft is imported
    if peft is not None and isinstance(given, peft.LoraConfig):
        return Adapter(settings={}, config=given)
    raise AdapterError(
        f"the adapter is a {class_name(given) if isinstance(given, nn.Module) else type(given).__name__}",
        hint="give a mapping such as {r: 8, lora_alpha: 16}, a peft.LoraConfig, or what forgather.ml.adapters:lora "
        "returns; for another kind of adapter, call peft:get_peft_model in the block [model]",
    ).about("adapter")


def refuse_adapted(model: nn.Module) -> None:
    """Raises an error if a model has an adapter already.

    Args:
        model: the model that is to get an adapter.

    Raises:
        AdapterError: FG901 if the model is one of peft, or contains layers of an adapter.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")  # layers of peft exist only if peft is imported
    if tuners is None:
        return
    layers = (name for name, module in model.named_modules() if isinstance(module, tuners.BaseTunerLayer))
    first = next(layers, None)
    if first is not None:
        raise AdapterError(
            f"the {class_name(model)} has an adapter already, in {first!r}",
            code="FG901",
            hint="give the trainer the base model; to train an adapter further, name its folder as adapter.path",
        ).about("adapter")


def refuse_unreadable(path: Path) -> None:
    """Raises an error if a folder does not contain an adapter.

    Args:
        path: the folder of the adapter.

    Raises:
        AdapterError: FG902 if a file of the adapter is missing, if its configuration is not a JSON object, or if a
            value in it is of another kind than peft writes.
    """
    for name in (ADAPTER_CONFIG, ADAPTER):
        if not (path / name).is_file():
            raise _unusable(path, f"it has no {name}" if path.is_dir() else "there is no such folder")
    try:
        values = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise _unusable(path, f"{ADAPTER_CONFIG} is not a JSON object")
    for name, (is_allowed, expected) in _CONFIG_VALUES.items():
        if name in values and not is_allowed(values[name]):
            found = repr(values[name])[:80]
            raise _unusable(path, f"{name} is {found} in {ADAPTER_CONFIG}, where {expected} is needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, list) and all(type(v) is str for v in value))


# What peft reads without looking at it: another kind fails within peft or, as an alpha of NaN, gives another model.
_CONFIG_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: type(value) is int and value > 0, "an integer above 0"),
    "lora_alpha": (_is_number, "a finite number"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a text"),
    "target_modules": (_is_names, "a list of texts or one text"),
    "modules_to_save": (_is_names, "a list of texts"),
}


def refuse_another_base(path: Path, name: str | None, base: BaseModel) -> None:
    """Raises an error if an adapter was trained on another base model.

    The digests of the weights are compared if both are known, and the names otherwise. An unknown name fits any model.

    Args:
        path: the folder of the adapter.
        name: the name of the base model in the configuration of the adapter.
        base: the base model of this run.

    Raises:
        AdapterError: FG903 if the base models differ.
    """
    known = read_base(path)
    theirs = known or BaseModel(name=name or "")
    if theirs.is_known_to_differ(base):
        raise AdapterError(
            f"the adapter in {str(path)!r} was trained on {theirs}, and this run trains {base}",
            code="FG903",
            hint="load that base model, or start a new adapter without path"
            if known and known.digest
            else f"load that base model; if it is the same one in another place, change base_model_name_or_path in "
            f"{ADAPTER_CONFIG}",
        ).about("adapter.path")


def _unusable(path: Path, why: str) -> AdapterError:
    return AdapterError(
        f"the adapter {str(path)!r} cannot be loaded: {why[:200]}",
        code="FG902",
        hint=f"name a folder with {ADAPTER_CONFIG} and {ADAPTER}, such as the output_dir of a run with an adapter",
    ).about("adapter.path")


def _loaded(peft: Any, model: nn.Module, path: Path, config: Any) -> nn.Module:
    """Returns peft's model with the weights of a folder, which are all that the adapter needs, and finite."""
    try:
        weights = read_tensors(path / ADAPTER)
    except CheckpointError as error:
        raise _unusable(path, f"{ADAPTER} is damaged: {first_line(error.__context__ or error)}") from error
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise _unusable(path, f"{name!r} in {ADAPTER} has values that are not finite")
    with warnings.catch_warnings():
        # peft leaves weights that it does not find at their initial values, and warns.
        warnings.filterwarnings("error", message=".*[Mm]issing adapter keys")
        try:
            # The device is named, because peft would otherwise load the weights to an accelerator.
            loaded: nn.Module = peft.PeftModel.from_pretrained(
                model, str(path), is_trainable=True, config=config, torch_device="cpu"
            )
        except UserWarning as warning:
            names = re.findall(r"'([^']*\.[^']*)'", str(warning))
            example = f", such as {names[0]!r}" if names else ""
            raise _unusable(path, f"{ADAPTER} lacks weights that {ADAPTER_CONFIG} asks for{example}") from None
        except RuntimeError as error:
            # The first line of torch says only that there is an error.
            shapes = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), None)
            if shapes is None:
                raise
            raise _unusable(path, f"{ADAPTER} and {ADAPTER_CONFIG} are not of one adapter: {shapes}") from error
    return loaded


def _refused(error: Exception) -> AdapterError:
    return AdapterError(f"peft refuses the adapter: {first_line(error)[:300]}").about("adapter")


def _peft() -> Any:
    needed = needed_distribution("peft")
    if lack := needed.lack():
        raise AdapterError(f"an adapter needs {lack}", hint=needed.hint).about("adapter")
    import peft

    return peft


def _settings_of_head(model: nn.Module) -> dict[str, list[str]]:
    """Returns the settings with which the head of a classifier of words or images is trained as a whole.

    peft leaves the head of a sequence classifier out of "all-linear", and trains it. It does neither for images. For
    words it takes the head twice, which it then refuses.
    """
    if not class_name(model).endswith(("ForTokenClassification", "ForImageClassification")):
        return {}
    heads = [name for name in ("classifier", "score") if isinstance(getattr(model, name, None), nn.Linear)]
    return {"exclude_modules": heads, "modules_to_save": heads} if heads else {}


def _task_of(model: nn.Module) -> str | None:
    if is_causal_lm(model):
        return "CAUSAL_LM"
    return next((task for ending, task in _TASKS.items() if class_name(model).endswith(ending)), None)
