"""Do the arguments of a call fit its constructor?

Takes a callable, or signatures that were read from source, and the arguments that a config gives; gives mismatches.
Keeps true: only what the signature itself rules out is blamed on the config; a `TypeError` from inside a constructor
never is; a construction and the check before it say the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forgather.aliases import suggest

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Mismatch(NamedTuple):
    """Arguments that a signature rules out.

    Args:
        code: stable code.
        message: what was found.
        hint: what can be done.
        keyword: the keyword argument to point at; None to point at the call.
        expected: names of the parameters that exist, or that are missing.
        position: the positional argument to point at; None for none.
    """

    code: str
    message: str
    hint: str | None = None
    keyword: str | None = None
    expected: tuple[str, ...] = ()
    position: int | None = None


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
    signature = _told_by(function)
    if signature is None:
        return None
    return next(iter(mismatches((signature,), name, args, kwargs, partial=partial)), None)


def _told_by(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    # Classes compiled by PyO3 carry a text that names `self`, and parameters not always as they are taken.
    is_text = isinstance(function, type) and getattr(function, "__text_signature__", None) is not None
    return None if is_text and next(iter(signature.parameters), None) == "self" else signature


def mismatches(
    signatures: Sequence[inspect.Signature],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    partial: bool = False,
) -> list[Mismatch]:
    """Returns everything that keeps every one of these signatures from taking the arguments; nothing where one does.

    Args:
        signatures: ways to call it, at least one; the report is about the one that knows most of the keywords.
        name: how to call it in the message.
        args: positional arguments.
        kwargs: keyword arguments.
        partial: True where further arguments come later, so that none is missing yet.
    """
    if any(binds(signature, args, kwargs, partial=partial) for signature in signatures):
        return []
    nearest_one = max(signatures, key=lambda signature: sum(keyword in signature.parameters for keyword in kwargs))
    return list(_diagnose(nearest_one, name, args, kwargs, partial))


def binds(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
) -> inspect.BoundArguments | None:
    """Returns the arguments by parameter; None where the signature cannot take them."""
    try:
        return (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError:
        return None


def _diagnose(
    signature: inspect.Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], partial: bool
) -> Iterator[Mismatch]:
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    named = tuple(parameter.name for parameter in parameters if parameter.kind in _NAMED)
    positional = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
    filled = positional[: len(args)]
    meant = set[str]()
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for keyword in kwargs:
            if keyword not in named:
                hint: str | None = suggest("keyword", keyword, named) or _list(named) or "it takes none"
                meant.update(word for word in named if hint == f"did you mean {word!r}?")
                yield Mismatch("FG204", f"{name} has no parameter {keyword!r}", hint, keyword, named)
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        takes = f"at most {len(positional)}" if positional else "none"
        message = f"{name} got {len(args)} positional arguments, it takes {takes}"
        yield Mismatch("FG209", message, _list(positional), position=len(positional))
    for keyword in kwargs:
        if keyword in filled and keyword in named:
            yield Mismatch("FG209", f"{name} got {keyword!r} twice, by position and by name", "leave one out", keyword)
    missing = tuple(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (*_NAMED, inspect.Parameter.POSITIONAL_ONLY)
        and parameter.name not in (*filled, *kwargs, *meant)
    )
    if missing and not partial:
        what = "argument" if len(missing) == 1 else "arguments"
        names = ", ".join(repr(word) for word in missing)
        hint = f"{_list(named)}; a !partial may leave some to be given later" if named else None
        yield Mismatch("FG208", f"{name} lacks the {what} {names}", hint, expected=missing)


def _list(names: tuple[str, ...]) -> str | None:
    return f"its parameters: {', '.join(names[:20])}" if names else None
