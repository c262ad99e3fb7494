"""Calls are judged against signatures that were read from source: one finding a fault, at its own line."""

import textwrap

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.lint.call_check import check_calls
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.errors import Severity
from forgather.signatures import Reader

PARTS = """
from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Optional


class Kind(enum.Enum):
    A = "a"


class Plain:
    def __init__(self, size: int = 1, rate: float = 0.1, name: str = "n", on: bool = False) -> None: ...


class Called:
    def __call__(self) -> None: ...


class Free:
    def __init__(self, anything=None, **others: int) -> None: ...


def needs(first: int, second: str, /, third: float = 1.0, *, fourth: bool = False) -> Plain: ...
def many(*values: int) -> list[int]: ...
def optional(rate: float | None = None, size: Optional[int] = None, loose: float = None) -> None: ...
def takes(thing: Plain, path: Path = Path(), kind: Kind = Kind.A, both: Plain | None = None) -> None: ...
def calls(make: Callable[..., Any], maybe: Callable[[], int] | None = None) -> None: ...
def lists(pair: tuple[float, float] = (0, 1), items: list[int] | None = None, table: dict[str, int] | None = None,
          rows: Iterable[int] = ()) -> None: ...
def either(thing: Plain | Callable[[], Plain]) -> None: ...
def called(thing: Called) -> None: ...
def number() -> int: ...


if os.environ.get("WIDE"):
    def shape(width: int) -> int: ...
else:
    def shape(width: str, height: str) -> str: ...
"""


@pytest.fixture
def judged(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "broken.py").write_text("def make(:\n    pass\n")

    def judged(text):
        graph = load(render_text(ConfigEnvironment(), textwrap.dedent(text)))
        return check_calls(graph, Reader(str(tmp_path)))

    return judged


@pytest.fixture
def faults(judged):
    def faults(text):
        result = judged(text)
        assert all(found.severity is Severity.ERROR for found in result.findings)
        return [(found.code, found.span.line, found.path) for found in result.findings]

    return faults


@pytest.mark.parametrize(
    "call",
    [
        "!call:parts.py:Plain {size: 3, rate: 1, name: x, on: true}",
        "!call:parts.py:Plain [3, 0.5, x]",
        "!call:parts.py:Plain {size: true, rate: true, on: 1}",
        "!call:parts.py:Free {anything: [1], more: 2}",
        "!call:parts.py:needs [1, b, 2.0]",
        "!partial:parts.py:needs {fourth: true}",
        "!partial:parts.py:needs ",
        "!call:parts.py:many [1, 2, 3, 4]",
        "!call:parts.py:optional {rate: ~, size: ~, loose: ~}",
        "!call:parts.py:takes {thing: !call:parts.py:Plain {}, path: a/b, kind: a, both: ~}",
        "!call:parts.py:calls [!partial:parts.py:number {}]",
        "!call:parts.py:calls [!call:parts.py:Called ]",
        "!call:parts.py:calls {make: !var make, maybe: ~}",
        "!call:parts.py:lists {pair: [1, 2.0], items: [1], table: {a: 1}, rows: [1, 2]}",
        "!call:parts.py:lists {pair: !tuple [1, 2], items: !dlist {a: 1}, rows: {a: 1}}",
        "!call:parts.py:either [!partial:parts.py:Plain {}]",
        "!call:parts.py:called [!partial:parts.py:number {}]",
        "!call:parts.py:shape {width: 1}",
        "!call:parts.py:shape {width: a, height: b}",
        "!call:parts.py:Plain {args: [1], kwargs: {rate: 2}}",
        "!call:getitem [[1, 2], 0]",
        "!call:parts.py:Plain {size: !calc '1 + 1', name: !env HOME}",
        "!call:parts.py:Plain {size: !call:parts.py:number }",
    ],
)
def test_a_call_that_works_is_without_findings(judged, call):
    result = judged(f"main: {call}\n")
    assert () == result.findings
    assert () == result.unchecked


def test_what_does_not_exist_is_said_as_in_a_construction(judged):
    result = judged(
        """
        a: !call:forgather.no_such_module:f []
        b: !call:parts.py:Plian []
        c: !call:nowhere.py:f []
        d: !call:.relative:f []
        """
    )
    assert () == result.unchecked
    codes = ["FG320", "FG321", "FG322", "FG325"]
    assert codes == [found.code for found in result.findings]
    assert [2, 3, 4, 5] == [found.span.line for found in result.findings]
    assert ["a", "b", "c", "d"] == [found.path for found in result.findings]
    assert "did you mean 'Plain'?" == result.findings[1].hint


def test_a_syntax_error_in_a_file_of_the_project_is_a_finding_in_that_file(judged):
    (found,) = judged("main: !call:broken.py:make []\n").findings
    assert ("FG326", "broken.py", 1) == (found.code, found.span.file.rpartition("/")[2], found.span.line)


def test_every_fault_of_a_call_is_told_at_its_own_line(faults):
    text = """
        main: !call:parts.py:Plain
          siez: 1
          rate: fast
          nmae: x
        """
    assert [("FG204", 3, "main"), ("FG204", 5, "main"), ("FG242", 4, "main.rate")] == faults(text)


def test_the_nearest_name_is_suggested(judged):
    (found,) = judged("main: !call:parts.py:Plain {siez: 1}\n").findings
    assert ("Plain has no parameter 'siez'", "did you mean 'size'?") == (found.message, found.hint)


def test_a_misspelt_name_is_not_also_missing(faults):
    text = """
        main: !call:parts.py:takes
          thnig: !call:parts.py:Plain
        """
    assert [("FG204", 3, "main")] == faults(text)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("!call:parts.py:needs [1]", "FG208"),
        ("!call:parts.py:takes {}", "FG208"),
        ("!call:parts.py:Plain [1, 2, x, true, 5]", "FG209"),
        ("!call:parts.py:Plain {args: [1], kwargs: {size: 2}}", "FG209"),
        ("!call:parts.py:shape {}", "FG208"),
        ("!call:parts.py:shape {depth: 1}", "FG204"),
        ("!meta:parts.py:Plain {siez: 1}", "FG204"),
        ("!partial:parts.py:Plain {siez: 1}", "FG204"),
        ("!factory:parts.py:Plain {siez: 1}", "FG204"),
    ],
)
def test_arguments_that_a_signature_rules_out(faults, call, code):
    assert code == faults(f"main: {call}\n")[0][0]


@pytest.mark.parametrize(
    ("call", "code", "message", "hint"),
    [
        ("Plain {rate: '3e-4'}", "FG242", "Plain takes float as 'rate' but gets the text '3e-4'", "without quotes"),
        ("Plain {size: [1]}", "FG242", "Plain takes int as 'size' but gets a sequence", "give a whole number"),
        ("Plain {size: 1.5}", "FG242", "gets the number 1.5", "give a whole number"),
        ("Plain {size: 1e3}", "FG242", "gets the number 1000.0", "write the whole number 1000"),
        ("Plain {name: true}", "FG242", "Plain takes str as 'name' but gets true", "give a text"),
        ("Plain {name: 3}", "FG242", "gets the whole number 3", "give a text"),
        ("Plain {on: yes}", "FG242", "gets the text 'yes'", "write true, without quotes"),
        ("Plain {on: 2}", "FG242", "gets the whole number 2", "give true or false"),
        ("Plain {rate: ~}", "FG242", "gets nothing (~)", "leave the argument out"),
        ("Plain [x]", "FG242", "Plain takes int as 'size' but gets the text 'x'", "give a whole number"),
        ("lists {pair: 1}", "FG242", "gets the whole number 1", "give a list"),
        ("lists {table: [1]}", "FG242", "gets a sequence", "give a mapping"),
        ("lists {items: {a: 1}}", "FG242", "gets a mapping", "give a list"),
        ("takes [!partial:parts.py:Plain {}]", "FG240", "gets a !partial of parts.py:Plain", "write !singleton"),
        ("called [!partial:parts.py:Called {}]", "FG240", "gets a !partial of parts.py:Called", "write !singleton"),
        ("takes [{a: 1}]", "FG242", "takes takes Plain as 'thing' but gets a mapping", "an object of Plain"),
        ("Plain {size: !partial:parts.py:number {}}", "FG240", "gets a !partial of parts.py:number", "which calls it"),
        ("calls [!call:parts.py:Plain {}]", "FG241", "a callable as 'make' but gets an object of Plain", "!partial:parts.py"),
        ("calls [!factory:parts.py:Plain {}]", "FG241", "gets an object of Plain", "write !partial:parts.py:Plain"),
        ("calls [!call:parts.py:number ]", "FG241", "gets what number gives", "write !partial:parts.py:number"),
        ("calls ['torch:relu']", "FG241", "gets the text 'torch:relu'", "write !partial:torch:relu"),
        ("calls [{a: 1}]", "FG241", "gets a mapping", "give a callable, as !partial:module:function"),
        ("calls [~]", "FG242", "gets nothing (~)", "give a value"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_its_annotation(judged, call, code, message, hint):
    (found,) = judged(f"main: !call:parts.py:{call}\n").findings
    assert code == found.code
    assert message in found.message
    assert hint in found.hint


@pytest.mark.parametrize(
    "call",
    [
        "!call:torch.nn:CrossEntropyLoss {weight: [1.0, 3]}",
        "!call:torch.nn:BCEWithLogitsLoss {pos_weight: [1.0, 3]}",
        "!partial:torch.nn.functional:cross_entropy {weight: [1.0, 3]}",
    ],
)
def test_a_list_where_torch_takes_a_tensor_is_told_with_the_call_that_makes_one(judged, call):
    (found,) = judged(f"main: {call}\n").findings
    assert ("FG242", 1) == (found.code, found.span.line)
    assert "takes Tensor | None as" in found.message
    tensor = "!call:torch:tensor [[1.0, 3.0]]"
    assert tensor in found.hint
    assert () == judged(f"main: {call.replace('[1.0, 3]', tensor)}\n").findings


def test_a_slip_that_ends_among_further_keywords_is_a_warning(judged):
    (found,) = judged("main: !call:parts.py:Free {anythng: 1}\n").findings
    assert ("FG204", Severity.WARNING, "did you mean 'anything'?") == (found.code, found.severity, found.hint)
    assert () == judged("main: !call:parts.py:Free {another: 1}\n").findings


def test_ways_to_call_something_are_a_union(judged):
    assert () == judged("main: !call:parts.py:shape {width: 1}\n").findings
    (found,) = judged("main: !call:parts.py:shape {width: 1.5}\n").findings
    assert "FG242" == found.code


def test_a_value_behind_an_alias_is_told_where_it_is_written(faults):
    text = """
        .rate: &rate fast
        main: !call:parts.py:Plain
          rate: *rate
        """
    assert [("FG242", 2, "main.rate")] == faults(text)


def test_a_call_that_is_used_twice_is_told_once(faults):
    text = """
        a: &a !call:parts.py:Plain {siez: 1}
        b: [*a, *a]
        main: *a
        """
    assert [("FG204", 2, "a")] == faults(text)


def test_definitions_are_judged_too(faults):
    assert [("FG204", 1, "main")] == faults(".a: &a !call:parts.py:Plain {siez: 1}\nmain: *a\n")


def test_what_is_not_known_is_listed_with_the_reason(judged):
    result = judged("main: !call:.parts:Plain {kwargs: {siez: 1}, submodule_searchpath: !env HOME}\n")
    assert () == result.findings
    (one,) = result.unchecked
    assert ("main", ".parts:Plain", 1) == (one.path, one.constructor, one.span.line)
    assert "known only when it is built" in one.reason


def test_a_search_path_that_is_written_out_is_followed(judged, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "made.py").write_text("def make(size: int): ...\n")
    result = judged("main: !call:.made:make {kwargs: {siez: 1}, submodule_searchpath: [inner]}\n")
    assert ["FG204"] == [found.code for found in result.findings]


def test_what_a_meta_is_handed_is_not_judged(judged):
    assert () == judged("a: !meta:parts.py:many [!call:parts.py:number , x]\n").findings
    result = judged("a: !meta:parts.py:Free {anything: [!call:parts.py:needs [], !call:no.such:thing []]}\n")
    assert () == result.findings
    reason = "it is an argument of !meta, which decides whether and how it is built"
    assert [(f"a.anything[{i}]", reason) for i in (0, 1)] == [(one.path, one.reason) for one in result.unchecked]


def test_what_is_built_elsewhere_too_is_judged(judged):
    result = judged("a: !meta:parts.py:Free {anything: &it !call:parts.py:Plain {siez: 1}}\nb: *it\n")
    assert ["FG204"] == [found.code for found in result.findings]


def test_a_positional_argument_too_much_is_the_one_that_is_pointed_at(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    text = "main: !call:parts.py:Plain\n  - 1\n  - 0.5\n  - n\n  - true\n  - 5\n"
    graph = load(render_text(ConfigEnvironment(), text))
    found = check_calls(graph, Reader(str(tmp_path))).findings
    assert [("FG209", 6)] == [(one.code, one.span.line) for one in found]
