"""The tokenizer of a model as entries of a GGUF file.

Takes a fast tokenizer of transformers; gives `GgufTokenizer`: the tokens, their kinds and merges, the name of the
pre-tokenizer, and the special tokens. GGUF names a pre-tokenizer and does not store its expression, so a tokenizer is
refused unless its expression is exactly the one that llama.cpp has under a name: another one would divide some texts
differently, and no program would notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from forgather.errors import TrainingError

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": "llama-bpe",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": "qwen2",
}
"""The expressions of llama.cpp by which a text is divided, and their names. That of GPT-2 is a part of `ByteLevel`."""

_GPT2 = "gpt-2"
_NORMALIZED = {"qwen2": ({"type": "NFC"},)}
"""The normalizers that the models of a pre-tokenizer have, and that llama.cpp leaves out."""


class GgufTokenizerError(TrainingError, ValueError):
    """Raised if a tokenizer has no equal in GGUF."""

    code = "FG938"


class TokenKind(IntEnum):
    """The kinds of tokens in GGUF, with their numbers there."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """The entries for a tokenizer in a GGUF file.

    Args:
        pre: the name of the pre-tokenizer.
        tokens: the text of each token, by its number.
        kinds: the kind of each token.
        merges: the pairs of tokens that are merged, in their order; the two are divided by a space.
        special: the numbers of special tokens, by "bos", "eos", "eot", "unk" and "pad".
        adds_bos: whether a text gets a begin-of-text token.
        adds_eos: whether a text gets an end-of-text token.
        chat_template: the chat template; None if there is none.
    """

    pre: str
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    merges: Sequence[str]
    special: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def gguf_tokenizer(tokenizer: Any, *, rows: int, ends: Sequence[int] = ()) -> GgufTokenizer:
    """Returns the entries for a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        rows: the number of rows of the model's embeddings, which may be more than there are tokens.
        ends: the tokens at which the model's generation config stops.

    Raises:
        GgufTokenizerError: FG938 if the tokenizer is not a byte-level BPE with a pre-tokenizer that llama.cpp has.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise _refused(f"a {type(tokenizer).__name__} has no fast form")
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = facts["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or not _is_byte_level(facts["decoder"]):
        raise _refused("it is not a byte-level BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _refused(f"its BPE has {name}")
    pre = _pre_tokenizer(facts)
    names = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(names, TokenKind.NORMAL)
    for added in facts["added_tokens"]:
        _refuse_spaces(added)
        names[added["id"]] = added["content"]
        kinds[added["id"]] = TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED
    if max(names) >= rows:
        raise _refused(f"it has a token {max(names)}, and the model has {rows} rows")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    plain = tokenizer("a")["input_ids"]
    return GgufTokenizer(
        pre=pre,
        tokens=[names.get(number, f"[PAD{number}]") for number in range(rows)],
        kinds=[kinds.get(number, TokenKind.UNUSED) for number in range(rows)],
        merges=merges,
        special=_special(tokenizer, ends),
        adds_bos=bool(plain) and plain[0] == tokenizer.bos_token_id,
        adds_eos=len(plain) > 1 and plain[-1] == tokenizer.eos_token_id,
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _is_byte_level(decoder: Any) -> bool:
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _refuse_spaces(added: Mapping[str, Any]) -> None:
    for name in ("lstrip", "rstrip", "single_word"):
        if added.get(name):
            raise _refused(f"its token {added['content']!r} has {name}")


def _pre_tokenizer(facts: Mapping[str, Any]) -> str:
    """Returns the name of the pre-tokenizer of a tokenizer.

    Args:
        facts: the content of `tokenizer.json`.
    """
    steps = _steps(facts["pre_tokenizer"], "pretokenizers")
    normalizers = _steps(facts["normalizer"], "normalizers")
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused("its pre-tokenizer does not end with ByteLevel, or adds a space before the text")
    if len(steps) == 1 and last.get("use_regex", True):
        found = _GPT2
    elif len(steps) == 2 and not last.get("use_regex", True) and steps[0].get("type") == "Split":
        split = steps[0]
        expression = split["pattern"].get("Regex", "")
        if split.get("behavior") != "Isolated" or split.get("invert") or expression not in PRE_TOKENIZERS:
            raise _refused(f"llama.cpp has no name for its pre-tokenizer {expression!r:.120}")
        found = PRE_TOKENIZERS[expression]
    else:
        raise _refused("llama.cpp has no name for its pre-tokenizer")
    if any(step not in _NORMALIZED.get(found, ()) for step in normalizers):
        raise _refused(f"its normalizer {normalizers[0].get('type')} has no place in GGUF")
    return found


def _steps(found: Any, key: str) -> list[dict[str, Any]]:
    if not found:
        return []
    return list(found[key]) if found.get("type") == "Sequence" else [found]


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """Returns the numbers of special tokens. Of two tokens that end a text, the one that ends a turn is `eot`."""
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    found = {name: number for name, number in named.items() if number is not None}
    others = [end for end in dict.fromkeys(ends) if end != found.get("eos")]
    if "eos" not in found and others:
        found["eos"] = others.pop(0)
    if len(others) > 1:
        raise _refused(f"generation stops at {len(others) + 1} tokens, and GGUF has a place for two")
    return {**found, "eot": others[0]} if others else found


def _refused(why: str) -> GgufTokenizerError:
    return GgufTokenizerError(
        f"the tokenizer of the model cannot be written into a GGUF file: {why}",
        hint="leave out --gguf: 'fgcli export RUN OUT' writes the model with its tokenizer for transformers",
    )
