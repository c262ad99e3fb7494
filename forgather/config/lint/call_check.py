"""Checks the calls of a graph against the signatures of their constructors, without importing anything.

The inputs are a graph and a reader of signatures; the output is findings, unchecked calls, and the calls with their
callees. Invariants: an error is reported only if the call would fail for the same reason, or if the simple type of a
literal differs from the annotation; a call with an unknown signature is listed as unchecked, and no signature is
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import BoundArguments, Parameter, Signature
from typing import TYPE_CHECKING, NamedTuple

from forgather.aliases import keyword_for
from forgather.config.graph import Call, CallKind, Entry, Graph, Node, Scalar
from forgather.config.graph import Sequence as SequenceNode
from forgather.config.lint.argument_check import (
    KnownValue,
    Misfit,
    Mismatch,
    asks_for_text,
    binds,
    known_value,
    list_for_tensor,
    misfit,
    mismatches,
)
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.traverse import all_nodes, roots, walk
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.signatures.results import Annotation, Callee, Unknown
from forgather.source import Span
from forgather.spelling import close_matches

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
# The similarity of two names of five letters or more that differ by one letter.
_A_SLIP = 0.89
# So many errors are usually one mistake that was made many times, and reading each constructor takes a millisecond.
MOST_UNKNOWN = 500
_AFTER_MANY = f"{MOST_UNKNOWN} calls before it have errors already"
_GIVEN_UNBUILT = "it is an argument of !meta, which decides whether and how it is built"


class Unchecked(NamedTuple):
    """A call that could not be checked without running code.

    Args:
        path: the path of the call in the graph.
        constructor: the name of the constructor.
        reason: the reason why the signature is not known.
        span: the place of the call in the user's file.
    """

    path: str
    constructor: str
    reason: str
    span: Span | None = None


class Called(NamedTuple):
    """A call and its callee; the callee is None if it is not known."""

    path: GraphPath
    node: Call
    callee: Callee | None


class Judgement(NamedTuple):
    """The result of checking the calls of a graph.

    Args:
        findings: the errors and warnings, in the order of the graph.
        unchecked: the calls whose signature is not known.
        calls: the calls that are not certain to fail, by `id(node)`.
        texts: the scalars that are arguments of string parameters, where a text that looks like a number is right.
    """

    findings: tuple[Diagnostic, ...]
    unchecked: tuple[Unchecked, ...]
    calls: dict[int, Called]
    texts: tuple[Scalar, ...] = ()


def check_calls(graph: Graph, reader: Reader) -> Judgement:
    """Checks every call in targets and definitions once, and returns the result.

    Args:
        graph: the config.
        reader: the reader of signatures from source.
    """
    findings: list[Diagnostic] = []
    unchecked: list[Unchecked] = []
    calls: dict[int, Called] = {}
    texts: list[Scalar] = []
    # A node that is an argument of !meta and also used elsewhere is built, so it is checked.
    built = {id(node) for _, node in walk(roots(graph), unbuilt=False)}
    for path, node in all_nodes(graph):
        if not isinstance(node, Call):
            continue
        try:
            # Later calls are listed as unchecked, not silently skipped.
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
        # All calls first: an argument may be a call that comes later in the graph.
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
    """Returns the folders of a search path; None if a folder is not a literal text."""
    if node is None:
        return ()
    items = node.items if isinstance(node, SequenceNode) else (node,)
    plain = [item.value for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]
    return tuple(plain) if len(plain) == len(items) else None


def _at_call(error: ForgatherError, node: Call, path: GraphPath) -> Diagnostic:
    found = error.diagnostic
    return replace(found, span=found.span or node.span, path=found.path or format_path(path))


class _Judge:
    """The check of the arguments of one call against the signatures of its constructor."""

    def __init__(self, called: Called, callee: Callee, calls: dict[int, Called], reader: Reader) -> None:
        self._path, self._node, self._callee = called.path, called.node, callee
        self._calls = calls
        self._reader = reader
        self.texts: list[Scalar] = []
        self._entries = {str(entry.key): entry for entry in (*self._node.kwargs, *self._node.named_latent_args)}

    def findings(self) -> Iterator[Diagnostic]:
        """Yields the errors and warnings of the call."""
        values = {name: entry.value for name, entry in self._entries.items()}
        # `latent_args: !var` adds keywords that are known only at construction, so none can be missing before.
        partial = self._node.kind is CallKind.PARTIAL or self._node.spread is not None
        signatures = self._callee.signatures
        found = mismatches(signatures, self._callee.name, self._node.args, values, partial=partial)
        yield from (self._mismatch(one) for one in found)
        # A `!meta` gets nodes, so the types of its values do not matter.
        if self._node.kind is CallKind.META:
            return
        if found:
            yield from self._of_known_keywords(signatures)
            return
        fitting = [bound for s in signatures if (bound := binds(s, self._node.args, values, partial=partial))]
        # With overloads, a value is wrong only if every overload that accepts the names rejects its type.
        reports = [list(self._of_types(bound)) for bound in fitting]
        if all(reports):
            yield from reports[0]
        misspelt = [list(self._swallowed(bound)) for bound in fitting]
        if all(misspelt):
            yield from misspelt[0]

    def _swallowed(self, bound: BoundArguments) -> Iterator[Diagnostic]:
        """Yields a warning for each keyword that only `**options` accepts and that is similar to a parameter's name."""
        parameters = bound.signature.parameters.values()
        further = next((p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD), None)
        named = [p.name for p in parameters if p.kind in _NAMED]
        for keyword in bound.arguments.get(further, ()) if further else ():
            # `other_names` are keywords that a class accepts by **options on purpose, such as those of its base class.
            known = keyword_for(keyword, named) if keyword not in self._callee.other_names else keyword
            close = [known] if known else close_matches(keyword, named, n=1, cutoff=_A_SLIP)
            if close and close != [keyword]:
                yield Diagnostic(
                    code="FG204",
                    message=f"{self._callee.name} has no parameter {keyword!r} and accepts it as a further keyword",
                    severity=Severity.WARNING,
                    span=self._entries[keyword].span or self._node.span,
                    path=format_path(self._path),
                    hint=f"did you mean {close[0]!r}?",
                )

    def _of_known_keywords(self, signatures: Sequence[Signature]) -> Iterator[Diagnostic]:
        """Yields type errors for the known keywords of a call that also has unknown or missing arguments."""
        # With overloads it is unknown which one was meant, and a wrong guess would be a false error.
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
                # By identity, because nodes do not compare by value.
                position = next(at for at, arg in enumerate(self._node.args) if arg is value)
                yield from self._value(parameter, name, value, Index(position), None)

    def _value(
        self, parameter: Parameter, name: str, node: Node, step: Key | Index, entry: Entry | None
    ) -> Iterator[Diagnostic]:
        # `name: no` is right for a parameter that takes strings; the lint FG222 is dropped for these.
        if isinstance(node, Scalar) and isinstance(node.value, str) and asks_for_text(parameter):
            self.texts.append(node)
        annotation = parameter.annotation
        if not isinstance(annotation, Annotation):
            return
        called = self._calls.get(id(node))
        given = known_value(node, called.callee if called else None)
        if given is None:
            return
        if annotation.accepts is not None:
            # `lr: float = None` means an optional parameter, although the annotation does not say so.
            more = {"none"} if getattr(parameter.default, "value", ...) is None else set[str]()
            found = misfit(given, annotation.accepts | more, self._is_callable)
        else:
            # The bases of torch.Tensor are not written in Python, so the reader cannot tell what `Tensor` accepts.
            found = list_for_tensor(node, annotation.text) if self._node.constructor.startswith("torch.") else None
        if found is not None:
            # The value of an alias is written in another place, where it has to be fixed.
            written = node.span if entry is None or entry.alias else entry.span
            yield Diagnostic(
                code=found.code,
                message=_message(self._callee.name, name, annotation.text, given, found),
                span=written or self._node.span,
                path=format_path((*self._path, step)),
                hint=found.hint,
            )

    def _is_callable(self, instance: str) -> bool | None:
        """Returns whether instances of a class can be called; None if that is unknown."""
        try:
            callee = self._reader.read(instance)
        except ForgatherError:
            return None
        return callee.callable_instance if isinstance(callee, Callee) else None


def _message(callee: str, name: str, wanted: str, given: KnownValue, found: Misfit) -> str:
    wanted = " ".join(wanted.split())
    # Annotations of libraries can be pages long.
    wanted = wanted if len(wanted) <= 80 else wanted[:77] + "..."
    return f"{callee} takes {found.wanted or wanted} as {name!r} but gets {given.described}"
