"""Trains with GRPO and RLOO through the templates and with plain TRL, and records how far the weights are apart.

Two steps from the same model, with the same settings and seed, in one process and in two. The control is plain TRL with
another seed. Answers are drawn by each process from a seed of its own, so two processes cannot have the answers of one.
Where a function of the prompt gives the answers (`rollout_func` of GRPO), two processes are compared with one as well.
Run `make oracles`, which installs trl into a folder of its own; it needs the package index.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.ml.distributed.gang import run_ranks  # noqa: E402

Weights = dict[str, torch.Tensor]

FILE = ROOT / "tests/ml/recorded/rewarded_runs.json"
CASES = [(algorithm, adapter) for algorithm in ("GRPO", "RLOO") for adapter in ("all weights", "LoRA")]
PROCESSES = (1, 2)
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


def rollouts(prompts, trainer):
    answers, seen = [], {}
    for prompt in prompts:
        number = seen[prompt] = seen.get(prompt, 0) + 1
        answers.append([20 + (len(prompt) * 7 + number * 13 + place * 31) % 200 for place in range(1 + number)])
    return {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": answers, "logprobs": None}
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

ROLLOUTS = """\
-- extends 'configs/grpo_all.yaml'

[trainer]
    == super()
    rollout_func: !partial:rewards.py:rollouts []
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
    (folder / "templates/configs/rollouts.yaml").write_text(ROLLOUTS, encoding="utf-8")


def config_name(algorithm: str, adapter: str) -> str:
    return f"{algorithm}_{adapter.partition(' ')[0]}.yaml".lower()


def weights(trainer: Any) -> Weights:
    """Returns the trained weights of a trainer by their names, as float64."""
    named = trainer.model.named_parameters()
    return {name: weight.detach().double() for name, weight in named if weight.requires_grad}


def by_template(folder: Path, config: str, **changes: Any) -> Weights:
    from forgather.project.project import Project

    overrides = [(f"trainer_args.{name}", str(value)) for name, value in changes.items()]
    trainer = Project(config, folder, output_dir=str(folder / "out"), overrides=overrides)()
    trainer.train()
    return weights(trainer)


def by_trl(folder: Path, algorithm: str, adapter: str, **changes: Any) -> Weights:
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


def difference(one: Weights, other: Weights) -> float:
    """Returns the largest difference of two sets of weights with the same names."""
    if one.keys() != other.keys():
        raise ValueError(f"the weights have other names: {sorted(one.keys() ^ other.keys())[:4]}")
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def in_processes(count: int, train: Callable[..., Weights], *given: Any, **named: Any) -> Weights:
    """Returns the weights that a function trains in one process, or in forks of it, whose weights must be equal."""
    if count == 1:
        return train(*given, **named)
    first, *others = run_ranks(count, partial(train, *given, **named))
    if any(difference(first, other) for other in others):
        raise ValueError("the processes have different weights")
    return first


def figures(folder: Path, algorithm: str, adapter: str, processes: int) -> dict[str, float]:
    """Returns the difference of template and TRL, and that of TRL with another seed."""
    plain = in_processes(processes, by_trl, folder, algorithm, adapter)
    ours = in_processes(processes, by_template, folder, config_name(algorithm, adapter))
    control = in_processes(processes, by_trl, folder, algorithm, adapter, seed=43)
    return {"difference": difference(ours, plain), "another seed": difference(control, plain)}


def figures_of_processes(folder: Path) -> dict[str, float]:
    """Returns the difference of two processes and one with the same answers, and that of one with half of the rows."""
    one = by_template(folder, "rollouts.yaml")
    two = in_processes(2, by_template, folder, "rollouts.yaml", gradient_accumulation_steps=1)
    half = by_template(folder, "rollouts.yaml", gradient_accumulation_steps=1)
    return {"difference": difference(two, one), "half of the rows": difference(half, one)}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"FORGATHER_TRUST": name, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        make_folder(folder)
        found = {
            f"{algorithm}, {adapter}, processes: {processes}": figures(folder, algorithm, adapter, processes)
            for algorithm, adapter in CASES
            for processes in PROCESSES
        }
        several = figures_of_processes(folder)
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    record = {"versions": versions, "figures": found, "two processes and one": several}
    FILE.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
