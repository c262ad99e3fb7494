"""Chat templates: finds a template, gives it to a tokenizer, and renders conversations with the range of each answer.

Takes the name of a packaged template, a file, or what the tokenizer already has. Gives the text of a conversation and
the ranges of its characters that the template marks with `{% generation %}`, which are the answers of the assistant. A
template without marks is refused, because no token would be trained. The packaged templates render the same text as the
originals of their formats, which `scripts/oracles/chat_templates.py` compares.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from forgather.errors import first_line, nearest
from forgather.ml.data.data_errors import DataError, DataFileError
from forgather.ml.log import get_logger

logger = get_logger(__name__)

_FOLDER = Path(__file__).parent / "chat_templates"
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_READS_TOOLS = re.compile(r"\btools\b")
_READS_REASONING = re.compile(r"\b(reasoning_content|thinking|reasoning)\b")
# The answer is a letter that no token at the end of an answer contains.
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ℬ"}]


class Rendered(NamedTuple):
    """A conversation as text.

    Args:
        text: the text, including the begin-of-text token if the template writes one.
        turns: the first character and the character after the last one of each marked answer.
    """

    text: str
    turns: tuple[tuple[int, int], ...]


def template_names() -> list[str]:
    """Returns the names of the packaged chat templates.

    Example:
        >>> template_names()
        ['alpaca', 'chatml', 'gemma3', 'llama3', 'mistral', 'phi3', 'qwen2.5', 'qwen3']
    """
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))


def read_template(template: str | os.PathLike[str]) -> str:
    """Returns the text of a chat template.

    Args:
        template: the name of a packaged template, the path of a file, or the text of a template.

    Raises:
        DataFileError: FG893 if there is no such template.
    """
    name = str(template)
    if name in template_names():
        return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    if "{%" in name or "{{" in name:
        return name
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = template_names()
        close = nearest(name, names) or ""
        hint = close if close.startswith("did you mean") else f"a file, or one of {', '.join(names)}"
        reason = "" if isinstance(error, FileNotFoundError) else f": {first_line(error)}"
        found: DataFileError = DataFileError(f"there is no chat template {name!r}{reason}", code="FG893", hint=hint)
        found.argument = "chat_template"
        raise found from None


def set_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | os.PathLike[str] | None = None
) -> PreTrainedTokenizerBase:
    """Gives a tokenizer a chat template, which is saved with it, and returns the tokenizer.

    A tokenizer without a padding token gets one that is not the end of a text or a turn, if it has such a token.

    Args:
        tokenizer: the tokenizer, which is changed.
        chat_template: the name of a packaged template, the path of a file, or the text of a template. None keeps the
            template that the tokenizer has.

    Raises:
        DataFileError: FG893 if there is no such template.
        DataError: FG893 if the tokenizer has no template and none is given, FG894 if the template does not mark the
            answers, FG898 if the tokenizer does not have the token that ends a turn of the template.
    """
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    ends = {turn_end(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        _choose_pad_token(tokenizer, ends)
    return tokenizer


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, ends: set[int | None]) -> None:
    special = {id_: str(token) for id_, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}
    free = [token for id_, token in special.items() if id_ not in ends]
    chosen = next((token for token in free if "pad" in token.lower()), None) or tokenizer.unk_token
    if chosen is not None and tokenizer.convert_tokens_to_ids(chosen) not in ends:
        tokenizer.pad_token = chosen
    elif tokenizer.pad_token is None:
        # The collators of Forgather mask by length, so that the last token of an answer keeps its label.
        tokenizer.pad_token = tokenizer.eos_token


def check_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises an error if a tokenizer has no chat template, or one that does not mark the answers.

    Raises:
        DataError: FG893 or FG894.
    """
    template = tokenizer.chat_template
    names = ", ".join(template_names())
    if not template:
        hint = f"give the tokenizer a chat_template: a file, or one of {names}"
        raise DataError("the tokenizer has no chat template", code="FG893", hint=hint).about("tokenizer")
    for text in template.values() if isinstance(template, Mapping) else [template]:
        if not _MARK.search(text):
            same = packaged_twin(tokenizer)
            hint = (
                f"chat_template: {same} renders the same text without tools, and marks the answers"
                if same
                else (
                    "put {% generation %} and {% endgeneration %} around the answers in a file of your own, "
                    f"or take one of {names}"
                )
            )
            message = "the chat template of the tokenizer does not mark the answers, so that nothing would be trained"
            raise DataError(message, code="FG894", hint=hint).about("tokenizer")


_TWIN_PROBES: tuple[list[dict[str, Any]], ...] = (
    _PROBE,
    [*_PROBE, *_PROBE],
    [{"role": "system", "content": "s"}, *_PROBE, *_PROBE],
    [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "\n b "}],
)


def packaged_twin(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the name of the packaged template that renders every probe as the template of the tokenizer does.

    Args:
        tokenizer: a tokenizer with a chat template.

    Returns:
        The name, or None if there is no such template.
    """
    own = tokenizer.get_chat_template()
    for name in template_names():
        theirs = read_template(name)
        if all(
            _attempt(tokenizer, own, probe, is_open) == _attempt(tokenizer, theirs, probe, is_open)
            for probe in _TWIN_PROBES
            for is_open in (False, True)
        ) and _attempt(tokenizer, own, _PROBE, False):
            return name
    return None


def _attempt(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]], is_open: bool
) -> str | None:
    try:
        return _render(tokenizer, template, messages, None, is_open, {}).text
    except Exception:  # noqa: BLE001 - a template is code of the user, and may refuse a conversation
        return None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    **options: Any,
) -> Rendered:
    """Returns the text of a conversation, as `tokenizer.apply_chat_template` renders it, and the ranges of the answers.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages.
        tools: the descriptions of the tools, or None.
        add_generation_prompt: whether the text ends with the beginning of an answer, as it does for generation.
        **options: further variables of the template, such as `enable_thinking`.

    Raises:
        DataError: FG897 if the template cannot render the conversation, or would leave out a part of it.
    """
    given = [dict(tool) for tool in tools] if tools else None
    template = tokenizer.get_chat_template(None, given)
    _check_support(template, messages, given)
    try:
        return _render(tokenizer, template, messages, given, add_generation_prompt, options)
    except Exception as error:  # noqa: BLE001 - a template is code of the user, and may raise what it likes
        message = f"the chat template refuses the conversation: {first_line(error)}"
        raise DataError(message, code="FG897", hint="change the row, or use a template that can hold it") from error


def _render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> Rendered:
    # The same function that `apply_chat_template` calls, which itself does not return the ranges.
    made: Any = render_jinja_template(
        conversations=[[{name: value for name, value in row.items() if value is not None} for row in messages]],
        tools=tools,  # type: ignore[arg-type] # the functions that it also takes make the list's type invariant
        chat_template=template,
        return_assistant_tokens_mask=bool(_MARK.search(template)),
        add_generation_prompt=add_generation_prompt,
        **{**tokenizer.special_tokens_map, **options},
    )
    texts, ranges = made
    return Rendered(texts[0], tuple((begin, end) for begin, end in ranges[0]) if ranges else ())


def _check_support(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
    """Raises FG897 if a conversation has parts that the template never reads, and would leave out silently."""
    has_tools = tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
    if has_tools and not _READS_TOOLS.search(template):
        raise DataError(
            "the conversation uses tools, and the chat template has no place for them",
            code="FG897",
            hint="use a template with tools: qwen2.5, qwen3, mistral",
        )
    if any(message.get("reasoning_content") for message in messages) and not _READS_REASONING.search(template):
        raise DataError(
            "the conversation has reasoning_content, and the chat template has no place for it",
            code="FG897",
            hint="use a template with reasoning (qwen3), or remove reasoning_content",
        )


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id of the token with which the chat template ends an answer, at which generation stops.

    Args:
        tokenizer: a tokenizer with a chat template.

    Raises:
        DataError: FG893 or FG894 as `check_marks`, FG898 if an answer does not end with a special token.
    """
    check_marks(tokenizer)
    rendered = render(tokenizer, _PROBE)
    # From one rendered answer, so that it is right for every template; blanks after the last token do not count.
    begin, end = rendered.turns[-1] if rendered.turns else (0, 0)
    answer = rendered.text[begin:end].rstrip()
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not ids or ids[-1] not in special_ids(tokenizer):
        ending = answer.rpartition("ℬ")[2]
        message = f"the chat template ends an answer with {ending!r}, which is not a special token of the tokenizer"
        if not ending:
            message = "the chat template ends an answer without a special token, so that generation would not stop"
        hint = (
            "use a template whose tokens the tokenizer has (alpaca needs the end-of-text token only), or add the token"
        )
        raise DataError(message, code="FG898", hint=hint).about("chat_template")
    return int(ids[-1])


def missing_begin_warning(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a warning if the tokenizer begins every text with a token that the chat template does not write, else "".

    Args:
        tokenizer: a tokenizer with a chat template that marks the answers.
    """
    begin = tokenizer.bos_token_id
    if begin is None or list(tokenizer("a")["input_ids"])[:1] != [begin]:
        return ""
    if str(render(tokenizer, _PROBE).text).startswith(str(tokenizer.bos_token)):
        return ""
    return (
        f"the tokenizer begins a text with {tokenizer.bos_token!r}, and the chat template does not write it: the "
        "conversations begin without it, in training as in apply_chat_template"
    )


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of the tokens at which generation has to stop: the end of an answer, and the end of a text.

    Args:
        tokenizer: a tokenizer. Without a chat template that marks the answers, only its end-of-text token counts.
    """
    ends = [getattr(tokenizer, "eos_token_id", None)]
    if getattr(tokenizer, "chat_template", None):
        with suppress(DataError):  # a template that is not used for training
            ends.insert(0, turn_end(tokenizer))
    return [end for end in dict.fromkeys(ends) if end is not None]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids of the special tokens of a tokenizer, which never come from ordinary text."""
    added = (id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids).union(added)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Returns a pattern of the texts that the tokenizer reads as special tokens, wherever they occur."""
    texts = sorted(tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))), key=len, reverse=True)
    return _pattern(tuple(texts))


@functools.cache
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
