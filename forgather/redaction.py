"""Secrets, and texts without them.

Takes names, values and texts; gives texts that say `(hidden)` where a secret was. Keeps true: what was read by `!env`,
stands under a name that looks secret, or is the user's part of an address, is hidden from every text that this process
writes or prints later, in the spellings of JSON, Python and HTML too; names of a vocabulary (`pad_token`,
`num_memory_tokens`) hide nothing.
"""

from __future__ import annotations

import json
import re
from string import ascii_lowercase, ascii_uppercase

HIDDEN = "(hidden)"
"""What stands for a secret; a plain text in YAML, JSON, Python, HTML and addresses."""

_STRONG = frozenset(
    "password passwd passphrase secret secrets credential credentials apikey authorization pwd".split()
)  # fmt: skip
_OF_A_KEY = frozenset(
    "api access secret private auth signing encryption ssh account subscription license wandb hf openai comet".split()
)
_OF_A_TOKEN = frozenset(
    "hub hf huggingface auth access api bearer refresh wandb github gitlab personal session id oauth security".split()
)
_VOCABULARY = frozenset(
    """pad eos bos unk mask sep cls image audio video start end special additional stop prefix suffix middle decoder
    begin boi eoi boa eoa eot first last next new per max min num text forced lang language memory fim blank space
    word delimiter boundary separator think query key value patch register class prompt model generation""".split()
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = frozenset(("", "true", "false", "none", "null", "yes", "no", "on", "off", "auto", "~", HIDDEN))
# `lower` changes the length of some texts.
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
_HINT = re.compile("token|secret|passw|passphrase|pwd|credential|apikey|_key|authorization")
_QUOTED = r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.|\'\')*\''
_PAIR = re.compile(
    rf"(?P<name>[A-Za-z_][\w-]*)(?P<quote>[\"']?)(?P<sign>[ \t]*[:=][ \t]*)(?:&\w+[ \t]+)?(?P<value>{_QUOTED}"
    r"|[|>][+-]?[ \t]*\n(?P<block>(?P<indent>[ \t]+)[^\n]*\n(?:(?P=indent)[^\n]*\n|[ \t]*\n)*)"
    r"|[^\s\"',\[\]{}&#!*|>][^\s,\]}&#\"']*)"
)
_LITERAL = re.compile(
    rf"(?P<name>[A-Za-z_]\w*)(?P<quote>[\"']?)(?P<sign>[ \t]*[:=][ \t]*)(?P<value>{_QUOTED})(?P<block>)"
)
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^/\s@'\"<>(){}]+)@")
_WHOLE_BELOW = 8
_SHORTEST = 4

_known: dict[str, tuple[str, ...]] = {}


def is_secret(name: str, value: str) -> bool:
    """Returns whether a text under a name is a secret.

    Example:
        >>> is_secret("hub_token", "hf_abcdef"), is_secret("pad_token", "endoftext")
        (True, False)
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or value.lower() in _PLAIN or len(value) < _SHORTEST or value[0] in "{$":
        return False
    if not _STRONG.isdisjoint(words):
        return True
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "key":
        return before in _OF_A_KEY
    if words[-1] != "token" or value[0] in "<[{(" or _is_number(value):
        return False
    return before in _OF_A_TOKEN or (before not in _VOCABULARY and len(value) >= _WHOLE_BELOW)


def _is_number(value: str) -> bool:
    return value.replace(".", "", 1).lstrip("+-").isdigit()


def remember(value: str, name: str = "") -> None:
    """Hides a value from now on.

    Args:
        value: what was read by `!env`, or stands under a name that looks secret. A short word, number or path is
            hidden only under a name that looks secret: without it half of every text would be.
        name: that name.
    """
    if value in _known or value.lower() in _PLAIN or len(value) < _SHORTEST:
        return
    is_ordinary = value.startswith(("/", "~", ".")) or (_is_number(value) and len(value) < _WHOLE_BELOW)
    if is_ordinary and not is_secret(name, value):
        return
    in_html = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    spellings = (value, json.dumps(value)[1:-1], repr(value)[1:-1], in_html, value.replace("'", "''"))
    _known[value] = tuple(dict.fromkeys(spellings))


def hide(text: str, *, is_code: bool = False) -> str:
    """Returns a text without secrets: those that are known, and those that it shows under their names.

    Args:
        text: any text.
        is_code: whether it is Python, where only quoted texts are values.
    """
    text = _without_values(text, _LITERAL if is_code else _PAIR)
    if "@" in text and "://" in text:
        text = _ADDRESS.sub(_without_user, text)
    for value in sorted(_known, key=len, reverse=True):
        for spelling in _known[value]:
            if spelling in text:
                text = _replaced(text, spelling)
    return text


def note_secrets(text: str) -> None:
    """Remembers the secrets that a text shows, so that no other text shows them."""
    hide(text)


def _replaced(text: str, value: str) -> str:
    if len(value) >= _WHOLE_BELOW:
        return text.replace(value, HIDDEN)
    return re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", lambda _: HIDDEN, text)


def _without_values(text: str, pairs: re.Pattern[str]) -> str:
    """Returns a text without the values of names that look secret; only lines with such a word are taken apart."""
    parts: list[str] = []
    done = 0
    for hint in _HINT.finditer(text.translate(_LOWER)):
        if hint.start() < done:
            continue
        start = max(done, text.rfind("\n", 0, hint.start()) + 1)
        end = text.find("\n", hint.start())
        end = len(text) if end < 0 else end
        for found in pairs.finditer(text, start):
            if found.start() > end:
                break
            parts += text[done : found.start()], _without_value(found)
            done = found.end()
        parts.append(text[done:end])
        done = max(done, end)
    return "".join((*parts, text[done:]))


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if not _HINT.search(name.lower()):
        return found[0]
    plain = found["block"] or (value[1:-1] if value[:1] in "\"'" else value)
    if not is_secret(name, plain.strip()):
        return found[0]
    for line in plain.split("\n") if found["block"] else [plain]:
        remember(line.strip(), name)
    head = found[0][: found.start("value") - found.start()]
    if found["block"]:
        return f"{head}{HIDDEN}\n"
    return f"{head}{value[0]}{HIDDEN}{value[0]}" if value[:1] in "\"'" else head + HIDDEN


def _without_user(found: re.Match[str]) -> str:
    user = found["user"]
    if user in ("git", HIDDEN):
        return found[0]
    for part in user.split(":"):
        if len(part) >= _WHOLE_BELOW:
            remember(part, "password")
    return f"{found['scheme']}{HIDDEN}@"
