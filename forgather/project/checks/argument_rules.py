"""Checks arguments by how their constructors use them: as objects that are called, as lists, files or packages.

The input is calls and the rules about their arguments (`Rules.arguments`); the output is findings. Nothing is imported,
and of files only the `config.json` of a model is opened. A partial that a constructor calls is reported only if it
certainly lacks an argument in that call. A file is reported only if its path is a plain string.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

from forgather.bounded import TooManyEntriesError, matching_files, walk_folders
from forgather.config.graph import Call, CallKind, ContainerKind, Entry, Mapped, Node, Scalar, Sequence, describe
from forgather.config.lint.call_check import Called
from forgather.config.path import GraphPath, Key, format_path
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.setting_rules import arguments_of, place_to_fix, rules_about
from forgather.project.checks.subject import Subject
from forgather.rules import is_path
from forgather.stored_model import missing_model, other_kind
from forgather.trackers import tracker_faults

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_KINDS = {
    "decoder": "take a model such as Llama or GPT-2; tasks/seq2seq.yaml trains an encoder-decoder",
    "encoder_decoder": "take a model such as T5 or BART; tasks/chat.yaml trains a decoder, on prompts and answers",
}
_CONSTRUCTOR = re.compile(r"[\w./-]+:[A-Za-z_][\w.]*")


def check_arguments(subject: Subject) -> list[Diagnostic]:
    """Returns the findings about the arguments of all calls."""
    calls = subject.calls
    findings: list[Diagnostic] = []
    for called in calls.values():
        if called.node.kind is not CallKind.META:
            findings += _check_call(called, calls)
    return findings


def _check_call(called: Called, calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    arguments = arguments_of(called)
    is_partial = called.node.kind is CallKind.PARTIAL  # the caller of a partial may still give other arguments
    for rules in rules_about(called):
        for name, use in rules.arguments.items():
            node = arguments.get(name)
            if node is None:
                continue
            place = _Place(called, name, node)
            if "called_with" in use and not is_partial:
                yield from _check_called(place, use, calls)
            if "items" in use and not is_partial:
                yield from _check_items(place, use, calls)
            if "files" in use and _is_meant(use, arguments):
                yield from _check_files(place, use)
            if "folder" in use:
                yield from _check_folder(place, use)
            if "model" in use:
                yield from _check_model(place, use["model"])
            if "trackers" in use:
                yield from _check_trackers(place)


class _Place:
    """An argument of a call, with its node and its location."""

    def __init__(self, called: Called, name: str, node: Node) -> None:
        self.callee, self.name, self.node = called.node, name, node
        self.owner = called.callee.name if called.callee else called.node.constructor
        self.path: GraphPath = (*called.path, Key(name))
        self._entry = next((entry for entry in called.node.kwargs if entry.value is node), None)

    def finding(
        self, code: str, message: str, hint: str, severity: Severity = Severity.ERROR, inner: Entry | None = None
    ) -> Diagnostic:
        """Returns a finding about the argument, or about an item in the argument.

        Args:
            code: the error code.
            message: the description of the problem.
            hint: the action that solves the problem.
            severity: the severity of the problem.
            inner: the item that the finding is about; None if it is about the whole argument.
        """
        entry = inner or self._entry
        return Diagnostic(
            code=code,
            message=message,
            severity=severity,
            span=place_to_fix(entry) or self.node.span or self.callee.span,
            path=format_path(self.path if inner is None else (*self.path, Key(inner.key))),
            hint=hint,
        )


# what is called later


def _check_called(place: _Place, use: Mapping[str, Any], calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    known = calls.get(id(place.node))
    if known is None or known.node.kind is not CallKind.PARTIAL or known.callee is None:
        return
    partial, callee = known.node, known.callee
    # Calling a partial of a class gives an object, where the result of a call to that object was meant.
    if callee.kind == "class" and "object" in use:
        message = (
            f"{place.owner} calls {place.name!r} for {use['object']}, and a call of this one gives a {callee.name}"
        )
        hint = f"write !singleton:{partial.constructor}: it is the object that is called, not its class"
        yield place.finding("FG240", message, hint)
        return
    lacking = [_never_given(signature, partial, use["called_with"]) for signature in callee.signatures]
    if lacking and all(lacking):
        names = ", ".join(repr(name) for name in lacking[0])
        message = (
            f"{callee.name} lacks {names}: {place.owner} calls {place.name!r} with {use['called_with']['as']} alone"
        )
        yield place.finding("FG208", message, f"add {lacking[0][0]}: ... to the !partial")


def _never_given(signature: Signature, partial: Call, given: Mapping[str, Any]) -> list[str]:
    """Returns the required parameters to which neither the partial nor the caller of the partial gives a value."""
    if partial.spread is not None:
        return []
    parameters = signature.parameters.values()
    by_name = {str(entry.key) for entry in (*partial.kwargs, *partial.latent_args)} | set(given.get("keywords", ()))
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    filled = {*positional[: len(partial.args) + given["positional"]], *by_name}
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        p.name for p in parameters if p.default is Parameter.empty and p.kind not in variadic and p.name not in filled
    ]


# what is listed


def _check_items(place: _Place, use: Mapping[str, Any], calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    node, wanted = place.node, use["items"]
    # Iterating over a dict gives its keys, so the constructor would silently take names for objects.
    if isinstance(node, Mapped) and node.kind is ContainerKind.DICT:
        message = f"{place.owner} takes a list as {place.name!r}, and gets {describe(node)}, whose keys it would use"
        hint = f"begin the block with `== super()`, or read the mapping as a list: write !dlist:@{place.name} above it"
        yield place.finding("FG242", message, hint)
        return
    for entry in _items(node):
        item = entry.value
        if isinstance(item, Call):
            if item.kind is CallKind.PARTIAL:
                message = f"{place.owner} takes {wanted} in {place.name!r}, and gets a !partial of {item.constructor}"
                yield place.finding(
                    "FG240", message, f"write !singleton:{item.constructor}, which calls it", inner=entry
                )
        elif isinstance(item, Scalar | Sequence | Mapped):
            found = describe(item) if not isinstance(item, Scalar) else repr(item.value)[:80]
            message = f"{place.owner} takes {wanted} in {place.name!r}, and gets {found}"
            yield place.finding("FG242", message, _as_object(item, wanted), inner=entry)


def _items(node: Node) -> Iterable[Entry]:
    if isinstance(node, Mapped):
        kept = (entry for entry in node.entries if not (isinstance(entry.value, Scalar) and entry.value.value is None))
        return [*kept]
    if isinstance(node, Sequence):
        return [Entry(position, item, item.origin) for position, item in enumerate(node.items)]
    return ()


def _as_object(node: Node, wanted: str) -> str:
    if isinstance(node, Scalar) and isinstance(node.value, str) and _CONSTRUCTOR.fullmatch(node.value):
        return f"write !singleton:{node.value}"
    return f"give {wanted}, as !singleton:callbacks.py:MyCallback"


# what is opened


def _is_meant(use: Mapping[str, Any], arguments: Mapping[str, Node]) -> bool:
    """Returns whether the argument names local files; the rule's `where` makes this depend on other arguments."""
    for name, words in use.get("where", {}).items():
        node = arguments.get(name)
        if not isinstance(node, Scalar) or node.value not in words:
            return False
    return True


def _listed_files(node: Node) -> Iterator[Node]:
    if isinstance(node, Sequence):
        yield from node.items
    elif isinstance(node, Mapped):
        for entry in node.entries:
            yield from _listed_files(entry.value)
    else:
        yield node


def _check_files(place: _Place, use: Mapping[str, Any]) -> Iterator[Diagnostic]:
    node = place.node
    for item in _listed_files(node):
        if not isinstance(item, Scalar) or not isinstance(item.value, str) or _is_there(item.value, use["files"]):
            continue
        message = (
            f"{item.value!r} matches no {'data file' if os.path.isdir(os.path.expanduser(item.value)) else 'file'}"
        )
        finding = place.finding("FG456", message, _path_hint(item.value), Severity.WARNING)
        yield finding if item is node else replace(finding, span=item.span or finding.span)


def _is_there(written: str, suffixes: Collection[str]) -> bool:
    path = os.path.expanduser(written)
    # A URL may need the network, which a check must not use.
    if "://" in path:
        return True
    try:
        if os.path.isdir(path) and suffixes:
            return any(file.endswith(tuple(suffixes)) for _, _, files in walk_folders(path) for file in files)
        return os.path.exists(path) or (glob.has_magic(path) and any(True for _ in matching_files(path)))
    # A folder that is too large to search gets the benefit of the doubt.
    except TooManyEntriesError:
        return True


def _check_folder(place: _Place, use: Mapping[str, Any]) -> Iterator[Diagnostic]:
    node = place.node
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or node.value in use["folder"]:
        return
    if "://" in node.value or ("paths" in use and not is_path(node.value)):
        return
    if not os.path.isdir(os.path.expanduser(node.value)):
        message = f"{place.name}: there is no folder {node.value!r}"
        yield place.finding("FG456", message, use.get("advice") or _path_hint(node.value), Severity.WARNING)


def _check_model(place: _Place, kind: str) -> Iterator[Diagnostic]:
    name = place.node.value if isinstance(place.node, Scalar) else None
    if not isinstance(name, str):
        return
    if missing := missing_model(name):
        yield place.finding("FG456", f"{place.name}: {missing}", _path_hint(name), Severity.WARNING)
    elif kind != "any" and (wrong := other_kind(name, is_encoder_decoder=kind == "encoder_decoder")):
        yield place.finding("FG974", wrong, _KINDS[kind])


def _check_trackers(place: _Place) -> Iterator[Diagnostic]:
    node = place.node
    items = node.items if isinstance(node, Sequence) else (node,)
    names = [item.value for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]
    for fault in tracker_faults(names, os.environ):
        yield place.finding(fault.code, fault.message, fault.hint)


def _path_hint(written: str) -> str:
    if os.path.isabs(os.path.expanduser(written)):
        return "name a path that exists, or create it before the run"
    return "a relative path starts at the working folder; '{{ project_dir }}/...' starts at the project"
