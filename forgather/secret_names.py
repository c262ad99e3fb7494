"""Names that mark a value as a secret, and similar names that do not.

The inputs are a name and a value; the output is how certain it is that the value is a secret. Names of vocabulary items
(`pad_token`), of counts (`num_memory_tokens`) and of facts about a secret (`password_file`) do not mark a secret.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

HIDDEN = "(hidden)"
"""The replacement for a secret. It needs no escapes in a string of YAML, JSON or Python, in HTML or in a URL."""

_STRONG = frozenset(
    """password passwords passwd passphrase passcode secret secrets credential credentials apikey apikeys authorization
    pwd bearer jwt webhook cookie cookies""".split()
)
_OF_A_KEY = frozenset(
    """api access secret private auth signing encryption ssh account subscription license master deploy service wandb hf
    openai anthropic mistral cohere groq replicate comet neptune aws azure gcp google slack stripe datadog""".split()
)
_OF_A_TOKEN = frozenset(
    """hub hf huggingface auth access api bearer refresh wandb github gitlab personal session id oauth security slack
    bot user deploy registry""".split()
)
_OF_TOKENS = frozenset("hub hf huggingface auth access api bearer refresh oauth".split())
_OF_AUTH = frozenset("basic http https proxy registry digest".split())
_VOCABULARY = frozenset(
    """pad eos bos unk mask sep cls image audio video start end special additional stop prefix suffix middle decoder
    begin boi eoi boa eoa eot first last next new per max min num text forced lang language memory fim blank space
    word delimiter boundary separator think query key value patch register class prompt model generation trigger
    control""".split()
)
# `password_file` names the place of a secret, and `password_length` its length; neither is a secret.
_ABOUT = frozenset(
    """file files path paths dir directory folder env variable var name names url uri host port id ids length len min
    max count num policy prompt field fields column columns type types kind required enabled timeout ttl expiry expires
    user username scope scopes manager provider store backend class module function callback format mode version
    algorithm rotation retries limit limits regex pattern label description help title index size""".split()
)
# In `auth_token: {value: ...}` and `secret_text` the preceding word decides.
_NEUTRAL = frozenset("value values string text data default content contents plain raw base64 b64 encoded".split())
_IN_QUERIES = frozenset("sig signature token key auth jwt sas pass pw pwd hmac code_verifier session sid".split())
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = frozenset(("", "true", "false", "none", "null", "yes", "no", "on", "off", "auto", "~", HIDDEN))
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*")
_WHOLE = 8
_SHORTEST = 4


class Strength(IntEnum):
    """How certain it is that a value is a secret, judging only by the name of the value."""

    NONE = 0
    WEAK = 1
    STRONG = 2


@lru_cache(maxsize=4096)
def strength_of(name: str) -> Strength:
    """Returns how certain it is that a value with this name is a secret, judging only by the name.

    Example:
        >>> strength_of("auth_token.value").name, strength_of("slow_token").name, strength_of("password_file").name
        ('STRONG', 'WEAK', 'NONE')
    """
    words: list[str] = []
    # In `auth_token.value` the last word is neutral, so the name of the outer key decides.
    for part in reversed(name.split(".")):
        words = [word.lower() for word in _WORDS.findall(part)] + words
        if not _NEUTRAL.issuperset(words):
            break
    while words and (words[-1] in _NEUTRAL or words[-1].isdigit()):
        words.pop()
    if not words:
        return Strength.NONE
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    # Unlike other URLs, that of a webhook is the secret itself.
    if "webhook" in words and last in ("webhook", "url", "uri"):
        return Strength.STRONG
    # Before the strong words, because `password_file` contains one.
    if last in _ABOUT:
        return Strength.NONE
    if not _STRONG.isdisjoint(words):
        return Strength.STRONG
    if last in ("key", "keys"):
        return Strength.STRONG if before in _OF_A_KEY else Strength.NONE
    if last == "auth":
        return Strength.STRONG if before in _OF_AUTH else Strength.NONE
    if last == "tokens":
        return Strength.STRONG if before in _OF_TOKENS else Strength.NONE
    if last in ("pass", "pw"):
        return Strength.WEAK
    if last != "token" or before in _VOCABULARY:
        return Strength.NONE
    return Strength.STRONG if before in _OF_A_TOKEN else Strength.WEAK


def is_about(name: str) -> bool:
    """Returns whether a key inside a secret mapping, such as `file` or `user`, has a value that is not secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] in _ABOUT


def is_secret(name: str, value: str) -> bool:
    """Returns whether the value of a name is a secret.

    Args:
        name: the name of the value, with dots between the keys of nested mappings.
        value: the text of the value.

    Example:
        >>> is_secret("hub_token", "hf_abcdef"), is_secret("pad_token", "endoftext")
        (True, False)
    """
    strength = strength_of(name)
    if strength is Strength.NONE or not may_be_secret(value):
        return False
    last = name.rpartition(".")[2].lower()
    if last == "pwd" and value.startswith("/"):  # PWD is the working folder in shells
        return False
    # Special tokens are written in brackets, and token ids are numbers.
    if last.endswith(("token", "tokens")) and (value[0] in "<[{(" or is_number(value)):
        return False
    if strength is Strength.STRONG:
        return True
    # A token of an unknown kind can be a word of a vocabulary.
    return len(value) >= _WHOLE and not any(map(str.isspace, value)) and (last == "token" or is_random(value))


def is_secret_in_query(name: str, value: str) -> bool:
    """Returns whether a value in the query of a URL is a secret.

    In a query, short names such as `sig` and `key` also mark a secret.

    Args:
        name: the name of the query parameter.
        value: the value of the query parameter.
    """
    if name.lower() in _IN_QUERIES or strength_of(name) is not Strength.NONE or name.lower().endswith("-signature"):
        return len(value) >= _SHORTEST and value.lower() not in _PLAIN and not value.startswith(("{", "$", "%s"))
    return False


def may_be_secret(value: str) -> bool:
    """Returns whether a value can be a secret: it is neither a short word such as `true` nor an expression.

    Example:
        >>> may_be_secret("True"), may_be_secret("{{ token }}"), may_be_secret("hunter2")
        (False, False, True)
    """
    return len(value) >= _SHORTEST and value.lower() not in _PLAIN and value[0] not in "{$" and HIDDEN not in value


def is_variable(value: str) -> bool:
    """Returns whether a text has the form of an environment variable's name, and so is not a secret itself.

    Example:
        >>> is_variable("HF_TOKEN"), is_variable("HFTOKEN")
        (True, False)
    """
    return _VARIABLE.fullmatch(value) is not None


def is_number(value: str) -> bool:
    """Returns whether a text is a number."""
    return value.replace(".", "", 1).lstrip("+-").isdigit()


def is_random(value: str) -> bool:
    """Returns whether a text looks like a random string and not like a word.

    A text looks random if it has digits among letters, or capital letters after the first letter.

    Example:
        >>> is_random("k3jd9s0a"), is_random("SECRETtok"), is_random("Baseline"), is_random("out/baseline")
        (True, True, False, False)
    """
    has_letters = any(map(str.isalpha, value))
    has_digits = any(map(str.isdigit, value))
    inside = value[1:]
    return has_letters and (has_digits or (inside.upper() != inside and inside.lower() != inside))
