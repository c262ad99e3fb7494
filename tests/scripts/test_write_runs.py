"""The table of runs: a row shows what its tests recorded, says what is missing, and its tests exist."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from scripts import write_runs
from scripts.reports import function, passed, replaced
from tests.project.workbench import ROOT


def case(test, **recorded):
    file, _, name = test.partition("::")
    found = ElementTree.Element("testcase", classname=file.removesuffix(".py").replace("/", "."), name=name)
    properties = ElementTree.SubElement(found, "properties")
    for key, value in recorded.items():
        ElementTree.SubElement(properties, "property", name=key, value=str(value))
    return found


def line(cases, of):
    (found,) = [line for line in write_runs.table(cases).splitlines() if line.startswith(f"| {of}")]
    return found


def test_every_test_of_a_row_exists_and_is_in_a_piece():
    words = " ".join(write_runs.PIECES.values()).split()
    for row in write_runs.ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}", (ROOT / file).read_text(), re.MULTILINE), test
            assert file in words


def test_every_figure_of_a_row_is_recorded_by_one_of_its_tests():
    for row in write_runs.ROWS:
        texts = "".join((ROOT / test.partition("::")[0]).read_text() for test in row.tests)
        assert [] == [figure.name for figure in row.figures if f'"{figure.name}"' not in texts]


def test_every_file_of_the_tests_of_runs_is_in_a_piece():
    words = " ".join(write_runs.PIECES.values()).split()
    files = {f"{folder}{file.name}" for folder in ("tests/runs/", "tests/ml/runs/") for file in (ROOT / folder).glob("test_*.py")}  # fmt: skip
    assert files <= set(words)
    assert len(words) == len(set(words)) and all((ROOT / word).is_file() for word in words)


def test_a_row_has_the_largest_figure_or_their_sum_and_counts_its_cases():
    cases = [
        case("tests/runs/test_run_status.py::test_the_status_is_right_after_each_kill", kills_right=100),
        *(case(f"tests/runs/test_heartbeat_of_runs.py::test_the_status_says_how_a_run_ended[{n}]") for n in range(9)),
    ]
    assert "| 100 right | 10 | `runs/test_run_status.py`, `runs/test_heartbeat_of_runs.py` |" in line(cases, "Status")
    launch = [
        case("tests/runs/test_launch_files.py::test_the_files_of_a_config_are_valid[a]", valid_files=7),
        case("tests/runs/test_launch_files.py::test_the_files_of_a_config_are_valid[b]", valid_files=7),
        case("tests/ml/runs/test_launch_parsers.py::test_torchrun_and_accelerate_read_what_was_asked_for[a]"),
    ]
    assert "| 14 valid | 3 |" in line(launch, "Printed")


def test_figures_are_divided_by_kind():
    name = "tests/ml/runs/test_anomalies.py::test_a_planted_anomaly_is_found_once_and_in_time"
    cases = [
        case(f"{name}[{kind}-{at}]", steps_after_it_was_planted=late)
        for kind, at, late in (("spike", 1, 0), ("spike", 2, 3), ("plateau", 3, 150))
    ]
    assert "| spike 3; plateau 150 | 3 |" in line(cases, "20 planted")


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_row_whose_tests_did_not_all_run_was_not_measured(left_out):
    cases = [
        case("tests/runs/test_listing_cost.py::test_a_filtered_and_sorted_list[1000]", first_cpu_seconds=0.3),
        case("tests/runs/test_listing_cost.py::test_a_list_imports_no_large_library"),
    ]
    assert "0.30 CPU s" in line(cases, "`fgcli runs`")
    del cases[left_out]
    assert "not measured in this run" in line(cases, "`fgcli runs`")


@pytest.mark.parametrize("outcome", ["failure", "error"])
def test_a_failed_test_is_refused(outcome, tmp_path):
    suite = ElementTree.Element("testsuite")
    suite.append(case("tests/runs/test_sweep.py::test_x[a]"))
    (tmp_path / "sweeps.xml").write_bytes(ElementTree.tostring(suite))
    assert ["test_x"] == [function(one) for one in passed(tmp_path)]
    ElementTree.SubElement(suite[0], outcome)
    (tmp_path / "sweeps.xml").write_bytes(ElementTree.tostring(suite))
    with pytest.raises(SystemExit, match="failed; nothing is written"):
        passed(tmp_path)


def test_the_page_keeps_its_text():
    page = write_runs.PAGE.read_text(encoding="utf-8")
    assert "| x |\n<!-- figures: end -->" in replaced(page, "| x |")
    for row in write_runs.ROWS:
        assert f"| {row.what} | {row.reach} |" in page
