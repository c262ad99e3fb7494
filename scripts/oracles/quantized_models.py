"""Trains an adapter on a quantized base model under each strategy, and records how far it is from plain torch.

The reference is a loop with torch and peft on the same quantized model, and for weights of 4 bits one on the
dequantized model, too. Two steps of SGD with learning rate 1 on all rows: the difference of two adapters is that of
their gradients. Run `make oracles`, which installs bitsandbytes and torchao into a folder of their own; it needs the
package index.

Example:
    python scripts/oracles/quantized_models.py            writes tests/ml/recorded/quantized_models.json, and the page
    python scripts/oracles/quantized_models.py --page     writes the table of docs/trainer.md from the record
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

RECORD = ROOT / "tests" / "ml" / "recorded" / "quantized_models.json"
PAGE = ROOT / "docs" / "trainer.md"
BEGIN, END = "<!-- table of quantized models -->", "<!-- end of the table -->"
METHODS = ("nf4", "nf4 in float32", "nf4, bf16", "int8", "torchao int8")
STRATEGIES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {},
    "FSDP2": {"fsdp": "full_shard"},
    "ZeRO 1": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "ZeRO 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "ZeRO 3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "1F1B": {"schedule_class": "Schedule1F1B", "pipeline_chunks": 4},
}
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao")
ROWS, STEPS = 4, 2


def quantization(method: str) -> Any:
    """Returns the quantization config of a method."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if method == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if method == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    storage = {"nf4 in float32": torch.float32, "nf4, bf16": torch.bfloat16}.get(method, torch.uint8)
    compute = torch.bfloat16 if "bf16" in method else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def base_model(folder: Path, method: str) -> Any:
    """Returns the quantized model, in a dtype that the method computes in."""
    from forgather.ml.models import from_pretrained

    dtype = torch.bfloat16 if "bf16" in method else torch.float32
    return from_pretrained(folder / "base", quantization_config=quantization(method), dtype=dtype)


def rows() -> list[dict[str, list[int]]]:
    """Returns the training data."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 128, (16,), generator=generator).tolist() for _ in range(ROWS)]
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * 16} for ids in found]


def train(folder: Path, method: str, strategy: str) -> None:
    """Trains with Forgather; the adapter is saved in a folder named after method and strategy."""
    import forgather.ml
    from forgather.ml.adapters import lora

    name = {"one process": "Trainer", "1F1B": "PipelineTrainer"}.get(strategy, "AccelTrainer")
    trainer = getattr(forgather.ml, name)
    per_device = ROWS if name != "AccelTrainer" else ROWS // int(os.environ["WORLD_SIZE"])
    args = trainer.ARGUMENTS(
        output_dir=str(folder / f"{method} {strategy}"),
        per_device_train_batch_size=per_device,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16="bf16" in method,
        **STRATEGIES[strategy],
    )
    trainer(model=base_model(folder, method), args=args, train_dataset=rows(), adapter=lora(r=4, alpha=8)).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def reference(model: Any) -> dict[str, torch.Tensor]:
    """Returns the adapter that a loop with torch and peft trains on a model."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(42)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    ids = torch.tensor([row["input_ids"] for row in rows()])
    is_bfloat16 = next(iter(model.parameters())).dtype == torch.bfloat16
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            logits = adapted(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient
    return {name: value.detach() for name, value in get_peft_model_state_dict(adapted).items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two adapters."""
    if one.keys() != other.keys():
        raise ValueError("the adapters have other weights")
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def record(folder: Path) -> None:
    """Trains every method under every strategy, and writes the figures."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(folder / "base")
    figures: dict[str, dict[str, float | str]] = {}
    for method in METHODS:
        expected = reference(base_model(folder, method))
        figures[method] = {"size of the adapter": max(float(value.abs().max()) for value in expected.values())}
        if method.startswith("nf4") and "bf16" not in method:
            figures[method]["dequantized"] = difference(expected, reference(base_model(folder, method).dequantize()))
        for strategy in STRATEGIES:
            processes = 1 if strategy == "one process" else 2
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(processes),
            ]
            command += [__file__, "--train", str(folder), method, strategy]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if "FG955" in line]
            if said:
                figures[method][strategy] = said[0].partition("[FG955] ")[2] or said[0]
            elif done.returncode:
                raise RuntimeError(done.stderr[-4000:])
            else:
                found = load_file(folder / f"{method} {strategy}" / "adapter_model.safetensors")
                figures[method][strategy] = difference(found, expected)
            print(method, strategy, figures[method][strategy], flush=True)
    text = json.dumps({"versions": {name: version(name) for name in PACKAGES}, "figures": figures}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def table(record: dict[str, Any]) -> str:
    """Returns the table of the documentation."""
    lines = [f"| weights | {' | '.join(STRATEGIES)} |", "|" + "---|" * (len(STRATEGIES) + 1)]
    for method, figures in record["figures"].items():
        cells = [figures[strategy] for strategy in STRATEGIES]
        shown = ["refused" if isinstance(cell, str) else f"{cell:.0e}" for cell in cells]
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return "\n".join(lines)


def page_with(text: str, written: str) -> str:
    """Returns a page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Records the figures, or trains one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=3, metavar=("FOLDER", "METHOD", "STRATEGY"))
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.train:
        train(Path(options.train[0]), *options.train[1:])
        return
    if not options.page:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
    written = table(json.loads(RECORD.read_text(encoding="utf-8")))
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), written), encoding="utf-8")


if __name__ == "__main__":
    main()
