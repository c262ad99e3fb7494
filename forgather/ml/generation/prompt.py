"""Prompts: the token ids from which a model generates, made from a text or from the messages of a conversation.

A conversation is rendered by `data/chat_template.py`, as it is for training: the ids of a prompt are those that the
same conversation has in training before the answer. The text that continues a raw text is not rendered. The rows of a
file of prompts are read by `data/chat_rows.py`, so that a file of conversations can be asked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from forgather.errors import TrainingError
from forgather.ml.data.chat_rows import BadRow, check_order, form_of, read_row, recognized_form
from forgather.ml.data.chat_template import control_tokens, render, template_names
from forgather.ml.data.data_errors import DataError, example_columns
from forgather.ml.data.json_rows import is_utf8
from forgather.ml.data.usual_columns import chosen_columns, column_value

CHAT, RAW, SOURCE = "chat", "raw", "source"


class PromptError(TrainingError, ValueError):
    """Raised if a prompt is empty, or cannot be given to the model."""

    code = "FG920"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a user asks: a text, or the messages of a conversation up to the answer.

    Args:
        text: the text; it is the content of one message of the user, or the text that is continued.
        messages: the messages of a conversation; empty for a text.
        tools: the descriptions of the tools that the assistant may call.
        expected: the answer that a file has for the question, which the model does not see.
        source: the file and the line, for messages about errors.
    """

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    expected: str | None = None
    source: str = ""

    @property
    def shown(self) -> str:
        """The text, or the last message of the conversation."""
        return self.text if not self.messages else str(self.messages[-1].get("content") or "")

    def refuse_empty(self) -> None:
        """Raises an error if there is nothing to answer.

        Raises:
            PromptError: FG920.
        """
        # A tool may return nothing, which the assistant can answer.
        if not self.shown.strip() and not (self.messages and self.messages[-1]["role"] == "tool"):
            raise PromptError(f"{_located(self)}the prompt is empty", hint="give a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """How questions become prompts.

    Args:
        tokenizer: the tokenizer.
        form: "chat" if a text is a message of the user, "raw" if the model continues the text, "source" if an encoder
            reads the text.
        system: the text of a system message for conversations that have none; None for no such message.
        options: further variables of the chat template, such as `enable_thinking`.
        prefix: a text before each source.

    Raises:
        PromptError: FG922 if the form is "chat" and the tokenizer has no chat template; FG920 if another form has
            a system message.
    """

    tokenizer: PreTrainedTokenizerBase
    form: str
    system: str | None = None
    options: Mapping[str, Any] | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.form == CHAT:
            require_chat_template(self.tokenizer)
        elif self.system is not None:
            what = "a source" if self.form == SOURCE else "a text that is continued as it is"
            raise PromptError(f"{what} has no system message", hint="leave out --system")

    def ids(self, question: Question) -> list[int]:
        """Returns the token ids from which the model generates an answer.

        Args:
            question: the question.

        Raises:
            PromptError: FG920 if the question is empty, or is a conversation and the form is "raw".
            DataError: FG897 if the chat template cannot render the conversation.
        """
        question.refuse_empty()
        if self.form == CHAT:
            return chat_ids(self.tokenizer, self.messages(question), list(question.tools), **(self.options or {}))
        if question.messages and self.form == SOURCE:
            hint = 'write {"prompt": "..."} or {"source": "..."}'
            raise PromptError(
                f"{_located(question)}the prompt is a conversation, and an encoder reads texts", hint=hint
            )
        if question.messages:
            raise PromptError(
                f"{_located(question)}the prompt is a conversation, and --raw continues texts", hint="leave out --raw"
            )
        if self.form == SOURCE:
            ids: list[int] = self.tokenizer(_as_utf8(self.prefix + question.text))["input_ids"]
            return ids
        return raw_ids(self.tokenizer, question.text)

    def messages(self, question: Question) -> list[Mapping[str, Any]]:
        """Returns the messages of the conversation that the chat template renders."""
        messages = list(question.messages) or [{"role": "user", "content": question.text}]
        has_own = messages[0]["role"] == "system"
        return messages if self.system is None or has_own else [{"role": "system", "content": self.system}, *messages]

    def control_tokens(self, question: Question) -> list[str]:
        """Returns the texts in a question that the tokenizer reads as special tokens, such as the end of a turn."""
        found = control_tokens(self.tokenizer)
        messages = self.messages(question) if self.form == CHAT else [{"content": question.text}]
        texts = [str(message.get("content") or "") for message in messages]
        return list(dict.fromkeys(token for text in texts for token in found.findall(text)))


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises an error if a tokenizer has no chat template.

    Raises:
        PromptError: FG922.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "the tokenizer has no chat template, so the model was not trained to answer in turns",
            code="FG922",
            hint="continue a text with 'fgcli generate --raw', or train on conversations with a chat_template: "
            f"{', '.join(template_names())}",
        )


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Returns the token ids of a conversation up to the beginning of the next answer.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages.
        tools: the descriptions of the tools, or None.
        **options: further variables of the chat template.

    Raises:
        DataError: FG897 if the chat template cannot render the conversation.
        PromptError: FG920 if the template leaves the system message out, or if a message is not UTF-8.
    """
    text = _as_utf8(render(tokenizer, messages, tools or None, add_generation_prompt=True, **options).text)
    system = str(messages[0].get("content") or "").strip() if messages[0]["role"] == "system" else ""
    # A template that knows no system message usually renders the others without an error.
    if system and system not in text:
        raise PromptError("the chat template leaves the system message out", hint="leave out --system")
    # The template has written the special tokens, so that the tokenizer must not add its own.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def raw_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a text that the model continues.

    The text begins with the begin-of-text token if the tokenizer adds it, and never twice. An end-of-text token that
    the tokenizer adds is left out, because the model would begin another text after it.

    Args:
        tokenizer: the tokenizer.
        text: the text.

    Raises:
        PromptError: FG920 if the text is not UTF-8.
    """
    ids: list[int] = tokenizer(_as_utf8(text))["input_ids"]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if begin is not None and ids[:2] == [begin, begin] and plain[:1] == [begin]:
        ids = ids[1:]
    if len(ids) > len(plain) and ids[-1:] == [end] and plain[-1:] != [end]:
        ids = ids[:-1]
    return ids


def _as_utf8(text: str) -> str:
    """Returns the text, or raises FG920: no tokenizer takes the half characters that stand for other bytes."""
    if not is_utf8(text):
        raise PromptError("the text is not in UTF-8", hint="convert it first, as with iconv -t UTF-8")
    return text


def read_questions(file: Path) -> list[Question]:
    """Returns the questions in a file.

    A line of a `.jsonl` file is `{"prompt": "..."}` or a conversation in one of the forms that training reads; if it
    ends with an answer, that answer is the expected one. `{"source": ..., "target": ...}`, or columns with other names
    that training finds, such as `article` and `summary`, are a text and its expected answer. In any other file, each
    line is a text. Empty lines are left out.

    Args:
        file: the file, in UTF-8.

    Raises:
        PromptError: FG920 if the file cannot be read, has no prompt, or has a row that is not a prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise PromptError(f"the prompts in {str(file)!r} cannot be read: {reason}", hint="name another file") from None
    return questions_of(lines, str(file), is_json=file.suffix == ".jsonl")


def questions_of(lines: Iterable[str], source: str, *, is_json: bool) -> list[Question]:
    """Returns the questions in the lines of a file.

    Args:
        lines: the lines.
        source: the name of the file.
        is_json: whether a line is a JSON object; otherwise it is a text.

    Raises:
        PromptError: FG920 if there is no prompt, or if a row is not a prompt.

    Example:
        >>> [question.text for question in questions_of(["One?", "", "Two?"], "-", is_json=False)]
        ['One?', 'Two?']
    """
    found = list(_questions(lines, source, is_json))
    if not found:
        raise PromptError(f"there is no prompt in {source!r}", hint="write one prompt per line")
    return found


def _questions(lines: Iterable[str], source: str, is_json: bool) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{source}:{number}"
            try:
                yield _question(json.loads(line), place) if is_json else Question(text=line, source=place)
            except (BadRow, ValueError, RecursionError) as error:
                reason = str(error) if isinstance(error, BadRow) else "the line is not a JSON object"
                hint = getattr(error, "hint", None) or 'write {"prompt": "..."}, or a conversation'
                raise PromptError(f"{place}: {reason}", hint=hint) from None


def _pair(row: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Returns the source of a row and its target, if it has one, in the columns that training finds; None without."""
    try:
        names = chosen_columns(row, {"source_column": None, "target_column": None})
    except DataError:
        names = {"source_column": "source", "target_column": "target"}
    source, target = (column_value(row, name) if name in row or "." in name else None for name in names.values())
    return (source, target if isinstance(target, str) else None) if isinstance(source, str) else None


def _question(row: Any, place: str) -> Question:
    if isinstance(row, Mapping) and isinstance(row.get("prompt"), str) and example_columns(list(row)) is None:
        return Question(text=row["prompt"], source=place)
    # A conversation may have a column `source`, too, that says where it is from.
    if isinstance(row, Mapping) and recognized_form(row) is None and (pair := _pair(row)) is not None:
        return Question(text=pair[0], expected=pair[1], source=place)
    conversation = read_row(row, form_of(row))
    messages, expected = list(conversation.messages), None
    if messages[-1]["role"] == "assistant":
        expected = str(messages.pop().get("content") or "")
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("the conversation has no message to answer")
    check_order(messages)
    return Question(messages=tuple(messages), tools=tuple(conversation.tools or ()), expected=expected, source=place)


def _located(question: Question) -> str:
    return f"{question.source}: " if question.source else ""
