"""Code that comes with a model or a data set from the Hub: only of a pinned commit, or of a trusted folder.

Takes a graph, or the arguments of a call, gives findings or an error. Keeps true: whoever can change a branch or a tag
on the Hub cannot change what a config runs.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgather.config.graph import Call, Graph, Mapped, Scalar
from forgather.config.path import Key, format_path
from forgather.config.traverse import roots, walk
from forgather.errors import Diagnostic, ResolveError

_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_KERNEL = re.compile(r"[^/:\s]+/[^/:\s@]+(?:@(?P<revision>[^/:\s]+))?(?::[^/:\s]+)?")
_SWITCHES = ("trust_remote_code", "allow_all_kernels")
_REVISIONS = ("revision", "code_revision")
_SOURCES = (
    "pretrained_model_name_or_path", "path", "name", "model", "model_id", "name_or_path", "config", "tokenizer",
    "processor", "feature_extractor", "image_processor",
)  # fmt: skip
_KERNELS = "attn_implementation"
_HINT = "add revision: with the 40 digits of a commit that you have looked at, or leave {} out"
_MANY = 3


def judge_remote_code(graph: Graph) -> Iterator[Diagnostic]:
    """Yields an error for each value of a graph that asks for code of the Hub that is not pinned."""
    for path, node in walk(roots(graph)):
        entries = node.kwargs if isinstance(node, Call) else node.entries if isinstance(node, Mapped) else ()
        written = {str(entry.key): entry for entry in entries}
        plain = {name: entry.value.value for name, entry in written.items() if isinstance(entry.value, Scalar)}
        name = _unpinned(plain, _first(node))
        # A revision that construction tells may be a commit: construction looks.
        unknown = [entry for key, entry in written.items() if key in _REVISIONS and not isinstance(entry.value, Scalar)]
        if name is not None and (name == _KERNELS or not unknown):
            found, span = _error(name, plain[name]).diagnostic, written[name].value.span or written[name].span
            yield replace(found, span=span, path=format_path((*path, Key(name))))


def _first(node: object) -> Any:
    first = node.args[0] if isinstance(node, Call) and node.args else None
    return first.value if isinstance(first, Scalar) else None


def refuse_remote_code(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_trusted: Callable[[str], bool]
) -> None:
    """Raises where a call is given leave to run code of the Hub that is not pinned, or of a folder not trusted.

    Raises:
        ResolveError: FG341.
    """
    # What matters here is nowhere among the first arguments but for the source, which is looked at by its place.
    given = named_arguments(function, args, kwargs) if len(args) >= _MANY else dict(kwargs)
    for mapping in _mappings([given, *args]):
        if not any(name in mapping for name in (*_SWITCHES, _KERNELS)):
            continue
        told = {**{name: given.get(name) for name in (*_REVISIONS, *_SOURCES)}, **mapping}
        name = _unpinned(told, args[0] if args else None, is_trusted)
        if name is not None:
            raise _error(name, mapping.get(name)).about(name)


def named_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name; those given by position only where the function says its parameters."""
    try:
        return {**inspect.signature(function).bind_partial(*args, **kwargs).arguments, **kwargs}
    except (TypeError, ValueError):
        return dict(kwargs)


def _mappings(values: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the mappings among plain containers, each once."""
    stack, seen = list(values), set[int]()
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            yield value
            stack += value.values()
        elif isinstance(value, (list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            stack += value


def _unpinned(
    told: Mapping[str, Any], first: Any, is_trusted: Callable[[str], bool] = lambda folder: True
) -> str | None:
    """Returns the name of the argument that gives the leave; None where all is pinned."""
    kernel = told.get(_KERNELS)
    found = _KERNEL.fullmatch(kernel) if isinstance(kernel, str) else None
    if found is not None and not _is_commit(found["revision"]):
        return _KERNELS
    name = next((name for name in _SWITCHES if told.get(name) not in (None, False)), None)
    if name is None:
        return None
    # Which of them the function reads is its own business: a folder counts, whatever another name says.
    sources = [source for source in (first, *map(told.get, _SOURCES)) if isinstance(source, (str, os.PathLike))]
    folders = [folder for folder in map(_expanded, sources) if os.path.isdir(folder)]
    if not all(map(is_trusted, folders)):
        return name
    if folders and len(folders) == len(sources):
        return None
    revisions = [told[key] for key in _REVISIONS if told.get(key) is not None]
    is_pinned = told.get("revision") is not None and all(map(_is_commit, revisions))
    return None if is_pinned else name


def _expanded(source: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(source))


def _is_commit(revision: Any) -> bool:
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def _error(name: str, value: Any) -> ResolveError:
    message = f"{name} lets code of the Hub run that is not pinned to a commit"
    hint = _HINT.format(name)
    if name == _KERNELS:
        message = f"{name} {str(value)!r} runs code of the Hub that is not pinned to a commit"
        hint = "write OWNER/NAME@ and the 40 digits of a commit, or 'sdpa'"
    error: ResolveError = ResolveError(message, code="FG341", hint=hint)
    return error
