"""Checks a setting with keyword arguments for a function whose name is in a second setting.

An example is `lr_scheduler_kwargs`, whose function is selected by `lr_scheduler_type`.

The input is calls, the rules about their arguments (`keywords_of`) and a reader of signatures; the output is findings.
Nothing is reported if the function is unknown, or if the second setting is not plain data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from forgather.aliases import keyword_for, suggest_inside
from forgather.config.graph import CallKind, Entry, Mapped, Node, Scalar
from forgather.config.lint.call_check import Called
from forgather.config.path import Key, format_path
from forgather.errors import Diagnostic, ForgatherError
from forgather.project.checks.setting_rules import arguments_of, place_to_fix, rules_about
from forgather.project.checks.subject import Subject
from forgather.rules import Rules
from forgather.signatures.results import Callee

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

_KEYWORDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def check_chosen_keywords(subject: Subject) -> Iterator[Diagnostic]:
    """Yields findings about keywords that the selected function does not accept, and required ones that are missing."""
    calls, reader = subject.calls, subject.reader
    for called in calls.values():
        if called.node.kind in (CallKind.META, CallKind.PARTIAL):
            continue
        arguments = arguments_of(called)
        for rules in rules_about(called):
            for name, use in rules.arguments.items():
                if "keywords_of" in use:
                    yield from _check_keywords(called, name, use["keywords_of"], arguments, rules, reader)


def _check_keywords(
    called: Called, name: str, use: Mapping[str, Any], arguments: Mapping[str, Node], rules: Rules, reader: Reader
) -> Iterator[Diagnostic]:
    chosen = arguments.get(use["chosen_by"])
    # "linear" is the default of `lr_scheduler_type` in transformers.
    word = chosen.value if isinstance(chosen, Scalar) else rules.defaults.get(use["chosen_by"], "linear")
    if chosen is not None and not isinstance(chosen, Scalar):
        return
    node = arguments.get(name)
    written = node.entries if isinstance(node, Mapped) else ()
    if node is not None and not isinstance(node, Mapped) and not (isinstance(node, Scalar) and node.value is None):
        return
    known = _keywords(use["callees"].get(word), reader)
    if known is None:
        return
    ours = [name for name in known if name not in use["given"]]
    for entry in written:
        key = str(entry.key)
        if key in use["given"]:
            setting = use["instead"].get(key)
            hint = f"set {setting} next to {name}" if setting else "leave it out: the trainer gives it"
            yield _finding(called, (name, key), entry, "FG810", f"{name} cannot set {key!r} of the schedule", hint)
        elif key not in known:
            message = f"{use['chosen_by']} {word!r} takes no {key!r}"
            meant = _suggestion(key, ours) or _taken_elsewhere(key, use, reader)
            meant = meant or suggest_inside(name, key, ours, outside=tuple(rules.settings), around=rules.name)
            yield _finding(called, (name, key), entry, "FG810", message, meant or _accepted_hint(ours))
    lacking = [key for key in ours if known[key].default is Parameter.empty and key not in {e.key for e in written}]
    if lacking and chosen is not None:
        message = f"{use['chosen_by']} {word!r} needs {', '.join(map(repr, lacking))} in {name}"
        place = next((one for one in called.node.kwargs if one.value is chosen), None)
        hint = f"write {name}: {{{lacking[0]}: ...}}"
        yield _finding(called, (use["chosen_by"],), place, "FG208", message, hint)


def _keywords(constructor: str | None, reader: Reader) -> dict[str, Parameter] | None:
    """Returns the parameters that can be given by keyword; None if the function accepts any keyword or is unknown."""
    if constructor is None:
        return None
    try:
        callee = reader.read(constructor)
    except ForgatherError:
        return None
    # It is not known which of several overloads is called.
    if not isinstance(callee, Callee) or len(callee.signatures) != 1:
        return None
    parameters = callee.signatures[0].parameters
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return None
    return {name: one for name, one in parameters.items() if one.kind in _KEYWORDS}


def _suggestion(key: str, names: list[str]) -> str | None:
    known = keyword_for(key, names)
    return known and f"did you mean {known!r}?"


def _taken_elsewhere(key: str, use: Mapping[str, Any], reader: Reader) -> str | None:
    """Returns a hint that names the other functions that accept a keyword, or a similar one; None if there is none."""
    known = {word: list(_keywords(constructor, reader) or ()) for word, constructor in use["callees"].items()}
    if words := [word for word, names in known.items() if key in names]:
        return f"{use['chosen_by']}: {' or '.join(words)} takes it"
    return next(
        (
            f"{use['chosen_by']}: {word} takes {name!r}"
            for word, names in known.items()
            if (name := keyword_for(key, names))
        ),
        None,
    )


def _accepted_hint(names: list[str]) -> str:
    return f"it takes {', '.join(names)}" if names else "it takes no arguments of its own"


def _finding(
    called: Called, path: tuple[str, ...], entry: Entry | None, code: str, message: str, hint: str
) -> Diagnostic:
    return Diagnostic(
        code=code,
        message=message,
        span=place_to_fix(entry) or called.node.span,
        path=format_path((*called.path, *map(Key, path))),
        hint=hint,
    )
