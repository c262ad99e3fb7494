"""The tables of the page on several processes are those of the data."""

import importlib.util
import re
from pathlib import Path

import pytest

from forgather.compatibility import read_matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("parallelism_table", ROOT / "scripts" / "parallelism_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_written_out_of_the_data(script):
    text = script.PAGE.read_text()
    assert script.page_with(text, script.tables(read_matrix())) == text, "run scripts/parallelism_table.py"


def test_every_cell_stands_in_a_table(script):
    written = script.tables(read_matrix())
    for cell in read_matrix().cells:
        assert 1 == written.count(f". {script._note(cell)}\n"), cell


def test_the_data_names_axes_and_values_that_exist():
    matrix = read_matrix()
    for cell in matrix.cells:
        assert cell.verdict in ("refused", "setting", "near", "not tested", "none")
        for axis, values in cell.where.items():
            assert set(values) <= set(matrix.axes[axis].values)
        if cell.verdict == "refused":
            assert cell.arguments
    for axis in matrix.axes.values():
        assert axis.decided in ("arguments", "trainer", "model")


def test_no_page_shows_the_place_of_a_value():
    """Messages have places for the values that are set. A page is about any value."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert [] == [page.name for page in pages if re.search(r"\{args\.\w+\}", page.read_text())]
