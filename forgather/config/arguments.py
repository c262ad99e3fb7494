"""Do the arguments of a call fit its constructor?

Takes a callable and the arguments that a config gives it, gives a mismatch or None. Keeps true: only what
the signature itself rules out is blamed on the config; a `TypeError` from inside a constructor never is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.errors import nearest

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Arguments that a signature rules out.

    Args:
        code: stable code.
        message: what was found.
        hint: what can be done.
        keyword: the keyword argument to point at; None to point at the call.
        expected: names of the parameters that exist, or that are missing.
    """

    code: str
    message: str
    hint: str | None = None
    keyword: str | None = None
    expected: tuple[str, ...] = ()


def mismatch(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
) -> Mismatch | None:
    """Returns why `function` cannot take these arguments; None where it can, or where it does not tell.

    Args:
        function: what is to be called.
        name: how to call it in the message.
        args: positional arguments.
        kwargs: keyword arguments.
        partial: True where further arguments come later, so that none is missing yet.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError:
        return _diagnose(signature, name, args, kwargs, partial)
    return None


def _diagnose(
    signature: inspect.Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], partial: bool
) -> Mismatch | None:
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    named = tuple(parameter.name for parameter in parameters if parameter.kind in _NAMED)
    positional = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for keyword in kwargs:
            if keyword not in named:
                hint = nearest(keyword, named) or ("it takes none" if not named else None)
                return Mismatch("FG204", f"{name} has no parameter {keyword!r}", hint, keyword, named)
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        takes = f"at most {len(positional)}" if positional else "none"
        return Mismatch("FG209", f"{name} got {len(args)} positional arguments, it takes {takes}", _list(positional))
    filled = positional[: len(args)]
    for keyword in kwargs:
        if keyword in filled and keyword in named:
            return Mismatch("FG209", f"{name} got {keyword!r} twice, by position and by name", "leave one out", keyword)
    missing = tuple(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (*_NAMED, inspect.Parameter.POSITIONAL_ONLY)
        and parameter.name not in filled
        and parameter.name not in kwargs
    )
    if missing and not partial:
        what = "argument" if len(missing) == 1 else "arguments"
        names = ", ".join(repr(word) for word in missing)
        return Mismatch("FG208", f"{name} lacks the {what} {names}", _list(tuple(named)), expected=missing)
    return None


def _list(names: tuple[str, ...]) -> str | None:
    return f"its parameters: {', '.join(names[:20])}" if names else None
