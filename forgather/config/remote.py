"""Checks that code of models and data sets comes from a pinned commit on the Hub or from a trusted folder.

The input is a graph or the arguments of a call. Findings are returned for a graph; an error is raised for a call.
Invariant: a change of a branch or a tag on the Hub cannot change the code that a config runs.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgather.config.callables import names_of
from forgather.config.graph import Call, Graph, Mapped, Scalar
from forgather.config.path import Key, format_path
from forgather.config.traverse import all_nodes, entries
from forgather.errors import Diagnostic, ResolveError

_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_KERNEL = re.compile(r"[^/:\s]+/[^/:\s@]+(?:@(?P<revision>[^/:\s]+))?(?::[^/:\s]+)?")
_SWITCHES = ("trust_remote_code", "allow_all_kernels")
_REVISIONS = ("revision", "code_revision")
_SOURCES = (
    "pretrained_model_name_or_path", "path", "name", "model", "model_id", "name_or_path", "config", "tokenizer",
    "processor", "feature_extractor", "image_processor",
)  # fmt: skip
_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
# These fetch kernels whose repositories are not named in the config, so they cannot be pinned.
_UNNAMED_KERNELS = ("use_kernels", "kernel_config")
_WATCHED = frozenset((*_SWITCHES, *_KERNELS, *_UNNAMED_KERNELS))
_WATCHED_ENDINGS = tuple(_WATCHED)
_ENDINGS = tuple(f"_{name}" for name in (*_SWITCHES, _KERNELS[0]))
# Packages whose functions have such arguments, or pass them on.
_TAKERS = frozenset(("accelerate", "datasets", "forgather", "peft", "transformers"))
# The name of a class in another repository, as transformers writes it: "owner/name--module.Class".
_UPSTREAM = re.compile(r"([^\"\s]+)--[^\W\d]\w*\.\w+")
_CONFIG_FILE = "config.json"
_BOTH = "add revision: and code_revision: with the 40 digits of commits that you have looked at, or leave {} out"
_MANY = 3
_CONTAINERS = (Mapping, list, tuple)
_NUMBERS = frozenset((int, float, bool, type(None)))


def remote_code_findings(graph: Graph) -> Iterator[Diagnostic]:
    """Yields an error for each value of a graph that allows code from the Hub without a pinned commit."""
    for path, node in all_nodes(graph):
        # A latent argument overrides the keyword of the same name, as in the call.
        written = {str(entry.key): entry for entry in entries(node)}
        if not any(name.endswith(_WATCHED_ENDINGS) for name in written):
            continue
        plain = {name: _plain(entry.value) for name, entry in written.items() if _is_plain(entry.value)}
        # A revision from `!var` or `!env` may be a commit: it is checked at construction.
        unknown = [
            key for key, entry in written.items() if key.endswith(_REVISIONS) and not isinstance(entry.value, Scalar)
        ]
        for known, prefix in _parts(plain):
            name = _unpinned(known, _first(node))
            if name is not None and (name not in _SWITCHES or not unknown):
                entry = written[prefix + name]
                found, span = _error(prefix + name, known[name], name).diagnostic, entry.value.span or entry.span
                yield replace(found, span=span, path=format_path((*path, Key(prefix + name))))


def _is_plain(node: object) -> bool:
    return isinstance(node, Scalar) or (
        isinstance(node, Mapped) and all(isinstance(entry.value, Scalar) for entry in node.entries)
    )


def _plain(node: Any) -> Any:
    return node.value if isinstance(node, Scalar) else {str(entry.key): entry.value.value for entry in node.entries}


def _first(node: object) -> Any:
    first = node.args[0] if isinstance(node, Call) and node.args else None
    return first.value if isinstance(first, Scalar) else None


def refuse_remote_code(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_trusted: Callable[[str], bool]
) -> None:
    """Raises an error if a call could run code from the Hub without a pinned commit, or code in a folder without trust.

    Args:
        function: the constructor.
        args: the positional arguments.
        kwargs: the keyword arguments.
        is_trusted: a function that returns whether the user trusts a folder.

    Raises:
        ResolveError: FG341 if the arguments allow such code.
    """
    # Of the first two positional arguments only the source matters, which is read by position: binding costs more.
    given = named_arguments(function, args, kwargs) if len(args) >= _MANY else dict(kwargs)
    mappings = [value for value in containers([given, *args]) if isinstance(value, Mapping)]
    for mapping, prefix in (part for one in mappings for part in _parts(one)):
        if not _WATCHED.intersection(mapping):
            continue
        known = {**{name: given.get(name) for name in (*_REVISIONS, *_SOURCES)}, **mapping}
        objects = [*args, *(value for one in mappings for value in one.values())]
        elsewhere = [source for value in (*mappings, *objects) for source in _sources_of(value)]
        # A prefix (`encoder_`) does not tell which positional source it is for, so all of them are checked.
        elsewhere += [source for source in args if isinstance(source, str) and prefix]
        name = _unpinned(known, args[0] if args else None, elsewhere, is_trusted)
        if name is not None:
            raise _error(prefix + name, mapping.get(name), name).about(prefix + name)


def _parts(mapping: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields pairs of arguments and prefix: all with "", then those of each prefix (`encoder_`) without the prefix."""
    # First without a prefix: the arguments of the only model.
    yield mapping, ""
    names = [name for name in mapping if isinstance(name, str) and name.endswith(_ENDINGS) and name not in _WATCHED]
    endings = ((name, ending[1:]) for name in names for ending in _ENDINGS if name.endswith(ending))
    for prefix in dict.fromkeys(name.removesuffix(ending) for name, ending in endings):
        inside = {name: value for name, value in mapping.items() if isinstance(name, str) and name.startswith(prefix)}
        yield {name.removeprefix(prefix): value for name, value in inside.items()}, prefix


def may_run_remote_code(function: Any) -> bool:
    """Returns whether a function may have arguments that allow code from the Hub, or may pass on such arguments."""
    if not any(name.partition(".")[0].partition(":")[0] in _TAKERS for name in names_of(function)):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    # `**kwargs` may be passed on to a function that has such a parameter.
    return any(it.kind is it.VAR_KEYWORD or it.name in _WATCHED for it in parameters.values())


def _sources_of(value: Any) -> Iterator[str]:
    """Yields the repositories and folders whose code a transformers config, which may be a mapping, refers to."""
    facts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if not isinstance(value, Mapping):
        names = (facts.get(key) for key in ("name_or_path", "_name_or_path"))
        yield from (name for name in names if isinstance(name, str) and name)
    # The `auto_map` of a transformers config names the classes whose code comes with the model.
    classes = facts.get("auto_map")
    for it in containers([classes]) if isinstance(classes, Mapping) else ():
        for text in it.values() if isinstance(it, Mapping) else it:
            found = _UPSTREAM.fullmatch(text) if isinstance(text, str) else None
            if found is not None:
                yield found[1]


def _named_in(folder: str) -> Iterator[str]:
    """Yields the repositories and folders whose code the config files in a model's folder refer to."""
    try:
        files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_CONFIG_FILE)]
        for file in files:
            with open(file, encoding="utf-8", errors="replace") as stream:
                yield from _UPSTREAM.findall(stream.read())
    except OSError:
        # The loader cannot read the folder either, and its error is better.
        return


def named_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name; only the keywords if the function has no readable signature."""
    try:
        return {**inspect.signature(function).bind_partial(*args, **kwargs).arguments, **kwargs}
    except (TypeError, ValueError):
        return dict(kwargs)


def containers(values: Sequence[Any]) -> Iterator[Mapping[Any, Any] | Sequence[Any]]:
    """Yields each mapping, list and tuple among values and inside them, each once; lists of numbers are left out."""
    stack, seen = [value for value in values if isinstance(value, _CONTAINERS)], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            yield value
            stack += [inner for inner in value.values() if isinstance(inner, _CONTAINERS)]
        # A data set of plain lists has millions of numbers, which cannot contain such an argument.
        elif not _NUMBERS.issuperset(map(type, value)):
            yield value
            stack += [inner for inner in value if isinstance(inner, _CONTAINERS)]


def _unpinned(
    known: Mapping[str, Any],
    first: Any,
    elsewhere: Sequence[str] = (),
    is_trusted: Callable[[str], bool] = lambda folder: True,
) -> str | None:
    """Returns the name of the argument that allows code without a pinned commit; None if there is no such argument."""
    for name in _KERNELS:
        kernels = known.get(name)
        for kernel in kernels.values() if isinstance(kernels, Mapping) else (kernels,):
            found = _KERNEL.fullmatch(kernel) if isinstance(kernel, str) else None
            # `attn_implementation: owner/name` fetches a compiled kernel from the Hub and runs it.
            if found is not None and not _is_commit(found["revision"]):
                return name
    for name in _UNNAMED_KERNELS:
        if known.get(name) not in (None, False):
            return name
    switch = next((name for name in _SWITCHES if known.get(name) not in (None, False)), None)
    if switch is None:
        return None
    # It is not known which of these arguments the function reads, so each of them is checked.
    named = [
        _expanded(source) for source in (first, *map(known.get, _SOURCES)) if isinstance(source, (str, os.PathLike))
    ]
    folders = [source for source in map(_expanded, (*named, *elsewhere)) if os.path.isdir(source)]
    further = list(elsewhere)
    for folder in folders:
        # A folder may name code in another folder or on the Hub; the list grows while it is read.
        inside = [_expanded(source) for source in _named_in(folder)]
        folders += [other for other in inside if os.path.isdir(other) and other not in folders]
        further += inside
    # A local folder needs no commit, but its code runs only with the user's trust.
    if not all(map(is_trusted, folders)):
        return switch
    needed = set[str]()
    if not all(map(os.path.isdir, named)) or not (named or elsewhere):
        needed.update(_REVISIONS)
    if not all(map(os.path.isdir, map(_expanded, further))):
        # The code may be in another repository than the weights, with a revision of its own.
        needed.add("code_revision")
    given = {key: known[key] for key in _REVISIONS if known.get(key) is not None}
    # If one revision is needed, every revision that is given must be a commit, because the function may use either.
    is_pinned = needed <= set(given) and all(map(_is_commit, given.values()))
    return None if not needed or is_pinned else switch


def _expanded(source: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(source))


def _is_commit(revision: Any) -> bool:
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def _error(written: str, value: Any, name: str) -> ResolveError:
    message = f"{written} runs code from the Hub that is not pinned to a commit"
    hint = _BOTH.format(written)
    if name in _KERNELS:
        message = f"{written} {str(value)!r} runs code from the Hub that is not pinned to a commit"
        hint = "write OWNER/NAME@ and the 40 digits of a commit, or 'sdpa'"
    if name in _UNNAMED_KERNELS:
        hint = (
            f"leave {written} out, or name one kernel: attn_implementation: OWNER/NAME@ and the 40 digits of a commit"
        )
    error: ResolveError = ResolveError(message, code="FG341", hint=hint)
    return error
