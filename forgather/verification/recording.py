"""Stand-ins that record the operations on them, and the comparison of two such records.

A `Log` records the calls and operations of one construction as events. A `Comparison` raises `Unequal` at the first
difference between the logs or results of two constructions. The result of a stand-in depends only on the order of the
calls, so that equal constructions get equal results. An object that one construction uses at several places has to be
one object in the other, too. Two callables are equal if calls of them have the same effects. The attributes of a
stand-in have special names (`__log__`), which neither the config nor the generated code can read.
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
    """A call of a constructor, or an operation on a stand-in.

    Args:
        what: the name of the constructor or operation.
        args: the positional arguments.
        kwargs: the keyword arguments.
        result: the stand-in that the call or operation returned.
        is_call: whether the event is a call of a constructor.
    """

    what: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_call: bool


@dataclass(slots=True)
class Log:
    """The events of one construction, in order.

    Args:
        truth: the result of every comparison of stand-ins.
        events: the events that have been recorded.
    """

    truth: bool = True
    events: list[Event] = field(default_factory=list)

    def record(self, what: str, *args: Any, is_call: bool = False, **kwargs: Any) -> Recorded:
        """Adds an event and returns its result, a new stand-in.

        Args:
            what: the name of the constructor or operation.
            args: the positional arguments.
            is_call: whether the event is a call of a constructor.
            kwargs: the keyword arguments.
        """
        return self.call(what, args, kwargs, is_call=is_call)

    def call(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_call: bool = True) -> Recorded:
        """Adds an event and returns its result, a new stand-in.

        Args:
            what: the name of the constructor or operation.
            args: the positional arguments.
            kwargs: the keyword arguments; unlike in `record`, they may have any names.
            is_call: whether the event is a call of a constructor.
        """
        result = Recorded(self, len(self.events))
        self.events.append(Event(what, args, kwargs, result, is_call))
        return result

    def count(self) -> int:
        """Returns the number of calls of constructors, without operations."""
        return sum(event.is_call for event in self.events)


class Recorded:
    """The stand-in for the result of a call, which supports every operation that a config can apply to a result.

    Args:
        log: the log of the calls.
        serial: the position of the result's event in the log.
    """

    def __init__(self, log: Log, serial: int) -> None:
        # Special names, which `__getattr__` refuses: a config cannot read them.
        self.__dict__.update(__log__=log, __serial__=serial)

    def __repr__(self) -> str:
        return f"<result {self.__serial__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.__log__.record(f".{name}", self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Records a call of this object, and returns a new stand-in as the result of the call."""
        return self.__log__.call("()", (self, *args), kwargs, is_call=False)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.__log__.record(f"item {position}", self) for position in range(_ITEMS)])

    def __bool__(self) -> bool:
        # Not recorded: how often Python evaluates the truth of a value depends on the compiled code.
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

    # A class that defines `__eq__` is not hashable by default.
    __hash__ = object.__hash__


def _number(result: Recorded, what: str) -> int:
    # Counted for each kind of operation, so that one difference does not change all later numbers.
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
# `!calc` accepts only real numbers as operands, and the result of a call may be one.
Real.register(Recorded)


class StandIn:
    """A stand-in for a module or an object in a module; its attributes are stand-ins, and calls of it are recorded.

    Args:
        log: the log of the calls.
        dotted: the full name of the module or object.
        real: the real objects that are used instead of stand-ins, by full name.
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
        """Records a call of the object, and returns a new stand-in as the result of the call."""
        return self.__log__.call(self.__dotted__, args, kwargs)


_CALLABLE = (PartialObject, functools.partial, FunctionType)
_MAX_PROBES = 10_000
_OVERRIDDEN = 6


class Unequal(Exception):
    """A difference between a config and the code that was generated from it.

    Args:
        path: the path in the graph at which the two differ.
        expected: the description of the value or call of the config.
        found: the description of the value or call of the generated code.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(f"{path}: expected {expected}, found {found}")
        self.path, self.expected, self.found = path, expected, found


class Comparison:
    """Compares the construction of a config with the construction of its generated code.

    Args:
        ours: the log of the config.
        theirs: the log of the generated code.
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
        """Compares the targets, then the effects of the callables among them, then the order of all calls.

        Args:
            ours: the targets that the config builds, by name.
            theirs: the targets that the generated code builds, by name.

        Raises:
            Unequal: at the first difference.
        """
        for name, value in ours.items():
            self._same(value, theirs[name], name)
        self._probe_all()
        self._order()

    def _same(self, ours: Any, theirs: Any, path: str) -> None:
        stack = [(ours, theirs, path)]
        while stack:
            a, b, where = stack.pop()
            stack += list(self._inner_pairs(a, b, where))[::-1]

    def _inner_pairs(self, a: Any, b: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
        """Compares two values, but not their members, and yields each pair of corresponding members with its path."""
        if isinstance(a, _CALLABLE) and isinstance(b, _CALLABLE):
            if self._is_new(a, b, path):
                self._callables.append((path, a, b))
                # Generated functions have the attribute `keywords` of `functools.partial`, which libraries read.
                asked = getattr(b, "keywords", {}) if isinstance(b, FunctionType) else {}
                for word, value in asked.items():
                    yield getattr(a, "keywords", {}).get(word), value, f"{path}.keywords[{word!r}]"
            return
        # `1 == True` and `1 == 1.0`, so types are compared first.
        if type(a) is not type(b):
            raise Unequal(path, self._shown(a), self._shown(b))
        if isinstance(a, Recorded):
            if self._is_new(a, b, path):
                yield from self._event_parts(self._event(a, self._ours), self._event(b, self._theirs), path)
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                raise Unequal(path, f"{len(a)} items", f"{len(b)} items")
            # Python may store equal constant tuples as one object.
            if isinstance(a, tuple) or self._is_new(a, b, path):
                yield from ((x, y, f"{path}[{at}]") for at, (x, y) in enumerate(zip(a, b, strict=True)))
        elif isinstance(a, dict):
            if self._is_new(a, b, path):
                yield from self._mapping_parts(a, b, path)
        elif isinstance(a, (set, frozenset)):
            if len(a) != len(b):
                raise Unequal(path, f"{len(a)} items", f"{len(b)} items")
        elif isinstance(a, (str, int, float, bool, bytes, type(None), StandIn)):
            # By `repr`, because NaN differs from itself and `0.0 == -0.0`.
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
        """Records that two objects correspond to each other, and returns whether they were not recorded before.

        Raises:
            Unequal: if one of the two objects was recorded with another object.
        """
        # Kept, because an id can be reused after its object is freed.
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

    # the effects of callables

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
        """Returns the calls to compare: two without arguments, one with more, and some that replace keywords."""
        keywords = list(getattr(function, "keywords", {}))[:_OVERRIDDEN]

        def nothing(log: Log) -> list[Any]:
            return []

        def bare(log: Log) -> dict[str, Any]:
            return {}

        def marked(log: Log) -> list[Any]:
            return [log.record("an argument")]

        def giving(words: list[str]) -> Callable[[Log], dict[str, Any]]:
            return lambda log: {word: log.record(f"the keyword {word}") for word in words}

        # Twice: the second call shows whether a callable makes a new object each time, or returns the first one again.
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
