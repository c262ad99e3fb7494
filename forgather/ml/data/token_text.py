"""The text of answers, and of single tokens: what a token adds to the text, special tokens included.

Takes token ids and a tokenizer of transformers; gives texts. `TokenText` decodes each id once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of token ids without special tokens, as the tokens say it: blanks are not changed."""
    text: Any = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


class TokenText:
    """The texts of tokens.

    Args:
        tokenizer: the tokenizer; without one, the text of a token is its id.

    Example:
        >>> TokenText(None)(12), TokenText(None).is_special(12)
        ('12', False)
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer if callable(getattr(tokenizer, "convert_ids_to_tokens", None)) else None
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._texts: dict[int, str] = {}

    def is_special(self, token_id: int) -> bool:
        """Returns whether a token is a special token, such as the end-of-text token."""
        return token_id in self._special

    def __call__(self, token_id: int) -> str:
        """Returns the text of a token; `<id>` if the tokenizer does not have the id."""
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def _text(self, token_id: int) -> str:
        if self.tokenizer is None:
            return str(token_id)
        try:
            token = self.tokenizer.convert_ids_to_tokens(token_id)
        except (IndexError, OverflowError, KeyError, ValueError, TypeError):
            token = None
        if not isinstance(token, str):
            return f"<{token_id}>"
        if token_id in self._special:
            return token
        text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        # A part of a character, or a token whose text a decoder drops, is shown as the vocabulary writes it.
        if not text or _REPLACED in text:
            return token
        # Decoders of SentencePiece drop the space before the first token.
        return f" {text}" if token.startswith(_SPACE) and not text.startswith(" ") else text
