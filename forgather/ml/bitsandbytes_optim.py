"""Optimizers of bitsandbytes, under the names that transformers gives them.

The input is a name such as "paged_adamw_32bit" and parameter groups; the output is an optimizer. Invariants: sharded
weights are updated shard by shard, which equals the update of whole weights for states of 32 bits; states of 8 bits,
whose scales belong to blocks of whole weights, are refused for sharded weights; the state dict has one format for all
layouts. bitsandbytes is imported when an optimizer is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgather.errors import DistributedError, TrainingError
from forgather.requirements import needed_distribution


class _Kind(NamedTuple):
    algorithm: str
    bits: int
    paged: bool = False


_KINDS = {
    "adamw_8bit": _Kind("AdamW", 8),
    "adamw_bnb_8bit": _Kind("AdamW", 8),
    "paged_adamw_8bit": _Kind("AdamW", 8, paged=True),
    "paged_adamw_32bit": _Kind("AdamW", 32, paged=True),
    "lion_8bit": _Kind("Lion", 8),
    "lion_32bit": _Kind("Lion", 32),
    "paged_lion_8bit": _Kind("Lion", 8, paged=True),
    "paged_lion_32bit": _Kind("Lion", 32, paged=True),
    "rmsprop_bnb": _Kind("RMSprop", 32),
    "rmsprop_bnb_8bit": _Kind("RMSprop", 8),
    "rmsprop_bnb_32bit": _Kind("RMSprop", 32),
}
NAMES = tuple(_KINDS)
"""The names of the optimizers, as values of `optim`."""


def bitsandbytes_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> Optimizer:
    """Returns an optimizer of bitsandbytes.

    Paged optimizers move their state between an accelerator and the host when memory is short. On a CPU nothing is
    paged, and the update is the same.

    Args:
        name: one of `NAMES`.
        groups: the parameter groups.
        model: the model, whose embeddings have a state of 32 bits in any case.
        lr: the learning rate.
        betas: the betas of AdamW and Lion.
        eps: the eps of AdamW.

    Raises:
        TrainingError: FG971 if bitsandbytes is not installed.

    Source:
        `transformers.Trainer.create_optimizer`, with the same arguments.
    """
    needed = needed_distribution("bitsandbytes")
    if lack := needed.lack():
        raise TrainingError(f"optim is {name!r}, which needs {lack}", code="FG971", hint=needed.hint).about("optim")
    from bitsandbytes import optim  # type: ignore[import-not-found,unused-ignore]

    kind = _KINDS[name]
    settings: dict[str, Any] = {"optim_bits": kind.bits}
    if kind.algorithm != "RMSprop":
        settings |= {"betas": betas, "is_paged": kind.paged}
    if kind.algorithm == "AdamW":
        settings["eps"] = eps
    base = getattr(optim, kind.algorithm)
    # Made here, because the base class is known only now; it keeps the name that messages and checkpoints use.
    made: _ByShards = type(base.__name__, (_ByShards, base), {})(groups, lr=lr, **settings)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    made.in_32_bits = frozenset(id(weight) for weight in embeddings)
    return made


class _ByShards(Optimizer):
    """What this module changes in an optimizer of bitsandbytes: sharded weights, embeddings, and the state dict."""

    args: Any
    """The settings of the optimizer that are no defaults of its groups, such as `optim_bits`."""
    in_32_bits: frozenset[int] = frozenset()
    """The ids of the weights whose state has 32 bits in any case."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's format; bitsandbytes nests tensors, so that FSDP1 does not see them."""
        return Optimizer.state_dict(self)

    def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a tensor of zeros for the state of a weight; only accelerators have paged memory."""
        if p.device.type in ("cpu", "meta"):
            return torch.zeros_like(p, dtype=dtype)
        buffer: torch.Tensor = super().get_state_buffer(p, dtype)  # type: ignore[misc]
        return buffer

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings for one weight."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        # Not through bitsandbytes' own table of exceptions, which is global and outlives the model.
        return {**config, "optim_bits": 32} if id(group["params"][pindex]) in self.in_32_bits else config

    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Updates one weight; bitsandbytes' kernels take plain tensors, so a DTensor is updated by its local part."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
            return
        state, local = self.state[p], p.to_local()
        # Tensor parallelism leaves some gradients in another placement than their weight.
        local.grad = p.grad.redistribute(placements=p.placements).to_local()  # type: ignore[union-attr]
        parts = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        self.state[local] = parts
        super().update_step(group, local, gindex, pindex)  # type: ignore[misc]
        state["step"] = self.state.pop(local)["step"]


def refuse_shards(optimizer: Optimizer) -> None:
    """Raises an error for an optimizer of bitsandbytes that cannot step sharded weights.

    Raises:
        DistributedError: FG971 if the state has 8 bits, or if the optimizer was made by a factory of the user.
    """
    if not any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
        return
    name = type(optimizer).__name__
    if not isinstance(optimizer, _ByShards):
        problem = f"{name} of bitsandbytes steps plain tensors, and the weights are sharded"
    elif optimizer.args.optim_bits == 8:
        problem = f"{name} with a state of 8 bits has scales for blocks of whole weights, and the weights are sharded"
    else:
        return
    raise DistributedError(
        problem, code="FG971", hint="write optim: paged_adamw_32bit and no optimizer_factory, or train without fsdp"
    ).about("optim")


def is_paged_in_vain(name: str, device: torch.device) -> bool:
    """Returns whether an optimizer is a paged one on a device that has no paged memory."""
    return name in _KINDS and _KINDS[name].paged and device.type == "cpu"
