"""Measures the time from the command to the first optimizer step with four processes.

The result is the difference to plain torchrun with the same imports. Both sides train the same tiny Llama with DDP over
gloo. Times are wall seconds until rank 0 ends its first step. The runs alternate, and the result is the median of the
differences of consecutive runs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPEATS = 5
RANKS = 4
PARTS = """
import time
import torch, transformers

def make_model():
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config)

def make_rows():
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]

class Clock(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 1:
            print("FIRST", time.time(), flush=True)
"""
CONFIG = f"""
meta: {{nproc_per_node: {RANKS}}}
main: !singleton:forgather.ml:AccelTrainer
    model: !partial:parts.py:make_model
    args: !singleton:forgather.ml:AccelTrainingArguments
        output_dir: out
        per_device_train_batch_size: 4
        max_steps: 1
        use_cpu: true
    train_dataset: !call:parts.py:make_rows
    callbacks: !list [!singleton:parts.py:Clock ]
"""
BARE = """
import time
import accelerate, datasets, transformers, torch
import torch.distributed as dist
from forgather.ml import AccelTrainer, AccelTrainingArguments
from parts import make_model, make_rows
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = make_rows()[dist.get_rank() * 4:][:4]
batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
model(**batch).loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if dist.get_rank() == 0:
    print("FIRST", time.time(), flush=True)
dist.destroy_process_group()
"""


def seconds(command: list[str], cwd: str) -> float:
    """Runs a command, and returns the seconds to the first optimizer step of rank 0."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.time()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=cwd)
    for line in done.stdout.splitlines():
        if "FIRST " in line:
            return float(line.split("FIRST ")[1]) - start
    raise RuntimeError(f"no optimizer step was seen\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> None:
    """Prints the figures as JSON."""
    folder = tempfile.mkdtemp()
    files = {
        "meta.yaml": "name: launch\ndefault_config: ddp.yaml\n",
        "parts.py": PARTS,
        "bare.py": BARE,
        "templates/configs/ddp.yaml": CONFIG,
    }
    for name, text in files.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    bare = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "bare.py"]
    sides = {"bare": bare, "ours": ["-m", "forgather", "train"]}
    times: dict[str, list[float]] = {side: [seconds(command, folder)][:0] for side, command in sides.items()}
    for _ in range(REPEATS):
        for side, command in sides.items():
            times[side].append(seconds(command, folder))
    median = {side: statistics.median(values) for side, values in times.items()}
    over = statistics.median(mine - other for mine, other in zip(times["ours"], times["bare"], strict=True))
    row = {
        "what": f"first step of {RANKS} processes: ours {median['ours']:.2f} s, bare torchrun {median['bare']:.2f} s",
        "value": round(over, 2),
        "reach": 1.5,
        "unit": "s over bare torchrun",
        "reached": over <= 1.5,
    }
    shutil.rmtree(folder)
    print(json.dumps([row], indent=2))


if __name__ == "__main__":
    main()
