"""Preference pairs of conversations as token ids: the prompt once, and each answer up to its stop token.

Takes the messages before the answers and the two answers; gives token ids. The chat template renders each answer after
the messages, so prompts and answers have the tokens that supervised fine-tuning and generation have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from forgather.ml.data.chat_rows import Conversation, message_texts
from forgather.ml.data.chat_template import control_tokens, render, turn_end
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.turn_tokens import chat_tokens, until_stop


def pair_tokens(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, answers: Sequence[Mapping[str, Any]]
) -> list[list[int]] | None:
    """Returns the token ids of a prompt and of the answers to it.

    Args:
        tokenizer: a tokenizer whose chat template marks the answers.
        conversation: the messages before the answers.
        answers: messages of the assistant, each of which is rendered after the conversation.

    Returns:
        The ids of the prompt, and those of each answer with the token at which generation stops. None if a message
        contains the text of a special token, or if a token of the prompt reaches into an answer.

    Raises:
        DataError: FG893, FG894, FG895, FG897 or FG898 if the chat template cannot render the conversation or does not
            mark its answers; FG942 if it writes another prompt before the one answer than before the other.
    """
    stops = frozenset({turn_end(tokenizer), tokenizer.eos_token_id} - {None})
    texts = message_texts([conversation.messages, list(answers), conversation.tools])
    control = control_tokens(tokenizer)
    if any(control.search(text) for text in texts):
        return None
    prompts, ids = [], []
    for answer in answers:
        messages = [*conversation.messages, answer]
        rendered = render(tokenizer, messages, conversation.tools)
        expected = sum(message["role"] == "assistant" for message in messages)
        if len(rendered.turns) != expected:
            hint = "put one {% generation %} ... {% endgeneration %} around each answer"
            message = f"the chat template marks {len(rendered.turns)} of {expected} answers"
            raise DataError(message, code="FG894", hint=hint)
        tokens = chat_tokens(tokenizer, rendered)
        if tokens is None:
            return None
        begin, end = until_stop(tokenizer, tokens.ids, tokens.turns[-1], stops)
        prompts.append(tokens.ids[:begin])
        ids.append(tokens.ids[begin:end])
    if any(prompt != prompts[0] for prompt in prompts):
        raise DataError(
            "the chat template writes different prompts before the two answers",
            code="FG942",
            hint="give both answers the same parts (reasoning_content, tool_calls), or use another chat template",
        )
    return [prompts[0], *ids]
