"""Evaluates `!calc` expressions: bounded arithmetic on names.

The inputs are an expression and a function that looks up names; the output is a value. Invariants: an expression has no
attributes, no subscripts, and no calls except of `min max round int float len abs`; the size of every result is bounded
before it is computed; no code is compiled.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

from forgather.config.yaml.events import Refusal

MAX_CHARS = 1_000
MAX_DEPTH = 50
MAX_BITS = 20_000

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "round": round, "int": int, "float": float, "len": len, "abs": abs,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
# Everything else is refused: attributes, subscripts, lambdas and comprehensions reach beyond plain numbers.
_EXPRESSIONS = (ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Tuple,
                ast.List)  # fmt: skip
_ALLOWED = "numbers, names, + - * / // % **, comparisons, and/or/not, x if c else y, " + " ".join(sorted(FUNCTIONS))


def parse_calc(expression: str) -> ast.expr:
    """Returns the syntax tree of an expression.

    Raises:
        Refusal: FG305 if the text is not an expression, is too long, or contains something that is not allowed.
    """
    # Before parsing: Python's parser takes long for a hostile text, and may run out of stack.
    if len(expression) > MAX_CHARS:
        raise Refusal("FG305", f"a !calc expression of {len(expression)} characters", f"the limit is {MAX_CHARS}")
    try:
        # Python's tokenizer warns about texts such as `1if x`, without a place in the config.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refusal("FG305", f"{_cut(expression)} is not an expression", f"allowed: {_ALLOWED}") from None
    for node in (found for found in ast.walk(tree) if isinstance(found, ast.expr)):
        # The whole tree is checked first, so that an expression is refused even if the forbidden part would not be
        # evaluated.
        called = isinstance(node, ast.Call) and getattr(node.func, "id", None) not in FUNCTIONS
        if called or not isinstance(node, _EXPRESSIONS):
            raise Refusal("FG305", f"!calc {_cut(expression)}: {_what(node)} is not allowed", f"allowed: {_ALLOWED}")
    return tree


def names_in(tree: ast.expr) -> list[str]:
    """Returns the names that an expression reads, in order, without the names of the functions that it calls."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    names.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in names))


def evaluate(expression: str, look_up: Callable[[str], Any]) -> Any:
    """Returns the value of an expression.

    Args:
        expression: the arithmetic expression, in Python's syntax.
        look_up: a function that returns the value of a name; the errors that it raises are not caught.

    Raises:
        Refusal: FG305 if the expression contains something that is not allowed, exceeds a bound, or fails.

    Example:
        >>> evaluate("max(1, total // 4)", {"total": 10}.__getitem__)
        2
    """
    return _Evaluation(expression, look_up).value(parse_calc(expression), 0)


def _cut(expression: str) -> str:
    return repr(expression if len(expression) <= 80 else expression[:77] + "...")


class _Evaluation:
    def __init__(self, expression: str, look_up: Callable[[str], Any]) -> None:
        self._expression = expression
        self._look_up = look_up

    def value(self, node: ast.expr, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._fault(f"nested deeper than {MAX_DEPTH}")
        inner = depth + 1
        match node:
            # Strings are allowed for comparisons such as `mode == 'fast'`.
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return self._bounded(node.value)
            case ast.Name():
                return self._bounded(self._look_up(node.id))
            case ast.UnaryOp():
                return self._unary(node, inner)
            case ast.BinOp():
                return self._binary(node, inner)
            case ast.BoolOp():
                return self._boolean(node, inner)
            case ast.Compare():
                return self._comparison(node, inner)
            case ast.IfExp():
                # Only one branch is evaluated, as in Python, so the other may name an unset variable.
                return self.value(node.body if self.value(node.test, inner) else node.orelse, inner)
            case ast.Call():
                return self._call(node, inner)
            case ast.Tuple() | ast.List():
                # A list is only useful as the argument of min, max and len.
                return [self.value(item, inner) for item in node.elts]
        raise self._fault(f"{_what(node)} is not allowed", f"allowed: {_ALLOWED}")

    def _unary(self, node: ast.UnaryOp, depth: int) -> Any:
        value = self.value(node.operand, depth)
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.Invert):
            raise self._fault("'~' is not allowed", f"allowed: {_ALLOWED}")
        number = self._number(value)
        return -number if isinstance(node.op, ast.USub) else +number

    def _binary(self, node: ast.BinOp, depth: int) -> Any:
        apply = _BINARY.get(type(node.op))
        if apply is None:
            raise self._fault(f"the operator {type(node.op).__name__} is not allowed", f"allowed: {_ALLOWED}")
        left, right = self._number(self.value(node.left, depth)), self._number(self.value(node.right, depth))
        # `9**9**9` must be refused before Python computes it.
        if isinstance(left, int) and isinstance(right, int) and _bits(type(node.op), left, right) > MAX_BITS:
            raise self._fault("the result would have too many digits")
        return self._checked(lambda: apply(left, right))

    def _boolean(self, node: ast.BoolOp, depth: int) -> Any:
        stop = isinstance(node.op, ast.Or)
        value: Any = None
        for part in node.values:
            value = self.value(part, depth)
            if bool(value) is stop:
                break
        return value

    def _comparison(self, node: ast.Compare, depth: int) -> bool:
        left = self.value(node.left, depth)
        for operation, part in zip(node.ops, node.comparators, strict=True):
            compare = _COMPARE.get(type(operation))
            if compare is None:
                raise self._fault(f"the comparison {type(operation).__name__} is not allowed", f"allowed: {_ALLOWED}")
            right = self.value(part, depth)
            if not self._checked(functools.partial(compare, left, right)):
                return False
            # `1 < x < 3` compares neighbours, as in Python.
            left = right
        return True

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        function = FUNCTIONS.get(name or "")
        if function is None or node.keywords:
            raise self._fault(f"{_what(node)} is not allowed", f"allowed: {_ALLOWED}")
        args = [self.value(arg, depth) for arg in node.args]
        # round(x, -10**9) computes a power of ten with that many digits.
        if name == "round" and len(args) == 2 and not (isinstance(args[1], int) and abs(args[1]) <= 400):
            raise self._fault(f"round to {args[1]!r} digits", "at most 400")
        return self._checked(lambda: function(*args))

    def _checked(self, compute: Callable[[], Any]) -> Any:
        try:
            return self._bounded(compute())
        except (ArithmeticError, TypeError, ValueError) as error:
            # A Refusal is a ValueError, and already has its message.
            if isinstance(error, Refusal):
                raise
            raise self._fault(f"{type(error).__name__}: {error}") from None

    def _number(self, value: Any) -> Any:
        if isinstance(value, Real):
            return value
        raise self._fault(f"arithmetic on {type(value).__name__} {_cut(str(value))}", "use numbers")

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, complex):
            raise self._fault("the result is a complex number")
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise self._fault("a number with too many digits")
        # The value of a variable or target may be a whole document.
        if isinstance(value, str) and len(value) > MAX_CHARS * 10:
            raise self._fault(f"a string of {len(value)} characters")
        return value

    def _fault(self, message: str, hint: str | None = None) -> Refusal:
        return Refusal("FG305", f"!calc {_cut(self._expression)}: {message}", hint)


def _bits(operation: type[ast.operator], left: int, right: int) -> float:
    """Returns an upper bound of the number of bits in the result of an operation that can enlarge its operands much."""
    if operation is ast.Pow:
        return abs(left).bit_length() * float(max(right, 0)) if right.bit_length() < 1_000 else math.inf
    return left.bit_length() + right.bit_length() if operation is ast.Mult else 0


def _what(node: ast.expr) -> str:
    text = ast.unparse(node)
    return repr(text if len(text) <= 60 else text[:57] + "...")
