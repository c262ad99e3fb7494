"""The table of fine-tuning: it is written from a report in which every test passed, and names tests that exist."""

from xml.etree import ElementTree

import pytest

from scripts import write_finetuning
from scripts.reports import replaced
from tests.project.workbench import ROOT


def report(*cases):
    return ElementTree.fromstring(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def case(file, inner="", name="test_a"):
    return f'<testcase classname="{file.removesuffix(".py").replace("/", ".")}" name="{name}">{inner}</testcase>'


def figure(value, name="difference"):
    return f'<properties><property name="{name}" value="{value}" /></properties>'


PASSED = [case(file) for file in write_finetuning.files()]


def test_every_file_of_the_table_exists_once():
    files = write_finetuning.files()
    assert len(files) == len(set(files)) and all((ROOT / file).is_file() for file in files)


def test_the_table_counts_cases_and_shows_the_worst():
    file = "tests/ml/distributed/test_adapters.py"
    more = [case(file, figure("3e-08")), case(file, figure("2e-9")), case(file, "<skipped />")]
    more.append(case(file, figure("4e-5", "difference in single precision")))
    row = next(line for line in write_finetuning.table(report(*PASSED, *more)).splitlines() if file[6:] in line)
    assert "| 4 (1 skipped) | 3e-08, 4e-05 in single precision |" in row


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ([*PASSED, case("tests/ml/test_adapters.py", "<failure />", "test_b")], "test_b failed; nothing is written"),
        (PASSED[1:], "was not tested; nothing is written"),
    ],
)
def test_a_failed_or_missing_test_writes_no_table(cases, words):
    with pytest.raises(SystemExit, match=words):
        write_finetuning.table(report(*cases))


def test_the_page_has_one_place_for_the_table():
    page = write_finetuning.PAGE.read_text(encoding="utf-8")
    assert "| x |\n<!-- figures: end -->" in replaced(page, "| x |")
