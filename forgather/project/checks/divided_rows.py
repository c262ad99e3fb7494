"""Checks `context_parallel_size`: whether the model of a config is one whose rows can be divided by positions.

The input is a graph; the output is findings. Nothing is imported. Compared are the configuration class of the model
and, as far as the config writes them, the numbers of heads or, for a ring, the settings of its attention; the run also
refuses what is not known before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from forgather.config.graph import Call, Scalar
from forgather.config.traverse import walk
from forgather.errors import Diagnostic, ProjectError
from forgather.parallel_sizes import uneven_heads
from forgather.project.checks.subject import Subject
from forgather.project.literal import plain_value
from forgather.project.trainer_arguments import TrainerArguments, keyword, model_of_main, trainer_arguments
from forgather.ring_models import ATTENTION, ring_obstacle
from forgather.rotary_types import rotary_type_by_length

_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "ml", "context_models.json")
_CONFIG = re.compile(r"transformers(\.[\w.]+)?:(?P<name>\w+Config)")
_SIZE = "context_parallel_size"


def check_divided_rows(subject: Subject) -> list[Diagnostic]:
    """Returns findings about a model whose rows cannot be divided by positions."""
    arguments = trainer_arguments(subject.graph)
    size = None if arguments is None else arguments.plain(_SIZE)
    if arguments is None or not isinstance(size, int) or size < 2:
        return []
    return list(_check_model(subject, arguments, size))


def _check_model(subject: Subject, arguments: TrainerArguments, size: int) -> Iterator[Diagnostic]:
    model = model_of_main(subject.graph)
    made = [call for _, call in walk([] if model is None else [((), model[1])]) if isinstance(call, Call)]
    configs = [(call, found["name"]) for call in made if (found := _CONFIG.fullmatch(call.constructor))]
    if len(configs) != 1:
        return
    config, name = configs[0]
    if name.startswith(("Auto", "BitsAndBytes")):
        return
    entry = arguments.entry(_SIZE)
    span = entry.span if entry else config.span
    if name not in _proven_configs():
        yield Diagnostic(
            code="FG757",
            message=f"{_SIZE} is {size}, and it was not measured that models of {name} give the result of one process",
            hint=f"remove {_SIZE}, and shard the weights (fsdp: true)",
            span=span,
        )
        return
    if (kind := rotary_type_by_length(_rotary_settings(config))) is not None:
        yield Diagnostic(
            code="FG757",
            message=f"{_SIZE} is {size}, and the rotary positions of {name} are of type {kind!r}, which depends on the "
            "length of a whole row",
            hint=f"remove {_SIZE}, and shard the weights (fsdp: true)",
            span=span,
        )
        return
    if arguments.plain("context_parallel_method") == "ring":
        yield from _check_ring(arguments, made, config, name)
        return
    heads = _whole(config, "num_attention_heads") or _whole(config, "n_head")
    if heads is None:
        return
    tensor = arguments.plain("tensor_parallel_size")
    groups = _whole(config, "num_key_value_heads") or heads
    problem = uneven_heads(heads, groups, size=size, tensor_size=tensor if isinstance(tensor, int) else 1)
    if problem is not None:
        yield Diagnostic(code="FG758", message=f"{name}: {problem[0]}", hint=problem[1], span=span)


def _check_ring(arguments: TrainerArguments, made: list[Call], config: Call, name: str) -> Iterator[Diagnostic]:
    # What is not a plain value is known only in the run, which compares it too.
    written: dict[str, Any] = {
        str(entry.key): entry.value.value if isinstance(entry.value, Scalar) else None for entry in config.kwargs
    }
    chosen = [keyword(call, "attn_implementation") for call in made]
    attention = next((str(node.value) for node in chosen if isinstance(node, Scalar) and node.value), ATTENTION)
    family = next(family for family, names in _proven_families().items() if name in names)
    found = ring_obstacle(family, written, attention)
    if found is not None:
        entry = arguments.entry("context_parallel_method")
        yield Diagnostic(
            code="FG759",
            message=f"context_parallel_method is 'ring', and {found[0]}: torch's ring attention is causal attention "
            "over whole rows",
            hint=found[1],
            span=entry.span if entry else config.span,
        )


def _rotary_settings(config: Call) -> dict[str, object]:
    """Returns the settings of rotary positions that a config writes as plain values; the run compares others."""
    found: dict[str, object] = {}
    for name in ("rope_parameters", "rope_scaling"):
        node = keyword(config, name)
        with contextlib.suppress(ProjectError):
            found[name] = None if node is None else plain_value(node, name)
    return found


def _whole(config: Call, name: str) -> int | None:
    node = keyword(config, name)
    value = node.value if isinstance(node, Scalar) else None
    return value if isinstance(value, int) and value > 0 else None


def _proven_configs() -> frozenset[str]:
    return frozenset(name for names in _proven_families().values() for name in names)


@cache
def _proven_families() -> dict[str, list[str]]:
    with open(_TABLE, encoding="utf-8") as stream:
        families: dict[str, list[str]] = json.load(stream)["families"]
    return families
