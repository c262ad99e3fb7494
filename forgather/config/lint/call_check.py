"""Do the calls of a graph fit what they call? Judged without importing anything.

Takes a graph and a reader of signatures, gives findings, what could not be checked, and the calls that are understood.
Keeps true: an error is said only where construction would fail by the same rule, or where a literal is of another
simple type than the annotation; what is not known is listed as unchecked and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import BoundArguments, Parameter, Signature
from typing import TYPE_CHECKING, NamedTuple

from forgather.aliases import keyword_for
from forgather.config.graph import Call, CallKind, Entry, Graph, Node, Scalar
from forgather.config.graph import Sequence as SequenceNode
from forgather.config.lint.signature_match import Mismatch, binds, mismatches
from forgather.config.lint.type_check import Given, Misfit, asks_for_text, given_by, list_for_tensor, misfit
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.traverse import all_nodes, roots, walk
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.signatures.results import Annotation, Callee, Unknown
from forgather.source import Span
from forgather.spelling import close_matches

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
# So alike are two names of five letters or more that differ by one.
_A_SLIP = 0.89
# Whoever has mistaken so many has made one mistake many times; reading each takes a millisecond.
MOST_UNKNOWN = 500
_AFTER_MANY = f"{MOST_UNKNOWN} calls before it have errors already"
_GIVEN_UNBUILT = "it is an argument of !meta, which decides whether and how it is built"


class Unchecked(NamedTuple):
    """Something that could not be checked without running code.

    Args:
        path: where in the graph.
        constructor: what is called there.
        reason: why it is not known.
        span: where it is written.
    """

    path: str
    constructor: str
    reason: str
    span: Span | None = None


class Called(NamedTuple):
    """A call, with what it calls; None where that is not known."""

    path: GraphPath
    node: Call
    callee: Callee | None


class Judgement(NamedTuple):
    """What was found out about the calls of a graph.

    Args:
        findings: what is wrong, in the order of the graph.
        unchecked: calls that are not known.
        calls: every call that does not fail for sure, by `id(node)`.
        texts: texts that parameters ask for, whatever they look like.
    """

    findings: tuple[Diagnostic, ...]
    unchecked: tuple[Unchecked, ...]
    calls: dict[int, Called]
    texts: tuple[Scalar, ...] = ()


def judge(graph: Graph, reader: Reader) -> Judgement:
    """Returns what can be said about every call that targets and definitions reach, each once."""
    findings: list[Diagnostic] = []
    unchecked: list[Unchecked] = []
    calls: dict[int, Called] = {}
    texts: list[Scalar] = []
    built = {id(node) for _, node in walk(roots(graph), unbuilt=False)}
    for path, node in all_nodes(graph):
        if not isinstance(node, Call):
            continue
        try:
            if len(findings) >= MOST_UNKNOWN:
                callee: Callee | Unknown = Unknown(node.constructor, _AFTER_MANY)
            else:
                callee = _read(reader, node) if id(node) in built else Unknown(node.constructor, _GIVEN_UNBUILT)
        except ForgatherError as error:
            findings.append(_at_call(error, node, path))
            continue
        if isinstance(callee, Unknown):
            unchecked.append(
                Unchecked(path=format_path(path), constructor=node.constructor, reason=callee.reason, span=node.span)
            )
        calls[id(node)] = Called(path, node, callee if isinstance(callee, Callee) else None)
    for called in calls.values():
        if called.callee is not None and called.callee.signatures:
            one = _Judge(called, called.callee, calls, reader)
            findings += one.findings()
            texts += one.texts
    return Judgement(tuple(findings), tuple(unchecked), calls, tuple(texts))


def _read(reader: Reader, node: Call) -> Callee | Unknown:
    folders = _folders(node.submodule_searchpath)
    if folders is None:
        return Unknown(node.constructor, "its submodule_searchpath is known only when it is built")
    return reader.read(node.constructor, folders)


def _folders(node: Node | None) -> tuple[str, ...] | None:
    """Returns the folders that are written out; None where they are not."""
    if node is None:
        return ()
    items = node.items if isinstance(node, SequenceNode) else (node,)
    plain = [item.value for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]
    return tuple(plain) if len(plain) == len(items) else None


def _at_call(error: ForgatherError, node: Call, path: GraphPath) -> Diagnostic:
    found = error.diagnostic
    return replace(found, span=found.span or node.span, path=found.path or format_path(path))


class _Judge:
    """One call: its arguments against the signatures of its constructor."""

    def __init__(self, called: Called, callee: Callee, calls: dict[int, Called], reader: Reader) -> None:
        self._path, self._node, self._callee = called.path, called.node, callee
        self._calls = calls
        self._reader = reader
        self.texts: list[Scalar] = []
        self._entries = {str(entry.key): entry for entry in (*self._node.kwargs, *self._node.named_latent_args)}

    def findings(self) -> Iterator[Diagnostic]:
        """Yields what keeps the call from working."""
        values = {name: entry.value for name, entry in self._entries.items()}
        # What a variable adds is not known.
        partial = self._node.kind is CallKind.PARTIAL or self._node.spread is not None
        signatures = self._callee.signatures
        found = mismatches(signatures, self._callee.name, self._node.args, values, partial=partial)
        yield from (self._mismatch(one) for one in found)
        if self._node.kind is CallKind.META:
            return
        if found:
            yield from self._of_known_keywords(signatures)
            return
        fitting = [bound for s in signatures if (bound := binds(s, self._node.args, values, partial=partial))]
        # Overloads are a union: a value is wrong where every way to call it says so.
        reports = [list(self._of_types(bound)) for bound in fitting]
        if all(reports):
            yield from reports[0]
        misspelt = [list(self._swallowed(bound)) for bound in fitting]
        if all(misspelt):
            yield from misspelt[0]

    def _swallowed(self, bound: BoundArguments) -> Iterator[Diagnostic]:
        """Yields keywords that end among the further ones (`**options`) because of a slip in their names."""
        parameters = bound.signature.parameters.values()
        further = next((p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD), None)
        named = [p.name for p in parameters if p.kind in _NAMED]
        for keyword in bound.arguments.get(further, ()) if further else ():
            known = keyword_for(keyword, named) if keyword not in self._callee.other_names else keyword
            close = [known] if known else close_matches(keyword, named, n=1, cutoff=_A_SLIP)
            if close and close != [keyword]:
                yield Diagnostic(
                    code="FG204",
                    message=f"{self._callee.name} has no parameter {keyword!r}, and takes it for a keyword of its own",
                    severity=Severity.WARNING,
                    span=self._entries[keyword].span or self._node.span,
                    path=format_path(self._path),
                    hint=f"did you mean {close[0]!r}?",
                )

    def _of_known_keywords(self, signatures: Sequence[Signature]) -> Iterator[Diagnostic]:
        """Yields wrong values of keywords that are there, in a call that has other faults too."""
        if len(signatures) > 1:
            return
        for name, entry in self._entries.items():
            parameter = signatures[0].parameters.get(name)
            if parameter is not None and parameter.kind in _NAMED:
                yield from self._value(parameter, name, entry.value, Key(entry.key), entry)

    def _mismatch(self, found: Mismatch) -> Diagnostic:
        entry = self._entries.get(found.keyword or "")
        excess = None if found.position is None else self._node.args[found.position].span
        return Diagnostic(
            code=found.code,
            message=found.message,
            span=(entry.span if entry else excess) or self._node.span,
            path=format_path(self._path),
            hint=found.hint,
        )

    def _of_types(self, bound: BoundArguments) -> Iterator[Diagnostic]:
        for name, value in bound.arguments.items():
            parameter = bound.signature.parameters[name]
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                continue
            if name in self._entries and self._entries[name].value is value:
                entry = self._entries[name]
                yield from self._value(parameter, name, value, Key(entry.key), entry)
            else:
                position = next(at for at, arg in enumerate(self._node.args) if arg is value)
                yield from self._value(parameter, name, value, Index(position), None)

    def _value(
        self, parameter: Parameter, name: str, node: Node, step: Key | Index, entry: Entry | None
    ) -> Iterator[Diagnostic]:
        if isinstance(node, Scalar) and isinstance(node.value, str) and asks_for_text(parameter):
            self.texts.append(node)
        annotation = parameter.annotation
        if not isinstance(annotation, Annotation):
            return
        given = given_by(node, self._known(node))
        if given is None:
            return
        if annotation.accepts is not None:
            # `lr: float = None` means an optional one, whatever it says.
            more = {"none"} if getattr(parameter.default, "value", ...) is None else set[str]()
            found = misfit(given, annotation.accepts | more, self._is_callable)
        else:
            # Bases of a tensor are not written in Python, so that nothing is known of what its annotation accepts.
            found = list_for_tensor(node, annotation.text) if self._node.constructor.startswith("torch.") else None
        if found is not None:
            # What an alias names was written elsewhere: that is the place to mend.
            written = node.span if entry is None or entry.alias else entry.span
            yield Diagnostic(
                code=found.code,
                message=_message(self._callee.name, name, annotation.text, given, found),
                span=written or self._node.span,
                path=format_path((*self._path, step)),
                hint=found.hint,
            )

    def _known(self, node: Node) -> Callee | None:
        known = self._calls.get(id(node))
        return known.callee if known else None

    def _is_callable(self, instance: str) -> bool | None:
        """Returns whether instances of a class can be called; None where that is unknown."""
        try:
            callee = self._reader.read(instance)
        except ForgatherError:
            return None
        return callee.callable_instance if isinstance(callee, Callee) else None


def _message(callee: str, name: str, wanted: str, given: Given, found: Misfit) -> str:
    wanted = " ".join(wanted.split())
    wanted = wanted if len(wanted) <= 80 else wanted[:77] + "..."
    return f"{callee} takes {found.wanted or wanted} as {name!r}, and gets {given.described}"
