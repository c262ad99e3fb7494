"""Values that construction finds, as Python: `!var`, `!env` and `!calc`.

Takes their nodes, gives expressions over parameters, `os.environ` and built targets. Keeps true: what may stay unread
(the default of something that is given, the other branch of a `!calc`) is built only when it is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from forgather.codegen.python.codegen_errors import located
from forgather.codegen.python.ir import Expression, call, name, width
from forgather.codegen.python.names import wish
from forgather.config.calc import FUNCTIONS, parse_calc
from forgather.config.graph import Calc, Env, Node, PlainScalar, Scalar, Var
from forgather.config.path import GraphPath, Key
from forgather.config.yaml.events import Refusal

if TYPE_CHECKING:
    from forgather.codegen.python.lowering import Body


_LONGEST = 60
_ANY_WIDTH = 1_000_000
_COMPARED = tuple(
    text for sign in ("==", "!=") for word in ("None", "True", "False") for text in (f"{sign} {word}", f"{word} {sign}")
)


class ValueWriter:
    """Writes values that construction finds into a body."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def variable(self, node: Var, path: GraphPath) -> Expression:
        """Returns a `!var`: a parameter, or its default."""
        body, parameter = self._body, self._body.parameters[node.variable]
        if not parameter.unset:
            return name(parameter.name)
        if node.default is None:
            return self._given(node.variable)
        body.imports.use("UNSET")
        make = partial(body.build, node.default, (*path, Key("default")))
        return body.otherwise(f"{parameter.name} is UNSET", name(parameter.name), parameter.name, make)

    def environment(self, node: Env, path: GraphPath) -> Expression:
        """Returns an `!env`: read when it is built, by `os.environ`."""
        body, default, inside = self._body, node.default, (*path, Key("default"))
        body.imports.use("os")
        if default is None:
            return Expression(f"os.environ[{body.literal(node.variable).text}]", pure=False)
        if isinstance(default, Scalar):
            items = [("", body.literal(node.variable))]
            items += [] if default.value is None else [("", body.literal(default.value, inside))]
            return call(name("os.environ.get"), items)
        value = self.environment_value(node)
        return body.otherwise(
            f"{value.text} is None", value, node.variable.lower(), partial(body.build, default, inside)
        )

    def environment_value(self, node: Env) -> Expression:
        """Returns a variable that holds an environment variable, or `None`."""
        self._body.imports.use("os")
        read = call(name("os.environ.get"), [("", self._body.literal(node.variable))])
        return self._body.bind(read, node.variable.lower())

    def calculated(self, node: Calc, path: GraphPath) -> Expression:
        """Returns a `!calc`."""
        body = self._body

        def text_of(word: str) -> str:
            found = self._named(word, lazily)
            loose = found.text.startswith("-") or (not found.primary and " " in found.text)
            return f"({found.text})" if loose else found.text

        with located(node, path):
            lazily = is_lazy(node.expression)
            body.uncertain += lazily
            text = calc_text(node.expression, text_of, lambda value: body.literal(value, (), _ANY_WIDTH).text)
            body.uncertain -= lazily
        return self._arithmetic(text, wish(body.graph, node, path))

    def _arithmetic(self, text: str, wished: str) -> Expression:
        expression = Expression(text, pure=False, primary=False)
        faults = "E711, E712" if any(sign in text for sign in _COMPARED) else ""
        if not faults and width(text) <= _LONGEST:
            return expression
        return self._body.keep(expression, wished, faults)

    def _named(self, word: str, lazily: bool) -> Expression:
        """Returns what a name in a `!calc` stands for: a variable, or else a target."""
        body = self._body
        entry = body.graph.targets.get(word)
        if entry is None:
            return self._given(word)
        if body.is_open(entry.value):
            hint = "break the cycle with a !var or a plain value"
            raise Refusal("FG304", f"!calc reads the target {word!r} while that is being built from it", hint)
        make = partial(self._target, word, entry.value, lazily)
        if word not in body.parameters:
            return make()
        body.imports.use("UNSET")
        parameter = body.parameters[word].name
        return body.otherwise(f"{parameter} is UNSET", name(parameter), word, make)

    def _given(self, variable: str) -> Expression:
        """Returns a variable that must have been given."""
        parameter = self._body.parameters[variable]
        if not parameter.unset:
            return name(parameter.name)
        self._body.imports.own |= {"UNSET", "given"}
        return call(name("given"), [("", name(parameter.name)), ("", self._body.literal(variable))], pure=True)

    def _target(self, word: str, node: Node, lazily: bool) -> Expression:
        body, path = self._body, (Key(word),)
        if not lazily or isinstance(node, Scalar):
            return body.bind(body.build(node, path), word)
        bound = body.bound(node)
        if bound is not None:
            return bound
        make = partial(body.make_apart, node, path)
        if body.reach.remembered(node):
            return body.lazy(node, path, make)
        found = body.local_lazy(node, path, make)
        # What is built anew for each reader is not kept by the function either.
        body.top[-1].heads = body.top[-1].heads[1:]
        body.drops = True
        return found


_BINARY: dict[type[ast.operator], tuple[str, int]] = {
    ast.Add: ("+", 11), ast.Sub: ("-", 11), ast.Mult: ("*", 12), ast.Div: ("/", 12), ast.FloorDiv: ("//", 12),
    ast.Mod: ("%", 12), ast.Pow: ("**", 14),
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_IF, _OR, _AND, _NOT, _ORDER, _SIGN, _ATOM = 3, 4, 5, 6, 7, 13, 20


def calc_text(expression: str, text_of: Callable[[str], str], literal: Callable[[PlainScalar], str]) -> str:
    """Returns the Python text of an expression.

    Args:
        expression: as the config has it.
        text_of: gives the text, a name, that stands for a name of the expression.
        literal: gives the text of a plain value.

    Raises:
        Refusal: the expression holds something that is not allowed.
    """
    writer = _Writer(expression, text_of, literal)
    return writer.write(parse_calc(expression), 0)


def is_lazy(expression: str) -> bool:
    """Returns whether a part of an expression may stay unevaluated."""
    tree = parse_calc(expression)
    return any(
        isinstance(node, (ast.BoolOp, ast.IfExp)) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        for node in ast.walk(tree)
    )


class _Writer:
    def __init__(self, expression: str, text_of: Callable[[str], str], literal: Callable[[PlainScalar], str]) -> None:
        self._expression, self._text_of, self._literal = expression, text_of, literal

    def write(self, node: ast.expr, around: int) -> str:
        """Returns a part's text, in brackets where it binds less than what is around it."""
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
