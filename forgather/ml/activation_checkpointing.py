"""Activation checkpointing: the backward pass recomputes blocks of a model instead of keeping their activations.

Gradients are equal to those without activation checkpointing, and training needs less memory. Only the `forward` method
of a block is replaced, so parameter names do not change. Without a backward pass, a block runs as before. A block may
keep what is costly to recompute, every n-th block alone may recompute, and the inputs of blocks may be kept in the
memory of the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from forgather.errors import TrainingError
from forgather.ml.activation_offloading import saved_on_host

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Costly to recompute, unlike the elementwise operations between them.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "linear")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks with parameters in each outermost `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`.

    Args:
        model: the model whose module tree is searched.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += list(child.children()) if isinstance(child, CONTAINERS) else repeated_blocks(child)
    return [block for block in blocks if next(block.parameters(), None) is not None]


def checkpoint_activations(modules: Iterable[nn.Module], recompute: Literal["full", "selective"]) -> None:
    """Makes the backward pass recompute the activations of each module, one module at a time.

    Args:
        modules: the modules whose `forward` methods are replaced.
        recompute: "full" to recompute every operation, or "selective" to keep the results of matrix products and
            attention.
    """
    # The reentrant variant loses gradients if no input of a block requires them, and does not support `context_fn`.
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    for module in modules:
        recompute_forward(module, settings)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_costly(operation) else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def is_costly(operation: Any) -> bool:
    """Returns whether an operator is a matrix product or the attention of a back end.

    Args:
        operation: an operator of torch or of a library, such as those of SDPA (flash, memory-efficient, cuDNN, on the
            CPU), of FlashAttention, or `flex_attention`.

    Example:
        >>> is_costly(torch.ops.aten._scaled_dot_product_cudnn_attention.default)
        True
    """
    name = str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]
    is_attention = "attention" in name or "attn" in name or "attn" in getattr(operation, "namespace", "")
    return name in _PRODUCTS or (is_attention and "backward" not in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the argument `gradient_checkpointing_kwargs` requests.

    Args:
        settings: the keyword arguments of `torch.utils.checkpoint.checkpoint`.
        every_n_layers: the first of so many blocks recomputes, and the others keep their activations.
        offload: whether what a block keeps for its recomputation is in the memory of the host.
    """

    settings: Mapping[str, Any]
    every_n_layers: int = 1
    offload: bool = False

    @classmethod
    def from_arguments(cls, given: Mapping[str, Any]) -> Recomputation:
        """Returns the settings that the training arguments request.

        Args:
            given: the training argument `gradient_checkpointing_kwargs`.

        Raises:
            TrainingError: FG725 if selective recomputation is requested together with `use_reentrant` or `context_fn`.
        """
        settings: dict[str, Any] = {"use_reentrant": False, **given}
        mode, every = settings.pop("mode", "full"), settings.pop("every_n_layers", 1)
        offload = bool(settings.pop("offload", False))
        if mode == "selective":
            for name in ("use_reentrant", "context_fn"):
                if settings.get(name):
                    raise TrainingError(
                        f"gradient_checkpointing_kwargs has mode: selective and {name}, and both decide what is kept",
                        code="FG725",
                        hint=f"remove {name}",
                    ).about(f"args.gradient_checkpointing_kwargs.{name}")
            settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        return cls(settings=settings, every_n_layers=every, offload=offload)

    def apply_to_layers(self, model: nn.Module) -> None:
        """Applies `every_n_layers` and `offload` to a transformers model that recomputes its layers.

        Args:
            model: the model, which is changed in place.

        Raises:
            TrainingError: FG726 if its layers do not recompute one by one.
        """
        if self.every_n_layers == 1 and not self.offload:
            return
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            setting = "offload" if self.offload else "every_n_layers"
            raise TrainingError(
                f"gradient_checkpointing_kwargs has {setting}, and the layers of {type(model).__name__} do not "
                "recompute one by one",
                code="FG726",
                hint=f"remove {setting}, or take a model whose layers are transformers' GradientCheckpointingLayer",
            ).about(f"args.gradient_checkpointing_kwargs.{setting}")
        for position, layer in enumerate(layers):
            layer.gradient_checkpointing = position % self.every_n_layers == 0
            if self.offload:
                recomputing: Any = layer._gradient_checkpointing_func
                layer.__dict__["_gradient_checkpointing_func"] = functools.partial(_kept_on_host, recomputing)

    def apply_to_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """Makes the backward pass recompute blocks of a model that has no method for it.

        Args:
            blocks: the blocks in their order, which are changed in place.
        """
        for position, block in enumerate(blocks):
            if position % self.every_n_layers == 0:
                recompute_forward(block, self.settings, offload=self.offload)


def _kept_on_host(recomputing: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saved_on_host():
        return recomputing(*args, **kwargs)


def recompute_forward(module: nn.Module, settings: Mapping[str, Any], *, offload: bool = False) -> None:
    """Makes the backward pass recompute the forward pass of a module.

    Args:
        module: the module whose `forward` method is replaced in place.
        settings: the keyword arguments of `torch.utils.checkpoint.checkpoint`.
        offload: whether the inputs of the module are kept in the memory of the host.
    """
    recomputing = functools.partial(_kept_on_host, checkpoint) if offload else checkpoint
    forward: Callable[..., Any] = module.forward

    # Other code reads the signature of a model's forward.
    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        # Without a backward pass there is nothing to recompute for.
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return recomputing(forward, *args, **settings, **kwargs)

    # Only `forward` is replaced: a wrapper around the module would change the names of its parameters.
    module.forward = recomputing_forward
