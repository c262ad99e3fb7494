"""`fgcli eval` of fine-tuned models: adapters, preferences, conversations and classifiers with an adapter.

Each run evaluates the rows of a file of its own. So the metrics that it logged are known for these rows, and `--data`
with a copy of that file has to give the same bits.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer import answers
from forgather.ml.trainer.data_fingerprint import row_digest
from forgather.project.eval_data import rows_of_file
from forgather.project.project import Project
from tests.cli.test_eval import evaluated, repeatable
from tests.cli.test_harness import copying, installed, task_file
from tests.matrix import thinned
from tests.project.workbench import TINY_TRAINING, make_project

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:Model has `tie_word_embeddings")
TEXTS = [{"text": f"row {i} of the file, and {i * i} more"} for i in range(20)]
PAIRS = [{"prompt": f"say {i}", "chosen": f"{i} it is, {i * i}", "rejected": f"no {i % 3}"} for i in range(9)]
FEEDBACK = [{"prompt": f"say {i}", "completion": f"{i} it is, {i * i}", "label": i % 2 == 0} for i in range(9)]
CHATS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} it is, {i * i}"}]}
    for i in range(9)
]
LABELLED = [{"text": f"row {i} {'good' if i % 3 else 'bad'}", "label": "good" if i % 3 else "bad"} for i in range(12)]
FILES = {"texts": TEXTS, "pairs": PAIRS, "feedback": FEEDBACK, "chats": CHATS, "labelled": LABELLED}

ROWS_OF = {
    "texts": ("tokenize", "json_lines {paths: FILE}", "block_size: 16"),
    "pairs": ("tokenize_preferences", "json_lines {paths: FILE, text_column: ~}", "max_length: 64"),
    "feedback": ("tokenize_feedback", "json_lines {paths: FILE, text_column: ~}", "max_length: 64"),
    "chats": ("tokenize_chats", "chats {paths: FILE}", "max_length: 64"),
    "rows of chats": (
        "tokenize_chats",
        "as_chats [!call:forgather.ml.data:json_lines {paths: FILE, text_column: ~}]",
        "",
    ),
    "labelled": ("tokenize_labelled", "labelled_rows {paths: FILE}", "max_length: 64"),
}
LORA = "[adapter]\n    -- include 'adapters/lora.yaml'\n    r: 4\n"
LOSS = "[loss_fn]\n    !singleton:forgather.ml.preference_losses:{}@loss_fn []\n"
CLASSIFIER = """\
[model]
    -- include 'models/pretrained_classifier.yaml'
    pretrained_model_name_or_path: {{ joinpath(project_dir, 'base') }}
    labels: [bad, good]
[compute_metrics]
    !singleton:forgather.ml.label_metrics:LabelMetrics@compute_metrics
    task: classification
    functions: {accuracy: !partial:sklearn.metrics:accuracy_score []}
"""
ANSWERS = """\
[compute_metrics]
    !singleton:forgather.ml.text_metrics:TextMetrics@compute_metrics
    tokenizer: *tokenizer
    functions: [!partial:forgather.ml.text_metrics:exact_match [], !partial:texts.py:length []]
"""
BASE = TINY_TRAINING.replace("'out'", "'base'").replace("rows.jsonl", "texts.jsonl") + "[sample_prompts]\n    []\n"


def config(name, kind, *blocks):
    file = f"{kind.split()[-1]}.jsonl"
    function, reader, line = ROWS_OF[kind]
    head = (
        TINY_TRAINING.replace("'out'", f"'{name}'").replace("rows.jsonl", file).replace("max_steps: 2", "max_steps: 4")
    )
    head = head.replace("[tokenizer]\n    == super()\n    vocab_size: 260\n", "").replace(
        "[config_metadata]\n",
        "[config_metadata]\n    -- set ns.base_model = joinpath(project_dir, 'base')\n"
        "    -- set ns.chat_template = 'alpaca'\n",
    )
    settings = "eval_strategy: steps|eval_steps: 2|save_strategy: steps|save_steps: 2|learning_rate: 5e-2".split("|")
    settings += SETTINGS.get(name, [])
    collator = "preferences" if kind in ("pairs", "feedback") else "rows" if kind == "labelled" else "padded"
    place = "{{ joinpath(project_dir, '" + file + "') }}"
    sets = "".join(
        f"[{part}_dataset]\n    !singleton:forgather.ml.data:{function}@{part}_dataset\n"
        f"    dataset: !call:forgather.ml.data:{reader.replace('FILE', place)}\n"
        f"    tokenizer: *tokenizer\n    {line}\n"
        for part in ("train", "eval")
    )
    return (
        head
        + "".join(f"    {setting}\n" for setting in settings)
        + f"[sample_prompts]\n    []\n{sets}[data_collator]\n    -- include 'collators/{collator}.yaml'\n"
        + "".join(blocks)
    )


def lora(*lines):
    return LORA + "".join(f"    {line}\n" for line in lines)


RUNS = {
    "lora": ("texts", lora()),
    "dora": ("texts", lora("use_dora: true")),
    "pissa": ("texts", lora("init_lora_weights: pissa")),
    "biases": ("texts", lora("bias: lora_only")),
    "head": ("texts", lora("modules_to_save: [lm_head]")),
    "embeddings": ("texts", lora("modules_to_save: [embed_tokens]")),
    "tokens": ("texts", lora("trainable_token_indices: [3, 5]")),
    "dpo": ("pairs", LOSS.format("DPOLoss")),
    "dpo with lora": ("pairs", LOSS.format("DPOLoss"), lora()),
    "orpo with lora": ("pairs", LOSS.format("ORPOLoss"), lora()),
    "kto": ("feedback", LOSS.format("KTOLoss")),
    "kto with lora": ("feedback", LOSS.format("KTOLoss"), lora()),
    "chats": ("chats",),
    "chats with lora": ("chats", lora()),
    "rows of chats": ("rows of chats",),
    "classifier": ("labelled", CLASSIFIER),
    "classifier with lora": ("labelled", CLASSIFIER, lora()),
    "answers": ("chats", ANSWERS),
}
SETTINGS = {"answers": ["predict_with_generate: true", "generation_max_new_tokens: 5"]}
QUICK = ("tokens", "dpo with lora", "answers")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    configs = {name.replace(" ", "_"): config(name.replace(" ", "_"), *run) for name, run in RUNS.items()}
    files = {f"templates/configs/{name}.yaml": text for name, text in {"base": BASE, **configs}.items()}
    folder = make_project(tmp_path_factory.mktemp("tuned") / "bench", files)
    (folder / "texts.py").write_text(
        "def length(predictions, references):\n    return {'length': sum(map(len, predictions))}\n"
    )
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(folder, "base")
    return folder


def train(project, name):
    with pytest.MonkeyPatch().context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(project / "cache"))
        assert 0 == main(["-p", str(project), "-t", name.replace(" ", "_"), "train"])


@pytest.fixture
def trained(project, tmp_path, monkeypatch):
    """A function that trains a config once, and returns its output folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    monkeypatch.chdir(tmp_path)

    def of(name):
        folder = project / name.replace(" ", "_")
        if not folder.exists():
            train(project, name)
        return folder

    return of


def logged(folder, step):
    (run,) = (folder / "runs").glob("2*")
    lines = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["step"] == step and "eval_loss" in line]
    return {name: value for name, value in found.items() if name.startswith("eval_")}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", thinned([*RUNS], lambda name: name in QUICK))
def test_saved_weights_give_the_bits_that_the_run_logged(trained, tmp_path, name, capsys):
    folder, rows = trained(name), FILES[RUNS[name][0].split()[-1]]
    Path("same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-2]))

    first, last, model, same, other = (
        evaluated(capsys, folder, *words)[0]
        for words in (
            ["--checkpoint", 2], ["--checkpoint", 4], ["--checkpoint", "model"], ["--data", "same.jsonl"],
            ["--data", "other.jsonl"],
        )
    )  # fmt: skip

    assert logged(folder, 2) == repeatable(first["metrics"]) and [] == first["differs"]
    assert logged(folder, 4) == repeatable(last["metrics"]) == repeatable(model["metrics"])
    assert logged(folder, 4) == repeatable(same["metrics"])
    # The negative controls: other weights and other rows have other losses.
    assert 3 == len({found["metrics"]["eval_loss"] for found in (first, last, other)})


def test_an_adapter_whose_base_or_settings_changed_is_refused(trained, project, capsys):
    folder = trained("tokens")
    config = folder / "adapter_config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(before), "lora_alpha": 99}))
        found, status = evaluated(capsys, folder, "--checkpoint", "model")
        assert 1 == status and "[FG613]" in found and "lora_alpha is 8, and was 99" in found
    finally:
        config.write_text(before)
    with changed(project / "base/model.safetensors"):
        for word in ("4", "model"):
            found, status = evaluated(capsys, folder, "--checkpoint", word)
            assert 1 == status and "[FG906]" in found
    (folder / "adapter_model.safetensors").rename(folder / "kept")
    weights = load_file(folder / "kept")
    save_file(dict(list(weights.items())[1:]), folder / "adapter_model.safetensors", {"format": "pt"})
    found, status = evaluated(capsys, folder, "--checkpoint", "model")
    (folder / "kept").rename(folder / "adapter_model.safetensors")
    assert 1 == status and "[FG489]" in found and next(iter(weights)) in found


class changed:  # noqa: N801 - a context manager that reads as one
    """Changes the weights in a file by a tenth, and brings the earlier ones back."""

    def __init__(self, file):
        self.file, self.before = file, file.read_bytes()

    def __enter__(self):
        weights = load_file(self.file)
        save_file({name: value * 1.1 for name, value in weights.items()}, self.file, {"format": "pt"})

    def __exit__(self, *error):
        self.file.write_bytes(self.before)


def test_a_file_is_read_as_the_evaluation_set_and_not_as_another_one(tmp_path):
    chats = "!call:forgather.ml.data:chats"
    bodies = {
        "apart": f"""
[dataset]
    train: {chats} {{paths: a.jsonl, system: Train}}
    eval: {chats} {{paths: b.jsonl, system: Eval}}
""",
        "alike": f"""
[raw_dataset]
    -- include 'datasets/mixture.yaml'
    datasets:
        a: {chats} {{paths: a.jsonl, bad_rows: drop, system: Both}}
        b: {chats} {{paths: b.jsonl, before_input: "\\n\\n", system: Both}}
""",
    }
    bodies["unlike"] = bodies["alike"].replace("drop, system: Both", "drop")
    texts = {f"templates/configs/{name}.yaml": f"-- extends 'tasks/chat.yaml'\n{body}" for name, body in bodies.items()}
    folder = make_project(tmp_path / "sets", texts)
    file = folder / "new.jsonl"
    file.write_text("{}\n")

    def rows(name):
        return rows_of_file(Project(name, str(folder)).graph, str(file), None).overrides[0][1]

    assert '"system": "Eval"' in rows("apart") and '"system": "Both"' in rows("alike")
    with pytest.raises(ProjectError, match="joins data sets that are read differently") as error:
        rows("unlike")
    assert "FG487" == error.value.code


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("dpo", "prompt=q,chosen=good", {"prompt_column": '"q"', "chosen_column": '"good"'}),
        ("kto", "label=ok", {"label_column": '"ok"'}),
        ("classifier", "text=t,label=l", {}),
        ("rows of chats", "", {}),
    ],
)
def test_columns_are_named_where_they_are_read(name, columns, expected, tmp_path):
    kind, text = RUNS[name][0], config(name, *RUNS[name])
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})
    file = folder / f"{kind}.jsonl"
    file.write_text("{}\n")
    wanted = dict(pair.split("=") for pair in columns.split(",") if pair)
    rows, *others = rows_of_file(Project("a", str(folder)).graph, str(file), ["bad", "good"], wanted).overrides
    assert expected == {path.removeprefix("main.eval_dataset."): value for path, value in others}
    assert (name == "classifier") == ('"text_column": "t", "label_column": "l"' in rows[1])
    with pytest.raises(ProjectError, match="have no column 'words'"):
        rows_of_file(Project("a", str(folder)).graph, str(file), ["bad", "good"], {"words": "a"})


def test_checkpoints_and_models_name_their_reference(trained, capsys):
    folder = trained("dpo with lora")
    file = folder / "reference.json"
    before = file.read_text()
    # Checkpoints of weights alone have a manifest, too.
    assert read_manifest(folder / "checkpoint-4").facts["data"]["reference"] == row_digest(json.loads(before)["digest"])
    file.write_text(json.dumps({"digest": "of another reference"}))
    found, status = evaluated(capsys, folder, "--checkpoint", "model")
    file.write_text(before)
    assert 1 == status and "[FG950]: the run compared its model with another reference" in found


@pytest.mark.matrix
def test_another_beginning_of_a_run_is_another_reference(trained, project, capsys):
    folder = trained("dpo")
    with changed(project / "base/model.safetensors"):
        for words in (["--checkpoint", "4"], ["--checkpoint", "model"], ["--data", str(project / "pairs.jsonl")]):
            found, status = evaluated(capsys, folder, *words)
            assert 1 == status and "[FG950]: the run compared its model with another reference" in found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chats", "[FG487]: 'rows.csv' is a CSV file"),
        ("rows of chats", "[FG890]: row 0 of the data set: 'messages' must be a list"),
    ],
)
def test_conversations_in_a_table_are_refused(trained, name, told, capsys):
    Path("rows.csv").write_text("messages\nhello\n")
    found, status = evaluated(capsys, trained(name), "--data", "rows.csv")
    assert 1 == status and told in found


def test_answers_of_a_run_are_generated_and_written(trained, capsys, monkeypatch):
    folder = trained("answers")
    asked, generate = [], answers.batch_answers
    monkeypatch.setattr(
        answers, "batch_answers", lambda *args, **named: asked.extend(args[1]) or generate(*args, **named)
    )
    found = evaluated(capsys, folder, "--out", "all.jsonl")[0]
    assert len(CHATS) == len(asked)  # each prompt is answered once, for the metrics and for the file
    lines = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["content"] for row in CHATS] == [line["reference"] for line in lines]
    assert all(f"say {number}\n" in line["prompt"] for number, line in enumerate(lines))
    assert sum(len(line["text"]) for line in lines) == found["metrics"]["eval_length"]
    (run,) = (folder / "runs").glob("2*")
    shown = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert lines[:8] == [{name: row[name] for name in lines[0]} for row in shown if row["step"] == 4]
    table = (run / "report.html").read_text()
    assert "<th>prompt</th><th>reference</th><th>answer</th>" in table and "eval exact match" in table

    other = evaluated(capsys, folder, "--limit", 2, "--max-new-tokens", 3, "--out", "few.jsonl")[0]
    few = [json.loads(line) for line in Path("few.jsonl").read_text().splitlines()]
    assert 2 == len(few) and other["metrics"]["eval_gen_len"] <= 3 < found["metrics"]["eval_gen_len"]


@pytest.mark.matrix
def test_a_run_that_generated_nothing_is_asked_for_answers(trained, capsys):
    found = evaluated(capsys, trained("chats with lora"), "--generate", "--max-new-tokens", 3)[0]
    assert 3 >= found["metrics"]["eval_gen_len"] > 0 and 0 == found["metrics"]["eval_exact_match"]
    assert "eval_loss" in found["logged"] and [] == found["differs"]


def test_the_harness_gets_the_exported_model_and_its_result_is_stored(trained, capsys, tmp_path):
    folder = trained("tokens")
    words = ["--lm-eval", "said,told", "--limit", 4, "--include-path", ".", "--apply-chat-template"]

    found, status = evaluated(capsys, folder, *words, "--lm-eval-command", copying(tmp_path))

    assert 0 == status, found
    assert 0.5 == found["metrics"]["said_acc"]
    stored = json.loads(Path(found["file"]).read_text())
    assert stored["metrics"] == found["metrics"] and "0.4.13" == stored["lm_eval"]["version"]
    assert str(next((folder / "runs").glob("2*"))) == found["run"] and 4 == stored["checkpoint"]["step"]
    given = json.loads((tmp_path / "words.json").read_text())
    assert ["--tasks", "said,told", "--include_path", ".", "--limit", "4", "--apply_chat_template"] == given[-7:]
    # The adapter is merged: the folder is that of a whole model.
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert not any("lora" in name for name in written) and (tmp_path / "model" / "config.json").is_file()


@pytest.mark.matrix
@pytest.mark.skipif(installed() is None, reason="lm_eval is not on the path")
def test_the_real_harness_computes_what_the_model_says(trained, capsys, tmp_path):
    """Opt-in: with lm_eval 0.4 of another environment on the path."""
    folder, rows = trained("chats with lora"), task_file(tmp_path)
    found, status = evaluated(capsys, folder, "--lm-eval", "said", "--include-path", str(tmp_path))
    assert 0 == status, found
    assert 0 == main(["export", str(folder), str(tmp_path / "merged"), "--merge"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()

    def likelihood(question, answer):
        before, whole = (tokenizer(text)["input_ids"] for text in (question, f"{question} {answer}"))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        return sum(float(logits[place - 1, whole[place]]) for place in range(len(before), len(whole)))

    chosen = [max((0, 1), key=lambda one: likelihood(row["question"], row["choices"][one])) for row in rows]
    right = sum(one == row["answer"] for one, row in zip(chosen, rows, strict=True))
    assert right / len(rows) == found["metrics"]["said_acc"]
