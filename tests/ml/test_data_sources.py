import gzip
import json
import socket

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from forgather.errors import TrainingError
from forgather.ml.data import (
    DataError,
    DataFileError,
    hub_dataset,
    json_lines,
    parquet,
    python_sources,
    split,
    text_files,
)


@pytest.fixture(autouse=True)
def quiet_and_offline(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def write(folder, files):
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def code_of(excinfo):
    assert isinstance(excinfo.value, TrainingError)
    return excinfo.value.code


def test_the_standard_library_is_read_without_tests_and_installed_packages():
    rows = python_sources()
    files = rows["file"][:]
    assert files == sorted(files)
    assert {"json/decoder.py", "argparse.py"} <= set(files)
    assert not [name for name in files if {"site-packages", "test", "tests", "idlelib"} & set(name.split("/"))]
    assert python_sources()._fingerprint == rows._fingerprint


def test_python_files_of_a_folder_come_sorted_with_their_names(tmp_path):
    write(tmp_path, {"b.py": "b = 1\n", "a/z.py": "z = 1\n", "a/no.txt": "no", "empty.py": "", ".hidden/h.py": "h = 1"})
    assert python_sources(tmp_path).to_dict() == {"text": ["z = 1\n", "b = 1\n"], "file": ["a/z.py", "b.py"]}


def test_the_fingerprint_of_python_sources_follows_their_content(tmp_path):
    first = python_sources(write(tmp_path, {"a.py": "a = 1\n"}))._fingerprint
    assert python_sources(write(tmp_path, {"a.py": "a = 1\n"}))._fingerprint == first
    assert python_sources(write(tmp_path, {"a.py": "a = 2\n"}))._fingerprint != first


def test_max_bytes_bounds_the_text_and_takes_whole_files(tmp_path):
    write(tmp_path, {"a.py": "a" * 40, "b.py": "b" * 40, "c.py": "c" * 40})
    assert python_sources(tmp_path, max_bytes=80)["file"][:] == ["a.py", "b.py"]
    with pytest.raises(DataError) as excinfo:
        python_sources(tmp_path, max_bytes=39)
    assert code_of(excinfo) == "FG832"


def test_a_source_that_is_not_in_its_encoding_is_left_out_and_named(tmp_path, caplog):
    write(tmp_path, {"a.py": "a = 1\n", "bad.py": b"x = '\xff'\n"})
    assert python_sources(tmp_path)["file"][:] == ["a.py"]
    assert "bad.py" in caplog.text


def test_text_files_takes_files_folders_and_globs_once_each(tmp_path):
    write(tmp_path, {"a.txt": "one\ntwo", "b.md": "three", "c.log": "four"})
    rows = text_files([tmp_path / "a.txt", tmp_path, str(tmp_path / "*.log")])
    assert rows["text"][:] == ["one\ntwo", "three", "four"]


def test_text_files_by_line_leaves_out_empty_lines_and_says_so(tmp_path, caplog):
    write(tmp_path, {"a.txt": "one\n\ntwo\n"})
    assert text_files(tmp_path / "a.txt", sample_by="line")["text"][:] == ["one", "two"]
    assert "1 of 3 rows hold no text" in caplog.text


def test_json_lines_renames_the_text_column_and_keeps_all_when_asked(tmp_path):
    lines = "\n".join(json.dumps({"body": f"row {i}", "id": i}) for i in range(3))
    file = write(tmp_path, {"a.jsonl": lines}) / "a.jsonl"
    assert json_lines(file, "body").to_dict() == {"text": ["row 0", "row 1", "row 2"]}
    assert json_lines(file, None).column_names == ["body", "id"]


def test_the_answers_of_examples_are_not_read_as_text_without_a_word(tmp_path, caplog):
    file = write(tmp_path, {"a.jsonl": '{"question": "x", "answer": "y"}'}) / "a.jsonl"
    way = "prompt_column: question and completion_column: answer"
    with pytest.raises(DataError, match=f"FG831.*text_column: ~.*tokenize_examples with {way}"):
        json_lines(file)
    assert not caplog.messages
    assert json_lines(file, text_column="answer")["text"][:] == ["y"]
    (said,) = caplog.messages
    assert said.startswith("the rows are examples, and 'answer' alone is read, without 'question': ") and way in said
    file.write_text('{"instruction": "add", "input": "1 2", "output": "3"}\n')
    with pytest.raises(DataError, match="prompt_column: instruction.*join 'input' to the prompt before"):
        json_lines(file)


def test_parquet_reads_its_text_column(tmp_path):
    pa.parquet.write_table(pa.table({"text": ["x", None, "y"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert parquet(tmp_path)["text"][:] == ["x", "y"]


@pytest.mark.parametrize(
    ("code", "files", "read"),
    [
        ("FG830", {}, lambda folder: text_files(folder / "absent.txt")),
        ("FG830", {"a.log": "x"}, lambda folder: text_files(folder)),
        ("FG830", {}, lambda folder: text_files([])),
        ("FG830", {}, lambda folder: text_files(None)),
        ("FG830", {}, lambda folder: text_files(5)),
        ("FG830", {"a.txt": "x"}, lambda folder: text_files("")),
        ("FG830", {"a.txt": "x"}, lambda folder: text_files([folder / "a.txt", ""])),
        ("FG830", {}, lambda folder: python_sources(folder / "absent")),
        ("FG831", {"a.jsonl": '{"txt": "x"}'}, lambda folder: json_lines(folder)),
        ("FG832", {"a.txt": ""}, lambda folder: text_files(folder)),
        ("FG832", {"a.jsonl": '{"text": null}\n{"text": ""}'}, lambda folder: json_lines(folder)),
        ("FG832", {"a.txt": "x"}, lambda folder: python_sources(folder)),
        ("FG833", {"a.jsonl": '{"text": 3}'}, lambda folder: json_lines(folder)),
        ("FG833", {"a.jsonl": '{"text": ["x"]}'}, lambda folder: json_lines(folder)),
        ("FG834", {"a.jsonl": '{"text": "x"}\n{"text": "y",\n'}, lambda folder: json_lines(folder)),
        ("FG834", {"a.txt": b"\xff\xfe\x00abc"}, lambda folder: text_files(folder)),
        ("FG834", {"a.jsonl": b'{"text": "\xff"}'}, lambda folder: json_lines(folder)),
        ("FG834", {"a.parquet": "no parquet"}, lambda folder: parquet(folder)),
    ],
)
def test_bad_input_gets_its_own_code_and_a_hint(tmp_path, code, files, read):
    with pytest.raises((DataError, DataFileError)) as excinfo:
        read(write(tmp_path, files))
    assert code_of(excinfo) == code
    assert excinfo.value.hint
    assert "\n" not in str(excinfo.value)


def test_a_line_that_is_not_json_is_counted_from_1_in_its_own_file(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "x"}\n', "b.jsonl": '{"text": "x"}\n\n' * 3 + "{bad\n"})
    with pytest.raises(DataFileError, match=r"b\.jsonl:7 cannot be read: JSON parse error: "):
        json_lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_a_compressed_file_gets_no_line_number(tmp_path):
    write(tmp_path, {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n{bad\n')})
    with pytest.raises(DataFileError, match=r"a\.jsonl\.gz' cannot be read: JSON parse error: .* in row \d "):
        json_lines(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("read", "argument"),
    [
        (lambda folder: json_lines(folder / "absent.jsonl"), "paths"),
        (lambda folder: json_lines(folder, text_column="txt"), "text_column"),
        (lambda folder: python_sources(folder / "absent"), "folder"),
    ],
)
def test_an_error_tells_which_argument_it_is_about(tmp_path, read, argument):
    with pytest.raises((DataError, DataFileError)) as excinfo:
        read(write(tmp_path, {"a.jsonl": '{"text": "x"}'}))
    assert argument == excinfo.value.argument


def test_reading_files_draws_no_progress_bar(tmp_path, capfd):
    json_lines(write(tmp_path, {"a.jsonl": json.dumps({"text": f"never read before: {tmp_path}"})}))
    assert ("", "") == tuple(capfd.readouterr())


def test_a_misspelt_column_gets_the_nearest_name(tmp_path):
    with pytest.raises(DataError, match="did you mean 'text'"):
        json_lines(write(tmp_path, {"a.jsonl": '{"text": "x"}'}), "txet")


def test_a_hub_data_set_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataFileError) as excinfo:
        hub_dataset("nobody/nothing")
    assert code_of(excinfo) == "FG843"
    assert "nobody/nothing" in excinfo.value.message


def test_split_parts_are_disjoint_complete_and_follow_the_seed():
    rows = Dataset.from_dict({"text": [str(i) for i in range(100)]})
    parts = split(rows, 0.1, seed=3)
    train, held_out = parts["train"]["text"][:], parts["eval"]["text"][:]
    assert (len(train), len(held_out)) == (90, 10)
    assert sorted(train + held_out, key=int) == rows["text"][:]
    assert split(rows, 0.1, seed=3)["eval"]["text"][:] == held_out
    assert split(rows, 0.1, seed=4)["eval"]["text"][:] != held_out


def test_split_gives_each_part_a_row_however_small_the_fraction():
    assert split(Dataset.from_dict({"text": ["a", "b"]}), 1e-6).num_rows == {"train": 1, "eval": 1}


@pytest.mark.parametrize(("rows", "fraction"), [(1, 0.5), (10, 0.0), (10, 1.0), (10, 5)])
def test_a_split_that_cannot_be_made_is_refused(rows, fraction):
    with pytest.raises(ValueError) as excinfo:
        split(Dataset.from_dict({"text": ["x"] * rows}), fraction)
    assert code_of(excinfo) == "FG835"
