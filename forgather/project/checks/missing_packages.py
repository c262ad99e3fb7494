"""Checks that the distributions which calls and settings need are installed, by their metadata.

The input is a config; the output is a finding for each key or call that needs a distribution which is missing or too
old. Nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from forgather.config.graph import Call, Entry, Mapped, Node, Scalar
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.traverse import all_nodes
from forgather.errors import Diagnostic
from forgather.project.checks.setting_rules import arguments_of, place_to_fix
from forgather.project.checks.subject import Subject
from forgather.requirements import Requirement, needed_by_call, needed_by_setting

CODE = "FG882"
_NO_MODULE = "FG320"


def check_missing_packages(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error for each call and each setting that needs a distribution which is missing or too old."""
    found: dict[Requirement, str | None] = {}
    for path, node in all_nodes(subject.graph):
        if not isinstance(node, Call):
            continue
        place = Diagnostic(code=CODE, message="", span=node.span, path=format_path(path))
        of_settings: set[Requirement] = set()
        for name, value, inner, entry in _settings(subject, node):
            # FSDP2 takes the place of a DeepSpeed that is missing.
            if name == "deepspeed" and _is_false(subject, node, "strict"):
                continue
            for requirement in needed_by_setting(node.constructor, name, value):
                of_settings.add(requirement)
                shown = f"{node.name}.{name}" if node.name else name
                whole = f"{shown}: {value}" if isinstance(value, str) else shown
                span = place_to_fix(entry) or node.span
                key = replace(place, span=span, path=format_path((*path, *inner)))
                yield from _finding(requirement, whole, key, found)
        for requirement in needed_by_call(node.constructor):
            # The key that needs the distribution says more than the call that has the key.
            if requirement not in of_settings:
                yield from _finding(requirement, node.constructor.rpartition(":")[2], place, found)


def without_repeats(findings: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns the findings without those about a missing module of a distribution that is reported as missing.

    Args:
        findings: all findings of a config.
    """
    findings = [*findings]
    reported = {one.span for one in findings if one.code == CODE}
    return [one for one in findings if one.code != _NO_MODULE or one.span not in reported]


def _finding(
    requirement: Requirement, what: str, place: Diagnostic, found: dict[Requirement, str | None]
) -> Iterator[Diagnostic]:
    if requirement not in found:
        found[requirement] = requirement.lack()
    lack = found[requirement]
    if lack is not None:
        yield replace(place, message=f"{what} needs {lack}", hint=requirement.hint)


def _is_false(subject: Subject, node: Call, name: str) -> bool:
    """Returns whether a call gives a setting the value false."""
    return any(found == name and value is False for found, value, *_ in _settings(subject, node))


def _settings(subject: Subject, node: Call) -> Iterator[tuple[str, object, GraphPath, Entry | None]]:
    """Yields the settings of a call and of the mappings in it: name, value, path below the call and entry."""
    called = subject.calls.get(id(node))
    entries = {entry.value: entry for entry in node.kwargs}
    arguments = arguments_of(called) if called else {str(entry.key): entry.value for entry in node.kwargs}
    for name, value in arguments.items():
        yield from _inside(name, value, (Key(name),), entries.get(value))


def _inside(
    name: str, node: Node, path: GraphPath, entry: Entry | None
) -> Iterator[tuple[str, object, GraphPath, Entry | None]]:
    if isinstance(node, Scalar):
        yield name, node.value, path, entry
    elif isinstance(node, Mapped):
        # The mapping itself is a setting, such as `deepspeed` or `adapter`.
        yield name, True, path, entry
        for one in node.entries:
            yield from _inside(f"{name}.{one.key}", one.value, (*path, Key(one.key)), one)
