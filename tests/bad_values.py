"""Values that no setting takes, and objects whose own methods fail: what a script may give by mistake."""

import datetime
import functools
import math

import torch


class OwnError(Exception):
    """What the methods of the objects below raise."""


def _fails(*args):
    raise OwnError


def _object(*methods):
    return type("Failing", (), {**dict.fromkeys(methods, _fails), "__hash__": object.__hash__})()


class WrongPath:
    def __fspath__(self):
        return 3


_itself: list = []
_itself.append(_itself)
_within: dict = {}
_within["a"] = _within
_deep: list = []
for _ in range(3000):
    _deep = [_deep]

BAD_VALUES = {
    "nan": math.nan,
    "infinite": math.inf,
    "negative": -1.5,
    "many digits": 10**5000,
    "negative digits": -(10**5000),
    "empty": "",
    "blank": " ",
    "bytes": b"abc",
    "list in list": [[1], [None]],
    "tuple": (),
    "other keys": {(1, 2): 3, None: 4, 1: "a"},
    "set": {1, "a"},
    "function": _fails,
    "class": int,
    "object": object(),
    "fails in repr": _object("__repr__"),
    "fails in eq": _object("__eq__"),
    "fails in bool": _object("__bool__"),
    "fails in all": _object("__repr__", "__str__", "__eq__", "__bool__", "__iter__", "__len__"),
    "fails inside": [_object("__repr__", "__eq__")],
    "tensor": torch.ones(3),
    "meta tensor": torch.empty(2, device="meta"),
    "long": "x" * 100_000,
    "control": "a\x00b\x1b[31m\n",
    "surrogate": "\ud800",
    "superscript": "²",
    "itself": _itself,
    "mapping of itself": _within,
    "deep": _deep,
    "complex": 1j,
    "partial": functools.partial(_fails),
    "longest time": datetime.timedelta.max,
    "negative time": datetime.timedelta(-1),
    "too many hours": {"hours": 10**30},
    "too many days": "99999999999999:00:00:00",
    "wrong path": WrongPath(),
}
