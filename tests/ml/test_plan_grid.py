"""`fgcli plan --grid` and `--longest` on configs that are built: cells equal plain plans of the config with their values."""

import json

import pytest

from forgather.cli.main import main
from forgather.cli.plan_grid import grid_lines
from tests.project.workbench import TINY_TRAINING, make_project

RATES = {"memory_gb_per_second": 1, "dense_tflops": {"fp32": 0.01}, "links_gb_per_second": {"network": 1}}
ALONE = ("--set", "trainer_args.per_device_eval_batch_size=1")
DEVICE = ("--hardware", "fast.json")
UPDATE = ("--set", "trainer_args.global_batch_size=6", "--set", "trainer_args.gradient_accumulation_steps=~")
REASON = "global_batch_size is 6, which is not a multiple of 4 rows (per_device_train_batch_size) = 4"
OWN = """\
-- extends 'configs/tiny.yaml'
[train_dataset]
    !call:own.py:rows []
[eval_dataset]
    ~
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    two = (
        "-- extends 'configs/tiny.yaml'\n[train_dataset]\n    !call:forgather.ml.data:tokenize_seq2seq\n"
        "    dataset: !call:getitem [*dataset, train]\n    tokenizer: *tokenizer\n"
    )
    files = {
        "rows.jsonl": rows,
        "own.py": "def rows():\n    return [{'input_ids': [5] * 8}] * 8\n",
        "templates/configs/tiny.yaml": TINY_TRAINING,
        "templates/configs/own.yaml": OWN,
        "templates/configs/two.yaml": two,
    }
    folder = make_project(tmp_path / "bench", files)
    (folder / "fast.json").write_text(json.dumps({"title": "our box", "memory_mib": 4096, **RATES}))
    monkeypatch.chdir(folder)
    return folder


def planned(capsys, *words):
    assert 0 == main(["-t", "tiny", "plan", "--json", *words])
    return json.loads(capsys.readouterr().out)


def peak_of(found):
    return max(phase["num_bytes"] for phase in found["ranks"][0]["phases"])


def is_the_plan_of_its_values(cell, found, capsys, *words):
    settings = (
        *(f"{part}_dataset.block_size={cell['length']}" for part in ("train", "eval")),
        f"trainer_args.per_device_train_batch_size={cell['rows']}",
    )
    own = planned(capsys, *DEVICE, *ALONE, *words, *(word for one in settings for word in ("--set", one)))
    (fit,) = own["fit"]["ranks"]
    assert peak_of(own) == cell["peak_bytes"] != peak_of(found)
    assert own["time"]["step"]["tokens_per_second"] == cell["tokens_per_second"]
    assert [fit[name] for name in ("verdict", "least", "most")] == [cell[name] for name in ("verdict", "least", "most")]


def test_a_cell_is_the_plan_of_the_config_with_its_values(bench, capsys):
    found = planned(capsys, *DEVICE, *ALONE, "--grid", "32x3,4", *UPDATE)
    planned_cell, refused = found["grid"]["cells"]
    is_the_plan_of_its_values(planned_cell, found, capsys, *UPDATE)
    assert (None, REASON) == (refused["peak_bytes"], refused["reason"])
    assert grid_lines(found["grid"])[-1] == f"  not planned: 32 tokens x 4 rows: {REASON}"


@pytest.mark.matrix
def test_a_cell_of_more_rows_than_the_data_has_is_marked(bench, capsys):
    found = planned(capsys, *DEVICE, "--grid", "16,32x500")
    rows = found["most_rows"]
    notes = [cell["note"] for cell in found["grid"]["cells"]]
    refused = "for each replica: 'fgcli train' refuses a micro-batch of 500 rows (FG804)"
    # Longer blocks of a text are fewer.
    assert [f"the training data has {number} rows {refused}" for number in (rows, rows // 2)] == notes
    assert grid_lines(found["grid"])[-1] == f"  note: 32 tokens x 500 rows: {notes[1]}"


def test_a_global_batch_with_its_micro_batches_fits_one_number_of_rows(bench, capsys):
    both = ("--set", "trainer_args.global_batch_size=4", "--set", "trainer_args.gradient_accumulation_steps=2")
    first, second = planned(capsys, *DEVICE, *ALONE, "--grid", "16x1,2", *both)["grid"]["cells"]
    assert (None, True) == (first["peak_bytes"], second["peak_bytes"] > 0)
    assert "global_batch_size is 4" in first["reason"]


@pytest.mark.matrix
def test_cells_around_the_config_are_plans_of_their_values(bench, capsys):
    positions = ("--set", "model_config.max_position_embeddings=32")
    found = planned(capsys, *DEVICE, *ALONE, *positions, "--grid", "--longest", "8")
    cells = found["grid"]["cells"]
    assert [(length, rows) for length in (8, 16, 32, 64) for rows in (1, 2, 4, 8)] == [
        (cell["length"], cell["rows"]) for cell in cells
    ]
    for cell in cells:
        if cell["length"] == 64:
            assert cell["reason"] == "max_position_embeddings of the model is 32"
        elif (cell["length"], cell["rows"]) != (16, 2):
            is_the_plan_of_its_values(cell, found, capsys)
    longest = found["longest"]
    assert (32, 32, True) == (longest["size"], longest["max_positions"], longest["is_bound_by_positions"])


@pytest.mark.matrix
def test_a_limit_is_on_the_bytes_of_tensors(bench, capsys):
    words = (*ALONE, "--grid", "16x1,8", "--longest", "16", "--memory", "300KiB")
    assert 0 == main(["-t", "tiny", "plan", *words])
    told = capsys.readouterr().out
    (row,) = [line.split("KiB ") for line in told.splitlines() if line.split()[:1] == ["16"]]
    assert ["fits", "does not fit"] == [part.rpartition("  ")[0].strip() or part for part in row[1:]]
    assert "longest rows within 300.0 KiB with 2 rows of a micro-batch: 32 tokens (block_size), " in told

    assert 0 == main(["-t", "tiny", "plan", *words, "-o", "plan.html"])
    page = (bench / "plan.html").read_text()
    assert '<table class="lengths">' in page
    assert '<td class="bad" title="does not fit">' in page
    assert "longest rows within 300.0 KiB" in page


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ("own", ["--grid"], "no argument of train_dataset (own.py:rows) sets the length of its rows in tokens"),
        ("two", ["--longest", "--memory", "1GB"], "its rows have two lengths, max_source_length and max_target_length"),
        ("tiny", ["--longest"], "--longest needs a limit of memory"),
        ("tiny", ["--grid", "--set", "train_dataset.block_size=16.5"], "block_size is not a plain number"),
        (
            "tiny",
            ["--grid", "--set", "trainer_args.accumulate_grad_batches={0: 2, 1: 1}"],
            "accumulate_grad_batches changes the number of micro-batches during the run",
        ),
        ("tiny", ["--find", "--grid"], "--grid cannot be combined with --find"),
        ("tiny", ["--find", "--tokens", "1e9", "--hardware", "l4"], "--tokens cannot be combined with --find"),
        ("tiny", ["--by", "memory"], "--by needs --find"),
        ("tiny", ["--write", "best"], "--write needs --find"),
    ],
)
def test_what_has_no_lengths_is_refused_by_name(bench, capsys, monkeypatch, config, words, message):
    monkeypatch.setenv("FORGATHER_TRUST", str(bench))
    # Before anything is traced.
    monkeypatch.setattr("forgather.cli.commands.plan.traced_plan", None)
    assert 1 == main(["-t", config, "plan", "--no-check", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "2kx1"], "'2kx1' is not LENGTHSxROWS, as in 2048,4096x1,2,4"),
        (["--grid", ",".join(map(str, range(1, 102)))], "has 101 cells, and 100 are planned at most"),
        (["--longest", "0"], "'0' is not a number of tokens above 0"),
    ],
)
def test_malformed_axes_are_refused(bench, capsys, words, message):
    with pytest.raises(SystemExit):
        main(["-t", "tiny", "plan", *words])
    assert message in capsys.readouterr().err
