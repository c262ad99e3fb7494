"""Every template that a block can include trains, under both trainers, and says nothing of its own."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)

from forgather.launch import plan_run, prepare_run, run
from forgather.project.project import Project
from tests.matrix import thinned
from tests.project.workbench import TINY_TRAINING

LIBRARY = Path(__file__).parents[2] / "templatelib"
TRAINERS = ["trainers/trainer.yaml", "trainers/hf_trainer.yaml"]

BASE = (
    TINY_TRAINING.replace("'trainers/trainer.yaml'", "trainer_template").replace("'rows.jsonl'", "'data', 'rows.jsonl'")
    + """\
[trainer_callbacks]
    -- include 'callbacks/quiet.yaml'
"""
)
LLAMA_LIKE = "hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2"
MORE = {
    "models/gemma3.yaml": LLAMA_LIKE + ", num_key_value_heads: 2, head_dim: 4",
    "models/gpt2.yaml": "n_embd: 8, n_layer: 1, n_head: 2",
    "models/gpt_neox.yaml": LLAMA_LIKE,
    "models/llama.yaml": LLAMA_LIKE + ", num_key_value_heads: 2",
    "models/mistral.yaml": LLAMA_LIKE,
    "models/phi3.yaml": LLAMA_LIKE + ", num_key_value_heads: 2",
    "models/qwen3.yaml": LLAMA_LIKE + ", num_key_value_heads: 2, head_dim: 4",
    "models/pretrained.yaml": "pretrained_model_name_or_path: {{ joinpath(project_dir, 'saved') }}",
    "tokenizers/pretrained.yaml": "pretrained_model_name_or_path: {{ joinpath(project_dir, 'saved') }}",
    "tokenizers/bpe.yaml": "vocab_size: 260",
    "datasets/json_lines.yaml": "paths: {{ joinpath(project_dir, 'data', 'rows.jsonl') }}",
    "datasets/parquet.yaml": "paths: {{ joinpath(project_dir, 'data') }}",
    "datasets/text_files.yaml": "paths: {{ joinpath(project_dir, 'data') }}, sample_by: line",
    "datasets/python_sources.yaml": "folder: {{ joinpath(project_dir, 'data') }}",
    "datasets/chat.yaml": "paths: {{ joinpath(project_dir, 'chats.jsonl') }}",
    "datasets/mixture.yaml": "datasets: {a: !call:forgather.ml.data:chats [{{ joinpath(project_dir, 'chats.jsonl') }}]}",
    "datasets/instructions.yaml": "paths: {{ joinpath(project_dir, 'instructions.jsonl') }}",
}
# The tokenizer of `BASE` is trained on a column of text.
CHAT_TOKENIZER = """\
[tokenizer]
    -- include 'tokenizers/pretrained.yaml'
    pretrained_model_name_or_path: {{ joinpath(project_dir, 'saved') }}
    chat_template: alpaca
"""
FURTHER_BLOCKS = dict.fromkeys(
    ("datasets/chat.yaml", "datasets/instructions.yaml", "datasets/mixture.yaml"), CHAT_TOKENIZER
)
CHATS = {
    "chats.jsonl": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "instructions.jsonl": {"instruction": "Add", "input": "1 and 1", "output": "2"},
}
NEEDS_A_NETWORK = {"datasets/hub.yaml"}
# Templates for rows with labels, which `test_a_classifier_trains` uses together.
OF_CLASSIFICATION = {"datasets/labelled.yaml", "models/classifier.yaml", "models/pretrained_classifier.yaml"}
# Templates for rows of other tasks, which tests/projects/test_tasks.py and tests/ml/test_seq2seq.py train on.
OF_TASKS = {
    *("datasets/images.yaml", "datasets/source_target.yaml", "datasets/tagged.yaml"),
    *("models/bert.yaml", "models/seq2seq.yaml", "models/pretrained_seq2seq.yaml", "models/t5.yaml", "models/vit.yaml"),
}
LABELS = {"classification": ["a", "b"], "multi_label": [["a", "b"], []], "regression": [0.5, 1]}
# Templates for rows of answers, which tests/projects/test_preferences.py trains on, and for prompts of TRL's trainers.
OF_PREFERENCES = {
    "datasets/prompts.yaml",
    "datasets/preferences.yaml",
    "datasets/feedback.yaml",
    "collators/preferences.yaml",
}
# It needs a folder that a command wrote: tests/cli/test_data_prepare.py makes one, and reads its rows by the template.
OF_A_COMMAND = {"datasets/prepared.yaml"}
FRAGMENTS = {
    str(file.relative_to(LIBRARY)): found[1]
    for file in sorted(LIBRARY.rglob("*.yaml"))
    if (found := re.match(r"## For \[(\w+)\]", file.read_text()))
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("project")
    rows = [{"text": f"row {number} of a text that is long enough to be cut into blocks"} for number in range(12)]
    (folder / "data").mkdir()
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "rows.txt").write_text("".join(row["text"] + "\n" for row in rows))
    for name, chat in CHATS.items():
        (folder / name).write_text(f"{json.dumps(chat)}\n" * 12)
    for number, row in enumerate(rows):
        (folder / "data" / f"module_{number}.py").write_text(f"TEXT = {row['text']!r}\n")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / "rows.parquet")
    datasets.enable_progress_bars()
    (folder / "templates" / "configs").mkdir(parents=True)
    (folder / "meta.yaml").write_text("name: library\n")
    (folder / "templates" / "project.yaml").write_text(BASE)
    trained(folder, "")
    (folder / "out").rename(folder / "saved")
    return folder


def trained(folder, text, trainer=TRAINERS[0], whole=False):
    (folder / "templates" / "configs" / "a.yaml").write_text(("" if whole else "-- extends 'project.yaml'\n") + text)
    plan = plan_run(Project("a", folder, trainer_template=trainer))
    run_dir = prepare_run(plan, ["fgcli", "train"])
    outcome = run(plan, run_dir)
    assert (0, str(folder / "out")) == (outcome.status, outcome.model_dir)
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def is_quick(fragment, trainer):
    """transformers.Trainer is handed a model and rows: one template of each shows that it takes them."""
    same = fragment.startswith(("models/", "datasets/", "tokenizers/"))
    return not same or "hf_trainer" not in trainer or fragment in ("models/llama.yaml", "datasets/text_files.yaml")


@pytest.mark.parametrize(
    ("fragment", "trainer"),
    thinned(
        itertools.product(
            sorted(FRAGMENTS.keys() - NEEDS_A_NETWORK - OF_PREFERENCES - OF_CLASSIFICATION - OF_TASKS - OF_A_COMMAND),
            TRAINERS,
        ),
        is_quick,
    ),
)
def test_a_template_of_the_library_trains(project, capfd, fragment, trainer):
    lines = "".join(f"    {line}\n" for line in re.split(r", (?=\w+:)", MORE.get(fragment, "")))
    lines = f"[{FRAGMENTS[fragment]}]\n    -- include '{fragment}'\n{lines}{FURTHER_BLOCKS.get(fragment, '')}"
    records = trained(project, lines, trainer)
    assert [1] == [record["step"] for record in records if "loss" in record]
    assert "" == capfd.readouterr().err


CLASSIFIER = """\
-- extends 'tasks/classification.yaml'
[config_metadata]
    -- set ns.task = '{task}'
    -- set ns.output_dir = joinpath(project_dir, 'out')
[raw_dataset]
    == super()
    paths: {{{{ joinpath(project_dir, '{task}.jsonl') }}}}
[tokenizer]
    -- include 'tokenizers/pretrained.yaml'
    pretrained_model_name_or_path: {{{{ joinpath(project_dir, 'saved') }}}}
[model_config]
    -- include 'models/llama.yaml'
    hidden_size: 8
    intermediate_size: 16
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
{model}[trainer_args]
    == super()
    max_steps: 1
    eval_strategy: steps
    eval_steps: 1
"""
PRETRAINED = """\
[model]
    -- include 'models/pretrained_classifier.yaml'
    pretrained_model_name_or_path: {{ joinpath(project_dir, 'saved') }}
"""


@pytest.mark.parametrize(
    ("task", "model"),
    thinned(
        itertools.product(LABELS, ["new", "pretrained"]),
        lambda task, model: (task == "classification") == (model == "pretrained"),
    ),
)
def test_a_classifier_trains(project, capfd, task, model):
    rows = [{"text": f"row {number}", "label": LABELS[task][number % 2]} for number in range(40)]
    (project / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = CLASSIFIER.format(task=task, model=PRETRAINED if model == "pretrained" else "")
    records = trained(project, text, whole=True)
    metrics = {"eval_mae", "eval_r2"} if task == "regression" else {"eval_accuracy", "eval_f1"}
    assert metrics <= {name for record in records for name in record}
    assert "" == capfd.readouterr().err
    config = json.loads((project / "out" / "config.json").read_text())
    names = ["value_0"] if task == "regression" else ["a", "b"]
    assert names == [config["id2label"][str(number)] for number in range(len(names))]
    assert config["problem_type"].startswith({"classification": "single"}.get(task, task[:5]))


def test_a_saved_model_is_read_and_writes_text(project):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project / "saved")
    model = AutoModelForCausalLM.from_pretrained(project / "saved")
    prompt = tokenizer("row", return_tensors="pt")
    assert prompt.input_ids.shape[1] + 3 == model.generate(**prompt, max_new_tokens=3, min_new_tokens=3).shape[1]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_building_a_trainer_from_python_writes_nothing(project, tmp_path, monkeypatch, trainer):
    (project / "templates" / "configs" / "b.yaml").write_text(
        "-- extends 'project.yaml'\n[trainer_callbacks]\n    -- include 'callbacks/default.yaml'\n"
    )
    monkeypatch.chdir(tmp_path)
    output_dir = tmp_path / "out"
    Project("b", project, trainer_template=trainer, output_dir=str(output_dir))("trainer")
    assert [] == [entry.name for entry in tmp_path.iterdir() if entry != output_dir]
    assert [] == list(output_dir.rglob("*"))
