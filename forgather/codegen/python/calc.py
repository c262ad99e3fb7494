"""`!calc` as a Python expression.

Takes an expression of the language and the texts of the names in it, gives Python text of the same value. Keeps true:
what `config.calc` refuses is refused here with the same words.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from forgather.config.calc import FUNCTIONS, parse_calc
from forgather.config.events import Refusal
from forgather.config.graph import PlainScalar

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
