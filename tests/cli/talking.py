"""A small model that is trained on five dialogues until it knows them by heart, and an adapter that learned others."""

import json

from forgather.cli.main import main
from forgather.ml.models import from_config
from tests.ml.chat_cases import byte_pairs
from tests.project.workbench import make_project

DIALOGUES = [
    [("user", "What comes after one?"), ("assistant", "two"), ("user", "And then?"), ("assistant", "three four")],
    [("user", "What comes after four?"), ("assistant", "five six"), ("user", "And then?"), ("assistant", "seven")],
    [("user", "Say a line and another."), ("assistant", "é\n b — c")],
]
CONFIG = """\
-- extends 'trainers/trainer.yaml'
[config_metadata]
    -- set ns.base_model = joinpath(project_dir, 'BASE')
    -- set ns.output_dir = joinpath(project_dir, 'NAME')
[raw_dataset]
    -- include 'datasets/chat.yaml'
    paths: {{ joinpath(project_dir, 'NAME.jsonl') }}
[dataset]
    train: *raw_dataset
[eval_dataset]
    ~
[sample_prompts]
    []
[trainer_args]
    == super()
    max_steps: 60
    per_device_train_batch_size: 3
    learning_rate: 2e-2
    lr_scheduler_type: constant
    use_cpu: true
    save_strategy: steps
    save_steps: 15
"""
ADAPTED = """\
[adapter]
    -- include 'adapters/lora.yaml'
    r: 8
    lora_alpha: 32
"""


# What the adapter learns: the answer of the next dialogue to each first question.
OTHERS = [[DIALOGUES[number][0], DIALOGUES[(number + 1) % 3][1]] for number in range(3)]


def rows(dialogues):
    lines = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in dialogues]
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_bench(folder, names=("full", "adapted")):
    """Writes a project with the runs `full` and `adapted`, or with the first one alone; returns its folder."""
    texts = {"full": CONFIG.replace("BASE", "base"), "adapted": CONFIG.replace("BASE", "full") + ADAPTED}
    make_project(folder, {f"templates/configs/{name}.yaml": text.replace("NAME", name) for name, text in texts.items()})
    for name, dialogues in {"full": DIALOGUES, "adapted": OTHERS}.items():
        (folder / f"{name}.jsonl").write_text(rows(dialogues))
    tokenizer = byte_pairs("chatml")
    tokenizer.save_pretrained(folder / "base")
    model = from_config(small_llama(), tokenizer=tokenizer, seed=1)
    model.save_pretrained(folder / "base")
    for name in names:
        assert 0 == main(["-p", str(folder), "-t", name, "train"])
    return folder


def small_llama(**changes):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, "max_position_embeddings": 128, **changes})
