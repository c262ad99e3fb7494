"""Rows of a data set and their statistics as lines for the terminal.

Takes a `DataView`; gives lines. With colors, the color of a token is its kind. Without colors, a line of marks below
the tokens has the letter of the kind below the first column of each token, so that any text can be read exactly.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from forgather.cli.output import Line
from forgather.cli.palette import OFF, ROLES, paint_row, styled

_INDENT = "  "
_BAR_COLUMNS = 30
_MOST_TOKENS = 1024  # of a longer row the beginning and the end are shown, unless it is the only row
_UNDERLINED = "\x1b[4m"
_KINDS = {
    "trained": ("t", "the loss counts it"),
    "masked": ("m", "seen by the model, without a loss (label -100)"),
    "padding": ("p", "added so that all rows of a batch have one length"),
    "input": ("i", "seen by the model; the labels are not of its tokens"),
}


class _Piece(NamedTuple):
    """A part of a token that is on one line: its text, its kind, and whether the token begins with it."""

    text: str
    kind: str
    is_special: bool = False
    is_first: bool = True
    is_odd: bool = False


class DataScreen:
    """Writes a view of a data set as lines.

    Args:
        view: the view, a `DataView`.
        title: the first line.
        width: the number of columns.
        has_color: whether kinds are shown by color; otherwise by marks.
        encoding: the encoding of the output, which decides how line breaks and bars are written.
    """

    def __init__(self, view: Any, title: str, *, width: int, has_color: bool, encoding: str = "utf-8") -> None:
        self._view, self._title, self._has_color = view, title, has_color
        self._width = max(width, 20)
        self._newline = "⏎" if _has("⏎", encoding) else "\\n"
        self._tab = "⇥" if _has("⇥", encoding) else "\\t"
        self._bar = "█" if _has("█", encoding) else "#"
        self._arrow = "→" if _has("→", encoding) else "->"

    def lines(self) -> list[Line]:
        """Returns the lines of the screen: statistics, lengths, the legend and the rows."""
        parts = [[Line(self._title, _strong), *self._facts()], self._histogram(), self._legend()]
        parts += map(self._row, self._view.rows)
        return [line for part in parts if part for line in (*part, Line(""))][:-1]

    def _facts(self) -> list[Line]:
        rows: dict[str, str] = self._view.facts()
        width = max(map(len, rows))
        return [Line(f"{name:<{width}}  {text}", paint_row, width + 2) for name, text in rows.items()]

    def _histogram(self) -> list[Line]:
        bins = self._view.statistics.histogram
        if len(bins) < 2:
            return []
        names = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high, _ in bins]
        most, width = max(count for *_, count in bins), max(map(len, names))
        numbers = max(len(f"{count:,}") for *_, count in bins)
        room = min(_BAR_COLUMNS, max(4, self._width - width - numbers - 6))
        lines = [Line("rows by length, in tokens without padding:")]
        for name, (_, _, count) in zip(names, bins, strict=True):
            # A range with rows has a bar, however few they are.
            bar = self._bar * (max(1, round(count / most * room)) if count else 0)
            lines.append(Line(f"{_INDENT}{name:>{width}}  {count:>{numbers},}  {bar}".rstrip()))
        return lines

    def _legend(self) -> list[Line]:
        kinds = dict.fromkeys(kind.word for row in self._view.rows for kind in (*row.kinds_T, *row.target_kinds_U))
        if not kinds:
            return []
        lines = [Line("each token has the color of its kind; special tokens are underlined:")]
        if not self._has_color:
            lines = [Line("below each token is the letter of its kind, and '-' below the rest of it:")]
        for kind in [kind for kind in _KINDS if kind in kinds]:
            letter, meaning = _KINDS[kind]
            name = kind if self._has_color else f"{letter} {kind}"
            lines.append(Line(f"{_INDENT}{name:<9}  {meaning}", _painted_kind(kind), 13))
        lines += [Line(f"{_INDENT}{note}", None, 2) for note in self._notes(kinds)]
        return lines

    def _notes(self, kinds: Any) -> Iterator[str]:
        view = self._view
        if view.options.is_causal and "trained" in kinds:
            yield "A label is at its token: the model shifts labels, and predicts a token from those before it."
        if any(_is_marked(view, row) for row in view.rows):
            what = "its class" if view.options.class_names else "its label"
            if view.label_is_token:
                what = "the token that has to be predicted, where it is another one"
            yield f"{self._arrow} after a token: {what}."

    def _row(self, row: Any) -> list[Line]:
        lines = [Line(_headline(row), _strong)]
        if row.ids_T:
            lines += self._tokens(row)
        if row.target_ids_U is not None:
            lines.append(Line(f"{_INDENT}labels:"))
            known = [token_id if token_id >= 0 else None for token_id in row.target_ids_U]
            lines += self._flow(known, row.target_kinds_U, [""] * len(known))
        width = max([len(name) for name in row.columns], default=0)
        for name, value in row.columns.items():
            lines.append(Line(f"{_INDENT}{name:<{width}}  {self._view.value_text(name, value)}", None, width + 4))
        return lines

    def _tokens(self, row: Any) -> list[Line]:
        """Returns the tokens of a row: each document begins on a line of its own."""
        labels = [self._label(row, place) for place in range(len(row.ids_T))]
        # Of a row of preferences, there are two answers.
        is_alone = len({one.number for one in self._view.rows}) == 1
        shown = len(row.ids_T) if is_alone else _MOST_TOKENS
        half = shown // 2
        left_out = range(half, len(row.ids_T) - half) if len(row.ids_T) > shown else range(0)
        starts = {start: number for number, start in enumerate(row.starts, 1)} if len(row.starts) > 1 else {}
        # A piece ends where a document starts and where tokens are left out.
        borders = sorted({0, len(row.ids_T), *starts, *([left_out.start, left_out.stop] if left_out else ())})
        lines: list[Line] = []
        for begin, end in zip(borders, borders[1:], strict=False):
            if begin in starts and begin not in left_out:
                name = f"document {starts[begin]} of {len(starts)}, from token {begin:,}:"
                lines.append(Line(f"{_INDENT}{name}", _dim))
            if begin in left_out:
                if begin == left_out.start:
                    what = f"... {len(left_out):,} tokens are not shown: '--row {row.number}' shows all ..."
                    lines.append(Line(f"{_INDENT}{what}", _dim))
                continue
            lines += self._flow(row.ids_T[begin:end], row.kinds_T[begin:end], labels[begin:end])
        return lines

    def _label(self, row: Any, place: int) -> str:
        label = None if row.labels_T is None else row.labels_T[place]
        marked = self._view.marked_label(row.ids_T[place], label)
        return self._arrow + self._visible(marked) if marked else ""

    def _flow(self, ids: Sequence[int | None], kinds: Sequence[Any], labels: Sequence[str]) -> list[Line]:
        lines: list[Line] = []
        place = 0
        while place < len(ids):
            end = place
            while end < len(ids) and kinds[end].word == "padding" and not labels[end]:
                end += 1
            # Padding is a hundred times the same token, and is counted instead.
            if end > place:
                lines += self._padding(ids[place:end])
            begin = end
            while end < len(ids) and (kinds[end].word != "padding" or labels[end]):
                end += 1
            tokens = zip(ids[begin:end], kinds[begin:end], labels[begin:end], strict=True)
            lines += self._written(self._pieces(tokens))
            place = end
        return lines

    def _padding(self, ids: Sequence[int | None]) -> list[Line]:
        found = [self._text(token_id) for token_id in dict.fromkeys(ids)]
        what = f" x {found[0]}" if len(found) == 1 and found[0] else ""
        return [Line(f"{_INDENT}padding: {len(ids):,}{what}", _painted_kind("padding"))]

    def _pieces(self, tokens: Any) -> Iterator[list[_Piece]]:
        """Yields the pieces of each line; a line ends after a line break of the text, and where it is full."""
        room = self._width - len(_INDENT)
        line: list[_Piece] = []
        column = 0
        for number, (token_id, kind, label) in enumerate(tokens):
            special = token_id is not None and self._view.text.is_special(token_id)
            is_first = True
            for text, breaks in self._segments(token_id, label):
                while text:
                    size = _fitting(text, room - column)
                    # Only a text that is longer than a line is cut in two.
                    if size < len(text) and column and _columns(text) <= room:
                        yield line
                        line, column = [], 0
                        continue
                    # One character at least, or a narrow window would never be filled.
                    piece, text = text[: max(size, 1)], text[max(size, 1) :]
                    line.append(_Piece(piece, kind.word, special, is_first, number % 2 == 1))
                    column, is_first = column + _columns(piece), False
                    if text:
                        yield line
                        line, column = [], 0
                if breaks:
                    yield line
                    line, column = [], 0
        if line:
            yield line

    def _segments(self, token_id: int | None, label: str) -> Iterator[tuple[str, bool]]:
        """Yields the visible text of a token up to each line break in it, and whether a line break follows."""
        text = "" if token_id is None else self._view.text(token_id)
        *parts, last = text.split("\n")
        yield from ((self._visible(part) + self._newline, True) for part in parts)
        # Ids and the names of classes need a space after them; texts have their own.
        space = " " if self._view.text.tokenizer is None or (label and not self._view.label_is_token) else ""
        yield self._visible(last) + label + space, False

    def _written(self, lines: Iterator[list[_Piece]]) -> Iterator[Line]:
        for pieces in lines:
            plain = _INDENT + "".join(piece.text for piece in pieces)
            if self._has_color:
                yield Line(plain, _painter(plain, pieces), len(_INDENT))
            else:
                yield Line(plain, None, len(_INDENT))
                yield Line(_INDENT + "".join(map(_mark, pieces)), None, len(_INDENT))

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._visible(self._view.text(token_id))

    def _visible(self, text: str) -> str:
        """Returns text on one line: line breaks and tabs are symbols, other control characters are escaped."""
        text = text.replace("\n", self._newline).replace("\t", self._tab)
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _headline(row: Any) -> str:
    if not row.ids_T:
        return f"row {row.number:,}"
    counts = {word: sum(kind.word == word for kind in row.kinds_T) for word in ("trained", "masked", "padding")}
    parts = [f"{row.length:,} token{'' if row.length == 1 else 's'}"]
    if row.labels_T is not None:
        parts += [f"{counts['trained']:,} trained", f"{counts['masked']:,} masked"]
    if counts["padding"]:
        parts.append(f"{counts['padding']:,} padding")
    if len(row.starts) > 1:
        parts.append(f"{len(row.starts):,} documents")
    return f"row {row.number:,}: {', '.join(parts)}"


def _is_marked(view: Any, row: Any) -> bool:
    return row.labels_T is not None and any(map(view.marked_label, row.ids_T, row.labels_T))


def _mark(piece: _Piece) -> str:
    """Returns the marks below a piece: the letter of its kind where its token begins, and dashes below the rest."""
    columns = _columns(piece.text)
    letter = _KINDS[piece.kind][0] if piece.is_first else "-"
    return (letter + "-" * (columns - 1))[:columns]


def _painter(plain: str, pieces: Sequence[_Piece]) -> Callable[[str], str]:
    """Returns a function that colors a line. Neighboring tokens have two shades, so that their border can be seen."""

    def painted(line: str) -> str:
        """Returns the line of the pieces with a color for each kind."""
        # A secret in the text was hidden, so the pieces are no longer at their places.
        if line != plain:
            return line
        parts = [_INDENT]
        for piece in pieces:
            role = f"{piece.kind}_next" if piece.is_odd and f"{piece.kind}_next" in ROLES else piece.kind
            text = styled(role if role in ROLES else "", piece.text)
            parts.append(f"{_UNDERLINED}{text}{OFF}" if piece.is_special else text)
        return "".join(parts)

    return painted


def _painted_kind(kind: str) -> Callable[[str], str]:
    return lambda line: styled(kind, line) if kind in ROLES else line


def _strong(line: str) -> str:
    return styled("strong", line)


def _dim(line: str) -> str:
    return styled("dim", line)


def _columns(text: str) -> int:
    """Returns the number of columns of a text on a terminal: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _fitting(text: str, room: int) -> int:
    """Returns how many characters of a text fit into a number of columns."""
    if text.isascii():
        return max(0, min(len(text), room))
    columns = 0
    for place, char in enumerate(text):
        columns += _columns(char)
        if columns > room:
            return place
    return len(text)


def _has(char: str, encoding: str) -> bool:
    try:
        char.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
