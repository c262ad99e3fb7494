"""Checks what a template may call, and estimates the cost of a call before the call is made.

The inputs are a callable and its arguments. An error is raised if the call is not allowed or if its result would be too
large. Invariants: methods of plain values are allowed by name; every method whose result can be larger than its input
has an estimate of the size of the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from forgather.config._jinja import origins
from forgather.config._jinja.budget import MAX_COUNT, Account
from forgather.config._jinja.origins import Traced
from forgather.errors import BudgetError, RenderError

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.", re.S)
_NUMBER = re.compile(r"\d+")
# `str.splitlines` splits at all of these, so counting "\n" alone would give too small an estimate.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_FUNCTION_WORK = 4
STRIPTAGS_CHARS = 100_000

_STR = frozenset(
    """capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split
    splitlines startswith strip swapcase title translate upper zfill""".split()
)
# A list of what is allowed, because a new version of Python may add methods of unknown cost.
_METHODS: dict[type, frozenset[str]] = {
    str: _STR,
    Traced: _STR,
    Markup: _STR | {"striptags", "unescape"},
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    set: frozenset({"isdisjoint", "issubset", "issuperset", "union", "intersection", "difference", "copy"}),
    frozenset: frozenset({"isdisjoint", "issubset", "issuperset", "union", "intersection", "difference", "copy"}),
    range: frozenset({"count", "index"}),
    int: frozenset({"bit_length", "is_integer"}),
    bool: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
    datetime: frozenset({"date", "isoformat", "strftime", "time", "timestamp", "weekday", "isoweekday", "replace"}),
    date: frozenset({"isoformat", "strftime", "weekday", "isoweekday", "replace"}),
    time: frozenset({"isoformat", "strftime"}),
    timedelta: frozenset({"total_seconds"}),
}
_CLASSES = (dict, Cycler, Joiner, Namespace)
_OWNERS = (LoopContext, Cycler, Joiner, Mapping)


def check_call(account: Account, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises an error if a template may not make a call, and counts the cost of the call against the budget.

    Args:
        account: the budget account of the render.
        called: the object that the template calls.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        RenderError: FG117 if a template may not call the object.
        BudgetError: FG120 if the templates have taken too many turns; FG122 if the result would be too large.
    """
    if isinstance(called, Macro | Undefined | Joiner):
        return
    if isinstance(called, FunctionType):
        # Python's path functions loop over the characters of a text in Python code.
        account.charge(_FUNCTION_WORK * sum(len(arg) for arg in args if isinstance(arg, str) and len(arg) > 1024))
        return
    if isinstance(called, type) and issubclass(called, _CLASSES):
        return
    if isinstance(called, BuiltinMethodType) or (
        isinstance(called, MethodType) and isinstance(called.__self__, str | type)
    ):
        owner = called.__self__
        allowed = _METHODS.get(str if owner is str else type(owner), frozenset())
        if called.__name__ in allowed or _is_plain_function(called):
            estimate = _ESTIMATES.get(called.__name__)
            if isinstance(owner, str):
                account.weigh(owner)
                if estimate is not None:
                    estimate(account, owner, *args, **kwargs)
            elif called.__name__ in ("strftime", "isoformat"):
                account.reserve(64 * sum(len(arg) for arg in args if isinstance(arg, str)), f"'{called.__name__}'")
            elif hasattr(owner, "__len__"):
                # Methods of containers are at worst linear in their size (`list.index`, `set.union`).
                account.turn(len(owner))
            return
    elif isinstance(called, MethodType):
        # A private method is refused even if a variable passes it in directly, which the sandbox does not check.
        if isinstance(called.__self__, _OWNERS) or not called.__name__.startswith("_"):
            return
    elif callable(called) and not isinstance(called, type):
        return
    name = getattr(called, "__name__", type(called).__name__)
    owner_name = type(getattr(called, "__self__", called)).__name__
    what = f"a value of type {name}" if name == owner_name else f"'{name}' of {owner_name}"
    raise RenderError(
        f"{what} cannot be called from a template",
        code="FG117",
        hint="templates see plain values; compute the value in Python and pass it as a variable",
    )


def _is_plain_function(called: Any) -> bool:
    """Returns whether a builtin function belongs to a module; such a function was passed in as a variable."""
    return type(called.__self__) is ModuleType


def traced_result(called: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Returns the result of a call; texts that a method of a `Traced` string made get origins.

    The results of `strip` and `replace` keep the origins of the string where they can be followed. The origin of any
    other text becomes the line that prints it.

    Args:
        called: the function or method that was called.
        args: the positional arguments of the call.
        result: the value that the call returned.
    """
    owner = getattr(called, "__self__", None)
    if type(owner) is not Traced or type(called) is not BuiltinMethodType:
        return result
    if type(result) is list:
        # `split` and its like: the parts are texts of the template, but their lines are not known exactly.
        return [origins.lost(item) if type(item) is str else item for item in result]
    if not isinstance(result, str) or type(result) is Traced:
        return result
    followed: Traced | None = None
    if called.__name__ == "strip":
        followed = origins.follow_trim(owner, result, *args)
    elif called.__name__ == "replace":
        followed = origins.follow_replace(owner, result, *args)
    return followed if followed is not None else origins.lost(result)


# -- estimates of string methods


def _pad(account: Account, text: str, width: Any = 0, *rest: Any) -> None:
    account.reserve(width if isinstance(width, int) else 0, "the padded text")


def _expandtabs(account: Account, text: str, tabsize: Any = 8) -> None:
    account.reserve(len(text) + text.count("\t") * (tabsize if isinstance(tabsize, int) else 0), "'expandtabs'")


def replaced_size(account: Account, text: str, old: Any, new: Any, count: Any = -1) -> None:
    """Counts the size of `text.replace(old, new, count)` against the rendering budget, before the call.

    Args:
        account: the budget account of the render.
        text: the text in which `old` is replaced.
        old: the text to replace.
        new: the replacement.
        count: the largest number of replacements; a negative number means all.

    Raises:
        BudgetError: FG122 if the result would be too large.
    """
    # Jinja's filter converts both to text.
    old, new = str(old), str(new)
    found = text.count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    account.reserve(len(text) + found * max(len(new) - len(old), 0), "'replace'")


def _join(account: Account, text: str, values: Any = ()) -> None:
    if not hasattr(values, "__len__"):
        # The size of an iterator cannot be checked without consuming it; the filter `join` charges item by item.
        raise RenderError("'join' needs a list", code="FG117", hint="add `| list`, or use the filter `join`")
    account.turn(len(values))
    account.reserve(account.size(values) + len(text) * len(values), "'join'")


def _translate(account: Account, text: str, table: Any = None) -> None:
    # Each character may become the longest text of the table.
    longest = max((len(item) for item in table.values() if isinstance(item, str)), default=1) if table else 1
    account.reserve(len(text) * max(longest, 1), "'translate'")


def _split(account: Account, text: str, sep: Any = None, *rest: Any, **named: Any) -> None:
    sep = named.get("sep", sep)
    account.items(text.count(sep) if isinstance(sep, str) and sep else len(text) // 2, "the list of parts")


def _splitlines(account: Account, text: str, *keep: Any) -> None:
    account.items(sum(map(text.count, _LINE_ENDS)), "the list of lines")


def _striptags(account: Account, text: str) -> None:
    if len(text) > STRIPTAGS_CHARS:
        account.reserve(float("inf"), "'striptags'")


_ESTIMATES: dict[str, Callable[..., None]] = {
    "split": _split,
    "rsplit": _split,
    "splitlines": _splitlines,
    "striptags": _striptags,
    "center": _pad,
    "ljust": _pad,
    "rjust": _pad,
    "zfill": _pad,
    "expandtabs": _expandtabs,
    "replace": replaced_size,
    "join": _join,
    "translate": _translate,
}


# -- formatting


def check_percent(account: Account, text: str, values: Any) -> None:
    """Counts the size of `text % values` against the rendering budget, before the text is formatted.

    Args:
        account: the budget account of the render.
        text: the text with format fields.
        values: the right operand of `%`.

    Raises:
        BudgetError: FG122 if the result would be too large.
    """
    size, fields, stars = len(text), 0, False
    for field in _PERCENT.finditer(text):
        fields += 1
        for width in field.groups():
            if width == "*":
                stars = True
            elif width:
                size += _width(width)
    weight = account.size(values)
    if stars:
        numbers = values if isinstance(values, tuple) else (values,)
        size += sum(abs(number) for number in numbers if isinstance(number, int))
    account.reserve(size + fields * weight, "'%'")


def _width(digits: str) -> int:
    # int() of thousands of digits is slow, and fails above 4,300.
    if len(digits) > 9:
        raise BudgetError(f"a field is {digits[:12]}... characters wide", code="FG122", hint="write a smaller width")
    return int(digits)


class _CheckedFormatter(SandboxedFormatter):
    """A formatter for `str.format` that counts the width of a field against the budget before writing the field."""

    def __init__(self, environment: SandboxedEnvironment, account: Account) -> None:
        super().__init__(environment)
        self._account = account

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Returns the text of one format field, whose width is first counted against the rendering budget."""
        self._account.turn()
        self._account.reserve(sum(_width(digits) for digits in _NUMBER.findall(format_spec)), "'format'")
        return super().format_field(self._account.weigh(value), format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Returns a field's value after a conversion such as `!r`; its size is first counted against the budget."""
        return super().convert_field(self._account.weigh(value), conversion)


def checked_format(environment: SandboxedEnvironment, account: Account, value: Any) -> Callable[..., str] | None:
    """Returns a replacement for `str.format` or `str.format_map` that checks sizes; None if `value` is neither."""
    if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
        return None
    text = value.__self__
    if not isinstance(text, str):
        return None
    by_map = value.__name__ == "format_map"

    def format(*args: Any, **kwargs: Any) -> str:
        if by_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument, a mapping")
        values: tuple[Any, Mapping[str, Any]] = ((), args[0]) if by_map else (args, kwargs)
        made = _CheckedFormatter(environment, account).vformat(str(text), *values)
        account.reserve(len(made), "'format'")
        return origins.lost(made) if type(text) is Traced else made

    return format


def small_count(value: Any, what: str) -> None:
    """Raises an error if a template passes too large a number of items or columns to a filter.

    Args:
        value: the argument; a value other than a whole number is accepted.
        what: the name of the argument in the message.

    Raises:
        BudgetError: FG122 if the number is too large.
    """
    # `slice` makes this many lists and `batch` fills rows to this width, however short the input is.
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise BudgetError(f"{what} got {value:,}; the maximum is {MAX_COUNT:,}", code="FG122")
