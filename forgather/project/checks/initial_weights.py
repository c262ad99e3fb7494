"""Checks whether this machine has room for new weights that one process makes completely.

The input is calls; the output is a note. Nothing is imported, and no model is built: a number of parameters that the
model has at least follows from its configuration. The start of a run compares the exact size and the temporary folder,
too, see `forgather/ml/strategy/initial_room.py`.
"""

from __future__ import annotations

import re

from forgather.available_memory import available_bytes
from forgather.config.graph import Call, Scalar
from forgather.errors import Diagnostic, Severity
from forgather.planner.architectures import least_parameters
from forgather.planner.memory_plan import format_size
from forgather.project.checks.setting_rules import arguments_of
from forgather.project.checks.subject import Subject
from forgather.project.trainer_arguments import TrainerArguments, model_of_main, path_of, trainer_arguments

_MAKER = "forgather.ml.models:from_config"
_CONFIG = re.compile(r"transformers(?:\.\w+)*:(\w+)Config$")
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_initial_weights(subject: Subject) -> list[Diagnostic]:
    """Returns a note if a model, of which each process gets a part, does not fit into the memory of this machine."""
    arguments, model = trainer_arguments(subject.graph), model_of_main(subject.graph)
    if arguments is None or model is None or not isinstance(model[1], Call) or not _cuts_a_whole_model(arguments):
        return []
    needed, available = _least_bytes(subject, model[1]), available_bytes()
    if needed is None or available is None or needed <= available:
        return []
    return [
        Diagnostic(
            code="FG733",
            message=f"one process makes the whole model, which takes at least {format_size(needed)}, and this machine "
            f"has {format_size(available)} of free memory",
            severity=Severity.NOTE,
            span=arguments.call.span,
            path=path_of(subject.graph, arguments.call),
            hint="set initial_weights: counter, by which each process computes its slices of the weights",
        )
    ]


def _cuts_a_whole_model(arguments: TrainerArguments) -> bool:
    if arguments.plain("initial_weights") not in (None, "sequential"):
        return False
    size = arguments.plain("tensor_parallel_size")
    return arguments.is_pipeline or bool(arguments.plain("fsdp")) or (isinstance(size, int) and size > 1)


def _least_bytes(subject: Subject, model: Call) -> int | None:
    """Returns the bytes that a model takes at least; None if it is not a new one of a family that is known."""
    making = subject.calls.get(id(model))
    if making is None or model.constructor != _MAKER:
        return None
    given = arguments_of(making)
    config, dtype, tokenizer = (given.get(name) for name in ("config", "dtype", "tokenizer"))
    kind = _CONFIG.match(config.constructor) if isinstance(config, Call) else None
    described = subject.calls.get(id(config))
    if kind is None or described is None or not (dtype is None or isinstance(dtype, Scalar)):
        return None
    sizes = {name: node.value for name, node in arguments_of(described).items() if isinstance(node, Scalar)}
    if tokenizer is not None and not (isinstance(tokenizer, Scalar) and tokenizer.value is None):
        # Its vocabulary replaces that of the configuration.
        sizes.pop("vocab_size", None)
    parameters = least_parameters({**sizes, "model_type": kind[1].lower()})
    bytes_each = _BYTES.get("float32" if dtype is None or dtype.value is None else str(dtype.value))
    return None if parameters is None or bytes_each is None else parameters * bytes_each
