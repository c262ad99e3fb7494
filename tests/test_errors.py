"""Errors are data: they keep their fields, survive pickling, and print as one line."""

import pickle

import pytest

from forgather import errors
from forgather.errors import (
    Diagnostic,
    ForgatherError,
    ResolveError,
    Severity,
    UnboundVarError,
    UnknownTargetError,
    nearest,
)
from forgather.source import Span

LEAVES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ForgatherError)]


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_with_its_fields(cls):
    error = cls("no 'x'", span=Span("/a/b.yaml", 3), path="a.b", hint="write y", found=1, context=["config c.yaml"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), vars(error), str(error)) == (type(again), vars(again), str(again))


def test_an_error_prints_as_one_line_with_its_place_code_and_hint():
    error = ForgatherError("no 'x'", span=Span("/a/b.yaml", 3), hint="write y")
    assert "/a/b.yaml:3: [FG000] no 'x' (write y)" == str(error)


@pytest.mark.parametrize(
    ("cls", "builtin"), [(UnboundVarError, NameError), (UnknownTargetError, KeyError), (ResolveError, ImportError)]
)
def test_a_leaf_is_also_what_a_caller_would_catch(cls, builtin):
    with pytest.raises(builtin, match="no 'x'"):
        raise cls("no 'x'")


def test_an_error_can_be_read_as_a_diagnostic():
    error = ForgatherError("no 'x'", code="FG000", hint="write y", path="a.b")
    assert Diagnostic(code="FG000", message="no 'x'", hint="write y", path="a.b") == error.diagnostic
    assert Severity.ERROR == error.diagnostic.severity


def test_nothing_near_and_many_names_give_no_hint():
    assert nearest("zzz", [f"name{i}" for i in range(20)]) is None
