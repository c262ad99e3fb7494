"""Builds a model, and prepares it for training (TF32, activation checkpointing, compilation).

Preparation steps change how a model computes, and never its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from forgather.errors import TrainingError
from forgather.ml.activation_budget import Budgeted
from forgather.ml.activation_checkpointing import Recomputation, repeated_blocks
from forgather.ml.adapter_base import base_of, describe_base, is_peft_model, note_base
from forgather.ml.adapters import Adapter
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.distributed import collectives
from forgather.ml.embedding_noise import add_noise_to_embeddings, remove_noise_from_embeddings
from forgather.ml.float8 import compute_in_float8
from forgather.ml.liger import use_liger_kernels
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.quantized import quantized_as, refusal

Step = Callable[[nn.Module], None]


def preparation(args: TrainingArguments) -> list[Step]:
    """Returns the preparation steps that the arguments request, in the order in which they must be applied."""
    steps: list[Step] = []
    if args.tf32 is not None:
        steps.append(functools.partial(allow_tf32, allowed=args.tf32))
    if args.use_liger_kernel:
        steps.append(functools.partial(use_liger_kernels, settings=args.liger_kernel_config or {}))
    if args.fp8 is not None:
        in_float8 = functools.partial(
            compute_in_float8, recipe=args.fp8, exclude=args.fp8_exclude or (), emulate=args.fp8_emulate
        )
        steps.append(in_float8)
    if args.neftune_noise_alpha is not None:
        steps.append(functools.partial(add_noise_to_embeddings, alpha=args.neftune_noise_alpha))
    else:
        # An earlier trainer of the same model may have added it.
        steps.append(remove_noise_from_embeddings)
    if args.gradient_checkpointing:
        steps.append(functools.partial(recompute_activations, settings=args.gradient_checkpointing_kwargs or {}))
    if args.torch_compile:
        compiles = functools.partial(
            compile_model,
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode,
            by_blocks=args.torch_compile_regions is not False,
            memory_budget=args.activation_memory_budget,
        )
        # Compilation comes last: it has to see the forward methods that recompute activations.
        steps.append(compiles)
    return steps


def refuse_quantized(model: nn.Module, *, args: TrainingArguments) -> None:
    """Raises an error if a model is quantized, and cannot be trained with these arguments.

    Args:
        model: the model, with its adapter.
        args: the training arguments.

    Raises:
        TrainingError: FG955 if the strategy cannot train such weights; FG956 if there is no adapter.
    """
    model = getattr(model, "stands_for", model)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return
    found = refusal(
        quantized_as(config if isinstance(config, Mapping) else config.to_dict(), type(config).__name__),
        {**args.RULES.facts, **args.to_dict()},
        has_adapter=is_peft_model(model),
        processes=collectives.size(),
    )
    if found is not None:
        raise TrainingError(found.message, code=found.code, hint=found.hint).about("model")


def refuse_loraplus(model: nn.Module, *, args: TrainingArguments) -> None:
    """Raises an error if the arguments ask for LoRA+, and the model has no weights B of a LoRA that could get its rate.

    Args:
        model: the model, with its adapter.
        args: the training arguments.

    Raises:
        TrainingError: FG972 if the model has no LoRA.
    """
    names = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if args.loraplus_lr_ratio is None or any("lora_B" in name or "lora_embedding_B" in name for name in names):
        return
    raise TrainingError(
        f"loraplus_lr_ratio is {args.loraplus_lr_ratio}, and {type(model).__name__} has no LoRA: no weight would get "
        "another learning rate",
        code="FG972",
        hint="take a LoRA, or remove loraplus_lr_ratio",
    ).about("args.loraplus_lr_ratio")


def keep_differentiable(model: nn.Module) -> None:
    """Keeps the 4-bit weights of bitsandbytes in the layout through which gradients flow, also after an evaluation.

    On processors with AVX512-BF16, a forward pass in evaluation mode repacks the weights. No gradient flows through the
    product with repacked weights, so that a training would go on without the gradients of most adapters.

    Args:
        model: the model, which is changed in place.
    """
    module: Any
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            module.support_avx512bf16_for_cpu = False


def allow_tf32(model: nn.Module, *, allowed: bool) -> None:
    """Allows or forbids TF32 in float32 matrix products and convolutions on CUDA, for the whole process.

    Args:
        model: the model, which is not used; every preparation step gets it.
        allowed: whether TF32 may be used.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def recompute_activations(model: nn.Module, *, settings: Mapping[str, Any]) -> None:
    """Turns on activation checkpointing: the backward pass recomputes activations, which saves memory.

    A model that has the transformers method for activation checkpointing uses it. In other models, each item of an
    outermost `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` is recomputed as one unit.

    Args:
        model: the model, which is changed in place.
        settings: the argument `gradient_checkpointing_kwargs`; `use_reentrant` is False by default.

    Raises:
        TrainingError: FG725 or FG726 if the settings do not fit one another or the model; FG822 if the model has
            neither that method nor such a container; FG907 if the re-entrant variant
            is requested, and the input embeddings are frozen.
    """
    asked = Recomputation.from_arguments(settings)
    if asked.settings["use_reentrant"]:
        _refuse_frozen_inputs(model)
    # transformers renamed the method; earlier releases and other models have the second name only.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if callable(enable := getattr(model, f"{name}_enable", None)):
            enable(**{f"{name}_kwargs": asked.settings})
            asked.apply_to_layers(model)
            return
    units = repeated_blocks(model)
    if not units:
        raise TrainingError(
            f"gradient_checkpointing is on, and {type(model).__name__} has no nn.ModuleList or nn.Sequential",
            code="FG822",
            hint="keep the layers in an nn.ModuleList, give the model gradient_checkpointing_enable(), or turn it off",
        )
    asked.apply_to_blocks(units)


def _refuse_frozen_inputs(model: nn.Module) -> None:
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return
    weights = list(embeddings.parameters()) if isinstance(embeddings, nn.Module) else []
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and weights and not any(weight.requires_grad for weight in weights):
        raise TrainingError(
            "use_reentrant is true, and the input embeddings are frozen: the model's blocks would get no gradients",
            code="FG907",
            hint="remove use_reentrant; false is the default",
        ).about("args.gradient_checkpointing_kwargs.use_reentrant")


def compile_model(
    model: nn.Module,
    *,
    backend: str,
    mode: str | None,
    by_blocks: bool = False,
    memory_budget: float | None = None,
) -> None:
    """Compiles the model in place.

    Args:
        model: the model to compile.
        backend: the `backend` argument of `torch.compile`.
        mode: the `mode` argument of `torch.compile`; None is torch's default.
        by_blocks: whether to compile each repeated block instead of the whole model. A model without repeated blocks is
            compiled as a whole.
        memory_budget: which part of its activations a compiled unit may keep for the backward pass; None for torch's
            setting.

    Raises:
        TrainingError: FG823 if torch has no backend of this name, or its inductor no such mode.
    """
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise TrainingError(
            f"torch_compile_backend is {backend!r}",
            code="FG823",
            hint="one of: " + ", ".join(sorted(torch._dynamo.list_backends())),
        )
    if mode is not None and backend == "inductor" and mode not in torch._inductor.list_mode_options():
        raise TrainingError(
            f"torch_compile_mode is {mode!r}",
            code="FG823",
            hint="one of: " + ", ".join(sorted(torch._inductor.list_mode_options())),
        ).about("args.torch_compile_mode")
    compiler: Any = backend
    if memory_budget is not None:
        # One object for all units: equal units are compiled once.
        compiler, mode = Budgeted(backend, mode, memory_budget), None
    for unit in (repeated_blocks(model) if by_blocks else ()) or [model]:
        # `nn.Module.compile` keeps the module; `torch.compile` would wrap it and prefix the names of its weights.
        unit.compile(backend=compiler, mode=mode)


def make_model(model: Any, model_init: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """Returns the model to train. If a callable must build the model, the random seed is set first.

    Args:
        model: the module to train, or a callable without arguments that returns it, or None.
        model_init: a callable that returns the module, which is used if `model` is None.
        seed: the seed of the initial weights.

    Raises:
        TrainingError: FG801 if there is no model, or if it is not a `torch.nn.Module`.
    """
    make = model_init if model is None else None if isinstance(model, nn.Module) else model
    if make is not None:
        seed_everything(seed)
        model = make()
    if not isinstance(model, nn.Module):
        found = "there is no model" if model is None else f"the model is a {type(model).__name__}"
        raise TrainingError(
            found, code="FG801", hint="give the trainer a torch.nn.Module, or a model_init that returns one"
        )
    return model


def model_maker(
    model: Any,
    model_init: Callable[[], nn.Module] | None,
    seed: int,
    adapter: Adapter | None,
    args: TrainingArguments | None = None,
    choose_parameters: Callable[[nn.Module], None] | None = None,
) -> Callable[[], nn.Module]:
    """Returns a function that returns the model to train, with its adapter.

    Args:
        model: see `make_model`.
        model_init: see `make_model`.
        seed: the seed of the initial weights of the model and of the adapter.
        adapter: the adapter; None to train the weights of the model.
        args: the training arguments that a quantized model must fit; None if another trainer checks this.
        choose_parameters: a function that gets the whole model, freezes some of its parameters and reads the names of
            the others; None to train what the model and the adapter leave trainable.
    """

    def make() -> nn.Module:
        """Returns the model with its adapter; refuses one that the arguments cannot train."""
        base = make_model(model, model_init, seed)
        if adapter is not None:
            base = adapter.apply(base, seed=seed)
        # Before any strategy distributes the weights: some of them cannot be sent at all.
        if args is not None:
            refuse_quantized(base, args=args)
            refuse_loraplus(base, args=args)
        keep_differentiable(base)
        if choose_parameters is not None:
            choose_parameters(base)
        # A model that the config put into peft's wrapper itself is described as one that got its adapter here.
        if is_peft_model(base) and base_of(base) is None:
            note_base(base, describe_base(base))
        return base

    # An existing model is asked for several times, and gets its adapter once.
    return functools.cache(make) if isinstance(model, nn.Module) else make
