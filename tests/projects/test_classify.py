"""projects/classify: trained shrunk, it beats the majority; its metrics are those of scikit-learn on all rows."""

import json
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score

from forgather.cli.main import main
from tests.matrix import thinned
from tests.project.workbench import ROOT, fgcli

SMALL = {
    "model_config.hidden_size": 32,
    "model_config.intermediate_size": 64,
    "model_config.num_hidden_layers": 1,
    "tokenizer.vocab_size": 300,
    "trainer_args.num_train_epochs": 2,
    "trainer_args.learning_rate": 0.02,
    "+trainer_args.use_cpu": "true",
    "train_dataset.max_length": 24,
    "eval_dataset.max_length": 24,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with 500 rows of data."""
    ignored = shutil.ignore_patterns("output_models", "data")
    folder = Path(
        shutil.copytree(ROOT / "projects/classify", tmp_path_factory.mktemp("p") / "classify", ignore=ignored)
    )
    before = sys.argv
    sys.argv = ["make_data.py", "500"]
    try:
        runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


def words(folder, config, out, *more):
    given = {**SMALL, "trainer_args.output_dir": out}
    changes = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    return ["-p", str(folder), "-t", config, "train", *changes, *more]


def predictions(capsys, out, *more):
    capsys.readouterr()
    assert 0 == main(["eval", str(out), "--out", f"{out}.jsonl", "--json", *more])
    lines = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
    return json.loads(capsys.readouterr().out), lines


def test_one_class_for_each_row_beats_the_majority_and_a_file_of_rows_has_the_same_classes(project, tmp_path, capsys):
    out = tmp_path / "kind"
    assert 0 == main(words(project, "kind", out))

    found, lines = predictions(capsys, out)

    labels, guesses = ([line[name] for line in lines] for name in ("label", "prediction"))
    assert accuracy_score(labels, guesses) == found["metrics"]["eval_accuracy"]
    assert f1_score(labels, guesses, average="macro", zero_division=0) == found["metrics"]["eval_f1"]
    majority = Counter(labels).most_common(1)[0][1] / len(labels)
    assert found["metrics"]["eval_accuracy"] > majority + 0.1
    assert [] == found["differs"] and {"eval_loss", "eval_accuracy", "eval_f1"} == found["logged"].keys()
    summary = json.loads((Path(found["run"]) / "summary.json").read_text())
    assert not summary.get("has_perplexity") and not any("tokens" in name for name in summary["final"])
    config = json.loads((out / "config.json").read_text())
    names = [config["id2label"][str(number)] for number in range(len(config["id2label"]))]
    assert "import" in names and sorted(names) == names

    # Only two of the classes occur in the file: their numbers are still those of the model.
    rows = [json.loads(line) for line in (project / "data/kind.jsonl").read_text().splitlines()]
    two = [row for row in rows if row["label"] in ("import", "return")][:20]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in two))
    _, of_file = predictions(capsys, out, "--data", str(tmp_path / "two.jsonl"))
    assert [row["label"] for row in two] == [line["label"] for line in of_file]
    (tmp_path / "two.jsonl").write_text(json.dumps({"text": "a", "label": "poem"}) + "\n")
    assert 1 == main(["eval", str(out), "--data", str(tmp_path / "two.jsonl")])
    assert "jsonl:1: the label" in (told := capsys.readouterr().err) and "[FG876]" in told


@pytest.mark.parametrize(("config",), thinned(["parts", "size"], lambda config: False))
def test_several_classes_and_numbers_have_the_metrics_of_scikit_learn(config, project, tmp_path, capsys):
    assert 0 == main(words(project, config, tmp_path / config))

    found, lines = predictions(capsys, tmp_path / config)

    labels, guesses = ([line[name] for line in lines] for name in ("label", "prediction"))
    if config == "size":
        assert mean_absolute_error(labels, guesses) == pytest.approx(found["metrics"]["eval_mae"], rel=1e-6)
        assert r2_score(labels, guesses) == pytest.approx(found["metrics"]["eval_r2"], rel=1e-5)
        assert found["metrics"]["eval_mae"] < np.abs(np.array(labels) - np.median(labels)).mean()
        return
    names = sorted({name for them in labels + guesses for name in them})
    truth, guess = (np.array([[name in them for name in names] for them in sets]) for sets in (labels, guesses))
    assert accuracy_score(truth, guess) == found["metrics"]["eval_accuracy"]
    majority = Counter(map(tuple, labels)).most_common(1)[0][1] / len(labels)
    assert found["metrics"]["eval_accuracy"] > majority


@pytest.mark.parametrize(("processes",), thinned([1, 2, 4], lambda processes: False))
def test_metrics_are_those_of_scikit_learn_in_several_processes(processes, project, tmp_path, capsys):
    # The trainer of the project runs in one process; this one in any number of them.
    (project / "templates/configs/spread.yaml").write_text(
        "-- set trainer_template = 'trainers/accel_trainer.yaml'\n-- extends 'configs/kind.yaml'\n"
        "[config_metadata]\n    == super()\n    -- set ns.nproc_per_node = 1\n"
    )
    out = tmp_path / "kind"
    assert 0 == main(words(project, "spread", out))
    one, lines = predictions(capsys, out)

    done = fgcli("eval", str(out), "--nproc", str(processes), "--out", "p.jsonl", "--json", cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    several = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == [line["label"] for line in several]
    labels, guesses = ([line[name] for line in several] for name in ("label", "prediction"))
    assert accuracy_score(labels, guesses) == found["metrics"]["eval_accuracy"] == one["metrics"]["eval_accuracy"]
    assert f1_score(labels, guesses, average="macro", zero_division=0) == found["metrics"]["eval_f1"]
    assert found["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], rel=1e-6)
    assert processes == json.loads(Path(found["file"]).read_text())["processes"]
