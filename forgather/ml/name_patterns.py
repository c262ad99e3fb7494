"""Patterns for names of parameters, and the error about a pattern that matches none.

A pattern names whole parts of a dotted name, anywhere in it: `layers.1` matches `model.layers.1.mlp.up_proj.weight`,
and not `model.layers.10`. `*` stands for any characters, also dots; `?` for one character, `[0-3]` for one of several;
`|` separates alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache

from torch import nn

from forgather.errors import TrainingError

_SYNTAX = "a pattern names whole parts, as embed_tokens, layers.0 or layers.[0-3].*; it is no regular expression"


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern matches the name of a parameter.

    Args:
        pattern: the pattern.
        name: the dotted name.

    Example:
        >>> [matches("layers.1", name) for name in ("model.layers.1.weight", "model.layers.10.weight")]
        [True, False]
        >>> [matches("layers.[0-3].*|embed*", name) for name in ("layers.3.weight", "embed_tokens.weight", "head.bias")]
        [True, True, False]
    """
    return _compiled(pattern).search(name) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    alternatives = "|".join(_translated(part.strip()) for part in pattern.split("|"))
    return re.compile(rf"(?:^|\.)(?:{alternatives})(?:\.|$)")


def _translated(glob: str) -> str:
    """Returns a regular expression for one alternative of a pattern."""
    if not glob:
        return r"(?!)"  # an empty alternative would match every name
    pieces = re.findall(r"\[[^\]]+\]|.", glob, re.DOTALL)
    known = {"*": ".*", "?": r"[^.]"}
    return "".join(known.get(one) or (_characters(one) if len(one) > 1 else re.escape(one)) for one in pieces)


def _characters(piece: str) -> str:
    inside = piece[1:-1].replace("\\", r"\\")
    return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"


def matched_names(pattern: str, names: Iterable[str], tied: Mapping[str, str], argument: str) -> list[str]:
    """Returns the names that a pattern matches, of which there is at least one.

    Args:
        pattern: the pattern.
        names: the names of the parameters.
        tied: the first name of each further name of a tied parameter.
        argument: the setting that the pattern is in, which the error points at.

    Raises:
        TrainingError: FG867 if the pattern matches no name, or only a further name of a tied parameter.
    """
    names = list(names)
    found = [name for name in names if matches(pattern, name)]
    if found:
        return found
    setting = argument.partition(".")[0]
    other = next((name for name in tied if matches(pattern, name)), None)
    if other is not None:
        message = f"{setting}: the pattern {pattern!r} matches only {other!r}, which is tied to {tied[other]!r}"
        raise TrainingError(message, code="FG867", hint=f"write the pattern for {tied[other]!r}").about(
            f"args.{argument}"
        )
    raise TrainingError(
        f"{setting}: the pattern {pattern!r} matches no parameter of the model",
        code="FG867",
        hint=f"{_near(pattern, names)}; {_SYNTAX}",
    ).about(f"args.{argument}")


def _near(pattern: str, names: list[str]) -> str:
    # Compared with the parts of names, since a pattern seldom is a whole name.
    parts = {".".join(pieces[a:b]): name for name in names for pieces in [name.split(".")]
             for a in range(len(pieces)) for b in range(a + 1, min(a + 4, len(pieces) + 1))}  # fmt: skip
    plain = re.sub(r"[*?\\^$()]|\.$", "", pattern.split("|")[0]).strip(".")
    close = [parts[part] for part in get_close_matches(plain, parts, n=3, cutoff=0.5)]
    shown = list(dict.fromkeys(close)) or names[:3]
    return ("near names are " if close else "names are as ") + ", ".join(map(repr, shown))


def parameter_names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Returns the parameters of a model by their first names, and the first name of each further name.

    Args:
        model: the model.
    """
    first: dict[int, str] = {}
    found: dict[str, nn.Parameter] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) == name:
            found[name] = parameter
        else:
            tied[name] = first[id(parameter)]
    return found, tied
