"""Checks on one GPU: what plans say of runs, measured there, and commands of the product that no CPU can prove.

    python scripts/bench/gpu.py plan build/gpu.json               # anywhere; needs no GPU
    python scripts/bench/gpu.py measure build/gpu.json            # on a machine with a GPU
    python scripts/bench/gpu.py limit build/gpu.json              # on the same machine
    python scripts/bench/gpu.py check build/gpu.json              # on the same machine
    python scripts/bench/gpu.py reads build/gpu.json              # on the same machine
    python scripts/bench/gpu.py compare build/gpu.json            # on the same machine; see gpu_compare.py
    python scripts/bench/gpu.py table build/gpu.json              # writes the tables of docs/planner_on_gpus.md

All pieces add to one JSON file and skip what it already has, so that a piece that was cut off goes on. `--minutes`
ends a piece between two cells. Nothing is downloaded: shapes of models come from the library, weights and rows are
random. torch from 2.10 on suffices; `datasets` and `deepspeed` are not needed.

A cell is planned for a GPU with `plan_run`, as `fgcli plan` does. It is measured with the trainer of the same settings:
the peak is `torch.cuda.max_memory_allocated` of the third to the last step, and the time of a step is the median of the
steps after the third, each between two synchronisations. The cells were fixed before the first of them was measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import gpu_compare  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import forgather.ml as ml  # noqa: E402
from forgather.ml.adapters import lora  # noqa: E402
from forgather.ml.benchmark_cell import random_row  # noqa: E402
from forgather.ml.classifiers import classifier_from_config  # noqa: E402
from forgather.ml.data.padding import PaddingCollator  # noqa: E402
from forgather.ml.models import seq2seq_from_config  # noqa: E402
from forgather.planner.fit import overheads  # noqa: E402
from forgather.planner.hardware import hardware, hardware_of_device  # noqa: E402
from forgather.planner.model_shapes import model_shape  # noqa: E402

STEPS, FIRST_MEASURED = 9, 3
DEVICES = ("h100", "h200")
PAGE = ROOT / "docs/planner_on_gpus.md"
MARKS = "<!-- figures: begin -->", "<!-- figures: end -->"
MIB = 2**20
MEASURED = "measured on "

BERT = "google-bert/bert-base-uncased"
GPT2, LLAMA, QWEN = "openai-community/gpt2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen3-0.6B"
LARGE, MISTRAL = "meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1"
BF16, RECOMPUTED = {"bf16": True}, {"gradient_checkpointing": True}
FP16 = {"fp16": True}
EAGER = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Cell:
    """A run on one GPU.

    Args:
        name: the name in the tables.
        model: the name of a shape.
        rows: the rows of a micro-batch.
        tokens: the tokens of a row.
        args: further training arguments.
        sizes: changes of the model's config.
        adapter: whether a LoRA is trained in place of all weights.
        padded: whether rows differ in length.
        kind: the trainer.
        held_out: whether the planner was finished before this cell was chosen and measured.
    """

    name: str
    model: str
    rows: int
    tokens: int = 1024
    args: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False
    padded: bool = False
    kind: str = "Trainer"
    held_out: bool = False


MEDIUM = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16}
MEDIUM |= {"num_key_value_heads": 8}
CELLS = [
    Cell("GPT-2, fp32", GPT2, 8),
    Cell("GPT-2, bf16", GPT2, 16, args=BF16),
    Cell("GPT-2, bf16, recomputed", GPT2, 16, args={**BF16, **RECOMPUTED}),
    Cell("GPT-2, fp16", GPT2, 16, args=FP16, kind="AccelTrainer"),
    Cell("GPT-2, bf16, eager attention", GPT2, 8, args=BF16, sizes=EAGER),
    Cell("Llama, 16 blocks of 1,024, fp32", LLAMA, 4, 2048, sizes=MEDIUM),
    Cell("Llama, 16 blocks of 1,024, bf16", LLAMA, 8, 2048, args=BF16, sizes=MEDIUM),
    Cell("the same, recomputed", LLAMA, 8, 2048, args={**BF16, **RECOMPUTED}, sizes=MEDIUM),
    Cell("the same, accumulated", LLAMA, 4, 2048, args={**BF16, "gradient_accumulation_steps": 3}, sizes=MEDIUM),
    Cell("the same, padded rows", LLAMA, 8, 2048, args=BF16, sizes=MEDIUM, padded=True),
    Cell("the same, 128,256 tokens", LLAMA, 4, 2048, args=BF16, sizes={**MEDIUM, "vocab_size": 128_256}),
    Cell("the same, compiled by blocks", LLAMA, 8, 2048, args={**BF16, "torch_compile_regions": True}, sizes=MEDIUM),
    Cell("the same, SGD", LLAMA, 4, 2048, args={**BF16, "optim": "sgd"}, sizes=MEDIUM),
    Cell("the same, Adafactor", LLAMA, 4, 2048, args={**BF16, "optim": "adafactor"}, sizes=MEDIUM),
    Cell("TinyLlama 1.1B, bf16", LLAMA, 2, 2048, args=BF16),
    Cell("TinyLlama 1.1B, bf16, recomputed", LLAMA, 8, 2048, args={**BF16, **RECOMPUTED}),
    Cell("TinyLlama 1.1B, LoRA, bf16", LLAMA, 4, 2048, args=BF16, adapter=True),
    Cell("TinyLlama 1.1B, LoRA, bf16, recomputed", LLAMA, 8, 2048, args={**BF16, **RECOMPUTED}, adapter=True),
    Cell("Llama 8B of 4 blocks, bf16, recomputed", LARGE, 1, 4096, {**BF16, **RECOMPUTED}, {"num_hidden_layers": 4}),
    Cell("Mistral 7B of 4 blocks, bf16", MISTRAL, 1, 4096, BF16, {"num_hidden_layers": 4}),
    Cell("Qwen3 0.6B, bf16", QWEN, 4, 2048, args=BF16),
    Cell("Qwen3 0.6B, bf16, recomputed", QWEN, 8, 2048, args={**BF16, **RECOMPUTED}),
    Cell("BERT, classes, fp32", BERT, 32, 512),
    Cell("BERT, classes, bf16", BERT, 32, 512, args=BF16),
    Cell("T5, bf16", "google-t5/t5-base", 8, 512, args=BF16),
    Cell("ViT, bf16", "google/vit-base-patch16-224", 64, args=BF16),
    # Chosen to be held out; the gradient of a learned mask, and more time of the host, are planned because of them.
    Cell("ViT large, bf16", "google/vit-large-patch16-224", 32, args=BF16),
    Cell("Flan-T5, bf16", "google/flan-t5-base", 8, 512, args=BF16),
    Cell("T5 small, fp32", "google-t5/t5-small", 16, 512),
    *(
        replace(cell, held_out=True)
        for cell in (
            Cell("OPT 125M, bf16", "facebook/opt-125m", 16, args=BF16),
            Cell("OPT 350M, fp32, recomputed", "facebook/opt-350m", 8, args=RECOMPUTED),
            Cell("GPT-2 medium, LoRA, bf16", "openai-community/gpt2-medium", 8, args=BF16, adapter=True),
            Cell("RoBERTa, classes, bf16, recomputed", "FacebookAI/roberta-base", 64, 512, {**BF16, **RECOMPUTED}),
            Cell("BERT large, classes, bf16", "google-bert/bert-large-uncased", 16, 512, args=BF16),
            Cell("Gemma 2B of 4 blocks, bf16", "google/gemma-2b", 2, 2048, BF16, {"num_hidden_layers": 4}),
            Cell("Gemma 2 9B of 2 blocks, bf16", "google/gemma-2-9b", 1, 2048, BF16, {"num_hidden_layers": 2}),
            Cell("Phi 1.5 of 8 blocks, bf16", "microsoft/phi-1_5", 4, 2048, BF16, {"num_hidden_layers": 8}),
            Cell("Qwen2.5 0.5B, bf16, padded rows", "Qwen/Qwen2.5-0.5B", 4, 2048, args=BF16, padded=True),
            Cell("Llama 3.2 1B, bf16, recomputed", "meta-llama/Llama-3.2-1B", 2, 4096, args={**BF16, **RECOMPUTED}),
            Cell("ViT, fp32, recomputed", "google/vit-base-patch16-224", 64, args=RECOMPUTED),
        )
    ),
]


def config_of(cell: Cell) -> Any:
    """Returns the config of the cell's model."""
    sizes = {**model_shape(cell.model).config, **cell.sizes}
    attention = sizes.pop("attn_implementation", None)
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    if attention:
        config._attn_implementation = attention
    return config


def build(cell: Cell, device: str) -> nn.Module:
    """Returns the model of a cell, whose random weights are drawn on a device."""
    config, family = config_of(cell), model_shape(cell.model).family
    with torch.device(device):
        if family == "text_generation":
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=config._attn_implementation
            )
        if family == "text2text_generation":
            config.decoder_start_token_id = 0
            return seq2seq_from_config(config)
        task = "image_classification" if family == "vision" else "classification"
        return classifier_from_config(config, task=task, labels=["a", "b", "c"])


def rows_of(cell: Cell) -> list[dict[str, Any]]:
    """Returns the rows of the run, which are the same in every process."""
    torch.manual_seed(0)
    shape = model_shape(cell.model)
    count = cell.rows * cell.args.get("gradient_accumulation_steps", 1) * STEPS
    row = random_row(shape, cell.tokens)
    if shape.family not in ("text_generation", "text2text_generation", "vision"):
        row["labels"] = 0
    if not cell.padded:
        return [row] * count
    lengths = torch.randint(cell.tokens // 2, cell.tokens, (count,)).tolist()
    lengths[:: cell.rows] = [cell.tokens] * len(lengths[:: cell.rows])
    return [{name: value[:length] for name, value in row.items()} for length in lengths]


def make_trainer(
    cell: Cell,
    output_dir: str,
    hook: Callable[[Any], Any] = lambda made: made,
    *,
    device: str = "cpu",
    callbacks: tuple[TrainerCallback, ...] = (),
) -> Any:
    """Returns the trainer of a cell.

    Args:
        cell: the cell.
        output_dir: the folder of the run.
        hook: what `plan_run` puts around the constructor of the model.
        device: where the weights are drawn, "cpu" or "cuda"; on "cpu" the run trains there.
        callbacks: the callbacks of the run.
    """
    settings = {
        "per_device_train_batch_size": cell.rows,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": device == "cpu",
        # The figures that are recorded are those of runs that held all logits.
        "linear_cross_entropy": False,
        **cell.args,
    }
    arguments = getattr(ml, cell.kind.replace("Trainer", "TrainingArguments"))
    return getattr(ml, cell.kind)(
        model_init=functools.partial(hook(build), cell, device),
        args=arguments(output_dir, **settings),
        train_dataset=rows_of(cell),
        data_collator=PaddingCollator() if cell.padded else None,
        adapter=lora(r=16) if cell.adapter else None,
        callbacks=list(callbacks),
    )


def planned(cell: Cell) -> dict[str, Any]:
    """Returns what a plan says of a cell: the peak of a training step, its rows, and the range of its seconds."""
    # Other pieces run where torch is older, and the planner needs the tested one.
    from forgather.launch.time_planning import step_of
    from forgather.ml.planner.memory import plan_run

    with tempfile.TemporaryDirectory() as folder:
        plan, work = plan_run(
            lambda hook: make_trainer(cell, folder, hook), world_size=1, local_world_size=1, device_type="cuda"
        )
    (phase,) = (one for one in plan["ranks"][0]["phases"] if one["phase"] == "training step")
    steps = {name: step_of(work, hardware(name)) for name in DEVICES}
    return {
        **{name: phase[name] for name in ("at", "made_by", "rows")},
        "peak_bytes": sum(row["num_bytes"] for row in phase["rows"] if row["source"] == "traced"),
        "parameters": plan["parameters"],
        "seconds": {name: [step.seconds.low, step.seconds.high] for name, step in steps.items()},
        "flops": steps[DEVICES[0]].model_flops,
    }


class Steps(TrainerCallback):
    """Measures the steps of a run on a GPU: the seconds of each, and the peak of those after the first ones."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        if state.global_step == FIRST_MEASURED:
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def measured(cell: Cell) -> dict[str, Any]:
    """Trains a cell on the GPU, and returns the peak in bytes and the median seconds of a step."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder, device="cuda", callbacks=(steps,))
        trainer.train()
        free, total = torch.cuda.mem_get_info()
        found = {
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "held_bytes": total - free,
            "step_seconds": statistics.median(steps.seconds[FIRST_MEASURED:]),
            "all_step_seconds": steps.seconds,
            "before_bytes": before,
        }
    del trainer
    return found


class Unread(TrainerCallback):
    """Makes torch raise at a line that waits for the GPU, in the steps between the first ones and the log line."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_steady = FIRST_MEASURED <= state.global_step < state.max_steps - 1
        torch.cuda.set_sync_debug_mode("error" if is_steady else "default")
        self.steps += is_steady


def reads(cell: Cell) -> dict[str, Any]:
    """Trains a cell, and returns whether its steps end without waiting for the GPU, or the line that waits.

    `torch.cuda.set_sync_debug_mode` sees reads of values and copies that block, not waits for an event.
    """
    gc.collect()
    torch.cuda.empty_cache()
    watch = Unread()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder, device="cuda", callbacks=(watch,))
        try:
            trainer.train()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            places = traceback.extract_tb(error.__traceback__)
            own = [one for one in places if "/forgather/" in one.filename] or places
            return {"waits": True, "line": f"{own[-1].filename}:{own[-1].lineno}", "inside": str(places[-1])}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"waits": False, "steps": watch.steps}


def device_name() -> str:
    """Returns torch's name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


LIMITED = [cell for cell in CELLS if "ecomputed" in cell.name or "LoRA" in cell.name]
"""The cells with the most memory that torch reserves beyond its peak."""


def runs_within(cell: Cell, figures: Figures) -> dict[str, Any]:
    """Trains a cell in the memory that the plan gives it at most, and in 3 % less than its measured peak.

    Only torch's allocator is limited, so the context of the device does not count.
    """
    plan, peak = figures.data["planned"][cell.name], figures.data[f"{MEASURED}{device_name()}"][cell.name]["peak_bytes"]
    found = {one.name: one.most for one in overheads("cuda", plan["peak_bytes"], {})}
    most = sum(value for name, value in found.items() if name != "device context")
    return {
        "fragmentation": round(found["fragmentation"] / plan["peak_bytes"], 3),
        "within the plan": _survives(cell, plan["peak_bytes"] + most),
        "below the peak": _survives(cell, peak * 0.97),
    }


def _survives(cell: Cell, limit: float) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    try:
        measured(cell)
    except Exception as error:  # noqa: BLE001 - the trainer raises an error of its own from torch's
        if "out of memory" not in f"{error} {error.__cause__}".lower():
            raise
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def facts() -> dict[str, Any]:
    """Returns the versions that figures depend on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def result_of(compute: Callable[[], Any]) -> Any:
    """Returns what a function returns, or the error that it raises as data."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - one cell that fails must not end the others
        return {"error": f"{type(error).__name__}: {error}"[:3000], "traceback": traceback.format_exc()[-3000:]}


class Figures:
    """The JSON file that all pieces add to.

    Args:
        path: the file; it is written after each entry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    def add(self, kind: str, name: str, value: Any) -> None:
        """Adds an entry, and writes the file."""
        self.data.setdefault(kind, {})[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        new.replace(self._path)

    def run(self, kind: str, entries: dict[str, Callable[[], Any]], minutes: float) -> None:
        """Computes the entries that are missing, until the minutes are over."""
        end = time.monotonic() + 60 * minutes
        known = self.data.get(kind, {})
        for name, compute in entries.items():
            if name in known and "error" not in known[name]:
                continue
            if time.monotonic() > end:
                print(f"{kind}: {minutes} minutes are over; run the same words again for the rest", file=sys.stderr)
                return
            start = time.monotonic()
            value = result_of(compute)
            self.add(kind, name, value)
            said = value.get("error") or "done"
            print(f"{kind}: {name}: {said} ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)


# ---- Commands of the product ----------------------------------------------------------------------------------------


def fgcli(*words: str) -> str:
    """Runs `fgcli`, and returns what it prints.

    Raises:
        RuntimeError: if it fails, with the end of its output.
    """
    command = [sys.executable, "-m", "forgather", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
    return done.stdout + done.stderr


SHORT = ("--set", "trainer_args.max_steps=30", "--set", "trainer_args.eval_steps=30")
DEMO = ("-p", "projects/tiny_llama")
PARALLEL = ("-p", "projects/parallel")
ONE = ("--nproc-per-node", "1")
CHANGES = {
    "fp32": (),
    "bf16": ("--set", "+trainer_args.bf16=true"),
    "async": ("--set", "+trainer_args.async_save=true"),
    "recomputed": ("--set", "+trainer_args.gradient_checkpointing=true"),
    "compiled": ("--set", "+trainer_args.torch_compile_regions=true"),
}


def weights(run: Path) -> str:
    """Returns a digest of the weights of a checkpoint or of an output folder."""
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def resumed(*words: str) -> dict[str, Any]:
    """Trains the demo for 30 steps twice and resumes from step 15, and compares the weights at the end."""
    saves = (*SHORT, "--set", "trainer_args.save_steps=15")
    with tempfile.TemporaryDirectory() as folder:
        whole, again, parts = (Path(folder) / name for name in ("whole", "again", "parts"))
        for output in (whole, again):
            said = fgcli(*DEMO, "train", *saves, *words, "--output-dir", str(output))
        fgcli(*DEMO, "train", *saves, *words, "--output-dir", str(parts), "--resume", str(whole / "checkpoint-15"))
        found = [weights(one) for one in (whole, again, parts)]
    return {
        "repeated is equal": found[0] == found[1],
        "resumed is equal": found[0] == found[2],
        "output": said[-1500:],
    }


def one_command(*words: str) -> dict[str, Any]:
    """Runs a command, and returns the end of what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        output = ("--output-dir", folder) if "train" in words else ()
        return {"output": fgcli(*words, *output)[-3000:]}


CHECKS: dict[str, Callable[[], Any]] = {
    "doctor": functools.partial(one_command, "doctor"),
    "plan": functools.partial(one_command, *DEMO, "plan"),
    "plan --find": functools.partial(one_command, *DEMO, "plan", "--find"),
    "plan of parallel": functools.partial(one_command, *PARALLEL, "-t", "fsdp2", "plan", "--gpus", "2"),
    "dry run": functools.partial(one_command, *DEMO, "train", "--dry-run"),
    "hf_trainer": functools.partial(one_command, *DEMO, "-t", "hf_trainer", "train", *SHORT),
    "profile": functools.partial(
        one_command, *DEMO, "train", *SHORT, "--set", "+trainer_args.profile={wait: 1, warmup: 1, active: 2}"
    ),
    "fp16": functools.partial(
        one_command,
        *PARALLEL,
        "-t",
        "ddp",
        "train",
        "--nproc-per-node",
        "1",
        *SHORT,
        "--set",
        "+trainer_args.fp16=true",
    ),
    **{
        f"{name} on one process": functools.partial(one_command, *PARALLEL, "-t", name, "train", *ONE, *SHORT)
        for name in ("single", "ddp", "fsdp2")
    },
    **{f"resume, {name}": functools.partial(resumed, *words) for name, words in CHANGES.items()},
}


def check(figures: Figures, kind: str, chosen: str, jobs: int) -> None:
    """Runs the checks that are missing, several at a time."""
    known = figures.data.get(kind, {})
    missing = [name for name in CHECKS if chosen in name and "error" in known.get(name, {"error": ""})]
    with ThreadPoolExecutor(jobs) as pool:
        done = {pool.submit(result_of, CHECKS[name]): name for name in missing}
        for future in as_completed(done):
            figures.add(kind, done[future], future.result())
            print(f"check: {done[future]}: {future.result().get('error', 'done')}", file=sys.stderr, flush=True)


# ---- The table ------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    """Returns the tables as Markdown."""
    lines: list[str] = []
    for kind, cells in figures.items():
        if kind.startswith(MEASURED):
            device = kind.removeprefix(MEASURED)
            versions = figures["facts"][device]
            limited = figures.get(f"limited on {device}", {})
            lines += [
                f"One {device}, torch {versions['torch']}, transformers {versions['transformers']}:",
                "",
                "| cell | weights, M | measured, MiB | plan | reserved beyond | step, ms | planned, ms | |",
                "|---|---|---|---|---|---|---|---|",
                *(line(name, figures["planned"][name], found, device) for name, found in cells.items()),
                "",
                *summary(figures, cells, limited, device),
            ]
        elif kind.startswith("checked on "):
            lines += ["", f"Commands on one {kind.removeprefix('checked on ')}:", "", "| command | |", "|---|---|"]
            lines += [f"| {name} | {outcome(found)} |" for name, found in sorted(cells.items())]
        elif kind.startswith("reads on "):
            lines += ["", f"Waits of a step on one {kind.removeprefix('reads on ')}:", "", "| cell | |", "|---|---|"]
            lines += [
                f"| {name} | {found.get('error') or found.get('line', 'none')} |" for name, found in cells.items()
            ]
    return "\n".join(lines)


def summary(figures: dict[str, Any], cells: dict[str, Any], limited: dict[str, Any], device: str) -> list[str]:
    """Returns sentences on all cells of a device."""
    held_out = {cell.name for cell in CELLS if cell.held_out}
    said = []
    for word, chosen in (("developed", set(cells) - held_out), ("held out", held_out & set(cells))):
        errors = [figures["planned"][name]["peak_bytes"] / cells[name]["peak_bytes"] - 1 for name in chosen]
        inside = sum(-0.02 <= error <= 0.03 for error in errors)
        timed = [is_inside(figures["planned"][name], cells[name], device) for name in chosen]
        said.append(
            f"* {word}: {inside} of {len(errors)} plans of memory are within -2 to +3 %, and {sum(timed)} of "
            f"{len(timed)} steps take a time within the planned range."
        )
    for share in sorted({one["fragmentation"] for one in limited.values()}):
        runs = [one for one in limited.values() if one["fragmentation"] == share]
        said.append(
            f"* In a memory with {share:.0%} for fragmentation beyond the planned peak and its workspaces, "
            f"{sum(one['within the plan'] for one in runs)} of {len(runs)} runs end well; in 3 % less than the "
            f"measured peak, {sum(one['below the peak'] for one in runs)}."
        )
    return said


def outcome(found: dict[str, Any]) -> str:
    """Returns what came of a check."""
    if "error" in found:
        return "failed"
    return (
        ", ".join(f"{word}: {'yes' if value else 'no'}" for word, value in found.items() if word != "output") or "runs"
    )


def is_inside(plan: dict[str, Any], found: dict[str, Any], device: str) -> bool:
    """Returns whether the median step takes a time within the planned range."""
    known = hardware_of_device(device)
    low, high = plan["seconds"][known.name] if known else (0.0, 0.0)
    return bool(low <= found["step_seconds"] <= high)


def line(name: str, plan: dict[str, Any], found: dict[str, Any], device: str) -> str:
    """Returns the row of a cell."""
    if "error" in found or "error" in plan:
        return f"| {name} | | {found.get('error') or plan.get('error')} | | | | | |"
    known = hardware_of_device(device)
    low, high = plan["seconds"][known.name] if known else (0.0, 0.0)
    seconds, peak = found["step_seconds"], found["peak_bytes"]
    notes = ["held out"] * any(cell.held_out for cell in CELLS if cell.name == name)
    notes += ["time outside"] * (not is_inside(plan, found, device))
    notes += ["compilation is not modelled"] * ("compiled" in name)
    return (
        f"| {name} | {plan['parameters'] / 1e6:,.0f} | {peak / MIB:,.1f} | {plan['peak_bytes'] / peak - 1:+.2%} "
        f"| {found['reserved_bytes'] / peak - 1:+.0%} | {seconds * 1e3:,.1f} | {low * 1e3:,.1f} to {high * 1e3:,.1f} "
        f"| {', '.join(notes)} |"
    )


def write_page(text: str) -> None:
    """Writes the tables into the page of the docs."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = (page.index(mark) for mark in MARKS)
    PAGE.write_text(page[:begin] + f"{MARKS[0]}\n{text}\n" + page[end:], encoding="utf-8")


def main() -> int:
    """Runs one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "piece", choices=("plan", "measure", "limit", "check", "reads", "compare", "table"), help="see above"
    )
    parser.add_argument("figures", type=Path, help="the JSON file that is read and added to")
    parser.add_argument(
        "--minutes", type=float, default=8, help="after how many minutes no further cell begins (default: 8)"
    )
    parser.add_argument("--jobs", type=int, default=6, help="checks at a time")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument(
        "--seconds", type=float, default=240, help="the longest time of one cell of `compare` (default: 240)"
    )
    parser.add_argument("--tiny", action="store_true", help="`compare` trains tiny models on the CPU")
    options = parser.parse_args()
    figures = Figures(options.figures)
    chosen = [cell for cell in CELLS if options.only in cell.name]
    if options.piece == "plan":
        figures.run("planned", {one.name: functools.partial(planned, one) for one in chosen}, options.minutes)
    elif options.piece == "measure":
        figures.add("facts", device_name(), facts())
        kind = f"{MEASURED}{device_name()}"
        figures.run(kind, {one.name: functools.partial(measured, one) for one in chosen}, options.minutes)
    elif options.piece == "limit":
        kind = f"limited on {device_name()}"
        limited = [cell for cell in LIMITED if options.only in cell.name]
        figures.run(kind, {one.name: functools.partial(runs_within, one, figures) for one in limited}, options.minutes)
    elif options.piece == "reads":
        kind = f"reads on {device_name()}"
        figures.run(kind, {one.name: functools.partial(reads, one) for one in chosen}, options.minutes)
    elif options.piece == "compare":
        name = "CPU, tiny" if options.tiny else device_name()
        figures.add("facts", name, facts())
        compared = gpu_compare.entries(tiny=options.tiny, only=options.only, seconds=options.seconds)
        figures.run(f"{gpu_compare.KIND}{name}", dict(compared), options.minutes)
    elif options.piece == "check":
        kind = f"checked on {device_name()}"
        check(figures, kind, options.only, options.jobs)
    else:
        write_page(table(figures.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
