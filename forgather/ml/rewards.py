"""Rewards by rules: functions for `reward_funcs` of the trainers that learn from answers of the model.

Each takes the answers and the columns of the data by name, and returns one number for each answer. An answer is a text,
or the messages of a chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgather.ml.argument_values import refuse_wrong_values


def contains_answer(completions: Sequence[Any], answer: Sequence[str], **others: Any) -> list[float]:
    """Returns 1 for each answer that contains the text in the column `answer`, 0 for others.

    Args:
        completions: the answers of the model.
        answer: the texts to find; blanks around them do not count.
        **others: the further arguments of every reward function.

    Example:
        >>> contains_answer(["It is 7.", "seven"], answer=["7", "7"])
        [1.0, 0.0]
    """
    return [float(right.strip() in text_of(one)) for one, right in zip(completions, answer, strict=True)]


def brevity(completions: Sequence[Any], max_length: int = 80, **others: Any) -> list[float]:
    """Returns how short each answer is: 1 for an empty one, 0 from `max_length` letters on, and in between a fraction.

    Args:
        completions: the answers of the model.
        max_length: the length from which the reward is 0, in letters.
        **others: the further arguments of every reward function.

    Example:
        >>> brevity(["abcd", "abcdefghij"], max_length=8)
        [0.5, 0.0]
    """
    refuse_wrong_values("rewards:brevity", locals())
    return [max(0.0, 1 - len(text_of(one)) / max_length) for one in completions]


def text_of(completion: Any) -> str:
    """Returns the text of an answer, without blanks around it.

    Args:
        completion: a text, or a list of messages, whose contents are joined.
    """
    if isinstance(completion, str):
        return completion.strip()
    return "".join(message.get("content") or "" for message in completion).strip()
