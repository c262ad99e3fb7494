"""Chat rows: makes a list of messages of one row of data, in any of four forms.

Takes a row as it is in a file; gives a `Conversation`, or raises `BadRow`, which says what is wrong in the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.errors import nearest
from forgather.ml.data.data_errors import example_columns

ROLES = ("system", "user", "assistant", "tool")
FORMS = ("messages", "sharegpt", "instruction", "prompt")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
# The role that may follow: the key is the role before, "" at the start.
_NEXT = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("tool", "assistant"),
}
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_ADDED_TO_PROMPT = ("input", "context")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one row.

    Args:
        messages: the messages, each with `role` and, unless it only calls tools, `content`.
        tools: the descriptions of the tools that the assistant may call.
        num_prompt: the number of messages that are a prompt, or None if the row does not say it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    num_prompt: int | None = None

    def to_json(self) -> str:
        """Returns the conversation as JSON text, which `from_json` reads."""
        facts = {"messages": self.messages, "tools": self.tools, "num_prompt": self.num_prompt}
        return json.dumps({name: value for name, value in facts.items() if value is not None}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Returns the conversation that `to_json` wrote."""
        return cls(**json.loads(text))


class BadRow(ValueError):
    """Raised for a row that is not a conversation, with the error code of the reason.

    Args:
        message: what is wrong in the row.
        code: the error code.
        hint: what can be done.
    """

    def __init__(self, message: str, code: str = "FG890", hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def form_of(row: Any, form: str | None = None) -> str:
    """Returns the form of a row.

    Args:
        row: the row.
        form: the form that all rows have, or None to recognize it by the keys of the row.

    Raises:
        BadRow: if the row is not a mapping, or in none of the known forms.

    Example:
        >>> form_of({"instruction": "Greet me.", "output": "Hello"})
        'instruction'
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be a JSON object, found {_kind(row)}")
    recognized = form or recognized_form(row)
    if recognized is None:
        keys = ", ".join(map(repr, list(row)[:8])) or "no keys"
        hint = "messages, conversations, instruction and output, or prompt and completion"
        raise BadRow(f"the row is in none of the known forms; it has {keys}", "FG892", hint)
    return recognized


def recognized_form(row: Mapping[str, Any]) -> str | None:
    """Returns the form of a row by its keys, or None if it is in none of the known forms.

    Args:
        row: the row.
    """
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "instruction" in row and example_columns(list(row)):
        return "instruction"
    return "prompt" if example_columns(list(row)) else None


def read_row(row: Mapping[str, Any], form: str, before_input: str = "\n\n") -> Conversation:
    """Returns the conversation of a row, whose messages are checked one by one.

    Args:
        row: the row.
        form: one of `FORMS`.
        before_input: the text between an instruction and its `input`.

    Raises:
        BadRow: if a part of the row is missing or not what it should be.
    """
    tools = read_tools(row.get("tools"))
    if not isinstance(row.get("system"), str | None):
        raise BadRow(f"'system' must be text, found {_kind(row['system'])}")
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if form in ("messages", "sharegpt"):
        key = "messages" if form == "messages" else "conversations"
        return Conversation(read_messages(system, row.get(key), key), tools)
    pair = example_columns(list(row))
    if pair is None:
        raise BadRow(f"the form {form!r} needs a prompt and a completion; the row has {', '.join(map(repr, row))}")
    prompt, completion = row[pair[0]], row[pair[1]]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = read_messages(system, prompt, pair[0])
        return Conversation([*before, *read_messages([], completion, pair[1])], tools, len(before))
    for name, value in zip(pair, (prompt, completion), strict=True):
        if not isinstance(value, str):
            raise BadRow(f"{name!r} must be text, found {_kind(value)}")
    further = [row[name] for name in _ADDED_TO_PROMPT if row.get(name)]
    if any(not isinstance(text, str) for text in further):
        raise BadRow(f"{' and '.join(_ADDED_TO_PROMPT)} must be texts")
    turns = [*_history(row.get("history")), {"role": "user", "content": before_input.join([prompt, *further])}]
    before = read_messages(system, turns, pair[0])
    return Conversation(
        [*before, *read_messages([], [{"role": "assistant", "content": completion}], pair[1])], tools, len(before)
    )


def _history(history: Any) -> list[dict[str, Any]]:
    """Returns the turns before an instruction, which are stored as a list of pairs of question and answer."""
    if history is None:
        return []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadRow("'history' must be a list of pairs of question and answer")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def read_messages(first: list[dict[str, Any]], items: Any, key: str) -> list[dict[str, Any]]:
    """Returns checked messages.

    Args:
        first: messages that come before those of the row, unless these begin with a system message.
        items: the messages of the row.
        key: the key of the row, for errors.

    Raises:
        BadRow: with the number of the first message that is not one.
    """
    if not isinstance(items, list):
        raise BadRow(f"{key!r} must be a list of messages, found {_kind(items)}")
    if not items:
        raise BadRow(f"{key!r} is empty")
    messages = [_message(item, number) for number, item in enumerate(items, 1)]
    if not first or messages[0]["role"] != "system":
        return [*first, *messages]
    if messages[0].get("content") != first[0]["content"]:
        raise BadRow("the row has 'system' and another system message; only one can be first", "FG891")
    return messages


def _message(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRow(f"message {number} must be a mapping with 'role' and 'content', found {_kind(item)}")
    if "role" not in item and "from" in item:
        item = _from_sharegpt(item, number)
    role = item.get("role")
    if role is None:
        raise BadRow(f"message {number} has no role", hint=f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        hint = nearest(str(role), ROLES) or f"one of {', '.join(ROLES)}"
        raise BadRow(f"message {number} has the unknown role {role!r}", hint=hint)
    message = {name: item[name] for name in _KEPT if item.get(name) is not None}
    if not isinstance(message.get("reasoning_content"), str | None):
        raise BadRow(f"reasoning_content of message {number} must be text, found {_kind(item['reasoning_content'])}")
    if calls := _tool_calls(message.pop("tool_calls", None), number):
        if role != "assistant":
            raise BadRow(f"message {number} ({role}) calls tools, which only the assistant can do")
        message["tool_calls"] = calls
    content = _content(item.get("content"), number, role)
    if content is not None:
        message["content"] = content
    if role == "assistant" and not calls and not (content or "").strip():
        raise BadRow(f"message {number} (assistant) is empty: there is nothing to learn", "FG891")
    if role in ("user", "tool") and content is None:
        raise BadRow(f"message {number} ({role}) has no content")
    return message


def _content(content: Any, number: int, role: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    # A list of parts, as in multimodal chats; text parts alone have the meaning of their joined text.
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    raise BadRow(f"the content of message {number} ({role}) must be text or null, found {_kind(content)}")


def _from_sharegpt(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    speaker = item["from"]
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        hint = nearest(str(speaker), list(_SHAREGPT_ROLES)) or f"one of {', '.join(_SHAREGPT_ROLES)}"
        raise BadRow(f"message {number} is from the unknown speaker {speaker!r}", hint=hint)
    if speaker == "function_call":
        calls = _parsed(item.get("value"), f"the function call in message {number}")
        return {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {"role": role, "content": item.get("value")}


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls of message {number} must be a list, found {_kind(calls)}")
    return [_tool_call(call, number) for call in calls]


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow(f"a tool call of message {number} has no function name")
    arguments = function.get("arguments", {})
    # Some programs store the arguments as JSON text; templates would then print a quoted string.
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of {function['name']!r} in message {number}")
    if not isinstance(arguments, Mapping):
        raise BadRow(f"the arguments of {function['name']!r} in message {number} must be a mapping")
    plain = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {**plain, "id": call["id"]} if call.get("id") else plain


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Returns the descriptions of tools of a row, which may be written as JSON text; None if there are none.

    Raises:
        BadRow: if they are not a list of mappings.
    """
    if isinstance(tools, str):
        tools = _parsed(tools, "'tools'") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or any(not isinstance(tool, Mapping) for tool in tools):
        raise BadRow(f"'tools' must be a list of mappings, found {_kind(tools)}")
    return [dict(tool) for tool in tools]


def _parsed(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        raise BadRow(f"{what} is not valid JSON") from None


def with_system(conversation: Conversation, system: str) -> Conversation:
    """Returns a conversation that begins with a system message.

    Args:
        conversation: a conversation without a system message.
        system: the text of the message.
    """
    number = conversation.num_prompt
    messages = [{"role": "system", "content": system}, *conversation.messages]
    return Conversation(messages, conversation.tools, number + 1 if number is not None else None)


def check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error if the roles of messages do not follow one another as in a conversation.

    Args:
        messages: the messages, whose roles are known.

    Raises:
        BadRow: with the number of the first message that is out of order.
    """
    before, calls = "", False
    for number, message in enumerate(messages, 1):
        role = message["role"]
        allowed = ("tool",) if calls else _NEXT[before]
        if role not in allowed:
            after = f"after {before!r}" if before else "at the start"
            called = ", which called a tool" if calls else ""
            expected = " or ".join(map(repr, allowed))
            raise BadRow(f"message {number} has the role {role!r} {after}{called}; expected {expected}", "FG891")
        before, calls = role, bool(message.get("tool_calls"))


def message_texts(value: Any) -> Iterator[str]:
    """Yields all texts in messages or descriptions of tools, except the names of roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from message_texts(item) if name != "role" else ()
    elif isinstance(value, list):
        for item in value:
            yield from message_texts(item)


def _kind(value: Any) -> str:
    names = {str: "text", int: "a number", float: "a number", bool: "true or false", dict: "a mapping", list: "a list"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
