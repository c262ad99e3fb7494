"""Python expressions and statements as objects, their layout as source lines, and the removal of unused variables.

The input is pieces of source text; the output is source lines. A line has at most 120 columns if it can be broken, and
`ruff format` leaves the lines unchanged.
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
# Characters that are written as they are, one column wide or two (CJK); all others are written as escapes.
_NARROW = re.compile(r"[ -~\u00a1-\u00ac\u00ae-\u02af\u0391-\u03ff\u0410-\u044f]*")
_KEPT = re.compile(r"[ -~\u00a1-\u00ac\u00ae-\u02af\u0391-\u03ff\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff]")
_SHORT = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A Python expression.

    Args:
        text: the whole expression on one line.
        head: the text up to the opening bracket after which the expression may be broken; "" if it cannot be broken.
        items: the expressions between the brackets, each with the text in front of it (`lr=`, `"key": `, `**`).
        close: the closing bracket.
        pure: whether evaluating the expression calls nothing, so that it may be moved past a call.
        constant: whether evaluating the expression twice, or later, makes no difference; true for names and plain
            values.
        primary: whether `.name`, `(...)` or `[...]` may follow the expression without parentheses.
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
        """The nesting depth of the brackets in the expression."""
        return 1 + max((item.depth for _, item in self.items), default=0) if self.head else 0


def name(text: str) -> Expression:
    """Returns the expression that reads a variable or a dotted name."""
    return Expression(text, constant=True)


def bracketed(
    head: str, items: Iterable[tuple[str, Expression]], close: str, *, pure: bool, constant: bool = False
) -> Expression:
    """Returns a call or a list, tuple or dict display.

    Args:
        head: the text up to and including the opening bracket.
        items: the members, each with the text in front of it.
        close: the closing bracket.
        pure: whether the expression itself calls nothing; the result is pure only if all members are pure, too.
        constant: whether evaluating the expression again makes no difference.
    """
    items = tuple(items)
    inside = ", ".join(before + item.text for before, item in items)
    comma = "," if close == ")" and head == "(" and len(items) == 1 else ""
    pure = pure and all(item.pure for _, item in items)
    return Expression(
        f"{head}{inside}{comma}{close}", head if items else "", items, close, pure=pure, constant=constant
    )


def as_primary(value: Expression) -> Expression:
    """Returns an expression that is valid in front of `.name` and after `**`, in parentheses if it needs them."""
    return value if value.primary else replace(value, text=f"({value.text})", primary=True)


def call(function: Expression, items: Iterable[tuple[str, Expression]], *, pure: bool = False) -> Expression:
    """Returns a call of a function.

    Args:
        function: the expression of the function.
        items: the arguments, each with the text in front of it.
        pure: whether the call has no effect, so that it may be moved past other calls.
    """
    text = as_primary(function).text
    return bracketed(f"{text}(", items, ")", pure=pure and function.pure)


def width(text: str) -> int:
    """Returns the width of a text in columns; a CJK character takes two."""
    return len(text) if _NARROW.fullmatch(text) else sum(1 if _NARROW.fullmatch(char) else 2 for char in text)


def quoted(text: str) -> str:
    """Returns a string literal on one line.

    Raises:
        GraphError: FG330 if the string contains half of a surrogate pair, which cannot be encoded as UTF-8.

    Example:
        >>> print(quoted('say "it"'), quoted("it's"), quoted("a\\nb\\u2028"))
        'say "it"' "it's" "a\\nb\\u2028"
    """
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + "".join(_escaped(char, quote) for char in text) + quote


def below(folder: str, text: str) -> list[str]:
    """Returns the parts of a path inside an absolute folder, relative to the folder.

    The result is empty if the path is not inside the folder, or if joining the parts would give another text.

    Args:
        folder: the absolute folder.
        text: the path.
    """
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
    # Half of a surrogate pair cannot be encoded as UTF-8.
    if 0xD800 <= code <= 0xDFFF:
        message = f"a string contains U+{code:04X}, half of a surrogate pair"
        raise GraphError(message, code="FG330", hint="repair the string")
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def pieces(text: str) -> list[str]:
    """Returns a long string as several string literals that Python concatenates, split after line ends and spaces."""
    found, start = [], 0
    while start < len(text):
        stop = _cut(text, start)
        found.append(quoted(text[start:stop]))
        start = stop
    return found


def _cut(text: str, start: int) -> int:
    """Returns the end of the piece that begins at `start`: after a line end, else after a space, else anywhere."""
    size, stop, blank = 0, start, 0
    while stop < len(text):
        # The quotes of the piece are not chosen yet, so both kinds are counted as escapes.
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
    """One Python statement.

    Args:
        before: the text in front of the expression: `name = `, `return `, or "".
        expression: the expression of the statement; None for a statement with a body.
        string: the value of a string literal that may be broken into pieces; None for other expressions.
        heads: the lines above the body: decorators, and `def ...:` or `if ...:`.
        body: the statements in the body.
        whole: whether the expression cannot be broken over several lines.
        faults: the rules of ruff that the line violates, for its `noqa` comment.
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
        """Whether running the statement makes no call."""
        if self.expression is not None:
            return self.expression.pure
        return self.is_function or all(statement.quiet for statement in self.body)

    @property
    def is_function(self) -> bool:
        """Whether the statement defines a local function."""
        return bool(self.heads) and self.heads[-1].startswith("def ")


def layout(statements: list[Statement], indent: str) -> list[str]:
    """Returns the source lines of a block of statements."""
    lines: list[str] = []
    for position, statement in enumerate(statements):
        # `ruff format` puts an empty line before and after a local function.
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
        # `ruff format` puts an empty line in front of a function that comes first in an `if`.
        gap = [""] if statement.body[0].is_function and not statement.is_function else []
        return [*(indent + head for head in statement.heads), *gap, *layout(statement.body, indent + INDENT)]
    if statement.string is not None and width(indent + statement.before + statement.expression.text) > WIDTH:
        # `ruff format` joins pieces that fit on one line.
        whole = statement.expression.text
        fits = width(indent + INDENT + whole) <= WIDTH
        inner = [f"{indent}{INDENT}{piece}" for piece in ([whole] if fits else pieces(statement.string))]
        return [f"{indent}{statement.before}(", *inner, f"{indent})"]
    if statement.whole:
        return [_unbroken(f"{indent}{statement.before}{statement.expression.text}", statement.faults)]
    return broken(statement.expression, indent, statement.before, "")


def _unbroken(line: str, faults: str) -> str:
    long = width(line) > WIDTH
    rules = ", ".join(rule for rule in ("E501" if long else "", faults) if rule)
    return line + ("  # fmt: skip" if long else "") + (f"  # noqa: {rules}" if rules else "")


def broken(expression: Expression, indent: str, before: str, after: str) -> list[str]:
    """Returns the lines of an expression: one line if it fits, else one line for each member.

    Args:
        expression: the expression.
        indent: the indentation of the first line.
        before: the text in front of the expression.
        after: the text after the expression.
    """
    line = f"{indent}{before}{expression.text}{after}"
    if width(line) <= WIDTH or not expression.head:
        return [line]
    lines = [f"{indent}{before}{expression.head}"]
    for prefix, item in expression.items:
        lines += broken(item, indent + INDENT, prefix, ",")
    return [*lines, f"{indent}{expression.close}{after}"]


def without_unused(statements: list[Statement]) -> list[Statement]:
    """Removes assignments to variables that nothing reads, and returns the statements; calls in the values remain."""
    # Removing one variable can leave another one unread.
    while _drop(statements, names_read(statements)):
        pass
    return statements


def names_read(statements: list[Statement]) -> set[str]:
    """Returns the names that the statements read."""
    # Inside a function, because `return` is not allowed outside one.
    tree = ast.parse("def build():\n" + "\n".join(layout(statements, "    ")))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _drop(statements: list[Statement], read: set[str]) -> bool:
    changed = False
    # From the end, so that a deletion does not change the positions that follow.
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
    """Returns the text in front of an expression whose value is not used: "" for a call, else an assignment to `_`."""
    return "" if expression.text.endswith(")") else "_ = "


def _is_unread(statement: Statement, read: set[str]) -> bool:
    return statement.is_function and statement.heads[-1][4:].partition("(")[0] not in read
