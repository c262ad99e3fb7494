"""The axes of a grid of plans, as text and around the values of a config."""

import pytest

from forgather.planner.grid import Axes, GridCell, parse_axes

PLAN = {"ranks": [{"phases": [{"num_bytes": 80}, {"num_bytes": 100}]}]}


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("2048,4096x1,2", Axes((2048, 4096), (1, 2))),
        ("4096,2048,4096", Axes((2048, 4096), ())),
        ("x4", Axes((), (4,))),
        *(
            (text, None)
            for text in ("", "x", "0x1", "2048x0", "2kx1", "1x2x3", "1,,2", "-1", "1e3", "\u0663", "1" * 10)
        ),
    ],
)
def test_axes_are_read_from_text(text, axes):
    assert parse_axes(text) == axes


def test_what_is_not_given_is_around_the_config():
    assert Axes().around(192, 1) == ((96, 192, 384, 768), (1, 2, 4))
    assert Axes((7,), ()).around(192, 8) == ((7,), (4, 8, 16, 32))


@pytest.mark.parametrize(("limit", "verdict"), [(100, "fits"), (99, "does not fit"), (None, None)])
def test_a_cell_fits_up_to_its_limit(limit, verdict):
    cell = GridCell(length=8, rows=1).planned(PLAN, (), limit)
    assert (100, verdict) == (cell.peak_bytes, cell.verdict)
