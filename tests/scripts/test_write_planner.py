"""The tables of the planner: a row for each cell, what is missing or failed is refused, and the page keeps its text."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from scripts import write_planner
from scripts.reports import replaced
from tests.ml.planner.cells import FULL, QUICK
from tests.ml.planner.model_cells import CELLS

ALL = (*QUICK, *FULL, *CELLS)


def case(name, **recorded):
    found = ElementTree.Element("testcase", name=name)
    properties = ElementTree.SubElement(found, "properties")
    for key, value in recorded.items():
        ElementTree.SubElement(properties, "property", name=key, value=value)
    return found


def peaks(plan=1010):
    return [
        case(f"{write_planner.PEAKS}[{cell.group}-{cell}]", peaks=json.dumps([[1000, plan]] * cell.world_size))
        for cell in ALL
    ]


def test_every_cell_has_a_row_with_its_largest_difference():
    cells, classes, comparison = write_planner.peak_tables({write_planner.PEAKS: peaks()})

    assert len(ALL) == cells.count("| +1.00 % |")
    assert {True} == {line.endswith("| +1.00 % |") for line in classes.splitlines()[2:] if "own" not in line}
    assert re.search(r"nearest to the measurement in (\d+) of \1 cells", comparison)


def test_plans_that_are_no_better_than_the_others_are_not_written():
    with pytest.raises(SystemExit, match="nearest in .* nothing is written"):
        write_planner.peak_tables({write_planner.PEAKS: peaks(plan=10**9)})


@pytest.mark.parametrize("outcome", ["failure", "error"])
def test_a_failed_test_is_refused(outcome, tmp_path):
    suite = ElementTree.Element("testsuite")
    suite.append(case("test_x[a]"))
    ElementTree.SubElement(suite[0], outcome)
    (tmp_path / "large.xml").write_bytes(ElementTree.tostring(suite))

    with pytest.raises(SystemExit, match="failed; nothing is written"):
        write_planner.cases(tmp_path)


def test_a_cell_without_a_report_is_not_measured():
    cells, _, _ = write_planner.peak_tables({write_planner.PEAKS: peaks()[1:]})
    assert f"| {ALL[0]} | {ALL[0].world_size} | not measured in this run |" in cells


def test_a_difference_is_the_largest_of_all_ranks():
    assert -0.5 == write_planner.deviation([(100, 101), (100, 50)])


def test_every_file_of_the_planner_is_in_a_piece():
    words = " ".join(write_planner.PIECES.values()).split()
    files = {
        f"{write_planner.PLANNER}{file.name}" for file in (write_planner.ROOT / write_planner.PLANNER).glob("test_*.py")
    }
    assert files <= set(words)


def test_figures_are_those_that_tests_record():
    taus = [case(f"test_the_order_of_steps_after_a_run[{number}]", **{"figure: tau": "0.9"}) for number in range(2)]
    written = [case("test_each_way_that_is_written", **{"figure: configs": "14"})]
    table = write_planner.figures(
        {"test_the_order_of_steps_after_a_run": taus, "test_each_way_that_is_written": written}
    )
    assert "| 2 | 0: 0.9 tau; 1: 0.9 tau |" in table
    assert "| 1 | 14 configs |" in table


def test_the_page_keeps_its_text():
    page = write_planner.PAGE.read_text(encoding="utf-8")
    assert page == replaced(page, page.split("begin -->\n")[1].split("\n<!-- figures: end")[0])
    assert "| x |\n<!-- figures: end -->" in replaced(page, "| x |")
