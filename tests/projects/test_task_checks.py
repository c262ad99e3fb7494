"""Rows, collators and losses of another task are refused by the check, and by the trainer without one."""

import pytest
import torch
from transformers import BertConfig, DataCollatorForLanguageModeling, DataCollatorWithFlattening

from forgather.cli.main import main
from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.classifiers import classifier_from_config
from tests.project.workbench import ROOT

CAUSAL = "!singleton:forgather.ml.models:from_config {config: !call:transformers:LlamaConfig []}"
COLLATOR = "!singleton:transformers:DataCollator%s []"
DATA = "forgather.ml.data"
SPLIT = f"!call:getitem [!call:{DATA}:split [!call:{DATA}%s []], train]"
CASES = [
    ("tag", "names", f"train_dataset={SPLIT % '.packing:tokenize'}", "FG960", "for a causal language model"),
    ("tag", "names", f"eval_dataset={{a: !call:{DATA}:tokenize []}}", "FG960", "for a causal language model"),
    ("tag", "names", "train_dataset=!call:forgather.ml.data:tokenize []", "FG960", "for a causal language model"),
    ("seq2seq", "numbers", "train_dataset=!call:forgather.ml.data:tokenize_chats []", "FG960", "for a causal"),
    ("vision", "vit", "train_dataset=!call:forgather.ml.data:pack_examples []", "FG960", "for a causal language model"),
    ("tag", "names", f"model={CAUSAL}", "FG960", "are not the next tokens"),
    ("seq2seq", "numbers", f"model={CAUSAL}", "FG960", "are not the next tokens"),
    ("tag", "names", f"data_collator={COLLATOR % 'ForLanguageModeling'}", "FG960", "overwrites the labels"),
    ("seq2seq", "numbers", f"data_collator={COLLATOR % 'WithFlattening'}", "FG960", "overwrites the labels"),
    ("preferences", "kto", "train_dataset=!call:forgather.ml.data:tokenize_preferences []", "FG914", "are pairs"),
    ("preferences", "kto", "eval_dataset=!call:forgather.ml.data:tokenize_preferences []", "FG914", "are pairs"),
    ("preferences", "dpo", "train_dataset=!call:forgather.ml.data:tokenize_feedback []", "FG914", "are single answers"),
    ("preferences", "orpo", "eval_dataset=!call:forgather.ml.data:tokenize_feedback []", "FG914", "are single answers"),
    ("preferences", "reward", "train_dataset=!call:forgather.ml.data:tokenize_feedback []", "FG914", "are single"),
    ("seq2seq", "numbers", "loss_fn=!call:torch.nn:CrossEntropyLoss []", "FG961", "the decoder makes its inputs"),
]


@pytest.mark.parametrize(("project", "config", "change", "code", "told"), CASES)
def test_the_check_refuses_what_does_not_fit_the_task(project, config, change, code, told, capsys):
    status = main(["-p", str(ROOT / "projects" / project), "-t", config, "check", "--set", change])
    found = capsys.readouterr()
    assert (1, True, True) == (status, code in found.out + found.err, told in found.out + found.err)


@pytest.mark.parametrize("trainer", ["trainer", "hf_trainer"])
def test_every_trainer_is_given_rows_of_the_task(trainer, tmp_path, capsys):
    (tmp_path / "meta.yaml").write_text('name: "P"\ndefault_config: p.yaml\n')
    folder = tmp_path / "templates/configs"
    folder.mkdir(parents=True)
    (folder / "p.yaml").write_text(f"-- extends 'trainers/{trainer}.yaml'\n[raw_dataset]\n    == super()\n")
    mixed = f"!call:{DATA}:mix [{{a: !call:%s []}}]"
    for rows, status in ((f"{DATA}:tokenize_tagged", 1), ("own:rows", 0), (f"{DATA}:tokenize", 0)):
        main(["-p", str(tmp_path), "check", "--set", f"train_dataset={mixed % rows}"])
        found = capsys.readouterr()
        assert bool(status) == ("FG960" in found.out + found.err), rows


@pytest.mark.parametrize("rows", ["tokenize", "pack_examples", "packing:tokenize"])
def test_an_evaluation_that_generates_refuses_packed_rows_inside_other_calls(rows, tmp_path, capsys):
    (tmp_path / "meta.yaml").write_text('name: "P"\ndefault_config: p.yaml\n')
    folder = tmp_path / "templates/configs"
    folder.mkdir(parents=True)
    (folder / "p.yaml").write_text(
        "-- extends 'trainers/trainer.yaml'\n[trainer_args]\n    == super()\n"
        "    predict_with_generate: true\n    eval_strategy: steps\n"
    )
    for function, is_refused in ((rows, True), ("tokenize_chats", False)):
        function = function.replace("packing:", ".packing:") if ":" in function else f":{function}"
        made = f"eval_dataset={{a: !call:getitem [{{eval: !call:{DATA}{function} []}}, eval]}}"
        main(["-p", str(tmp_path), "check", "--set", made])
        found = capsys.readouterr()
        assert is_refused == ("FG964" in found.out + found.err)


@pytest.mark.parametrize(("project", "config"), [("tag", "names"), ("seq2seq", "numbers"), ("vision", "vit")])
def test_the_check_refuses_a_pipeline_by_name(project, config, tmp_path, capsys):
    (tmp_path / "meta.yaml").write_text('name: "P"\ndefault_config: p.yaml\n')
    folder = tmp_path / "templates/configs"
    folder.mkdir(parents=True)
    task = {"tag": "token_classification", "seq2seq": "seq2seq", "vision": "image_classification"}[project]
    (folder / "p.yaml").write_text(
        f"-- set trainer_template = 'trainers/pipeline_trainer.yaml'\n-- extends 'tasks/{task}.yaml'\n"
        f"[raw_dataset]\n    == super()\n    paths: {folder}\n"
    )
    assert 1 == main(["-p", str(tmp_path), "check"])
    found = capsys.readouterr()
    assert "[FG762]" in found.out + found.err and "no pipeline stage holds the whole model" in found.out + found.err


@pytest.mark.parametrize("kind", [DataCollatorForLanguageModeling, DataCollatorWithFlattening])
def test_a_trainer_refuses_a_collator_of_another_task(kind, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = classifier_from_config(BertConfig(**sizes), task="token_classification", labels=["a", "b"])
    collator = object.__new__(kind)
    rows = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([0, 1])}] * 8
    args = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", max_steps=1)
    with pytest.raises(TrainingError, match=r"FG960.*overwrites the labels that BertForTokenClassification learns"):
        Trainer(model, args, train_dataset=rows, data_collator=collator).train()
