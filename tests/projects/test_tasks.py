"""projects/tag, seq2seq, vision and module: trained shrunk, each beats the majority; its metrics are those of its predictions."""

import json
import runpy
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from sklearn.metrics import accuracy_score, f1_score

from forgather.cli.main import main
from forgather.ml.entity_metrics import entities
from tests.matrix import thinned
from tests.project.workbench import ROOT

SMALL = {
    "model_config.hidden_size": 32,
    "model_config.intermediate_size": 48,
    "model_config.num_hidden_layers": 1,
    "trainer_args.num_train_epochs": 3,
    "trainer_args.learning_rate": 0.01,
    "trainer_args.warmup_steps": 0,
    "+trainer_args.use_cpu": "true",
}
T5 = {"model_config.d_model": 32, "model_config.d_ff": 48, "model_config.num_layers": 1, "tokenizer.vocab_size": 280}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Makes a copy of a project, with a few rows of data."""

    def copy(name, rows=None):
        ignored = shutil.ignore_patterns("output_models", "data")
        folder = Path(shutil.copytree(ROOT / "projects" / name, tmp_path / name, ignore=ignored))
        monkeypatch.setenv("FORGATHER_TRUST", str(folder))
        if rows is not None:
            monkeypatch.setattr(sys, "argv", ["make_data.py", str(rows)])
            runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
        return folder

    return copy


def trained(capsys, folder, config, given):
    """Returns the report of an evaluation of the best weights, and its lines, one for each row."""
    out = folder / "out"
    changes = {**given, "trainer_args.output_dir": out}
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    assert 0 == main(["-p", str(folder), "-t", config, "train", *words]), capsys.readouterr().err
    screen = capsys.readouterr().out
    summary = json.loads(next(out.glob("runs/*/summary.json")).read_text())
    assert 0 == main(["eval", str(out), "--checkpoint", "best", "--out", str(folder / "p.jsonl"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [] == found["differs"] and found["metrics"].keys() >= found["logged"].keys()
    # What is reported follows from the task: the same names on the console, in the summary and in the evaluation.
    for name in found["logged"]:
        assert name.replace("_", " ", 1).replace("eval ", "eval ") in screen or name in summary["final"]
        assert name in summary["final"]
    lines = [json.loads(line) for line in (folder / "p.jsonl").read_text().splitlines()]
    return {name.removeprefix("eval_"): value for name, value in found["metrics"].items()}, lines, summary


def majority(labels):
    return Counter(labels).most_common(1)[0][1] / len(labels)


@pytest.mark.parametrize("config", thinned(["names", "words"], lambda config: config == "names"))
def test_words_get_tags(config, project, capsys):
    folder = project("tag", 500)

    metrics, lines, summary = trained(capsys, folder, config, {**SMALL, "tokenizer.vocab_size": 300})

    labels, guesses = ([tag for line in lines for tag in line[name]] for name in ("labels", "predictions"))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert metrics["accuracy"] > majority(labels) + 0.1
    assert not summary.get("has_perplexity") and not any("tokens" in name for name in summary["final"])
    if config == "words":
        assert metrics["f1"] == f1_score(labels, guesses, average="macro", zero_division=0)
        return
    pairs = [[set(entities(line[name])) for name in ("labels", "predictions")] for line in lines]
    correct = sum(len(true & found) for true, found in pairs)
    assert metrics["recall"] == pytest.approx(correct / sum(len(true) for true, _ in pairs))
    assert metrics["precision"] == pytest.approx(correct / sum(len(found) for _, found in pairs))
    assert {"B-CALL", "I-CALL", "O"} <= {*labels}

    # Another file has the classes of the model, in which not all of them need to occur.
    row = {"tokens": ["x", "=", "f", "(", ")"], "tags": ["B-SET", "O", "B-CALL", "O", "O"]}
    (folder / "one.jsonl").write_text(json.dumps(row) + "\n")
    words = ["eval", str(folder / "out"), "--data", str(folder / "one.jsonl"), "--out", str(folder / "o.jsonl")]
    assert 0 == main(words)
    assert row["tags"] == json.loads((folder / "o.jsonl").read_text())["labels"]
    (folder / "one.jsonl").write_text(json.dumps({**row, "tags": ["B-NEW", "O", "O", "O", "O"]}) + "\n")
    assert 1 == main(words)
    assert "jsonl:1: the label" in (told := capsys.readouterr().err) and "[FG876]" in told


def answers_of_a_run_with_an_encoder(capsys, out, lines):
    """`generate` answers a source as the evaluation did; there are no turns to chat in."""
    report = next(out.glob("runs/*/samples.jsonl")).read_text().splitlines()
    assert {"prompt", "reference", "text", "step"} <= json.loads(report[0]).keys()
    sources = [line["prompt"] for line in lines[:3]]
    words = ["generate", str(out), "--checkpoint", "best", "--max-new-tokens", "24", "--json"]
    (out / "some.jsonl").write_text("".join(json.dumps({"source": one, "target": "?"}) + "\n" for one in sources))
    assert 0 == main([*words, "--prompts", str(out / "some.jsonl")])
    found = json.loads(capsys.readouterr().out)
    assert [line["text"] for line in lines[:3]] == [one["answer"] for one in found["answers"]]
    assert ("source", "?") == (found["form"], found["answers"][0]["expected"])
    for refused in (["chat", str(out)], [*words, "--raw", "1"]):
        assert 1 == main(refused)
        told = capsys.readouterr().err
        assert "[FG989]" in told and "'fgcli generate' gives it a text" in told
    assert 1 == main([*words, "--system", "x", "1"]) and "[FG920]" in capsys.readouterr().err


def test_a_decoder_writes_targets(project, capsys):
    folder = project("seq2seq", 500)
    given = {name: value for name, value in SMALL.items() if not name.startswith("model_config")}

    metrics, lines, summary = trained(capsys, folder, "numbers", {**given, **T5})

    assert metrics["exact_match"] == sum(line["text"] == line["reference"] for line in lines) / len(lines)
    assert ("rougeL" in metrics) == (find_spec("rouge_score") is not None)
    assert metrics["loss"] < 3 and 0 < metrics["gen_len"] <= 24 and summary["has_perplexity"]
    assert all(line["prompt"] and line["reference"] for line in lines)
    answers_of_a_run_with_an_encoder(capsys, folder / "out", lines)
    assert 0 == main(["-p", str(folder), "data", "show", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert "".join(text or "" for text in shown["rows"][0]["target_tokens"]).endswith("<|endoftext|>")


@pytest.mark.parametrize("config", thinned(["vit", "cnn", "wine"], lambda config: config == "wine"))
def test_images_and_rows_of_numbers_get_classes(config, project, capsys):
    given = {name: value for name, value in SMALL.items() if config == "vit" or not name.startswith("model_config")}
    folder = project("module" if config == "wine" else "vision")

    metrics, lines, _ = trained(capsys, folder, config, {**given, "trainer_args.num_train_epochs": 4})

    labels, guesses = ([line[name] for line in lines] for name in ("label", "prediction"))
    assert metrics["accuracy"] == accuracy_score(labels, guesses)
    assert metrics["f1"] == f1_score(labels, guesses, average="macro", zero_division=0)
    assert metrics["accuracy"] > majority(labels) + 0.1
