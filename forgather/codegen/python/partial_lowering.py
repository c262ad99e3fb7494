"""The lowering of `!partial`: to `functools.partial` if that has the same effect, else to a local function.

The input is the node of a partial; the output is the expression of the callable. Each call of the partial builds the
factories among its arguments, and the containers that contain a factory: the local function builds these nodes. All
other nodes are built once, before the function. `latent_args` override the arguments of a call, which
`functools.partial` cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forgather.codegen.python.context import SPREAD_MARK, LoweringContext, Part, cannot
from forgather.codegen.python.ir import Expression, Statement, as_primary, bracketed, call, name, quoted
from forgather.codegen.python.names import name_for
from forgather.config.graph import Call, Container, Env, Lookup, Node, Scalar, Var
from forgather.config.path import GraphPath, Key
from forgather.config.traverse import children, members


@dataclass(frozen=True, slots=True)
class BuiltNodes:
    """The nodes that have been built before the local functions of partials.

    Args:
        fixed: the variable of each node that is built once, by the id of the node.
        callees: for each call, the variable that contains the called object; for each `!env`, the variable that
            contains the value of the environment variable. The keys are the ids of the nodes.
    """

    fixed: dict[int, Expression]
    callees: dict[int, Expression]

    def copy(self) -> BuiltNodes:
        """Returns a copy that can be changed independently."""
        return BuiltNodes(dict(self.fixed), dict(self.callees))

    def updated(self, other: BuiltNodes) -> BuiltNodes:
        """Returns the union of two sets of built nodes; for a node in both, the variable in `other` is used."""
        return BuiltNodes(self.fixed | other.fixed, self.callees | other.callees)


class PartialLowering:
    """The generator of partials within one generated function.

    Args:
        context: the state of the generated function.
    """

    def __init__(self, context: LoweringContext) -> None:
        self._context = context
        self._known = BuiltNodes({}, {})
        self._certain = BuiltNodes({}, {})
        # The state of the partial's function that is being written:
        # - for each variable, the nodes that are built before the function if the variable has no value;
        # - the variables that have no value at the current place;
        # - for each container, its expression and the scope in which that is valid.
        self._inside: dict[int, BuiltNodes] = {}
        self._scope: tuple[int, ...] = ()
        self._local: dict[int, tuple[Expression, tuple[int, ...]]] = {}
        # All partials share the plain containers inside factories, even if the first partial is in a branch.
        self._containers: dict[int, Expression] = {}

    def partial(self, node: Call, path: GraphPath) -> Expression:
        """Returns the expression of a partial.

        Args:
            node: the partial.
            path: the path of the partial in the graph.

        Raises:
            GraphError: FG331 or FG332 if the partial cannot be written as Python.
        """
        values = [*node.args, *(entry.value for entry in node.kwargs)]
        if node.latent_args or any(self._context.reach.is_built_per_call(value) for value in values):
            return self._function(node, path)
        context = self._context
        callee = context.bound_callee(node, path)
        parts = context.sequence(context.arguments(node, path, context.build))
        count = len(node.args)
        keywords = context.keywords([(part.before, part.expression) for part in parts[count:]])
        positional = [("", part.expression) for part in parts[:count]]
        return call(context.imports.use("partial"), [("", callee), *positional, *keywords], pure=True)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager that hides the nodes which were built inside another local function.

        The variables of these nodes do not exist in the function that is generated in the `with` block.
        """
        context = self._context
        # Outside every function and branch, everything that is known has certainly been built.
        if context.uncertain == 1:
            self._certain = self._known.copy()
        kept, self._known = self._known, self._certain.copy()
        yield
        self._known = kept

    # what is built once

    def _function(self, node: Call, path: GraphPath) -> Expression:
        context = self._context
        known, kept = self._known.copy(), (self._inside, self._scope, self._local)
        self._inside, self._scope, self._local = {}, (), {}
        self._fix_call(node, path)
        function = context.names.free(name_for(context.graph, node, path))
        callee = self._known.callees[id(node)]
        block, top = context.block, context.top
        context.block = context.top = []
        returned = self._returned(node, path, callee)
        inner = [*context.block, Statement("return ", returned)]
        context.block, context.top = block, top
        context.imports.use("wraps")
        heads = (f"@wraps({callee.text}, updated=())", f"def {function}(*args, **kwargs):")
        context.block.append(Statement(heads=heads, body=inner))
        self._add_keywords(function, node)
        # The variables of a branch do not exist after the branch.
        if context.uncertain:
            self._known = known
        self._inside, self._scope, self._local = kept
        return name(function)

    def _add_keywords(self, function: str, node: Call) -> None:
        """Adds the attribute `keywords`, which `functools.partial` has and some libraries read."""
        live = self._context.reach.is_built_per_call
        values = [(entry.key, entry.value) for entry in node.kwargs if not live(entry.value)]
        members = [(f"{quoted(str(key))}: ", self._per_call(value, ())) for key, value in values]
        if members:
            display = bracketed("{", members, "}", pure=True)
            self._context.block.append(Statement(f"{function}.keywords = ", display))

    def _fix_call(self, node: Call, path: GraphPath) -> None:
        context = self._context
        if id(node) not in self._known.callees:
            self._known.callees[id(node)] = context.bind(context.callee(node, path), "function")
        for step, value in children(node):
            # The folders are built together with the called object.
            if value is not node.submodule_searchpath:
                self._fix(value, (*path, step))

    def _fix(self, node: Node, path: GraphPath) -> None:
        """Builds the parts of a node that all calls of the partial share; their statements come before the function."""
        context = self._context
        if isinstance(node, Scalar) or id(node) in self._known.fixed:
            return
        if not context.reach.is_built_per_call(node):
            self._known.fixed[id(node)] = context.bind(self._once(node, path), name_for(context.graph, node, path))
        elif isinstance(node, Call):
            self._fix_call(node, path)
        elif isinstance(node, Container):
            if context.reach.is_sometimes_per_call(node):
                message = "a container of a !partial contains a factory only in the default of a variable"
                raise cannot("FG332", message, node, path)
            for step, value in members(node):
                self._fix(value, (*path, step))
        elif isinstance(node, Lookup) and node.default is not None:
            self._fix_default(node, node.default, (*path, Key("default")))

    def _once(self, node: Node, path: GraphPath) -> Expression:
        context = self._context
        if not isinstance(node, Container) or context.reach.is_one_object(node) or context.reach.places[id(node)] < 2:
            return context.build(node, path)
        if id(node) not in self._containers:
            if not context.uncertain:
                return context.build(node, path)
            self._containers[id(node)] = context.local_lazy(node, path, lambda: context.make_deferred(node, path))
        return self._containers[id(node)]

    def _fix_default(self, node: Lookup, default: Node, path: GraphPath) -> None:
        context = self._context
        if isinstance(node, Env) and id(node) not in self._known.callees:
            self._known.callees[id(node)] = context.environment_value(node)
        test, _ = self._test(node)
        known = self._known.copy()
        block, context.block = context.block, []
        context.uncertain += 1
        self._fix(default, path)
        context.uncertain -= 1
        inner, context.block = context.block, block
        self._inside[id(node)], self._known = self._known, known
        if inner:
            context.drops = True
            context.block.append(Statement(heads=(f"if {test}:",), body=inner))

    def _test(self, node: Lookup) -> tuple[str, Expression]:
        """Returns the condition under which a variable is not given, and the expression of its value."""
        context = self._context
        if isinstance(node, Var):
            context.imports.use("UNSET")
            given = name(context.parameters[node.variable].name)
            return f"{given.text} is UNSET", given
        found = self._known.callees[id(node)]
        return f"{found.text} is None", found

    # what each call builds

    def _returned(self, node: Call, path: GraphPath, callee: Expression) -> Expression:
        context, count = self._context, len(node.args)
        parts = context.arguments(node, path, self._per_call)
        for entry, part in zip(node.kwargs, parts[count:], strict=False):
            if context.reach.is_built_per_call(entry.value):
                self._unless_given(str(entry.key), part)
        context.sequence(parts)
        positional = [("", part.expression) for part in parts[:count]]
        own = [(f"{quoted(part.before)}: ", part.expression) for part in parts[count : count + len(node.kwargs)]]
        # In a dict display a repeated key keeps its first position and gets the last value.
        keys = {entry.key for entry in node.kwargs}
        last = [(part.before, part.expression) for part in parts[count + len(node.kwargs) :]]
        latent = [self._latent(key, value, again=key in keys) for key, value in last]
        members = [*own, ("**", name("kwargs")), *latent]
        keywords = name("kwargs") if len(members) == 1 else bracketed("{", members, "}", pure=True)
        return call(callee, [*positional, ("*", name("args")), ("**", keywords)])

    def _latent(self, key: str, value: Expression, *, again: bool) -> tuple[str, Expression]:
        if key == SPREAD_MARK:
            return "**", as_primary(value)
        member = (f"{quoted(key)}: ", value)
        return ("**", bracketed("{", [member], "}", pure=True)) if again else member

    def _unless_given(self, key: str, part: Part) -> None:
        make, context, word = part.make, self._context, quoted(key)
        given = Expression(f"kwargs.get({word})")
        part.make = lambda: context.unless(f"{word} not in kwargs", given, key, make)

    def _per_call(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node inside the local function of a partial."""
        context = self._context
        if isinstance(node, Scalar):
            return context.literal(node.value, path)
        if id(node) in self._known.fixed:
            return self._known.fixed[id(node)]
        if isinstance(node, Call):
            parts = context.sequence(context.arguments(node, path, self._per_call))
            return context.applied(node, path, self._known.callees[id(node)], parts)
        if isinstance(node, Container):
            return self._container(node, path)
        if not isinstance(node, Lookup) or node.default is None:
            raise TypeError(f"{type(node).__name__} is not built for each call")
        default, inside = node.default, (*path, Key("default"))
        test, given = self._test(node)
        return context.unless(test, given, node.variable, lambda: self._default(node, default, inside))

    def _default(self, node: Node, default: Node, path: GraphPath) -> Expression:
        known, scope = self._known, self._scope
        self._known, self._scope = self._inside[id(node)].updated(known), (*scope, id(node))
        expression = self._per_call(default, path)
        self._known, self._scope = known, scope
        return expression

    def _container(self, node: Container, path: GraphPath) -> Expression:
        context = self._context
        if not context.reach.is_reused(node):
            return context.container(node, path, self._per_call)
        if id(node) not in self._local:
            found = context.local_lazy(node, path, lambda: context.container(node, path, self._per_call))
            self._local[id(node)] = found, self._scope
        expression, scope = self._local[id(node)]
        if self._scope[: len(scope)] != scope:
            raise cannot("FG332", "a container of a !partial is shared by defaults of several variables", node, path)
        return expression
