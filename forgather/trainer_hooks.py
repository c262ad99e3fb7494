"""Hooks of transformers' `Trainer` that a subclass of our trainers may override.

The inputs are the names of methods and of base trainers; the output is the reason why each hook is refused. An
overridden hook is either called as transformers calls it, or refused by an error that names it. The check before a run
and the trainer itself read the same table, `ml/trainer_hooks.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "trainer_hooks.json")
HF_TRAINER = "extend trainers/hf_trainer.yaml, whose trainer is that of transformers and calls all of them"
"""The hint for a user who needs all hooks."""


class Hooks(NamedTuple):
    """How each hook is treated.

    Args:
        honored: the hooks that our trainers call or read.
        instead: the hooks that no trainer of ours calls, with a hint for each.
        refused_by: by trainer name, the hooks that this trainer does not call although other trainers of ours do, with
            a hint for each hook.
    """

    honored: frozenset[str]
    instead: dict[str, str]
    refused_by: dict[str, dict[str, str]]


@cache
def trainer_hooks() -> Hooks:
    """Returns the table of hooks."""
    with open(_FILE, encoding="utf-8") as stream:
        table = json.load(stream)
    return Hooks(
        frozenset(table["honored"]),
        {name: group["hint"] for group in table["instead"] for name in group["hooks"]},
        {trainer: dict.fromkeys(group["hooks"], group["hint"]) for trainer, group in table["refused_by"].items()},
    )


def refused_hooks(trainers: Collection[str]) -> dict[str, tuple[str, str]]:
    """Returns the hooks that a class may not override, each with its error code and hint.

    Args:
        trainers: the names of our trainers from which the class derives.
    """
    hooks = trainer_hooks()
    refused = {name: ("FG860", hint) for name, hint in hooks.instead.items()}
    for trainer in trainers:
        refused |= {name: ("FG861", hint) for name, hint in hooks.refused_by.get(trainer, {}).items()}
    return refused


def refusal(owner: str, name: str, trainer: str) -> str:
    """Returns the message for a refused hook.

    Args:
        owner: the name of the subclass.
        name: the name of the hook.
        trainer: the name of the trainer that does not call the hook.
    """
    return f"{owner} defines {name!r}, a hook of transformers' Trainer that {trainer} never calls"
