"""Plain scalars that are strings but look like numbers, booleans or null.

The input is the text of a plain scalar that is a string; the output is a hint. Invariant: there is no hint for a text
that YAML reads as a string and that is commonly meant as a string, such as a version, a range, a size in bytes or a
time.
"""

from __future__ import annotations

import re
from functools import lru_cache

from forgather.config.yaml.scalars import resolve_scalar

BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_WORDS = {
    **BOOLEANS,
    "none": "~",
    "null": "~",
    "nil": "~",
    "nan": ".nan",
    "inf": ".inf",
    "infinity": ".inf",
}
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"))
# The composer tests each string for these two sets first, because `lookalike` is too slow for every string.
FIRST = frozenset("0123456789+-.\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d")
WORDS = frozenset(
    spelled + mark
    for word in _WORDS
    for spelled in (word, word.capitalize(), word.upper(), "NaN")
    for mark in ("", ",", ";")
)
_LONGEST = 40

_THOUSANDS = r"[-+]?\d{1,3}(?:(,\d{3})+(?:\.\d*)?|(?:\.\d{3}){2,}|(?:[ \u00a0\u202f']\d{3})+)"
_DECIMAL_COMMA = r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?"
_SUFFIX = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([fFlL])"
_SCALE = r"([-+]?\d+(?:\.\d+)?) ?([kKM%])"
_BASE = r"[-+]?0[xXbBoO]\w+"
_ARITHMETIC = r"[-+]?[\d.]+(?:[eE][-+]?\d+)? ?(?:\*\*?|\^|/|[xX×] ?10 ?\^) ?[-+]?[\d.]+(?:[eE][-+]?\d+)?"
_SPACED = r"[-+]?\d[\d.]* ?[eE] ?[-+]? ?\d+|[-+]{2,}[\d.]+"
_BROKEN = r"[-+]?(?:\d*\.\d+\.|\d+\.\d*[eE][-+]?\d*\.\d*|\d+[eE][-+]?\d*\.\d*|\d+(?:\.\d*)?[eE][-+]?)"


@lru_cache(maxsize=512)
def lookalike(text: str) -> str | None:
    """Returns a hint for a string without quotes that looks like a number, boolean or null; None for any other string.

    Example:
        >>> lookalike("1,000"), lookalike("no"), lookalike("cosine")
        ('write 1000, or quote it if it is a text', 'quote it ("no") if it is a text, or write false', None)
    """
    meant = _meant(text)
    if meant is None:
        return None
    if text.casefold() in _WORDS:
        return f'quote it ("{text}") if it is a text, or write {meant}'
    return f"write {meant}, or quote it if it is a text" if meant else "write a plain number, or quote it"


def _meant(text: str) -> str | None:
    """Returns the value that was probably meant; "" if that is not clear; None if the text is meant as a string."""
    if len(text) > _LONGEST:
        return None
    # `lr: 0.1,` is a habit from Python and JSON.
    if text[-1] in ",;" and _is_value(text[:-1]):
        return text[:-1]
    # Text processors replace a minus by a dash, which looks the same.
    plain = text.translate(_DASHES)
    word = plain.lstrip("+-").rstrip(",;").casefold()
    # `-no` is no boolean, but `-inf` is a number.
    if word in _WORDS and (plain[0] not in "+-" or word in ("inf", "infinity", "nan")):
        return ("-" if plain[0] == "-" else "") + _WORDS[word]
    # At most a sign and a point come before the first digit of a number.
    if not any(char.isdigit() for char in text[:3]):
        return None
    return _number(plain)


def _number(text: str) -> str | None:
    if re.fullmatch(_THOUSANDS, text):
        digits = re.sub(r"[^\d.+-]", "", text)
        return digits.replace(".", "") if digits.count(".") > 1 else digits
    if re.fullmatch(_DECIMAL_COMMA, text):
        return text.replace(",", ".")
    if (match := re.fullmatch(_SUFFIX, text)) or (match := re.fullmatch(_SCALE, text)):
        return _scaled(*match.groups())
    if re.fullmatch(_ARITHMETIC, text):
        return f'!calc "{text}"' if re.search(r"\*|/", text) else ""
    if re.fullmatch(_BASE, text):
        return text.lower() if _is_value(text.lower()) else ""
    try:
        # Python reads more forms of numbers than YAML, such as digits of other scripts.
        float(text.replace(" ", ""))
    except ValueError:
        return "" if re.fullmatch(_BROKEN, text) or re.fullmatch(_SPACED, text) else None
    ascii_text = "".join(str(int(char)) if char.isdigit() else char for char in text if char != " ")
    return ascii_text if _is_value(ascii_text) else repr(float(ascii_text))


def _scaled(digits: str, suffix: str) -> str:
    if suffix == "%":
        return f"{float(digits) / 100:g}"
    if suffix in "kKM":
        return f"{float(digits) * (1_000_000 if suffix == 'M' else 1_000):.0f}"
    return digits


def _is_value(text: str) -> bool:
    """Returns whether YAML 1.2 reads a text as a number, boolean or null."""
    return bool(text) and (text[0] in "-+.0123456789tTfFnN~") and not isinstance(resolve_scalar(text), str)
