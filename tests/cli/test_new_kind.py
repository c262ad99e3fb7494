"""Projects for fine-tuning: `fgcli new project --kind` makes one that trains as it stands, on its rows or on the user's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.project.starters import KINDS
from tests.matrix import thinned
from tests.project.workbench import ROOT, fgcli

pytest.importorskip("torch")
pytest.importorskip("sklearn")

SMALL = {
    "model_config.hidden_size": 32,
    "model_config.intermediate_size": 64,
    "model_config.num_hidden_layers": 1,
    "tokenizer.vocab_size": 300,
    "+trainer_args.use_cpu": "true",
}
QUICK = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
T5 = {"model_config.d_model": 32, "model_config.num_layers": 1, "+trainer_args.use_cpu": "true"}
QUICK_T5 = [word for name, value in T5.items() for word in ("--set", f"{name}={value}")]
OF_KIND = dict.fromkeys(KINDS, QUICK) | {"seq2seq": QUICK_T5}
WORDS = "zero one two three four five six seven eight nine ten".split()
CHATS = {
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "instruction": {"instruction": "Greet.", "input": "", "output": "Hello"},
    "prompt": {"question": "Hi", "answer": "Hello"},
}
TEXTS = {"prompt": "one two", "chosen": " three", "rejected": " one"}
MESSAGES = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "chosen": [{"role": "assistant", "content": "Hello"}],
    "rejected": [{"role": "assistant", "content": "No"}],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def out(capsys):
    """Runs a command that succeeds, and returns what it prints."""

    def run(*words):
        capsys.readouterr()
        assert 0 == main(list(words)), capsys.readouterr().err
        return capsys.readouterr().out

    return run


def rows_file(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def config_lines(folder):
    text = (folder / "templates/configs/default.yaml").read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("##")]


# The how-to pages train the others.
@pytest.mark.parametrize(("kind",), thinned(KINDS, lambda kind: kind == "preferences"))
def test_a_new_project_is_checked_shown_and_trained_as_it_stands(kind, here, out):
    printed = out("new", "project", "mine", "--kind", kind)
    assert "now: cd mine && fgcli data show\n     fgcli check\n     fgcli train\n     fgcli train --resume" in printed
    assert len(config_lines(here / "mine")) <= 12 and [] == list((here / "mine").rglob("*.py"))

    assert "default.yaml: ok" in out("-p", "mine", "check")
    shown = json.loads(out("-p", "mine", "data", "show", "--rows", "0:1", "--json"))
    assert (kind in ("classify", "tag")) == bool(shown["class_names"])
    assert 0 == main(["-p", "mine", "train", "--max-steps", "2", *OF_KIND[kind]])

    model = here / "mine/output_models/mine"
    # The command that was named for the trained model names the folder that the run wrote.
    assert re.search(r"     fgcli (chat|generate|eval) output_models/mine\b", printed)
    assert (model / "config.json").is_file() and list(model.glob("checkpoint-*"))
    summary = json.loads(next(model.glob("runs/*/summary.json")).read_text())
    metrics = {"classify": "eval_f1", "preferences": "eval_rewards/accuracies", "seq2seq": "eval_exact_match"}
    wanted = {"chat": "eval_loss", "tag": "eval_f1", **metrics}[kind]
    assert wanted in summary["final"] or any(wanted in line for line in next(model.glob("runs/*/metrics.jsonl")).open())


def made(out, *words):
    return out("new", "project", "mine", *words)


@pytest.mark.parametrize(
    ("kind", "row", "found", "lines"),
    [
        ("tag", {"tokens": ["Ada", "x"], "tags": ["B-PER", "O"]}, "each word with one of 2 classes: B-PER, O", []),
        ("tag", {"tokens": ["Ada", "x"], "ner_tags": [1, 0]}, "2 classes: 0, 1",
         ['-- set ns.tags = "words"', 'tags_column: "ner_tags"']),
        ("seq2seq", {"source": "a", "target": "b"}, "12 rows of a source and a target", []),
    ],
)  # fmt: skip
def test_words_with_tags_and_sources_with_targets_are_recognised(kind, row, found, lines, here, out, capsys):
    file = rows_file(here, [row] * 12)
    assert found in made(out, "--kind", kind, "--data", file)
    assert {*lines} <= {*config_lines(here / "mine")} and "default.yaml: ok" in out("-p", "mine", "check")
    assert 1 == main(["new", "project", "other", "--kind", "chat", "--data", file])
    assert f"--kind {kind} makes a project for them" in capsys.readouterr().err


CONLL = {"tokens": ["Ada", "x"], "pos_tags": ["N", "V"], "ner_tags": ["B-PER", "O"]}


@pytest.mark.parametrize(
    ("kind", "row", "words", "found", "lines"),
    [
        ("seq2seq", {"article": "a", "highlights": "b", "id": 1}, [], "columns: source = 'article', target = 'highlights'",
         ['source_column: "article"', 'target_column: "highlights"']),
        ("seq2seq", {"source": "a site", "question": "a", "answer": "b"}, ["--columns", "source=question"],
         "columns: source = 'question', target = 'answer'", ['source_column: "question"', 'target_column: "answer"']),
        ("seq2seq", {"translation": {"de": "ein", "en": "one"}}, ["--columns", "source=translation.en"],
         "target = 'translation.de'", ['source_column: "translation.en"', 'target_column: "translation.de"']),
        ("tag", {"words": ["Ada"], "labels": ["B-PER"]}, [], "tokens = 'words', tags = 'labels'", ['tags_column: "labels"']),
        ("tag", CONLL, ["--columns", "tags=ner_tags"], "2 classes: B-PER, O; columns: tags = 'ner_tags'",
         ['tags_column: "ner_tags"']),
    ],
)  # fmt: skip
def test_usual_names_of_columns_are_known_and_others_can_be_named(kind, row, words, found, lines, here, out):
    other = {"words": ["x"], "labels": ["O"]} if "words" in row else row
    assert found in made(out, "--kind", kind, "--data", rows_file(here, [row, other] * 12), *words)
    assert {*lines} <= {*config_lines(here / "mine")}
    shown = json.loads(out("-p", "mine", "data", "show", "--row", "0", "--json"))
    assert shown["rows"][0]["length"] >= 1


@pytest.mark.parametrize(
    ("kind", "row", "words", "message"),
    [
        ("seq2seq", {"source": "a site", "question": "a", "answer": "b"}, [],
         "FG975]: 'rows.jsonl': 'source' and 'question' could both be the source\n  help: name it: --columns source=source"),
        ("seq2seq", {"translation": {"de": "a", "en": "b"}}, [], "'translation.de' and 'translation.en' could both be"),
        ("tag", CONLL, [], "FG975]: 'rows.jsonl': 'ner_tags' and 'pos_tags' could both be the tags"),
        ("tag", {"letters": ["a"], "tags": ["O"]}, [], "FG831]: 'rows.jsonl': no column is known to hold the tokens; there are: "
         "letters, tags\n  help: name it: --columns tokens=letters"),
        ("tag", CONLL, ["--columns", "text=words"], "FG490]: rows of --kind tag have no 'text'\n  help: they have: tokens, tags"),
        ("tag", CONLL, ["--columns", "tags=none"], "FG831]: rows.jsonl:1: the row has no column 'none'"),
    ],
)  # fmt: skip
def test_a_column_that_is_not_known_or_not_clear_is_asked_for(kind, row, words, message, here, capsys):
    assert 1 == main(["new", "project", "other", "--kind", kind, "--data", rows_file(here, [row]), *words])
    error = capsys.readouterr().err.replace(f"{here}/", "")
    assert message in error and "_column" not in error, error


@pytest.mark.parametrize("form", CHATS)
def test_the_form_of_conversations_is_recognised(form, here, out):
    file = rows_file(here, [CHATS[form]] * 12)
    assert f"found 12 conversations in the form {form!r}" in made(out, "--kind", "chat", "--data", file)
    assert f'paths: "{here / file}"' in config_lines(here / "mine")


@pytest.mark.parametrize(
    ("name", "text", "found", "lines"),
    [
        ("a.csv", "text,label\n" + "a,x\nb,y\n" * 4, "each with one of 2 classes: x, y", []),
        ("a.csv", "review,sentiment\n" + "a,x\nb,y\n" * 4, "8 rows", ['text_column: "review"', 'label_column: "sentiment"']),
        ("a.csv", "words,label\n" + "a,0\nb,1\n" * 4, "classes: 0, 1", ['text_column: "words"']),
        ("a.csv", "text,label\na,0.5\nb,2\n", "a number (regression)", ['-- set ns.task = "regression"']),
        ("a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": ["y", "x"]}\n', "a list of 2 classes: x, y",
         ['-- set ns.task = "multi_label"']),
        ("a.jsonl", '{"text": "a", "label": 1.5}\n{"text": "b", "label": 2}\n', "regression", ['-- set ns.task = "regression"']),
    ],
)  # fmt: skip
def test_the_labels_of_a_file_decide_the_task(here, out, name, text, found, lines):
    (here / name).write_text(text)
    assert found in made(out, "--kind", "classify", "--data", name)
    assert {*lines, "eval_fraction: 0.1"} <= set(config_lines(here / "mine"))
    named = [line for line in config_lines(here / "mine") if "ns.task" in line]
    assert named == [line for line in lines if "ns.task" in line]
    if named:
        assert "default.yaml: ok" in out("-p", "mine", "check")


@pytest.mark.parametrize(("row", "is_chat"), [(TEXTS, False), (MESSAGES, True)])
def test_pairs_of_messages_get_a_chat_template(here, out, row, is_chat):
    file = rows_file(here, [row] * 12)
    assert is_chat == ("messages of a chat" in made(out, "--kind", "preferences", "--data", file))
    assert is_chat == ('-- set ns.chat_template = "chatml"' in config_lines(here / "mine"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--data", "rows.jsonl"], "FG490", "--data needs to know what the project is for"),
        (["--extends", "a.yaml"], "FG490", "--extends is for a new config"),
        (["--kind", "chat", "--data", "none.jsonl"], "FG830", "there is no data file 'none.jsonl'"),
        (["--kind", "chat", "--data", "bad.jsonl"], "FG890", "bad.jsonl:3: message 2 has the unknown role 'asistant'"),
        (
            ["--kind", "chat", "--data", "rows.csv"],
            "FG491",
            "is not one of the files from which conversations are read",
        ),
        (
            ["--kind", "chat", "--data", "pairs.jsonl"],
            "FG491",
            "are preference pairs: they have 'chosen' and 'rejected'",
        ),
        (["--kind", "classify", "--data", "rows.jsonl"], "FG491", "are conversations: they have 'messages'"),
        (["--kind", "classify", "--data", "rows.csv"], "FG831", "is known to hold the text; there are: alpha, beta"),
        (["--kind", "classify", "--data", "empty.csv"], "FG832", "has no rows"),
        (["--kind", "classify", "--data", "broken.jsonl"], "FG834", "cannot be read"),
        (["--kind", "chat", "--data", "asked.jsonl"], "FG491", "no conversation in"),
        (["--kind", "preferences", "--data", "rows.jsonl"], "FG491", "--kind chat makes a project for them"),
        (["--kind", "preferences", "--data", "judged.jsonl"], "FG491", "are single answers that were judged"),
        (["--kind", "chat", "--model", "./none"], "FG492", "there is no folder './none'"),
        (
            ["--kind", "chat", "--model", "nofolder"],
            "FG492",
            "there is no folder 'nofolder', and a name on the Hub has an",
        ),
        (["--kind", "chat", "--model", "t5"], "FG492", "is T5ForConditionalGeneration, and a decoder that continues"),
        (["--kind", "seq2seq", "--model", "gpt"], "FG492", "is gpt2, and an encoder-decoder is needed"),
        (["--kind", "chat", "--columns", "a=b"], "FG490", "--columns names columns of --data"),
        (["--kind", "chat", "--data", "rows.jsonl", "--columns", "a=b"], "FG490", "rows of --kind chat have no 'a'"),
        (["--kind", "chat", "--model", "."], "FG492", "has no 'config.json'"),
        (["--kind", "chat", "--data", "a{{b.jsonl"], "FG490", "has characters with a meaning in templates"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_made(here, capsys, words, code, message):
    chat = CHATS["messages"]
    rows_file(here, [chat] * 3)
    rows_file(here, [chat] * 3, "a{{b.jsonl")
    wrong = {"messages": [chat["messages"][0], {"role": "asistant", "content": "Hello"}]}
    rows_file(here, [chat, chat, wrong], "bad.jsonl")
    rows_file(here, [{"messages": chat["messages"][:1]}], "asked.jsonl")
    rows_file(here, [TEXTS], "pairs.jsonl")
    rows_file(here, [{"prompt": "a", "completion": "b", "label": True}], "judged.jsonl")
    for name, facts in (
        ("t5", {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}),
        ("gpt", {"model_type": "gpt2"}),
    ):
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(facts))
    for name, text in (("rows.csv", "alpha,beta\n1,2\n"), ("empty.csv", "text,label\n"), ("broken.jsonl", "{")):
        (here / name).write_text(text)
    assert 1 == main(["new", "project", "mine", *words])
    told = capsys.readouterr().err
    assert f"error[{code}]" in told and message in told
    assert not (here / "mine").exists()


def test_options_for_a_project_are_refused_for_a_config(here, capsys, out):
    made(out, "--kind", "chat")
    assert 1 == main(["-p", "mine", "new", "config", "b", "--kind", "chat"])
    assert "error[FG490]: --kind is for a new project" in capsys.readouterr().err


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model whose tokenizer has the given special tokens, and a chat template or none."""
    from datasets import Dataset
    from transformers import LlamaConfig

    from forgather.ml.data import train_bpe
    from forgather.ml.models import from_config

    folder = tmp_path_factory.mktemp("models")
    rows = Dataset.from_dict({"text": ["Hi Hello user assistant"]})

    def save(name, special, template):
        tokenizer = train_bpe(rows, 300, special_tokens=special)
        tokenizer.chat_template = template
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        tokenizer.save_pretrained(folder / name)
        from_config(LlamaConfig(**sizes), tokenizer=tokenizer).save_pretrained(folder / name)
        return str(folder / name)

    return save


MARKED = "{% for m in messages %}{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% endfor %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("special", "template", "named"),
    [
        (["<|im_start|>", "<|im_end|>"], None, "chatml"),
        (["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], None, "llama3"),
        ([], None, "alpaca"),
        ([], MARKED, None),
        (["<|im_start|>", "<|im_end|>"], CHATML, "chatml"),
        ([], "{{ messages[0].content }}", None),
    ],
    ids=["tokens of chatml", "tokens of llama3", "no tokens", "marked", "unmarked chatml", "unmarked and unknown"],
)
def test_the_chat_template_of_a_base_model_is_kept_or_named(here, out, base, special, template, named):
    folder = base(f"base{len(special)}{hash(template) % 1000}", special, template)
    made(out, "--kind", "chat", "--model", folder)
    lines = config_lines(here / "mine")
    assert f'-- set ns.base_model = "{folder}"' in lines and len(lines) <= 12
    expected = [] if named is None else [f'-- set ns.chat_template = "{named}"']
    assert expected == [line for line in lines if "chat_template" in line]


def test_a_base_model_gets_a_lora(here, out, base):
    folder = base("lora", ["<|im_start|>", "<|im_end|>"], None)
    made(out, "--kind", "chat", "--model", folder, "--data", rows_file(here, [CHATS["messages"]] * 12))
    assert 0 == main(["-p", "mine", "train", "--max-steps", "1", "--set", "+trainer_args.use_cpu=true"])
    assert (here / "mine/output_models/mine/adapter_config.json").is_file()


def killed_after_a_checkpoint(folder, *words):
    """Starts `fgcli train`, and kills it as soon as its first checkpoint is visible."""
    command = [sys.executable, "-m", "forgather", "-p", "mine", "train", "--output-dir", "cut", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as process:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end and not list(folder.glob("cut/checkpoint-*")):
            time.sleep(0.005)
        was_running = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    assert was_running and not (folder / "cut/model.safetensors").exists()


@pytest.mark.parametrize(("kind",), thinned(KINDS, lambda kind: False))
def test_a_killed_run_of_a_new_project_is_resumed_to_the_same_bits(kind, here, out):
    made(out, "--kind", kind)
    often = ["--set", "trainer_args.save_strategy=steps", "--set", "+trainer_args.save_steps=2", *OF_KIND[kind]]
    whole = fgcli("-p", "mine", "train", "--output-dir", "whole", *often, cwd=here)
    assert 0 == whole.returncode, whole.stderr
    killed_after_a_checkpoint(here, *often)
    again = fgcli("-p", "mine", "train", "--resume", "--output-dir", "cut", *often, cwd=here)
    assert 0 == again.returncode and "resuming from cut/checkpoint-" in again.stderr, again.stderr
    weights = [Path(here, name, "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("processes",), thinned([2], lambda processes: False))
def test_a_classifier_reports_accuracy_and_f1_on_two_processes(processes, here, out):
    made(out, "--kind", "classify")
    done = fgcli("-p", "mine", "train", "--nproc-per-node", str(processes), *QUICK, cwd=here)
    assert 0 == done.returncode, done.stderr
    assert "eval accuracy" in done.stdout + done.stderr and "eval f1" in done.stdout + done.stderr
