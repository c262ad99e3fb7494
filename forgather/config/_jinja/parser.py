"""Jinja's parser, with openers remembered.

Takes desugared source, gives Jinja's nodes. Keeps true: a statement that is never closed is reported at
the line that opens it; `do`, `break` and `continue` are statements.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.parser import Parser

_LOOPS = ("for", "macro", "call", "block")


class UnclosedStatement(TemplateSyntaxError):
    """A statement that is never closed; `lineno` is that of its opener."""

    def __init__(self, tag: str, lineno: int, found: str | None, found_line: int) -> None:
        super().__init__(tag, lineno)
        self.tag, self.found, self.found_line = tag, found, found_line


class UnknownStatement(TemplateSyntaxError):
    """A statement that does not exist, or an end that closes nothing."""

    def __init__(self, tag: str, lineno: int) -> None:
        super().__init__(tag, lineno)
        self.tag = tag


class TracingParser(Parser):
    """Jinja's parser with `do`, `break` and `continue`, and with openers remembered for messages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._openers: list[tuple[str, int]] = []
        self.extensions.update({"do": self._parse_do, "break": self._parse_jump, "continue": self._parse_jump})

    def parse(self) -> nodes.Template:
        """Parses the template; a literal at which it cannot go on is kept with the error."""
        try:
            return super().parse()
        except TemplateSyntaxError as error:
            if self.stream.current.type in ("integer", "float", "string"):
                error.__dict__["literal"] = self.stream.current.value
            raise

    def parse_statement(self) -> nodes.Node | list[nodes.Node]:
        """Parses one statement, and remembers where it began."""
        token = self.stream.current
        if token.type == "name" and token.value == "autoescape":
            self.fail("'autoescape' has no use in a config", token.lineno)
        self._openers.append((str(token.value), token.lineno))
        parsed = super().parse_statement()
        self._openers.pop()
        return parsed

    def parse_block(self) -> nodes.Block:
        """Parses a block, and remembers the line of its end."""
        block = super().parse_block()
        block.__dict__["fg_end_line"] = self.stream.current.lineno
        return block

    def _parse_do(self, parser: Parser) -> nodes.Node:
        lineno = next(self.stream).lineno
        return nodes.ExprStmt(self.parse_tuple(), lineno=lineno)

    def _parse_jump(self, parser: Parser) -> nodes.Node:
        token = next(self.stream)
        around = [word for word, _ in self._openers if word in _LOOPS]
        if not around or around[-1] != "for":
            self.fail(f"'{token.value}' stands outside any loop", token.lineno)
        return nodes.Break(lineno=token.lineno) if token.value == "break" else nodes.Continue(lineno=token.lineno)

    def _fail_ut_eof(self, name: str | None, end_token_stack: list[tuple[str, ...]], lineno: int | None) -> NoReturn:
        line = lineno if lineno is not None else self.stream.current.lineno
        opened = self._openers[:-1] if name is not None else self._openers
        opened = [item for item in opened if item[0] in self._tag_stack]
        outer = {token for tokens in end_token_stack[:-1] for token in tokens}
        if name is None or f"name:{name}" in outer:
            if opened:
                tag, begin = opened[-1]
                raise UnclosedStatement(tag, begin, name, line)
        raise UnknownStatement(name or "", line)
