"""Recompilations of a compiled model: how many there were after warm-up, and why.

`Recompilations` is notified by torch of each compilation. A recompilation is a compilation of code that was compiled
before, because a guard failed: an input has another size, or another branch is taken. It stops the step for seconds to
minutes, so each one is reported in one line and counted in the log lines.

These belong to the warm-up and are not counted: everything in the first optimizer step and in the first evaluation; the
first compilation of a code in which a size varies, after which torch has compiled it for all sizes; and the first one
in which a batch has a mask and earlier ones had none, or the other way round, after which torch has compiled both.
"""

from __future__ import annotations

import re

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler, on_compile_end
from torch._dynamo.utils import get_compilation_metrics

from forgather.ml.log import get_logger

_log = get_logger(__name__)
RECOMPILED = "FG713"
"""The code of the warning that compiled code was compiled again."""


class Recompilations:
    """Counts recompilations after warm-up, until `close`.

    Args:
        enabled: whether the run compiles its model. If not, nothing is counted.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.count = 0
        self._found: list[tuple[int, str, bool]] = []
        self._in_warm_up = True
        self._was_evaluated = False
        # The codes that were compiled for several sizes, and those that were compiled with a mask and without one.
        self._with_sizes: set[int] = set()
        self._with_masks: set[int] = set()
        if enabled:
            on_compile_end(self._on_compiled)

    def close(self) -> None:
        """Ends the notifications of torch."""
        if self.enabled:
            callback_handler.remove_end_callback(self._on_compiled)
            self.enabled = False

    def _on_compiled(self, compiled: CallbackArgs) -> None:
        # Backward passes are compiled because of a forward pass.
        if compiled.callback_trigger is CallbackTrigger.DYNAMO:
            code, _, number = compiled.compile_id.partition("/")
            self._found.append((int(code.split(":")[-1].lstrip("[!")), compiled.compile_id, torch.is_grad_enabled()))
            if number == "0":
                self._found.pop()

    def end_step(self, step: int) -> None:
        """Reports the recompilations since the last call.

        Args:
            step: the number of optimizer steps of the run.
        """
        if self._found:
            # torch adds the reason after it has notified of the compilation.
            records = {str(record.compile_id): record for record in get_compilation_metrics() if record.co_name}
            for code, name, with_gradients in self._found:
                record = records.get(name)
                reason = (record.recompile_reason if record else None) or "unknown"
                self._add(code, reason, record.co_filename if record else None, with_gradients, step)
            self._was_evaluated |= any(not with_gradients for _, _, with_gradients in self._found)
            self._found.clear()
        self._in_warm_up = False

    def _add(self, code: int, reason: str, file: str | None, with_gradients: bool, step: int) -> None:
        is_expected = self._in_warm_up or not (with_gradients or self._was_evaluated)
        if "size mismatch" in reason and code not in self._with_sizes:
            self._with_sizes.add(code)
            is_expected = True
        if _is_about_mask(reason) and code not in self._with_masks:
            self._with_masks.add(code)
            is_expected = True
        if is_expected:
            return
        self.count += 1
        _log.warning(
            "[%s] code of %s was compiled again in step %d: %s",
            RECOMPILED,
            file or "the model",
            step,
            _first_line(reason),
        )

    def metrics(self) -> dict[str, int]:
        """Returns the number of recompilations after warm-up as a metric, if the run compiles its model."""
        return {"recompilations": self.count} if self.enabled else {}


def _is_about_mask(reason: str) -> bool:
    condition = _first_line(reason)
    return "attention_mask" in condition and condition.endswith(("is None", "is not None", "<class 'NoneType'>"))


def _first_line(reason: str) -> str:
    # A comment with the line of the model's source, and a stack trace, may follow the condition.
    return re.split(r"\s+# |\n", reason.strip(), maxsplit=1)[0]
