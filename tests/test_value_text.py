"""A message shows any value on one short line, and comparing a value never fails."""

import pytest

from forgather.value_text import are_equal, is_one_of, json_word, shown
from tests.bad_values import BAD_VALUES


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_every_value_has_a_text_of_one_short_line(value):
    text = shown(value)
    assert 0 < len(text) <= 80
    assert text.isprintable()


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_every_value_has_a_place_in_a_table_or_none(value):
    assert isinstance(json_word(value), str)
    assert not is_one_of(value, ("auto", 1, True))
    assert not are_equal(value, "auto")


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    assert "<an object of Failing, which cannot be shown>" == shown(BAD_VALUES["fails in repr"])
    assert "a whole number of about 5001 digits" == shown(BAD_VALUES["many digits"])
