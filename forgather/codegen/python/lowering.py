"""The lowering of graph nodes to Python statements, and of `!calc` expressions to Python expressions.

The input is the nodes that targets need; the output is the statements that build them. Calls are made in the order of
`config.materialize`. A node that `config.materialize` builds once is built once by the generated code, and is assigned
to a variable if it is used again. A node that is needed only in some cases (the default of a variable, one branch of a
`!calc`) is built only in these cases.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from forgather.codegen.python.context import DEEPEST, LONGEST_INLINE, LoweringContext, cannot
from forgather.codegen.python.ir import Expression, Statement, call, name, width
from forgather.codegen.python.names import is_named, name_for
from forgather.codegen.python.partial_lowering import PartialLowering
from forgather.config.calc import FUNCTIONS, parse_calc
from forgather.config.graph import Calc, Call, CallKind, Container, Env, Node, Scalar, Var
from forgather.config.path import GraphPath, Key, PlainScalar, format_path
from forgather.config.yaml.events import Refusal

_LONGEST_TWICE = 60
_LONGEST_CALC = 60
_ANY_WIDTH = 1_000_000
# ruff reports comparisons with these constants (E711, E712).
_COMPARED = tuple(
    text for sign in ("==", "!=") for word in ("None", "True", "False") for text in (f"{sign} {word}", f"{word} {sign}")
)


@dataclass(eq=False)
class Lowering(LoweringContext):
    """The generator of one function: it turns the nodes of a graph into statements."""

    _makers: dict[int, Expression] = field(default_factory=dict, init=False)
    _open: list[int] = field(default_factory=list, init=False)
    _partials: PartialLowering = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._partials = PartialLowering(self)

    def build(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node; statements that have to run before the expression are added to the block.

        Args:
            node: the node.
            path: the path of the node in the graph.

        Raises:
            GraphError: FG304, FG305, FG331 or FG332 if the node cannot be written as Python.
        """
        if isinstance(node, Scalar):
            return self.literal(node.value, path)
        key = id(node)
        if key in self._bound:
            return self._bound[key]
        if key in self._makers:
            return call(self._makers[key], ())
        repeats = self.reach.is_reused(node)
        # The first use may never run, so the object is built by whichever use comes first at run time.
        if repeats and self.uncertain:
            return self.lazy(node, path, lambda: self.make_deferred(node, path))
        temporaries = self.temporaries
        expression = self._make(node, path)
        if repeats:
            self._bound[key] = expression = self.bind(expression, name_for(self.graph, node, path))
            self.temporaries = temporaries
        # An expression that uses a temporary variable cannot be moved into a function of its own.
        elif self.temporaries == temporaries and self._wants_function(node, expression):
            return self._maker(node, expression, path)
        elif len(path) > 1 and self._wants_variable(node, expression):
            return self.bind(expression, name_for(self.graph, node, path))
        return expression

    def _make(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node that has not been built yet."""
        self._open.append(id(node))
        try:
            if isinstance(node, Call):
                return self._call(node, path)
            if isinstance(node, Container):
                return self.container(node, path, self.build)
            if isinstance(node, Var):
                return self._variable(node, path)
            if isinstance(node, Env):
                return self._environment(node, path)
            if isinstance(node, Calc):
                return self._calculated(node, path)
        finally:
            self._open.pop()
        raise TypeError(f"unknown node {type(node).__name__}")

    def make_deferred(self, node: Node, path: GraphPath) -> Expression:
        """Returns the expression of a node inside a function that is called later or not at all.

        Args:
            node: the node.
            path: the path of the node in the graph.
        """
        with self._partials.deferred():
            return self._make(node, path)

    def _maker(self, node: Node, expression: Expression, path: GraphPath) -> Expression:
        function = self.names.free(f"make_{name_for(self.graph, node, path)}")
        self.block.append(Statement(heads=(f"def {function}():",), body=[Statement("return ", expression)]))
        self._makers[id(node)] = name(function)
        return call(name(function), ())

    def _wants_function(self, node: Node, expression: Expression) -> bool:
        """Returns whether a node is built at several places, and its expression is long enough for a function."""
        if self.uncertain or self.block is not self.top or not isinstance(node, Call):
            return False
        return self.reach.places[id(node)] > 1 and width(expression.text) > _LONGEST_TWICE

    def _wants_variable(self, node: Node, expression: Expression) -> bool:
        if expression.constant:
            return False
        long = width(expression.text) > LONGEST_INLINE
        return expression.depth > DEEPEST or (long and (isinstance(node, Call) or is_named(self.graph, node)))

    def _call(self, node: Call, path: GraphPath) -> Expression:
        if node.kind is CallKind.META:
            raise cannot("FG331", f"!meta:{node.constructor} takes its arguments unconstructed", node, path)
        if node.kind is CallKind.PARTIAL:
            return self._partials.partial(node, path)
        callee = self.bound_callee(node, path)
        return self.applied(node, path, callee, self.sequence(self.arguments(node, path, self.build)))

    # values that construction finds

    def _variable(self, node: Var, path: GraphPath) -> Expression:
        """Returns the expression of a `!var`: its parameter, or its default if no value is given for the parameter."""
        parameter = self.parameters[node.variable]
        if not parameter.unset:
            return name(parameter.name)
        if node.default is None:
            return self._required_variable(node.variable)
        self.imports.use("UNSET")
        make = partial(self.build, node.default, (*path, Key("default")))
        return self.unless(f"{parameter.name} is UNSET", name(parameter.name), parameter.name, make)

    def _environment(self, node: Env, path: GraphPath) -> Expression:
        """Returns the expression of an `!env`, which reads `os.environ`."""
        default, inside = node.default, (*path, Key("default"))
        self.imports.use("os")
        if default is None:
            return Expression(f"os.environ[{self.literal(node.variable).text}]", pure=False)
        if isinstance(default, Scalar):
            items = [("", self.literal(node.variable))]
            items += [] if default.value is None else [("", self.literal(default.value, inside))]
            return call(name("os.environ.get"), items)
        value = self.environment_value(node)
        return self.unless(f"{value.text} is None", value, node.variable.lower(), partial(self.build, default, inside))

    def _calculated(self, node: Calc, path: GraphPath) -> Expression:
        """Returns the expression of a `!calc`."""

        def text_of(word: str) -> str:
            found = self._calc_name(word, lazily)
            # Without parentheses, `x ** 2` would become `-1 ** 2`, which is -(1 ** 2).
            loose = found.text.startswith("-") or (not found.primary and " " in found.text)
            return f"({found.text})" if loose else found.text

        try:
            lazily = is_lazy(node.expression)
            self.uncertain += lazily
            text = calc_text(node.expression, text_of, lambda value: self.literal(value, (), _ANY_WIDTH).text)
            self.uncertain -= lazily
        except Refusal as refusal:
            raise refusal.located(node.span, format_path(path)) from None
        return self._arithmetic(text, name_for(self.graph, node, path))

    def _arithmetic(self, text: str, wanted: str) -> Expression:
        expression = Expression(text, pure=False, primary=False)
        faults = "E711, E712" if any(sign in text for sign in _COMPARED) else ""
        if not faults and width(text) <= _LONGEST_CALC:
            return expression
        return self.bind_unbroken(expression, wanted, faults)

    def _calc_name(self, word: str, lazily: bool) -> Expression:
        """Returns the expression of a name in a `!calc`: a variable, or else a target."""
        entry = self.graph.targets.get(word)
        if entry is None:
            return self._required_variable(word)
        if id(entry.value) in self._open:
            hint = "break the cycle with a !var or a plain value"
            raise Refusal("FG304", f"!calc reads the target {word!r} while that is being built from it", hint)
        make = partial(self._target, word, entry.value, lazily)
        if word not in self.parameters:
            return make()
        self.imports.use("UNSET")
        parameter = self.parameters[word].name
        return self.unless(f"{parameter} is UNSET", name(parameter), word, make)

    def _required_variable(self, variable: str) -> Expression:
        """Returns the expression of a variable without default; generated code raises an error if it is not given."""
        parameter = self.parameters[variable]
        if not parameter.unset:
            return name(parameter.name)
        self.imports.own |= {"UNSET", "given"}
        return call(name("given"), [("", name(parameter.name)), ("", self.literal(variable))], pure=True)

    def _target(self, word: str, node: Node, lazily: bool) -> Expression:
        path: GraphPath = (Key(word),)
        if not lazily or isinstance(node, Scalar):
            return self.bind(self.build(node, path), word)
        bound = self.bound(node)
        if bound is not None:
            return bound
        make = partial(self.make_deferred, node, path)
        if self.reach.is_one_object(node):
            return self.lazy(node, path, make)
        found = self.local_lazy(node, path, make)
        # Each reader gets a new object, so the local function must not be cached: its first line is `@cache`.
        self.top[-1].heads = self.top[-1].heads[1:]
        self.drops = True
        return found


# Precedences in the order of Python's grammar: an operator with a higher number binds its operands closer.
_BINARY: dict[type[ast.operator], tuple[str, int]] = {
    ast.Add: ("+", 11), ast.Sub: ("-", 11), ast.Mult: ("*", 12), ast.Div: ("/", 12), ast.FloorDiv: ("//", 12),
    ast.Mod: ("%", 12), ast.Pow: ("**", 14),
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_IF, _OR, _AND, _NOT, _ORDER, _SIGN, _ATOM = 3, 4, 5, 6, 7, 13, 20


def calc_text(expression: str, text_of: Callable[[str], str], literal: Callable[[PlainScalar], str]) -> str:
    """Returns the Python text of a `!calc` expression.

    Args:
        expression: the expression in the config.
        text_of: the function that returns the Python text for a name in the expression.
        literal: the function that returns the Python text of a plain value.

    Raises:
        Refusal: FG305 if a part of the expression is not allowed.
    """
    writer = _Writer(expression, text_of, literal)
    return writer.write(parse_calc(expression), 0)


def is_lazy(expression: str) -> bool:
    """Returns whether Python may skip a part of an expression.

    It may skip an operand of `and` or `or`, a branch of `if`, and the end of a chained comparison.
    """
    tree = parse_calc(expression)
    return any(
        isinstance(node, (ast.BoolOp, ast.IfExp)) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        for node in ast.walk(tree)
    )


class _Writer:
    def __init__(self, expression: str, text_of: Callable[[str], str], literal: Callable[[PlainScalar], str]) -> None:
        self._expression, self._text_of, self._literal = expression, text_of, literal

    def write(self, node: ast.expr, around: int) -> str:
        """Returns the text of an operand, in parentheses if it has a lower precedence than `around`."""
        text, strength = self._part(node)
        return f"({text})" if strength < around else text

    def _part(self, node: ast.expr) -> tuple[str, int]:
        match node:
            case ast.Constant(value=(bool() | int() | float() | str() | None) as value):
                return self._literal(value), _ATOM
            case ast.Name():
                return self._text_of(node.id), _ATOM
            case ast.UnaryOp(op=ast.Not()):
                return f"not {self.write(node.operand, _NOT)}", _NOT
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                sign = "-" if isinstance(node.op, ast.USub) else "+"
                return sign + self.write(node.operand, _ATOM), _SIGN
            case ast.BinOp():
                return self._binary(node)
            case ast.BoolOp():
                word, strength = (" and ", _AND) if isinstance(node.op, ast.And) else (" or ", _OR)
                return word.join(self.write(value, strength + 1) for value in node.values), strength
            case ast.Compare():
                return self._comparison(node), _ORDER
            case ast.IfExp():
                then, test = self.write(node.body, _IF + 1), self.write(node.test, _IF + 1)
                return f"{then} if {test} else {self.write(node.orelse, _IF)}", _IF
            case ast.Call(func=ast.Name(id=function), keywords=[]) if function in FUNCTIONS:
                return f"{function}({', '.join(self.write(arg, 0) for arg in node.args)})", _ATOM
            case ast.Tuple() | ast.List():
                return f"[{', '.join(self.write(item, 0) for item in node.elts)}]", _ATOM
        raise self._refused(node)

    def _binary(self, node: ast.BinOp) -> tuple[str, int]:
        sign, strength = _BINARY.get(type(node.op), ("", 0))
        if not sign:
            raise self._refused(node)
        # `**` is right-associative, and its right operand may have a sign without parentheses.
        if isinstance(node.op, ast.Pow):
            left, right = self.write(node.left, strength + 1), self.write(node.right, _SIGN)
            tight = _is_simple(node.left) and _is_simple(node.right) and "(" not in left + right
            return (f"{left}**{right}" if tight else f"{left} ** {right}"), strength
        left, right = self.write(node.left, strength), self.write(node.right, strength + 1)
        return f"{left} {sign} {right}", strength

    def _comparison(self, node: ast.Compare) -> str:
        parts = [self.write(node.left, _ORDER + 1)]
        for operation, part in zip(node.ops, node.comparators, strict=True):
            sign = _COMPARE.get(type(operation))
            if sign is None:
                raise self._refused(node)
            parts += [sign, self.write(part, _ORDER + 1)]
        return " ".join(parts)

    def _refused(self, node: ast.expr) -> Refusal:
        what, where = repr(ast.unparse(node)[:60]), repr(self._expression[:80])
        return Refusal("FG305", f"!calc {where}: {what} is not allowed", "use numbers, names, arithmetic, comparisons")


def _is_simple(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        node = node.operand
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and isinstance(node.value, (int, float)))
