"""Warnings about models whose result depends on which rows are in one micro-batch.

Takes a model and the layout of a run; warns if the run computes something else than one process with the whole batch.
The losses of rows can be added over micro-batches and processes. The statistics of a batch norm, the auxiliary loss of
a mixture of experts and rotary positions that depend on the longest row cannot: they are computed from all rows or
tokens of one micro-batch of one process. Libraries compute them so, which is why they are not refused.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from transformers import PreTrainedModel

from forgather.ml.log import get_logger
from forgather.ml.model_class import class_name
from forgather.rotary_types import rotary_type_by_length

_log = get_logger(__name__)
STATISTICS = "FG886"
"""The code of the warning that modules compute statistics, or rotary positions, of one micro-batch of one process."""
AUXILIARY = "FG887"
"""The code of the warning that the auxiliary loss of a mixture of experts is that of a micro-batch."""
_WARNED: WeakSet[nn.Module] = WeakSet()
_SHOWN = 3


def warn_of_micro_batches(model: nn.Module, *, replicas: int, accumulation: int, parts: int = 1) -> None:
    """Warns if a model computes something of one micro-batch, and an optimizer step has several of them.

    Args:
        model: the model to train.
        replicas: the number of data-parallel processes.
        accumulation: the number of micro-batches of an optimizer step on each process.
        parts: the number of parts of a micro-batch, which a pipeline computes one after the other.
    """
    if replicas * accumulation * parts < 2:
        return
    split = " and ".join(
        [f"{replicas} processes"] * (replicas > 1)
        + [f"{accumulation} micro-batches"] * (accumulation > 1)
        + [f"{parts} parts of a micro-batch, which a pipeline computes one after the other"] * (parts > 1)
    )
    if names := _with_statistics(model):
        listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        _log.warning(
            "[%s] %s in %s computes statistics of the rows of one micro-batch, and a step is divided into %s: the "
            "result is not that of one process with the whole batch. Take GroupNorm or LayerNorm, or, on accelerators, "
            "convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm",
            STATISTICS,
            listed,
            class_name(model),
            split,
        )
    if (kind := _rotary_type(model)) is not None:
        _log.warning(
            "[%s] the rotary positions of %s are of type %r, which depends on the longest row of one micro-batch, and "
            "a step is divided into %s: unless all rows have one length, the result is not that of one process with "
            "the whole batch. Give rows of one length (packing), or set another rope_type in the config of the model",
            STATISTICS,
            class_name(model),
            kind,
            split,
        )
    if has_auxiliary_loss(model):
        warn_of_auxiliary_loss(model, f"a step is divided into {split}")


def warn_of_auxiliary_loss(model: nn.Module, reason: str) -> None:
    """Warns, once per model, that the auxiliary loss of its experts is a mean over one micro-batch.

    Args:
        model: a model for which `has_auxiliary_loss` is true.
        reason: why that makes a difference in this run.
    """
    if model not in _WARNED:
        _WARNED.add(model)
        _log.warning(
            "[%s] the auxiliary loss of the experts of %s is a mean over the tokens of one micro-batch, and %s: it has "
            "another value than with the whole batch on one process and one text in each row. router_aux_loss_coef: 0 "
            "in the config of the model trains without it",
            AUXILIARY,
            class_name(model),
            reason,
        )


def has_auxiliary_loss(model: nn.Module) -> bool:
    """Returns whether the loss of a model includes an auxiliary loss, which balances the load of its experts."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0))


def _rotary_type(model: nn.Module) -> str | None:
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((kind for part in parts if (kind := rotary_type_by_length(vars(part.config)))), None)


def _with_statistics(model: nn.Module) -> list[str]:
    """Returns the names of the modules that compute statistics over the rows of a batch while they are trained."""
    found = []
    for name, module in model.named_modules():
        # A norm in evaluation mode uses the statistics that it has; the mode of a whole model is set by the trainer.
        is_frozen = model.training and not module.training
        across_rows = isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats)
        if across_rows and not isinstance(module, nn.SyncBatchNorm) and not is_frozen:
            found.append(name or type(module).__name__)
    return found
