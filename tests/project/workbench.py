"""Small projects on disk for the tests of projects and of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]

PLAIN = """\
meta:
  config_name: Plain
  config_description: A config without any template
  output_dir: output_models/plain
dynamic_args:
  steps: {names: [--steps, -n], type: int, default: 3, help: how many steps}
numbers: &numbers
  lr: {{ lr | default(0.5) }}
  steps: {{ steps | default(3) }}
main: !partial:builtins:dict
  numbers: *numbers
"""

# A training of seconds on the rows of `rows.jsonl`; blocks that a child gives below it replace those of here.
COLLATOR_OF_TOYS = """\
[data_collator]
    !singleton:toy.py:{name}
    collator:
        !singleton:forgather.ml.data:CausalLMCollator
        tokenizer: *tokenizer
"""
"""The block of a collator that a class of a project's `toy.py` wraps."""
TINY_TRAINING = """\
-- extends 'trainers/trainer.yaml'
[config_metadata]
    -- set ns.block_size = 16
    -- set ns.output_dir = joinpath(project_dir, 'out')
[raw_dataset]
    -- include 'datasets/json_lines.yaml'
    paths: {{ joinpath(project_dir, 'rows.jsonl') }}
[tokenizer]
    == super()
    vocab_size: 260
[model_config]
    -- include 'models/llama.yaml'
    hidden_size: 8
    intermediate_size: 16
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
[trainer_args]
    == super()
    max_steps: 2
    per_device_train_batch_size: 2
    use_cpu: true
"""


def make_project(folder: Path, files: dict[str, str] | None = None, *, meta: str = "name: Bench\n") -> Path:
    """Writes a project with the given files (`plain.yaml` as its one config without any) and returns its folder."""
    configs = {"templates/configs/plain.yaml": PLAIN} if files is None else files
    for name, text in {"meta.yaml": meta, **configs}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def fgcli(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "forgather", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
