"""Names under which secrets stand, and names that only look like them.

Takes names and values; gives how sure it is that a value under a name is a secret. Keeps true: names of a vocabulary
(`pad_token`), of counts (`num_memory_tokens`) and of what is said about a secret (`password_file`) hide nothing.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

HIDDEN = "(hidden)"
"""What stands for a secret; a plain text in YAML, JSON, Python, HTML and addresses."""

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
# `password_file` is where a secret is, or how long it may be, and none itself.
_ABOUT = frozenset(
    """file files path paths dir directory folder env variable var name names url uri host port id ids length len min
    max count num policy prompt field fields column columns type types kind required enabled timeout ttl expiry expires
    user username scope scopes manager provider store backend class module function callback format mode version
    algorithm rotation retries limit limits regex pattern label description help title index size""".split()
)
# `auth_token: {value: ...}` and `secret_text`: the word before says what it is.
_NEUTRAL = frozenset("value values string text data default content contents plain raw base64 b64 encoded".split())
_IN_QUERIES = frozenset("sig signature token key auth jwt sas pass pw pwd hmac code_verifier session sid".split())
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = frozenset(("", "true", "false", "none", "null", "yes", "no", "on", "off", "auto", "~", HIDDEN))
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*")
_WHOLE = 8
_SHORTEST = 4


class Strength(IntEnum):
    """How sure a name makes it that its value is a secret."""

    NONE = 0
    WEAK = 1
    STRONG = 2


@lru_cache(maxsize=4096)
def strength_of(name: str) -> Strength:
    """Returns how sure a name makes it that its value is a secret.

    Example:
        >>> strength_of("auth_token.value").name, strength_of("slow_token").name, strength_of("password_file").name
        ('STRONG', 'WEAK', 'NONE')
    """
    words: list[str] = []
    for part in reversed(name.split(".")):
        words = [word.lower() for word in _WORDS.findall(part)] + words
        if not _NEUTRAL.issuperset(words):
            break
    while words and (words[-1] in _NEUTRAL or words[-1].isdigit()):
        words.pop()
    if not words:
        return Strength.NONE
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if "webhook" in words and last in ("webhook", "url", "uri"):
        return Strength.STRONG
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
    """Returns whether a name below that of a secret is of something that is said about it, as `file` or `user`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] in _ABOUT


def is_secret(name: str, value: str) -> bool:
    """Returns whether a text under a name is a secret.

    Example:
        >>> is_secret("hub_token", "hf_abcdef"), is_secret("pad_token", "endoftext")
        (True, False)
    """
    strength = strength_of(name)
    if strength is Strength.NONE or not may_be_secret(value):
        return False
    last = name.rpartition(".")[2].lower()
    if last == "pwd" and value.startswith("/"):  # the working folder, as shells call it
        return False
    if last.endswith(("token", "tokens")) and (value[0] in "<[{(" or is_number(value)):
        return False
    if strength is Strength.STRONG:
        return True
    # A token of an unknown kind may be a word of a vocabulary.
    return len(value) >= _WHOLE and not any(map(str.isspace, value)) and (last == "token" or is_random(value))


def is_secret_in_query(name: str, value: str) -> bool:
    """Returns whether a value in the query of an address is a secret; `sig` and `key` are short for more there."""
    if name.lower() in _IN_QUERIES or strength_of(name) is not Strength.NONE or name.lower().endswith("-signature"):
        return len(value) >= _SHORTEST and value.lower() not in _PLAIN and not value.startswith(("{", "$", "%s"))
    return False


def may_be_secret(value: str) -> bool:
    """Returns whether a value can be a secret at all, and is neither a word such as `true` nor an expression.

    Example:
        >>> may_be_secret("True"), may_be_secret("{{ token }}"), may_be_secret("hunter2")
        (False, False, True)
    """
    return len(value) >= _SHORTEST and value.lower() not in _PLAIN and value[0] not in "{$" and HIDDEN not in value


def is_variable(value: str) -> bool:
    """Returns whether a text is written as the name of an environment variable, which tells where a secret is.

    Example:
        >>> is_variable("HF_TOKEN"), is_variable("HFTOKEN")
        (True, False)
    """
    return _VARIABLE.fullmatch(value) is not None


def is_number(value: str) -> bool:
    """Returns whether a text is a number."""
    return value.replace(".", "", 1).lstrip("+-").isdigit()


def is_random(value: str) -> bool:
    """Returns whether a text is no word of a language: digits among letters, or capitals within.

    Example:
        >>> is_random("k3jd9s0a"), is_random("SECRETtok"), is_random("Baseline"), is_random("out/baseline")
        (True, True, False, False)
    """
    has_letters = any(map(str.isalpha, value))
    has_digits = any(map(str.isdigit, value))
    inside = value[1:]
    return has_letters and (has_digits or (inside.upper() != inside and inside.lower() != inside))
