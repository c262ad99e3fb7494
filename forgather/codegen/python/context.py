"""The state that all parts of the lowering share, and the lowering of values, containers and calls to expressions.

The input is the nodes of a graph; the output is Python expressions. Statements that have to run before an expression
are added to the current block. Calls are written in the order in which construction makes them. `build` is abstract:
`Lowering` implements it for each kind of node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, isnan

from forgather.codegen.python.builtin_calls import PARAMETERS, expanded
from forgather.codegen.python.imports import Imports, is_file, split, static_folders
from forgather.codegen.python.ir import (
    Expression,
    Statement,
    as_primary,
    below,
    bracketed,
    call,
    name,
    quoted,
    unused,
    width,
)
from forgather.codegen.python.names import Names, is_identifier, name_for
from forgather.codegen.python.parameters import Parameter
from forgather.codegen.python.reachability import Reach
from forgather.config.graph import SPREAD, Call, CallKind, Container, ContainerKind, Env, Graph, Lookup, Node, Scalar
from forgather.config.path import GraphPath, Index, Key, PlainKey, PlainScalar, format_path
from forgather.config.tags import SHORT_NAMES
from forgather.config.traverse import members
from forgather.errors import GraphError

Build = Callable[[Node, GraphPath], Expression]
LONGEST_INLINE, LONGEST_STRING, DEEPEST = 80, 60, 4
_LONGEST_KEY = 24

SPREAD_MARK = "**"
"""The prefix that marks a value which is unpacked into keywords, in `Part.before` and in dict displays."""
_HINTS = {
    "FG331": "build it with the config: Project(...)(target), or export a target that does not need it",
    "FG332": "'fgcli check' shows what is wrong with a config; export a target that does not need it",
}


def cannot(code: str, message: str, node: Node, path: GraphPath) -> GraphError:
    """Returns the error for a node that cannot be written as Python code.

    Args:
        code: the error code: FG331 if plain Python cannot express the node, FG332 if the config itself is wrong.
        message: the reason.
        node: the node.
        path: the path of the node in the graph.
    """
    message = f"{message}, which plain Python cannot express" if code == "FG331" else message
    return GraphError(message, code=code, span=node.span, path=format_path(path), hint=_HINTS[code])


@dataclass(slots=True)
class Part:
    """An argument, or a member of a container, while it is built.

    Args:
        before: the text in front of the expression: `lr=`, `"key": `.
        make: the function that builds the expression.
        wanted_name: the name of the variable, if the value is assigned to one.
        expression: the expression, once it has been built.
        dropped: whether a later value with the same key replaces this one, so that only the calls in it are needed.
    """

    before: str
    make: Callable[[], Expression]
    wanted_name: str
    expression: Expression = name("None")
    dropped: bool = False


def room(path: GraphPath) -> int:
    """Returns the maximum width, in columns, of a string that is written inline; nested values have less room."""
    if not path:
        return LONGEST_STRING
    step = path[-1]
    key = len(str(step.name)) if isinstance(step, Key) else 0
    return max(104 - 4 * min(len(path), DEEPEST + 1) - key, 20)


@dataclass(eq=False)
class LoweringContext(ABC):
    """The state of one generated function: its statements, names, imports and parameters.

    Args:
        graph: the whole graph.
        reach: the part of the graph that the targets need.
        imports: the imports of the module.
        names: the names that are already used in the module.
        parameters: the parameter of each variable of the config.
        project_dir: the project's folder; paths inside this folder are written relative to it.
    """

    graph: Graph
    reach: Reach
    imports: Imports
    names: Names
    parameters: dict[str, Parameter]
    project_dir: str = field(default="", kw_only=True)
    block: list[Statement] = field(default_factory=list, init=False)
    """The statements of the block that is being generated."""
    top: list[Statement] = field(init=False)
    """The statements of the whole function; outside any nested block, this is the same list as `block`."""
    uncertain: int = field(default=0, init=False)
    """The number of functions and branches around the current block that may not run."""
    drops: bool = field(default=False, init=False)
    """Whether the generated code may contain a variable that is never read."""
    temporaries: int = field(default=0, init=False)
    """The number of temporary variables so far; an expression that made it grow may use a temporary variable."""
    _bound: dict[int, Expression] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.top = self.block

    # nodes

    @abstractmethod
    def build(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node; statements that have to run before the expression are added to the block.

        Args:
            node: the node.
            path: the path of the node in the graph.
        """

    @abstractmethod
    def make_deferred(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node inside a function that is called later or not at all.

        Args:
            node: the node.
            path: the path of the node in the graph.
        """

    def bound(self, node: Node) -> Expression | None:
        """Returns the expression of a node that has already been built; None if the node has not been built."""
        return self._bound.get(id(node))

    def bind(self, expression: Expression, wanted: str, string: str | None = None) -> Expression:
        """Assigns the value of an expression to a new variable, and returns the variable.

        A constant expression is returned unchanged, unless `string` is given.

        Args:
            expression: the expression.
            wanted: the preferred name of the variable.
            string: the value of a string literal that may be broken over several lines; None for other expressions.
        """
        if expression.constant and string is None:
            return expression
        variable = self.names.free(wanted)
        self.temporaries += string is None
        self.block.append(Statement(f"{variable} = ", expression, string))
        return name(variable)

    def bind_unbroken(self, expression: Expression, wanted: str, faults: str = "") -> Expression:
        """Assigns an expression that cannot be broken over several lines to a new variable, and returns the variable.

        Args:
            expression: the expression.
            wanted: the preferred name of the variable.
            faults: the rules of ruff that the line violates, separated by commas.
        """
        variable = self.names.free(wanted)
        self.temporaries += 1
        self.block.append(Statement(f"{variable} = ", expression, whole=True, faults=faults))
        return name(variable)

    def lazy(self, node: Node, path: GraphPath, make: Callable[[], Expression]) -> Expression:
        """Returns a call of a new cached local function, which builds a node when it is called for the first time.

        Args:
            node: the node.
            path: the path of the node in the graph.
            make: the function that builds the expression of the node; the statements of the expression are put into the
                local function.
        """
        block, self.block = self.block, []
        self.uncertain += 1
        expression = make()
        self.uncertain -= 1
        inner, self.block = self.block, block
        function = self.names.free(name_for(self.graph, node, path))
        self.imports.use("cache")
        inner.append(Statement("return ", expression))
        # In the outermost block, so that uses after the current block can call the function, too.
        self.top.append(Statement(heads=("@cache", f"def {function}():"), body=inner))
        found = self._bound[id(node)] = call(name(function), ())
        return found

    def local_lazy(self, node: Node, path: GraphPath, make: Callable[[], Expression]) -> Expression:
        """Returns a call as `lazy` does, but does not remember the call as the expression of the node.

        The local function is therefore not called from outside the function that is being generated.

        Args:
            node: the node.
            path: the path of the node in the graph.
            make: the function that builds the expression of the node.
        """
        before = self._bound.get(id(node))
        found = self.lazy(node, path, make)
        del self._bound[id(node)]
        if before is not None:
            self._bound[id(node)] = before
        return found

    # plain values

    def literal(self, value: PlainScalar, path: GraphPath = (), longest: int | None = None) -> Expression:
        """Returns the expression of a plain value.

        Args:
            value: the value.
            path: the path of the value in the graph; () for a value that is not in the config.
            longest: the width in columns up to which a string is written inline; None for the default of `room`.
        """
        # These floats have no literal in Python.
        if isinstance(value, float) and (isnan(value) or value in (inf, -inf)):
            self.imports.use("math")
            return name("math.nan" if isnan(value) else "math.inf" if value > 0 else "-math.inf")
        # Written in hexadecimal, because Python limits the length of decimal literals.
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
            return self.bind_unbroken(Expression(f"0x{value:X}" if value > 0 else f"-0x{-value:X}"), "number")
        if not isinstance(value, str):
            # `ruff format` removes the plus sign of an exponent.
            return Expression(repr(value).replace("e+", "e"), constant=True, primary=False)
        if path and (parts := below(self.project_dir, value)):
            self.imports.use("os")
            self.imports.use("PROJECT_DIR")
            return Expression(f"os.path.join(PROJECT_DIR, {', '.join(map(quoted, parts))})", constant=True)
        literal = Expression(quoted(value), constant=True)
        if width(literal.text) <= (room(path) if longest is None else longest):
            return literal
        return self.bind(literal, name_for(self.graph, Scalar(value=value), path) if path else "text", value)

    def key(self, key: PlainKey) -> Expression:
        """Returns the expression of a key in a mapping."""
        if isinstance(key, tuple):
            return bracketed("(", [("", self.key(part)) for part in key], ")", pure=True, constant=True)
        return self.literal(key, (), _LONGEST_KEY)

    # values in a row

    def sequence(self, parts: Iterable[Part]) -> list[Part]:
        """Builds parts one after the other, and keeps the calls in them in this order.

        If the statements that a part adds contain a call, the earlier parts are assigned to variables before these
        statements.
        """
        done: list[Part] = []
        for part in parts:
            start = len(self.block)
            part.expression = part.make()
            if not all(statement.quiet for statement in self.block[start:]):
                self.bind_calls(done, start)
            done.append(part)
        return done

    def _row(self, items: Iterable[Part]) -> list[Part]:
        """Builds the items of a list; if one is assigned to a variable, all others that contain a call are, too."""
        start = len(self.block)
        parts = self.sequence(items)
        made = {statement.before for statement in self.block[start:]}
        if any(f"{part.expression.text} = " in made for part in parts):
            self.bind_calls(parts, len(self.block))
        return parts

    def bind_calls(self, parts: list[Part], at: int) -> None:
        """Assigns each part that contains a call to a variable.

        Args:
            parts: the parts.
            at: the position of the new statements in the block.
        """
        for part in parts:
            if part.expression.pure or (part.dropped and part.expression.constant):
                continue
            before = unused(part.expression)
            if not part.dropped:
                variable = self.names.free(part.wanted_name)
                before = f"{variable} = "
            self.temporaries += 1
            self.block.insert(at, Statement(before, part.expression))
            part.expression = name("None" if part.dropped else variable)
            at += 1

    def container(self, node: Container, path: GraphPath, build: Build) -> Expression:
        """Returns the display of a container.

        Args:
            node: the container.
            path: the path of the container in the graph.
            build: the function that builds a member of the container.
        """
        held = members(node)
        if node.kind is not ContainerKind.DICT:
            parts = self._row(self._part("", value, (*path, step), build) for step, value in held)
            opening, closing = "()" if node.kind is ContainerKind.TUPLE else "[]"
            return bracketed(opening, [("", part.expression) for part in parts], closing, pure=True)
        keys = [step.name for step, _ in held if isinstance(step, Key)]
        texts = [f"{self.key(key).text}: " for key in keys]
        parts = self.sequence(
            self._part(text, value, (*path, step), build) for text, (step, value) in zip(texts, held, strict=True)
        )
        return bracketed("{", self.merged([*keys], parts), "}", pure=True)

    def merged(
        self, keys: list[object], parts: list[Part], earlier: Iterable[Part] = ()
    ) -> list[tuple[str, Expression]]:
        """Returns the members of a dict display; a repeated key keeps its first position and gets its last value.

        Args:
            keys: the keys of the members.
            parts: the values of the members.
            earlier: the parts of the same expression that were built before the values.
        """
        last = {key: position for position, key in enumerate(keys)}
        first = {key: position for position, key in reversed(list(enumerate(keys)))}
        if len(first) < len(parts):
            self.drops = True
            for position, part in enumerate(parts):
                part.dropped = last[keys[position]] != position
            self.bind_calls([*earlier, *parts], len(self.block))
        order = sorted(first, key=lambda key: first[key])
        return [(parts[first[key]].before, parts[last[key]].expression) for key in order]

    def _part(self, before: str, node: Node, path: GraphPath, build: Build) -> Part:
        return Part(before, lambda: build(node, path), name_for(self.graph, node, path))

    # calls

    def arguments(self, node: Call, path: GraphPath, build: Build) -> list[Part]:
        """Returns the arguments of a call as parts that are not built yet.

        The attribute `before` of each part is the keyword of the argument, "" for a positional argument.

        Args:
            node: the call.
            path: the path of the call in the graph.
            build: the function that builds an argument.
        """
        parts = [self._part("", value, (*path, Index(position)), build) for position, value in enumerate(node.args)]
        for entry in (*node.kwargs, *node.named_latent_args):
            parts.append(self._part(str(entry.key), entry.value, (*path, Key(entry.key)), build))
        if node.spread is not None:
            parts.append(self._part(SPREAD_MARK, node.spread, (*path, Key(SPREAD)), build))
        return parts

    def applied(self, node: Call, path: GraphPath, callee: Expression, parts: list[Part]) -> Expression:
        """Returns the expression of a call; for a built-in function of the config language, an equivalent expression.

        Args:
            node: the call.
            path: the path of the call in the graph.
            callee: the expression of the object that is called.
            parts: the arguments, already built.

        Raises:
            GraphError: FG331 or FG332 if the call of a built-in function cannot be written as Python.
        """
        count = len(node.args)
        if node.constructor in SHORT_NAMES:
            if node.spread is not None:
                raise cannot("FG331", f"the keywords of {node.constructor} are given at construction", node, path)
            return self._short(node, path, parts)
        # `getattr(x, "name")` is written as `x.name`.
        if (
            node.constructor in ("getattr", "builtins:getattr")
            and len(parts) == count == 2
            and parts[0].expression.primary
        ):
            attribute = node.args[1]
            if isinstance(attribute, Scalar) and isinstance(attribute.value, str) and is_identifier(attribute.value):
                return Expression(f"{parts[0].expression.text}.{attribute.value}", pure=False)
        keywords = self.merged([part.before for part in parts[count:]], parts[count:], parts[:count])
        positional = [("", part.expression) for part in parts[:count]]
        return call(callee, [*positional, *self.keywords(keywords)])

    def keywords(self, members: list[tuple[str, Expression]]) -> list[tuple[str, Expression]]:
        """Returns keyword arguments; from the first name that is not an identifier, they are written as `**{...}`."""
        # A dict display accepts a key twice and uses the last value, while a keyword that is given twice is an error.
        if any(word == SPREAD_MARK for word, _ in members):
            return [("**", self._display(members))]
        odd = next((at for at, (word, _) in enumerate(members) if not is_identifier(word)), len(members))
        plain = [(f"{word}=", value) for word, value in members[:odd]]
        if odd == len(members):
            return plain
        return [*plain, ("**", self._display(members[odd:]))]

    def _display(self, members: list[tuple[str, Expression]]) -> Expression:
        return bracketed("{", [self._member(word, value) for word, value in members], "}", pure=True)

    def _member(self, word: str, value: Expression) -> tuple[str, Expression]:
        return ("**", as_primary(value)) if word == SPREAD_MARK else (f"{self.key(word).text}: ", value)

    def _short(self, node: Call, path: GraphPath, parts: list[Part]) -> Expression:
        word, count = node.constructor, len(node.args)
        members = self.merged([part.before for part in parts[count:]], parts[count:], parts[:count])
        if sum(width(part.expression.text) for part in parts) > LONGEST_INLINE or (word in PARAMETERS and members):
            self.bind_calls(parts, len(self.block))
            members = self.merged([part.before for part in parts[count:]], parts[count:])
        args = [part.expression for part in parts[:count]]
        found = expanded(word, args, members, self._display(members))
        if found is None:
            raise cannot("FG332", f"the arguments of {word!r} do not match its parameters", node, path)
        if word == "call":
            return call(found, [*(("", arg) for arg in args[1:]), *self.keywords(members)])
        return found

    def bound_callee(self, node: Call, path: GraphPath) -> Expression:
        """Returns the expression of the object that a call calls, evaluated before the arguments of the call are built.

        Args:
            node: the call.
            path: the path of the call in the graph.
        """
        callee = self.callee(node, path)
        return callee if callee.pure else self.bind(callee, "function")

    def callee(self, node: Call, path: GraphPath) -> Expression:
        """Returns the expression of the object that a call calls.

        Args:
            node: the call.
            path: the path of the call in the graph.

        Raises:
            GraphError: FG332 if the constructor cannot be imported.
        """
        source, symbol = split(node.constructor)
        if node.constructor in SHORT_NAMES:
            return self.imports.short_function(symbol) if node.kind is CallKind.PARTIAL else name("None")
        local = source is not None and (is_file(source) or source.startswith("."))
        if source is not None and is_file(source) and not source.endswith(".py"):
            raise cannot("FG332", f"{source!r} is not a Python file", node, path)
        if node.submodule_searchpath is None:
            if local and source is not None and not is_file(source):
                raise cannot("FG332", f"the relative module {source!r} has no folder to be searched in", node, path)
            return self.imports.function(node)
        if static_folders(node) is not None:
            return self.imports.function(node)
        if not isinstance(node.submodule_searchpath, (Call, Lookup)):
            raise cannot("FG332", "submodule_searchpath has a member that has to be built", node, path)
        folders = self.build(node.submodule_searchpath, (*path, Key("submodule_searchpath")))
        if local:
            return self.imports.function(node, folders)
        # An installed module is not searched in the folders, but construction builds them, too.
        if not folders.pure:
            self.block.append(Statement(unused(folders), folders))
        return self.imports.function(node)

    # values that construction finds

    def environment_value(self, node: Env) -> Expression:
        """Returns a variable with the value of an environment variable, or with None if that variable is not set."""
        self.imports.use("os")
        read = call(name("os.environ.get"), [("", self.literal(node.variable))])
        return self.bind(read, node.variable.lower())

    def unless(self, test: str, given: Expression, wanted: str, default: Callable[[], Expression]) -> Expression:
        """Returns an expression that evaluates the default only if a condition is true.

        The result is a conditional expression, or a variable that is set in an `if` statement.

        Args:
            test: the condition under which the default is used.
            given: the value if the condition is false.
            wanted: the preferred name of the variable.
            default: the function that builds the default.
        """
        block, self.block = self.block, []
        self.uncertain += 1
        expression = default()
        self.uncertain -= 1
        inner, self.block = self.block, block
        text = f"{expression.text} if {test} else {given.text}"
        if not inner and width(text) <= LONGEST_INLINE and " if " not in expression.text:
            return Expression(text, pure=expression.pure and given.pure, primary=False)
        variable = self.names.free(wanted)
        self.temporaries += 1
        inner.append(Statement(f"{variable} = ", expression))
        self.block += [Statement(f"{variable} = ", given), Statement(heads=(f"if {test}:",), body=inner)]
        return name(variable)
