"""Freezes parameters by the setting `freeze`, for the whole run or for its first steps.

A parameter that is frozen for the whole run is frozen when the model is made, before any strategy sees it: it has no
optimizer state. One that is trained later belongs to the optimizer from the start; until then it requires no gradient,
and an optimizer leaves parameters without a gradient alone. What is frozen depends only on the number of steps and
epochs that are done, so a resumed run needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.name_patterns import matched_names, matches, parameter_names
from forgather.ml.number_format import plural
from forgather.ml.strategy.base import Strategy
from forgather.parameter_settings import read_freeze

_log = get_logger(__name__)


class Freezing:
    """The parameters that are frozen, and until when.

    Args:
        setting: the setting `freeze`, which can be read.
        recomputation: the arguments of activation checkpointing; None if there is none.
    """

    def __init__(self, setting: Any, recomputation: Mapping[str, Any] | None = None) -> None:
        self._entries = read_freeze(setting)
        self._is_reentrant = bool((recomputation or {}).get("use_reentrant"))
        self._scheduled = [entry for entry in self._entries if entry.until is not None]
        self._held: frozenset[str] = frozenset()

    def freeze(self, model: nn.Module) -> None:
        """Freezes the parameters that are frozen for the whole run, and checks the others.

        Args:
            model: the whole model, which is changed in place.

        Raises:
            TrainingError: FG867 if a pattern matches nothing, or with `until` only frozen parameters; FG820 if no
                parameter is trained from the first step on; FG907 if parameters are trained later and the
                recomputation is re-entrant.
        """
        if not self._entries:
            return
        named, tied = parameter_names(model)
        found = [
            matched_names(entry.pattern, named, tied, f"freeze.{number}") for number, entry in enumerate(self._entries)
        ]
        if self._scheduled and self._is_reentrant:
            raise TrainingError(
                "use_reentrant is true, and freeze has an until: blocks after a frozen input would get no gradients",
                code="FG907",
                hint="remove use_reentrant; false is the default",
            ).about("args.gradient_checkpointing_kwargs.use_reentrant")
        for entry, names in zip(self._entries, found, strict=True):
            if entry.until is None:
                for name in names:
                    named[name].requires_grad_(False)
        self._refuse_without_effect(named, found)
        self._refuse_nothing_to_train(named)

    def _refuse_without_effect(self, named: Mapping[str, nn.Parameter], found: Sequence[Sequence[str]]) -> None:
        for number, (entry, names) in enumerate(zip(self._entries, found, strict=True)):
            if entry.until is not None and not any(named[name].requires_grad for name in names):
                raise TrainingError(
                    f"freeze: the pattern {entry.pattern!r} has an until, and what it matches is frozen for the "
                    "whole run: "
                    f"{plural(len(names), 'parameter')}, such as {names[0]!r}",
                    code="FG867",
                    hint="remove the pattern; an adapter freezes the weights of its base model itself",
                ).about(f"args.freeze.{number}")

    def _refuse_nothing_to_train(self, named: Mapping[str, nn.Parameter]) -> None:
        trained = [name for name, parameter in named.items() if parameter.requires_grad]
        if not any(not any(matches(entry.pattern, name) for entry in self._scheduled) for name in trained):
            raise TrainingError(
                "freeze leaves no parameter that is trained from the first step on",
                code="FG820",
                hint="leave a parameter out of the patterns",
            ).about("args.freeze")

    def apply(self, strategy: Strategy, step: int, epoch: int) -> None:
        """Freezes what is frozen in the next step, and makes the rest trainable.

        Args:
            strategy: the strategy, whose parameters are changed.
            step: the number of steps that are done.
            epoch: the number of the epoch, from 0 on.
        """
        if not self._scheduled:
            return
        patterns = frozenset(entry.pattern for entry in self._scheduled if entry.holds(step, epoch))
        if patterns == self._held:
            return
        trained = strategy.trained_parameters()
        count = 0
        for name, parameter in trained.items():
            is_frozen = any(matches(pattern, name) for pattern in patterns)
            count += is_frozen
            parameter.requires_grad_(not is_frozen)
        strategy.trained_parameters_changed()
        self._held = patterns
        _log.warning("step %d: %d of %s frozen", step + 1, count, plural(len(trained), "parameter"))

    def release(self, strategy: Strategy) -> None:
        """Makes parameters trainable that an earlier run of the same trainer left frozen for its first steps.

        Args:
            strategy: the strategy, whose parameters are changed.
        """
        if self._held:
            for parameter in strategy.trained_parameters().values():
                parameter.requires_grad_(True)
            strategy.trained_parameters_changed()
            self._held = frozenset()
