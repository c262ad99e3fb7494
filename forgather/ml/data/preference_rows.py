"""Preference pairs: reads rows with a chosen and a rejected answer from JSON files, and gives them all in one form.

Takes JSON files whose rows have texts, or messages of a chat. Gives a `Dataset` with the columns `prompt`, `chosen` and
`rejected` (texts), or `conversation`, `chosen` and `rejected` (JSON texts of messages), and `source` (the file and line
of the row). Both answers of a row follow the same messages. Every row is checked while it is read, and an error names
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

from forgather.errors import Diagnostic
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.chat_rows import BadRow, Conversation, check_order, read_messages, read_tools
from forgather.ml.data.chat_template import render
from forgather.ml.data.conversations import (
    CONVERSATION,
    SOURCE,
    check_bad_rows,
    refuse_rows,
    stream_files,
    usable,
    warn_same_files,
)
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.json_rows import json_rows, values_of_lines
from forgather.ml.data.line_parts import Line
from forgather.ml.data.row_stream import BUFFER_SIZE, RowStream, refuse_stream
from forgather.ml.data.sources import Paths, find_files
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

ANSWERS = ("chosen", "rejected")


def preference_pairs(
    paths: Paths,
    *,
    eval_paths: Paths | None = None,
    as_turns: bool = False,
    bad_rows: str = "refuse",
    streaming: bool = False,
    buffer_size: int = BUFFER_SIZE,
    seed: int = 42,
) -> Dataset | DatasetDict | RowStream | dict[str, Any]:
    """Returns the preference pairs of JSON files: one object per line, or one list of objects per file.

    A row has `prompt`, `chosen` and `rejected`. If all three are texts, they are used as they are. If one of them is a
    list of messages, the row is a conversation, which the chat template of the tokenizer renders: then `prompt` is the
    messages before the answer (or a text, which becomes a message of the user), and an answer is one message of the
    assistant. Without `prompt`, `chosen` and `rejected` are whole conversations that differ in their last message.

    Args:
        paths: a file, a folder (whose `.jsonl` and `.json` files are read), a glob, or a list of these.
        eval_paths: the files with pairs for evaluation, which `split` keeps; None to split those of `paths`.
        as_turns: whether rows of texts are conversations, too: the prompt is a message of the user, and the answers are
            messages of the assistant.
        bad_rows: "refuse" to stop at a row that is not a pair, "drop" to leave it out and log the number.
        streaming: whether the rows of `paths` are read and checked while a run trains on them, as in `chats`.
        buffer_size: the number of streamed rows among which the next one is drawn at random; 0 for the order of the
            files.
        seed: the seed of the order of streamed rows.

    Returns:
        A data set with the columns `prompt`, `chosen`, `rejected` and `source`, or a `RowStream` of such rows;
        `conversation` replaces `prompt` if the rows are conversations. With `eval_paths`, two of them, "train" and
        "eval".

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line is not a JSON object.
        DataError: FG940 if a row is not a pair, FG941 if its answers do not follow the same messages, FG890 or FG891 if
            a message is not one, FG911 if an answer is empty, FG912 if both are equal, FG892 if some rows are texts
            and others are conversations, FG832 if no row is left, FG982 if a file that is one list is to be streamed.
    """
    refuse_wrong_values("data:preference_pairs", locals())
    check_bad_rows(bad_rows)
    if eval_paths is not None:
        warn_same_files(paths, eval_paths)
        options: dict[str, Any] = {"as_turns": as_turns, "bad_rows": bad_rows}
        parts = {
            "train": preference_pairs(paths, **options, streaming=streaming, buffer_size=buffer_size, seed=seed),
            "eval": preference_pairs(eval_paths, **options),
        }
        return parts if streaming else DatasetDict(parts)
    files = find_files(paths, (".jsonl", ".json"))
    if streaming:
        return stream_files(files, partial(_streamed, as_turns, bad_rows), buffer_size=buffer_size, seed=seed)
    return _collected(files, as_turns, bad_rows)


def _collected(files: Sequence[str], as_turns: bool, bad_rows: str) -> Dataset:
    rows: list[tuple[str, ...]] = []
    found, digest = [], xxhash.xxh3_64()
    for row in _pairs(_values(files), as_turns):
        if isinstance(row, Diagnostic):
            found.append(row)
            continue
        name, *texts, place = row
        rows.append(row)
        # The folder of the files is not part of the content.
        digest.update(json.dumps([*texts, os.path.basename(place), name == CONVERSATION]).encode())
    if found and bad_rows == "refuse":
        raise refuse_rows(found)
    if found:
        logger.warning("%s left out, the first: %s", plural(len(found), "row"), found[0].message)
    if not rows:
        hint = "a data set needs at least one row"
        raise DataError(f"{', '.join(files[:3])} gives no preference pair", code="FG832", hint=hint)
    (first, *_), *_ = rows
    columns = zip((first, *ANSWERS, SOURCE), list(map(list, zip(*rows, strict=True)))[1:], strict=True)
    return Dataset(Dataset.from_dict(dict(columns)).data.table, fingerprint=digest.hexdigest())


def _values(files: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    return ((file, row.place(file), row.value) for file in files for row in json_rows(file))


def _streamed(as_turns: bool, bad_rows: str, lines: Iterable[Line]) -> Iterator[dict[str, str]]:
    for name, *values in usable(_pairs(values_of_lines(lines), as_turns), bad_rows):
        yield dict(zip((name, *ANSWERS, SOURCE), values, strict=True))


def _pairs(values: Iterable[tuple[str, str, Any]], as_turns: bool) -> Iterator[tuple[str, ...] | Diagnostic]:
    """Yields of each pair the name of the column with the prompt, the texts and the place, or what is wrong with a row.

    Args:
        values: the file, the place and the value of each row.
        as_turns: whether rows of texts are conversations, too.
    """
    first, is_chat = "", False
    for _, place, value in values:
        try:
            texts, has_messages = _pair(value, as_turns)
            if first and is_chat is not has_messages:
                now, before = ("messages", "texts") if has_messages else ("texts", "messages")
                message = f"the row has {now}, and the rows from {first} on have {before}"
                hint = "write all rows in one form, or set as_turns: true, which makes messages of texts"
                raise BadRow(message, "FG892", hint)
        except BadRow as error:
            yield Diagnostic(code=error.code, message=f"{place}: {error}", hint=error.hint)
            continue
        first, is_chat = first or place, has_messages
        yield (CONVERSATION if is_chat else "prompt", *texts, place)


def pair_prompts(dataset: Any, tokenizer: Any, count: int = 3) -> list[str]:
    """Returns the prompts of the first preference pairs, as prompts for text samples.

    Args:
        dataset: the rows of `preference_pairs`, usually those for evaluation.
        tokenizer: the tokenizer, whose chat template renders the prompts of conversations.
        count: the maximum number of prompts.

    Returns:
        Distinct texts, or [""] if there are none.
    """
    refuse_wrong_values("data:pair_prompts", locals())
    refuse_stream(dataset, "pair_prompts")
    is_chat = CONVERSATION in dataset.column_names
    found: dict[str, None] = {}
    for stored in dataset[CONVERSATION if is_chat else "prompt"][: 4 * count]:
        if is_chat:
            conversation = Conversation.from_json(stored)
            stored = render(tokenizer, conversation.messages, conversation.tools, add_generation_prompt=True).text
        found[stored] = None
    return list(found)[:count] or [""]


def _pair(row: Any, as_turns: bool) -> tuple[tuple[str, str, str], bool]:
    """Returns prompt, chosen and rejected of a row, and whether they are JSON texts of messages.

    Raises:
        BadRow: if the row is not a pair.
    """
    if not isinstance(row, Mapping):
        raise BadRow("a row must be a JSON object", "FG940")
    for name in ANSWERS:
        if row.get(name) is None:
            keys = ", ".join(map(repr, list(row)[:8])) or "no keys"
            what = f"{name!r} is null" if name in row else f"the row has no {name!r}; it has {keys}"
            raise BadRow(what, "FG940", "a pair has prompt, chosen and rejected")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(prompt, str) and not prompt.strip():
        raise BadRow("'prompt' is empty", "FG940", "give the question, or remove the row: an answer follows a prompt")
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str) and not as_turns:
        for name, text in zip(ANSWERS, (chosen, rejected), strict=True):
            if not text.strip():
                raise BadRow(f"the answer in {name!r} is empty", "FG911", "remove the row, or give the answer")
        _refuse_equal(chosen, rejected)
        return (prompt, chosen, rejected), False
    messages = _prompt(row)
    tools = read_tools(row.get("tools"))
    before, answers = _answers(messages, [_turns(row[name], name, "assistant") for name in ANSWERS])
    for answer in answers:
        check_order([*before, answer])
    _refuse_equal(*answers)
    stored = [json.dumps(answer, ensure_ascii=False) for answer in answers]
    return (Conversation(before, tools).to_json(), stored[0], stored[1]), True


def _prompt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages before the answers as far as the row gives them apart from the answers."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if row.get("prompt") is None:
        if isinstance(row["chosen"], str):
            raise BadRow("the row has no 'prompt'", "FG940", "a pair of texts has prompt, chosen and rejected")
        return system
    return read_messages(system, _listed(row["prompt"], "prompt", "user"), "prompt")


def _turns(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    return read_messages([], _listed(value, name, role), name)


def _listed(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list):
        raise BadRow(f"{name!r} must be a text or a list of messages, found {type(value).__name__}", "FG940")
    return value


def _answers(
    prompt: list[dict[str, Any]], turns: list[list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the messages before the answers, and the two answers.

    Args:
        prompt: the messages before the answers, without those that stand in front of the answers themselves.
        turns: the messages of the chosen and of the rejected answer; they may begin with the messages before them.
    """
    chosen, rejected = turns
    if chosen[:-1] != rejected[:-1]:
        raise BadRow(
            "the messages before the last ones of 'chosen' and 'rejected' differ",
            "FG941",
            "two answers are compared after the same messages; make a row of each turn that has two answers",
        )
    repeated = chosen[:-1]
    # Some data sets write the prompt a second time, in front of the answers.
    if prompt[-len(repeated) :] == repeated or not repeated:
        before = prompt
    elif not prompt or [message["role"] for message in prompt] == ["system"]:
        before = [*prompt, *repeated]
    else:
        raise BadRow(
            f"{len(repeated)} more messages than one answer stand in 'chosen', and they are not those of 'prompt'",
            "FG941",
            "write the messages before the answers in prompt, and one message in each of chosen and rejected",
        )
    if not before:
        raise BadRow("there is no message before the answers", "FG941", "write the question in prompt")
    return before, [chosen[-1], rejected[-1]]


def _refuse_equal(chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise BadRow("'chosen' and 'rejected' are equal", "FG912", "remove the row: equal answers have no preference")
