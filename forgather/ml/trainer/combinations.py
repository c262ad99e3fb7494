"""Combinations that a trainer refuses before it makes a model: what its arguments and what it is given come to.

Takes arguments and objects; gives nothing, or the refusal of the compatibility matrix in the words that `fgcli check`
has. Keeps true: nothing is built; what only a built model tells is refused by its strategy.
"""

from __future__ import annotations

from typing import Any

from forgather.ml.trainer import arguments_check as door
from forgather.ml.trainer.args import TrainingArguments
from forgather.rule_conditions import SOMETHING
from forgather.rules import Rules

_CODES = ("FG770", "FG775")


def refuse_combination(rules: Rules, args: TrainingArguments, **given: Any) -> None:
    """Raises where arguments do not go with the trainer, or with what it is given.

    Args:
        rules: those about the trainer.
        args: the arguments.
        **given: what the trainer is given, by the names of its parameters.

    Raises:
        SettingError: FG770 or FG775.
    """
    facts = rules.complete({})
    facts |= {f"args.{name}": value for name, value in args.RULES.complete(args.to_dict()).items()}
    facts |= {f"{name}.calls": _called(value) for name, value in given.items()}
    facts |= {name: None if value is None else SOMETHING for name, value in given.items()}
    door.refuse(breach for breach in rules.broken(facts) if breach.code in _CODES)


def _called(value: Any) -> str:
    """Returns the constructor of an object as a config names it, in small letters; "" for none."""
    if value is None:
        return ""
    value = getattr(value, "func", value)
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}".lower()
