"""Python expressions and statements as values, and their layout.

Takes texts and their parts, gives source lines. Keeps true: a line is at most 120 wide wherever it can be broken, and
what is laid out here is what `ruff format` leaves as it is.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from forgather.errors import GraphError

WIDTH = 120
INDENT = "    "
_PIECE = 88
_LONGEST_PATH = 240
# Characters that stand for themselves: one column wide, or two (CJK); all others are written as escapes.
_NARROW = re.compile(r"[ -~\u00a1-\u00ac\u00ae-\u02af\u0391-\u03ff\u0410-\u044f]*")
_KEPT = re.compile(r"[ -~\u00a1-\u00ac\u00ae-\u02af\u0391-\u03ff\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff]")
_SHORT = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A Python expression.

    Args:
        text: the whole of it, on one line.
        head: its beginning up to an opening bracket after which it may be broken; "" where it may not.
        items: what stands between the brackets, each with what stands before it (`lr=`, `"key": `, `**`).
        close: the closing bracket.
        pure: True where evaluating it calls nothing, so that it may be moved past a call.
        constant: True for names and plain values: evaluating it twice, or later, makes no difference.
        primary: True where `.name`, `(...)` or `[...]` may follow.
    """

    text: str
    head: str = ""
    items: tuple[tuple[str, Expression], ...] = ()
    close: str = ""
    pure: bool = True
    constant: bool = False
    primary: bool = True

    @property
    def depth(self) -> int:
        """How deep its brackets are nested."""
        return 1 + max((item.depth for _, item in self.items), default=0) if self.head else 0


def name(text: str) -> Expression:
    """Returns a variable, or a dotted name."""
    return Expression(text, constant=True)


def bracketed(
    head: str, items: Iterable[tuple[str, Expression]], close: str, *, pure: bool, constant: bool = False
) -> Expression:
    """Returns a call or a display."""
    items = tuple(items)
    inside = ", ".join(before + item.text for before, item in items)
    comma = "," if close == ")" and head == "(" and len(items) == 1 else ""
    pure = pure and all(item.pure for _, item in items)
    return Expression(
        f"{head}{inside}{comma}{close}", head if items else "", items, close, pure=pure, constant=constant
    )


def as_primary(value: Expression) -> Expression:
    """Returns an expression after which, and before which as `**`, nothing binds closer."""
    return value if value.primary else replace(value, text=f"({value.text})", primary=True)


def call(function: Expression, items: Iterable[tuple[str, Expression]], *, pure: bool = False) -> Expression:
    """Returns a call."""
    text = as_primary(function).text
    return bracketed(f"{text}(", items, ")", pure=pure and function.pure)


def width(text: str) -> int:
    """Returns the columns that a text takes."""
    return len(text) if _NARROW.fullmatch(text) else sum(1 if _NARROW.fullmatch(char) else 2 for char in text)


def quoted(text: str) -> str:
    """Returns a string literal on one line.

    Raises:
        GraphError: the string contains half of a surrogate pair, which no file can contain.

    Example:
        >>> print(quoted('say "it"'), quoted("it's"), quoted("a\\nb\\u2028"))
        'say "it"' "it's" "a\\nb\\u2028"
    """
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + "".join(_escaped(char, quote) for char in text) + quote


def below(folder: str, text: str) -> list[str]:
    """Returns the parts of a path below an absolute folder; none where joining them does not give the very text."""
    if not os.path.isabs(folder) or not text.startswith(folder + os.sep) or len(text) > _LONGEST_PATH:
        return []
    parts = text[len(folder) + 1 :].split(os.sep)
    return parts if all(parts) else []


def _escaped(char: str, quote: str) -> str:
    if char == quote:
        return "\\" + char
    if char in _SHORT:
        return _SHORT[char]
    if _KEPT.fullmatch(char):
        return char
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:
        message = f"a string contains U+{code:04X}, half of a surrogate pair"
        raise GraphError(message, code="FG330", hint="repair the string")
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def pieces(text: str) -> list[str]:
    """Returns a long string as literals that Python joins, cut after line ends and blanks."""
    found, start = [], 0
    while start < len(text):
        stop = _cut(text, start)
        found.append(quoted(text[start:stop]))
        start = stop
    return found


def _cut(text: str, start: int) -> int:
    """Returns where the piece that begins at `start` ends: after a line end, or else after a blank, or anywhere."""
    size, stop, blank = 0, start, 0
    while stop < len(text):
        size += width(_escaped(text[stop], "'")) + (text[stop] == '"')
        if size > _PIECE:
            return blank or stop
        stop += 1
        if text[stop - 1] == "\n" and text[stop : stop + 1] != "\n":
            return stop
        if text[stop - 1] == " ":
            blank = stop
    return stop


@dataclass(slots=True)
class Statement:
    """One statement.

    Args:
        before: what stands before the expression: `name = `, `return `, or nothing.
        expression: the expression; None for a statement with a body.
        string: the value of a string that may be broken into pieces.
        heads: lines above the body: decorators, and `def ...:` or `if ...:`.
        body: statements inside.
        whole: True where the expression cannot be broken.
        faults: rules of ruff that it breaks on purpose.
    """

    before: str = ""
    expression: Expression | None = None
    string: str | None = None
    heads: tuple[str, ...] = ()
    body: list[Statement] = field(default_factory=list)
    whole: bool = False
    faults: str = ""

    @property
    def quiet(self) -> bool:
        """True where running it calls nothing."""
        if self.expression is not None:
            return self.expression.pure
        return self.is_function or all(statement.quiet for statement in self.body)

    @property
    def is_function(self) -> bool:
        """True for a local function."""
        return bool(self.heads) and self.heads[-1].startswith("def ")


def layout(statements: list[Statement], indent: str) -> list[str]:
    """Returns the lines of a block."""
    lines: list[str] = []
    for position, statement in enumerate(statements):
        ends = position + 1 == len(statements)
        if statement.is_function and position and lines[-1]:
            lines.append("")
        lines += _lines(statement, indent)
        if not ends and _ends_with_function(statement):
            lines.append("")
    return lines


def _ends_with_function(statement: Statement) -> bool:
    return statement.is_function or bool(statement.body and _ends_with_function(statement.body[-1]))


def _lines(statement: Statement, indent: str) -> list[str]:
    if statement.expression is None:
        # A function that stands first in an `if` is set off from it.
        gap = [""] if statement.body[0].is_function and not statement.is_function else []
        return [*(indent + head for head in statement.heads), *gap, *layout(statement.body, indent + INDENT)]
    if statement.string is not None and width(indent + statement.before + statement.expression.text) > WIDTH:
        inner = [f"{indent}{INDENT}{piece}" for piece in pieces(statement.string)]
        return [f"{indent}{statement.before}(", *inner, f"{indent})"]
    if statement.whole:
        return [_unbroken(f"{indent}{statement.before}{statement.expression.text}", statement.faults)]
    return broken(statement.expression, indent, statement.before, "")


def _unbroken(line: str, faults: str) -> str:
    long = width(line) > WIDTH
    rules = ", ".join(rule for rule in ("E501" if long else "", faults) if rule)
    return line + ("  # fmt: skip" if long else "") + (f"  # noqa: {rules}" if rules else "")


def broken(expression: Expression, indent: str, before: str, after: str) -> list[str]:
    """Returns an expression on one line where it fits, else one line for each part of it."""
    line = f"{indent}{before}{expression.text}{after}"
    if width(line) <= WIDTH or not expression.head:
        return [line]
    lines = [f"{indent}{before}{expression.head}"]
    for prefix, item in expression.items:
        lines += broken(item, indent + INDENT, prefix, ",")
    return [*lines, f"{indent}{expression.close}{after}"]


def without_unused(statements: list[Statement]) -> list[Statement]:
    """Returns the statements without variables that nothing reads; what their values call is still called."""
    while _drop(statements, names_read(statements)):
        pass
    return statements


def names_read(statements: list[Statement]) -> set[str]:
    """Returns the names that statements read."""
    tree = ast.parse("def build():\n" + "\n".join(layout(statements, "    ")))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _drop(statements: list[Statement], read: set[str]) -> bool:
    changed = False
    for position, statement in reversed(list(enumerate(statements))):
        changed |= _drop(statement.body, read)
        if statement.expression is None:
            if not statement.body or _is_unread(statement, read):
                changed = True
                del statements[position]
        elif statement.before.endswith(" = ") and statement.before[:-3].partition(".")[0] not in {*read, "_"}:
            changed, statement.before = True, unused(statement.expression)
            if statement.expression.pure:
                del statements[position]
    return changed


def unused(expression: Expression) -> str:
    """Returns what stands before an expression whose value nothing needs."""
    return "" if expression.text.endswith(")") else "_ = "


def _is_unread(statement: Statement, read: set[str]) -> bool:
    return statement.is_function and statement.heads[-1][4:].partition("(")[0] not in read
