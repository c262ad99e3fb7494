"""Prompts that a model answers during training (GRPO, RLOO), from conversations or from rows with a prompt.

Takes rows; gives rows with `prompt`, a text or the messages of a chat, and the further columns, which reward functions
get. What the reference answer of a row is called `answer`: TRL passes no column `completion` to reward functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from forgather.ml.data.chat_rows import Conversation
from forgather.ml.data.conversations import CONVERSATION, SOURCE
from forgather.ml.data.data_errors import DataError, missing_column, row_place
from forgather.ml.data.row_stream import refuse_stream

PROMPT, ANSWER = "prompt", "answer"
_COMPLETION = "completion"
_GIVEN = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})


def rollout_prompts(dataset: Dataset, *, prompt_column: str = "prompt") -> Dataset:
    """Returns the prompts of a data set, for training on answers that the model writes itself.

    Args:
        dataset: the rows of `chats`, or rows with a column of prompts: texts, or lists of messages.
        prompt_column: the name of that column; conversations have none.

    Returns:
        Rows with `prompt` and all other columns. Of a conversation, the prompt is the messages before the last answer,
        and `answer` is the text of that answer. A column `completion` is called `answer`.

    Raises:
        DataError: FG831 if the column does not exist; FG984 if a row has no prompt, if its conversation has tools, if
            a column has the name of an argument that every reward function gets, or if there is a column `prompt` and
            the prompts are in another one.

    Example:
        >>> rollout_prompts(Dataset.from_dict({"prompt": ["1 + 1 ="], "completion": [" 2"]}))[0]
        {'prompt': '1 + 1 =', 'answer': ' 2'}
    """
    refuse_stream(dataset, "rollout_prompts")
    is_chat = CONVERSATION in dataset.column_names
    if not is_chat and prompt_column not in dataset.column_names:
        raise missing_column(prompt_column, dataset.column_names, "prompt_column")
    # The rows of the result have the prompt under this name, so one of the two columns would be lost.
    if not is_chat and prompt_column != PROMPT and PROMPT in dataset.column_names:
        raise _refused(
            f"the data set has a column {PROMPT!r} beside the prompts in {prompt_column!r}", "rename or remove it"
        )
    rows = [_of_chat(row) if is_chat else _of_row(number, row, prompt_column) for number, row in enumerate(dataset)]
    found = Dataset.from_list(rows)
    if taken := sorted(_GIVEN & set(found.column_names)):
        raise _refused(
            f"the data set has a column {taken[0]!r}, the name of an argument of reward functions", "rename it"
        )
    return found


def _of_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    conversation = Conversation.from_json(row[CONVERSATION])
    messages, place = conversation.messages, row.get(SOURCE, "a row")
    if conversation.tools:
        raise _refused(f"{place}: the conversation has tools, which are not called here", "remove its tools")
    answer = None
    if messages[-1]["role"] == "assistant":
        answer, messages = messages[-1].get("content"), messages[:-1]
    if not messages or messages[-1]["role"] == "assistant":
        raise _refused(f"{place}: the conversation has no message to answer", "begin it with a message of the user")
    others = {name: value for name, value in row.items() if name not in (CONVERSATION, SOURCE)}
    return {PROMPT: messages, ANSWER: answer, **others}


def _of_row(number: int, row: Mapping[str, Any], column: str) -> dict[str, Any]:
    prompt = row[column]
    is_text = isinstance(prompt, str) and prompt.strip() != ""
    is_messages = isinstance(prompt, list) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)
    if not is_text and not (is_messages and prompt[-1].get("role") == "user"):
        raise _refused(
            f"{row_place(number)} has {prompt!r:.80} in {column!r}, which is not a prompt",
            "a text, or messages of which the last one is the user's",
        )
    others = {name: value for name, value in row.items() if name != column}
    if _COMPLETION in others and ANSWER not in others:
        others[ANSWER] = others.pop(_COMPLETION)
    return {PROMPT: prompt, **others}


def _refused(message: str, hint: str) -> DataError:
    return DataError(message, code="FG984", hint=hint)
