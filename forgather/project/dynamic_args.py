"""The command-line options that a config declares in its target `dynamic_args`.

The input is a graph; the output is `DeclaredOption` records, and the declarations that are malformed. The declarations
are plain data from a render without options, and nothing in them is constructed. The default of an option is set by the
template; the default in the declaration is only shown in the help. A malformed declaration disables its own option and
no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from forgather.aliases import suggest
from forgather.config.graph import Entry, Graph, Mapped, Node, Scalar, Sequence
from forgather.errors import Diagnostic, ProjectError, Severity, nearest
from forgather.project.literal import plain_value
from forgather.project.template_environment import STANDARD_VARIABLES
from forgather.source import Span
from forgather.spelling import close_matches

TARGET = "dynamic_args"
FIELDS = ("names", "type", "action", "choices", "default", "help")
TYPES = {"str": str, "string": str, "path": str, "int": int, "integer": int, "float": float, "number": float,
         "bool": bool, "boolean": bool, "flag": bool}  # fmt: skip
FLAG = "flag"
FAULTS = frozenset({"FG408", "FG409"})
"""The error codes of declarations that are malformed, or whose name is taken."""


class Action(StrEnum):
    """The action of an option on the command line, as in `argparse`."""

    STORE = "store"
    STORE_TRUE = "store_true"
    STORE_FALSE = "store_false"
    APPEND = "append"

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value."""
        return self in (Action.STORE_TRUE, Action.STORE_FALSE)


@dataclass(frozen=True, kw_only=True)
class DeclaredOption:
    """One option that a config declares.

    Args:
        names: the names of the option on the command line, with dashes.
        variable: the Jinja variable that the option sets.
        type: the type of the value; an option with the type `bool` and the action "store" becomes a pair of flags,
            `--x` and `--no-x`.
        action: the action of the option, as in `argparse`.
        choices: the accepted values; () if any value is accepted.
        default: the value that the template uses without the option, shown in the help.
        help: the description of the option, one line.
        span: the location of the declaration.
    """

    names: tuple[str, ...]
    variable: str
    type: type[str] | type[int] | type[float] | type[bool]
    action: Action
    choices: tuple[object, ...]
    default: object
    help: str
    span: Span | None


class Misdeclared(NamedTuple):
    """A malformed declaration of an option.

    Args:
        names: the names of the option, as far as they can be read and are not reserved by the command line.
        error: the error that describes the problem.
    """

    names: tuple[str, ...]
    error: ProjectError


class Declared(NamedTuple):
    """The options that a config declares.

    Args:
        options: the well-formed options, in order.
        faults: the malformed declarations.
    """

    options: list[DeclaredOption]
    faults: list[Misdeclared]

    def fault_of(self, words: Iterable[str], *, unknown: bool) -> ProjectError | None:
        """Returns the error of a malformed option that a command line uses; None if it uses no such option.

        Args:
            words: the words of the command line.
            unknown: whether the command line contains an unknown option, which may be any of the malformed ones.
        """
        given = {_variable((word.split("=")[0],)) for word in words if word.startswith("-")}
        found = [
            fault.error
            for fault in self.faults
            if not given.isdisjoint(map(_variable, ((name,) for name in fault.names)))
        ]
        found += [fault.error for fault in self.faults] if unknown else []
        return next(iter(found), None)


def read_options(graph: Graph, *, reserved: frozenset[str] = frozenset()) -> Declared:
    """Returns the options that a config declares, and the malformed declarations.

    Args:
        graph: the graph of the config, rendered without options.
        reserved: the names of the command line's own options.
    """
    declared = Declared([], [])
    entry = graph.targets.get(TARGET)
    if entry is None:
        return declared
    if fault := _no_records(entry.value):
        declared.faults.append(Misdeclared((), fault))
    taken: dict[str, str] = dict.fromkeys(reserved, "the command line")
    for key, node, span in _records(entry):
        try:
            option = _option(key, node)
            _refuse_taken(option, taken)
        except ProjectError as fault:
            # An option of the command line itself does not use the malformed declaration.
            names = tuple(name for name in _spelled(key, node) if name not in reserved)
            declared.faults.append(Misdeclared(names, fault))
            continue
        # Two options with one variable would overwrite each other.
        taken.update(dict.fromkeys((*_spellings(option), option.variable), "another option of this config"))
        declared.options.append(replace(option, span=span))
    return declared


def without_options(graph: Graph) -> Graph:
    """Returns a graph without the target that declares options; the templates have already used their values."""
    return replace(graph, targets={name: entry for name, entry in graph.targets.items() if name != TARGET})


def unread_options(options: Iterable[DeclaredOption], reads: Set[str]) -> Iterator[Diagnostic]:
    """Yields a lint for each option whose variable no template of the config reads.

    Args:
        options: the declared options.
        reads: the names that the templates read.
    """
    for option in options:
        if option.variable in reads:
            continue
        near = close_matches(option.variable, sorted(reads), n=1, cutoff=0.6)
        yield Diagnostic(
            code="FG246",
            message=f"the option {option.names[0]!r} has no effect: no template of this config reads "
            f"{option.variable!r}",
            severity=Severity.LINT,
            span=option.span,
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"read it, as in {{{{ {option.variable} | default(...) }}}}, or remove the option",
        )


def _records(entry: Entry) -> Iterator[tuple[str | None, Node, Span | None]]:
    node = entry.value
    if isinstance(node, Sequence):
        yield from ((None, item, item.span) for item in node.items)
    elif isinstance(node, Mapped):
        for item in node.entries:
            if not (isinstance(item.value, Scalar) and item.value.value is None):
                # An aliased declaration is written at its anchor.
                span = item.value.span if item.alias is not None or item.value.span is None else item.span
                yield (item.key if isinstance(item.key, str) else None), item.value, span


def _no_records(node: Node) -> ProjectError | None:
    """Returns the error for a target that is neither a list nor a mapping; None for a list, a mapping or null."""
    if isinstance(node, Sequence | Mapped) or (isinstance(node, Scalar) and node.value is None):
        return None
    return _malformed(f"{TARGET!r} is neither a list nor a mapping of options", node)


def _spelled(key: str | None, node: Node) -> tuple[str, ...]:
    """Returns the names of the option in a malformed declaration, as far as they can be read."""
    fields = {entry.key: entry.value for entry in node.entries} if isinstance(node, Mapped) else {}
    given = fields.get("names")
    names = [
        item.value for item in (given.items if isinstance(given, Sequence) else (given,)) if isinstance(item, Scalar)
    ]
    return tuple(_spelling(name) for name in (names if given is not None else [key]) if isinstance(name, str))


def _option(key: str | None, node: Node) -> DeclaredOption:
    if not isinstance(node, Mapped):
        raise _malformed(f"an option in {TARGET!r} is not a mapping", node)
    fields = plain_value(node, f"{TARGET!r}", code="FG408")
    fields = fields if isinstance(fields, dict) else {}
    for field in fields:
        if field not in FIELDS:
            where = _field(node, field)
            raise _malformed(
                f"an option in {TARGET!r} has no field {field!r}", where, suggest("field", str(field), FIELDS)
            )
    names = _names(fields.get("names", key), node)
    kind = fields.get("type") or "str"
    if not isinstance(kind, str) or kind not in TYPES:
        hint = nearest(str(kind), list(TYPES)) or f"one of: {', '.join(TYPES)}"
        raise _malformed(f"option {names[0]!r} has the unknown type {kind!r}", _field(node, "type"), hint)
    action = _action(fields, kind, names[0], node)
    choices, default = _values_of(fields, kind, action, names[0], node)
    return DeclaredOption(
        names=names,
        variable=_variable(names),
        type=bool if action.is_flag else TYPES[kind],
        action=action,
        choices=choices,
        default=default,
        help=str(fields.get("help") or ""),
        span=node.span,
    )


def _action(fields: Mapping[str, object], kind: str, name: str, node: Mapped) -> Action:
    given = fields.get("action")
    if given is None:
        return Action.STORE_TRUE if kind == FLAG else Action.STORE
    if given not in [*Action]:
        hint = nearest(str(given), [*Action]) or f"one of: {', '.join(Action)}"
        raise _malformed(f"option {name!r} has the unknown action {given!r}", _field(node, "action"), hint)
    action = Action(str(given))
    if action.is_flag and fields.get("type") is not None and TYPES[kind] is not bool:
        message = f"option {name!r} has the action {action.value!r} and the type {kind!r}, and takes no value"
        raise _malformed(message, _field(node, "type"), "leave 'type' out")
    if not action.is_flag and (kind == FLAG or (action is Action.APPEND and TYPES[kind] is bool)):
        message = f"option {name!r} has the type {kind!r} and the action {action.value!r}, which takes a value"
        raise _malformed(message, _field(node, "action"), "leave 'action' out, or give another type")
    return action


def _values_of(
    fields: Mapping[str, object], kind: str, action: Action, name: str, node: Mapped
) -> tuple[tuple[object, ...], object]:
    """Returns the choices and the default of a declaration, after checking that they have the declared type."""
    choices, default = fields.get("choices"), fields.get("default")
    if choices is not None and (not isinstance(choices, list) or action.is_flag):
        where = _field(node, "choices")
        if action.is_flag:
            raise _malformed(f"option {name!r} takes no value, and has 'choices'", where, "leave 'choices' out")
        raise _malformed(f"'choices' of option {name!r} is not a list", where, "write choices: [a, b]")
    accepted = tuple(choices) if isinstance(choices, list) else ()
    _refuse_unreadable("choice", accepted, kind, name, _field(node, "choices"))
    defaults = () if default is None else (default,)
    if action.is_flag and not isinstance(default, bool | None):
        hint = "write true or false; the template has the value that counts without the option"
        raise _malformed(f"the default {default!r} of option {name!r} is not a boolean", _field(node, "default"), hint)
    if action is Action.APPEND and isinstance(default, list):
        defaults = tuple(default)
    _refuse_unreadable("default", () if action.is_flag else defaults, kind, name, _field(node, "default"))
    return accepted, default


def _field(node: Mapped, field: object) -> Node:
    """Returns the node of a field, to locate an error; the whole declaration if the field is missing."""
    return next((entry.value for entry in node.entries if entry.key == field), node)


def _refuse_unreadable(what: str, values: Iterable[object], kind: str, name: str, where: Node) -> None:
    for value in values:
        try:
            TYPES[kind](value)
        except (TypeError, ValueError):
            hint = f"give a {what} that is of type {kind}, or another type"
            raise _malformed(f"the {what} {value!r} of option {name!r} is not of type {kind}", where, hint) from None


def _names(value: object, node: Node) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    names = [name for name in given if isinstance(name, str) and name.strip("-")]
    if not names or len(names) != len(given):
        raise _malformed(
            f"an option in {TARGET!r} has no 'names'", node, "write names: --steps, or a list of spellings"
        )
    spelled = tuple(map(_spelling, names))
    for name in spelled:
        if not _variable((name,)).isidentifier() or (not name.startswith("--") and len(name) > 2):
            raise _malformed(f"{name!r} cannot be the name of an option", node, "write it as --max-steps or -n")
    return spelled


def _spelling(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def _variable(names: tuple[str, ...]) -> str:
    # As in argparse, the first long name gives the variable.
    long_names = [name for name in names if name.startswith("--")]
    return (long_names or list(names))[0].lstrip("-").replace("-", "_")


def _spellings(option: DeclaredOption) -> tuple[str, ...]:
    if option.type is not bool or option.action.is_flag:
        return option.names
    # argparse.BooleanOptionalAction adds a negative flag for every long name.
    return (*option.names, *("--no-" + name[2:] for name in option.names if name.startswith("--")))


def _refuse_taken(option: DeclaredOption, taken: dict[str, str]) -> None:
    for name in (*_spellings(option), option.variable):
        if name in taken:
            raise ProjectError(
                f"option {name!r} of this config is taken by {taken[name]}",
                code="FG409",
                span=option.span,
                hint="give it another name in 'dynamic_args'",
            )
    if option.variable in STANDARD_VARIABLES:
        raise ProjectError(
            f"option {option.names[0]!r} would replace the standard variable {option.variable!r}",
            code="FG409",
            span=option.span,
            hint="give it another name in 'dynamic_args'",
        )


def _malformed(message: str, node: Node, hint: str | None = None) -> ProjectError:
    return ProjectError(
        message, code="FG408", span=node.span, hint=hint or f"the fields of an option: {', '.join(FIELDS)}"
    )
