"""Checks the names of the modules that an adapter is put into, against the files of the base model.

The input is calls; the output is findings. Only the names in the weight files of a local folder are read. They are
those of most modules, and not of all: a library may join weights when it loads them. So only a name that is close to
one in the files is reported, as a warning. The run compares with the modules themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from forgather.bounded import open_regular, read_bytes
from forgather.config.graph import Call, CallKind, Mapped, Node, Scalar, Sequence
from forgather.config.path import Key, format_path
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.setting_rules import arguments_of, rules_about
from forgather.project.checks.subject import Subject
from forgather.spelling import close_matches

_FOLDER, _MODULES = "pretrained_model_name_or_path", "target_modules"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_BYTES = 64 << 20


def check_adapted_modules(subject: Subject) -> Iterator[Diagnostic]:
    """Yields a warning for each name in `target_modules` that looks like a misspelt name of the base model."""
    for called in subject.calls.values():
        given = arguments_of(called)
        adapter, model = given.get("adapter"), given.get("model") or given.get("model_init")
        if not isinstance(model, Call) or called.node.kind is CallKind.META or not rules_about(called):
            continue
        making = subject.calls.get(id(model))
        folder = arguments_of(making).get(_FOLDER) if making is not None else None
        names = _names(adapter, subject)
        if not names or not isinstance(folder, Scalar) or not isinstance(folder.value, str):
            continue
        modules = _modules(os.path.expanduser(folder.value))
        for node in names:
            wanted = str(node.value)
            # peft compares whole parts at the end of a name.
            if not modules or any(f".{module}".endswith(f".{wanted}") for module in modules):
                continue
            near = close_matches(wanted.rpartition(".")[2], sorted({name.rpartition(".")[2] for name in modules}))
            if near:
                yield Diagnostic(
                    code="FG900",
                    message=f"{_MODULES}: {wanted!r} is in no name of the weights in {folder.value!r}",
                    severity=Severity.WARNING,
                    span=node.span,
                    path=format_path((*called.path, Key("adapter"), Key(_MODULES))),
                    hint=f"did you mean {near[0]!r}?",
                )


def _names(adapter: Node | None, subject: Subject) -> list[Scalar]:
    """Returns the listed names; a text is a regular expression or the word for all layers."""
    if isinstance(adapter, Call):
        called = subject.calls.get(id(adapter))
        node = arguments_of(called).get(_MODULES) if called is not None else None
    else:
        entries = adapter.entries if isinstance(adapter, Mapped) else ()
        node = next((entry.value for entry in entries if entry.key == _MODULES), None)
    items = node.items if isinstance(node, Sequence) else ()
    return [item for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]


def _modules(folder: str) -> frozenset[str]:
    """Returns the names of the modules that have weights in the files of a model; empty if they cannot be read."""
    try:
        if os.path.isfile(os.path.join(folder, _INDEX)):
            weights = json.loads(read_bytes(os.path.join(folder, _INDEX), _MAX_BYTES))["weight_map"]
        else:
            # The file begins with the size of a JSON table of its tensors.
            with open_regular(os.path.join(folder, _WEIGHTS)) as stream:
                size = int.from_bytes(stream.read(8), "little")
                weights = json.loads(stream.read(min(size, _MAX_BYTES)))
        return frozenset(str(name).rpartition(".")[0] for name in weights)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return frozenset()
