"""Texts that YAML 1.2 allows in brackets and libyaml cannot read; and what stays a mistake."""

import pytest
from ruamel.yaml import YAML

from forgather.config.load import load_value
from forgather.config.yaml.parser import read_events
from forgather.errors import LoadError
from forgather.project.literal import plain_value

TEXTS = {
    "[12:30]": ["12:30"],
    "[12:30, 1]": ["12:30", 1],
    "[ 12:30 , 12:31:05 ]": ["12:30", "12:31:05"],
    "{b: 12:30, c: 1}": {"b": "12:30", "c": 1},
    "[http://host:80/path?x=1]": ["http://host:80/path?x=1"],
    "{http://host/: 1}": {"http://host/": 1},
    "[module:symbol.name, x:y:z]": ["module:symbol.name", "x:y:z"],
    "[::]": ["::"],
    "[:a, ::b]": [":a", "::b"],
    "[C:\\x]": ["C:\\x"],
    "[\n  12:30,\n  [a:b, {c: d:e}]\n]": ["12:30", ["a:b", {"c": "d:e"}]],
    "[x y:z w]": ["x y:z w"],
    "[2020-01-01T12:30]": ["2020-01-01T12:30"],
    "[[a:b]: c]": [{("a:b",): "c"}],
    "{x: [1, a:1], y: 'b:2', z: \"c:3\"}": {"x": [1, "a:1"], "y": "b:2", "z": "c:3"},
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_with_a_colon_is_a_text_in_brackets_too(text):
    if text != "[[a:b]: c]":
        assert TEXTS[text] == YAML(typ="safe", pure=True).load(text), "what YAML itself says"
    assert TEXTS[text] == plain_value(load_value(text), "it")


@pytest.mark.parametrize("text", ["[a, b: [c], 'd']", "{a: [1, 2.5, ~], b: {c: d}}", "- a\n- b: c\n- [d, e]\n"])
@pytest.mark.parametrize("more", ["[12:30]", "a:b"])
def test_the_places_are_those_that_libyaml_gives(text, more):
    begin = "x: " + text if text[0] in "[{" else "x:\n" + text
    alone, with_more = (list(read_events(f"{begin}\n{last}")) for last in ("", f"y: [{more}, 1]\n"))

    assert [event[:8] for event in alone[:-1]] == [event[:8] for event in with_more][: len(alone) - 1]


@pytest.mark.parametrize("text", ["{lr:3}", "{a: 1, lr:3}", "[lr:]", "{lr:}", "[a:b, ]]", "[a:b", "[a:b, {c: d]"])
def test_what_is_no_text_stays_a_mistake(text):
    with pytest.raises(LoadError) as caught:
        load_value(text)
    assert 1 == caught.value.span.line


def test_a_mistake_behind_such_a_text_is_told_at_its_own_place():
    with pytest.raises(LoadError) as caught:
        load_value("a: [12:30]\nb: 1\nc: [1, 2\nd: 3\n")
    assert caught.value.span.line >= 1
    assert "unexpected ':'" not in str(caught.value)
