"""What `fgcli check` says about the shards of streamed rows is what the run chooses."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from forgather.ml.data import json_lines, parquet
from forgather.ml.data.row_stream import _PART_BYTES
from forgather.ml.data.virtual_streams import reads_per_row
from forgather.project.check import check_project
from forgather.project.checks.stream_shards import PART_BYTES
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
main: !call:forgather.ml:AccelTrainer
  model: !call:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
  train_dataset: !call:forgather.ml.data:tokenize
    dataset: !call:forgather.ml.data:{reader}
      paths: {paths}
      streaming: true{more}
    tokenizer: !call:forgather.ml.data:load_tokenizer [tokenizer]
  args: !call:forgather.ml:AccelTrainingArguments
    output_dir: out
    max_steps: 1{settings}
meta:
  nproc_per_node: {processes}
"""


def notes(folder, reader, paths, processes, *, settings="", more=""):
    text = CONFIG.format(reader=reader, paths=paths, processes=processes, settings=settings, more=more)
    project = Project("a.yaml", str(make_project(folder / "bench", {"templates/configs/a.yaml": text})))
    return [one for one in check_project(project).findings if one.code == "FG796"]


def write_groups(file, groups):
    table = pyarrow.table({"text": ["a", "b"] * groups})
    pyarrow.parquet.write_table(table, file, row_group_size=2)


def test_a_note_says_what_the_run_would_do(tmp_path):
    for number, groups in enumerate((1, 5)):
        write_groups(tmp_path / f"part{number}.parquet", groups)
    text = json.dumps({"text": "x" * 1000}) + "\n"
    (tmp_path / "small.jsonl").write_text(text)
    (tmp_path / "large.jsonl").write_text(text * (3 * PART_BYTES // len(text)))
    assert PART_BYTES == _PART_BYTES
    seen = set()
    for reader, name in ((parquet, "part*.parquet"), (parquet, "part0.parquet"), (json_lines, "*.jsonl")):
        paths = str(tmp_path / name)
        for replicas in (1, 2, 3, 4, 6, 7):
            chosen = reader(paths, streaming=True).usual_streams(replicas)
            found = notes(tmp_path, reader.__name__, paths, replicas)
            assert (reads_per_row(chosen, replicas) > 1) == bool(found), (name, replicas, chosen)
            seen.add(bool(found))
    assert {True, False} == seen


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ("", "", "'fgcli data prepare --num-shards 4' writes a shard for each replica; the data has 1 shard"),
        ("\n    dispatch_rows: false", "", "the data has 1 shard"),
        ("\n    data_streams: 0", "", "leave data_streams: 0 out"),
        ("\n    tensor_parallel_size: 4", "", None),
        ("\n    train_sampling_strategy: sequential", "\n      buffer_size: 0", None),
        ("", "\n      buffer_size: 0", None),
    ],
)
def test_the_note_names_the_way_out(tmp_path, settings, more, said):
    write_groups(tmp_path / "a.parquet", 1)
    found = notes(tmp_path, "parquet", str(tmp_path / "a.parquet"), 4, settings=settings, more=more)
    assert ([] if said is None else [True]) == [said in one.hint for one in found]
    assert all(one.severity == "note" and one.span.line == 5 for one in found)
    is_dealt = "dispatch_rows" not in settings and "data_streams: 0" not in settings
    once = "once on each machine" if is_dealt else "read by several replicas"
    assert all(once in one.message for one in found)


def test_streams_that_the_user_counts_must_divide_among_the_replicas(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * (5 * PART_BYTES // 14))
    for number, said in ((4, []), (8, []), (6, ["set data_streams: 4, in a new run"])):
        settings = f"\n    data_streams: {number}"
        found = notes(tmp_path, "json_lines", str(tmp_path / "a.jsonl"), 4, settings=settings)
        assert said == [one.hint for one in found]
    # Little data has few streams only where the user does not count them.
    (tmp_path / "small.jsonl").write_text('{"text": "a"}\n' * 100)
    for number, is_noted in ((4, False), (8, False), (6, True)):
        settings = f"\n    data_streams: {number}"
        assert reads_per_row(number, 4) == 1 + is_noted
        found = notes(tmp_path, "json_lines", str(tmp_path / "small.jsonl"), 4, settings=settings)
        assert is_noted == bool(found)
    # What is elsewhere is not known.
    assert [] == notes(tmp_path, "json_lines", str(tmp_path / "none-*.jsonl"), 4)
