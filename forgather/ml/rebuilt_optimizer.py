"""`RebuiltOptimizer`: a factory that makes an optimizer of a script again, for the weights as a trainer holds them.

A strategy that shards weights replaces the parameters of a model, so that the optimizer that a script has made would
step tensors that no longer exist. The factory takes the class, the arguments and the groups of this optimizer; it finds
the weights of each group by their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgather.errors import TrainingError


class RebuiltOptimizer:
    """A factory of the optimizer of a script; a trainer calls it with the (name, parameter) pairs of its model.

    Args:
        optimizer: the optimizer, which has not stepped yet.
        model: the model whose weights the optimizer has.

    Raises:
        TrainingError: FG819 if the optimizer has stepped, has other weights, or cannot be made from its arguments.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        if not isinstance(optimizer, Optimizer):
            raise _unusable(f"optimizer is a {type(optimizer).__name__}", "give an optimizer of torch, or leave it out")
        if optimizer.state:
            raise _unusable(
                f"{type(optimizer).__name__} has stepped already, and its state would be lost",
                "give a new optimizer, or save with CheckpointManager and restore_from_checkpoint()",
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._class = type(optimizer)
        self.keywords = self._arguments(optimizer)
        self._groups: list[tuple[list[str], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            try:
                of_group = [names[id(parameter)] for parameter in group["params"]]
            except KeyError:
                raise _unusable(
                    f"{type(optimizer).__name__} has weights that are not those of the model",
                    "make it from model.parameters() of the model that is trained",
                ) from None
            own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            own = {name: value for name, value in own.items() if optimizer.defaults.get(name, ...) != value}
            self._groups.append((of_group, own))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        missing = trained - {name for of_group, _ in self._groups for name in of_group}
        if missing:
            raise _unusable(
                f"the optimizer lacks {len(missing)} trained weights, such as {min(missing)!r}",
                "give it all weights, or set requires_grad=False for those that are not trained",
            )
        self._check(optimizer)

    @property
    def constructor(self) -> str:
        """The `"module:attr"` string of the class."""
        module = self._class.__module__
        # `torch.optim.adamw:AdamW` is `torch.optim:AdamW` to those who read a config.
        return f"{'torch.optim' if module.startswith('torch.optim.') else module}:{self._class.__qualname__}"

    @property
    def is_one_group(self) -> bool:
        """True if there is one group, with the arguments of the optimizer, over all trained weights in their order."""
        return len(self._groups) == 1 and not self._groups[0][1] and self._is_importable

    @property
    def _is_importable(self) -> bool:
        return "<" not in self._class.__qualname__ and self._class.__module__ != "__main__"

    def __call__(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        """Returns the optimizer for the given weights."""
        weights = dict(named_parameters)
        groups = [
            {"params": [weights[name] for name in names if name in weights], **own} for names, own in self._groups
        ]
        return self._class([group for group in groups if group["params"]], **self.keywords)

    def _arguments(self, optimizer: Optimizer) -> dict[str, Any]:
        known = inspect.signature(self._class.__init__).parameters
        usual = {name: parameter.default for name, parameter in known.items()}
        return {
            name: value
            for name, value in optimizer.defaults.items()
            if name in known and (name == "lr" or usual[name] is not value and usual[name] != value)
        }

    def _check(self, optimizer: Optimizer) -> None:
        """Raises FG819 if the class does not give the same groups for the arguments that were found."""
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            weights = [{"params": group["params"], **own} for group, (_, own) in zip(groups, self._groups, strict=True)]
            again = self._class(weights, **self.keywords)
        except Exception as error:  # noqa: BLE001 - the constructor of the user's class
            raise _unusable(
                f"{self._class.__name__} cannot be made again from its arguments: {error}",
                "give config['optimizer_factory'], a function of the parameters",
            ) from error
        for one, other in zip(groups, again.param_groups, strict=True):
            if any(one.get(name, ...) != other.get(name, ...) for name in {*one, *other} - {"params", "param_names"}):
                raise _unusable(
                    f"{self._class.__name__} cannot be made again from its arguments",
                    "give config['optimizer_factory'], a function of the parameters",
                )


def _unusable(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG819", hint=hint).about("optimizer")
