"""The built-in functions of the config language (`items`, `getitem`, `named_list`, ...) as plain Python.

The input is built arguments; the output is an expression with the same effect. For a built-in function that is passed
as an object, the output is the source of a function.
"""

from __future__ import annotations

from collections.abc import Sequence

from forgather.codegen.python.ir import Expression, bracketed, call, name

Keyword = tuple[str, Expression]
_ONE = {"items": "mapping", "keys": "mapping", "values": "mapping"}
PARAMETERS = {**{word: (parameter,) for word, parameter in _ONE.items()}, "getitem": ("container", "key")}
SOURCES = {
    "items": ("(mapping)", "list(mapping.items())"),
    "keys": ("(mapping)", "list(mapping.keys())"),
    "values": ("(mapping)", "list(mapping.values())"),
    "getitem": ("(container, key)", "container[key]"),
    "call": ("(function, /, *args, **kwargs)", "function(*args, **kwargs)"),
    "named_list": ("(*members)", "list(members)"),
    "named_tuple": ("(*members)", "members"),
    "named_dict": ("(*pairs, **members)", "{**dict(pairs), **members}"),
}


def source_lines(word: str, local: str) -> list[str]:
    """Returns the source of a module-level function that does what a built-in function of the config language does.

    Args:
        word: the name of the built-in function in a config.
        local: the name of the generated function.
    """
    parameters, value = SOURCES[word]
    return [f"def {local}{parameters}:", f"    return {value}"]


def expanded(
    word: str, args: Sequence[Expression], kwargs: Sequence[Keyword], display: Expression
) -> Expression | None:
    """Returns an expression with the effect of a call of a built-in function; None if the arguments do not match.

    For the built-in function `call`, the result is only the expression of the callable, which is the first argument.

    Args:
        word: the name of the built-in function in a config.
        args: the positional arguments.
        kwargs: the keyword arguments.
        display: the keyword arguments as a dict display.
    """
    if word in PARAMETERS:
        wanted = PARAMETERS[word]
        given = {**dict(zip(wanted, args, strict=False)), **dict(kwargs)}
        if set(given) != set(wanted) or len(args) + len(kwargs) != len(wanted):
            return None
        return _read(word, [given[parameter] for parameter in wanted])
    if word == "call":
        if not args:
            return None
        return None if kwargs and display.text == "{}" else args[0]
    if word == "named_dict":
        pairs = call(name("dict"), [("", bracketed("[", [("", pair) for pair in args], "]", pure=True))])
        if not args:
            return display
        return pairs if not kwargs else bracketed("{", [("**", pairs), *display.items], "}", pure=False)
    if kwargs:
        return None
    opening, closing = "[]" if word == "named_list" else "()"
    return bracketed(opening, [("", member) for member in args], closing, pure=True)


def _read(word: str, parts: list[Expression]) -> Expression:
    owner = parts[0].text if parts[0].primary else f"({parts[0].text})"
    if word == "getitem":
        return Expression(f"{owner}[{parts[1].text}]", pure=False)
    return call(name("list"), [("", Expression(f"{owner}.{word}()", pure=False))])
