"""Every constructor is found, and its arguments are looked at, before the first one is called."""

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.materialize import materialize
from forgather.config.render import render_text
from forgather.errors import ArgumentError, ResolveError, UnboundVarError

SLOW = """\
calls = []

def slow():
    calls.append("called")
    return calls

def first(node):
    return node

class Late:
    def __init__(self, data, size=1):
        self.data = data
"""


def build(tmp_path, text, **variables):
    (tmp_path / "parts.py").write_text(SLOW)
    graph = load(render_text(ConfigEnvironment(), text))
    return materialize(graph, targets=["main"], variables=variables, project_dir=str(tmp_path))["main"]


CALL_FIRST = "main: !call:parts.py:Late\n    data: !call:parts.py:slow\n"


@pytest.mark.parametrize(
    ("late", "error", "code", "line"),
    [
        ("    siez: 1\n", ArgumentError, "FG204", 3),
        ("    size: !call:parts.py:lat\n", ResolveError, "FG321", 3),
        ("    size: !factory:no_such_module:f\n", ResolveError, "FG320", 3),
        ("    size: !partial:parts.py:Late {sise: 2}\n", ArgumentError, "FG204", 3),
        ("    size: [{a: !call:parts.py:Late []}]\n", ArgumentError, "FG208", 3),
    ],
)
def test_a_late_mistake_is_found_before_the_first_call(tmp_path, monkeypatch, late, error, code, line):
    marker = tmp_path / "called"
    monkeypatch.setenv("MARKER", str(marker))
    source = SLOW.replace('calls.append("called")', "import os; open(os.environ['MARKER'], 'w').close()")
    (tmp_path / "parts.py").write_text(source)
    graph = load(render_text(ConfigEnvironment(), CALL_FIRST + late))
    with pytest.raises(error) as caught:
        materialize(graph, targets=["main"], project_dir=str(tmp_path))
    assert (code, line, False) == (caught.value.code, caught.value.span.line, marker.exists())


def test_what_a_variable_stands_in_for_is_not_looked_at(tmp_path):
    text = "main: !var {name: x, default: !call:no_such_module:f }\n"
    assert 3 == build(tmp_path, text, x=3)
    with pytest.raises(ResolveError):
        build(tmp_path, text)


def test_arguments_of_a_meta_call_are_its_own_business(tmp_path):
    assert "Call" == type(build(tmp_path, "main: !meta:parts.py:first [!call:no_such_module:f ]\n")).__name__


def test_a_value_that_is_missing_is_still_found_when_it_is_read(tmp_path):
    with pytest.raises(UnboundVarError):
        build(tmp_path, CALL_FIRST + "    size: !var n\n")
