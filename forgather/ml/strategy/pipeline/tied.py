"""Parameters that several stages hold a copy of.

Takes a model and a plan; gives which name on which stage is the same parameter. Keeps true: every parameter that the
model shares between stages is listed, and one that lies in one stage alone is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from forgather.ml.strategy.pipeline.split import SplitPlan


@dataclass(frozen=True, slots=True)
class Tied:
    """One parameter of the model, and its copies.

    Args:
        copies: (stage, name on that stage), in order of stages; one for each stage that holds it.
    """

    copies: tuple[tuple[int, str], ...]

    @property
    def first(self) -> tuple[int, str]:
        """The copy of the earliest stage: the one that counts in a norm."""
        return self.copies[0]

    @property
    def last(self) -> tuple[int, str]:
        """The copy of the latest stage."""
        return self.copies[-1]


def tied_parameters(model: nn.Module, plan: SplitPlan) -> list[Tied]:
    """Returns the parameters that more than one stage holds, in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for same in names.values():
        copies: dict[int, str] = {}
        for index in range(plan.num_stages):
            here = next((name for name in same if plan.holds(index, name)), None)
            if here is not None:
                copies[index] = here
        if len(copies) > 1:
            found.append(Tied(tuple(copies.items())))
    return found
