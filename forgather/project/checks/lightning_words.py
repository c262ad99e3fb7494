"""Checks the words of Lightning's `Trainer` in a config, by the records that the trainer itself reads.

The input is calls; the output is a finding for each word that is unknown, refused, or in conflict with another one, at
its line. A word whose value is known only after construction is left to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgather.config.graph import Call, CallKind, Mapped, Node, Scalar, Sequence
from forgather.config.lint.call_check import Called
from forgather.config.path import Key, format_path
from forgather.errors import Diagnostic
from forgather.lightning.meaning import meaning_of
from forgather.lightning.trainer_words import TRAINER, Given
from forgather.project.checks.setting_rules import arguments_of, place_to_fix
from forgather.project.checks.subject import Subject
from forgather.signatures.results import Default

_TRAINERS = (TRAINER, "forgather.lightning.trainer:Trainer")
_PACKAGES = ("forgather.lightning", "lightning", "pytorch_lightning")
_UNKNOWN = object()


def check_lightning_words(subject: Subject) -> Iterator[Diagnostic]:
    """Yields a finding for each word of Lightning's `Trainer` that the trainer would refuse."""
    for called in subject.calls.values():
        if called.node.constructor in _TRAINERS and called.node.kind is CallKind.SINGLETON:
            yield from _findings(called, subject)


def _findings(called: Called, subject: Subject) -> Iterator[Diagnostic]:
    entries = {str(entry.key): entry for entry in called.node.kwargs}
    given = {name: _value(entry.value, subject) for name, entry in entries.items()}
    known = {name: value for name, value in given.items() if value is not _UNKNOWN}
    # The number of devices is that of the machine on which the run starts.
    for violation in meaning_of(known)[1]:
        name = violation.argument.partition(".")[0]
        entry = entries.get(name)
        yield Diagnostic(
            code=violation.code,
            message=violation.message,
            severity=violation.severity,
            span=place_to_fix(entry) or called.node.span,
            path=format_path((*called.path, Key(name)) if entry is not None else called.path),
            hint=violation.hint,
        )


def _value(node: Node, subject: Subject) -> Any:
    """Returns the value of a word: plain data, a `Given` for an object of Lightning's kind, or `_UNKNOWN`."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        # Other objects in a list are callbacks of our own trainers, which need no translation.
        return [value for value in (_value(item, subject) for item in node.items) if value is not _UNKNOWN]
    if isinstance(node, Mapped):
        pairs = {entry.key: _value(entry.value, subject) for entry in node.entries}
        return _UNKNOWN if any(value is _UNKNOWN for value in pairs.values()) else pairs
    if not isinstance(node, Call) or node.kind is not CallKind.SINGLETON:
        return _UNKNOWN
    module, _, name = node.constructor.partition(":")
    if not f"{module}.".startswith(tuple(f"{package}." for package in _PACKAGES)):
        return _UNKNOWN
    return Given(name, _options(subject.calls.get(id(node)), subject))


def _options(called: Called | None, subject: Subject) -> dict[str, Any]:
    """Returns the options that are known, and differ from their defaults."""
    if called is None or called.callee is None:
        return {}
    parameters = {
        name: parameter for signature in called.callee.signatures for name, parameter in signature.parameters.items()
    }
    found: dict[str, Any] = {}
    for name, node in arguments_of(called).items():
        # A parameter that does not exist is a finding about the call.
        if name not in parameters or (value := _value(node, subject)) is _UNKNOWN:
            continue
        default = parameters[name].default
        if not isinstance(default, Default) or value != default.value:
            found[name] = value
    return found
