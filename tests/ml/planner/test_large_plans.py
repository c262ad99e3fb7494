"""Plans of models with 8 and 70 billion weights: the time and the memory that planning itself takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = {
    "8B on 8 ranks": (
        8,
        8.0e9,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "70B on 64 ranks": (
        64,
        70.6e9,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
}
SECONDS = {"8B on 8 ranks": 8, "70B on 64 ranks": 15}
PLAN = """
import functools, json, resource, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import forgather.ml as ml
from forgather.ml.planner.memory import plan_run

ranks, sizes, folder = json.loads(sys.argv[1])
config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
ids = torch.arange(2048)

def trainer(hook):
    args = ml.AccelTrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, max_steps=4, save_strategy="no", bf16=True, fsdp="full_shard"
    )
    rows = [{"input_ids": ids, "labels": ids}] * (4 * ranks)
    return ml.AccelTrainer(model_init=functools.partial(hook(LlamaForCausalLM), config), args=args, train_dataset=rows)

from forgather.ml.strategy import fsdp2
began = time.process_time()
plan, _ = plan_run(trainer, world_size=ranks, local_world_size=8)
seconds = time.process_time() - began
print(json.dumps([plan["parameters"], seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("name", SIZES)
def test_a_large_model_is_planned_within_seconds(name, tmp_path, record_property):
    ranks, parameters, sizes = SIZES[name]
    given = json.dumps([ranks, sizes, str(tmp_path)])

    done = subprocess.run(
        [sys.executable, "-c", PLAN, given], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )

    found, seconds, num_bytes = json.loads(done.stdout.splitlines()[-1])
    record_property("figure: CPU seconds", f"{seconds:.1f}")
    record_property("figure: MB of memory", f"{num_bytes / 1e6:.0f}")
    assert found == pytest.approx(parameters, rel=0.01)
    assert num_bytes <= 1e9
    assert seconds <= SECONDS[name]
