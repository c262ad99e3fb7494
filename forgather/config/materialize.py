"""Builds the objects of a graph.

The inputs are a graph, target names and values for `!var`; the output is the built targets. Invariants: each call of
`materialize` is one construction, with a state of its own that is never written to a node; in one construction, all
aliases of a value are one object, and a factory is called again at every occurrence; all constructors are imported and
their arguments are checked before the first constructor is called, so that a misspelt name is found before an hour of
loading data; `before_calls` runs once, before the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Names
from dataclasses import replace
from typing import Any

from forgather.config.calc import evaluate
from forgather.config.graph import (
    SPREAD,
    Calc,
    Call,
    CallKind,
    Container,
    Env,
    Graph,
    Lookup,
    Node,
    Scalar,
    Var,
    is_one_object,
)
from forgather.config.lint.argument_check import mismatch
from forgather.config.partials import (
    CallPlace,
    FreshCall,
    FreshContainer,
    PartialObject,
    Recipe,
    assemble,
    call_noted,
    given_keywords,
    note_once,
)
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.resolve import Resolver
from forgather.config.traverse import children, entries, members, roots, shared_nodes
from forgather.config.yaml.events import Refusal
from forgather.errors import (
    ArgumentError,
    BuildNote,
    ForgatherError,
    GraphError,
    ResolveError,
    UnboundVarError,
    nearest,
)
from forgather.redaction import remember
from forgather.source import Span

Hook = Callable[[Callable[..., Any]], Callable[..., Any]]
BeforeCalls = Callable[[Callable[[Node, GraphPath], Any]], None]


def materialize(
    graph: Graph,
    *,
    targets: Names[str] | None = None,
    variables: Mapping[str, object] | None = None,
    project_dir: str = ".",
    resolver: Resolver | None = None,
    hook: Hook | None = None,
    before_calls: BeforeCalls | None = None,
) -> dict[str, object]:
    """Returns the built targets, by name.

    Args:
        graph: the config.
        targets: the names of the targets to build; None to build all.
        variables: the values of `!var` and of names in `!calc`, by name.
        project_dir: the folder to which file imports are relative.
        resolver: the object that finds constructors; if it is None, a `Resolver` for `project_dir`.
        hook: a function that is called with each constructor; its result is called in place of the constructor.
        before_calls: a function that is called once, before the first constructor, with a function that returns the
            object of a node; it is not called if no constructor is called.

    Raises:
        UnknownTargetError: FG302 if the graph does not have a target of that name.
        UnboundVarError: FG301, FG303 or FG306 if a `!var`, an `!env` or a name in `!calc` has neither value nor
            default.
        ResolveError: FG32x if a constructor cannot be found, called or trusted.
        ArgumentError: FG204, FG208 or FG209 if arguments do not fit a constructor.
        GraphError: FG304 or FG305 if a `!calc` cannot be evaluated; FG307 if a search path is wrong.
        Exception: any exception of a constructor, with a `BuildNote`.
    """
    wanted = list(graph.targets) if targets is None else list(targets)
    tops = [(name, graph.target(name).value) for name in wanted]
    construction = _Construction(graph, dict(variables or {}), resolver or Resolver(project_dir), hook)
    construction.before_calls = before_calls
    construction.look_ahead(tops)
    return {name: construction.build(node, (Key(name),)) for name, node in tops}


class _Construction:
    """The state of one construction: its inputs, and the objects that were built so far."""

    def __init__(
        self,
        graph: Graph,
        variables: dict[str, object],
        resolver: Resolver,
        hook: Hook | None,
    ) -> None:
        self._graph = graph
        self._variables = variables
        self._resolver = resolver
        self._hook = hook
        # A target may be read by name in `!calc`, so a root value counts as aliased even if it has one parent.
        tops = [node for _, node in roots(graph)]
        self._shared = shared_nodes(tops) | {id(node) for node in tops}
        self._built: dict[int, Any] = {}
        self._open: list[int] = []
        self._fitting: dict[int, Callable[..., Any]] = {}
        self._recipes: dict[int, Any] = {}
        self._live: dict[int, bool] = {}
        self.before_calls: BeforeCalls | None = None

    def build(self, node: Node, path: GraphPath) -> Any:
        """Returns the object of a node."""
        # Without a memo: an immutable value has no identity to keep.
        if isinstance(node, Scalar):
            return node.value
        key = id(node)
        if key in self._built:
            return self._built[key]
        # `!calc` reads targets by name, which can lead back to a target that is being built.
        self._open.append(key)
        try:
            value = self._make(node, path)
        finally:
            self._open.pop()
        if self._remembers(node):
            self._built[key] = value
        return value

    def look_ahead(self, tops: list[tuple[str, Node]]) -> None:
        """Imports every constructor that will be needed and checks its arguments; no constructor is called."""
        seen: set[int] = set()
        stack: list[tuple[GraphPath, Node]] = [((Key(name),), node) for name, node in reversed(tops)]
        while stack:
            path, node = stack.pop()
            # A variable with a value replaces its default, whose constructors are then not needed.
            if id(node) in seen or self._is_given(node):
                continue
            seen.add(id(node))
            # A search path that is computed would need a call, which must not happen yet.
            if isinstance(node, Call) and not isinstance(node.submodule_searchpath, (Call, Lookup)):
                function = self._resolve(node, path)
                if node.kind is CallKind.META:
                    continue
                if node.spread is None:
                    self._check(function, node, path, node.args, {str(entry.key): entry for entry in entries(node)})
                    self._fitting[id(node)] = function
            stack.extend([((*path, step), child) for step, child in children(node)][::-1])

    def _is_given(self, node: Node) -> bool:
        if isinstance(node, Var):
            return node.variable in self._variables
        return isinstance(node, Env) and node.variable in os.environ

    def _remembers(self, node: Node) -> bool:
        return is_one_object(node, is_aliased=id(node) in self._shared)

    def _make(self, node: Node, path: GraphPath) -> Any:
        if isinstance(node, Call):
            return self._call(node, path)
        if isinstance(node, Container):
            values = tuple(self.build(value, (*path, step)) for step, value in members(node))
            return assemble(node.kind, _keys(node), values)
        if isinstance(node, Var):
            return self._variable(node, path)
        if isinstance(node, Env):
            return self._environment(node, path)
        if isinstance(node, Calc):
            return self._calculate(node, path)
        raise TypeError(f"unknown node {type(node).__name__}")

    # calls

    def _latent(self, node: Call, path: GraphPath, of: Callable[[Node, GraphPath], Any]) -> dict[str, Any]:
        """Returns the keyword arguments of `latent_args`, which are merged last."""
        if node.spread is None:
            return {str(entry.key): of(entry.value, (*path, Key(entry.key))) for entry in node.latent_args}
        return given_keywords(self.build(node.spread, (*path, Key(SPREAD))), node, path)

    def _call(self, node: Call, path: GraphPath) -> Any:
        fitting = self._fitting.get(id(node))
        function = fitting or self._resolve(node, path)
        place = CallPlace(node.constructor, format_path(path), node.span)
        self._begin()
        if node.kind is CallKind.META:
            return call_noted(function, node.args, {str(entry.key): entry.value for entry in entries(node)}, place)
        of = self._recipe if node.kind is CallKind.PARTIAL else self.build
        args = tuple(of(value, (*path, Index(position))) for position, value in enumerate(node.args))
        kwargs = {str(entry.key): of(entry.value, (*path, Key(entry.key))) for entry in node.kwargs}
        latent = self._latent(node, path, of)
        if fitting is None:
            self._check(function, node, path, args, {**kwargs, **latent})
        try:
            self._resolver.guard.arguments(function, args, {**kwargs, **latent})
        except ResolveError as error:
            error.span, error.path = _written(node, error.argument or "") or node.span, format_path(path)
            raise
        if node.kind is CallKind.PARTIAL:
            return PartialObject(function, args, kwargs, latent, place, self._resolver.guard.later(function))
        try:
            return call_noted(function, args, {**kwargs, **latent}, place)
        except ForgatherError as error:
            # An error of our own constructors names the argument; its line is better than that of the call.
            if error.span is None and error.argument is not None:
                error.span = _written(node, error.argument)
                error.path = error.path if error.span is None else format_path(path)
            raise

    def _begin(self) -> None:
        # Cleared first, because the callback may build nodes whose calls come here again.
        begin, self.before_calls = self.before_calls, None
        if begin is not None:
            begin(self.build)

    def _resolve(self, node: Call, path: GraphPath) -> Callable[..., Any]:
        searchpath = self._searchpath(node, path)
        try:
            function = self._resolver.resolve(node.constructor, searchpath)
        except ResolveError as error:
            if error.span is None:
                error.span, error.path = node.span, format_path(path)
            raise
        except (Exception, SystemExit) as error:
            # A module that exits while it is imported, as scripts without a main guard do, gets the place too.
            note_once(error, BuildNote(node.constructor, format_path(path), node.span, act="importing"))
            raise
        if not callable(function):
            message = (
                f"{node.constructor!r} is {type(function).__name__} {str(function)[:60]!r}, which cannot be called"
            )
            raise ResolveError(
                message, code="FG323", span=node.span, path=format_path(path), hint="name a class or function"
            )
        return self._hook(function) if self._hook else function

    def _searchpath(self, node: Call, path: GraphPath) -> tuple[str, ...]:
        if node.submodule_searchpath is None:
            return ()
        value = self.build(node.submodule_searchpath, (*path, Key("submodule_searchpath")))
        folders = (value,) if isinstance(value, (str, os.PathLike)) else value
        # A string is a sequence of strings too, so the single folder was handled before.
        if isinstance(folders, (list, tuple)) and all(isinstance(folder, (str, os.PathLike)) for folder in folders):
            return tuple(os.fspath(folder) for folder in folders)
        raise GraphError(
            f"submodule_searchpath is {str(value)[:80]!r}",
            code="FG307",
            span=node.submodule_searchpath.span,
            path=format_path(path),
            hint="give a folder or a list of folders",
        )

    def _check(
        self,
        function: Callable[..., Any],
        node: Call,
        path: GraphPath,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        # Messages use the short name that users know, not the whole path.
        name = node.constructor.rpartition(":")[2].rpartition(".")[2]
        found = mismatch(function, name, args, kwargs, partial=node.kind is CallKind.PARTIAL)
        if found is None:
            return
        written = {entry.key: entry for entry in entries(node)}
        span = written[found.keyword].span if found.keyword in written else node.span
        raise ArgumentError(
            found.message,
            code=found.code,
            span=span or node.span,
            path=format_path(path),
            hint=found.hint,
            found=found.keyword,
            expected=found.expected or None,
        )

    # values found at construction

    def _variable(self, node: Var, path: GraphPath) -> Any:
        if node.variable in self._variables:
            return self._variables[node.variable]
        if node.default is not None:
            return self.build(node.default, (*path, Key("default")))
        hint = nearest(node.variable, list(self._variables)) or (
            f"give it a value ({node.variable}=... in Python, --var {node.variable}=... with construct), or a default"
        )
        raise UnboundVarError(f"!var {node.variable!r} has no value", span=node.span, path=format_path(path), hint=hint)

    def _environment(self, node: Env, path: GraphPath) -> Any:
        value = os.environ.get(node.variable)
        if value is not None:
            # The value may be secret: output and logs redact remembered values.
            remember(value, node.variable)
            return value
        if node.default is not None:
            return self.build(node.default, (*path, Key("default")))
        message = f"the environment variable {node.variable!r} is not set"
        hint = f"export {node.variable}=..., or give it a default"
        raise UnboundVarError(message, code="FG303", span=node.span, path=format_path(path), hint=hint)

    def _calculate(self, node: Calc, path: GraphPath) -> Any:
        try:
            return evaluate(node.expression, lambda name: self._named(name, node, path))
        except Refusal as refusal:
            raise refusal.located(node.span, format_path(path)) from None

    def _named(self, name: str, node: Calc, path: GraphPath) -> Any:
        if name in self._variables:
            return self._variables[name]
        entry = self._graph.targets.get(name)
        if entry is None:
            hint = nearest(name, [*self._variables, *self._graph.targets]) or f"pass {name}=..., or define a target"
            message = f"!calc reads {name!r}, which is neither a variable nor a target"
            raise UnboundVarError(message, code="FG306", span=node.span, path=format_path(path), hint=hint)
        # Checked again at construction, because a name may be a variable that the static check does not know.
        if id(entry.value) in self._open:
            message = f"!calc reads the target {name!r} while that is being built from it"
            hint = "break the cycle with a !var or a plain value"
            raise GraphError(message, code="FG304", span=node.span, path=format_path(path), hint=hint)
        return self.build(entry.value, (Key(name),))

    # values that each call of a partial builds

    def _recipe(self, node: Node, path: GraphPath) -> Any:
        """Returns a recipe if the node contains a factory; otherwise the object of the node."""
        if not self._is_live(node):
            return self.build(node, path)
        # By node, so that a shared container stays one recipe, and one object per call.
        if id(node) not in self._recipes:
            self._recipes[id(node)] = self._new_recipe(node, path)
        return self._recipes[id(node)]

    def _new_recipe(self, node: Node, path: GraphPath) -> Recipe | Any:
        if isinstance(node, Call):
            # Resolved and checked as a partial now, and called once per call of the partial around it.
            fresh = self._call(replace(node, kind=CallKind.PARTIAL), path)
            return FreshCall(fresh.func, fresh.args, fresh.keywords, fresh.latent, fresh._place, fresh._check)
        if isinstance(node, Container):
            parts = tuple(self._recipe(value, (*path, step)) for step, value in members(node))
            return FreshContainer(node.kind, _keys(node), parts, self._remembers(node))
        default = getattr(node, "default", None)
        return self._recipe(default, (*path, Key("default"))) if default is not None else self.build(node, path)

    def _is_live(self, node: Node) -> bool:
        if id(node) not in self._live:
            self._live[id(node)] = self._holds_factory(node)
        return self._live[id(node)]

    def _holds_factory(self, node: Node) -> bool:
        if isinstance(node, Call):
            # Any other call inside a partial is built once, with everything in it.
            return node.kind is CallKind.FACTORY
        if self._is_given(node):
            return False
        return any(self._is_live(child) for _, child in children(node))


def _written(node: Call, argument: str) -> Span | None:
    first, _, inner = argument.partition(".")
    for entry in entries(node):
        if str(entry.key) == first:
            nested = _inside(entry.value, inner) if inner else None
            # The value of an alias is written in another place, where it has to be fixed.
            return nested or (entry.value.span if entry.alias and not inner else None) or entry.span
    return None


def _inside(node: Node, inner: str) -> Span | None:
    if isinstance(node, Call):
        return _written(node, inner)
    if isinstance(node, Container) and inner.isdigit():
        held = members(node)
        if int(inner) < len(held):
            key, value = held[int(inner)]
            written = (entry.span for entry in entries(node) if isinstance(key, Key) and entry.key == key.name)
            return next(written, None) or value.span
    return None


def _keys(node: Container) -> tuple[Any, ...]:
    return tuple(step.name for step, _ in members(node) if isinstance(step, Key))
