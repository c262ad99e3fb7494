"""The table of performance: its tests exist, record its figures, and the page has what the script writes."""

import json

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
    rows = [
        *(row.what for row in write_performance.ROWS),
        write_performance.PYTHON[0],
        *(what for what, _ in write_performance.ON_GPU),
    ]
    assert rows == [line.split(" | ")[0].removeprefix("| ") for line in written[2:]]
    assert "not measured" in write_performance.table([]).splitlines()[2]


def test_figures_of_a_gpu_fill_their_rows_and_those_of_a_cpu_do_not(tmp_path):
    def cells(ours, theirs):
        return {
            "1B, 2048, plain, forgather": {"tokens_per_second": ours, "mfu": 0.5, "peak_bytes": 60},
            "1B, 2048, plain, transformers": {"tokens_per_second": theirs, "mfu": 0.4, "peak_bytes": 120},
            "8B, 8192, plain, forgather": {"tokens_per_second": ours, "mfu": 0.3, "peak_bytes": 60},
            "8B, 8192, plain, transformers": {"out of memory": True},
        }

    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"compared on CPU, tiny": cells(9, 1)}))
    assert all("not measured" in row for row in write_performance.gpu_rows(file))
    file.write_text(json.dumps({"compared on NVIDIA H200": cells(120, 100), "compared on CPU, tiny": cells(9, 1)}))
    found = [row.split(" | ")[2:4] for row in write_performance.gpu_rows(file)]
    assert [["1.20x on one NVIDIA H200", "1"], ["not measured", "| |"]] == [found[0], found[1]]
    assert [["50% on one NVIDIA H200", "1"], ["0.50x on one NVIDIA H200", "1"]] == found[2:]


def test_the_row_of_pythons_time_names_each_strategy(tmp_path):
    file = tmp_path / "bench.json"
    row = {"strategy": "DDP", "by_hand": 1.0, "error": 0.03, "load": 0.5}
    rows = [{**row, "metrics": False, "value": 0.1}, {**row, "metrics": True, "value": 0.2}, {"what": "another"}]
    file.write_text(json.dumps(rows))
    assert "| DDP 0.10 ± 0.03, 0.20 ± 0.03 with metrics (by hand 1.0); 0.5 processes a core ran |" in (
        write_performance.python_row(file)
    )
    assert "not measured" in write_performance.python_row(tmp_path / "none.json")
