"""All callbacks together, under this project's trainer and under that of transformers."""

import json
import math

import pytest
import torch

from forgather.ml.callbacks import (
    JsonLogger,
    ProgressCallback,
    RunSummaryCallback,
    SpeedCallback,
    TBLogger,
    TextSampleCallback,
)
from forgather.ml.metrics import read_metrics, read_records
from tests.ml.callback_scene import trainer

pytestmark = pytest.mark.parametrize("kind", ["ours", "transformers"])


def callbacks(folder):
    return [
        SpeedCallback(),
        ProgressCallback(),
        JsonLogger(run_dir=folder),
        TBLogger(run_dir=folder),
        TextSampleCallback(["ab"], max_new_tokens=4, do_sample=True, run_dir=folder),
        RunSummaryCallback("a run", run_dir=folder),
    ]


def test_a_run_leaves_metrics_samples_summary_and_report(kind, tmp_path, capsys, caplog):
    folder = tmp_path / "run"
    trainer(kind, tmp_path / "out", callbacks(folder)).train()

    training = [record for record in read_metrics(folder) if "loss" in record]
    wanted = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "steps_per_second", "memory_bytes"}
    assert [record["step"] for record in training] == [2, 4, 6]
    assert all(wanted <= set(record) for record in training)
    assert all(record["tokens_per_second"] > 0 and record["memory_bytes"] > 0 for record in training)

    evaluations = {record["step"]: record["eval_loss"] for record in read_metrics(folder) if "eval_loss" in record}
    assert list(evaluations) == [3, 6]
    assert [record["step"] for record in read_records(folder / "samples.jsonl")] == [3, 6]

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["max_steps"]) == ("finished", 6, 6)
    assert summary["final"]["eval_loss"] == evaluations[6]
    assert summary["model"]["class"] == "LlamaForCausalLM"

    page = (folder / "report.html").read_text()
    assert "a run" in page
    screen = capsys.readouterr().out
    # The trainer of transformers does not say what its loss is.
    read = f"(perplexity {math.exp(evaluations[6]):.4g}, " if kind == "ours" else "("
    assert f"eval loss  {evaluations[6]:.4f}  {read}logged at step 6)" in screen
    assert f"report     {folder / 'report.html'}" in screen
    assert [record for record in caplog.records if record.name.startswith("forgather.ml.callbacks")] == []


def test_callbacks_change_nothing_about_the_weights(kind, tmp_path):
    def trained(folder, callbacks):
        built = trainer(kind, folder, callbacks)
        built.train()
        return torch.cat([parameter.detach().flatten() for parameter in built.model.parameters()])

    watched = trained(tmp_path / "a", callbacks(tmp_path / "run"))
    assert torch.equal(watched, trained(tmp_path / "b", []))


def test_a_run_that_cannot_write_its_folder_trains_on(kind, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    done = trainer(kind, tmp_path / "out", callbacks(tmp_path / "file" / "run"))
    done.train()
    assert done.state.global_step == 6
    assert "cannot be written" in caplog.text
