"""Python source split into statements by regular expressions, so that only the needed statements are parsed.

The input is the text of a file; the output is the statements that may bind a name. Parsing a whole file of a large
library takes too long for a check. If the text at a split does not look like the start of a statement, the whole file
is parsed instead.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence

_DEFINES = re.compile(r"(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")
_CONTINUES = re.compile(r"(?:else|elif|except|finally)\b")
_PLAUSIBLE = re.compile(
    r"@|(?:async[ \t]+)?(?:def|class)[ \t]+\w"
    r"|(?:import|from|if|try|for|while|with|else|elif|except|finally|raise|assert|del|pass|global|return|match|async)\b"
    r"|[A-Za-z_][\w.]*[ \t]*(?:[\[(:,;#=]|[-+*/|&%^@]=|$)|[\"'({\[]|[rRbBuUfF]{1,2}[\"']",
    re.MULTILINE,
)
_SHORT_STRINGS = re.compile(r"""\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'""")
_ASSIGNS = re.compile(r"([A-Za-z_][\w.]*)[ \t]*(?::[^=\n]*)?=(?!=)([^\n]*)")
_IS_TEXT = re.compile(r"[rRuU]?[\"']")
_STAR = re.compile(r"import[ \t(]*\*")
_HEADER_END = re.compile(r":[ \t]*(?:#[^\n]*)?\n")
_FIRST_INDENT = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*([ \t]+)(?=\S)")
_AT_MARGIN = re.compile(r"\n(?=[^\s#)\]}])")


class TooDeepError(SyntaxError):
    """The text is nested too deeply for `ast.parse`; Python may still be able to import it."""


def parse(text: str) -> list[ast.stmt]:
    """Returns the statements of a text.

    Raises:
        SyntaxError: if the text is not valid Python, or the parser fails for another reason.
    """
    with warnings.catch_warnings():
        # An invalid escape in a library is not the user's concern.
        warnings.simplefilter("ignore")
        # The parser's own error for a null character has no line.
        if "\0" in text:
            line = text.count("\n", 0, text.index("\0")) + 1
            raise SyntaxError("it contains a null character", ("<source>", line, 0, None))
        try:
            return ast.parse(text, "<source>").body
        except ValueError as error:
            raise SyntaxError(str(error)) from None
        except (RecursionError, MemoryError) as error:
            raise TooDeepError(str(error) or "it is nested too deeply") from None


class Parsed:
    """Statements that are already parsed, with the same methods as `Block`."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self._statements = statements

    def binding(self, name: str) -> list[ast.stmt]:
        """Returns the statements that may bind `name`, in the order of the source."""
        return [s for s in self._statements if _name_of(s) in (name, None)]

    def plain(self, word: str = "") -> list[ast.stmt]:
        """Returns the statements that are not definitions, in the order of the source.

        The argument `word` has no effect; `Block.plain` uses it as a filter.
        """
        return [s for s in self._statements if _name_of(s) is None]

    def defined(self) -> list[str]:
        """Returns the names of the functions and classes that the statements define."""
        return [name for s in self._statements if (name := _name_of(s)) is not None]


def _name_of(statement: ast.stmt) -> str | None:
    definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return statement.name if definition else None  # type: ignore[attr-defined]


class Text:
    """The text of one file, and the positions in it.

    Args:
        text: the content of the file, with `\\n` as line ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._strings: list[tuple[int, int]] | None = None

    def block(self) -> Block:
        """Returns the top-level statements of the file."""
        return Block(self, 0, len(self.text), "")

    def line(self, offset: int) -> int:
        """Returns the 1-based number of the line that contains an offset."""
        return self.text.count("\n", 0, offset) + 1

    def in_string(self, offset: int) -> bool:
        """Returns whether an offset is inside a triple-quoted string."""
        if self._strings is None:
            self._strings = list(_long_strings(self.text))
        index = bisect_right(self._strings, (offset, len(self.text))) - 1
        return index >= 0 and offset < self._strings[index][1]


def _long_strings(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    double, single = text.find('"""'), text.find("'''")
    while double >= 0 or single >= 0:
        start = min(found for found in (double, single) if found >= 0)
        before = _SHORT_STRINGS.sub("", text[max(text.rfind("\n", 0, start) + 1, position) : start])
        # A quote in a comment opens no string.
        if "#" in before:
            position = text.find("\n", start)
            if position < 0:
                return
        # The short strings were removed, so a remaining quote shows that these three are inside another string.
        elif '"' in before or "'" in before:
            position = start + 3
        else:
            position = _end_of_string(text, start)
            yield start + 1, position
        if 0 <= double < position:
            double = text.find('"""', position)
        if 0 <= single < position:
            single = text.find("'''", position)


def _end_of_string(text: str, start: int) -> int:
    quote = text[start : start + 3]
    end = text.find(quote, start + 3)
    while end > 0 and _is_escaped(text, end):
        end = text.find(quote, end + 1)
    if end < 0:
        raise _NotCutError
    while text[end + 3 : end + 4] == quote[0]:
        end += 1
    return end + 3


def _is_escaped(text: str, offset: int) -> bool:
    begin = offset
    while text[begin - 1] == "\\":
        begin -= 1
    return (offset - begin) % 2 == 1


class _NotCutError(Exception):
    """The text cannot be split into statements safely."""


class Block:
    """Statements of equal indentation, each parsed on first use.

    Args:
        source: the text of the file.
        start: the offset of the line of the first statement.
        end: the offset after the last statement.
        indent: the indentation of each statement.
    """

    def __init__(self, source: Text, start: int, end: int, indent: str) -> None:
        self._source, self._start, self._end, self._indent = source, start, end, indent
        self._parsed: dict[int, list[ast.stmt]] = {}
        self._defined: dict[str, list[int]] = {}
        self._plain: list[int] = []
        self._whole: Parsed | None = None
        try:
            self._pieces = list(self._cut())
        except _NotCutError:
            self._whole = self._parse_whole()
            return
        for number, (begin, _, definition) in enumerate(self._pieces):
            named = _DEFINES.match(source.text, definition)
            if named:
                self._defined.setdefault(named[1], []).append(number)
            elif not _IS_TEXT.match(source.text, begin):
                self._plain.append(number)
        self._stars = frozenset(self._find_stars())

    def _find_stars(self) -> Iterator[int]:
        text = self._source.text
        if text.find("import *", self._start, self._end) >= 0 or text.find("import (", self._start, self._end) >= 0:
            yield from (n for n in self._plain if _STAR.search(text, *self._pieces[n][:2]))

    def _parse_whole(self) -> Parsed:
        text = self._source.text[self._start : self._end]
        lines = self._source.line(self._start) - 1
        if self._indent:
            statements = parse(f"if 1:\n{text}")[0].body  # type: ignore[attr-defined]
            lines -= 1
        else:
            statements = parse(text)
        _shift(statements, lines)
        return Parsed(statements)

    def _cut(self) -> Iterator[tuple[int, int, int]]:
        """Yields three offsets for each statement: its begin, its end, and its `def` or `class` after decorators."""
        source, text, indent = self._source, self._source.text, self._indent
        # Python's tokenizer resets the indentation at a form feed, which the pattern below does not know.
        if "\f" in text:
            raise _NotCutError
        pattern = re.compile(rf"\n{indent}(?=[^\s#)\]}}])") if indent else _AT_MARGIN
        # From one character before the block, because the pattern begins with a line end.
        begins = [m.end() for m in pattern.finditer(text, max(self._start - 1, 0), self._end)]
        if not indent and text[:1] and text[0] not in " \t\n#":
            begins.insert(0, 0)
        current, definition, decorated = -1, -1, False
        for begin in begins:
            if source.in_string(begin):
                continue
            # A line that cannot begin a statement shows that an earlier split was wrong.
            if not _PLAUSIBLE.match(text, begin):
                raise _NotCutError
            if current >= 0 and (decorated or _CONTINUES.match(text, begin)):
                if decorated:
                    definition, decorated = begin, text[begin] == "@"
                continue
            if current >= 0:
                yield current, begin, definition
            current = definition = begin
            decorated = text[begin] == "@"
        if current >= 0:
            yield current, self._end, definition

    def _statements(self, number: int) -> list[ast.stmt]:
        if number not in self._parsed:
            begin, end, definition = self._pieces[number]
            statement = self._class(begin, end, definition)
            self._parsed[number] = [statement] if statement else self._parse_piece(begin, end)
        return self._parsed[number]

    def _parse_piece(self, begin: int, end: int, more: str = "") -> list[ast.stmt]:
        text, lines = self._source.text[begin:end] + more, self._source.line(begin) - 1
        # Indented text is valid Python only below another statement.
        if self._indent:
            text, lines = f"if 1:\n{self._indent}{text}", lines - 1
        try:
            found = parse(text)
        except SyntaxError:
            raise _NotCutError from None
        if self._indent:
            found = found[0].body  # type: ignore[attr-defined]
        _shift(found, lines)
        return found

    def _class(self, begin: int, end: int, definition: int) -> ast.stmt | None:
        """Returns a class whose body is not parsed yet; None for any other statement."""
        text = self._source.text
        if not text.startswith("class", definition):
            return None
        at = definition
        # A line that ends in a colon can be inside the brackets of the bases; the next such line is tried then.
        for _ in range(5):
            ends = _HEADER_END.search(text, at, end)
            inside = ends and _FIRST_INDENT.match(text, ends.end(), end)
            if not ends or not inside:
                return None
            try:
                head = self._parse_piece(begin, ends.start() + 1, " pass")[0]
            except _NotCutError:
                at = ends.end()
                continue
            # An attribute of the node, because other modules pass only the node on.
            head.lazy_body = Block(self._source, ends.end(), end, inside[1])  # type: ignore[attr-defined]
            return head
        return None

    def _select(self, numbers: Sequence[int]) -> list[ast.stmt]:
        return [statement for number in numbers for statement in self._statements(number)]

    def binding(self, name: str) -> list[ast.stmt]:
        """Returns the statements that may bind `name`, in the order of the source."""
        if self._whole is None:
            text, numbers = self._source.text, list(self._defined.get(name, ()))
            for number in self._plain:
                begin, end, _ = self._pieces[number]
                found = text.find(name, begin, end)
                if (found >= 0 and not _binds_another(text, begin, name)) or number in self._stars:
                    numbers.append(number)
            try:
                return self._select(sorted(numbers))
            except _NotCutError:
                self._whole = self._parse_whole()
        return self._whole.binding(name)

    def plain(self, word: str = "") -> list[ast.stmt]:
        """Returns the statements that are not definitions, in the order of the source.

        A statement whose text does not contain `word` may be left out.
        """
        if self._whole is None:
            find, pieces = self._source.text.find, self._pieces
            try:
                return self._select([n for n in self._plain if not word or find(word, *pieces[n][:2]) >= 0])
            except _NotCutError:
                self._whole = self._parse_whole()
        return self._whole.plain(word)

    def defined(self) -> list[str]:
        """Returns the names of the functions and classes that the statements define."""
        return list(self._defined) if self._whole is None else self._whole.defined()


def _binds_another(text: str, begin: int, name: str) -> bool:
    """Returns whether a statement is an assignment that certainly binds only names other than `name`."""
    target = _ASSIGNS.match(text, begin)
    return target is not None and target[1] != name and "=" not in target[2]


def _shift(statements: Sequence[ast.stmt], lines: int) -> None:
    """Adds a number of lines to the line numbers of statements, including those inside compound statements."""
    for statement in statements:
        statement.lineno += lines
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(statement, part, None)
            if isinstance(inner, list) and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                _shift(inner, lines)
        for handler in getattr(statement, "handlers", ()):
            _shift(handler.body, lines)


def body_of(node: ast.ClassDef) -> Parsed | Block:
    """Returns the statements in the body of a class."""
    lazy: Block | None = getattr(node, "lazy_body", None)
    return lazy if lazy is not None else Parsed(node.body)
