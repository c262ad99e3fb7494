"""`fgcli eval`: the weights that a run has saved, evaluated without training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from forgather.cli.main import main
from forgather.ml.trainer.saved_evaluation import evaluate_saved
from forgather.project.rerun import rerun_meta
from forgather.project.run_reader import open_run
from tests.project.workbench import TINY_TRAINING, make_project

CONFIG = (
    TINY_TRAINING.replace("max_steps: 2", "max_steps: 4")
    + """\
    eval_strategy: steps
    eval_steps: 2
    save_strategy: steps
    save_steps: 2
    metric_for_best_model: {{ metric | default('even_accuracy') }}
[sample_prompts]
    []
[eval_dataset]
    even: !singleton:forgather.ml.data:tokenize
        dataset: !call:getitem [*dataset, eval]
        tokenizer: *tokenizer
        block_size: 16
    odd: !singleton:forgather.ml.data:tokenize
        dataset: !call:getitem [*dataset, train]
        tokenizer: *tokenizer
        block_size: 24
[compute_metrics]
    !singleton:forgather.ml.label_metrics:LabelMetrics
    task: causal_lm
    functions: {accuracy: !partial:sklearn.metrics:accuracy_score []}
"""
)
ROWS = "".join(json.dumps({"text": f"row {i} of the file, and {i * i} more"}) + "\n" for i in range(40))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project whose one run has trained four steps, with checkpoints at two and four."""
    folder = make_project(tmp_path_factory.mktemp("trained") / "bench", {"templates/configs/a.yaml": CONFIG})
    (folder / "rows.jsonl").write_text(ROWS)
    assert 0 == main(["-p", str(folder), "-t", "a", "train"])
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of the output folder of the run; the working folder is a new one."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained / "out", tmp_path / "out"))


def files_in(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def evaluated(capsys, *options):
    capsys.readouterr()
    status = main(["eval", *map(str, options), "--json"])
    told = capsys.readouterr()
    return (json.loads(told.out) if status == 0 else told.err.replace("\n  help:", ";")), status


def logged(folder, step):
    (run,) = (folder / "runs").glob("2*")
    lines = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["step"] == step and "eval_even_loss" in line]
    return {name: value for name, value in found.items() if name.startswith("eval_")}


def repeatable(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith(("_runtime", "_per_second"))}


def test_each_checkpoint_gives_the_bits_that_the_run_logged_at_its_step(folder, capsys):
    before = files_in(folder)

    found = {step: evaluated(capsys, folder, "--checkpoint", step)[0] for step in (2, 4)}

    assert {2: logged(folder, 2), 4: logged(folder, 4)} == {
        step: repeatable(it["metrics"]) for step, it in found.items()
    }
    assert logged(folder, 2) != logged(folder, 4)
    assert [[], []] == [it["differs"] for it in found.values()]
    new = {name: text for name, text in files_in(folder).items() if name not in before}
    assert all(Path(name).match("runs/*/eval-*Z*.json") for name in new) and len(new) == 2
    assert before == {name: text for name, text in files_in(folder).items() if name in before}
    stored = json.loads(Path(found[2]["file"]).read_text())
    assert logged(folder, 2) == repeatable(stored["metrics"])
    assert (str(folder / "checkpoint-2"), 2, 32) == (
        stored["checkpoint"]["folder"],
        stored["checkpoint"]["step"],
        len(stored["checkpoint"]["xxh3"]),
    )
    assert {"python", "torch", "forgather"} <= stored["versions"].keys()
    assert ["fgcli", "eval"] == stored["command"][:2]


def test_a_run_and_a_checkpoint_can_be_named_and_the_model_of_the_end_is_the_last_checkpoint(folder, capsys):
    (run,) = (folder / "runs").glob("2*")

    by_run, by_checkpoint, model = (
        evaluated(capsys, *words)[0]
        for words in ([run, "--checkpoint", "latest"], [folder / "checkpoint-4"], [run, "--checkpoint", "model"])
    )

    assert (4, 4, None) == (by_run["step"], by_checkpoint["step"], model["step"])
    assert repeatable(by_run["metrics"]) == repeatable(by_checkpoint["metrics"]) == repeatable(model["metrics"])


def test_weights_that_are_not_those_of_the_checkpoint_give_other_metrics(folder, capsys, monkeypatch):
    monkeypatch.setattr("forgather.ml.strategy.model_strategy.ModelStrategy.restore", lambda self, saved: None)

    found, _ = evaluated(capsys, folder)

    assert {"eval_even_loss", "eval_odd_loss"} <= set(found["differs"])


def test_a_table_has_a_column_for_each_set(folder, capsys):
    assert 0 == main(["eval", str(folder)])

    told = capsys.readouterr()
    names = [line.split()[0] for line in told.out.splitlines()]
    assert ["even", "loss", "perplexity", "accuracy", "rows/s"] == names
    assert "by the run at step 4: all " in told.err and "metrics are equal" in told.err


def test_one_set_keeps_its_name_and_the_rows_of_a_file_get_none(folder, capsys, trained):
    (folder.parent / "few.jsonl").write_text(ROWS)
    (folder.parent / "few.csv").write_text(
        "words\n" + "".join(f'"{json.loads(row)["text"]}"\n' for row in ROWS.splitlines())
    )

    one, _ = evaluated(capsys, folder, "--data", "odd")
    lines, _ = evaluated(capsys, folder, "--data", "few.jsonl")
    table, _ = evaluated(capsys, folder, "--data", "few.csv", "--columns", "text=words")

    expected = {name: value for name, value in logged(folder, 4).items() if name.startswith("eval_odd")}
    assert expected == repeatable(one["metrics"])
    assert {"eval_loss", "eval_accuracy"} == repeatable(lines["metrics"]).keys()
    assert repeatable(lines["metrics"]) == repeatable(table["metrics"]) and {} == lines["logged"]
    assert lines["metrics"]["eval_loss"] != one["metrics"]["eval_odd_loss"]


def test_an_error_about_a_file_names_the_option_that_gave_it(folder, capsys):
    Path("other.csv").write_text("words\na\nb\n")
    found, status = evaluated(capsys, folder, "--data", "other.csv")
    assert 1 == status and "[FG831]" in found and "--> option --data" in found
    assert "--columns text=COLUMN names the column; there are: words" in found


def test_predictions_are_the_tokens_from_which_the_accuracy_is_computed(folder, capsys):
    found, _ = evaluated(capsys, folder, "--out", "predictions.jsonl")

    lines = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    for name in ("even", "odd"):
        own = [line for line in lines if line["set"] == name]
        hits = np.concatenate([np.equal(line["labels"], line["predictions"]) for line in own])
        assert hits.mean() == pytest.approx(found["metrics"][f"eval_{name}_accuracy"], abs=1e-12)
        assert [*range(len(own))] == [line["row"] for line in own]


def test_the_best_checkpoint_is_the_one_that_the_run_names(folder, capsys):
    state = json.loads((folder / "checkpoint-4/trainer_state.json").read_text())

    assert state["best_global_step"] == evaluated(capsys, folder, "--checkpoint", "best")[0]["step"]
    shutil.rmtree(folder / f"checkpoint-{state['best_global_step']}")
    told, status = evaluated(capsys, folder, "--checkpoint", "best")
    assert 1 == status and "[FG485]" in told


def test_a_damaged_checkpoint_is_skipped_and_refused_by_its_step(folder, capsys):
    weights = folder / "checkpoint-4/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")

    assert 2 == evaluated(capsys, folder)[0]["step"]
    assert "[FG603]" in evaluated(capsys, folder, "--checkpoint", 4)[0]


def test_an_evaluation_that_is_refused_leaves_no_file_for_predictions(folder, capsys):
    assert "[FG486]" in evaluated(capsys, folder, "--out", "new.jsonl", "--data", "evn")[0]
    assert not Path("new.jsonl").exists()
    Path("old.jsonl").write_text("of another evaluation")
    assert "[FG486]" in evaluated(capsys, folder, "--out", "old.jsonl", "--data", "evn")[0]
    assert "of another evaluation" == Path("old.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "[FG437]"),
        (["out", "--checkpoint", "3"], "[FG485]: the run"),
        (["out", "--checkpoint", "newest"], "has no checkpoint 'newest'; it has checkpoints of steps 2, 4"),
        (["out/checkpoint-2", "--checkpoint", "4"], "[FG485]: two checkpoints"),
        (["out", "--data", "evn"], "[FG486]: the run has no evaluation set 'evn'; did you mean 'even'?"),
        (["out", "--data", "rows.parquet"], "[FG487]: 'rows.parquet' is not a file of rows"),
        (["out", "--data", "rows.jsonl"], "[FG487]: the data file 'rows.jsonl' does not exist"),
        (["out", "--out", "no/file"], "[FG418]"),
        (["out", "--columns", "text=a"], "[FG487]: columns are named, and no file"),
        (["out", "--data", "rows.json", "--columns", "label=a"], "[FG487]: the rows of the run have no column 'label'"),
    ],
)
def test_bad_input_is_one_sentence(words, told, folder, capsys):
    Path("rows.json").write_text(ROWS)
    found, status = evaluated(capsys, *words)

    assert 1 == status and told in found.replace("; help:", ";") and "Traceback" not in found


def test_a_changed_tokenizer_is_refused(folder, capsys, trained):
    rows = trained / "rows.jsonl"
    try:
        rows.write_text(ROWS.replace("row", "column"))
        found, status = evaluated(capsys, folder)
    finally:
        rows.write_text(ROWS)

    assert 1 == status and "[FG613]: the tokenizer is not that of the saved weights" in found


def test_a_model_whose_weights_are_missing_is_refused(folder, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), folder / "model.safetensors", {"format": "pt"})

    found, status = evaluated(capsys, folder, "--checkpoint", "model")
    assert 1 == status and "[FG489]" in found


def test_code_of_the_project_is_run_only_if_it_is_trusted(folder, capsys, trained, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", "")
    (trained / "mine.py").write_text("def Metrics(task, functions):\n    raise RuntimeError\n")
    (run,) = (folder / "runs").glob("2*")
    graph = (run / "graph.yaml").read_text()
    (run / "graph.yaml").write_text(graph.replace("forgather.ml.label_metrics:LabelMetrics", "mine.py:Metrics"))

    found, status = evaluated(capsys, run)
    assert 1 == status and "[FG440]" in found


def test_only_our_trainers_are_evaluated(folder, capsys):
    (run,) = (folder / "runs").glob("2*")
    graph = (run / "graph.yaml").read_text()
    (run / "graph.yaml").write_text(graph.replace("forgather.ml:Trainer", "forgather.ml:HFTrainer"))

    found, status = evaluated(capsys, run)
    assert 1 == status and "[FG488]" in found and "HFTrainer" in found
    with pytest.raises(Exception, match="cannot evaluate"):
        evaluate_saved(torch.nn.Linear(1, 1), "nowhere", is_checkpoint=True)


def test_the_sources_of_then_are_those_of_a_rerun(folder):
    (run,) = (folder / "runs").glob("2*")

    assert Path(open_run(str(run)).project_dir) == Path(rerun_meta(open_run(str(run))).project_dir)
