"""Optimizers whose weight decay excludes biases and norms, and Muon combined with AdamW.

Each function takes a model and returns a `torch.optim.Optimizer` for its trainable parameters. One function,
`decay_groups`, decides which parameters decay, both for the optimizers in this module and for the `optim` argument.
`MuonWithAdamW` has one `state_dict` and one list of parameter groups, so schedules and checkpoints treat it like any
other optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from forgather.errors import TrainingError, nearest
from forgather.ml.host_reads import host_can_read

NO_DECAY = ("bias", "norm")
"""The kinds of parameters without weight decay, as in transformers."""

_BIAS = re.compile("bias")
# Norms that are recognized by the name of a weight; others (`ln_1`) only by their class.
_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORM_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_NORM_CLASS_NAME = re.compile(r"Norm(?![a-z])")

NOT_HIDDEN = ("embed", "wte", "wpe", "lm_head", "classifier", "score", "output_layer")
"""Substrings of the names of two-dimensional weights at the input or output of a model, which Muon is not meant for."""


def decay_groups(model: nn.Module, weight_decay: float, no_decay: Collection[str] = NO_DECAY) -> list[dict[str, Any]]:
    """Returns the trainable parameters as parameter groups: those with weight decay, and those without.

    Args:
        model: the model whose parameter names and module classes determine the groups. The parameters of a pipeline
            stage are grouped as in the whole model, provided that the stage and the whole model give them the same
            names.
        weight_decay: the weight decay of the first group. With 0, all parameters are in a single group.
        no_decay: the kinds of parameters without weight decay. "bias" means every parameter with that word in its name;
            "norm" means every parameter of a normalization layer, which is recognized by its class or its name. With
            [], all parameters decay.

    Raises:
        TrainingError: FG867 if `model` is not an `nn.Module`, or if `no_decay` has an unknown kind.

    Source:
        `transformers.Trainer.get_decay_parameter_names`, which recognizes only LayerNorm by its class. This function
        also recognizes torch's other norms, and all classes with a name like LlamaRMSNorm.
    """
    # By ids: a tied parameter has several names and must be in one group only.
    spared = _without_decay(model, no_decay) if weight_decay else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in spared], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _without_decay(model: nn.Module, no_decay: Collection[str]) -> set[int]:
    """Returns the ids of the parameters without weight decay."""
    if not isinstance(model, nn.Module):
        raise TrainingError(
            f"weight decay by groups needs the model, and got a {type(model).__name__}",
            code="FG867",
            hint="pass the model; a trainer does this automatically",
        )
    kinds = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    for kind in kinds:
        if kind not in NO_DECAY:
            raise TrainingError(
                f"no_decay names {kind!r}, and there is no such kind of parameters",
                code="FG867",
                hint=nearest(str(kind), NO_DECAY) or "one of: " + ", ".join(NO_DECAY),
            ).about("no_decay")
    named = [(name.lower(), parameter) for name, parameter in model.named_parameters()]
    found: set[int] = set()
    if "bias" in kinds:
        found |= {id(parameter) for name, parameter in named if _BIAS.search(name)}
    if "norm" in kinds:
        found |= {id(parameter) for name, parameter in named if _NORM.search(name)}
        norms = (module for module in model.modules() if _is_norm(module))
        found |= {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    return found


def _is_norm(module: nn.Module) -> bool:
    # `fully_shard` changes the class of a module, so its base classes count too.
    return isinstance(module, _NORM_CLASSES) or any(
        _NORM_CLASS_NAME.search(kind.__name__) for kind in type(module).__mro__
    )


def split_for_loraplus(
    optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]], *, ratio: float, embedding_lr: float
) -> None:
    """Gives the weights B of a LoRA a larger learning rate than the weights A (LoRA+).

    Each parameter group is split: weights A and others with two dimensions keep the learning rate of the group; weights
    B and all vectors get `ratio` times as much; adapters of embeddings get `embedding_lr`.

    Args:
        optimizer: the optimizer, which must not have done a step yet. Its parameter groups are replaced.
        named: the trainable parameters with their names. The optimizer may have others, which get no gradients.
        ratio: the learning rate of B, as a multiple of that of A.
        embedding_lr: the learning rate of the adapters of embeddings.

    Source:
        `peft.optimizers.create_loraplus_optimizer`, with the weight decay of the groups.
    """
    names = {id(parameter): name for name, parameter in named}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        rates = {"A": group["lr"], "embedding": embedding_lr, "B": group["lr"] * ratio}
        kinds = [(_loraplus_kind(names.get(id(one), ""), one), one) for one in group["params"]]
        for kind, rate in rates.items():
            members = [parameter for one, parameter in kinds if one == kind]
            groups += [{**group, "params": members, "lr": rate}] if members else []
    optimizer.param_groups = groups


def _loraplus_kind(name: str, parameter: nn.Parameter) -> str:
    if "lora_embedding_" in name:
        return "embedding"
    # ZeRO stage 3 leaves an empty vector in place of each weight; `ds_shape` is the shape of the whole.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return "B" if "lora_B" in name or len(shape) == 1 else "A"


def adamw(
    model: nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    *,
    no_decay: Collection[str] = NO_DECAY,
    **settings: Any,
) -> AdamW:
    """Returns `torch.optim.AdamW` for the trainable parameters, without weight decay for biases and norms.

    Args:
        model: the model to train.
        lr: the learning rate.
        weight_decay: the weight decay of the parameters that decay.
        no_decay: the kinds of parameters without weight decay; see `decay_groups`.
        **settings: further arguments of AdamW, such as `betas` and `eps`. On an accelerator `fused` is True unless it
            or `foreach` is given.
    """
    groups = decay_groups(model, weight_decay, no_decay)
    # On an accelerator one kernel updates all weights; on a CPU the bits of earlier releases stay.
    if "foreach" not in settings and not any(host_can_read(one.device) for group in groups for one in group["params"]):
        settings.setdefault("fused", True)
    return AdamW(groups, lr=lr, weight_decay=weight_decay, **settings)


def sgd(
    model: nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    *,
    no_decay: Collection[str] = NO_DECAY,
    **settings: Any,
) -> SGD:
    """Returns `torch.optim.SGD` for the trainable parameters, without weight decay for biases and norms.

    Args:
        model: the model to train.
        lr: the learning rate.
        weight_decay: the weight decay of the parameters that decay.
        no_decay: the kinds of parameters without weight decay; see `decay_groups`.
        **settings: further arguments of SGD, such as `momentum` and `nesterov`.
    """
    return SGD(decay_groups(model, weight_decay, no_decay), lr=lr, weight_decay=weight_decay, **settings)


def adafactor(
    model: nn.Module,
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    *,
    no_decay: Collection[str] = NO_DECAY,
    **settings: Any,
) -> Adafactor:
    """Returns `torch.optim.Adafactor` for the trainable parameters, without weight decay for biases and norms.

    Args:
        model: the model to train.
        lr: the learning rate.
        weight_decay: the weight decay of the parameters that decay.
        no_decay: the kinds of parameters without weight decay; see `decay_groups`.
        **settings: further arguments of Adafactor, such as `beta2_decay`, `eps` and `d`.
    """
    return Adafactor(decay_groups(model, weight_decay, no_decay), lr=lr, weight_decay=weight_decay, **settings)


class MuonWithAdamW(Optimizer):
    """One optimizer that uses Muon for two-dimensional hidden weights and AdamW for all other parameters.

    Args:
        model: the model to train.
        lr: the learning rate of Muon.
        adamw_lr: the learning rate of AdamW. None uses the learning rate of Muon.
        weight_decay: the weight decay of the parameters that decay, under both algorithms.
        momentum: the momentum of Muon.
        nesterov: True to use Nesterov momentum in Muon.
        ns_steps: the number of Newton-Schulz iterations in Muon.
        adjust_lr_fn: the scaling of Muon's learning rate: "match_rms_adamw" (the default, with which one learning rate
            suits both algorithms) or "original".
        betas: the betas of AdamW.
        eps: the eps of AdamW.
        adamw_names: substrings of parameter names. AdamW takes the two-dimensional weights whose names contain one of
            them.
        no_decay: the kinds of parameters without weight decay; see `decay_groups`.

    Raises:
        TrainingError: FG816 if no weight is left for Muon, FG867 if `no_decay` has an unknown kind.

    Source:
        torch.optim.Muon and torch.optim.AdamW, unchanged, each on its own parameter groups.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_names: Iterable[str] = NOT_HIDDEN,
        no_decay: Collection[str] = NO_DECAY,
    ) -> None:
        groups = decay_groups(model, weight_decay, no_decay)
        hidden, rest = _split(model, groups, tuple(adamw_names))
        muon = Muon(
            hidden,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        parts: list[Optimizer] = [muon]
        if rest:
            parts.append(AdamW(rest, lr=lr if adamw_lr is None else adamw_lr, betas=(betas[0], betas[1]), eps=eps))
        # The tag is saved with the groups, so that a restored group goes back to its optimizer.
        tagged = [{**group, "algorithm": type(part).__name__.lower()} for part in parts for group in part.param_groups]
        super().__init__(tagged, {"lr": lr, "weight_decay": weight_decay})
        self._parts = parts
        self.share()

    def share(self) -> None:
        """Makes both inner optimizers use the parameter groups and the state of this optimizer.

        It must be called after `param_groups` was replaced.
        """
        for part in self._parts:
            kind = type(part).__name__.lower()
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == kind]
            # Shared and not merged: the inner optimizers write their state where the `state_dict` of this one finds it.
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps both inner optimizers, and returns the result of `closure`.

        Args:
            closure: a function that recomputes the loss. With None, nothing is recomputed and None is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the parameter groups and the state."""
        super().load_state_dict(state_dict)
        self.share()


def _split(
    model: nn.Module, groups: list[dict[str, Any]], adamw_names: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the parameter groups of Muon, and those of AdamW."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def is_hidden(parameter: Tensor) -> bool:
        return parameter.ndim == 2 and not any(part in names[id(parameter)] for part in adamw_names)

    hidden, rest = [
        [
            {**group, "params": found}
            for group in groups
            if (found := [parameter for parameter in group["params"] if is_hidden(parameter) == of_muon])
        ]
        for of_muon in (True, False)
    ]
    if not hidden:
        raise TrainingError(
            "no two-dimensional hidden weight was found for Muon",
            code="FG816",
            hint="use AdamW, or change adamw_names: " + ", ".join(adamw_names),
        )
    return hidden, rest
