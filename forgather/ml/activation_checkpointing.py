"""Activation checkpointing: the backward pass recomputes blocks of a model instead of keeping their activations.

Gradients are equal to those without activation checkpointing, and training needs less memory. Only the `forward` method
of a block is replaced, so parameter names do not change. Without a backward pass, a block runs as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Costly to recompute, unlike the elementwise operations between them.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


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
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_forward(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Makes the backward pass recompute the forward pass of a module.

    Args:
        module: the module whose `forward` method is replaced in place.
        settings: the keyword arguments of `torch.utils.checkpoint.checkpoint`.
    """
    forward: Callable[..., Any] = module.forward

    # Other code reads the signature of a model's forward.
    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        # Without a backward pass there is nothing to recompute for.
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **settings, **kwargs)

    # Only `forward` is replaced: a wrapper around the module would change the names of its parameters.
    module.forward = recomputing_forward
