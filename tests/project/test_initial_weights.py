"""A note recommends weights that each process computes, where one process would make a model that does not fit here."""

import pytest

from forgather.project.check import check_project
from forgather.project.checks import initial_weights
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
main: !call:forgather.ml:{trainer}Trainer
  model: !call:forgather.ml.models:{maker}
    config: !call:transformers:{family}Config
      hidden_size: 1024
      intermediate_size: 4096
      num_hidden_layers: 10
      num_attention_heads: 16
      vocab_size: 1000{more}
  train_dataset: [{{input_ids: [1]}}]
  args: !call:forgather.ml:{trainer}TrainingArguments
    output_dir: out
    max_steps: 1{settings}
"""
# One block: 4 x 1024 x 1024 for the attention, 3 x 1024 x 4096 for the rest, and two norms; then embeddings, head, norm.
PARAMETERS = 10 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 1000 * 1024 + 1024
FSDP = "\n    fsdp: full_shard"
SMALLER = PARAMETERS - 2 * 1000 * 1024


def notes(folder, free, monkeypatch, *, trainer="Accel", family="Llama", maker="from_config", settings=FSDP, more=""):
    monkeypatch.setattr(initial_weights, "available_bytes", lambda: free)
    parts = {"trainer": trainer, "family": family, "maker": maker, "settings": settings, "more": more}
    project = make_project(folder / "bench", {"templates/configs/a.yaml": CONFIG.format(**parts)})
    found = check_project(Project("a.yaml", str(project))).findings
    assert not [one for one in found if one.severity.value == "error"]
    return [one for one in found if one.code == "FG733"]


@pytest.mark.parametrize(
    ("needed", "given"),
    {
        "sharded": (4 * PARAMETERS, {}),
        "tensor parallel": (4 * PARAMETERS, {"settings": "\n    tensor_parallel_size: 2"}),
        "a pipeline": (4 * PARAMETERS, {"trainer": "Pipeline", "settings": ""}),
        "in bfloat16": (2 * PARAMETERS, {"more": "\n    dtype: bfloat16"}),
        "with another vocabulary": (
            4 * SMALLER,
            {"more": "\n    tokenizer: !call:forgather.ml.data:load_tokenizer [t]"},
        ),
    }.values(),
    ids=lambda value: "",
)
def test_the_note_comes_exactly_where_the_model_is_larger(needed, given, tmp_path, monkeypatch):
    assert [] == notes(tmp_path / "fits", needed, monkeypatch, **given)
    (note,) = notes(tmp_path / "lacks", needed - 1, monkeypatch, **given)
    assert note.message.startswith("one process makes the whole model, which takes at least ")
    assert note.path == "main.args" and "initial_weights: counter" in note.hint


@pytest.mark.parametrize(
    "given",
    [
        {"settings": FSDP + "\n    initial_weights: counter"},
        {"settings": ""},
        {"maker": "seq2seq_from_config"},
        {"family": "GPT2"},
    ],
    ids=["counter", "copies", "another maker", "another family"],
)
def test_it_does_not_come_for(given, tmp_path, monkeypatch):
    assert [] == notes(tmp_path, 1, monkeypatch, **given)


def test_a_machine_that_reports_no_memory_gets_no_note(tmp_path, monkeypatch):
    assert [] == notes(tmp_path, None, monkeypatch)
