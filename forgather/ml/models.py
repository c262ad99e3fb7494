"""Builders of language models: from a configuration and a seed, or from trained weights.

`from_config` and `from_pretrained` give causal language models, `seq2seq_from_config` and `seq2seq_from_pretrained`
encoder-decoder models. New weights depend only on the configuration and the seed. The caller's random state is not
changed.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import forgather.ml.varlen_attention  # noqa: F401 - models may name this attention
from forgather.errors import ForgatherError, TrainingError, first_line, nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.chat_template import stop_token_ids
from forgather.ml.hub import folder_problem, hub_access, lookup_hint
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.log import get_logger
from forgather.ml.meta_loading import is_loading_on_meta
from forgather.ml.model_class import note_new_weights
from forgather.ml.random_state import forked_random
from forgather.ml.vocabulary import extend_vocabulary
from forgather.rules import is_path

_log = get_logger(__name__)


class ModelSourceError(TrainingError, OSError):
    """Raised if trained weights cannot be found or reached."""

    code = "FG840"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


class ModelConfigError(TrainingError, TypeError):
    """Raised if an object is not the configuration of a model of the task."""

    code = "FG842"


_KINDS: dict[Any, tuple[str, str]] = {
    AutoModelForCausalLM: ("a causal language model", "as in LlamaConfig or GPT2Config"),
    AutoModelForSeq2SeqLM: ("an encoder-decoder language model", "as in T5Config or BartConfig"),
}


def from_config(
    config: PretrainedConfig,
    *,
    seed: int = 42,
    dtype: torch.dtype | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Returns a causal language model with new weights.

    Args:
        config: the model configuration, such as `transformers.LlamaConfig(...)`. It is copied, not changed.
        seed: the seed of the weights. The caller's random states of Python, NumPy and torch are not changed.
        dtype: the dtype of the weights, such as "bfloat16". None uses torch's default dtype.
        tokenizer: a tokenizer whose vocabulary size and special token ids replace those of the configuration. None
            keeps the values in the configuration.
        **options: further arguments of `AutoModelForCausalLM.from_config`, such as `attn_implementation`.

    Returns:
        The model in training mode, on the CPU.

    Raises:
        ModelConfigError: FG842 if `config` is not the configuration of a causal language model, or if `dtype` is not a
            floating-point dtype.
    """
    refuse_wrong_values("models:from_config", locals())
    model = _new_model(AutoModelForCausalLM, config, seed=seed, dtype=dtype, tokenizer=tokenizer, options=options)
    _stop_after_answers(model, tokenizer)
    return _in_training_mode(model)


def seq2seq_from_config(
    config: PretrainedConfig,
    *,
    seed: int = 42,
    dtype: torch.dtype | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Returns an encoder-decoder language model with new weights.

    Args:
        config: the model configuration, such as `transformers.T5Config(...)`. It is copied, not changed.
        seed: the seed of the weights. The caller's random states of Python, NumPy and torch are not changed.
        dtype: the dtype of the weights, such as "bfloat16". None uses torch's default dtype.
        tokenizer: a tokenizer whose vocabulary size and special token ids replace those of the configuration. Its
            padding token is then the one with which the decoder begins, as of T5. None keeps the values in the
            configuration.
        **options: further arguments of `AutoModelForSeq2SeqLM.from_config`, such as `attn_implementation`.

    Returns:
        The model in training mode, on the CPU.

    Raises:
        ModelConfigError: FG842 if `config` is not the configuration of an encoder-decoder language model, or if `dtype`
            is not a floating-point dtype.
    """
    refuse_wrong_values("models:seq2seq_from_config", locals())
    model = _new_model(AutoModelForSeq2SeqLM, config, seed=seed, dtype=dtype, tokenizer=tokenizer, options=options)
    return _in_training_mode(model, "ForConditionalGeneration")


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_config: Any = None,
    upcast_unquantized: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Returns a trained causal language model from a folder or the Hugging Face Hub.

    Args:
        pretrained_model_name_or_path: the path of a folder in the Hugging Face layout, or a name on the Hub.
        tokenizer: a tokenizer. If its chat template ends answers with another token than the model's end-of-text token,
            the model's generation config stops at it too. If it has more tokens than the model has rows, the model gets
            rows for them, see `extend_vocabulary`. None keeps the model as it is.
        upcast_unquantized: True to keep in float32 what is not quantized (norms, embeddings, output layer), as peft's
            `prepare_model_for_kbit_training` does.
        quantization_config: how the weights are quantized while they are loaded, such as
            `transformers:BitsAndBytesConfig`; None loads them as they are.
        **options: further arguments of `AutoModelForCausalLM.from_pretrained`, such as `revision` or `dtype`.

    Returns:
        The model in training mode.

    Raises:
        ModelSourceError: FG840 if the model cannot be loaded, FG841 if the folder has no `config.json`, FG957 if its
            weights cannot be quantized here.
    """
    refuse_wrong_values("models:from_pretrained", locals())
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    model = _trained_model(AutoModelForCausalLM, pretrained_model_name_or_path, tokenizer=tokenizer, options=options)
    if upcast_unquantized:
        upcast_floats(model)
    _stop_after_answers(model, tokenizer)
    return _in_training_mode(model)


def seq2seq_from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Returns a trained encoder-decoder language model from a folder or the Hugging Face Hub.

    Args:
        pretrained_model_name_or_path: the path of a folder in the Hugging Face layout, or a name on the Hub.
        tokenizer: a tokenizer. If it has more tokens than the model has rows, the model gets rows for them, see
            `extend_vocabulary`. None keeps the model as it is.
        **options: further arguments of `AutoModelForSeq2SeqLM.from_pretrained`, such as `revision` or `dtype`.

    Returns:
        The model in training mode.

    Raises:
        ModelSourceError: FG840 if the model cannot be loaded, or is not an encoder-decoder model; FG841 if the folder
            has no `config.json`.
    """
    model = _trained_model(AutoModelForSeq2SeqLM, pretrained_model_name_or_path, tokenizer=tokenizer, options=options)
    return _in_training_mode(model, "ForConditionalGeneration")


def _trained_model(
    kind: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Returns a trained model; `kind` is a class of transformers that finds the class of the model."""
    folder = Path(pretrained_model_name_or_path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"folder {str(folder)!r} has no 'config.json'",
            code="FG841",
            hint="give the folder that `save_pretrained` wrote, or a name of the Hub",
        ).about("pretrained_model_name_or_path")
    name = str(pretrained_model_name_or_path)
    if wrong := folder_problem(name):
        raise _not_loaded(name, wrong)
    source = str(folder) if folder.is_dir() else name
    quantization_config = options.get("quantization_config")
    if is_loading_on_meta():
        options = options | {"device_map": "meta"}
    try:
        with without_progress_bars(), nullcontext() if folder.is_dir() else hub_access():
            loaded: Any = kind.from_pretrained(source, output_loading_info=True, **options)
    except (OSError, SafetensorError) as error:
        reason = first_line(error)
        raise _not_loaded(name, reason) from error
    except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
        if "Unrecognized configuration class" in str(error):
            hint = f"name the folder of a model with another configuration, {_KINDS[kind][1]}"
            raise _not_loaded(name, f"it is not {_KINDS[kind][0]}", hint) from None
        if quantization_config is None:
            raise
        raise _not_quantized(quantization_config, first_line(error)) from error
    model: PreTrainedModel = loaded[0]
    note_new_weights(model, loaded[1]["missing_keys"])
    if tokenizer is not None:
        extend_vocabulary(model, max(tokenizer.get_vocab().values(), default=-1) + 1)
    return model


def _new_model(
    kind: Any,
    config: Any,
    *,
    seed: int,
    dtype: torch.dtype | str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Returns a model with new weights; `kind` is a class of transformers that finds the class of the model."""
    if not isinstance(config, PretrainedConfig):
        raise ModelConfigError(
            f"a model configuration was expected, found {type(config).__name__}",
            hint="as in !call:transformers:LlamaConfig with its arguments below",
        )
    config = copy.deepcopy(config)
    _warn_of_unknown_fields(config)
    if tokenizer is not None:
        _warn_of_vocab_size(config, len(tokenizer))
        config.vocab_size = len(tokenizer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        if kind is AutoModelForSeq2SeqLM:
            # Positions of these models count the tokens that are not padding, so that padding has none.
            begin = tokenizer.eos_token_id if config.model_type in ("m2m_100", "nllb-moe") else tokenizer.pad_token_id
            config.decoder_start_token_id = begin
            if getattr(config, "forced_eos_token_id", None) is not None:
                config.forced_eos_token_id = tokenizer.eos_token_id
    if type(config) not in kind._model_mapping:
        known = [one.__name__ for one in kind._model_mapping]
        what, example = _KINDS[kind]
        raise ModelConfigError(
            f"{type(config).__name__} is not the configuration of {what}",
            hint=nearest(type(config).__name__, known) or example,
        )
    if dtype is not None:
        options["dtype"] = as_dtype(dtype)
    # Always on the CPU: an accelerator's generator gives other weights for the same seed.
    with forked_random(seed), torch.device("cpu"):
        model: PreTrainedModel = kind.from_config(config, **options)
    if kind is AutoModelForSeq2SeqLM and tokenizer is not None:
        _begin_as_in_training(model)
    return model


def _begin_as_in_training(model: Any) -> None:
    """Makes answers begin with the token with which the decoder begins in training; of mBART, it is the last label."""
    if callable(shifted := getattr(model, "prepare_decoder_input_ids_from_labels", None)):
        begin = int(shifted(labels=torch.tensor([[model.config.eos_token_id]]))[0, 0])
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = begin


def refuse_missing_reference(model: nn.Module, beta: float) -> None:
    """Raises an error if TRL could not load the reference model for the distance that `beta` weights.

    Args:
        model: the model to train, without an adapter.
        beta: the weight of the distance from the reference.

    Raises:
        TrainingError: FG987.
    """
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if beta and (not name or (is_path(name) and not Path(name).is_dir())):
        raise TrainingError(
            f"beta is {beta}, and the model was not loaded from a folder or the Hub: there is no reference to load",
            code="FG987",
            hint="set beta: 0.0, add an adapter, or load the model with 'models/pretrained.yaml'",
        ).about("args.beta")


def upcast_floats(model: PreTrainedModel) -> None:
    """Casts the weights of a model that are not quantized to float32, in place.

    Args:
        model: the model. Weights that bitsandbytes stores in a float dtype are packed, and stay as they are.
    """
    for parameter in model.parameters():
        # A plan is computed with fake tensors.
        if parameter.is_floating_point() and type(parameter) in (nn.Parameter, FakeTensor):
            parameter.data = parameter.data.to(torch.float32)


def _not_loaded(name: str, reason: str, hint: str | None = None) -> ModelSourceError:
    hint = hint or lookup_hint(name)
    found: ModelSourceError = ModelSourceError(f"model {name!r} could not be loaded: {reason}", hint=hint)
    found.argument = "pretrained_model_name_or_path"
    return found


def _not_quantized(config: Any, reason: str) -> ModelSourceError:
    found: ModelSourceError = ModelSourceError(
        f"the weights cannot be quantized by {type(config).__name__}: {reason[:200]}",
        code="FG957",
        hint="pip install 'forgather[quant]', or load the weights as they are: quantization_config: ~",
    )
    found.argument = "quantization_config"
    return found


def _stop_after_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Adds the token that ends an answer of a chat to those at which generation stops."""
    settings = getattr(model, "generation_config", None)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None) or settings is None:
        return
    known = settings.eos_token_id
    ends = [known] if isinstance(known, int) else list(known or ())
    added = [end for end in stop_token_ids(tokenizer)[:1] if end not in ends]
    if added:
        settings.eos_token_id = [*added, *ends]


def _in_training_mode(model: PreTrainedModel, loss_type: str = "ForCausalLM") -> PreTrainedModel:
    if model.loss_type is None:  # transformers derives it from the class name, and warns if it cannot
        model.loss_type = loss_type
    # `from_pretrained` of transformers returns models in evaluation mode.
    model.train()
    return model


def _warn_of_unknown_fields(config: PretrainedConfig) -> None:
    """Warns about fields that the configuration class does not define: transformers stores them without using them."""
    try:
        known = type(config)().to_dict()
    except (TypeError, ValueError):  # the fields of a class without defaults are not known
        return
    kind = type(config).__name__
    for name in config.to_dict():
        if name not in known and not name.startswith("_"):
            hint = nearest(name, list(known))
            _log.warning("%s has no field %r, so it has no effect%s", kind, name, f": {hint}" if hint else "")


def _warn_of_vocab_size(config: PretrainedConfig, found: int) -> None:
    given = config.vocab_size
    if given == found:
        return
    if given > found:
        way_out = (
            f"; for a model of {given} tokens (more memory, larger logits): tokenizer: ~ in [model], or "
            "--set model.tokenizer=null"
        )
    else:
        # Nothing tells whether the user wrote the number that the class has by default.
        way_out = "" if given == getattr(type(config), "vocab_size", None) else "; leave vocab_size out"
    _log.warning_once(f"vocab_size is {given}, but the model gets the size of the tokenizer, {found}{way_out}")


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns torch's dtype for a name such as "bfloat16" or "torch.bfloat16".

    Raises:
        ModelConfigError: FG842 if torch has no floating-point dtype with that name.
    """
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        floats = ["bfloat16", "float16", "float32", "float64"]
        raise ModelConfigError(f"{dtype!r} is not a floating-point dtype of torch", hint=nearest(str(dtype), floats))
    return found
