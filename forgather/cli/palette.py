"""Colors, line breaks and links on a terminal, which are the same for every command.

The input is plain lines; the output is the same lines with terminal codes for colors. If the output is not a terminal,
lines are unchanged, unless `FORCE_COLOR` is set. `NO_COLOR` takes precedence over `FORCE_COLOR`. Only the sixteen basic
colors are used, because terminals adapt these colors to a light or dark background.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import IO, NamedTuple

OFF = "\x1b[0m"
ROLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "lint": "\x1b[1;36m",
    "good": "\x1b[1;32m",
    "strong": "\x1b[1m",
    "dim": "\x1b[2m",
    "key": "\x1b[36m",
    "place": "\x1b[94m",
    "call": "\x1b[35m",
    "anchor": "\x1b[33m",
    "added": "\x1b[32m",
    "removed": "\x1b[31m",
    "changed": "\x1b[33m",
    "trained": "\x1b[32m",
    "trained_next": "\x1b[92m",
    "masked": "\x1b[34m",
    "masked_next": "\x1b[94m",
    "padding": "\x1b[90m",
}
# It resets the color only, because a file name can be part of a bold line, which has to stay bold after it.
_PLACE_OFF = "\x1b[39m"
_CODE = r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\"
_INVISIBLE, _CODES = re.compile(_CODE), re.compile(rf"({_CODE})")
_WORDS = re.compile(rf"( *)((?:{_CODE}|[^ ])*)")
# In a narrower window, lines that are wrapped at words are harder to read than those that the terminal wraps.
_NARROWEST = 40
# Reports are made as plain lines, which a file gets unchanged, so the parts of a line are found again by their form.
_HEAD = re.compile(r"(.*?)((error|warning|note|lint)(\[\w+\])?:)")
_COUNTS = re.compile(r"(\S.*: )(ok|\d+ (error|warning)s?)(?=$|, )")
_LABEL = re.compile(r" +(-->|in |help:|not checked:|\d+ \||\|)")
_BRANCH = re.compile(r"([│├└─ ]*)(\[\d+\]:|'[^']*':|[^\s:]+:)?(.*)")
_KEY = re.compile(r"(\s*(?:- +)*)((?:[\w.*<-]+|'[^']*'|\"[^\"]*\")\s*:(?=\s|$))?(.*)")
_WORD = re.compile(
    r"(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<call>!\w[^\s,@]*)|(?P<anchor>(?:(?<=\s)|^)[&*][\w.-]+)|(?P<dim>(?:(?<=\s)|^)#.*)"
)


class Look(NamedTuple):
    """The colors, line breaks and links of lines on a terminal.

    Args:
        paint: a function that adds colors to a line, or None for no colors.
        hang: a function that returns the number of columns before the continuation lines of a line, or None to wrap no
            line.
        files: the absolute paths of files by short name. Short names in a line become links.
    """

    paint: Callable[[str], str] | None = None
    hang: Callable[[str], int] | None = None
    files: Mapping[str, str] = {}


def styled(role: str, text: str) -> str:
    """Returns text in the color of a role, which is a key of `ROLES`; the text is unchanged if the role is "".

    Example:
        >>> styled("good", "ok")
        '\\x1b[1;32mok\\x1b[0m'
    """
    return f"{ROLES[role]}{text}{OFF}" if text and role else text


def wants_color(stream: IO[str]) -> bool:
    """Returns True if output to a stream gets colors.

    A terminal gets colors. Every stream gets colors if `FORCE_COLOR` is set, and no stream if `NO_COLOR` is set.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: IO[str]) -> int | None:
    """Returns the number of columns of a terminal, or None if the stream is not a terminal or is too narrow."""
    if not stream.isatty():
        return None
    columns = shutil.get_terminal_size().columns
    return columns if columns >= _NARROWEST else None


def shown_on(stream: IO[str], line: str, look: Look) -> str:
    """Returns a line with the colors, links and line breaks that a stream supports.

    Args:
        stream: the stream to which the line will be written.
        line: the plain line.
        look: the colors, line breaks and links of the line.
    """
    columns = width_of(stream) if look.hang is not None else None
    hang = look.hang(line) if look.hang is not None else 0
    if wants_color(stream):
        line = look.paint(line) if look.paint is not None else line
        # A stored log, such as that of a CI job, may show colors, but links would stay as unreadable codes.
        line = with_places(line, look.files, links=stream.isatty() and os.environ.get("TERM") != "linux")
    return line if columns is None else wrapped(line, columns, hang)


def wrapped(line: str, width: int, hang: int) -> str:
    """Returns a line that is wrapped at spaces. A word that is too long is not broken, so that it can be copied.

    Args:
        line: the text, with or without codes for colors and links, which take no columns.
        width: the number of columns of the terminal.
        hang: the number of columns before the continuation lines.

    Example:
        >>> print(wrapped("  help: one two three", 17, 8))
          help: one two
                three
    """
    if len(_INVISIBLE.sub("", line)) <= width:
        return line
    # In a narrow window, a deep indentation would leave no room for the text.
    hang = min(hang, width // 2)
    parts: list[str] = []
    column = 0
    # A word ends at a space, not at a code inside it.
    for gap, word in _WORDS.findall(line):
        length = len(_INVISIBLE.sub("", word))
        if column > hang and length and column + len(gap) + length > width:
            parts.append("\n" + " " * hang)
            column = hang
        else:
            parts.append(gap)
            column += len(gap)
        parts.append(word)
        column += length
    return "".join(parts)


def indent_of(line: str) -> int:
    """Returns the column at which continuation lines of a wrapped line begin: two columns right of the line's text."""
    return len(line) - len(line.lstrip(" │├└─")) + 2


def with_places(line: str, files: Mapping[str, str], *, links: bool) -> str:
    """Returns a line in which file names and their line numbers have the color of places.

    Args:
        line: the text, with or without color codes.
        files: the absolute paths of files by short name.
        links: True to make each file name a link to the file.
    """
    if not files:
        return line
    # Longest first: in an alternation the first match counts, and one name can be the start of another.
    names = "|".join(re.escape(name) for name in sorted(files, key=len, reverse=True))

    def place(match: re.Match[str], is_dim: bool) -> str:
        name, number = match[1], match[2]
        # A place in color that is also dim would be too faint to read.
        text = match[0] if is_dim else f"{ROLES['place']}{match[0]}{_PLACE_OFF}"
        if not links or not os.path.isabs(files[name]):
            return text
        return f"\x1b]8;;file://{_quoted(files[name])}{f'#{number}' if number else ''}\x1b\\{text}\x1b]8;;\x1b\\"

    named = re.compile(rf"(?<![\w./:-])({names})(?::(\d+))?(?![\w/-])")
    # Text and codes alternate, since the final letter of a code would otherwise count as part of the next word.
    parts = _CODES.split(line)
    for at in range(0, len(parts), 2):
        is_dim = at > 0 and parts[at - 1] == ROLES["dim"]
        parts[at] = named.sub(lambda match, is_dim=is_dim: place(match, is_dim), parts[at])
    return "".join(parts)


def _quoted(path: str) -> str:
    """Returns a percent-encoded path, without `urllib`, whose import would take too long for `fgcli --help`."""
    return re.sub(
        r"[^\w./~-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "replace")), path
    )


def paint_finding(line: str) -> str:
    """Returns a line of a report with colors: the head in the color of its severity, carets red, labels dim."""
    if _COUNTS.match(line):
        return paint_counts(line)
    head = _HEAD.match(line)
    if head:
        return f"{head[1]}{styled(head[3], head[2])}{styled('strong', line[head.end() :])}"
    label = _LABEL.match(line)
    if label is None:
        return line
    rest = line[label.end() :]
    return styled("dim", label[0]) + (styled("error", rest) if rest.strip(" ^") == "" else rest)


def paint_counts(line: str) -> str:
    """Returns a line with counts, such as "tiny.yaml: 1 error, 2 lints", with colors; "ok" is green."""
    counts = _COUNTS.match(line)
    if counts is None:
        return line
    word, kind = counts[2], counts[3]
    return f"{counts[1]}{styled('good' if word == 'ok' else kind, word)}{line[counts.end() :]}"


def hang_of_finding(line: str) -> int:
    """Returns the column at which continuation lines of a report line begin: that of the text after the label."""
    label = _LABEL.match(line)
    return len(label[0]) + (1 if label[0].endswith(":") else 0) if label else indent_of(line)


def paint_tree(line: str) -> str:
    """Returns a line of a tree with colors for branches, keys, and the calls and anchors in values."""
    return _BRANCH.sub(lambda found: styled("dim", found[1]) + _key(found[2]) + paint_value(found[3]), line, count=1)


def paint_yaml(line: str) -> str:
    """Returns a line of YAML with colors for the key and the value."""
    return _KEY.sub(lambda found: found[1] + _key(found[2]) + paint_value(found[3]), line, count=1)


def _key(text: str | None) -> str:
    return f"{styled('key', text[:-1])}:" if text else ""


def paint_value(text: str) -> str:
    """Returns a value with colors for calls, anchors, aliases and comments."""

    def word(match: re.Match[str]) -> str:
        kind = str(match.lastgroup)
        return match[0] if kind == "quoted" else styled(kind, match[0])

    return _WORD.sub(word, text)


def paint_row(line: str) -> str:
    """Returns a row of a table whose first cell has the color of keys."""
    name, gap, rest = line.partition("  ")
    return f"{styled('key', name)}{gap}{rest}"


def hang_of_row(line: str) -> int:
    """Returns the column at which continuation lines of a table row begin: that of the row's second cell."""
    second = re.match(r"\s*\S.*?  +", line)
    return len(second[0]) if second else indent_of(line)


def paint_page(line: str) -> str:
    """Returns a line of a documentation page with colors for headings, code and reports."""
    if line.startswith("#"):
        return styled("strong", line.lstrip("# "))
    if line.startswith("    "):
        return paint_finding(line) if _LABEL.match(line[4:]) or _HEAD.match(line) else styled("key", line)
    return re.sub(r"`([^`]+)`", lambda code: styled("key", code[1]), line)


_FACT = re.compile(r"  \[\w+\](?: +|$)|[a-z][a-z ]*?  +(?=\S)")


def paint_reference(line: str) -> str:
    """Returns a line of the page of a setting or a template, with colors for headings, keys and YAML."""
    if line.startswith("    "):
        return paint_yaml(line)
    if fact := _FACT.match(line):
        return styled("key", fact[0]) + line[fact.end() :]
    is_heading = re.fullmatch(r"trainer_args\.\w+: .*|\S+\.yaml|[a-z]+:", line) is not None
    return styled("strong", line) if is_heading else paint_page(line)


def hang_of_reference(line: str) -> int:
    """Returns the column at which continuation lines begin on the page of a setting or a template."""
    fact = _FACT.match(line)
    return len(fact[0]) if fact else hang_of_page(line)


def reflowed(text: str) -> str:
    """Returns a documentation page in which each paragraph is one line; code and lists are unchanged.

    The lines can then be wrapped at the width of the terminal.

    Example:
        >>> print(reflowed("# Title\\n\\nOne\\nparagraph.\\n\\n    code\\n    more"))
        # Title
        <BLANKLINE>
        One paragraph.
        <BLANKLINE>
            code
            more
    """
    lines: list[str] = []
    fenced = goes_on = False
    for line in text.split("\n"):
        is_fence = line.startswith("```")
        is_prose = not fenced and re.match(r"[\w`'\"(*]", line) is not None and not is_fence
        if is_prose and goes_on and not line.startswith("* "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        fenced ^= is_fence
        goes_on = is_prose
    return "\n".join(lines)


def hang_of_page(line: str) -> int:
    """Returns the column at which continuation lines of a documentation page begin: the indent, or 2 in a list."""
    return 2 if line.startswith("* ") else len(line) - len(line.lstrip())
