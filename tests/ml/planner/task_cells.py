"""Cells of losses with other models, adapters, quantized weights, optimizers and combined layouts.

Each cell is a function that makes a trainer, so that it can show whatever a user may combine. Cells with `needs` use a
library that is not in `dev`: they run where it is installed.
"""

import functools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig, TorchAoConfig

import forgather.ml as ml
from forgather.launcher_env import ProcessFacts
from forgather.ml import optim
from forgather.ml.adapters import lora
from forgather.ml.data import PreferenceCollator
from forgather.ml.distillation import DistillationLoss
from forgather.ml.models import from_pretrained
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss
from tests.ml.distributed.gang import run_ranks
from tests.ml.packed_rows import SYMBOLS, packed
from tests.ml.planner import cell_models
from tests.ml.planner.cells import SHARDED, measured_peak

PAIRS = {"data_collator": PreferenceCollator()}
F1B = {"schedule_class": "Schedule1F1B", "pipeline_chunks": 4}
KINDS = {"single": "Trainer", "accel": "AccelTrainer", "pipeline": "PipelineTrainer"}
BASE = {"hidden_size": 128, "intermediate_size": 320}


@dataclass(frozen=True)
class TaskCell:
    """A run, how far its plan may be off, as a share of what was measured, and the library that it needs.

    `mapped` is the number of models that the run reads from a file: their weights are pages of this file, which torch's
    allocator does not count.
    """

    name: str
    make: object
    world_size: int = 1
    above: float = 0.03
    below: float = 0.02
    needs: str | None = None
    mapped: int = 0

    def __str__(self):
        return self.name


@functools.cache
def base():
    """Returns the folder of a stored model."""
    folder = tempfile.mkdtemp()
    cell_models.model("llama", 4, **BASE).save_pretrained(folder)
    return folder


def stored(**options):
    return from_pretrained(base(), **options)


def quantized(kind, compute=torch.float32, **options):
    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    elif kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
            bnb_4bit_quant_storage=kind,
        )
    return stored(quantization_config=config, dtype=compute, **options)


def in_memory(make):
    """Returns a model that has no weights in the pages of a file."""
    model = make()
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.clone()
    return model


def trainer(kind="single", args=None, model=None, rows=None, adapter=None, **given):
    """Returns a function that makes a trainer."""

    def make(output_dir, hook=None):
        name = KINDS[kind]
        settings = {"use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 4, "save_strategy": "no"}
        arguments = getattr(ml, name.replace("Trainer", "TrainingArguments"))
        return getattr(ml, name)(
            model_init=model or functools.partial(cell_models.model, "llama", 4),
            args=arguments(output_dir, **{**settings, **(args or {})}),
            train_dataset=cell_models.rows("llama", 64) if rows is None else rows(),
            adapter=None if adapter is None else lora(r=4, **adapter),
            **{key: value() if isinstance(value, functools.partial) else value for key, value in given.items()},
        )

    return make


def judged():
    numbers = random.Random(0)

    def ids(count):
        return [numbers.randrange(1, 500) for _ in range(count)]

    return [
        {"prompt_ids": ids(16), "chosen_ids": ids(24), "rejected_ids": ids(24), "completion_ids": ids(24)}
        | {"kl_ids": ids(24), "label": number % 2}
        for number in range(64)
    ]


def pairs():
    return [{name: row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for row in judged()]


def feedback():
    return [{name: row[name] for name in ("prompt_ids", "completion_ids", "kl_ids", "label")} for row in judged()]


def documents():
    numbers = random.Random(0)
    texts = ["".join(numbers.choices(SYMBOLS, k=numbers.randint(5, 60))) for _ in range(200)]
    return packed(texts, 64, document_boundaries=True)


class ChunkedLoss(nn.Module):
    """A model that computes its logits in parts, and again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = cell_models.model("llama", 4)

    def forward(self, input_ids, labels):
        hidden = self.inner.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()

        def part(states, wanted):
            return nn.functional.cross_entropy(self.inner.lm_head(states).float(), wanted, reduction="sum")

        parts = zip(hidden.chunk(8), targets.chunk(8), strict=True)
        return {"loss": sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / targets.numel()}


def stepped(name, needs=None, **given):
    """Returns a cell of 8 tokens: its peak is in the optimizer's step, or in what a kernel allocates inside."""

    def short():
        rows = cell_models.rows("llama", 64)
        return [{key: value[:8] for key, value in row.items()} for row in rows]

    args = {"per_device_train_batch_size": 1, **given.pop("args", {})}
    return TaskCell(f"step of {name}", trainer(args=args, rows=short, **given), needs=needs)


def half(name, model, **given):
    return TaskCell(
        name, trainer(args={"bf16": True, **given.pop("args", {})}, model=model, **given), needs="bitsandbytes"
    )


NF4 = functools.partial(quantized, torch.uint8)
INT8 = functools.partial(quantized, "int8")
NF4_BF16 = functools.partial(quantized, torch.bfloat16, torch.bfloat16)
UPCAST = functools.partial(NF4_BF16, upcast_unquantized=True)
OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit", "rmsprop_bnb_8bit")
TOKEN_ROWS = {"trainable_token_indices": [3, 5]}
TEACHER = functools.partial(lambda: DistillationLoss(teacher=base()))
REFERENCE = functools.partial(lambda: DPOLoss(reference=base()))

QUICK = [TaskCell("distillation", trainer(model=stored, loss_fn=TEACHER), mapped=2)]
FULL = [
    TaskCell("distillation, FSDP2", trainer("accel", SHARDED, stored, loss_fn=TEACHER), 2, above=0.05, mapped=1),
    TaskCell("DPO with a reference", trainer(model=stored, rows=pairs, loss_fn=REFERENCE, **PAIRS), mapped=1),
    TaskCell("DPO, LoRA", trainer(model=stored, rows=pairs, adapter={}, loss_fn=DPOLoss(), **PAIRS), mapped=1),
    TaskCell(
        "DPO, LoRA, FSDP2", trainer("accel", SHARDED, stored, pairs, {}, loss_fn=DPOLoss(), **PAIRS), 2, above=0.05
    ),
    TaskCell("ORPO", trainer(model=stored, rows=pairs, loss_fn=ORPOLoss(), **PAIRS), mapped=1),
    TaskCell("KTO, LoRA", trainer(model=stored, rows=feedback, adapter={}, loss_fn=KTOLoss(), **PAIRS), mapped=1),
    TaskCell("chunked loss", trainer(model=ChunkedLoss)),
    TaskCell("packed documents", trainer(rows=documents)),
    TaskCell("LoRA, DDP", trainer("accel", adapter={}), 2, above=0.1, below=0.03),
    TaskCell("LoRA, token rows", trainer(adapter=TOKEN_ROWS), above=0.05),
    TaskCell("LoRA, token rows, FSDP2", trainer("accel", SHARDED, adapter=TOKEN_ROWS), 2, above=0.05),
    TaskCell("LoRA, DoRA", trainer(adapter={"use_dora": True}), above=0.05),
    TaskCell("LoRA+", trainer(args={"loraplus_lr_ratio": 8.0}, adapter={}), above=0.05),
    TaskCell("LoRA, 1F1B", trainer("pipeline", F1B, adapter={}), 2, above=0.1, below=0.03),
    TaskCell("FSDP2, offload", trainer("accel", {**SHARDED, "fsdp_config": {"cpu_offload": True}}), 2, above=0.05),
    TaskCell("1F1B x FSDP2", trainer("pipeline", {**F1B, "data_parallel_size": 2, **SHARDED}), 4, 0.1, 0.03),
    TaskCell("Muon, FSDP2", trainer("accel", SHARDED, optimizer_factory=optim.MuonWithAdamW), 2, above=0.05),
    *(stepped(name, args={"optim": name}) for name in ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor")),
    *(stepped(name, args={"optim": name}) for name in ("adagrad", "rmsprop")),
    stepped("Muon", optimizer_factory=optim.MuonWithAdamW),
    stepped("torch's Adafactor", optimizer_factory=optim.adafactor),
    TaskCell("QLoRA", trainer(model=NF4, adapter={}), needs="bitsandbytes", above=0.05),
    half("QLoRA, bf16", NF4_BF16, adapter={}),
    half(
        "QLoRA, bf16, recomputed, upcast",
        UPCAST,
        args={"gradient_checkpointing": True},
        adapter={},
    ),
    TaskCell("QLoRA, DDP", trainer("accel", None, NF4, adapter={}), 2, 0.05, needs="bitsandbytes"),
    TaskCell("QLoRA, FSDP2", trainer("accel", SHARDED, NF4, adapter={}), 2, 0.05, needs="bitsandbytes"),
    TaskCell(
        "QLoRA, FSDP2, bf16 storage",
        trainer("accel", {**SHARDED, "bf16": True}, NF4_BF16, adapter={}),
        2,
        0.05,
        needs="bitsandbytes",
    ),
    TaskCell("QLoRA, 1F1B", trainer("pipeline", F1B, NF4, adapter={}), 2, 0.05, needs="bitsandbytes"),
    TaskCell("int8, LoRA", trainer(model=INT8, adapter={}), 1, 0.05, needs="bitsandbytes"),
    TaskCell(
        "torchao int8, LoRA",
        trainer(model=functools.partial(quantized, "torchao"), adapter={}),
        1,
        0.05,
        needs="torchao",
    ),
    *(TaskCell(name, trainer(args={"optim": name}), needs="bitsandbytes") for name in OF_BITSANDBYTES),
    # What kernels of bitsandbytes allocate inside of themselves is the peak: dequantized state, dequantized weights.
    *(stepped(name, args={"optim": name}, needs="bitsandbytes") for name in OF_BITSANDBYTES),
    stepped("QLoRA", model=functools.partial(in_memory, NF4), adapter={}, needs="bitsandbytes"),
]


def measured(cell, output_dir):
    """Returns the measured peak of each rank."""
    cell_models.rows("llama", 64)
    base()
    mapped = cell.mapped * (Path(base()) / "model.safetensors").stat().st_size
    return [
        peak + mapped for peak in run_ranks(cell.world_size, measured_peak, functools.partial(cell.make, output_dir))
    ]


def traced(cell, output_dir):
    """Returns the trace of each rank that has parts of its own."""
    relay = Relay()

    def trace(rank):
        facts = ProcessFacts(rank=rank, local_rank=rank, world_size=cell.world_size, local_world_size=cell.world_size)
        return trace_rank(functools.partial(cell.make, output_dir), facts, relay=relay)

    found = [trace(0)]
    width = cell.world_size // found[0].facts.num_pipeline_ranks
    found += [trace(rank) for rank in range(width, cell.world_size, width)]
    if not relay.was_right:
        found = [trace(rank) for rank in range(0, cell.world_size, width)]
    return [one for one in found for _ in range(width)]
