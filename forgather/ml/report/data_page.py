"""The page of `fgcli data show`: rows of a data set as one HTML document that needs no other file.

Takes a `DataView`; gives HTML in the style of the report of a run. Every text of the data set is escaped, and secrets
in it are hidden. The content security policy of the page forbids all network connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from forgather.ml.data.data_view import DataView
from forgather.ml.data.shown_rows import ShownRow
from forgather.ml.data.token_kinds import Kind
from forgather.ml.number_format import format_count, plural
from forgather.ml.report.html_text import html_text
from forgather.ml.report.page import POLICY, STYLE

_MEANINGS = {
    Kind.TRAINED: "the loss counts it",
    Kind.MASKED: "seen by the model, without a loss (label -100)",
    Kind.PADDING: "added so that all rows of a batch have one length",
    Kind.INPUT: "seen by the model; the labels are not of its tokens",
}
# Marks besides colors: a trained token is underlined, padding is struck through.
_TOKEN_STYLE = (Path(__file__).parent / "data_page.css").read_text(encoding="utf-8")


def data_page(view: DataView, title: str) -> str:
    """Returns the page of a data set as an HTML document.

    Args:
        view: the rows and statistics to show.
        title: the title of the page.
    """
    body = "".join(
        (
            f'<header><div><p class="kicker">data set</p><h1>{html_text(title)}</h1></div></header>',
            _tiles(view),
            *(f'<p class="note bad">{html_text(warning)}</p>' for warning in view.warnings),
            f'<section class="first">{_lengths(view)}{_facts(view)}</section>',
            _legend(view),
            *(_row(view, row) for row in view.rows),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{STYLE}{_TOKEN_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _tiles(view: DataView) -> str:
    seen = view.statistics
    of_read = f"of {seen.rows_read:,} rows" if view.is_partial else ""
    share = seen.padding_share
    trained = seen.trained_tokens
    tiles = [
        ("rows", "unknown" if view.total is None else format_count(view.total), ""),
        ("tokens", None if seen.tokens is None else format_count(seen.tokens), of_read),
        ("trained", None if trained is None or not seen.tokens else f"{trained / seen.tokens:.1%}", "of the tokens"),
        ("padding", None if share is None else f"{share:.1%}", f"batches of {view.options.batch_rows}"),
        ("duplicates", format_count(seen.duplicate_rows), of_read),
        ("nothing to learn", format_count(seen.untrained_rows) if seen.untrained_rows else None, "rows"),
    ]
    cells = "".join(
        f'<div class="tile"><span>{html_text(name)}</span><b>{html_text(value)}</b>'
        f"<small>{html_text(note)}</small></div>"
        for name, value, note in tiles
        if value is not None
    )
    return f'<section class="tiles">{cells}</section>'


def _lengths(view: DataView) -> str:
    bins = view.statistics.histogram
    if len(bins) < 2:
        return ""
    most = max(count for *_, count in bins)
    rows = "".join(
        f"<tr><td>{low:,}{f' to {high:,}' if high > low else ''}</td><td>{count:,}</td>"
        f'<td><span style="--share:{count / most:.1%}"></span></td></tr>'
        for low, high, count in bins
    )
    table = f'<table class="bars widths"><tbody>{rows}</tbody></table>'
    return f'<section class="card"><h3>Rows by length, in tokens without padding</h3>{table}</section>'


def _facts(view: DataView) -> str:
    rows = "".join(
        f"<div><span>{html_text(name)}</span><code>{html_text(text)}</code></div>"
        for name, text in view.facts().items()
    )
    return f'<section class="card"><h3>This data set</h3><div class="facts about">{rows}</div></section>'


def _legend(view: DataView) -> str:
    found = {kind for row in view.rows for kind in (*row.kinds_T, *row.target_kinds_U)}
    if not found:
        return ""
    keys = "".join(
        f'<li><b class="{kind.word}">{kind.word}</b>{html_text(meaning)}</li>'
        for kind, meaning in _MEANINGS.items()
        if kind in found
    )
    keys += '<li><b class="special">special</b>a special token</li>'
    note = ""
    if view.options.is_causal and Kind.TRAINED in found:
        note = "A label is at its token: the model shifts labels, and predicts a token from those before it. "
    note += "The mouse pointer on a token shows its place, its id and its label. A label that is another id follows it."
    return f'<section class="card"><h3>Tokens</h3><ul class="keys">{keys}</ul><p class="note">{note}</p></section>'


def _row(view: DataView, row: ShownRow) -> str:
    counts = []
    if row.ids_T:
        kinds = [kind for kind in (Kind.TRAINED, Kind.MASKED, Kind.PADDING) if row.count(kind)]
        counts = [plural(row.length, "token"), *(f"{row.count(kind):,} {kind.word}" for kind in kinds)]
        counts += [plural(len(row.starts), "document")] if len(row.starts) > 1 else []
    title = f"Row {row.number:,}{': ' if counts else ''}{', '.join(counts)}"
    parts = []
    if row.ids_T:
        parts.append(f'<pre class="tokens">{"".join(_tokens(view, row))}</pre>')
    if row.target_ids_U is not None:
        targets = "".join(
            _token(view, place, None if kind is Kind.PADDING else label, kind, None)
            for place, (label, kind) in enumerate(zip(row.target_ids_U, row.target_kinds_U, strict=True))
        )
        parts.append(f'<h3>Labels</h3><pre class="tokens">{targets}</pre>')
    if row.columns:
        cells = "".join(
            f"<div><span>{html_text(name)}</span><code>{html_text(view.value_text(name, value))}</code></div>"
            for name, value in row.columns.items()
        )
        parts.append(f'<div class="facts">{cells}</div>')
    shown = f"<details open><summary>{html_text(title)}</summary>{''.join(parts)}</details>"
    return f'<section class="card more">{shown}</section>'


def _tokens(view: DataView, row: ShownRow) -> Iterator[str]:
    starts = {start: number for number, start in enumerate(row.starts, 1)} if len(row.starts) > 1 else {}
    labels: Sequence[int | None] = row.labels_T if row.labels_T is not None else [None] * len(row.ids_T)
    for place, (token_id, kind, label) in enumerate(zip(row.ids_T, row.kinds_T, labels, strict=True)):
        if place in starts:
            yield f"<small>document {starts[place]}, from token {place:,}</small>"
        yield _token(view, place, token_id, kind, label)


def _token(view: DataView, place: int, token_id: int | None, kind: Kind, label: int | None) -> str:
    text = "" if token_id is None else view.text(token_id)
    is_special = token_id is not None and view.text.is_special(token_id)
    about = f"token {place}, id {token_id if token_id is not None else 'none'}"
    if label is not None:
        about += f", label {label}"
    marked = view.marked_label(token_id, label)
    shown = f"<sup>{_escaped(marked)}</sup>" if marked else ""
    space = " " if view.text.tokenizer is None else ""
    special = " special" if is_special else ""
    # A line break is shown, and breaks the line.
    seen = _escaped(text).replace("\n", "⏎\n")
    return f'<i class="{kind.word}{special}" title="{about}">{seen}</i>{shown}{space}'


@cache
def _escaped(text: str) -> str:
    return html_text(text)
