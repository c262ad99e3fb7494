"""Rewrites line statements, comments and block headers to Jinja's syntax.

The input is a template's text; the output is Jinja source. Invariants: each line stays one line, so a line number of
Jinja is a line number of the template; any text is accepted, and the parser reports errors at their place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forgather.config.split import is_header

_MARK = re.compile(r"[ \t]*(--|<<|>>|==|=>)[ \t](.*)")
_COMMENT = re.compile(r"[ \t]*##")
_BLOCK = re.compile(r"([ \t]*)\[([A-Za-z_][A-Za-z0-9_]*)(!?)\][ \t]*(?:[ \t]##.*)?")
_WORD = re.compile(r"\{%[-+]?\s*(\w*)")
_ALONE_INCLUDE = re.compile(r"[ \t]*\{%[-+]?\s*include\b(?:(?!%\}|\{%).)*?(?<![-+])%\}[ \t]*")
_POINTS = re.compile(r"\{\{|\{%|\{#|#|['\"]")
_STRING = r"'(?:[^'\\]|\\.)*(?:'|\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\Z)"
_CLOSED = re.compile(r"(['\"])(?:(?!\1)[^\\]|\\.)*\1", re.S)
_CODE = re.compile(_STRING + r"|[-+]?[}%]\}|[()\[\]{}]|\s##", re.S)
_ENDRAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}|^[ \t]*--[ \t]+endraw[ \t]*$", re.M)
_TOKEN_START = re.compile(r"(?:^|[\[{(,]|[:?-][ \t])[ \t]*(?:[!&][^ \t]*[ \t]+)*$")
_ASSIGN = re.compile(_STRING + r"|[()\[\]{}=]", re.S)
_OPENERS = frozenset({"if", "for", "macro", "call", "filter", "with", "block", "autoescape", "set"})
_LOOKAHEAD = 200
_MAX_LOOKAHEAD = 2_000
_MAX_OPEN = 500


def desugar(text: str) -> str:
    """Returns `text` as Jinja source with the same lines.

    Example:
        >>> desugar("a: 1  ## note\\n## gone\\n-- if x\\nb: 2\\n-- endif")
        'a: 1\\n{##}\\n{% if x %}\\nb: 2\\n{% endif %}'
    """
    return _Rewriter(text).run()


@dataclass(slots=True)
class _Open:
    """An open statement or block; `indent` is the indent of a `[block]` header, and None for other statements."""

    word: str
    name: str = ""
    indent: int | None = None
    trims: bool = False


class _Rewriter:
    """A rewriter that reads a template once; `pos` is the offset of the text that is not yet written."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.out: list[str] = []
        self.open: list[_Open] = []
        self.lookahead = _MAX_LOOKAHEAD
        self.ended_trims = False

    def run(self) -> str:
        size = len(self.text)
        while self.pos < size:
            if not self._special_line():
                self._data_line()
        # `pos` is behind the text if a tag is not closed: an end inside of that tag would only hide the mistake.
        if self.open and self.pos <= size:
            self.out.append(self._close_down_to(0))
        return "".join(self.out)

    def _line_end(self) -> int:
        end = self.text.find("\n", self.pos)
        return len(self.text) if end < 0 else end

    def _emit_line(self, source: str, end: int) -> None:
        """Writes a rewritten line, and sets `pos` to the line after `end`."""
        self.out.append(source)
        if end < len(self.text):
            self.out.append("\n")
        self.pos = end + 1 if end < len(self.text) else end

    # -- lines that are rewritten as a whole

    def _special_line(self) -> bool:
        end = self._line_end()
        line = self.text[self.pos : end]
        stripped = line.lstrip(" \t")
        first = stripped[:1]
        if first == "#":
            if _COMMENT.match(line):
                self._emit_line("{##}", end)
                return True
        elif first == "[":
            # Only `[identifier]` alone on its line: `[1]` and `[a, b]` are YAML.
            if header := _BLOCK.fullmatch(line):
                self._emit_line(self._block_header(header), end)
                return True
        elif first and first in "-<>=" and (statement := _MARK.fullmatch(line)):
            self._statement(statement.group(1), statement.group(2), end)
            return True
        elif first == "{" and _ALONE_INCLUDE.fullmatch(line):
            cut = line.rindex("%}")
            self._emit_line(line[:cut].rstrip() + " +%}", end)
            return True
        return False

    def _block_header(self, header: re.Match[str]) -> str:
        indent, name, mark = len(header.group(1).expandtabs()), header.group(2), header.group(3)
        closing = ""
        # A bracket block ends at the next header of the same or a smaller indent.
        while self.open and self.open[-1].indent is not None and self.open[-1].indent >= indent:
            closing += _end_of(self.open.pop())
        self._push(_Open("block", name, indent, bool(mark)))
        return f"{closing}{{% block {name} {'-' if mark else ''}%}}"

    def _statement(self, mark: str, rest: str, end: int) -> None:
        code, end = self._whole_code(rest, end)
        if not code.strip():
            self._emit_line("{##}", end)
        elif mark == "==":
            self._emit_line(f"{{{{ {code} }}}}", end)
        elif mark == "=>":
            self._emit_line(f"{{{{ ({code}) | trim('\\n') }}}}", end)
        else:
            word = code.split(None, 1)[0]
            closing = self._statement_word(word, code[len(word) :])
            trims = word == "endblock" and self.ended_trims
            left = "{%-" if mark == "<<" or trims else "{%"
            right = "-%}" if mark == ">>" else "+%}" if word == "include" or trims else "%}"
            self._emit_line(f"{closing}{left} {code} {right}", end)
            if word == "raw":
                self._skip_raw()

    def _whole_code(self, rest: str, end: int) -> tuple[str, int]:
        """Returns the code of a statement, on all its lines and without comments, and the offset at which it ends."""
        code, depth = _cut_code(rest)
        if depth <= 0:
            return code.rstrip(), end
        lines, stop = [code.rstrip()], end
        # Bounded in total: a file of unclosed brackets would be read again from each line.
        for _ in range(min(_LOOKAHEAD, self.lookahead)):
            if stop >= len(self.text):
                break
            self.lookahead -= 1
            begin = stop + 1
            stop = self.text.find("\n", begin)
            stop = len(self.text) if stop < 0 else stop
            more, change = _cut_code(self.text[begin:stop])
            lines.append(more.rstrip())
            depth += change
            if depth <= 0:
                self.lookahead += len(lines) - 1
                return "\n".join(lines), stop
        return code.rstrip(), end

    # -- the nesting of statements and bracket blocks

    def _statement_word(self, word: str, rest: str) -> str:
        """Records how a statement changes the nesting; returns the ends of the bracket blocks that it closes."""
        if word in _OPENERS:
            if word != "set" or _is_set_block(rest):
                name = rest.split()[0] if word == "block" and rest.split() else ""
                self._push(_Open(word, name))
            return ""
        if word in ("else", "elif"):
            return self._close_until({"if", "for"} if word == "else" else {"if"}, keep=True)
        if word == "endblock":
            return self._end_block(rest.strip())
        if word.startswith("end"):
            return self._close_until({word[3:]}, keep=False)
        return ""

    def _push(self, opened: _Open) -> None:
        if len(self.open) < _MAX_OPEN:
            self.open.append(opened)

    def _close_until(self, words: set[str], *, keep: bool) -> str:
        for position in range(len(self.open) - 1, -1, -1):
            item = self.open[position]
            if item.indent is None:
                if item.word not in words:
                    return ""
                closing = self._close_down_to(position + 1)
                if not keep:
                    self.open.pop()
                return closing
        return ""

    def _end_block(self, name: str) -> str:
        self.ended_trims = False
        blocks = [i for i, item in enumerate(self.open) if item.word == "block"]
        wanted = [i for i in blocks if self.open[i].name == name] if name else []
        if not name:
            # An `endblock` without a name belongs to a `-- block` rather than to a bracket block.
            wanted = [i for i in blocks if self.open[i].indent is None] or blocks
        if not wanted:
            return ""
        if any(item.indent is None for item in self.open[wanted[-1] + 1 :]):
            return ""
        closing = self._close_down_to(wanted[-1] + 1)
        self.ended_trims = self.open.pop().trims
        return closing

    def _close_down_to(self, depth: int) -> str:
        closing = ""
        while len(self.open) > depth:
            item = self.open.pop()
            if item.indent is not None:
                closing += _end_of(item)
        return closing

    # -- lines of text

    def _data_line(self) -> None:
        """Writes text without comments, up to the next line that does not begin inside a tag."""
        begin, quote, in_comment = self.pos, "", False
        scan, newline = self.pos, -1
        while True:
            if scan > newline:
                newline = self.text.find("\n", scan)
                newline = len(self.text) if newline < 0 else newline
            # The search ends with the line: a search to the end for each line would take quadratic time.
            point = _POINTS.search(self.text, scan, newline)
            if point is None:
                if quote and not self._special_ahead(newline):
                    scan = newline + 1
                    if scan <= len(self.text):
                        continue
                self._copy(begin, min(newline + 1, len(self.text)))
                return
            mark, at = point.group(), point.start()
            if len(mark) == 2:
                begin, scan = self._tag(mark, begin, at)
                if scan > len(self.text):
                    return
                continue
            scan = at + 1
            if mark == "#":
                blank = at == self.pos or self.text[at - 1] in " \t\n"
                if not quote and blank:
                    if self.text.startswith("##", at):
                        self.out.append(self.text[begin:at].rstrip(" \t"))
                        self._emit_line("", newline)
                        return
                    in_comment = True
            elif quote:
                quote, scan = self._quoted(quote, mark, at)
            # An apostrophe within a word (`it's x  ## cut`) opens no YAML quote.
            elif not in_comment and self._opens_token(at) and self._closes(mark, at):
                quote = mark

    def _copy(self, begin: int, end: int) -> None:
        self.out.append(self.text[begin:end])
        self.pos = end

    def _quoted(self, quote: str, mark: str, at: int) -> tuple[str, int]:
        if mark != quote:
            return quote, at + 1
        # YAML writes a quote inside single quotes as two.
        if quote == "'" and self.text.startswith("''", at):
            return quote, at + 2
        if quote == '"':
            slashes = at - len(self.text[max(0, at - 64) : at].rstrip("\\")) - max(0, at - 64)
            if slashes % 2:
                return quote, at + 1
        return "", at + 1

    def _opens_token(self, at: int) -> bool:
        # Bounded, because the pattern is anchored at the end and would scan a long line for each quote.
        begin = max(0, at - 60)
        line = self.text.rfind("\n", begin, at) + 1
        return _TOKEN_START.search(self.text[max(line, begin) : at]) is not None

    def _closes(self, quote: str, at: int) -> bool:
        """Returns whether a YAML quote is closed on its line, or soon after with only plain text in between."""
        stop = self.text.find("\n", at)
        stop = len(self.text) if stop < 0 else stop
        if self.text.find(quote, at + 1, stop) >= 0:
            return True
        found = self.text.find(quote, stop, stop + 2000)
        return found >= 0 and not any(_is_special(line) for line in self.text[stop + 1 : found].split("\n"))

    def _special_ahead(self, newline: int) -> bool:
        end = self.text.find("\n", newline + 1)
        return _is_special(self.text[newline + 1 : len(self.text) if end < 0 else end])

    # -- tags inside text

    def _tag(self, mark: str, begin: int, at: int) -> tuple[int, int]:
        """Skips a Jinja tag; returns the offset of the first unwritten text and the offset to continue at."""
        end = self._tag_end(mark, at)
        if end < 0:
            self.out.append(self.text[begin:])
            self.pos = len(self.text) + 1
            return begin, self.pos
        if mark != "{%":
            return begin, end
        word = _WORD.match(self.text, at, end)
        if word is None:
            return begin, end
        if word.group(1) == "raw":
            stop = _ENDRAW.search(self.text, end)
            if stop is None or not stop.group().lstrip().startswith("--"):
                return begin, stop.end() if stop else len(self.text)
            self.out.append(self.text[begin : stop.start()] + "{% endraw %}")
            return stop.end(), stop.end()
        closing = self._statement_word(word.group(1), self.text[word.end() : end - 2].rstrip(" \t\n-+"))
        if closing:
            self.out.append(self.text[begin:at] + closing)
            begin = at
        return begin, end

    def _tag_end(self, mark: str, at: int) -> int:
        if mark == "{#":
            end = self.text.find("#}", at + 2)
            return end + 2 if end >= 0 else -1
        wanted, depth, scan = ("}}" if mark == "{{" else "%}"), 0, at + 2
        while token := _CODE.search(self.text, scan):
            found = token.group()
            scan = token.end()
            if found.endswith(wanted) and (depth <= 0 or mark == "{%" and "%" in found):
                return scan
            if found.endswith("}}"):
                scan = token.end() - 1
                depth -= 1
            elif found in "([{":
                depth += 1
            elif found in ")]}":
                depth -= 1
        return -1

    def _skip_raw(self) -> None:
        stop = _ENDRAW.search(self.text, self.pos)
        if stop is None:
            self._copy(self.pos, len(self.text))
            return
        self._copy(self.pos, stop.start())
        if stop.group().lstrip().startswith("--"):
            self._emit_line("{% endraw %}", stop.end())
        else:
            self._copy(stop.start(), stop.end())
            if self.pos < len(self.text):
                self._data_line()


def _is_special(line: str) -> bool:
    return bool(_MARK.fullmatch(line) or _BLOCK.fullmatch(line) or is_header(line))


def _end_of(block: _Open) -> str:
    if block.trims:
        # `{%-` also removes the line end before it, so a new one is printed for the text after the block.
        return f"{{%- endblock {block.name} %}}{{{{ '\\n' }}}}"
    return f"{{% endblock {block.name} %}}"


def unclosed_quote(line: str) -> str | None:
    """Returns the quote that the statement on a line opens and does not close; None if all quotes are closed.

    Example:
        >>> unclosed_quote('-- set name = "Tiny')
        '"'
    """
    statement = _MARK.fullmatch(line)
    for token in _CODE.finditer(statement[2]) if statement else ():
        found = token.group()
        if found.endswith("##") and found[0] not in "'\"":
            return None
        if found[0] in "'\"" and not _CLOSED.fullmatch(found):
            return found[0]
    return None


def _is_set_block(rest: str) -> bool:
    """Returns whether a `set` captures a block of lines, because there is no `=` outside of brackets and strings."""
    depth = 0
    for token in _ASSIGN.finditer(rest):
        found = token.group()
        if found == "=" and depth <= 0:
            return False
        depth += (found in "([{") - (found in ")]}")
    return True


def _cut_code(code: str) -> tuple[str, int]:
    """Returns a line of code without its trailing comment, and the number of brackets that stay open."""
    depth = 0
    if code.startswith("##"):
        return "", 0
    for token in _CODE.finditer(code):
        found = token.group()
        if found[0] in "'\"":
            continue
        if found.endswith("##"):
            return code[: token.start()], depth
        for char in found:
            depth += (char in "([{") - (char in ")]}")
    return code, depth
