"""Constructors that test configs name."""

from __future__ import annotations

import functools

from forgather.errors import ForgatherError


class Part:
    """Remembers its arguments; `made` counts the parts of the process."""

    made = 0

    def __init__(self, *args, **kwargs):
        Part.made += 1
        self.args, self.kwargs = args, kwargs


class Strict:
    def __init__(self, lr, weight_decay=0.1, *, eps=1e-8):
        self.lr, self.weight_decay, self.eps = lr, weight_decay, eps


class AnyName:
    """Takes arguments under the names that calling code likes to use itself."""

    def __init__(self, constructor, name, path, node, function=None, args=None, kwargs=None):
        self.values = (constructor, name, path, node, function, args, kwargs)


def only_positional(x, /):
    return x


def nothing():
    return None


def broken(value=None):
    raise RuntimeError("no luck")


def inner_type_error(x):
    return len(5)


def calls(function, *args):
    return function(*args)


def add(a, b=10):
    return a + b


def lenient(function):
    """A decorator that accepts more than the function it wraps."""

    @functools.wraps(function)
    def wrapper(*args, extra=None, **kwargs):
        return function(*args, **kwargs), extra

    return wrapper


@lenient
def decorated(x):
    return x


def keep(*nodes, **named):
    return nodes, named


NUMBER = 5


def picky_about_settings(**settings):
    """Refuses the keyword `lr` of the call that was given as `settings`."""
    raise ForgatherError("lr is wrong").about("settings.lr")


def picky(**settings):
    error = ForgatherError("second is 2", code="FG000")
    error.argument = "second"
    raise error
