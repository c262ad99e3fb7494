"""Optimizers that torch does not have ready-made.

Takes named parameters, gives a `torch.optim.Optimizer`. Keeps true: one `state_dict` and one list of
parameter groups, so that schedules and checkpoints need not know what is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from forgather.errors import TrainingError

NOT_HIDDEN = ("embed", "wte", "wpe", "lm_head", "classifier", "score", "output_layer")
"""Parts of names that mark two-dimensional weights at the ends of a model, which Muon is not for."""


class MuonWithAdamW(Optimizer):
    """Muon for the two-dimensional hidden weights, AdamW for everything else, as one optimizer.

    Args:
        named_parameters: (name, parameter) pairs, as from `model.named_parameters()`.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW; that of Muon by default.
        weight_decay: of Muon's weights, and of AdamW's that have two dimensions or more.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: Newton-Schulz iterations of Muon.
        adjust_lr_fn: "match_rms_adamw" (default: one learning rate suits both) or "original".
        betas: of AdamW.
        eps: of AdamW.
        adamw_names: parts of names whose weights AdamW takes though they have two dimensions.

    Raises:
        TrainingError: FG816 where no weight is left for Muon.

    Source:
        torch.optim.Muon and torch.optim.AdamW, each stepped on its own groups, unchanged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
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
    ) -> None:
        hidden, matrices, vectors = _split(named_parameters, tuple(adamw_names))
        muon = Muon(
            hidden,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        parts: list[Optimizer] = [muon]
        if groups:
            parts.append(AdamW(groups, lr=lr if adamw_lr is None else adamw_lr, betas=(betas[0], betas[1]), eps=eps))
        tagged = [{**group, "algorithm": type(part).__name__.lower()} for part in parts for group in part.param_groups]
        super().__init__(tagged, {"lr": lr, "weight_decay": weight_decay})
        self._parts = parts
        self._share()

    def _share(self) -> None:
        """Makes the parts step our groups and keep their state in ours."""
        for part in self._parts:
            kind = type(part).__name__.lower()
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == kind]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps both parts; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()


def _split(
    named_parameters: Iterable[tuple[str, nn.Parameter]], adamw_names: tuple[str, ...]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    hidden: list[Tensor] = []
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and not any(part in name for part in adamw_names):
            hidden.append(parameter)
        else:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    if not hidden:
        raise TrainingError(
            "no two-dimensional hidden weight was found for Muon",
            code="FG816",
            hint="use AdamW, or change adamw_names: " + ", ".join(adamw_names),
        )
    return hidden, matrices, vectors
