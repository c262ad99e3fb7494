"""Trains with the optimizers of bitsandbytes under each strategy, and records the distance from a plain loop.

The reference is a loop with the optimizer of bitsandbytes itself, on all rows in one process. A second run of each
strategy is resumed from a checkpoint after half of the steps; its figure is the distance from the run without a stop.
Run `make oracles`, which installs bitsandbytes into a folder of its own; it needs the package index.

Example:
    python scripts/oracles/bitsandbytes_optimizers.py          writes tests/ml/recorded/bitsandbytes_optimizers.json
    python scripts/oracles/bitsandbytes_optimizers.py --page   writes the table of docs/trainer.md from the record
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

RECORD = ROOT / "tests" / "ml" / "recorded" / "bitsandbytes_optimizers.json"
PAGE = ROOT / "docs" / "trainer.md"
BEGIN, END = "<!-- table of bitsandbytes' optimizers -->", "<!-- end of the table -->"
NAMES = ("paged_adamw_32bit", "adamw_8bit", "lion_32bit", "lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit")
STRATEGIES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {},
    "FSDP2": {"fsdp": "full_shard"},
    "tensor parallel": {"tensor_parallel_size": 2},
    "ZeRO 1": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "ZeRO 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "ZeRO 3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "1F1B": {"schedule_class": "Schedule1F1B", "pipeline_chunks": 4},
}
PACKAGES = ("torch", "transformers", "bitsandbytes")
ROWS, STEPS, RATE = 4, 6, 1e-3


def rows() -> list[dict[str, list[int]]]:
    """Returns the training data: the rows of one step, so that their order does not matter."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 128, (16,), generator=generator).tolist() for _ in range(ROWS)]
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * 16} for ids in found]


def model(folder: Path) -> Any:
    """Returns the model, whose larger weights have the size from which bitsandbytes uses states of 8 bits."""
    from forgather.ml.models import from_pretrained

    return from_pretrained(folder / "base", dtype=torch.float32)


def train_all(folder: Path, strategy: str) -> None:
    """Trains with Forgather: each optimizer without a stop and resumed. Refusals are written to a file."""
    from forgather.errors import ForgatherError

    for optim in NAMES:
        try:
            train(folder, optim, strategy, resumes=False)
            train(folder, optim, strategy, resumes=True)
        except ForgatherError as error:
            if error.code != "FG971":
                raise
            (folder / f"{optim} {strategy}.txt").write_text(error.message, encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(folder: Path, optim: str, strategy: str, *, resumes: bool) -> None:
    """Trains with one optimizer; the weights are saved in a folder named after optimizer and strategy."""
    import forgather.ml

    name = {"one process": "Trainer", "1F1B": "PipelineTrainer"}.get(strategy, "AccelTrainer")
    trainer = getattr(forgather.ml, name)
    replicas = 1 if name != "AccelTrainer" or strategy == "tensor parallel" else int(os.environ["WORLD_SIZE"])
    output = folder / f"{optim} {strategy}"
    args = trainer.ARGUMENTS(
        output_dir=f"{output} resumed" if resumes else str(output),
        per_device_train_batch_size=ROWS // replicas,
        max_steps=STEPS,
        optim=optim,
        learning_rate=RATE,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=STEPS // 2,
        resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resumes else None,
        **STRATEGIES[strategy],
    )
    trainer(model=model(folder), args=args, train_dataset=rows()).train()


def reference(trained: Any, optim: str) -> dict[str, torch.Tensor]:
    """Returns the weights that a loop with bitsandbytes trains."""
    import bitsandbytes.optim

    kind = {"adamw": "AdamW", "lion": "Lion", "rmsprop": "RMSprop"}[optim.removeprefix("paged_").split("_")[0]]
    settings: dict[str, Any] = {"optim_bits": 8 if "8bit" in optim else 32}
    # The betas of transformers' arguments, which it also gives to Lion.
    settings |= {} if kind == "RMSprop" else {"betas": (0.9, 0.999), "is_paged": "paged" in optim}
    named = dict(trained.named_parameters())
    groups = [
        {"params": [weight for name, weight in named.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [weight for name, weight in named.items() if "norm" in name], "weight_decay": 0.0},
    ]
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(trained.get_input_embeddings(), "weight", {"optim_bits": 32})
    optimizer = getattr(bitsandbytes.optim, kind)(groups, lr=RATE, **settings)
    ids = torch.tensor([row["input_ids"] for row in rows()])
    for _ in range(STEPS):
        logits = trained(input_ids=ids).logits
        targets = ids[:, 1:].flatten()
        # In this form, as another order of operations rounds differently: a state of 8 bits, or a sign, enlarges that.
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        (loss / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in trained.state_dict().items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two models' weights."""
    names = one.keys() & other.keys()
    if not names:
        raise ValueError("the models have no common weights")
    return max(float((one[name] - other[name]).abs().max()) for name in names)


def run(folder: Path, strategy: str) -> None:
    """Trains under one strategy, in processes of its own."""
    processes = 1 if strategy == "one process" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, __file__, "--train", str(folder), strategy], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that a run has saved."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def figures_of(folder: Path, optim: str, strategy: str, expected: dict[str, torch.Tensor]) -> str | dict[str, float]:
    """Returns the distances of a run, or the message with which it was refused."""
    name = f"{optim} {strategy}"
    refusal = folder / f"{name}.txt"
    if refusal.exists():
        return refusal.read_text(encoding="utf-8")
    found = weights_of(folder / name)
    resumed = weights_of(folder / f"{name} resumed")
    return {"plain": difference(found, expected), "resumed": difference(resumed, found)}


def record(folder: Path) -> None:
    """Trains with every optimizer under every strategy, and writes the figures."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(folder / "base")
    start = {name: value.detach() for name, value in model(folder).state_dict().items()}
    for strategy in STRATEGIES:
        run(folder, strategy)
    figures: dict[str, dict[str, Any]] = {}
    for optim in NAMES:
        expected = reference(model(folder), optim)
        cells = {strategy: figures_of(folder, optim, strategy, expected) for strategy in STRATEGIES}
        figures[optim] = {"size of the update": difference(expected, start), **cells}
        print(optim, figures[optim], flush=True)
    text = json.dumps({"versions": {name: version(name) for name in PACKAGES}, "figures": figures}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def table(record: dict[str, Any]) -> str:
    """Returns the table of the documentation."""
    lines = [f"| `optim` | {' | '.join(STRATEGIES)} |", "|" + "---|" * (len(STRATEGIES) + 1)]
    for name, figures in record["figures"].items():
        cells = [figures[strategy] for strategy in STRATEGIES]
        shown = ["refused" if isinstance(cell, str) else f"{cell['plain']:.0e}" for cell in cells]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def page_with(text: str, written: str) -> str:
    """Returns a page with its table replaced."""
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        raise ValueError(f"{PAGE} has no line {BEGIN!r}")
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Records the figures, or trains one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "STRATEGY"))
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.train:
        train_all(Path(options.train[0]), options.train[1])
        return
    if not options.page:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
    written = table(json.loads(RECORD.read_text(encoding="utf-8")))
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), written), encoding="utf-8")


if __name__ == "__main__":
    main()
