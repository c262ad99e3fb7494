"""Pieces of a tensor fill each place of it once, or the checkpoint is refused."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.ml.checkpoint.reader import Box, chunk_problem

SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def shape_and_boxes(draw):
    shape = draw(SHAPES)
    ends = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    cuts = [sorted({0, size, *inner}) for size, inner in zip(shape, ends, strict=True)]
    parts = [[(a, b - a) for a, b in itertools.pairwise(cut)] or [(0, 0)] for cut in cuts]
    boxes = [Box([a for a, _ in one], [size for _, size in one]) for one in itertools.product(*parts)]
    kept = draw(st.lists(st.sampled_from(boxes), max_size=len(boxes) + 1)) if draw(st.booleans()) else boxes
    return shape, kept


def fills_once(shape, boxes):
    """The same, by counting at each place."""
    filled = np.zeros(shape, dtype=int)
    for box in boxes:
        filled[tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))] += 1
    return bool((filled == 1).all())


@settings(max_examples=200, deadline=None)
@given(shape_and_boxes())
def test_it_agrees_with_counting(found):
    shape, boxes = found
    assert fills_once(shape, boxes) == (chunk_problem(shape, boxes) is None)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ([4], [Box([0], [5])]),
        ([4], [Box([-1], [4])]),
        ([4], [Box([0], [2.0]), Box([2], [2])]),
        ([4], [Box([0, 0], [4, 1])]),
        ([4], [Box("0", [4])]),
        ([True], [Box([0], [1])]),
        ([2**62, 4], []),
        (None, []),
        ([4], [Box([0], [3]), Box([2], [1])]),
        ([2, 2], [Box([0, 0], [1, 2]), Box([0, 0], [2, 1])]),
        ([], []),
        ([], [Box([], []), Box([], [])]),
    ],
)
def test_what_cannot_be_is_told(shape, boxes):
    assert chunk_problem(shape, boxes)


def test_a_hundred_thousand_pieces_take_a_moment():
    count = 100_000
    columns = [Box([0, place], [8, 1]) for place in range(count)]
    before = time.process_time()
    assert chunk_problem([8, count], columns) is None
    assert chunk_problem([8, count], [*columns[:-1], columns[0]])
    assert time.process_time() - before < 4  # each pair of them would be five thousand million
