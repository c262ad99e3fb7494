import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.ml.metrics import LineWriter, MetricsError, as_json, read_metrics, resume_lines


def written(file, *records):
    writer = LineWriter(file)
    for record in records:
        writer.write(record)
    writer.close()
    return file


def test_records_come_back_in_order(tmp_path):
    records = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "note": 'ä "quoted"\nline'}]
    assert read_metrics(written(tmp_path / "new" / "metrics.jsonl", *records)) == records
    assert read_metrics(tmp_path / "new") == records


def test_a_file_torn_at_any_byte_reads_as_its_whole_lines(tmp_path):
    file = written(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2, "loss": 1.5})
    content = file.read_bytes()
    begin = content.index(b"\n") + 1
    for cut in range(begin, len(content) - 1):
        file.write_bytes(content[:cut])
        assert read_metrics(file) == [{"step": 1}]
    file.write_bytes(content[:-1])
    assert read_metrics(file) == [{"step": 1}, {"step": 2, "loss": 1.5}]


def test_an_incomplete_line_is_removed_before_the_next_is_added(tmp_path):
    file = tmp_path / "metrics.jsonl"
    content = written(file, {"step": 1}, {"step": 2}).read_bytes()
    for cut in range(len(content) + 1):
        file.write_bytes(content[:cut])
        before = read_metrics(file)
        assert read_metrics(written(file, {"step": 3})) == [*before, {"step": 3}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(MetricsError) as excinfo:
        read_metrics(file)
    assert (excinfo.value.code, excinfo.value.span.line) == ("FG851", 2)


@pytest.mark.parametrize(("value", "text"), [(math.nan, '"nan"'), (math.inf, '"inf"'), (-math.inf, '"-inf"')])
def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path, value, text):
    file = written(tmp_path / "metrics.jsonl", {"loss": value})
    assert file.read_text() == f'{{"loss": {text}}}\n'
    assert repr(read_metrics(file)[0]["loss"]) == repr(value)


def test_tensors_and_numpy_numbers_are_written_as_numbers():
    record = {
        "a": torch.tensor(1.5),
        "b": np.float32(0.5),
        "c": np.int64(3),
        "d": torch.tensor([1, 2]),
        "e": (True, None),
    }
    assert as_json(record) == {"a": 1.5, "b": 0.5, "c": 3, "d": [1, 2], "e": [True, None]}


plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = (
    plain_values | st.lists(plain_values, max_size=3) | st.dictionaries(st.text(max_size=5), plain_values, max_size=3)
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_every_record_is_one_line_of_strict_json(record):
    def refuse(constant):
        raise AssertionError(constant)

    line = json.dumps(as_json(record))
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_one_warning_and_no_run(caplog):
    written("/dev/full", {"step": 1}, {"step": 2})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "/dev/full cannot be written" in caplog.text


def of_run(name, *steps):
    return [{"step": step, "loss": step / 2, "name": name} for step in steps]


def test_a_resumed_run_leaves_the_lines_of_others_in_its_file(tmp_path):
    file = tmp_path / "all.jsonl"
    note = {"note": "a larger batch from here on"}
    between = [record for step in range(1, 5) for record in of_run("a", step) + of_run("b", step)]
    written(file, *of_run("c", 1, 2), *between[:4], note, *between[4:])
    begin = resume_lines(file, of_run("a", 1, 2), None, name="a")
    expected = [*of_run("c", 1, 2), *between[:4], note, *of_run("b", 3, 4)]
    assert expected == read_metrics(file)
    assert begin == resume_lines(file, of_run("a", 1, 2, 3), begin, name="a")
    assert [*expected, *of_run("a", 3)] == read_metrics(file)


@pytest.mark.parametrize("lines", [b'{"step": 3, "lo', b"\0\0\0\n", b'{"step": 3, "loss": 9.0}\n{"step": 4}\n'])
def test_a_resumed_run_cuts_its_own_later_lines_and_lines_that_are_not_records(tmp_path, lines):
    file = tmp_path / "metrics.jsonl"
    written(file, {"step": 1}, {"step": 2})
    before = file.read_bytes()
    file.write_bytes(before + lines)
    resume_lines(file, [{"step": 1}, {"step": 2}], 0)
    assert before == file.read_bytes()
