"""Tokenization of conversations for supervised fine-tuning, one row per conversation.

Takes the conversations of `chats` and a tokenizer with a chat template; gives rows with `input_ids`, `attention_mask`
and `labels`, which `CausalLMCollator` pads. The token ids are those of `tokenizer.apply_chat_template`. The labels are
the token ids of the answers, from the ranges that the template marks, up to and including the token at which generation
stops. A conversation is tokenized as a whole; then its ids and labels are cut together. Conversations that have nothing
to train are dropped, and counted by reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import transformers
from datasets import Dataset, DatasetDict
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

from forgather.errors import nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.chat_rows import Conversation, message_texts
from forgather.ml.data.chat_template import Rendered, control_tokens, missing_begin_warning, render, turn_end
from forgather.ml.data.conversations import CONVERSATION, SOURCE
from forgather.ml.data.data_errors import DataError, missing_column, row_place
from forgather.ml.data.example_packing import pack_examples, pack_stream
from forgather.ml.data.packing import encode_rows, read_rows, rows_writer
from forgather.ml.data.row_epoch import is_block
from forgather.ml.data.row_stream import Row, RowStream, groups, refuse_stored, refuse_stream, warn_of_first
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.data.turn_tokens import chat_tokens, until_stop
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

IGNORE_INDEX = -100
TRAIN_ON = ("assistant", "last", "completion", "everything")
TRUNCATE = ("end", "start", "drop")
_FORMAT = 1  # raised when the meaning of a cached folder changes
_STATS = "stats.json"
_STREAMED_ROWS = 32  # that are tokenized at a time
_COLUMNS = ("input_ids", "attention_mask", "labels")
# Why a conversation is dropped; the position is the code that `_encode` returns.
_REASONS = (
    "kept",
    "without an answer",
    "no answer left within max_length",
    "longer than max_length",
    "with a control token in a message",
    "with a token that crosses the beginning of an answer",
)
_KEPT, _NO_ANSWER, _CUT_AWAY, _TOO_LONG, _CONTROL, _CROSSING = range(len(_REASONS))


def tokenize_chats(
    dataset: Dataset | DatasetDict | RowStream,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 2048,
    *,
    train_on: str = "assistant",
    truncate: str = "end",
    template_options: dict[str, Any] | None = None,
    packing: bool = False,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict | RowStream:
    """Returns a data set with one tokenized conversation per row, in which only the answers have labels.

    Args:
        dataset: the conversations, from `chats` or `as_chats`. The splits of a `DatasetDict` are tokenized separately,
            and streamed conversations when they are read.
        tokenizer: a tokenizer whose chat template marks the answers, see `load_tokenizer` and its `chat_template`.
        max_length: the maximum length of a row in tokens.
        train_on: the tokens with a label: "assistant" (all answers), "last" (the last answer), "completion" (the
            answers after the prompt; without a prompt in the row, those after the last message of the user), or
            "everything".
        truncate: what is done with a longer conversation: "end" cuts it at the end, "start" cuts it after the
            begin-of-text token, "drop" leaves it out.
        template_options: further variables of the chat template, such as `{enable_thinking: false}`.
        packing: whether to join whole conversations into rows of at most `max_length` tokens, with `pack_examples`;
            of streamed ones, those that are read next, 1024 at a time.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        Each row has `input_ids`, `attention_mask` and `labels` of one length, at most `max_length`. With `packing`,
        a row has `position_ids` in place of `attention_mask`.

    Raises:
        DataError: FG831 if the rows are not those of `chats`, FG893, FG894 or FG898 if the chat template is missing or
            not suitable, FG895 if an answer does not end with the token at which generation stops, FG897 if the
            template cannot render a conversation, FG899 if it writes more than one begin-of-text token, FG896 if no
            conversation is left, FG839 if an argument has no valid value, FG982 if an argument is not for streamed
            conversations.
    """
    refuse_wrong_values("data:tokenize_chats", locals())
    options: dict[str, Any] = {"train_on": train_on, "truncate": truncate, "template_options": template_options or {}}
    if isinstance(dataset, DatasetDict):
        places: dict[str, Any] = {"packing": packing, "num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict(
            {name: tokenize_chats(part, tokenizer, max_length, **options, **places) for name, part in dataset.items()}
        )
    refuse_stored(dataset, num_proc=num_proc, cache_dir=cache_dir)
    _check_arguments(dataset, train_on, truncate)
    end_id = turn_end(tokenizer)
    if warning := missing_begin_warning(tokenizer):
        logger.warning("%s", warning)
    encode = partial(_encode, tokenizer, end_id, max_length, options)
    if isinstance(dataset, RowStream):
        stream = dataset.prepared(partial(_streamed, encode, max_length), _COLUMNS)
        return pack_stream(stream, max_length) if packing else stream
    key = _key(dataset, tokenizer, max_length=max_length, **options)
    rows = _stored(key, lambda: encode_rows(_with_places(dataset), encode, num_proc), max_length, cache_dir)
    return pack_examples(rows, max_length, cache_dir=cache_dir) if packing else rows


def _stored(
    key: str, encoded: Callable[[], Iterator[Any]], max_length: int, cache_dir: str | os.PathLike[str] | None
) -> Dataset:
    """Returns the tokenized conversations from the cache, after they were tokenized if they are not there."""

    def build(folder: Path) -> None:
        stats = _write_rows(folder, encoded(), max_length)
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("chats", key, build, cache_dir)
    _report(json.loads((folder / _STATS).read_text(encoding="utf-8")))
    return read_rows(folder, key)


def _with_places(dataset: Dataset) -> Dataset:
    """Returns conversations that carry the place of their row, as a batch of them does not know where it begins."""
    if SOURCE in dataset.column_names:
        return dataset
    return dataset.add_column(SOURCE, [row_place(number) for number in range(len(dataset))])


def _key(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Returns a digest of everything that decides the content; the number of processes does not."""
    facts = {"rows": dataset._fingerprint, "tokenizer": tokenizer_digest(tokenizer), **template_facts(tokenizer)}
    return content_key(format=_FORMAT, **facts, **options)


def template_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns what decides the text of a conversation besides its messages, for the key of a cache.

    Args:
        tokenizer: a tokenizer with a chat template.
    """
    facts: dict[str, Any] = {"template": tokenizer.chat_template, "library": transformers.__version__}
    if "strftime_now" in str(tokenizer.chat_template):
        facts["date"] = date.today().isoformat()  # the template writes it into the text
    return facts


def chat_prompts(dataset: Any, tokenizer: PreTrainedTokenizerBase, count: int = 3) -> list[str]:
    """Returns the texts of the first conversations up to their last answer, as prompts for text samples.

    Args:
        dataset: the conversations, from `chats` or `as_chats`, usually those for evaluation.
        tokenizer: the tokenizer with the chat template.
        count: the maximum number of prompts.

    Returns:
        Distinct texts, or [""] if there are none.
    """
    refuse_wrong_values("data:chat_prompts", locals())
    refuse_stream(dataset, "chat_prompts")
    found: dict[str, None] = {}
    for text in dataset[CONVERSATION][: 4 * count]:
        conversation = Conversation.from_json(text)
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if answers and answers[-1]:
            before = conversation.messages[: answers[-1]]
            prompt = render(tokenizer, before, conversation.tools, add_generation_prompt=True).text
            begin = tokenizer.bos_token or ""
            # The tokenizer adds the begin-of-text token itself if it does so for every text.
            if begin and prompt.startswith(begin) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
                prompt = prompt.removeprefix(begin)
            found[prompt] = None
    return list(found)[:count] or [""]


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    max_length: int,
    options: dict[str, Any],
    batch: dict[str, list[Any]],
) -> dict[str, list[list[list[int]]]]:
    control = control_tokens(tokenizer)
    stops = frozenset({end_id, tokenizer.eos_token_id} - {None})
    rows = []
    for text, source in zip(batch[CONVERSATION], batch[SOURCE], strict=True):
        try:
            row = _row(tokenizer, Conversation.from_json(text), stops, control, max_length, options)
        except DataError as error:
            error.message = f"{source}: {error.message}"
            error.args = (error.message,)
            raise
        rows.append(row)
    return {"input_ids": rows}


def _row(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    stops: frozenset[int],
    control: Any,
    max_length: int,
    options: dict[str, Any],
) -> list[list[int]]:
    """Returns [ids, labels, [code, is_cut]] of a conversation; ids and labels are empty if it is dropped."""
    messages, train_on = conversation.messages, options["train_on"]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers and train_on != "everything":
        return _dropped(_NO_ANSWER)
    if any(control.search(text) for text in message_texts([messages, conversation.tools])):
        return _dropped(_CONTROL)
    rendered = render(tokenizer, messages, conversation.tools, **options["template_options"])
    _check_turns(rendered, len(answers), train_on)
    tokens = chat_tokens(tokenizer, rendered)
    if tokens is None:
        return _dropped(_CROSSING)
    _check_begin(tokenizer, tokens.ids, stops)
    turns = [until_stop(tokenizer, tokens.ids, turn, stops) for turn in tokens.turns]
    labels = tokens.ids if train_on == "everything" else [IGNORE_INDEX] * len(tokens.ids)
    for begin, end in _chosen(turns, answers, conversation, train_on):
        labels[begin:end] = tokens.ids[begin:end]
    is_cut = len(tokens.ids) > max_length
    if is_cut and options["truncate"] == "drop":
        return _dropped(_TOO_LONG)
    ids, labels = (_cut(tokenizer, row, tokens.ids, max_length, options["truncate"]) for row in (tokens.ids, labels))
    # The model predicts each token from those before it, so the label of the first token is never used.
    if all(label == IGNORE_INDEX for label in labels[1:]):
        return _dropped(_CUT_AWAY if is_cut else _NO_ANSWER)
    return [ids, labels, [_KEPT, int(is_cut)]]


def _dropped(reason: int) -> list[list[int]]:
    return [[], [], [reason, 0]]


def _chosen(
    turns: list[tuple[int, int]], answers: list[int], conversation: Conversation, train_on: str
) -> list[tuple[int, int]]:
    if train_on == "everything":
        return []
    if train_on == "assistant":
        return turns
    if train_on == "last":
        return turns[-1:]
    first = conversation.num_prompt
    if first is None:
        users = [number for number, message in enumerate(conversation.messages) if message["role"] == "user"]
        first = users[-1] + 1
    return [turn for turn, number in zip(turns, answers, strict=True) if number >= first]


def _cut(tokenizer: PreTrainedTokenizerBase, row: list[int], ids: list[int], length: int, side: str) -> list[int]:
    if len(row) <= length:
        return row
    if side == "end":
        return row[:length]
    has_begin = ids[0] == tokenizer.bos_token_id
    return [*row[:has_begin], *row[len(row) - length + has_begin :]]


def _check_turns(rendered: Rendered, num_answers: int, train_on: str) -> None:
    """Raises FG894 if the answers of a conversation do not have one marked range each."""
    if train_on != "everything" and len(rendered.turns) != num_answers:
        raise DataError(
            f"the chat template marks {len(rendered.turns)} of {num_answers} answers",
            code="FG894",
            hint="put one {% generation %} ... {% endgeneration %} around each answer",
        )


def _check_begin(tokenizer: PreTrainedTokenizerBase, ids: list[int], stops: frozenset[int]) -> None:
    begin = tokenizer.bos_token_id
    if begin is not None and begin not in stops and ids[:2] == [begin, begin]:
        raise DataError(
            f"the chat template writes the begin-of-text token {tokenizer.bos_token!r} twice",
            code="FG899",
            hint="write {{ bos_token }} once in the chat template",
        )


def _write_rows(folder: Path, batches: Any, max_length: int) -> dict[str, Any]:
    schema = pa.schema({name: pa.list_(pa.int32()) for name in _COLUMNS})
    stats = _no_rows(max_length)
    with rows_writer(folder, schema) as writer:
        for batch in batches:
            kept = [row for row in (_counted(row, stats) for row in batch) if row is not None]
            columns = {name: [row[name] for row in kept] for name in _COLUMNS}
            writer.write_batch(pa.record_batch(columns, schema=schema))
    _refuse_nothing(stats)
    return stats


def _streamed(
    encode: Callable[[dict[str, list[Any]]], dict[str, list[Any]]], max_length: int, rows: Iterator[Row]
) -> Iterator[Row]:
    """Yields the tokens of streamed conversations, and logs at the end how many were cut or dropped."""
    stats = _no_rows(max_length)
    try:
        for group in groups(rows, _STREAMED_ROWS):
            columns = {name: [row[name] for row in group] for name in (CONVERSATION, SOURCE)}
            for (ids, labels, codes), source in zip(encode(columns)["input_ids"], columns[SOURCE], strict=True):
                row = _counted([ids, labels, codes], stats)
                if row is not None:
                    yield row
                elif stats["rows"][reason := _REASONS[codes[0]]] == 1:
                    warn_of_first(logger, f"{source} is left out: it is a conversation {reason}", kind=reason)
        # A worker process may have only rows that are dropped while the others have usable ones.
        if get_worker_info() is None and not is_block():
            _refuse_nothing(stats)
    finally:
        # A run usually ends within an epoch; then, too, it says what was left out.
        if stats["rows"]["kept"] and not is_block():
            _report(stats)


def _no_rows(max_length: int) -> dict[str, Any]:
    return {
        "num_cut": 0,
        "num_tokens": 0,
        "num_trained": 0,
        "max_length": max_length,
        "rows": dict.fromkeys(_REASONS, 0),
    }


def _counted(row: list[list[int]], stats: dict[str, Any]) -> dict[str, list[int]] | None:
    """Returns the columns of a row of `_encode`, or None if it is dropped; counts it."""
    ids, labels, (reason, is_cut) = row
    stats["rows"][_REASONS[reason]] += 1
    if reason != _KEPT:
        return None
    stats["num_cut"] += is_cut
    stats["num_tokens"] += len(ids)
    stats["num_trained"] += sum(label != IGNORE_INDEX for label in labels)
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def _refuse_nothing(stats: dict[str, Any]) -> None:
    if not stats["rows"]["kept"]:
        raise DataError(
            f"no conversation is left to train on: {_listed(stats['rows']) or 'there were none'}",
            code="FG896",
            hint="give a larger max_length, or another train_on",
        )


def _report(stats: dict[str, Any]) -> None:
    dropped = _listed(stats["rows"])
    report = logger.warning if dropped or stats["num_cut"] else logger.info
    report(
        "%s, %d tokens, %d of them trained; %d cut to %d tokens%s",
        plural(stats["rows"]["kept"], "conversation"),
        stats["num_tokens"],
        stats["num_trained"],
        stats["num_cut"],
        stats["max_length"],
        f"; left out: {dropped}" if dropped else "",
    )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count and reason != "kept")


def _check_arguments(dataset: Dataset, train_on: str, truncate: str) -> None:
    if CONVERSATION not in dataset.column_names:
        raise missing_column(CONVERSATION, dataset.column_names, "dataset")
    for argument, value, choices in (("train_on", train_on, TRAIN_ON), ("truncate", truncate, TRUNCATE)):
        if value not in choices:
            hint = nearest(str(value), choices) or f"one of {', '.join(choices)}"
            raise DataError(f"{argument} is {value!r}", code="FG839", hint=hint, found=value).about(argument)
