"""Learning rates and weight decay for some of the parameters: `parameter_groups` and `layer_lr_decay`.

Takes the training arguments and the whole model, from which it reads the names of the parameters and the number of
blocks; splits the parameter groups of an optimizer that was made for the model or for a part of it. Each new group has
a `name`. A schedule multiplies the rates of all groups, so their ratios stay what they are. Which group a parameter is
in depends on its name only, so it is the same for every layout of processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.name_patterns import matched_names, matches, parameter_names
from forgather.ml.optim import MuonWithAdamW

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


class ParameterGroups:
    """The groups that the arguments ask for.

    Args:
        groups: the setting `parameter_groups`: mappings with `pattern`, and `learning_rate`, `weight_decay` or both.
            The first pattern that matches a name counts.
        layer_decay: the setting `layer_lr_decay`; None if all blocks have the same learning rate.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] | None, layer_decay: float | None = None) -> None:
        self._groups = list(groups or ())
        self._decay = layer_decay
        self._powers: dict[str, int] = {}
        self._block_names: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._groups) or self._decay is not None

    def read(self, model: nn.Module) -> None:
        """Reads the names of a whole model, and checks that each pattern matches a parameter that is trained.

        Args:
            model: the model, with its adapter and with its frozen parameters.

        Raises:
            TrainingError: FG867 if a pattern matches nothing, only frozen parameters, or only what earlier patterns
                match; or if the model has no numbered blocks for `layer_lr_decay`.
        """
        if not self:
            return
        named, tied = parameter_names(model)
        taken: set[str] = set()
        for number, group in enumerate(self._groups):
            argument = f"parameter_groups.{number}.pattern"
            found = matched_names(group["pattern"], named, tied, argument)
            trained = {name for name in found if named[name].requires_grad}
            if not trained - taken:
                why = "earlier patterns match all of them" if trained else "all of them are frozen"
                raise TrainingError(
                    f"parameter_groups: the pattern {group['pattern']!r} has no effect on {len(found)} parameters, "
                    f"{found[0]!r} and so on: {why}",
                    code="FG867",
                    hint="put the narrower pattern first" if trained else "remove the group, or train what it names",
                ).about(f"args.{argument}")
            taken |= trained
        if self._decay is not None:
            self._powers, self._block_names = _depths(named)

    def split(self, optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Splits the parameter groups of an optimizer, which must not have done a step yet.

        Collective: every process must call it.

        The first group keeps the settings of the arguments, if need be without a parameter, so that its rate is the
        learning rate of the run on every process.

        Args:
            optimizer: the optimizer of the model, or of the part of it on this process.
            named: the trainable parameters with their names in the whole model.

        Raises:
            TrainingError: FG867 if the groups of the optimizer lack the setting that a group changes.
        """
        names = {id(parameter): name for name, parameter in named}
        if self._decay is not None:
            # Some strategies make the model in one process of each machine only.
            known = collectives.all_gather((self._powers, self._block_names))
            self._powers, self._block_names = next(facts for facts in known if facts[0])
        own: list[dict[str, Any]] = []
        changed: dict[str, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            by_label: dict[str | None, tuple[dict[str, Any], list[nn.Parameter]]] = {}
            for parameter in group["params"]:
                label, settings = self._settings_of(names.get(id(parameter), ""), group)
                by_label.setdefault(label, (settings, []))[1].append(parameter)
            for label, (settings, members) in by_label.items():
                if label is None:
                    own.append({**group, "params": members})
                else:
                    entry = {**group, **settings, "params": members, "name": label}
                    changed.setdefault(label, []).append(entry)
        base = own or [{**optimizer.param_groups[0], "params": []}]
        _regroup(optimizer, [*base, *(entry for label in sorted(changed) for entry in changed[label])])

    def _settings_of(self, name: str, group: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Returns the name of a parameter's group, None for the default, and the settings that the group changes."""
        settings: dict[str, Any] = {}
        label = None
        if self._decay is not None and (power := self._powers.get(name, 0)):
            label = self._block_names[name]
            settings["lr"] = _required(group, "lr") * self._decay**power
        for asked in self._groups:
            if not matches(asked["pattern"], name):
                continue
            for setting, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
                if setting in asked:
                    _required(group, key)
                    settings[key] = float(asked[setting])
            # A group that sets the decay only keeps the learning rate of its block.
            parts = [asked["pattern"], *([label] if label and "learning_rate" not in asked else [])]
            label = ", ".join(parts)
            break
        return label, settings


def _required(group: Mapping[str, Any], key: str) -> float:
    if key not in group:
        raise TrainingError(
            f"parameter_groups sets {key}, and the optimizer has no such setting for a group of parameters",
            code="FG867",
            hint="use another optimizer, such as optim: adamw_torch",
        ).about("args.parameter_groups")
    return float(group[key])


def _regroup(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    optimizer.param_groups = groups
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.share()
    elif any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise TrainingError(
            f"parameter_groups needs an optimizer with one list of groups, and {type(optimizer).__name__} has "
            "optimizers inside",
            code="FG867",
            hint="use AdamW, or leave the groups out",
        ).about("args.parameter_groups")


def _depths(names: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Returns how often the learning rate of each parameter is multiplied by the decay, and the name of its block.

    What is registered after the last block (a final norm, a head) has 0, the last block 1, and what is registered
    before the first block (embeddings) one more than the first block, as in timm's `layer_decay`.
    """
    names = list(names)
    lists: dict[str, set[int]] = {}
    place: dict[str, tuple[str, int]] = {}
    for name in names:
        if (found := _NUMBER.search(name)) is not None:
            place[name] = (name[: found.start()], int(found[1]))
            lists.setdefault(place[name][0], set()).add(int(found[1]))
    lists = {prefix: numbers for prefix, numbers in lists.items() if len(numbers) > 1}
    if len(lists) != 1:
        problem = "several: " + ", ".join(sorted(lists)) if lists else "none"
        raise TrainingError(
            f"layer_lr_decay needs one list of numbered blocks, and the model has {problem}",
            code="FG867",
            hint="write parameter_groups with the names of your layers",
        ).about("args.layer_lr_decay")
    ((prefix, numbers),) = lists.items()
    count = max(numbers) + 1
    first = next(position for position, name in enumerate(names) if place.get(name, ("",))[0] == prefix)
    powers: dict[str, int] = {}
    blocks: dict[str, str] = {}
    for position, name in enumerate(names):
        where, number = place.get(name, ("", 0))
        if where == prefix:
            powers[name], blocks[name] = count - number, f"{prefix.rpartition('.')[2]}.{number}"
        elif position < first:
            powers[name], blocks[name] = count + 1, "embeddings"
    return powers, blocks


def base_group(optimizer: Any) -> dict[str, Any]:
    """Returns the parameter group that has the learning rate of the arguments.

    Args:
        optimizer: the optimizer.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    return next((group for group in groups if not group.get("name")), groups[0])


def rates_by_name(optimizer: Any) -> dict[str, float]:
    """Returns the learning rates of the named groups on this process, by name.

    Args:
        optimizer: the optimizer.
    """
    return {group["name"]: float(group["lr"]) for group in optimizer.param_groups if group.get("name")}
