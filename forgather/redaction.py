"""Redaction of secrets from texts, data and output streams.

The input is texts and data; the output is the same texts and data, with `(hidden)` in place of each secret. A value is
a secret if `!env` read it, if its name looks secret, or if it is the secret part of a URL. Once a secret is known, it
is hidden from everything that this process writes or prints, also in the escaped spellings of JSON, Python and HTML,
and where it was shortened.

A secret is never shown in part: a longer word that contains a random-looking secret is hidden as a whole. An ordinary
word that `!env` read (`NAME=baseline`) is hidden only as a whole word, so that `baselines` stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TextIO, cast

from forgather.secret_names import (
    HIDDEN,
    Strength,
    is_about,
    is_number,
    is_random,
    is_secret,
    may_be_secret,
    strength_of,
)
from forgather.shown_secrets import Shown, in_addresses, in_records, parts_of, under_names

__all__ = [
    "HIDDEN", "hidden", "hide", "hide_known", "is_secret", "known_hidden", "note", "note_secrets", "remember",
    "without_secrets",
]  # fmt: skip

_WHOLE_BELOW = 8
_SHORTEST = 4
_ELLIPSIS = re.compile(r"…|\.\.\.")
_FAMOUS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|gh[opusr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-(?:[a-z]+-)*[A-Za-z0-9_-]{20,}|A(?:KI|SI)A[A-Z0-9]{16}|xox[abeprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
_FAMOUS_BEGINNINGS = ("hf_", "gh", "glpat-", "sk-", "AKIA", "ASIA", "xox", "AIza", "eyJ")


@dataclass(frozen=True, slots=True)
class _Known:
    """The spellings of a secret, and how the secret was recognized.

    Args:
        spellings: the value itself, and its escaped forms.
        is_sure: whether a longer word that contains the value is a secret, too.
        is_named: whether the value was recognized as a secret by its name.
    """

    spellings: tuple[str, ...]
    is_sure: bool
    is_named: bool


_known: dict[str, _Known] = {}


def remember(value: str, name: str = "") -> None:
    """Records a value as a secret, so that it is hidden from now on.

    Args:
        value: a value that `!env` read, or a value with a name that looks secret. A short word, number or path is
            recorded only if its name looks secret; otherwise most of every text would be hidden.
        name: the name of the value.
    """
    if value in _known and (_known[value].is_named or not name):
        return
    if len(value) < _SHORTEST or not may_be_secret(value):
        return
    is_named = is_secret(name, value)
    is_ordinary = value.startswith(("/", "~", ".")) or (is_number(value) and len(value) < _WHOLE_BELOW)
    if is_ordinary and not is_named:
        return
    # Each writer escapes in its own way, and an escaped secret is still readable.
    in_html = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    in_page = in_html.replace('"', "&quot;").replace("'", "&#x27;")
    spellings = (
        value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], in_html,
        in_page, in_page.replace("&#x27;", "&#39;"), value.replace("'", "''"), _in_address(value),
    )  # fmt: skip
    is_sure = is_named or (len(value) >= _WHOLE_BELOW and is_random(value) and not any(map(str.isspace, value)))
    _known[value] = _Known(tuple(dict.fromkeys(spellings)), is_sure, is_named)


def note(name: str, value: object) -> None:
    """Records a value as a secret if its name looks secret.

    Args:
        name: the name of the value.
        value: a text, or a mapping or list; if its name looks secret, all texts and numbers inside it are secrets.
    """
    if isinstance(value, str):
        if is_secret(name, value):
            for part in parts_of(value):
                remember(part, name)
        for shown in in_addresses(value):
            _remember_shown(shown)
    else:
        for found in _below(name, value, is_below=False):
            for part in parts_of(found):
                remember(part, "password")


def note_secrets(text: str, *, is_code: bool = False) -> None:
    """Records the secrets that are visible in a user's text, so that they are hidden from all other texts.

    Args:
        text: a text that the user wrote, or a text that was generated from such a text.
        is_code: whether the text is Python code.
    """
    for shown in (*under_names(text, is_code=is_code, is_document=True), *in_records(text), *in_addresses(text)):
        _remember_shown(shown)


def hide(text: str, *, is_code: bool = False, is_document: bool = False, is_named: bool = False) -> str:
    """Returns a text without known secrets, and without the secrets that the text itself shows.

    A text shows a secret after a name that looks secret, in a URL, or in the form of a well-known kind of token.

    Args:
        text: the text to redact.
        is_code: whether the text is Python code, in which only quoted texts are values.
        is_document: whether a user wrote the text, so that nested lines below a name belong to the name.
        is_named: the argument `is_named` of `hide_known`.
    """
    text = hide_known(text, is_named=is_named)
    text = _replaced(text, under_names(text, is_code=is_code, is_document=is_document))
    text = _replaced(text, in_records(text))
    text = _replaced(text, in_addresses(text))
    # Searching for fixed texts first is much cheaper than the pattern, and few texts contain one.
    if any(beginning in text for beginning in _FAMOUS_BEGINNINGS):
        text = _FAMOUS.sub(HIDDEN, text)
    return text


def hide_known(text: str, *, is_named: bool = False, keeps_words: bool = False) -> str:
    """Returns a text without the secrets that are known.

    Args:
        text: the text to redact.
        is_named: whether only secrets that were recognized by name are hidden. It is set for files that programs read,
            in which an ordinary value of `!env` must remain.
        keeps_words: whether ordinary words and numbers remain, even if they are secrets. It is set for keys and code,
            in which words such as `train` and `test` are names.
    """
    # The longest first: a secret may contain another one.
    for value in sorted(_known, key=len, reverse=True):
        known = _known[value]
        if (is_named and not known.is_named) or (keeps_words and not (known.is_sure and is_random(value))):
            continue
        for spelling in known.spellings:
            if spelling in text:
                text = _without(text, spelling, is_sure=known.is_sure)
        if known.is_sure and len(value) >= 2 * _WHOLE_BELOW and "://" not in value:
            # Messages and tables shorten long texts, and the beginning of a secret is secret as well.
            beginning = value[: max(10, min(24, len(value) // 2))]
            if beginning in text:
                text = _without(text, beginning, is_sure=True)
    return text if is_named or keeps_words else _without_pieces(text)


def known_hidden(data: Any, *, is_named: bool = False) -> Any:
    """Returns plain data without known secrets in its texts. Numbers remain, because they are measurements.

    Args:
        data: the mappings, lists and plain values. Other objects are returned unchanged.
        is_named: the argument `is_named` of `hide_known`.
    """
    if isinstance(data, Mapping):
        return {_shown_key(key, is_named): known_hidden(value, is_named=is_named) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [known_hidden(value, is_named=is_named) for value in data]
    return hide_known(data, is_named=is_named) if isinstance(data, str) else data


def holds_hidden(data: object) -> bool:
    """Returns whether plain data contains `(hidden)` in place of a secret."""
    if isinstance(data, Mapping):
        return any(map(holds_hidden, data.values()))
    if isinstance(data, list | tuple):
        return any(map(holds_hidden, data))
    return isinstance(data, str) and HIDDEN in data


def note_words(words: Sequence[str]) -> None:
    """Records the secrets among the words of a command line, so that they are hidden from now on."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, has_value, value = word.partition("=")
        if has_value:
            note(name.lstrip("-"), value)
            note_secrets(value)
        elif word.startswith("-") and not following.startswith("-"):
            note(word.lstrip("-"), following)
        for shown in in_addresses(word):
            _remember_shown(shown)


def hidden(data: Any, name: str = "", *, is_named: bool = False) -> Any:
    """Returns plain data of the same structure without secrets.

    Args:
        data: the mappings, lists and plain values; other objects are returned unchanged.
        name: the name of the data. A name that looks secret also applies to the values inside the data.
        is_named: the argument `is_named` of `hide_known`.
    """
    return _hidden(data, name, is_below=False, is_named=is_named)


@contextmanager
def without_secrets() -> Iterator[None]:
    """Context manager that hides known secrets from everything that this process prints."""
    before = sys.stdout, sys.stderr
    ours = [stream if stream is None else cast(TextIO, _Stream(stream)) for stream in before]
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        # Code within the block may have replaced a stream; its replacement stays.
        if sys.stdout is ours[0]:
            sys.stdout = before[0]
        if sys.stderr is ours[1]:
            sys.stderr = before[1]


class _Stream:
    """A text stream that hides known secrets from written text, and otherwise behaves as the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def write(self, text: str) -> int:
        written = hide_known(text) if _known and isinstance(text, str) else text
        self._stream.write(written)
        # The caller expects the count of its own characters, not of the redacted text.
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _remember_shown(shown: Shown) -> None:
    if shown.is_certain:
        for value in shown.values:
            remember(value, shown.name if is_secret(shown.name, value) else "password")


def _shown_key(key: Any, is_named: bool) -> Any:
    # Replacing is slow, a checkpoint has millions of keys, and almost none contains a secret.
    holds_one = isinstance(key, str) and any(value[:10] in key for value in _known)
    return hide_known(key, is_named=is_named, keeps_words=True) if holds_one else key


def _hidden(data: Any, name: str, *, is_below: bool, is_named: bool) -> Any:
    if data is None or isinstance(data, float | bool):  # a float is a measurement, not a secret
        return data
    inherits = is_below or strength_of(name) is Strength.STRONG
    if isinstance(data, Mapping):
        return {
            _shown_key(key, is_named): _hidden(
                value, str(key), is_below=inherits and not is_about(str(key)), is_named=is_named
            )
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        items = [_hidden(value, name if inherits else "", is_below=inherits, is_named=is_named) for value in data]
        # A list may be a command line, as in `["--token", "..."]`.
        for position, (option, value) in enumerate(zip(data, data[1:], strict=False)):
            if isinstance(option, str) and option.startswith("-") and isinstance(value, str):
                if not value.startswith("-") and is_secret(option.lstrip("-"), value):
                    items[position + 1] = HIDDEN
        return items
    if isinstance(data, str):
        if is_secret(name, parts_of(data)[-1]) or (is_below and is_secret("password", data)):
            return HIDDEN
        return hide(data, is_document=True, is_named=is_named)
    if isinstance(data, int):
        text = str(data)
        # A step or a size can be equal to a short secret of digits.
        is_known = len(text) >= _WHOLE_BELOW and text in _known
        return HIDDEN if is_known or (inherits and is_secret("password", text)) else data
    return data


def _below(name: str, data: object, *, is_below: bool) -> Iterator[str]:
    inherits = is_below or strength_of(name) is Strength.STRONG
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _below(str(key), value, is_below=inherits and not is_about(str(key)))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _below(name if inherits else "", value, is_below=inherits)
    elif isinstance(data, str | int | float) and not isinstance(data, bool):
        if is_secret(name, str(data)) or (is_below and is_secret("password", str(data))):
            yield str(data)


def _in_address(value: str) -> str:
    if value.isalnum() and value.isascii():
        return value
    # The unreserved characters of RFC 3986 are not percent-encoded.
    safe = b"-._~ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in value.encode("utf-8", "replace"))


def _replaced(text: str, shown: Iterable[Shown]) -> str:
    parts: list[str] = []
    done = 0
    for found in shown:
        if found.start >= done:
            parts += text[done : found.start], f'"{HIDDEN}"' if found.needs_quotes else HIDDEN
            done = found.end
    return "".join((*parts, text[done:])) if parts else text


def _without(text: str, value: str, *, is_sure: bool) -> str:
    """Returns a text in which a value is hidden.

    Args:
        text: the text to redact.
        value: the value to hide.
        is_sure: whether a longer word that contains the value is hidden as a whole; if not, such a word is kept.
    """
    parts: list[str] = []
    done = 0
    start = text.find(value)
    while start >= 0:
        first, end = start, start + len(value)
        if is_sure:
            first, end = _word_around(text, value, done, start, end)
        elif _is_inside(text, value, start, end):
            start = text.find(value, start + 1)
            continue
        parts += text[done:first], _stand_in(text, value, first, end)
        done = end
        start = text.find(value, end)
    return "".join((*parts, text[done:]))


def _word_around(text: str, value: str, done: int, start: int, end: int) -> tuple[int, int]:
    first = start
    if _is_word(value[0]):
        while first > done and _is_word(text[first - 1]):
            first -= 1
        if first > 0 and text[first - 1] == "\\":
            # A backslash before the word begins an escape: a newline, or a character by its number. Its letters are not
            # part of the word.
            first = min(start, first + {"u": 5, "x": 3, "U": 9}.get(text[first], 1))
    if _is_word(value[-1]):
        while end < len(text) and _is_word(text[end]):
            end += 1
    return first, end


def _is_inside(text: str, value: str, start: int, end: int) -> bool:
    before, behind = text[start - 1 : start], text[end : end + 1]
    is_escaped = text[start - 2 : start - 1] == "\\"
    return (value[0].isalnum() and before.isalnum() and not is_escaped) or (value[-1].isalnum() and behind.isalnum())


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _stand_in(text: str, value: str, first: int, end: int) -> str:
    """Returns the replacement for a value, quoted if the value is a JSON number, so that the text stays JSON."""
    is_number_of_json = (
        is_number(value)
        and text[:1] in "{["
        and text[max(0, first - 20) : first].rstrip()[-1:] in (":", ",", "[")
        and text[end : end + 20].lstrip()[:1] in (",", "]", "}")
    )
    return f'"{HIDDEN}"' if is_number_of_json else HIDDEN


def _without_pieces(text: str) -> str:
    """Returns a text without the beginnings and ends of secrets that were shortened by an ellipsis."""
    long = [
        value for value, known in _known.items() if known.is_sure and len(value) >= _WHOLE_BELOW and "://" not in value
    ]
    if not long or not ("..." in text or "…" in text):
        return text
    parts: list[str] = []
    done = 0
    for dots in _ELLIPSIS.finditer(text):
        first, end = dots.span()
        for value in long:
            size = min(len(value) - 1, first - done)
            head = text.find(value[:_SHORTEST], first - size, first) if size >= _SHORTEST else -1
            while head >= 0 and not value.startswith(text[head : dots.start()]):
                head = text.find(value[:_SHORTEST], head + 1, dots.start())
            first = head if head >= 0 else first
            rest = text[dots.end() : dots.end() + len(value)]
            tail = value.find(rest[:_SHORTEST], 1) if len(rest) >= _SHORTEST else -1
            while tail >= 0 and not rest.startswith(value[tail:]):
                tail = value.find(rest[:_SHORTEST], tail + 1)
            if 0 <= tail <= len(value) - _SHORTEST:
                end = max(end, dots.end() + len(value) - tail)
        if (first, end) != dots.span():
            parts += text[done:first], HIDDEN
            done = end
    return "".join((*parts, text[done:])) if parts else text
