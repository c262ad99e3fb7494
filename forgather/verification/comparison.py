"""Two logs, and the values that two constructions gave, compared as graphs.

Takes values side by side, raises `Unequal` at the first difference. Keeps true: one object here is one object there;
callables are equal when they do the same, twice, and again with arguments of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from forgather.config.partials import PartialObject
from forgather.verification.recording import Event, Log, Recorded, StandIn

_CALLABLE = (PartialObject, functools.partial, FunctionType)
_MAX_PROBES = 10_000
_OVERRIDDEN = 6


class Unequal(Exception):
    """A difference.

    Args:
        path: where, as a path of the graph.
        expected: what the config gives.
        found: what the code gives.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(f"{path}: expected {expected}, found {found}")
        self.path, self.expected, self.found = path, expected, found


class Comparison:
    """One comparison of what a config did with what code did.

    Args:
        ours: the config's log.
        theirs: the code's log.
    """

    def __init__(self, ours: Log, theirs: Log) -> None:
        self._ours, self._theirs = ours, theirs
        self._forth: dict[int, Any] = {}
        self._back: dict[int, Any] = {}
        self._callables: list[tuple[str, Any, Any]] = []
        self._kept: list[Any] = []
        self._called: dict[int, Event] = {}
        self._probed = 0

    def values(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Compares targets, then what callables among them do, then the order of all calls."""
        for name, value in ours.items():
            self._same(value, theirs[name], name)
        self._probe_all()
        self._order()

    def _same(self, ours: Any, theirs: Any, path: str) -> None:
        stack = [(ours, theirs, path)]
        while stack:
            a, b, where = stack.pop()
            stack += list(self._parts(a, b, where))[::-1]

    def _parts(self, a: Any, b: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
        """Compares two values by themselves, and yields what is inside them."""
        if isinstance(a, _CALLABLE) and isinstance(b, _CALLABLE):
            if self._is_new(a, b, path):
                self._callables.append((path, a, b))
                # What a library may ask a function for that stands for a partial.
                asked = getattr(b, "keywords", {}) if isinstance(b, FunctionType) else {}
                for word, value in asked.items():
                    yield getattr(a, "keywords", {}).get(word), value, f"{path}.keywords[{word!r}]"
            return
        if type(a) is not type(b):
            raise Unequal(path, self._shown(a), self._shown(b))
        if isinstance(a, Recorded):
            if self._is_new(a, b, path):
                yield from self._event_parts(self._event(a, self._ours), self._event(b, self._theirs), path)
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                raise Unequal(path, f"{len(a)} items", f"{len(b)} items")
            # Equal constant tuples may be one object in compiled code.
            if isinstance(a, tuple) or self._is_new(a, b, path):
                yield from ((x, y, f"{path}[{at}]") for at, (x, y) in enumerate(zip(a, b, strict=True)))
        elif isinstance(a, dict):
            if self._is_new(a, b, path):
                yield from self._mapping_parts(a, b, path)
        elif isinstance(a, (set, frozenset)):
            if len(a) != len(b):
                raise Unequal(path, f"{len(a)} items", f"{len(b)} items")
        elif isinstance(a, (str, int, float, bool, bytes, type(None), StandIn)):
            if repr(a) != repr(b):
                raise Unequal(path, self._shown(a), self._shown(b))
        else:
            self._is_new(a, b, path)

    def _event_parts(self, a: Event, b: Event, path: str) -> Iterator[tuple[Any, Any, str]]:
        if a.what != b.what:
            raise Unequal(path, f"a call of {a.what}", f"a call of {b.what}")
        if len(a.args) != len(b.args):
            found = f"{len(b.args)} positional arguments"
            raise Unequal(path, f"{len(a.args)} positional arguments of {a.what}", found)
        for at, (x, y) in enumerate(zip(a.args, b.args, strict=True)):
            yield x, y, f"{path}[{at}]" if a.is_call else path
        yield from self._mapping_parts(a.kwargs, b.kwargs, path)

    def _mapping_parts(self, a: dict[Any, Any], b: dict[Any, Any], path: str) -> Iterator[tuple[Any, Any, str]]:
        if len(a) != len(b):
            raise Unequal(path, f"the keys {_keys(a)}", f"the keys {_keys(b)}")
        for (key, value), (other, found) in zip(a.items(), b.items(), strict=True):
            if isinstance(key, str) and key != other:
                raise Unequal(path, f"the keys {_keys(a)}", f"the keys {_keys(b)}")
            if not isinstance(key, str):
                yield key, other, f"{path}[key]"
            yield value, found, f"{path}.{key}"

    def _is_new(self, a: Any, b: Any, path: str) -> bool:
        """Returns whether two objects meet for the first time; raises where one has met another before."""
        self._kept += [a, b]
        met = self._forth.setdefault(id(a), b)
        other = self._back.setdefault(id(b), a)
        if met is not b:
            raise Unequal(path, "an object that is shared", "another object")
        if other is not a:
            raise Unequal(path, "an object of its own", "one that is shared")
        key = id(a)
        new = key not in self._called
        self._called.setdefault(key, _NOTHING)
        return new

    def _event(self, value: Recorded, log: Log) -> Event:
        return log.events[int(value.__serial__)]

    def _shown(self, value: Any) -> str:
        if isinstance(value, Recorded):
            return f"a call of {value.__log__.events[value.__serial__].what}"
        text = repr(value)
        return text if len(text) <= 80 else text[:77] + "..."

    # what callables do

    def _probe_all(self) -> None:
        while self._callables and self._probed < _MAX_PROBES:
            path, a, b = self._callables.pop(0)
            self._probed += 1
            for args, kwargs in self._ways(a):
                mine, mistaken = _outcome(a, args(self._ours), kwargs(self._ours))
                other, failed = _outcome(b, args(self._theirs), kwargs(self._theirs))
                if mistaken != failed:
                    raise Unequal(f"{path}()", mistaken or "a result", failed or "a result")
                self._same(mine, other, f"{path}()")

    def _ways(self, function: Any) -> list[tuple[Callable[[Log], list[Any]], Callable[[Log], dict[str, Any]]]]:
        """Ways to call a partial: bare, twice, with further arguments, and with each keyword given anew."""
        keywords = list(getattr(function, "keywords", {}))[:_OVERRIDDEN]

        def nothing(log: Log) -> list[Any]:
            return []

        def bare(log: Log) -> dict[str, Any]:
            return {}

        def marked(log: Log) -> list[Any]:
            return [log.record("an argument")]

        def giving(words: list[str]) -> Callable[[Log], dict[str, Any]]:
            return lambda log: {word: log.record(f"the keyword {word}") for word in words}

        ways = [(nothing, bare), (nothing, bare), (marked, giving(["an_extra_keyword"]))]
        return [
            *ways,
            *((nothing, giving([word])) for word in keywords),
            *([(nothing, giving(keywords))] * (len(keywords) > 1)),
        ]

    # the order of calls

    def _order(self) -> None:
        ours, theirs = self._ours.events, self._theirs.events
        for at, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
            if a.what != b.what:
                raise Unequal(f"step {at}", a.what, b.what)
            self._same(a.result, b.result, f"step {at}, {a.what}")
        if len(ours) != len(theirs):
            longer = ours if len(ours) > len(theirs) else theirs
            extra = longer[min(len(ours), len(theirs))].what
            where = f"step {min(len(ours), len(theirs)) + 1}"
            raise Unequal(where, *((extra, "nothing more") if longer is ours else ("nothing more", extra)))


_NOTHING = Event("", (), {}, None, False)


def _outcome(function: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - what a call raises is part of what it does
        return None, type(error).__name__


def _keys(mapping: dict[Any, Any]) -> str:
    return ", ".join(str(key) for key in mapping) or "none"
