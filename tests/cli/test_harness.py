"""lm-evaluation-harness: what is refused, and what is read from a result that lm_eval 0.4.13 has written."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.launch.harness import find_command, read_result, run_harness

RECORDED = Path(__file__).parent / "lm_eval_results.json"


def test_the_numbers_of_a_result_are_named_by_task_metric_and_filter():
    found = read_result(RECORDED)

    assert {
        "said_acc": 0.5,
        "said_acc_stderr": 0.28867513459481287,
        "said_acc_norm": 0.5,
        "said_acc_norm_stderr": 0.28867513459481287,
        "told_exact_match_strict-match": 0.0,
        "told_exact_match_stderr_strict-match": 0.0,
    } == found.metrics
    assert {"version": 1.0, "rows": {"original": 6, "effective": 4}} == found.tasks[
        "said"
    ] and "0.4.13" == found.version


@pytest.mark.parametrize("content", ["{", "[]", '{"results": {"a": 3}}', '{"results": {"a": {"alias": "a"}}}'])
def test_another_file_is_no_result(content, tmp_path):
    (tmp_path / "results_1.json").write_text(content)
    with pytest.raises(ProjectError, match="is not a result|has no numbers") as refused:
        read_result(tmp_path / "results_1.json")
    assert "FG967" == refused.value.code


@pytest.mark.parametrize("script", ["raise SystemExit(3)", "pass"])
def test_a_harness_that_leaves_no_result_is_reported(script, tmp_path):
    with pytest.raises(ProjectError, match="ended with status 3|wrote no result") as refused:
        run_harness([sys.executable, "-c", script], tmp_path, tmp_path, ["--tasks", "a"])
    assert "FG967" == refused.value.code


def test_a_missing_harness_is_told_with_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert 1 == main(["eval", "run", "--lm-eval", "arc_easy"])
    told = capsys.readouterr().err
    assert "[FG966]" in told and "lm_eval is not on the path" in told and "pip install 'lm_eval[hf]'" in told
    with pytest.raises(ProjectError, match="'no/such -x' is not a command"):
        find_command("no/such -x")
    (tmp_path / "lm-eval").write_text("#!/bin/sh\n")
    (tmp_path / "lm-eval").chmod(0o755)
    assert [str(tmp_path / "lm-eval")] == find_command(None)
    assert [str(tmp_path / "lm-eval"), "-x"] == find_command("lm-eval -x")


@pytest.mark.parametrize("option", [["--data", "a.jsonl"], ["--nproc", "2"], ["--generate"], ["--out", "a"]])
def test_options_of_the_runs_own_sets_are_refused(option, capsys):
    assert 1 == main(["eval", "run", "--lm-eval", "arc_easy", *option])
    assert f"[FG968]: {option[0]} and --lm-eval are both given" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--apply-chat-template"], ["--include-path", "."], ["--lm-eval-command", "lm"]])
def test_options_of_the_harness_without_tasks_are_refused(option, capsys):
    assert 1 == main(["eval", "run", *option])
    assert f"[FG968]: {option[0]} is given without --lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lm-eval", ""], "does not name tasks"),
        (["--lm-eval", "arc_easy,"], "does not name tasks"),
        (["--columns", "text=a,text=b"], "names a column for 'text' twice"),
        (["--columns", " =a"], "is not NAME=COLUMN"),
    ],
)
def test_words_that_name_nothing_or_one_thing_twice_are_refused(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", "run", *words])
    assert 2 == ended.value.code and told in capsys.readouterr().err


def copying(folder):
    """Returns a command that writes the recorded result, and the words that it was given."""
    script = folder / "harness.py"
    script.write_text(
        "import json, pathlib, shutil, sys\n"
        "place = pathlib.Path(sys.argv[sys.argv.index('--output_path') + 1], 'hf')\n"
        "place.mkdir(parents=True)\n"
        f"shutil.copy({str(RECORDED)!r}, place / 'results_1.json')\n"
        f"pathlib.Path({str(folder / 'words.json')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        "model = pathlib.Path(sys.argv[sys.argv.index('--model_args') + 1].split('=')[1].split(',')[0])\n"
        f"shutil.copytree(model, {str(folder / 'model')!r})\n"
    )
    return f"{sys.executable} {script}"


def installed():
    """The real harness, if it is on the path: `PATH=lm/bin:$PATH pytest --full tests/cli`."""
    return shutil.which("lm_eval")


def task_file(folder):
    """Writes rows and a task about them; returns the rows."""
    rows = [{"question": f"say {i}", "choices": [f"{i} it is", "no"], "answer": i % 2} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        "task: said",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}",
        "output_type: multiple_choice",
        "test_split: test",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{choices}}"',
        "doc_to_target: answer",
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
        "metadata: {version: 1.0}",
    ]
    (folder / "said.yaml").write_text("\n".join(lines) + "\n")
    return rows
