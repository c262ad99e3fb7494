"""The table of performance: its tests exist, record its figures, and the page has what the script writes."""

import pytest

from scripts import write_performance
from scripts.reports import BEGIN, END
from tests.project.workbench import ROOT


@pytest.mark.parametrize("row", write_performance.ROWS, ids=lambda row: row.what[:30])
def test_every_row_has_a_test_that_records_its_figures(row):
    for test in row.tests:
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text()
        assert test in " ".join(write_performance.PIECES.values()).split()
    texts = "".join((ROOT / test.partition("::")[0]).read_text() for test in row.tests)
    # Reads are recorded by the kind of the step.
    assert [] == [figure.name for figure in row.figures if figure.name.partition("_")[2] not in texts]


def test_the_page_has_a_line_for_each_row_and_says_what_is_not_measured():
    written = write_performance.PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
    rows = [*(row.what for row in write_performance.ROWS), *(what for what, _ in write_performance.NOT_MEASURED)]
    assert rows == [line.split(" | ")[0].removeprefix("| ") for line in written[2:]]
    assert "not measured" in write_performance.table([]).splitlines()[2]
