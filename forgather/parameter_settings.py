"""The settings `freeze` and `parameter_groups` as plain data: which parameters they name, and what changes for them.

The input is a setting as a config has it; the output is its entries, or what is wrong with it. Both the arguments of
a trainer and the conditions of rules (`computed: parameters`) read it here. Nothing is known about the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from forgather.batch_triangle import Phrase
from forgather.rule_conditions import SOMETHING, UNKNOWN
from forgather.value_text import shown

_ADVICE = 'write a list of patterns, as ["embed_tokens", {pattern: "layers.[0-3]", until: 100}]'
_EPOCHS = re.compile(r"(\d+)ep")


class Frozen(NamedTuple):
    """One entry of the setting.

    Args:
        pattern: the pattern of the names of parameters.
        until: the number of steps or epochs after which the parameters are trained; None if they never are.
        unit: what `until` counts, "steps" or "epochs".
    """

    pattern: str
    until: int | None = None
    unit: str = "steps"

    def holds(self, step: int, epoch: int) -> bool:
        """Returns whether the parameters are frozen in the step after `step` steps, which is in an epoch from 0 on.

        Example:
            >>> [Frozen("embed", 2).holds(step, 0) for step in (0, 1, 2)]
            [True, True, False]
        """
        return self.until is None or (step if self.unit == "steps" else epoch) < self.until


class FreezeFault(ValueError):
    """The setting cannot be read."""


def read_freeze(setting: Any) -> list[Frozen]:
    """Returns the entries of the setting.

    Raises:
        FreezeFault: if an entry is neither a pattern nor a mapping of `pattern` and `until`.

    Example:
        >>> read_freeze(["head", {"pattern": "layers.0", "until": "2ep"}])
        [Frozen(pattern='head', until=None, unit='steps'), Frozen(pattern='layers.0', until=2, unit='epochs')]
    """
    if setting is None:
        return []
    if not isinstance(setting, list | tuple):
        raise FreezeFault(f"freeze is {shown(setting)}, which is no list")
    return [_entry(entry, number) for number, entry in enumerate(setting)]


def _entry(entry: Any, number: int) -> Frozen:
    fields = {"pattern": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, Mapping) or not isinstance(fields.get("pattern"), str) or not fields["pattern"].strip():
        raise FreezeFault(f"freeze.{number} is {shown(entry)}, which has no pattern")
    unknown = sorted(map(str, fields.keys() - {"pattern", "until"}))
    if unknown:
        raise FreezeFault(f"freeze.{number} has no setting {shown(unknown[0])}: it has pattern and until")
    until = fields.get("until")
    if until is None:
        return Frozen(fields["pattern"])
    if isinstance(until, int) and not isinstance(until, bool) and until >= 1:
        return Frozen(fields["pattern"], until)
    if isinstance(until, str) and (found := _EPOCHS.fullmatch(until.strip())) and int(found[1]):
        return Frozen(fields["pattern"], int(found[1]), "epochs")
    raise FreezeFault(f"freeze.{number}.until is {until!r:.80}: it is a number of steps from 1, or of epochs, as '2ep'")


def parameter_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what rules ask about the settings.

    Args:
        settings: the settings, with defaults.

    Returns:
        freeze_fault, freeze_advice: what is wrong with the setting, and what to write; None if it can be read.
        freeze_is_scheduled: whether some parameters are frozen for a part of the run only.
        groups_fault: what is wrong with `parameter_groups`; None if nothing is.
        freeze_last_step, freeze_last_epoch: the largest number of steps and of epochs; 0 without any.

    Example:
        >>> parameter_facts({"freeze": [{"pattern": "head", "until": 3}]})["freeze_is_scheduled"]
        True
    """
    facts: dict[str, Any] = {
        "freeze_fault": None,
        "freeze_advice": Phrase(_ADVICE),
        "groups_fault": _groups_fault(settings),
    }
    setting = settings.get("freeze")
    unknown = dict.fromkeys(("freeze_is_scheduled", "freeze_last_step", "freeze_last_epoch"), UNKNOWN)
    if setting is UNKNOWN or setting is SOMETHING:
        return facts | unknown
    try:
        entries = read_freeze(setting)
    except FreezeFault as fault:
        return facts | unknown | {"freeze_fault": Phrase(fault)}
    ends = {unit: [one.until or 0 for one in entries if one.unit == unit] for unit in ("steps", "epochs")}
    return facts | {
        "freeze_is_scheduled": any(one.until is not None for one in entries),
        "freeze_last_step": max(ends["steps"], default=0),
        "freeze_last_epoch": max(ends["epochs"], default=0),
    }


def _groups_fault(settings: Mapping[str, Any]) -> Phrase | None:
    groups = settings.get("parameter_groups")
    # Rules report a list whose items are no mappings, or have other keys.
    for number, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
        if isinstance(group, Mapping):
            missing = "pattern" if "pattern" not in group else "learning_rate or weight_decay"
            if "pattern" not in group or not {"learning_rate", "weight_decay"} & group.keys():
                return Phrase(f"parameter_groups.{number} is {dict(group)!r:.80}, and has no {missing}")
    return None
