"""The filters and tests of templates: those of Jinja, extended by budget checks and origins, `toyaml` and `fromyaml`.

The input is Jinja's tables of filters and tests; the output is `FILTERS` and `TESTS`. Invariants: the cost of a filter
counts against the rendering budget before the filter runs; a filter that keeps the text of its input keeps the origins
of the text, and the origin of any other result is the line that prints it. `toyaml` writes a value as flow-style YAML
1.2 on one line. A YAML reader reads an equal value from the line, which contains no character that a reader refuses or
changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Undefined
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import _PassArg, pass_context

from forgather.config._jinja import origins
from forgather.config._jinja.budget import MAX_COUNT, Account
from forgather.config._jinja.call_guard import STRIPTAGS_CHARS, check_percent, replaced_size, small_count
from forgather.config._jinja.origins import Traced
from forgather.errors import BudgetError, RenderError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*", re.A)
_WORDS = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off", "y", "n"})
_ESCAPED = re.compile('[\x00-\x1f"\\\\\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]')
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_MAX_SIMPLE_KEY = 1000


def toyaml(value: Any) -> str:
    """Returns a plain value as YAML in flow style on one line.

    Raises:
        RenderError: FG118 if YAML has no plain form of the value.

    Example:
        >>> toyaml({"lr": 1e-3, "names": ["a", "b c"], "top": None})
        '{lr: 0.001, names: [a, "b c"], top: null}'
    """
    if value is None:
        return "null"
    # Before int: True is an int in Python.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # A subclass may have another repr, such as an IntEnum.
        return int.__repr__(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return _string(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {toyaml(value[key])}" for key in value) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ", ".join(toyaml(item) for item in value) + "]"
    raise RenderError(
        f"'toyaml' cannot write {type(value).__name__}",
        code="FG118",
        hint="it writes strings, numbers, true, false, null, lists and mappings",
    )


def _float(value: float) -> str:
    if value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    # A subclass may have another repr, such as numpy's float64.
    return repr(float(value))


def _key(key: Any) -> str:
    if isinstance(key, list | tuple | Mapping):
        raise RenderError("'toyaml' cannot write a list as a key", code="FG118", hint="use a string as the key")
    text = toyaml(key)
    # YAML limits a simple key to 1024 characters; `?` writes a key of any length.
    return text if len(text) <= _MAX_SIMPLE_KEY else f"? {text} "


def _string(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS and len(text) <= _MAX_SIMPLE_KEY:
        return text
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    if "\ud800" <= char <= "\udfff":
        raise RenderError(
            f"'toyaml' cannot write a lone surrogate (U+{ord(char):04X})",
            code="FG118",
            hint="the text is not valid Unicode",
        )
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")


# The work of these filters does not grow with the size of the value: at most they read its length or one item.
_FREE = frozenset({"default", "d", "length", "count", "first", "last", "random", "attr", "abs", "items"})
# These filters take longer for a character than copying it does.
_WORK = {"wordwrap": 9, "pprint": 9, "tojson": 9, "xmlattr": 9, "escape": 9, "e": 9, "forceescape": 9,
         "wordcount": 15, "urlencode": 20, "title": 40, "fromyaml": 60}  # fmt: skip
_SORTS = frozenset({"sort", "unique", "groupby", "dictsort", "min", "max"})
# `urlize` makes HTML; `sum` and `join` are replaced below, because their own loops cannot be charged.
_DROPPED = frozenset({"urlize", "sum", "join"})


# -- estimates: each is called before its filter, with the same arguments


def _center(account: Account, value: Any, width: int = 80) -> None:
    account.reserve(width, "'center'")


def _indent(account: Account, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    wide = len(width) if isinstance(width, str) else width
    account.reserve(len(s) + (s.count("\n") + 1) * max(wide, 0), "'indent'")


def _wordwrap(
    account: Account,
    s: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> None:
    lines = len(s) // max(width, 1) + s.count("\n") + 1
    account.reserve(len(s) + lines * len(wrapstring or "\n") * 2, "'wordwrap'")


def _replace(account: Account, s: Any, old: str, new: str, count: int | None = None) -> None:
    replaced_size(account, str(s), old, new, -1 if count is None else count)


def _format(account: Account, value: Any, *args: Any, **kwargs: Any) -> None:
    check_percent(account, str(value), kwargs or args)


def _columns(account: Account, value: Any, columns: int, fill_with: Any = None) -> None:
    small_count(columns, "the filter")


def _tojson(account: Account, value: Any, indent: int | str | None = None) -> None:
    # Python's json takes a text or a number as its indent.
    wide = len(indent) if isinstance(indent, str) else indent or 0
    small_count(wide, "'tojson'")
    size = account.size(value)
    account.reserve(size + size // 8 * max(wide, 0) * _depth(value), "'tojson'")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth < 1000:
        depth += 1
        # Cut per level, because a shared list may occur many times over.
        level = [
            inner
            for item in level
            if isinstance(item, list | tuple | dict)
            for inner in (item.values() if isinstance(item, dict) else item)
        ][:MAX_COUNT]
    return depth


def _round(account: Account, value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 1000:
        raise BudgetError(f"'round' got a precision of {precision:,} digits", code="FG122", hint="a float has about 17")


def _striptags(account: Account, value: Any) -> None:
    if len(str(value)) > STRIPTAGS_CHARS:
        # striptags copies the text for each tag that it removes.
        account.reserve(float("inf"), "'striptags'")


def _list(account: Account, value: Any) -> None:
    if isinstance(value, str):
        account.items(len(value), "the list of characters")


def _int(account: Account, value: Any, default: int = 0, base: int = 10) -> None:
    if isinstance(value, str) and len(value) > account.limits.max_integer_digits:
        account.reserve(float("inf"), "'int'")


_ESTIMATES: dict[str, Callable[..., None]] = {
    "center": _center,
    "indent": _indent,
    "wordwrap": _wordwrap,
    "replace": _replace,
    "format": _format,
    "batch": _columns,
    "slice": _columns,
    "tojson": _tojson,
    "round": _round,
    "striptags": _striptags,
    "int": _int,
    "list": _list,
}
_FOLLOW: dict[str, Callable[..., Traced | None]] = {
    "trim": origins.follow_trim,
    "replace": origins.follow_replace,
    "indent": origins.follow_indent,
}


def _priced(name: str, function: Any) -> Callable[..., Any]:
    """Returns a filter that first counts its work against the budget, and keeps the origins of its input if it can."""
    # Private to Jinja, but nothing else says whether a filter takes the context or environment as its first argument.
    wants = _PassArg.from_obj(function)
    estimate, follow = _ESTIMATES.get(name), _FOLLOW.get(name)
    weight = _WORK.get(name, 3 if name in _SORTS else 0)

    @pass_context
    @wraps(function, assigned=("__doc__", "__name__"), updated=())
    def run(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charges the work for the value and the arguments, and calls the filter."""
        account: Account = context.environment.account  # type: ignore[attr-defined]
        text = value
        if not isinstance(value, Undefined):
            if name not in _FREE:
                value = account.consume(value)
            for extra in (*args, *kwargs.values()):
                account.weigh(extra)
            if estimate is not None:
                estimate(account, value, *args, **kwargs)
            if weight and isinstance(value, str | list | tuple | dict):
                account.charge(weight * (len(value) if isinstance(value, str) else account.size(value)))
        first = () if wants is None else (_passed(wants, context),)
        result = function(*first, value, *args, **kwargs)
        if type(text) is Traced and isinstance(result, str) and type(result) is not Traced:
            # A Markup result stays one, as in plain Jinja.
            followed = follow(text, str(result), *args, **kwargs) if follow and type(result) is str else None
            return followed if followed is not None else origins.lost(result) if type(result) is str else result
        return result

    return run


def _passed(wants: _PassArg, context: Context) -> Any:
    if wants is _PassArg.context:
        return context
    return context.eval_ctx if wants is _PassArg.eval_context else context.environment


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Returns the joined items; texts keep their origins."""
    environment: Any = context.environment
    account: Account = environment.account
    items = list(account.consume(value))
    if attribute is not None:
        items = [make_attrgetter(environment, attribute)(item) for item in items]
    if any(hasattr(item, "__html__") for item in items):
        items = [str(item) for item in items]
    separator = d if isinstance(d, str) else environment.text(d)
    texts = [item if isinstance(item, str) else environment.text(item) for item in items]
    account.reserve(sum(map(len, texts)) + len(separator) * max(len(texts) - 1, 0), "'join'")
    if not any(type(text) is Traced for text in texts):
        return separator.join(texts)
    pieces: list[str] = []
    for number, text in enumerate(texts):
        pieces += [separator, text] if number else [text]
    return origins.joined(pieces)


@pass_context
def _sum(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Returns the sum of the items; the size of each intermediate result is checked."""
    environment: Any = context.environment
    total = start
    for item in environment.account.consume(iterable):
        value = item if attribute is None else make_attrgetter(environment, attribute)(item)
        total = environment.call_binop(context, "+", total, value)
    return total


def _weighed_test(function: Any) -> Any:
    wants = _PassArg.from_obj(function)
    if wants is not None:
        return function

    @pass_context
    @wraps(function, assigned=("__doc__", "__name__"), updated=())
    def run(context: Context, *args: Any) -> Any:
        """Counts what is compared against the budget, and calls the test."""
        account: Account = context.environment.account  # type: ignore[attr-defined]
        for value in args:
            account.compared(value)
        return function(*args)

    return run


@pass_context
def _toyaml(context: Context, value: Any, default: Any = toyaml) -> str:
    """Returns a plain value as YAML on one line."""
    if isinstance(value, Undefined):
        if default is toyaml:
            value._fail_with_undefined_error()
        value = default
    context.environment.account.weigh(value)  # type: ignore[attr-defined]
    return toyaml(value)


@pass_context
def _fromyaml(context: Context, value: Any, form: Any = None) -> Any:
    """Returns the plain value of a YAML text, which must have a form if one is given."""
    # Only a template with this filter pays for the parser.
    from forgather.config._jinja.plain_yaml import plain_data

    account: Account = context.environment.account  # type: ignore[attr-defined]
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, str):
        raise RenderError(
            f"'fromyaml' reads a text, and got {type(value).__name__}",
            code="FG970",
            hint="capture a file with `-- set text`, `-- include 'FILE'`, `-- endset`",
        )
    account.weigh(value)
    account.charge(_WORK["fromyaml"] * len(value))
    return plain_data(value, account.limits.max_integer_digits, form)


def json_text(value: Any, **settings: Any) -> str:
    """Returns a value as JSON text; any mapping becomes a JSON object."""
    return json.dumps(value, default=_as_dict, **settings)


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"JSON cannot represent {type(value).__name__}")


FILTERS: dict[str, Any] = {
    **{name: _priced(name, function) for name, function in JINJA_FILTERS.items() if name not in _DROPPED},
    "join": _join,
    "sum": _sum,
    "toyaml": _toyaml,
    "fromyaml": _fromyaml,
}
TESTS: dict[str, Any] = {name: _weighed_test(function) for name, function in JINJA_TESTS.items()}
