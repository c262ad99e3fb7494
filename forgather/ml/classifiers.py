"""Builders of models that classify texts, tokens or images: from a configuration and a seed, or from trained weights.

The classes, their names and the kind of the labels are written into the configuration of the model, so a saved model
names its classes. New weights depend only on the configuration and the seed; the caller's random state is not changed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from forgather.errors import first_line, nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.hub import folder_problem, hub_access, lookup_hint
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.model_class import note_new_weights
from forgather.ml.models import ModelConfigError, ModelSourceError, as_dtype
from forgather.ml.random_state import forked_random

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class _Kind(NamedTuple):
    """The models for a task.

    Args:
        problem_type: transformers' `problem_type`, which chooses the loss; None if the class of the model has only one.
        auto: the class of transformers that finds the class of the model for a configuration.
        what: what such a model is for.
        example: an example of a configuration.
    """

    problem_type: ProblemType | None
    auto: Any
    what: str = "sequence classification"
    example: str = "as in LlamaConfig or BertConfig"


KINDS = {
    "classification": _Kind("single_label_classification", AutoModelForSequenceClassification),
    "multi_label": _Kind("multi_label_classification", AutoModelForSequenceClassification),
    "regression": _Kind("regression", AutoModelForSequenceClassification),
    "token_classification": _Kind(None, AutoModelForTokenClassification, "token classification"),
    "image_classification": _Kind(
        "single_label_classification", AutoModelForImageClassification, "image classification", "as in ViTConfig"
    ),
}
"""The models for each task."""


def classifier_from_config(
    config: PretrainedConfig,
    *,
    task: str = "classification",
    labels: Sequence[str] | None = None,
    num_values: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 42,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Returns a model that classifies texts, tokens or images, or gives texts numbers, with new weights.

    Args:
        config: the model configuration, such as `transformers.LlamaConfig(...)`. It is copied, not changed.
        task: "classification", "multi_label" or "regression" for texts, "token_classification" or
            "image_classification".
        labels: the names of the classes in the order of their numbers; None for a regression.
        num_values: the number of values of a regression.
        tokenizer: the tokenizer, whose vocabulary size and special token ids replace those of the configuration.
        seed: the seed of the weights.
        dtype: the dtype of the weights, such as "bfloat16". None uses torch's default dtype.
        **options: further arguments of `from_config` of transformers, such as `attn_implementation`.

    Returns:
        The model in training mode, on the CPU.

    Raises:
        ModelConfigError: FG842 if the configuration has no model for the task; FG879 if task and labels do not fit
            together.
    """
    refuse_wrong_values("classifiers:classifier_from_config", locals())
    if not isinstance(config, PretrainedConfig):
        raise ModelConfigError(
            f"a model configuration was expected, found {type(config).__name__}",
            hint="as in !call:transformers:LlamaConfig with its arguments below",
        )
    config = copy.deepcopy(config)
    kind = _describe(config, task, labels, num_values)
    if type(config) not in kind.auto._model_mapping:
        known = [one.__name__ for one in kind.auto._model_mapping]
        raise ModelConfigError(
            f"{type(config).__name__} is not the configuration of a model for {kind.what}",
            hint=nearest(type(config).__name__, known) or kind.example,
        )
    if tokenizer is not None:
        config.vocab_size = len(tokenizer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    if dtype is not None:
        options["dtype"] = as_dtype(dtype)
    # Always on the CPU: an accelerator's generator gives other weights for the same seed.
    with forked_random(seed), torch.device("cpu"):
        model: PreTrainedModel = kind.auto.from_config(config, **options)
    model.train()
    return model


def classifier_from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    task: str = "classification",
    labels: Sequence[str] | None = None,
    num_values: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 42,
    **options: Any,
) -> PreTrainedModel:
    """Returns a trained model with a head for a task; a head that it does not have gets new weights.

    Args:
        pretrained_model_name_or_path: the path of a folder in the Hugging Face layout, or a name on the Hub.
        task: "classification", "multi_label" or "regression" for texts, "token_classification" or
            "image_classification".
        labels: the names of the classes in the order of their numbers; None for a regression.
        num_values: the number of values of a regression.
        tokenizer: the tokenizer, whose padding token the model gets: some models read their prediction at the last
            token that is not padding.
        seed: the seed of the new weights of the head.
        **options: further arguments of `from_pretrained` of transformers, such as `ignore_mismatched_sizes`.

    Returns:
        The model in training mode.

    Raises:
        ModelSourceError: FG840 if the model cannot be loaded.
        ModelConfigError: FG879 if task and labels do not fit together.
    """
    refuse_wrong_values("classifiers:classifier_from_pretrained", locals())
    folder = Path(pretrained_model_name_or_path).expanduser()
    name = str(pretrained_model_name_or_path)
    if wrong := folder_problem(name):
        raise _not_loaded(name, wrong)
    source = str(folder) if folder.is_dir() else name
    try:
        with without_progress_bars(), nullcontext() if folder.is_dir() else hub_access():
            config = AutoConfig.from_pretrained(source)
            kind = _describe(config, task, labels, num_values)
            if tokenizer is not None:
                config.pad_token_id = tokenizer.pad_token_id
            with forked_random(seed), torch.device("cpu"):
                model, facts = kind.auto.from_pretrained(source, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise _not_loaded(name, first_line(error)[:200]) from error
    note_new_weights(model, facts["missing_keys"])
    model.train()
    return model  # type: ignore[no-any-return]


def _describe(config: PretrainedConfig, task: str, labels: Sequence[str] | None, num_values: int) -> _Kind:
    """Writes the task and the names of the classes into a configuration; returns the models for the task."""
    if task not in KINDS:
        hint = nearest(str(task), list(KINDS)) or f"one of: {', '.join(KINDS)}"
        raise ModelConfigError(f"task is {task!r}", code="FG879", hint=hint).about("task")
    if (labels is None) != (task == "regression"):
        what = "has no classes, and labels names some" if labels is not None else "needs the names of its classes"
        hint = "set labels: !call:forgather.ml.data:class_names with the rows, which are read with the same task"
        raise ModelConfigError(f"task {task!r} {what}", code="FG879", hint=hint).about("labels")
    names = list(labels) if labels is not None else [f"value_{number}" for number in range(num_values)]
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    kind = KINDS[task]
    if kind.problem_type is not None:
        config.problem_type = kind.problem_type
    return kind


def _not_loaded(name: str, reason: str) -> ModelSourceError:
    found: ModelSourceError = ModelSourceError(f"model {name!r} could not be loaded: {reason}", hint=lookup_hint(name))
    found.argument = "pretrained_model_name_or_path"
    return found
