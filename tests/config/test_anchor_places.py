"""A value stands where its tag or text begins, also when its anchor stands alone on a line before."""

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.render import render_text


def lines_of(text):
    graph = load(render_text(ConfigEnvironment(), text))
    return {name: entry.value.span.line for name, entry in graph.targets.items()}


def test_a_tag_below_its_anchor_is_the_place_of_the_value():
    assert {"a": 4} == lines_of("a: &x\n\n# why\n    !call:dict\n    b: 1\n")


def test_a_value_beside_its_anchor_stays_on_that_line():
    assert {"a": 1, "b": 2} == lines_of("a: &x !call:dict\nb: &y 1\n")


def test_an_anchored_null_stays_at_its_anchor():
    assert {"a": 1, "b": 2} == lines_of("a: &x\nb: 1\n")


def test_an_anchored_mapping_begins_at_its_first_key():
    assert {"a": 2} == lines_of("a: &x\n    b: 1\n")
