"""Resolves plain YAML 1.2 scalars to strings, numbers, booleans and null.

The input is the text of an untagged plain scalar; the output is its value. Invariant: the value equals that of
ruamel.yaml's safe loader for YAML 1.2 (a property test compares them), except for what the language refuses:
timestamps, a lone `=`, and integers with more digits than the budget allows.
"""

from __future__ import annotations

import re
from math import inf, nan

from forgather.config.path import PlainScalar
from forgather.config.yaml.events import Refusal

_WORDS: dict[str, bool | None] = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
}  # fmt: skip
# The patterns of ruamel.yaml's resolver with their quirks: `.5e3` is a string, because its exponent has no sign.
_FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9_]+(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_INT = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|[0-9_]+|0x[0-9a-fA-F_]+)")
_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"|[0-9]{4}-[0-9][0-9]?-[0-9][0-9]?(?:[Tt]|[ \t]+)[0-9][0-9]?:[0-9]{2}:[0-9]{2}"
    r"(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9][0-9]?(?::[0-9]{2})?))?"
)
_NUMBER_STARTS = frozenset("-+.0123456789")
_BASES = {"0b": 2, "0o": 8, "0x": 16}


def resolve_scalar(text: str, max_digits: int = 4_300) -> PlainScalar:
    """Returns the value of a plain scalar.

    Raises:
        Refusal: FG214 if the text is a timestamp or a lone `=`; FG220 if it is an integer of more than `max_digits`
            digits.

    Example:
        >>> [resolve_scalar(text) for text in ("1e-3", "017", "0o17", "yes", "~")]
        [0.001, 17, 15, 'yes', None]
    """
    if text in _WORDS:
        return _WORDS[text]
    # Most scalars are words; this test spares them the patterns.
    if text[0] not in _NUMBER_STARTS:
        if text == "=":
            raise Refusal("FG214", "a lone '=' is a YAML value key, which has no meaning here", "quote it: '='")
        return text
    return _number(text, max_digits)


def _number(text: str, max_digits: int) -> PlainScalar:
    if _FLOAT.fullmatch(text):
        return _float(text)
    if _INT.fullmatch(text):
        return _int(text, max_digits)
    if _TIMESTAMP.fullmatch(text):
        raise Refusal("FG214", f"{text!r} is a YAML timestamp", f'quote it to make it a string: "{text}"')
    return text


def _float(text: str) -> PlainScalar:
    digits = text.replace("_", "").lower()
    if digits.endswith(".inf"):
        return -inf if digits.startswith("-") else inf
    if digits == ".nan":
        return nan
    try:
        # The pattern is that of YAML and allows `._`, which Python refuses.
        return float(digits)
    except ValueError:
        return text


def _int(text: str, max_digits: int) -> PlainScalar:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if len(digits) > max_digits:
        raise Refusal(
            "FG220",
            f"an integer of {len(digits)} digits; the limit is {max_digits}",
            "quote it if it is a string",
        )
    # `017` is 17 in YAML 1.2; only `0o17` is octal.
    base = _BASES.get(digits[:2], 10)
    try:
        return sign * int(digits[2:] if base != 10 else digits, base)
    except ValueError:
        return text
