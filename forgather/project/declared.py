"""The command-line options that a config declares in its target `dynamic_args`.

Takes a graph, gives `DeclaredOption` records. Keeps true: the declaration is plain data, read from a render without
options, and nothing in it is constructed; the default stays with the template and is shown as help only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches

from forgather.config.graph import Entry, Graph, Mapped, Node, Scalar, Sequence
from forgather.errors import Diagnostic, ProjectError, Severity, nearest
from forgather.project.plain import plain_value
from forgather.project.surroundings import STANDARD_VARIABLES
from forgather.source import Span

TARGET = "dynamic_args"
FIELDS = ("names", "type", "choices", "default", "help")
TYPES = {"str": str, "string": str, "path": str, "int": int, "integer": int, "float": float, "number": float,
         "bool": bool, "boolean": bool}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeclaredOption:
    """One option of a config.

    Args:
        names: spellings on the command line, dashes included.
        variable: the Jinja variable that the option sets.
        type: what the text is read as; `bool` makes a pair of flags.
        choices: accepted values; () for any.
        default: what the template uses without the option, for the help.
        help: one line.
        span: where it is declared.
    """

    names: tuple[str, ...]
    variable: str
    type: type[str] | type[int] | type[float] | type[bool]
    choices: tuple[object, ...]
    default: object
    help: str
    span: Span | None


def declared_options(graph: Graph, *, reserved: frozenset[str] = frozenset()) -> list[DeclaredOption]:
    """Returns the options that a config declares, in order.

    Args:
        graph: the config, rendered without options.
        reserved: spellings that a config cannot have, because the command line itself has them.

    Raises:
        ProjectError: a declaration is malformed, or its name is taken.
    """
    entry = graph.targets.get(TARGET)
    if entry is None:
        return []
    taken: dict[str, str] = dict.fromkeys(reserved, "the command line")
    options: list[DeclaredOption] = []
    faults: list[ProjectError] = []
    for key, node, span in _records(entry):
        try:
            option = _option(key, node)
            _refuse_taken(option, taken)
            option = replace(option, span=span)
        except ProjectError as fault:
            faults.append(fault)
            continue
        taken.update(dict.fromkeys((*_spellings(option), option.variable), "another option of this config"))
        options.append(option)
    if faults:
        first, *rest = faults
        first.others = (*first.others, *(fault.diagnostic for fault in rest))
        raise first
    return options


def without_options(graph: Graph) -> Graph:
    """Returns a graph without the options of the command line, which did their work in the templates."""
    return replace(graph, targets={name: entry for name, entry in graph.targets.items() if name != TARGET})


def unread_options(options: Iterable[DeclaredOption], reads: Set[str]) -> Iterator[Diagnostic]:
    """Yields a lint for each option whose variable is not among the names that the templates of the config read."""
    for option in options:
        if option.variable in reads:
            continue
        near = get_close_matches(option.variable, sorted(reads), n=1, cutoff=0.6)
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
                # An alias is declared where it stands.
                span = item.value.span if item.alias is not None or item.value.span is None else item.span
                yield (item.key if isinstance(item.key, str) else None), item.value, span
    elif not (isinstance(node, Scalar) and node.value is None):
        raise _malformed(f"{TARGET!r} is neither a list nor a mapping of options", node)


def _option(key: str | None, node: Node) -> DeclaredOption:
    if not isinstance(node, Mapped):
        raise _malformed(f"an option in {TARGET!r} is not a mapping", node)
    fields = plain_value(node, f"{TARGET!r}", code="FG408")
    fields = fields if isinstance(fields, dict) else {}
    for field in fields:
        if field not in FIELDS:
            where = _field(node, field)
            raise _malformed(f"an option in {TARGET!r} has no field {field!r}", where, nearest(str(field), FIELDS))
    names = _names(fields.get("names", key), node)
    choices = fields.get("choices")
    if choices is not None and not isinstance(choices, list):
        where = _field(node, "choices")
        raise _malformed(f"'choices' of option {names[0]!r} is not a list", where, "write choices: [a, b]")
    kind = fields.get("type") or "str"
    if not isinstance(kind, str) or kind not in TYPES:
        hint = nearest(str(kind), list(TYPES)) or f"one of: {', '.join(TYPES)}"
        raise _malformed(f"option {names[0]!r} has the unknown type {kind!r}", _field(node, "type"), hint)
    _refuse_unreadable("choice", choices or (), kind, names[0], _field(node, "choices"))
    default = fields.get("default")
    _refuse_unreadable("default", () if default is None else (default,), kind, names[0], _field(node, "default"))
    return DeclaredOption(
        names=names,
        variable=_variable(names),
        type=TYPES[kind],
        choices=tuple(choices or ()),
        default=default,
        help=str(fields.get("help") or ""),
        span=node.span,
    )


def _field(node: Mapped, field: object) -> Node:
    """The value of a field, which stands where the field does; the whole option where there is none."""
    return next((entry.value for entry in node.entries if entry.key == field), node)


def _refuse_unreadable(what: str, values: Iterable[object], kind: str, name: str, where: Node) -> None:
    for value in values:
        try:
            TYPES[kind](value)
        except (TypeError, ValueError):
            hint = f"give a {what} that is of type {kind}, or another type"
            raise _malformed(f"the {what} {value!r} of option {name!r} is no {kind}", where, hint) from None


def _names(value: object, node: Node) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    names = [name for name in given if isinstance(name, str) and name.strip("-")]
    if not names or len(names) != len(given):
        raise _malformed(
            f"an option in {TARGET!r} has no 'names'", node, "write names: --steps, or a list of spellings"
        )
    spelled = tuple(name if name.startswith("-") else "--" + name.replace("_", "-") for name in names)
    for name in spelled:
        if not _variable((name,)).isidentifier() or (not name.startswith("--") and len(name) > 2):
            raise _malformed(f"{name!r} cannot be the name of an option", node, "write it as --max-steps or -n")
    return spelled


def _variable(names: tuple[str, ...]) -> str:
    long_names = [name for name in names if name.startswith("--")]
    return (long_names or list(names))[0].lstrip("-").replace("-", "_")


def _spellings(option: DeclaredOption) -> tuple[str, ...]:
    if option.type is not bool:
        return option.names
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
