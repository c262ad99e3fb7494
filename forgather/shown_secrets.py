"""Search for secrets in a text by the names before them: in YAML, JSON, Python, command lines, headers and URLs.

The input is a text; the output is the positions of its secrets. `secret_names` decides whether a name marks a value as
a secret. The time is linear in the length of the text, also for texts that are constructed to be slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase, ascii_uppercase

from forgather.secret_names import HIDDEN, Strength, is_about, is_secret, is_secret_in_query, is_variable, strength_of

# `str.lower` changes the length of some non-ASCII texts, and positions must stay valid.
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
_HINT = re.compile("tokens?|secret|pass|pwd?|credential|api_?keys?|authorization|keys?|bearer|jwt"
                   "|webhook|auth|cookie")  # fmt: skip
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_LONGEST_NAME = 100
_LONGEST_BRACKETS = 20_000
_CLOSE, _EQUALS = r"(?P<close>\\*[\"'])?\]?", r"[ \t]*(?P<sign>=>|:=|={1,3}|!=|:|%3[Dd])[ \t]*"
_SIGN = _CLOSE + _EQUALS
# In Python an annotation can be between a name and its value.
_SIGN_IN_CODE = rf"{_CLOSE}(?:[ \t]*:[ \t]*[A-Za-z_][\w.\[\]| ]{{0,80}}(?==))?{_EQUALS}"
_NEXT_WORD = r"(?P<close>\\*[\"'])?(?P<sign>,\s*|[ \t]*\n[ \t]*-[ \t]+|[ \t]+)"
_MARK = r"(?:&[\w.-]+|!(?P<tag>[^\s,\[\]{}]*))(?:[ \t]+|(?=\n)|$)"
_ANCHOR = r"(?<![^\s\[{,])&(?P<name>[\w.-]{1,80})[ \t]+"
_ALIAS = r"\*(?P<name>[\w.-]{1,80})"
_NAMED = ("env", "var", "calc")  # tags whose value is a name or an expression, not a secret
_OPEN = r"[rbfuRBFU]{0,2}(?P<quote>\"\"\"|'''|\\*[\"'])"
_KEY_BEFORE = r"(?:[^\n]*\|)?[ \t]*(?:[-?][ \t]+)*(?:--[ \t]+set[ \t]+)?\\*[\"']?$"
_FLOW_BEFORE = r"[{,(\[][ \t]*\\*[\"']?$"
_BARE = r"(?i:(?:(?:bearer|basic|token|digest|apikey)[ \t]+)?[^\s,\]}&#\"';<>]+)"
_SCHEME = r"(?i:(?:bearer|basic|token|digest|apikey)[ \t]+)"
_BLOCK = (
    r"[|>][+-]?\d?[+-]?[ \t]*(?:#[^\n]*)?\n(?P<block>(?P<indent>[ \t]+)[^\n]*(?:\n(?P=indent)[^\n]*|\n[ \t]*(?=\n|$))*)"
)
_EMPTY = r"(?:#[^\n]*)?\n"
_PART = (
    r"(?P<key>(?:\\{0,4}\"[^\"\n]*\"|\\{0,4}'[^'\n]*'|[\w.-]+)[ \t]*:(?=[\s\[{]|$))"
    r"|!(?P<tag>[^\s,\[\]{}]*)|[&*][\w.-]+|#[^\n]*|-[ \t]"
    r"|(?P<quoted>\\{0,4}\"(?:[^\"\\\n]|\\.)*\"|\\{0,4}'(?:[^'\\\n]|\\.|'')*')"
    r"|(?P<bare>[^\s,\[\]{}\"'#:][^,\[\]{}#\n\"']*)"
)
_WORD_BEFORE = r"[\"'](?P<word>[A-Za-z]{1,20}) $"
_RECORD = (
    r"(?<![\w-])(?:names?|key|header)\\{0,4}[\"']?[ \t]*:[ \t]*\\{0,4}[\"']?(?P<name>[\w.-]{1,60})\\{0,4}[\"']?"
    r"[ \t]*[,\n][ \t\n]{0,80}\\{0,4}[\"']?(?:value|default)\\{0,4}[\"']?[ \t]*:[ \t]*"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\"'{\[]+)"
)
_QUERY = r"(?P<name>(?<=[?&;])[\w.-]{1,60})=(?P<value>[^\s&#\"'<>;]+)"
_USER = r"://(?P<user>[^/\s@'\"<>(){}]+)@"


@dataclass(frozen=True, slots=True)
class Shown:
    """A secret in a text.

    Args:
        start: the offset of the first character of the secret.
        end: the offset after the last character of the secret.
        values: the secret, and the parts of it that are secrets by themselves.
        name: the name that marks the value as a secret.
        is_certain: False if the text is prose, in which the words after a name need not be a value.
        needs_quotes: whether a replacement must be quoted, because the secret is a JSON value without quotes.
    """

    start: int
    end: int
    values: tuple[str, ...]
    name: str
    is_certain: bool = True
    needs_quotes: bool = False


def under_names(text: str, *, is_code: bool = False, is_document: bool = False) -> Iterator[Shown]:
    """Yields the secrets that follow a name, in the order of the text and without overlap.

    Args:
        text: the text to search.
        is_code: whether the text is Python code, in which only quoted texts are values.
        is_document: whether a mapping or list below a name is the value of the name, as in a file that a user wrote.
    """
    reading = _Reading(text, is_code=is_code, is_document=is_document)
    done = 0
    for hint in _HINT.finditer(text.translate(_LOWER)):
        if hint.start() < done:
            continue
        begin, end = _name_around(text, hint.start(), hint.end())
        done = max(hint.end(), end)
        name = text[begin:end].strip(".")
        # In a header such as `"Authorization token"` the word before the name is part of it.
        if (before := _compiled(_WORD_BEFORE).search(text, max(0, begin - 24), begin)) is not None:
            name = f"{before['word']}_{name}"
        if strength_of(name.lstrip("-")) is Strength.NONE:
            continue
        found, behind = reading.after(begin, end, name)
        done = max(done, behind)
        yield from found


def in_records(text: str) -> Iterator[Shown]:
    """Yields the secret values of records with a name and its value under two keys: `name: HF_TOKEN, value: ...`."""
    if "value" not in text and "default" not in text:
        return
    for found in _compiled(_RECORD).finditer(text):
        value = found["value"].strip("\"'")
        if is_secret(found["name"], value):
            start = found.start("value") + found["value"].index(value)
            yield Shown(start, start + len(value), parts_of(value), found["name"])


def in_addresses(text: str) -> Iterator[Shown]:
    """Yields the user parts of URLs, and the secrets in their queries."""
    if "@" in text and "://" in text:
        for found in _compiled(_USER).finditer(text):
            user = found["user"]
            # `ssh://git@host` is the usual address of a repository.
            if user != "git" and HIDDEN not in user:
                parts = tuple(part for part in user.split(":") if len(part) >= 8)
                yield Shown(*found.span("user"), parts, "password")
    if "=" in text:
        for found in _compiled(_QUERY).finditer(text):
            if HIDDEN not in found["value"] and is_secret_in_query(found["name"], found["value"]):
                yield Shown(*found.span("value"), (found["value"],), "token")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # Compiling every pattern takes longer than the rest of this module, and most texts need two or three.
    return re.compile(pattern)


def parts_of(value: str) -> tuple[str, ...]:
    """Returns a secret, followed by the part that is a secret by itself: the text after a word such as `Bearer`."""
    scheme = _compiled(_SCHEME).match(value)
    return (value, value[scheme.end() :].strip()) if scheme else (value,)


def _name_around(text: str, start: int, end: int) -> tuple[int, int]:
    first, last = max(0, start - _LONGEST_NAME), min(len(text), end + _LONGEST_NAME)
    while start > first and text[start - 1] in _NAME:
        start -= 1
    while end < last and text[end] in _NAME:
        end += 1
    return start, end


class _Reading:
    """A reader of the values that follow names in one text."""

    def __init__(self, text: str, *, is_code: bool, is_document: bool) -> None:
        self.text, self.is_code, self.is_document = text, is_code, is_document
        self._anchors: dict[str, int] | None = None

    def after(self, begin: int, end: int, name: str) -> tuple[list[Shown], int]:
        """Returns the secrets that follow a name, and the offset at which the search continues.

        Args:
            begin: the offset of the first character of the name.
            end: the offset after the last character of the name.
            name: the name that may mark a secret.
        """
        text = self.text
        sign = _compiled(_SIGN_IN_CODE if self.is_code else _SIGN).match(text, end)
        if sign is None and name.startswith("-"):
            sign = _compiled(_NEXT_WORD).match(text, end)
            if sign is not None and text.startswith("-", sign.end() + (text[sign.end() : sign.end() + 1] in "\"'")):
                return [], end
        if sign is None:
            return [], end
        name = name.lstrip("-")
        position, is_name = sign.end(), False
        while (mark := _compiled(_MARK).match(text, position)) is not None and not self.is_code:
            is_name = is_name or mark["tag"] in _NAMED
            position = mark.end()
        first = text[position : position + 1]
        # The value is an expression of a template or shell, not the secret itself.
        if text.startswith(("{{", "{%", "${", "$("), position):
            return [], position
        if first == "*":
            return self._aliased(position, name) if self.is_document and not self.is_code else ([], position)
        if (opened := _compiled(_OPEN).match(text, position)) is not None:
            return self._quoted(opened, name)
        if first in ("[", "{") and first:
            return self._brackets(position, name) if self.is_document else ([], position)
        if self.is_code or is_name:
            return [], position
        if (block := _compiled(_BLOCK).match(text, position)) is not None:
            return self._block(block, name)
        if ":" in sign["sign"] and _compiled(_EMPTY).match(text, position):
            return self._children(begin, position, name) if self.is_document else ([], position)
        return self._bare(begin, position, sign, name)

    def _aliased(self, position: int, name: str) -> tuple[list[Shown], int]:
        """Returns the secret to which a YAML alias refers, at its anchor, and the offset to continue at."""
        if self._anchors is None:
            self._anchors = {found["name"]: found.end() for found in _compiled(_ANCHOR).finditer(self.text)}
        alias = _compiled(_ALIAS).match(self.text, position)
        start = self._anchors.get(alias["name"]) if alias else None
        if start is None:
            return [], position + 1
        if (opened := _compiled(_OPEN).match(self.text, start)) is not None:
            return self._quoted(opened, name)[0], position + 1
        bare = _compiled(_BARE).match(self.text, start)
        plain = bare[0] if bare else ""
        found = is_secret(name, plain)
        return [Shown(start, start + len(plain), parts_of(plain), name)] if found else [], position + 1

    def _quoted(self, opened: re.Match[str], name: str) -> tuple[list[Shown], int]:
        text, quote, start = self.text, opened["quote"], opened.end()
        end = _closing(text, quote, start)
        value = text[start:end]
        # The value of an f-string is an expression; the secret itself is somewhere else.
        is_filled_in = "{" in value and "f" in text[opened.start() : opened.start("quote")].lower()
        if is_filled_in or not is_secret(name, parts_of(value.strip())[-1]):
            # The text may contain another secret, as in a connection string or a URL.
            return [], start
        lines = tuple(line.strip() for line in value.split("\n")) if "\n" in value else ()
        return [Shown(start, end, (*parts_of(value), *lines), name)], end + len(quote)

    def _bare(self, begin: int, position: int, sign: re.Match[str], name: str) -> tuple[list[Shown], int]:
        text = self.text
        line = text.rfind("\n", max(0, begin - 300), begin) + 1 or max(0, begin - 300)
        before = text[line:begin]
        is_key = ":" in sign["sign"] and _compiled(_KEY_BEFORE).fullmatch(before) is not None
        is_spaced = text[position - 1 : position] in " \t"
        # In `a:b` without a space the colon belongs to a time, a path or a URL.
        if ":" in sign["sign"] and not (is_spaced or sign["close"] or "-" in name):
            return [], position
        if is_key:
            plain = self._line_from(position).removesuffix(",")
        else:
            bare = _compiled(_BARE).match(text, position)
            plain = bare[0] if bare else ""
        if not is_secret(name, plain) or (":" not in sign["sign"] and plain.endswith(":")):
            return [], position
        # A colon in a sentence is not followed by a value, unless that looks random or has a scheme such as `Bearer`.
        is_prose = not is_key and ":" in sign["sign"] and _compiled(_FLOW_BEFORE).search(before) is None
        if is_prose and not any(map(str.isdigit, plain)) and not _compiled(_SCHEME).match(plain):
            return [], position
        quotes = (sign["close"] or "").endswith('"') and sign["sign"] == ":"
        end = position + len(plain)
        return [Shown(position, end, parts_of(plain), name, not is_prose, quotes)], end

    def _line_from(self, position: int) -> str:
        """Returns the plain YAML scalar at a position: the rest of the line without a comment."""
        end = self.text.find("\n", position)
        line = self.text[position : len(self.text) if end < 0 else end]
        return line.partition(" #")[0].partition("\t#")[0].rstrip()

    def _block(self, block: re.Match[str], name: str) -> tuple[list[Shown], int]:
        plain = block["block"].strip()
        if not is_secret(name, plain):
            return [], block.start()
        lines = tuple(line.strip() for line in plain.split("\n"))
        # The indent is part of it: the replacement is on the line of the key.
        return [Shown(block.start(), block.end(), (plain, *lines), name)], block.end()

    def _children(self, begin: int, position: int, name: str) -> tuple[list[Shown], int]:
        """Returns the secrets on the more deeply indented lines below a key, and the offset to continue at."""
        text = self.text
        line = text.rfind("\n", 0, begin) + 1
        indent = len(text[line:begin]) - len(text[line:begin].lstrip(" \t"))
        if _compiled(_KEY_BEFORE).fullmatch(text[line : min(begin, line + 300)]) is None:
            return [], position
        end = text.find("\n", position)
        start = end
        while 0 <= end < len(text) - 1:
            following = text.find("\n", end + 1)
            following = len(text) if following < 0 else following
            inner = text[end + 1 : following]
            plain = inner.lstrip(" \t")
            depth = len(inner) - len(plain)
            if plain and not (depth > indent or (depth == indent and plain.startswith("- "))):
                break
            end = following
        return self._below(start, max(start, end), name), max(start, end)

    def _brackets(self, start: int, name: str) -> tuple[list[Shown], int]:
        text, depth, position = self.text, 0, start
        # A bracket that is never closed must not make the time quadratic.
        limit = min(len(text), start + _LONGEST_BRACKETS)
        while position < limit:
            char = text[position]
            if char in "\"'":
                position = min(limit, _closing(text, char, position + 1))
            elif char in "[{":
                depth += 1
            elif char in "]}":
                depth -= 1
                if not depth:
                    break
            position += 1
        return self._below(start, min(position, limit), name), min(position, limit)

    def _below(self, start: int, end: int, name: str) -> list[Shown]:
        """Returns the secrets in a mapping or list that is the value of a name."""
        found: list[Shown] = []
        key, tag = "", None
        for part in _compiled(_PART).finditer(self.text, start, end):
            if part["key"]:
                key, tag = part["key"].rstrip(": \t").strip("\\\"'"), None
            elif part["tag"] is not None:
                tag = part["tag"]
            elif part["quoted"] or part["bare"]:
                kind = "quoted" if part["quoted"] else "bare"
                raw = part[kind].rstrip()
                head = len(raw) - len(raw.lstrip("\\")) + 1 if kind == "quoted" else 0
                plain = raw[head:-1].rstrip("\\") if head else raw
                if self._is_value_below(name, key, tag, plain) and not (self.is_code and kind == "bare"):
                    at = part.start(kind) + head
                    found.append(Shown(at, at + len(plain), parts_of(plain), name))
                if tag in _NAMED:
                    tag = None
                key = ""
        return found

    def _is_value_below(self, name: str, key: str, tag: str | None, plain: str) -> bool:
        if tag in _NAMED or is_about(key) or (not key and is_variable(plain)):
            return False
        if strength_of(key) is not Strength.NONE:
            return is_secret(key, plain)
        return is_secret(f"{name}.value" if strength_of(name) is Strength.STRONG else f"{name}.{key or 'value'}", plain)


def _closing(text: str, quote: str, start: int) -> int:
    """Returns the offset at which a quoted text ends: that of the closing quote, or of the end of the line."""
    if len(quote) == 3 and quote[0] == quote[1]:
        end = text.find(quote, start)
        return len(text) if end < 0 else end
    line = text.find("\n", start)
    line = len(text) if line < 0 else line
    position = text.find(quote, start, line)
    while position >= 0 and quote in "\"'" and _is_escaped(text, position, start):
        position = text.find(quote, position + 1, line)
    # Inside single quotes YAML writes a quote twice.
    if quote == "'":
        while 0 <= position < line - 1 and text[position + 1] == "'":
            position = text.find(quote, position + 2, line)
    return line if position < 0 else position


def _is_escaped(text: str, position: int, start: int) -> bool:
    count = 0
    while position - count > start and text[position - count - 1] == "\\":
        count += 1
    return count % 2 == 1
