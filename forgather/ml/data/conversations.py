"""Conversations: reads chat and instruction rows from files or data sets, and gives them all in one form.

Takes JSON files or a data set; gives a `Dataset` with the columns `conversation` (a JSON text) and `source` (the file
and line of the row). A conversation is stored as text because an Arrow table gives all rows the same fields: the
arguments of one tool call would appear, empty, in all others. Every row is checked while it is read, and an error names
the file and the line. The same rows give the same fingerprint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash
from datasets import Dataset, DatasetDict

from forgather.errors import Diagnostic, nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.chat_rows import FORMS, BadRow, check_order, form_of, message_texts, read_row, with_system
from forgather.ml.data.data_errors import DataError, row_place
from forgather.ml.data.json_rows import is_list, is_utf8, json_rows, values_of_lines
from forgather.ml.data.line_parts import Line, ReadLines, with_line_numbers
from forgather.ml.data.row_epoch import is_block
from forgather.ml.data.row_stream import BUFFER_SIZE, RowStream, refuse_stream
from forgather.ml.data.sources import Paths, find_files
from forgather.ml.data.train_eval_split import repeated_places
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

CONVERSATION, SOURCE = "conversation", "source"
_TEXTS = (CONVERSATION, "prompt", "completion", "chosen", "rejected")
_PAIR = ("source", "target")
_SHOWN_ERRORS = 5
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})


def chats(
    paths: Paths,
    *,
    eval_paths: Paths | None = None,
    form: str | None = None,
    system: str | None = None,
    before_input: str = "\n\n",
    bad_rows: str = "refuse",
    streaming: bool = False,
    buffer_size: int = BUFFER_SIZE,
    seed: int = 42,
) -> Dataset | DatasetDict | RowStream | dict[str, Any]:
    """Returns the conversations of JSON files: one object per line, or one list of objects per file.

    The form of the rows is recognized by their keys:

    - "messages": `messages`, a list of `{"role": ..., "content": ...}`, and optionally `tools`;
    - "sharegpt": `conversations`, a list of `{"from": ..., "value": ...}`, and optionally `system` and `tools`;
    - "instruction": `instruction` and `output`, and optionally `input`, `system` and `history`;
    - "prompt": `prompt` and `completion` (or a pair such as `question` and `answer`): texts or lists of messages.

    Args:
        paths: a file, a folder (whose `.jsonl` and `.json` files are read), a glob, or a list of these.
        eval_paths: the files with conversations for evaluation, which `split` keeps; None to split those of `paths`.
        form: the form of the rows, or None to recognize it. All rows of a file must have the same form.
        system: the text of a system message that is put before the conversations that have none.
        before_input: the text between an instruction and its `input`.
        bad_rows: "refuse" to stop at a row that is not a conversation, "drop" to leave it out and log the number.
        streaming: whether the rows of `paths` are read and checked while a run trains on them, instead of before.
            Memory then holds `buffer_size` rows, whatever the size of the files. The rows of `eval_paths` are not
            streamed.
        buffer_size: the number of streamed rows among which the next one is drawn at random; 0 for the order of the
            files.
        seed: the seed of the order of streamed rows.

    Returns:
        A data set with the columns `conversation` (JSON text) and `source` (file and line), or a `RowStream` of such
        rows; with `eval_paths`, two of them, "train" and "eval".

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line is not a JSON object.
        DataError: FG890 if a row is not a conversation, FG891 if its turns are not in order or an answer is empty,
            FG892 if the form is unknown or differs within a file, FG832 if no row is left, FG982 if a file that is one
            list is to be streamed.
    """
    refuse_wrong_values("data:chats", locals())
    options: dict[str, Any] = {"form": form, "system": system, "before_input": before_input, "bad_rows": bad_rows}
    order: dict[str, Any] = {"streaming": streaming, "buffer_size": buffer_size, "seed": seed}
    if eval_paths is not None:
        warn_same_files(paths, eval_paths)
        # Evaluation reads its rows again and again, so they are never streamed.
        divided = {"train": chats(paths, **options, **order), "eval": chats(eval_paths, **options)}
        return divided if streaming else DatasetDict(divided)
    files = find_files(paths, (".jsonl", ".json"))
    if streaming:
        _check_options(form, bad_rows)
        return stream_files(files, partial(_streamed, options), buffer_size=buffer_size, seed=seed)
    return _collected(_rows_of(files), **options, where=", ".join(files[:3]))


def warn_same_files(paths: Paths, eval_paths: Paths) -> None:
    """Warns if a file is read for training and for evaluation.

    Args:
        paths: the files for training.
        eval_paths: the files for evaluation.
    """
    train, held = (find_files(part, (".jsonl", ".json")) for part in (paths, eval_paths))
    if both := [file for file in train if file in held]:
        logger.warning("%s is read for training and for evaluation", both[0])


def stream_files(files: Sequence[str], read: ReadLines, *, buffer_size: int, seed: int) -> RowStream:
    """Returns the stream of the rows of JSON files, each of which has one value per line.

    Args:
        files: the files.
        read: a function that yields the rows of lines, with their columns.
        buffer_size: the number of rows among which the next one is drawn at random.
        seed: the seed of the order.

    Raises:
        DataFileError: FG834 if a file cannot be read.
        DataError: FG982 if a file is one list.
    """
    if whole := [file for file in files if is_list(file)]:
        raise DataError(
            f"{whole[0]!r} is one list, which can only be read as a whole, and the rows are to be streamed",
            code="FG982",
            hint="write one object per line, or set streaming: false",
        ).about("paths")
    return RowStream.of_lines(files, read, buffer_size=buffer_size, seed=seed)


def usable(rows: Iterable[tuple[str, ...] | Diagnostic], bad_rows: str) -> Iterator[tuple[str, ...]]:
    """Yields the rows that can be used; the others are refused when they are met, or left out and counted.

    Args:
        rows: the values of each row, or what is wrong with it.
        bad_rows: "refuse" or "drop".

    Raises:
        DataError: what is wrong with a row, if `bad_rows` is "refuse".
    """
    num_bad = 0
    for row in rows:
        if not isinstance(row, Diagnostic):
            yield row
            continue
        if bad_rows == "refuse":
            raise refuse_rows([row])
        num_bad += 1
        if num_bad == 1:
            # Once for a stream, whose parts are read one after another.
            logger.warning_once("the first row that is left out: %s", with_line_numbers(row.message))
    if num_bad and not is_block():
        logger.warning("%s of the epoch left out", plural(num_bad, "row"))


def as_chats(
    dataset: Dataset,
    *,
    form: str | None = None,
    system: str | None = None,
    before_input: str = "\n\n",
    bad_rows: str = "refuse",
) -> Dataset:
    """Returns the conversations of a data set, such as one of the Hub or of parquet files with all its columns.

    Args:
        dataset: the rows, in one of the forms that `chats` describes.
        form: the form of the rows, or None to recognize it.
        system: the text of a system message that is put before the conversations that have none.
        before_input: the text between an instruction and its `input`.
        bad_rows: "refuse" to stop at a row that is not a conversation, "drop" to leave it out and log the number.

    Returns:
        A data set with the columns `conversation` (JSON text) and `source` (the index of the row).

    Raises:
        DataError: FG890, FG891, FG892 or FG832, as `chats` does; FG945 if the rows are those of a mixture that repeats
            some: `split` could not tell copies of the conversations from other rows.

    Example:
        >>> import json
        >>> rows = Dataset.from_dict({"question": ["1 + 1?"], "answer": ["2"]})
        >>> json.loads(as_chats(rows)[0]["conversation"])["messages"]
        [{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '2'}]
    """
    refuse_stream(dataset, "as_chats")
    if repeated_places(dataset) is not None:
        raise DataError(
            "the data set repeats rows, as mixtures do: copies of a conversation could be in both parts of a split",
            code="FG945",
            hint="make conversations of each data set first, and mix those: mix {a: as_chats(...), b: as_chats(...)}",
        ).about("dataset")
    # Arrow fills missing fields of lists of mappings with None, which the rows of the source did not have.
    rows = (("", row_place(number), _without_none(row)) for number, row in enumerate(dataset))
    return _collected(rows, form, system, before_input, bad_rows, "the data set")


def row_texts(dataset: Dataset) -> Dataset:
    """Returns the texts of conversations or of preferences as rows with one column, to train a tokenizer on.

    Args:
        dataset: the rows of `chats`, `as_chats`, `preference_pairs` or `seq2seq_rows`, or rows of prompts and
            completions.

    Returns:
        A data set with the column `text`: one row per message, or per text of a row.

    Example:
        >>> row_texts(as_chats(Dataset.from_dict({"question": ["1 + 1?"], "answer": ["2"]})))["text"][:]
        ['1 + 1?', '2']
    """
    refuse_stream(dataset, "row_texts")
    # A conversation has a column `source` too, the place of its row.
    is_pair = {*_PAIR} <= {*dataset.column_names}
    names = list(_PAIR) if is_pair else [name for name in _TEXTS if name in dataset.column_names]
    texts: list[str] = []
    for row in dataset.select_columns(names):
        for value in row.values():
            # Messages are stored as JSON text; the rows of plain preferences are texts themselves.
            texts += _texts_of(value) if CONVERSATION in names else [value]
    fingerprint = xxhash.xxh3_64_hexdigest(f"row_texts {dataset._fingerprint}".encode())
    return Dataset(Dataset.from_dict({"text": texts}).data.table, fingerprint=fingerprint)


def _texts_of(stored: str) -> list[str]:
    value = json.loads(stored)
    parts = [value["messages"], value.get("tools")] if "messages" in value else [value]
    # The keys of a message ("content") are not in the text that the model reads.
    return [text for text in message_texts(parts) if text not in _MESSAGE_KEYS]


def _rows_of(files: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    return ((file, row.place(file), row.value) for file in files for row in json_rows(file))


def _streamed(options: Mapping[str, Any], lines: Iterable[Line]) -> Iterator[dict[str, str]]:
    rows = _conversations(values_of_lines(lines), options["form"], options["system"], options["before_input"])
    return ({CONVERSATION: text, SOURCE: place} for text, place in usable(rows, options["bad_rows"]))


def _collected(
    rows: Iterable[tuple[str, str, Any]],
    form: str | None,
    system: str | None,
    before_input: str,
    bad_rows: str,
    where: str,
) -> Dataset:
    _check_options(form, bad_rows)
    texts, sources, found, digest = [], [], [], xxhash.xxh3_64()
    for row in _conversations(rows, form, system, before_input):
        if isinstance(row, Diagnostic):
            found.append(row)
            continue
        text, place = row
        texts.append(text)
        sources.append(place)
        # The folder of the files is not part of the content.
        digest.update(f"{os.path.basename(place)}\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    if found and bad_rows == "refuse":
        raise refuse_rows(found)
    if found:
        logger.warning("%s left out, the first: %s", plural(len(found), "row"), found[0].message)
    if not texts:
        raise DataError(f"{where} gives no conversation", code="FG832", hint="a data set needs at least one row")
    return Dataset(Dataset.from_dict({CONVERSATION: texts, SOURCE: sources}).data.table, fingerprint=digest.hexdigest())


def _conversations(
    rows: Iterable[tuple[str, str, Any]], form: str | None, system: str | None, before_input: str
) -> Iterator[tuple[str, str] | Diagnostic]:
    """Yields the JSON text and the place of each conversation, or what is wrong with a row.

    Args:
        rows: the file, the place and the value of each row.
        form: the form of the rows, or None to recognize it.
        system: the text of a system message for conversations that have none.
        before_input: the text between an instruction and its `input`.
    """
    forms: dict[str, tuple[str, str]] = {}  # of each file: its form, and the place of the first row
    for file, place, row in rows:
        try:
            kind = form_of(row, form)
            first, first_place = forms.setdefault(file, (kind, place))
            if kind != first:
                message = f"the row is in the form {kind!r}, and the rows from {first_place} on are in {first!r}"
                raise BadRow(message, "FG892", "give each form a file of its own")
            conversation = read_row(row, kind, before_input)
            if system and conversation.messages[0]["role"] != "system":
                conversation = with_system(conversation, system)
            check_order(conversation.messages)
            text = conversation.to_json()
            if not is_utf8(text):
                raise BadRow("a text has half of a surrogate pair, which is not a character")
        except BadRow as error:
            yield Diagnostic(code=error.code, message=f"{place}: {error}", hint=error.hint)
        else:
            yield text, place


def refuse_rows(found: list[Diagnostic]) -> DataError:
    """Returns the error for rows that cannot be used, which shows the first of them and counts the others.

    Args:
        found: what is wrong in each row, with its place in the message.
    """
    first, others = found[0], found[1:]
    more = f" ({plural(len(others), 'more row')} with an error)" if others else ""
    hint = first.hint or "correct or remove the row; in a config, bad_rows: drop leaves such rows out"
    error: DataError = DataError(f"{first.message}{more}", code=first.code, hint=hint, others=others[:_SHOWN_ERRORS])
    error.argument = "paths"
    return error


def _check_options(form: str | None, bad_rows: str) -> None:
    _check_choice("form", form, (*FORMS, None))
    check_bad_rows(bad_rows)


def check_bad_rows(bad_rows: str) -> None:
    """Raises FG892 if the argument `bad_rows` is neither "refuse" nor "drop".

    Args:
        bad_rows: the value of the argument.
    """
    _check_choice("bad_rows", bad_rows, ("refuse", "drop"))


def _check_choice(argument: str, value: str | None, choices: Sequence[str | None]) -> None:
    if value not in choices:
        names = [name for name in choices if name]
        hint = nearest(str(value), names) or f"one of {', '.join(names)}"
        raise DataError(f"{argument} is {value!r}", code="FG892", hint=hint, expected=names).about(argument)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
