"""Stand-ins for constructors and for what they return; they record what is done with them.

Takes calls and operations, gives a log. Keeps true: nothing that a config names is imported or run; what a stand-in
answers depends on the order of the calls alone, so that two equal constructions see equal answers; its own parts have
names with two underscores on both sides, which nothing that is compared can ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any

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
