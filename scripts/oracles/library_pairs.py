"""Trains with bitsandbytes and torchao together with settings that save memory; records distances from a plain loop.

Quantized base models have an adapter and are trained with each setting, in one process and in two; the reference is the
loop of `quantized_models.py`. Optimizers of bitsandbytes step inside the backward pass; the reference is the run that
steps after it. Run `make oracles`, which installs both libraries into a folder of their own.

Example:
    python scripts/oracles/library_pairs.py    writes tests/ml/recorded/library_pairs.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "oracles")]

import bitsandbytes_optimizers as eight_bits  # noqa: E402
import quantized_models as quantized  # noqa: E402

from tests.ml.moved_activations import moved_to_host  # noqa: E402

RECORD = ROOT / "tests" / "ml" / "recorded" / "library_pairs.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "activation_offloading": {"activation_offloading": True},
    "recomputed and offloaded": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
    "linear_cross_entropy": {"linear_cross_entropy": True, "linear_cross_entropy_chunk_size": 8},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "data_streams": {"data_streams": 2},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}
LAYOUTS = {
    "nf4": ("one process", "DDP", "FSDP2"),
    "int8": ("one process", "DDP"),
    "torchao int8": ("one process",),
}
STEPPED = {"one process": eight_bits.NAMES, "FSDP2": ("paged_adamw_32bit", "lion_32bit")}


def settings_of(strategy: str) -> dict[str, dict[str, Any]]:
    """Returns the settings that a strategy accepts: DDP keeps gradients until the backward pass ends."""
    return {name: given for name, given in SETTINGS.items() if strategy != "DDP" or name != "optimizer_in_backward"}


def train_all(folder: Path, method: str, strategy: str) -> None:
    """Trains a quantized model with each setting; each adapter is saved in a folder named after the three."""
    for setting, given in settings_of(strategy).items():
        torch._dynamo.reset()
        quantized.STRATEGIES[f"{strategy}, {setting}"] = {**quantized.STRATEGIES[strategy], **given}
        train(folder, method, f"{strategy}, {setting}", 1 if strategy == "one process" else 2)


def train(folder: Path, method: str, name: str, ranks: int) -> None:
    """Trains one quantized model with the settings of a name."""
    import forgather.ml
    from forgather.ml.adapters import lora

    trainer = forgather.ml.Trainer if ranks == 1 else forgather.ml.AccelTrainer
    args = trainer.ARGUMENTS(
        output_dir=str(folder / f"{method} {name}"),
        use_cpu=True,
        per_device_train_batch_size=quantized.ROWS // ranks,
        max_steps=quantized.STEPS,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **quantized.STRATEGIES[name],
    )
    model = quantized.base_model(folder, method)
    with moved_to_host() as moved:
        trainer(model=model, args=args, train_dataset=quantized.rows(), adapter=lora(r=4, alpha=8)).train()
    if bool(moved) is not ("offload" in name):
        raise RuntimeError(f"{name}: {len(moved)} storages were moved")


def step_all(folder: Path, strategy: str) -> None:
    """Trains with each optimizer of bitsandbytes, stepping after the backward pass and in it."""
    plain = dict(eight_bits.STRATEGIES[strategy])
    for name, more in (("after", {}), ("within", {"optimizer_in_backward": True})):
        eight_bits.STRATEGIES[strategy] = {**plain, **more}
        for optim in STEPPED[strategy]:
            eight_bits.train(folder / name, optim, strategy, resumes=False)


def launch(folder: Path, ranks: int, *words: str) -> None:
    """Runs this script in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, __file__, str(folder), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


def base(folder: Path) -> None:
    """Writes the base model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(folder / "base")
    for name in ("after", "within"):
        (folder / name).mkdir()
        (folder / name / "base").symlink_to(folder / "base")


def record(folder: Path) -> None:
    """Trains everything, and writes the figures."""
    base(folder)
    figures: dict[str, Any] = {}
    for method, strategies in LAYOUTS.items():
        expected = quantized.reference(quantized.base_model(folder, method))
        figures[method] = {"size of the adapter": max(float(value.abs().max()) for value in expected.values())}
        for strategy in strategies:
            launch(folder, 1 if strategy == "one process" else 2, method, strategy)
            for setting in settings_of(strategy):
                found = quantized.load_file(folder / f"{method} {strategy}, {setting}" / "adapter_model.safetensors")
                figures[method][f"{strategy}, {setting}"] = quantized.difference(found, expected)
        print(method, figures[method], flush=True)
    steps: dict[str, float] = {}
    for strategy, names in STEPPED.items():
        launch(folder, 1 if strategy == "one process" else 2, strategy)
        for optim in names:
            own, other = (eight_bits.weights_of(folder / name / f"{optim} {strategy}") for name in ("after", "within"))
            steps[f"{optim}, {strategy}"] = eight_bits.difference(own, other)
    print(steps, flush=True)
    versions = {name: version(name) for name in quantized.PACKAGES}
    text = json.dumps({"versions": versions, "quantized": figures, "stepped in the backward pass": steps}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Records the figures, or trains a part of them in the processes of a launch."""
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
        return
    torch.set_num_threads(1)
    run = train_all if len(sys.argv) == 4 else step_all
    run(Path(sys.argv[1]), *sys.argv[2:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
