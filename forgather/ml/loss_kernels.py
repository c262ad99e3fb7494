"""Linear cross entropies of other libraries, behind the names of the setting `linear_cross_entropy`.

`kernel_named` returns a function that has the arguments of `linear_loss.linear_cross_entropy`. It is refused before a
run if its library is missing, or if it has no term that the run asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml.linear_loss import chunk_size_for, linear_cross_entropy
from forgather.ml.loss_terms import UNCHANGED, LogitMap, LossTerms

Kernel = Callable[..., Tensor]

SETTING = "linear_cross_entropy"
_LIGER = "liger_kernel.ops.fused_linear_cross_entropy"


def kernel_named(name: str | bool, terms: LossTerms) -> Kernel:
    """Returns the function that computes a linear cross entropy.

    Args:
        name: "torch" or "liger". Any other value is our own chunks.
        terms: what the loss of a token consists of.

    Raises:
        TrainingError: FG717 if the library is missing; FG718 if it has no chunks for a term that `terms` has.
    """
    if name == "torch":
        if not hasattr(F, "linear_cross_entropy"):
            raise _missing("torch", f"torch {torch.__version__} has no linear_cross_entropy; 2.13 has one")
        # With label smoothing torch computes all logits, with a warning in each step.
        for setting, value in (("z_loss_coefficient", terms.z_loss), ("label_smoothing_factor", terms.label_smoothing)):
            if value:
                raise TrainingError(
                    f"linear_cross_entropy is 'torch', which has no chunks for {setting}, and {setting} is {value}",
                    code="FG718",
                    hint="set linear_cross_entropy: true",
                ).about(f"args.{SETTING}")
        return torch_kernel
    if name == "liger":
        try:
            importlib.import_module(_LIGER)
        except ImportError as error:
            raise _missing("liger", f"liger-kernel cannot be imported: {error}") from None
        return liger_kernel
    return linear_cross_entropy


def _missing(name: str, why: str) -> TrainingError:
    return TrainingError(
        f"linear_cross_entropy is {name!r}, and {why}",
        code="FG717",
        hint="install it, or set linear_cross_entropy: true, which needs no library",
    ).about(f"args.{SETTING}")


def has_map(kernel: Kernel, logit_map: LogitMap, *, slices: bool = False) -> bool:
    """Returns whether a kernel can compute the logits of a model from the output of its head.

    Args:
        kernel: the kernel.
        logit_map: what the model does with the output of its head.
        slices: whether the head is cut into slices of the vocabulary.
    """
    if kernel is linear_cross_entropy:
        return True
    return not slices and (logit_map == UNCHANGED or (kernel is liger_kernel and logit_map.factor == 1.0))


def torch_kernel(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    terms: LossTerms,
    chunk_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Returns the sum of the losses as `torch.nn.functional.linear_cross_entropy` computes it; see there.

    Shapes:
        hidden_ND: (N, D); weight_VD: (V, D); bias_V: (V,); targets_N: (N,). Returns a scalar.
    """
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=chunk_size or chunk_size_for(weight_VD.shape[0]), allow_retain_graph=True
    )
    hidden_ND, weight_VD, bias_V = _in_one_dtype(hidden_ND, weight_VD, bias_V)
    total: Tensor = F.linear_cross_entropy(
        hidden_ND,
        weight_VD,
        targets_N,
        linear_bias=bias_V,
        reduction="sum",
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        options=options,
    )
    return total.float() if total.dtype in (torch.float16, torch.bfloat16) else total


def liger_kernel(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    terms: LossTerms,
    logit_map: LogitMap = UNCHANGED,
    **_: Any,
) -> Tensor:
    """Returns the sum of the losses as Liger's fused kernel computes it, on a GPU.

    Shapes:
        hidden_ND: (N, D); weight_VD: (V, D); bias_V: (V,); targets_N: (N,). Returns a scalar.
    """
    loss = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    compute = loss.LigerFusedLinearCrossEntropyLoss(
        ignore_index=terms.ignore_index,
        lse_square_scale=terms.z_loss,
        label_smoothing=terms.label_smoothing,
        reduction="sum",
        softcap=logit_map.cap,
    )
    hidden_ND, weight_VD, bias_V = _in_one_dtype(hidden_ND, weight_VD, bias_V)
    total: Tensor = compute(weight_VD, hidden_ND, targets_N, bias_V)
    return total.float()


def _in_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return hidden.to(weight.dtype), weight, bias
