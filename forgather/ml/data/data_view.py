"""A view of a data set: some of its rows as the model gets them, statistics of many, and warnings.

Takes a data set, a collator and a tokenizer; gives a `DataView`, from which the terminal, JSON and a page are written.
The model is not needed, and nothing is trained.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.ml.data.chat_template import stop_token_ids
from forgather.ml.data.collated_rows import ANSWER, Collate, RowBatch, RowReader, with_answers_as_rows
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.data.row_statistics import Statistics, StatisticsCounter
from forgather.ml.data.shown_rows import ShownRow, row_fact, shown_rows, value_text
from forgather.ml.data.token_kinds import IGNORED, TokenBatch, token_batch
from forgather.ml.data.token_text import TokenText
from forgather.ml.log import get_logger

logger = get_logger(__name__)

_SEED = 0
_LABELS = ("labels", "label")
_MOST_ROWS = 1 << 62  # more than any data set has
_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """What is shown of a data set.

    Args:
        name: the name of the data set for messages.
        start: the number of the first row that is shown.
        stop: the number after the last row that is shown.
        most_rows: the largest number of rows for the statistics; None for all rows.
        batch_rows: the number of rows of a batch, on which the padding depends.
        shuffles: whether the rows of the statistics are read in a random order, as a training reads them.
        is_causal: whether the model shifts labels.
        trained_part: the tokens of preferences that the loss counts, see `with_answers_as_rows`.
        loss: the name of the loss; "" for that of the model.
        removes_columns: whether columns with which the collator fails may be removed.
        only_tokens: whether rows without tokens are shown as the data set gives them.
        class_names: the names of the classes or tags in the order of their numbers; None if labels are not classes.
    """

    name: str
    start: int = 0
    stop: int = 5
    most_rows: int | None = 10_000
    batch_rows: int = 8
    shuffles: bool = False
    is_causal: bool = False
    trained_part: str | None = "answers"
    loss: str = ""
    removes_columns: bool = True
    only_tokens: bool = False
    class_names: Sequence[str] | None = None

    @property
    def tokens_with_labels(self) -> str | None:
        """The tokens of preferences that are trained; None if the model does not predict tokens."""
        return self.trained_part if self.is_causal else None


@dataclass(frozen=True, kw_only=True)
class DataView:
    """Rows of a data set, statistics and warnings.

    Args:
        options: what was asked for.
        rows: the rows that are shown.
        statistics: the statistics of the rows that were read.
        total: the number of rows of the data set; None if it is not known.
        columns: the names of the columns that the collator returned.
        left_out: the names of the columns that were removed before the collator was called.
        joins_rows: whether the collator makes one row of all rows of a batch.
        is_collated: whether a collator was used.
        is_shuffled: whether the rows of the statistics were read in a random order.
        label_is_token: whether labels are token ids.
        collator: the name of the collator.
        text: the texts of tokens.
        warnings: what is probably wrong, one sentence each.
    """

    options: ViewOptions
    rows: Sequence[ShownRow]
    statistics: Statistics
    total: int | None
    columns: tuple[str, ...]
    left_out: tuple[str, ...]
    joins_rows: bool
    is_collated: bool
    is_shuffled: bool
    label_is_token: bool
    collator: str
    text: TokenText
    warnings: tuple[str, ...]

    @property
    def is_partial(self) -> bool:
        """Whether the statistics are of a part of the rows only."""
        return self.total is None or self.statistics.rows_read < self.total

    @property
    def tokenizer(self) -> str | None:
        """The class of the tokenizer; None if ids are shown."""
        return type(self.text.tokenizer).__name__ if self.text.tokenizer is not None else None

    def facts(self) -> dict[str, str]:
        """Returns the facts and statistics that are shown, as text by name."""
        seen, total = self.statistics, self.total
        found = {
            "rows": _rows_text(self),
            "tokens": _tokens_text(self),
            "documents": _documents_text(seen),
            "length": _length_text(seen),
            "longest": _longest_text(self),
            "padding": _padding_text(self),
            "duplicates": _duplicates_text(seen),
            "labels": ", ".join(
                f"{self.label_text(label)}: {_count(count, 'row')}" for label, count in (seen.classes or {}).items()
            ),
            "loss": _loss_text(self),
            "columns": _columns_text(self),
            "collator": self.collator if self.is_collated else "none: the rows are shown as the data set gives them",
            "tokenizer": (self.tokenizer or "none: ids are shown") if seen.tokens is not None else None,
        }
        if total == 0 or not seen.rows_read:
            found = {"rows": "0"}
        return {name: text for name, text in found.items() if text}

    def value_text(self, name: str, value: Any) -> str:
        """Returns a value of a column as text, and that of a class with its name."""
        text = value_text(value)
        if name in _LABELS and text.isdecimal() and (shown := self.label_text(int(text))) != text:
            return f"{text} ({shown})"
        return text

    def label_text(self, label: int) -> str:
        """Returns a label as text: the token or the name of the class that it stands for, otherwise its number."""
        names = self.options.class_names or ()
        if self.label_is_token:
            return self.text(label)
        return names[label] if 0 <= label < len(names) else str(label)

    def marked_label(self, token_id: int | None, label: int | None) -> str:
        """Returns the label that is shown after a token; "" if it is the token itself, or if there is none."""
        if label in (None, IGNORED) or (self.label_is_token and label == token_id):
            return ""
        return self.label_text(int(label or 0))

    def as_dict(self) -> dict[str, Any]:
        """Returns the view as plain data for JSON."""
        return {
            "data_set": self.options.name,
            "total_rows": self.total,
            "collator": self.collator if self.is_collated else None,
            "tokenizer": self.tokenizer,
            "batch_rows": self.options.batch_rows,
            "is_causal": self.options.is_causal,
            "loss": self.options.loss or None,
            "columns": list(self.columns),
            "columns_left_out": list(self.left_out),
            "class_names": None if self.options.class_names is None else list(self.options.class_names),
            "warnings": list(self.warnings),
            "statistics": self.statistics.as_dict(),
            "rows": [row_fact(row, self.text) for row in self.rows],
        }


def view_data(dataset: Any, collate: Collate | None, tokenizer: Any, options: ViewOptions) -> DataView:
    """Returns a view of a data set. Shows a progress bar on a terminal.

    Args:
        dataset: a data set with a length, or an iterable of rows.
        collate: the collator; None to show the rows as the data set gives them.
        tokenizer: the tokenizer for the texts of tokens; None to show ids.
        options: what is shown.

    Raises:
        RowError: FG480 if the object is not a data set, FG481 if it does not have the first row, FG482 if a row cannot
            be read or collated.
    """
    reader = RowReader(
        dataset,
        collate,
        name=options.name,
        batch_rows=options.batch_rows,
        removes_columns=options.removes_columns,
        only_tokens=options.only_tokens,
    )
    text = TokenText(tokenizer)
    shown = [
        with_answers_as_rows(part, trained_part=options.tokens_with_labels)
        for part in reader.shown(options.start, options.stop)
    ]
    rows = [row for batch in shown for row in shown_rows(batch, _tokens(batch, options))]
    counter = StatisticsCounter(stop_token_ids(tokenizer))
    numbers = _numbers(reader, options)
    total = len(numbers) if reader.has_length or options.most_rows is not None else None
    for batches in show_progress(_by_rows(reader, numbers), total=total, what="reading rows", logger=logger):
        for part in batches.parts:
            batch = with_answers_as_rows(part, trained_part=options.tokens_with_labels)
            counter.add(batch, _tokens(batch, options))
    statistics = counter.result()
    return DataView(
        options=options,
        rows=rows,
        statistics=statistics,
        total=reader.length,
        columns=tuple(shown[0].columns or rows[0].columns),
        left_out=reader.left_out,
        joins_rows=reader.joins_rows,
        is_collated=reader.collates,
        is_shuffled=options.shuffles and reader.has_length,
        label_is_token=options.is_causal or bool(getattr(collate, "mlm", False)),
        collator=collator_name(collate),
        text=text,
        warnings=tuple(_warnings(options.name, statistics, rows, is_collated=reader.collates)),
    )


def collator_name(collate: Any) -> str:
    """Returns the name of a collator: of its class, or of the function that a `!partial` calls.

    Example:
        >>> collator_name(len), collator_name(None)
        ('len', 'none')
    """
    if collate is None:
        return "none"
    inner = getattr(collate, "func", getattr(collate, "function", collate))
    name: str = getattr(inner, "__qualname__", None) or type(inner).__name__
    # The default collator is a function inside a function.
    return name.partition(".<locals>")[0]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _rows_text(view: DataView) -> str:
    read = view.statistics.rows_read
    if view.total is None:
        return f"not known; statistics of the first {read:,}"
    if read == view.total:
        return f"{view.total:,}"
    return f"{view.total:,}; statistics of {read:,} of them, chosen at random ('--all' reads all)"


def _tokens_text(view: DataView) -> str | None:
    seen = view.statistics
    if seen.tokens is None:
        return None
    if seen.trained_tokens is not None and any(row.target_ids_U is not None for row in view.rows):
        return f"{seen.tokens:,}, and {seen.trained_tokens:,} of targets, which are trained"
    if seen.trained_tokens is None:
        return f"{seen.tokens:,}; the labels are not of tokens"
    share = seen.trained_tokens / max(1, seen.tokens)
    return f"{seen.tokens:,}, of which {seen.trained_tokens:,} trained ({share:.1%})"


def _documents_text(seen: Statistics) -> str | None:
    if seen.documents is None or seen.max_length is None or seen.mean_length is None:
        return None
    if seen.min_length == seen.max_length:
        return f"{seen.documents:,}"
    return f"{seen.documents:,}; the rows are {seen.mean_length / seen.max_length:.1%} full, compared with the longest"


def _length_text(seen: Statistics) -> str | None:
    if seen.max_length is None:
        return None
    if seen.min_length == seen.max_length:
        return f"{_count(seen.max_length, 'token')} in every row"
    middle = f"median {seen.median_length:g}, mean {seen.mean_length:.1f}"
    return f"{seen.min_length:,} to {seen.max_length:,} tokens, {middle}"


def _longest_text(view: DataView) -> str | None:
    seen = view.statistics
    # Packed rows, which have positions, are as long as their blocks and end where the block ends.
    if seen.rows_at_max is None or seen.documents is not None:
        return None
    # Rows of which no token is predicted, as those of a classifier, need no end.
    without_end = seen.rows_at_max_without_end if view.label_is_token and seen.trained_tokens is not None else 0
    if seen.min_length == seen.max_length and not without_end:
        return None
    # A row of preferences has two answers, each with a length of its own.
    every = sum(count for *_, count in seen.histogram)
    share = f"{_count(seen.rows_at_max, 'row')} ({seen.rows_at_max / every:.1%}) of {seen.max_length:,} tokens"
    if not without_end:
        return share
    end = " or ".join(view.text(end_id) for end_id in stop_token_ids(view.text.tokenizer))
    return f"{share}; {without_end:,} without {end} at the end, which may be cut"


def _padding_text(view: DataView) -> str | None:
    share = view.statistics.padding_share
    if share is None:
        return None
    rows = f"batches of {_count(view.options.batch_rows, 'row')}{', shuffled' if view.is_shuffled else ''}"
    return f"{share:.1%} of the tokens of {rows}"


def _duplicates_text(seen: Statistics) -> str:
    if not seen.duplicate_rows:
        return "none" if seen.rows_read > 1 else ""
    listed = ", ".join(f"{row:,} (as {first:,})" for row, first in seen.duplicates[:5])
    more = f" and {seen.duplicate_rows - 5:,} more" if seen.duplicate_rows > 5 else ""
    return f"{_count(seen.duplicate_rows, 'row')} equal to an earlier one: {listed}{more}"


_TRAINED = {
    "answers": "the answers are trained",
    "chosen sequence": "the answers and the prompt of the chosen one are trained",
    None: "each answer gets one score, and no token has a target",
}


def _loss_text(view: DataView) -> str:
    has_answers = any(ANSWER in row.columns for row in view.rows)
    return f"{view.options.loss}: {_TRAINED[view.options.tokens_with_labels]}" if has_answers else view.options.loss


def _columns_text(view: DataView) -> str:
    shown = ", ".join(view.columns)
    left_out = f"; without {', '.join(view.left_out)}, which the collator does not take" if view.left_out else ""
    joined = "; the collator joins the rows of a batch, and each row is shown alone" if view.joins_rows else ""
    return f"{shown}{left_out}{joined}"


class _Read(list[int]):
    """The numbers of rows that were read at once, for the progress bar, with their batches."""

    def __init__(self, parts: list[RowBatch]) -> None:
        super().__init__(number for part in parts for number in part.rows)
        self.parts = parts


def _by_rows(reader: RowReader, numbers: Sequence[int]) -> Iterator[_Read]:
    return (_Read(parts) for parts in reader.all(numbers))


def _numbers(reader: RowReader, options: ViewOptions) -> Sequence[int]:
    if not reader.has_length:
        return range(_MOST_ROWS if options.most_rows is None else options.most_rows)
    length = reader.length or 0
    wanted = length if options.most_rows is None else min(length, options.most_rows)
    if wanted == length and not options.shuffles:
        return range(length)
    chosen = random.Random(_SEED).sample(range(length), wanted)
    return chosen if options.shuffles else sorted(chosen)


def _tokens(batch: RowBatch, options: ViewOptions) -> TokenBatch | None:
    rows = [batch.rows[number] for number in batch.numbers]
    return token_batch(batch.columns, is_causal=options.is_causal, rows=rows)


def _warnings(name: str, statistics: Statistics, rows: Sequence[ShownRow], *, is_collated: bool) -> Iterator[str]:
    if count := statistics.untrained_rows:
        listed = ", ".join(f"{number:,}" for number in statistics.untrained[:_NAMED])
        more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
        yield f"{_count(count, 'row')} of {name} without anything to learn, no label but -100: {listed}{more}"
    if count := statistics.labelled_padding_tokens:
        yield f"{_count(count, 'padding token')} of {name} with a label, which the loss counts: use the label -100"
    if is_collated and any(row.ids_T for row in rows) and not any(map(_has_labels, rows)):
        yield f"the batches of {name} have no labels, so there is nothing to learn unless the model makes its own"


def _has_labels(row: ShownRow) -> bool:
    return (
        row.labels_T is not None or row.target_ids_U is not None or bool({"labels", "label", ANSWER} & {*row.columns})
    )
