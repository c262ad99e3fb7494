"""Many cases in one test: each is tried, and those that fail are reported."""

import pytest

from tests.each import each


def test_every_case_is_tried_and_all_that_fail_are_named():
    tried = []

    def test(left, right):
        tried.append(left)
        assert left == right

    with pytest.raises(ExceptionGroup, match="2 of 3 cases") as found:
        each([("a", "b"), ("c", "c"), ("d", "e")], test)
    assert ["a", "c", "d"] == tried
    assert [["case: ('a', 'b')"], ["case: ('d', 'e')"]] == [error.__notes__ for error in found.value.exceptions]


def test_cases_that_are_no_tuples_are_given_as_they_are():
    tried = []
    each(["a", [1, 2]], tried.append)
    assert ["a", [1, 2]] == tried
