"""Stand-ins for constructors and for what they return, which record what is done with them; comparison of two records.

Takes calls and operations, gives a log; takes two logs and the values of two constructions, raises `Unequal` at the
first difference. Keeps true: nothing that a config names is imported or run; what a stand-in answers depends on the
order of the calls alone, so that two equal constructions see equal answers; its own parts have names with two
underscores on both sides, which nothing that is compared can ask for; one object here is one object there; callables
are equal when they do the same, twice, and again with arguments of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import FunctionType, MappingProxyType
from typing import Any

from forgather.config.partials import PartialObject

_ITEMS = 2
_FIRST_NUMBER = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that was called.

    Args:
        what: the constructor, or the operation on an earlier result.
        args: positional arguments.
        kwargs: keyword arguments.
        result: what it gave.
        is_call: True for a constructor.
    """

    what: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_call: bool


@dataclass(slots=True)
class Log:
    """What one construction did, in order.

    Args:
        truth: how comparisons of stand-ins come out.
    """

    truth: bool = True
    events: list[Event] = field(default_factory=list)

    def record(self, what: str, *args: Any, is_call: bool = False, **kwargs: Any) -> Recorded:
        """Adds an event and returns its new result."""
        return self.call(what, args, kwargs, is_call=is_call)

    def call(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_call: bool = True) -> Recorded:
        """Adds an event and returns its new result."""
        result = Recorded(self, len(self.events))
        self.events.append(Event(what, args, kwargs, result, is_call))
        return result

    def count(self) -> int:
        """Returns how many constructors were called."""
        return sum(event.is_call for event in self.events)


class Recorded:
    """What a constructor returned. It stands anything that a config does with a result."""

    def __init__(self, log: Log, serial: int) -> None:
        self.__dict__.update(__log__=log, __serial__=serial)

    def __repr__(self) -> str:
        return f"<result {self.__serial__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.__log__.record(f".{name}", self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns a result of its own."""
        return self.__log__.call("()", (self, *args), kwargs, is_call=False)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.__log__.record(f"item {position}", self) for position in range(_ITEMS)])

    def __bool__(self) -> bool:
        # Not recorded: how often a value is asked for its truth is up to the compiler.
        return bool(self.__log__.truth)

    def __fspath__(self) -> str:
        return f"/result/{self.__serial__}"

    def __len__(self) -> int:
        return _number(self, "len")

    def __int__(self) -> int:
        return _number(self, "int")

    def __float__(self) -> float:
        return float(_number(self, "float"))

    def __round__(self, *digits: Any) -> Any:
        return self.__log__.record("round", self, *digits)

    __hash__ = object.__hash__


def _number(result: Recorded, what: str) -> int:
    # Numbered by kind, so that one difference elsewhere does not make all numbers differ.
    number: int = _FIRST_NUMBER + sum(event.what == what for event in result.__log__.events)
    result.__log__.record(what, result)
    return number


def _operation(what: str, *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Recorded, *others: Any) -> Any:
        parts = (*others, self) if swapped else (self, *others)
        return self.__log__.record(what, *parts)

    return method


def _comparison(what: str) -> Callable[[Recorded, Any], bool]:
    def method(self: Recorded, other: Any) -> bool:
        self.__log__.record(what, self, other)
        return bool(self.__log__.truth)

    return method


for _word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Recorded, f"__{_word}__", _operation(_word))
    setattr(Recorded, f"__r{_word}__", _operation(_word, swapped=True))
for _word in ("getitem", "neg", "pos", "abs"):
    setattr(Recorded, f"__{_word}__", _operation(_word))
for _word in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Recorded, f"__{_word}__", _comparison(_word))
# Arithmetic of the language is on real numbers, which a result may be.
Real.register(Recorded)


class StandIn:
    """Stands in for a module, or for anything in one: its parts are stand-ins, a call of it is recorded.

    Args:
        log: where calls go.
        dotted: its whole name.
        real: parts that are not stood in for, by whole name.
    """

    def __init__(self, log: Log, dotted: str, real: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.__dict__.update(__log__=log, __dotted__=dotted, __real__=real)

    def __repr__(self) -> str:
        return f"<{self.__dotted__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        dotted = f"{self.__dotted__}.{name}"
        return self.__real__[dotted] if dotted in self.__real__ else StandIn(self.__log__, dotted, self.__real__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns a new result."""
        return self.__log__.call(self.__dotted__, args, kwargs)


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
