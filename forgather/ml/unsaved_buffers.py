"""A warning about buffers that training changes and that no checkpoint holds.

Takes a model at the start of a run, and again at each save; warns about buffers with `persistent=False` whose values
differ. A run that resumes begins with their first values, so it goes on differently than a run that was not stopped.
A table that grew is a cache, and rotary positions of the type `longrope` are computed anew in each forward pass:
neither is state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgather.ml.log import get_logger
from forgather.ml.model_class import class_name

_log = get_logger(__name__)
CHANGED = "FG797"
"""The code of the warning that training changes buffers that no checkpoint holds."""
_SHOWN = 3


class UnsavedBuffers:
    """The first values of the buffers that are not part of a model's state dict.

    Args:
        model: the model at the start of the run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: buffer.detach().to("cpu", copy=True) for name, buffer in _not_persistent(model)}

    def warn(self, *, on_this_rank: bool = False) -> None:
        """Warns, once, if training has changed values of buffers that the checkpoint does not hold.

        Args:
            on_this_rank: True to warn on this rank, too, if it is not the first one: the model is a part of its own.
        """
        changed = [
            name
            for name, buffer in _not_persistent(self._model)
            if (first := self._first.get(name)) is not None
            and first.shape == buffer.shape
            and not torch.equal(first, buffer.detach().to("cpu", first.dtype))
        ]
        if not changed:
            return
        self._first.clear()
        listed = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
        _log.warning(
            "[%s] training changes the buffer%s %s of %s, and checkpoints do not hold buffers with persistent=False: a "
            "run that resumes begins with the first values, and its losses can differ from those of a run that was not "
            "stopped. Register such a buffer with persistent=True; if it holds the frequencies of rotary positions, "
            "set another rope_type than 'dynamic' in the config of the model",
            CHANGED,
            "s" if len(changed) > 1 else "",
            listed,
            class_name(getattr(self._model, "stands_for", self._model)),
            all_ranks=on_this_rank,
        )


def _not_persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope" or (isinstance(kind, dict) and "longrope" in kind.values()):
            continue
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                # torch's tensor parallelism makes DTensors of the buffers of a module that it divides.
                local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                yield f"{prefix}.{name}" if prefix else name, local
