"""The nearest names are those that `difflib` finds, however many are asked for."""

import difflib
import random

import pytest

from forgather import spelling
from forgather.spelling import begin_document, close_matches, same_letters


@pytest.mark.parametrize("cutoff", [0.3, 0.6, 0.89])
def test_the_nearest_names_are_those_of_difflib(cutoff):
    draw = random.Random(1)
    letters = "abcdeA_ü1"

    def word():
        return "".join(draw.choice(letters) for _ in range(draw.randint(0, 9)))

    for _ in range(1500):
        begin_document()
        name, names = word(), [word() for _ in range(6)]
        assert difflib.get_close_matches(name, names, 2, cutoff) == close_matches(name, names, 2, cutoff)


def test_a_document_has_so_many_names_compared_and_the_next_one_as_many(monkeypatch):
    monkeypatch.setattr(spelling, "MOST_COMPARED", 2000)
    names = [f"name{number}" for number in range(100)]
    begin_document()
    found = [bool(close_matches(f"nmae{number}", names)) for number in range(30)]
    assert found[0] and not found[-1]
    assert spelling._compared < 2 * spelling.MOST_COMPARED
    assert "name7" == same_letters("NAME7", names)
    begin_document()
    assert close_matches("nmae7", names)
