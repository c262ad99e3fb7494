"""Jinja's parser, extended by a record of where each open statement begins, for error messages.

The input is Jinja source; the output is Jinja's nodes. Invariants: a statement without an end is reported at the line
that opens it; `do`, `break` and `continue` are statements.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.parser import Parser

from forgather.config.syntax import unclosed_quote

# A jump may leave a `for`, but not the function to which Jinja compiles a macro, a call or a block.
_LOOPS = ("for", "macro", "call", "block")


class UnclosedStatement(TemplateSyntaxError):
    """A statement has no end; `lineno` is the line that opens the statement.

    Args:
        tag: the word of the statement, such as "if".
        lineno: the line that opens the statement.
        found: the word that ends another statement and was found first, such as "endfor"; None if the template ended
            first.
        found_line: the line at which the parser failed.
    """

    def __init__(self, tag: str, lineno: int, found: str | None, found_line: int) -> None:
        super().__init__(tag, lineno)
        self.tag, self.found, self.found_line = tag, found, found_line


class UnknownStatement(TemplateSyntaxError):
    """A statement does not exist, or the end of a statement was found without its beginning."""

    def __init__(self, tag: str, lineno: int) -> None:
        super().__init__(tag, lineno)
        self.tag = tag


class TracingParser(Parser):
    """Jinja's parser with `do`, `break` and `continue`; it records open statements for error messages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._openers: list[tuple[str, int]] = []
        # Parsed here instead of by Jinja's extensions, to refuse a jump outside of a loop at its line.
        self.extensions.update({"do": self._parse_do, "break": self._parse_jump, "continue": self._parse_jump})

    def parse(self) -> nodes.Template:
        """Returns the tree of the template; if a literal cannot be parsed, the error has its text as `literal`."""
        try:
            return super().parse()
        except TemplateSyntaxError as error:
            # Jinja's message names the kind of the token only; ours shows the text.
            if self.stream.current.type in ("integer", "float", "string"):
                error.__dict__["literal"] = self.stream.current.value
            raise

    def parse_statement(self) -> nodes.Node | list[nodes.Node]:
        """Returns the node of one statement, which counts as open until its end has been parsed."""
        token = self.stream.current
        if token.type == "name" and token.value == "autoescape":
            # It would escape quotes and brackets of YAML as HTML.
            self.fail("'autoescape' is not supported in a config", token.lineno)
        self._openers.append((str(token.value), token.lineno))
        parsed = super().parse_statement()
        self._openers.pop()
        return parsed

    def parse_block(self) -> nodes.Block:
        """Returns the node of a block, with the line of its end as `fg_end_line`."""
        block = super().parse_block()
        block.__dict__["fg_end_line"] = self.stream.current.lineno
        return block

    def _parse_do(self, parser: Parser) -> nodes.Node:
        lineno = next(self.stream).lineno
        return nodes.ExprStmt(self.parse_tuple(), lineno=lineno)

    def _parse_jump(self, parser: Parser) -> nodes.Node:
        token = next(self.stream)
        around = [word for word, _ in self._openers if word in _LOOPS]
        # Python's compiler would refuse a break in the function of a macro or block, with a line of generated code.
        if not around or around[-1] != "for":
            self.fail(f"'{token.value}' is used outside a loop", token.lineno)
        return nodes.Break(lineno=token.lineno) if token.value == "break" else nodes.Continue(lineno=token.lineno)

    def _fail_ut_eof(self, name: str | None, end_token_stack: list[tuple[str, ...]], lineno: int | None) -> NoReturn:
        line = lineno if lineno is not None else self.stream.current.lineno
        opened = self._openers[:-1] if name is not None else self._openers
        # A statement that is complete on its line (`set x = 1`) is not open.
        opened = [item for item in opened if item[0] in self._tag_stack]
        outer = {token for tokens in end_token_stack[:-1] for token in tokens}
        if name is None or f"name:{name}" in outer:
            if opened:
                tag, begin = opened[-1]
                raise UnclosedStatement(tag, begin, name, line)
        raise UnknownStatement(name or "", line)


_BLOCK_TAG = re.compile(r"\{%[-+]?\s*(block|endblock)\b\s*(\w*)")


def open_quote(lines: list[str], failing: int) -> tuple[str, int] | None:
    """Returns an unclosed quote and the line of its statement; None if no unclosed quote explains a parse error.

    Args:
        lines: the lines of the source.
        failing: the line at which parsing failed, counted from 1.
    """
    for number in range(min(failing, len(lines)), 0, -1):
        quote = unclosed_quote(lines[number - 1])
        if quote is not None:
            closing = next((at for at in range(number + 1, len(lines) + 1) if quote in lines[at - 1]), number)
            return (quote, number) if failing in (number, closing) else None
    return None


def open_tag(source: str) -> tuple[str, int] | None:
    """Returns the opening mark and the line of the last tag in a source if the tag is not closed; otherwise None."""
    mark, begin = max(("{{", source.rfind("{{")), ("{%", source.rfind("{%")), key=lambda item: item[1])
    if begin < 0 or source.find("}}" if mark == "{{" else "%}", begin) >= 0:
        return None
    return mark, source.count("\n", 0, begin) + 1


def open_block(source: str) -> tuple[str, int] | None:
    """Returns the name and the line of a block that is still open where an outer block ends; None if there is none."""
    opened: list[tuple[str, int]] = []
    for tag in _BLOCK_TAG.finditer(source):
        if tag[1] == "block":
            opened.append((tag[2], source.count("\n", 0, tag.start()) + 1))
        elif opened and tag[2] not in ("", opened[-1][0]):
            return opened[-1] if tag[2] in (name for name, _ in opened) else None
        elif opened:
            opened.pop()
    return None
