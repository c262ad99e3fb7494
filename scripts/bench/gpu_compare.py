"""Trains the same models with Forgather, `transformers.Trainer` and a plain loop, each cell in a process of its own.

    python scripts/bench/gpu.py compare build/gpu.json                      # on a machine with a GPU, 8 minutes
    python scripts/bench/gpu.py compare build/gpu.json --only "1B, 2048"    # these cells
    python scripts/bench/gpu.py compare /tmp/tiny.json --tiny               # anywhere, tiny shapes: proves the script
    python scripts/write_performance.py build/performance build/gpu.json    # writes the rows of docs/performance.md

A cell that is done is not done again, so the same words go on where they were cut off. A cell that needs too much
memory is a result. All loops have the class of the model (Llama), its first weights, the rows, fused AdamW, clipping,
the precision and recomputation in common, and read their rows from a `DataLoader`. They differ in this:

* Forgather: its defaults, with blocks compiled, the loss without logits, and `varlen` attention for packed rows.
* transformers: `torch_compile`, which compiles the whole model; packed rows by their positions, with `sdpa`.
* plain: a loop by hand with Forgather's kernels: blocks compiled, `varlen` attention with the borders of documents; the
  loss of the model, with logits.

Tokens per second and MFU are those of the steps after the first ones, between two synchronisations; the peak is that of
`torch.cuda.max_memory_allocated` in these steps. FLOPs are 6 for each weight that is multiplied and token, and
those of attention within a document; recomputation does not count.

124M and 1B have float32 weights and moments, and compute in bf16 (autocast). 8B has weights, gradients and moments in
bf16 without float32 masters, 8 bytes for each parameter, 59.8 GiB: 16 bytes, 119.7 GiB, leave no room on 139 GiB.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, default_collate  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback  # noqa: E402

import forgather.ml as ml  # noqa: E402
import forgather.ml.varlen_attention  # noqa: E402, F401 - the config names this attention
from forgather.planner.hardware import hardware_of_device  # noqa: E402

STEPS, FIRST_MEASURED, DOCUMENTS = 12, 4, 4
LOOPS = ("forgather", "transformers", "plain")
KIND = "compared on "


@dataclass(frozen=True)
class Size:
    """The shape of a model, and how it is trained.

    Args:
        config: the arguments of its config.
        tokens: the tokens of a step.
        half: whether weights, gradients and moments are in bf16; otherwise only the computation is.
        recomputed: whether blocks are recomputed in the backward pass.
    """

    config: dict[str, Any]
    tokens: int
    half: bool = False
    recomputed: bool = False


def _shape(hidden: int, inner: int, layers: int, heads: int, keys: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


SIZES = {
    "124M": Size(_shape(768, 2048, 12, 12, 12, 50_304, True), 32_768),
    "1B": Size(_shape(2048, 8192, 16, 32, 8, 128_256, True), 16_384),
    "8B": Size(_shape(4096, 14_336, 32, 32, 8, 128_256, False), 8192, half=True, recomputed=True),
}
TINY = {
    "1B": Size(_shape(32, 64, 2, 4, 2, 64, True), 64),
    "8B": Size(_shape(32, 64, 2, 4, 2, 64, False), 64, half=True, recomputed=True),
}


@dataclass(frozen=True)
class Cell:
    """A model that a loop trains.

    Args:
        size: a key of `SIZES`.
        tokens: the tokens of a row.
        packed: whether a row has several documents.
        loop: one of `LOOPS`.
        tiny: whether the model is that of `TINY`, on the CPU.
    """

    size: str
    tokens: int
    packed: bool
    loop: str
    tiny: bool = False

    @property
    def name(self) -> str:
        """The name in the figures."""
        return f"{self.size}, {self.tokens}, {'packed' if self.packed else 'plain'}, {self.loop}"

    @property
    def shape(self) -> Size:
        """The shape of the model."""
        return (TINY if self.tiny else SIZES)[self.size]

    @property
    def rows(self) -> int:
        """The rows of a step."""
        return max(1, self.shape.tokens // self.tokens)

    @property
    def device(self) -> str:
        """The device."""
        return "cpu" if self.tiny else "cuda"


def cells(*, tiny: bool) -> list[Cell]:
    """Returns all cells; the three loops of one model follow each other."""
    sizes, lengths = (TINY, (16, 32)) if tiny else (SIZES, (2048, 8192))
    return [
        Cell(size, tokens, packed, loop, tiny)
        for size in sizes
        for tokens in lengths
        for packed in (False, True)
        for loop in LOOPS
    ]


def build(cell: Cell) -> LlamaForCausalLM:
    """Returns the model, whose random weights are drawn on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(use_cache=False, **cell.shape.config)
    config._attn_implementation = "varlen" if cell.packed and cell.loop != "transformers" else "sdpa"
    with torch.device(cell.device):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16) if cell.shape.half else model


def rows_of(cell: Cell) -> list[dict[str, Tensor]]:
    """Returns the rows of the run; each document of a packed row has positions from 0, and no label at its start."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS * cell.rows):
        ids = torch.randint(0, cell.shape.config["vocab_size"], (cell.tokens,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if cell.packed:
            length = cell.tokens // DOCUMENTS
            row["position_ids"] = torch.arange(cell.tokens) % length
            row["labels"][::length] = -100
        found.append(row)
    return found


def flops_of_token(model: LlamaForCausalLM, cell: Cell) -> float:
    """Returns the FLOPs of a token, forward and backward."""
    config = model.config
    weights = sum(one.numel() for one in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    seen = cell.tokens // (DOCUMENTS if cell.packed else 1)
    # Two products of queries and keys, of 2 FLOPs, over half of the positions; three times with the backward pass.
    return 6.0 * weights + 6.0 * config.num_hidden_layers * config.hidden_size * seen


class Watch:
    """Measures the steps after the first ones.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.losses: list[Tensor] = []
        self._steps = 0
        self.seconds = 0.0

    def end_step(self) -> None:
        """Starts and stops the clock at the steps where that is due."""
        self._steps += 1
        if self._steps in (FIRST_MEASURED, STEPS):
            if self._on_gpu:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds
        if self._steps == FIRST_MEASURED and self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def found(self, cell: Cell, model: LlamaForCausalLM, loss: float) -> dict[str, Any]:
        """Returns the figures of the cell."""
        rate = (STEPS - FIRST_MEASURED) * cell.rows * cell.tokens / self.seconds
        known = hardware_of_device(torch.cuda.get_device_name()) if self._on_gpu else None
        peak = known.peak_flops.get("bf16") if known else None
        return {
            "tokens_per_second": rate,
            "mfu": rate * flops_of_token(model, cell) / peak if peak else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if self._on_gpu else None,
            "loss": loss,
            "parameters": sum(one.numel() for one in model.parameters()),
        }


class Watching(TrainerCallback):
    """Tells a `Watch` of the steps of a trainer."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.end_step()


def settings(cell: Cell, folder: str) -> dict[str, Any]:
    """Returns the arguments that both trainers have."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": cell.rows,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": not cell.shape.half,
        "gradient_checkpointing": cell.shape.recomputed,
        "torch_compile": not cell.tiny,
        "logging_strategy": "steps",
        "logging_steps": STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": cell.tiny,
    }


def by_trainer(library: Any, cell: Cell, watch: Watch, folder: str, **more: Any) -> tuple[LlamaForCausalLM, float]:
    """Trains with the `Trainer` of a library, and returns the model and the mean loss."""
    model = build(cell)
    trainer = library.Trainer(
        model,
        library.TrainingArguments(**settings(cell, folder), **more),
        train_dataset=rows_of(cell),
        data_collator=default_collate,
        callbacks=[Watching(watch)],
    )
    trainer.train()
    return model, next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def by_forgather(cell: Cell, watch: Watch, folder: str) -> tuple[LlamaForCausalLM, float]:
    """Trains, and returns the model and the mean loss."""
    return by_trainer(ml, cell, watch, folder, linear_cross_entropy=True)


def by_transformers(cell: Cell, watch: Watch, folder: str) -> tuple[LlamaForCausalLM, float]:
    """Trains, and returns the model and the mean loss."""
    return by_trainer(transformers, cell, watch, folder, disable_tqdm=True)


def by_hand(cell: Cell, watch: Watch, folder: str) -> tuple[LlamaForCausalLM, float]:
    """Trains, and returns the model and the mean loss."""
    model = build(cell).train()
    if cell.shape.recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not cell.tiny:
        for block in model.model.layers:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    pins = cell.device == "cuda"
    losses = []
    for batch in DataLoader(rows_of(cell), batch_size=cell.rows, pin_memory=pins, collate_fn=default_collate):
        inputs = {name: value.to(cell.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(cell.device, torch.bfloat16, enabled=not cell.shape.half):
            loss = model(**inputs, **borders(cell)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        watch.end_step()
    return model, statistics.mean(torch.stack(losses).tolist())


def borders(cell: Cell) -> dict[str, Any]:
    """Returns the arguments by which attention knows the documents of packed rows."""
    if not cell.packed:
        return {}
    length = cell.tokens // DOCUMENTS
    every = torch.arange(0, cell.rows * cell.tokens + 1, length, dtype=torch.int32, device=cell.device)
    return {"cu_seq_lens_q": every, "cu_seq_lens_k": every, "max_length_q": length, "max_length_k": length}


TRAINED = dict(zip(LOOPS, (by_forgather, by_transformers, by_hand), strict=True))


def compared(cell: Cell) -> dict[str, Any]:
    """Trains a cell in this process; too little memory is a result."""
    watch = Watch(cell.device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, loss = TRAINED[cell.loop](cell, watch, folder)
    except Exception as error:  # noqa: BLE001 - a trainer raises an error of its own from torch's
        if "out of memory" not in f"{error} {error.__cause__}".lower():
            raise
        return {"out of memory": True}
    return watch.found(cell, model, loss)


def in_process(cell: Cell, seconds: float) -> dict[str, Any]:
    """Returns the figures of a cell that a process of its own trains.

    Raises:
        RuntimeError: if it fails or takes too long.
    """
    command = [sys.executable, __file__, json.dumps(asdict(cell))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {seconds:g} s") from None
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def entries(*, tiny: bool, only: str, seconds: float) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the names of cells, and functions that train them."""
    for cell in cells(tiny=tiny):
        if only in cell.name:
            yield cell.name, functools.partial(in_process, cell, seconds)


def ratios(found: dict[str, Any], other: str, key: str) -> list[float]:
    """Returns Forgather's figure divided by that of another loop, for each model that both have trained.

    Args:
        found: the figures by the name of the cell.
        other: the other loop.
        key: the name of the figure.
    """
    result = []
    for name, ours in found.items():
        start, _, loop = name.rpartition(", ")
        theirs = found.get(f"{start}, {other}", {})
        if loop == LOOPS[0] and ours.get(key) and theirs.get(key):
            result.append(ours[key] / theirs[key])
    return result


def main() -> int:
    """Trains one cell, which is given as JSON, and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", help="a cell as JSON")
    cell = Cell(**json.loads(parser.parse_args().cell))
    torch.set_num_threads(1) if cell.tiny else None
    print(json.dumps(compared(cell)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
