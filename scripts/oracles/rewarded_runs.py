"""Trains with GRPO and RLOO through the templates and with plain TRL, and records how far the weights are apart.

Two steps from the same model, with the same settings and seed. The control is plain TRL with another seed. Run
`make oracles`, which installs trl into a folder of its own; it needs the package index.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

FILE = ROOT / "tests/ml/recorded/rewarded_runs.json"
CASES = [(algorithm, adapter) for algorithm in ("GRPO", "RLOO") for adapter in ("all weights", "LoRA")]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "beta": 0.1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 42,
}
LORA = {"r": 4, "lora_alpha": 8}
PROMPTS = [{"prompt": f"{number} and", "answer": str(number + 1)} for number in range(12)]
REWARDS = """\
def digits(completions, answer, **others):
    return [float(sum(letter in text for letter in number)) for text, number in zip(completions, answer, strict=True)]


def short(completions, **others):
    return [-len(text) / 10 for text in completions]
"""
CONFIG = """\
-- extends 'trainers/{name}.yaml'

[config_metadata]
    -- set ns.base_model = joinpath(project_dir, 'base')

[raw_dataset]
    -- include 'datasets/prompts.yaml'
    paths: {{{{ joinpath(project_dir, 'prompts.jsonl') }}}}

[train_dataset]
    == super()
    dataset: *raw_dataset

[adapter]
    {adapter}

[optimizer]
    ~

[trainer_callbacks]
    -- include 'callbacks/quiet.yaml'

[reward_funcs]
    - !partial:rewards.py:digits []
    - !partial:rewards.py:short []

[trainer_args]
    == super()
    warmup_steps: 0
{settings}
"""


def make_folder(folder: Path) -> None:
    """Writes a tiny model with its tokenizer, prompts, reward functions, and the configs of all cases."""
    from datasets import Dataset
    from transformers import LlamaConfig

    from forgather.ml.data.tokenizer import train_bpe
    from forgather.ml.models import from_config

    texts = Dataset.from_dict({"text": [f"{row['prompt']} {row['answer']}" for row in PROMPTS]})
    tokenizer = train_bpe(texts, 260, cache_dir=folder / "cache")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = from_config(LlamaConfig(**sizes, initializer_range=0.3), tokenizer=tokenizer, seed=1)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (folder / "meta.yaml").write_text("name: rewarded\n", encoding="utf-8")
    (folder / "templates/configs").mkdir(parents=True)
    for algorithm, adapter in CASES:
        settings = "".join(f"    {name}: {json.dumps(value)}\n" for name, value in SETTINGS.items())
        given = f"!singleton:forgather.ml.adapters:lora {json.dumps(LORA)}" if adapter == "LoRA" else "~"
        text = CONFIG.format(name=algorithm.lower(), adapter=given, settings=settings)
        (folder / f"templates/configs/{config_name(algorithm, adapter)}").write_text(text, encoding="utf-8")


def config_name(algorithm: str, adapter: str) -> str:
    return f"{algorithm}_{adapter.partition(' ')[0]}.yaml".lower()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Returns the trained weights of a trainer by their names, as float64."""
    named = trainer.model.named_parameters()
    return {name: weight.detach().double() for name, weight in named if weight.requires_grad}


def by_template(folder: Path, algorithm: str, adapter: str) -> dict[str, torch.Tensor]:
    from forgather.project.project import Project

    trainer = Project(config_name(algorithm, adapter), folder, output_dir=str(folder / "out"))()
    trainer.train()
    return weights(trainer)


def by_trl(folder: Path, algorithm: str, adapter: str, **changes: Any) -> dict[str, torch.Tensor]:
    import runpy

    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rewards = runpy.run_path(str(folder / "rewards.py"))
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **LORA) if adapter == "LoRA" else None
    args = getattr(trl, f"{algorithm}Config")(
        output_dir=str(folder / "plain"), report_to="none", disable_tqdm=True, **{**SETTINGS, **changes}
    )
    trainer = getattr(trl, f"{algorithm}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder / "base"),
        reward_funcs=[rewards["digits"], rewards["short"]],
        args=args,
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=config,
    )
    trainer.train()
    return weights(trainer)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two sets of weights with the same names."""
    if one.keys() != other.keys():
        raise ValueError(f"the weights have other names: {sorted(one.keys() ^ other.keys())[:4]}")
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def figures(folder: Path, algorithm: str, adapter: str) -> dict[str, float]:
    """Returns the difference of template and TRL, and that of TRL with another seed."""
    plain = by_trl(folder, algorithm, adapter)
    ours = by_template(folder, algorithm, adapter)
    control = by_trl(folder, algorithm, adapter, seed=43)
    return {"difference": difference(ours, plain), "another seed": difference(control, plain)}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FORGATHER_TRUST"] = name
        make_folder(folder)
        found = {f"{algorithm}, {adapter}": figures(folder, algorithm, adapter) for algorithm, adapter in CASES}
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    FILE.write_text(json.dumps({"versions": versions, "figures": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
