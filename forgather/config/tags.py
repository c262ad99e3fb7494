"""The table of tags, and the parser for the text of a tag.

The input is the text of a tag (`!singleton:torch:nn.Linear@head`); the output is a `Tag`. Invariants: nothing is
imported; a constructor has the form "module:symbol", "path/file.py:symbol" or the name of a builtin.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass

from forgather.aliases import suggest
from forgather.config.graph import Calc, CallKind, ContainerKind, Env, Lookup, Var
from forgather.config.yaml.events import Refusal
from forgather.errors import nearest

TagKind = CallKind | ContainerKind | type[Lookup]

TAGS: dict[str, TagKind] = {
    "singleton": CallKind.SINGLETON,
    "call": CallKind.SINGLETON,
    "factory": CallKind.FACTORY,
    "partial": CallKind.PARTIAL,
    "lambda": CallKind.PARTIAL,
    "meta": CallKind.META,
    "var": Var,
    "env": Env,
    "calc": Calc,
    "list": ContainerKind.LIST,
    "tuple": ContainerKind.TUPLE,
    "dict": ContainerKind.DICT,
    "dlist": ContainerKind.DLIST,
}

SHORT_NAMES = ("call", "getitem", "items", "keys", "named_dict", "named_list", "named_tuple", "values")
# Of the running Python, so a name of a newer release is known there.
BUILTIN_NAMES = frozenset(name for name in dir(builtins) if not name.startswith("_")) | frozenset(SHORT_NAMES)

STANDARD = "tag:yaml.org,2002:"
_REFUSED = {
    "set": "write a sequence, and !call:set around it",
    "omap": "write a mapping; the order of its keys is kept",
    "pairs": "write a sequence of two-item sequences",
    "binary": "keep the bytes in a file and name the file",
    "timestamp": "quote the value and convert it where it is used",
    "merge": "use the key << without a tag",
    "value": "leave the tag out",
}
_LONGEST = 1000
_SWALLOWED = re.compile(r"[,\[\]{}]")


@dataclass(frozen=True, slots=True)
class Tag:
    """A parsed tag.

    Args:
        kind: the kind of the node that the tag makes.
        constructor: the constructor, as "module:symbol", "file.py:symbol" or a builtin; "" if the tag calls nothing.
        name: the name after `@`; None if the tag has no name.
    """

    kind: TagKind
    constructor: str = ""
    name: str | None = None


def parse_tag(text: str) -> Tag:
    """Returns the parts of a tag that begins with `!`.

    Raises:
        Refusal: FG210 if the kind is unknown; FG211 if the constructor or the name is malformed; FG214 if the tag is
            one of YAML's own that the config language does not have.

    Example:
        >>> parse_tag("!singleton:torch:nn.Linear@head")
        Tag(kind=<CallKind.SINGLETON: 'singleton'>, constructor='torch:nn.Linear', name='head')
    """
    if len(text) > _LONGEST:
        message = f"a tag of {len(text)} characters, which begins with {text[:40]!r}; the limit is {_LONGEST}"
        raise Refusal("FG211", message, "put the name in the tag, and its arguments after the tag")
    _refuse(text)
    word, _, rest = text[1:].partition(":")
    # `!list@name` is accepted for `!list:@name`.
    if "@" in word:
        word, _, behind = word.partition("@")
        rest = f"@{behind}"
    kind = TAGS.get(word)
    if kind is None:
        near = suggest("tag", word, list(TAGS))
        # The table of names has no exclamation mark.
        hint = near.replace("mean '", "mean '!") if near else f"known: {', '.join(TAGS)}"
        raise Refusal("FG210", f"unknown tag '!{word}'", hint)
    body, name = _split_name(rest, text)
    if isinstance(kind, CallKind):
        return Tag(kind, _constructor(body, text), name)
    if body:
        hint = f"to name it, write !{word}:@name" if isinstance(kind, ContainerKind) else f"write !{word} value"
        raise Refusal("FG211", f"{text!r}: !{word} takes no constructor, found {body!r}", hint)
    if name is not None and isinstance(kind, type):
        raise Refusal("FG211", f"{text!r}: !{word} takes no @name", f"write !{word} value")
    return Tag(kind, "", name)


def _refuse(text: str) -> None:
    if text.startswith(STANDARD):
        word = text.removeprefix(STANDARD)
        hint = "call the constructor: !singleton:module:symbol" if word.startswith("python") else _REFUSED.get(word)
        raise Refusal("FG214", f"the tag '!!{word}' is not part of the language", hint)
    # `[!call:a:b, 1]`: YAML takes the comma as a part of the tag.
    swallowed = _SWALLOWED.search(text)
    if swallowed:
        raise Refusal(
            "FG211",
            f"the tag {text!r} swallowed {swallowed[0]!r}: in YAML it is part of the tag",
            f"put a space before it: '{text[: swallowed.start()]} {swallowed[0]}'",
        )
    if not text.startswith("!"):
        raise Refusal("FG210", f"unknown tag '!<{text}>'", "a tag is written !kind:module:symbol")
    if not text.isascii() or any(char.isspace() for char in text):
        raise Refusal(
            "FG211", f"the tag {text!r} contains a space or a non-ASCII character", "rename what it refers to"
        )


def _split_name(body: str, text: str) -> tuple[str, str | None]:
    at = body.rfind("@")
    # Only an `@` after the last `:` names the node; a path may contain one.
    if at < 0 or at < body.rfind(":"):
        return body, None
    name = body[at + 1 :]
    if not name:
        raise Refusal("FG211", f"{text!r}: no name after '@'", "write @name, or leave the '@' out")
    # `!list:@name` and `!list@name` are the same.
    return body[:at].removesuffix(":"), name


def _refuse_odd(module: str, symbol: str, text: str) -> None:
    if "(" in symbol:
        hint = "arguments follow the tag: !kind:module:symbol [1, 2]"
        raise Refusal("FG211", f"{text!r}: {symbol!r} is not the name of a class or function", hint)
    if ":" in module and not module.endswith(".py"):
        first, _, rest = module.partition(":")
        hint = f"parts of a symbol are joined by dots: {first}:{rest.replace(':', '.')}.{symbol}"
        raise Refusal("FG211", f"{text!r} has more than one ':' after its kind", hint)


def _constructor(body: str, text: str) -> str:
    module, colon, symbol = body.rpartition(":")
    if not body:
        raise Refusal("FG211", f"the tag {text!r} names no constructor", f"write {text}:module:symbol")
    if colon:
        if not module or not symbol:
            raise Refusal("FG211", f"{text!r}: the constructor needs both sides of its ':'", "write module:symbol")
        _refuse_odd(module, symbol, text)
        return body
    # Before the dotted form: without a second colon, a builtin of that whole name is meant first.
    if body in BUILTIN_NAMES:
        return body
    if body.endswith(".py") or "/" in body:
        raise Refusal("FG211", f"{text!r} names a file without a symbol", f"write {body}:symbol")
    module, dot, symbol = body.rpartition(".")
    if not dot or not module or not symbol:
        hint = nearest(body, sorted(BUILTIN_NAMES)) or "write module:symbol"
        raise Refusal("FG211", f"{body!r} is not a builtin and names no module", hint)
    return f"{module}:{symbol}"
