"""Writes docs/seed_tables.md: each row of the tables of four published guides to distributed training, planned.

python scripts/write_seed_tables.py            writes the page
python scripts/write_seed_tables.py --check    fails if the page is not what this script writes
"""

from __future__ import annotations

import sys
import textwrap
import warnings
from pathlib import Path

from forgather.errors import PlanError
from forgather.planner.formulas import Way, memory, step_seconds
from forgather.planner.hardware import hardware
from forgather.planner.model_shapes import model_shape
from forgather.planner.resources import calculate_resources
from forgather.planner.selection import HardwareSelector

PAGE = Path(__file__).parents[1] / "docs" / "seed_tables.md"
QLORA = {"lora_rank": 64, "four_bit": True, "recompute": True, "micro_batch": 4, "accumulation": 1}
# Row of the guide: its name, its GPUs, batch, tokens a second, GB; the way that is planned for it.
LLAMA = [
    ("DDP + QLoRA", 1, 4, 2100, 24, Way(strategy="DDP", **QLORA)),
    ("FSDP + QLoRA", 4, 16, 31200, 22, Way(strategy="FSDP", stage=3, gpus=4, **QLORA)),
    ("DeepSpeed ZeRO-2", 4, 16, 28800, 20, Way(strategy="DeepSpeed", stage=2, gpus=4, micro_batch=4, recompute=True)),
    ("DeepSpeed ZeRO-3", 8, 32, 54000, 18, Way(strategy="DeepSpeed", stage=3, gpus=8, micro_batch=4, recompute=True)),
]
SDXL = [
    ("DDP", 1, 1, "1.2", 42, Way()),
    ("FSDP", 4, 4, "4.1", 38, Way(strategy="FSDP", stage=3, gpus=4)),
    ("DeepSpeed ZeRO-2", 4, 8, "7.8", 28, Way(strategy="DeepSpeed", stage=2, gpus=4, micro_batch=2)),
]
# What a guide recommends; a model of that size, its GPUs, GB of each (None: the guide has no limit).
SIZES = [
    ("< 1B, 8 GB+", "one GPU", "gpt2-large", 1, 8),
    ("1B - 7B, 16 GB+ per GPU", "data parallel", "opt-1.3b", 4, 16),
    ("1B - 7B, 16 GB+ per GPU", "data parallel", "opt-6.7b", 4, 16),
    ("7B - 70B, 24 GB+ per GPU", "data parallel", "llama-2-7b", 8, 24),
    ("7B - 70B, 24 GB+ per GPU", "data parallel", "llama-2-70b", 8, 24),
    ("> 70B, any", "pipeline parallel", "llama-3.1-405b", 64, 80),
]
SELECTOR = [
    ("< 1B, 1-4 GPUs", "DDP", "gpt2-large", 4, 24),
    ("< 1B, 4+ GPUs", "DDP or FSDP depending on memory", "gpt2-large", 8, 24),
    ("1-10B, 1-2 GPUs", "DDP with gradient checkpointing", "llama-2-7b", 2, 24),
    ("1-10B, 1-2 GPUs", "DDP with gradient checkpointing", "llama-2-7b", 2, 80),
    ("1-10B, 4-8 GPUs", "FSDP", "llama-2-7b", 8, 24),
    ("1-10B, 8+ GPUs", "FSDP or DeepSpeed ZeRO-3", "llama-2-7b", 16, 24),
    ("10B+, 1-4 GPUs", "FSDP with CPU offloading", "llama-2-13b", 4, 24),
    ("10B+, 4-8 GPUs", "DeepSpeed ZeRO-3", "llama-2-13b", 8, 24),
    ("10B+, 8+ GPUs", "DeepSpeed ZeRO-3 with ZeRO-Infinity", "llama-2-70b", 16, 40),
]
COMPARED = [
    ("DDP: low, fast; small models (<7B), single node", Way(gpus=8)),
    ("FSDP: high, medium; large models (7-70B)", Way(strategy="FSDP", stage=3, gpus=8)),
    ("DeepSpeed ZeRO-2: medium, fast; medium models (1-13B)", Way(strategy="DeepSpeed", stage=2, gpus=8)),
    ("DeepSpeed ZeRO-3: very high, slower; massive models (70B+)", Way(strategy="DeepSpeed", stage=3, gpus=8)),
    ("DDP Spawn: low, slow; Windows, debugging", Way(gpus=8)),
]
LIGHTNING = [
    ("<1B", "ddp", "gpt2-large"),
    ("1-7B", "ddp or ZeRO-2", "opt-1.3b"),
    ("7-70B", "FSDP FULL_SHARD", "llama-2-7b"),
    ("70B+", "ZeRO-3 with offload_optimizer", "llama-2-70b"),
]


def chosen(name: str, gpus: int, gb: float | None) -> str:
    """Returns the way that is selected for a model, and its memory; or what the nearest way needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            found = HardwareSelector().get_distributed_training_config("text_generation", name, gpus, 1, gb)
        except PlanError as error:
            return "nothing fits" + error.message.partition(":")[2].join((": ", ""))
    return f"{found['summary']}: {found['estimated_memory']['per_gpu_gb']:.1f} GB"


def table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    lines = [header, ("---",) * len(header), *rows]
    return ["| " + " | ".join(str(cell) for cell in row) + " |" for row in lines] + [""]


def throughput() -> list[str]:
    shape, device = model_shape("llama-2-7b"), hardware("a100-80")
    rows = []
    for name, gpus, batch, tokens, gb, way in LLAMA:
        used = memory(shape, way).peak / 1e9
        speed = batch * way.tokens / step_seconds(shape, way, device)
        most = gpus * device.peak_flops["bf16"]
        rows.append(
            (
                name,
                gpus,
                batch,
                f"{tokens:,}",
                f"{speed:,.0f}",
                f"{tokens * 6 * shape.parameters / most:.0%}",
                gb,
                f"{used:.1f}",
            )
        )
    first, second = LLAMA[0], LLAMA[1]
    factor = second[3] / first[3]
    header = (
        "configuration",
        "GPUs",
        "batch",
        "guide: tokens/s",
        "planned",
        "guide / peak of A100s",
        "guide: GB",
        "planned GB",
    )
    return [
        "## Llama-7B training throughput",
        "",
        "The guide names neither the GPU, the length of rows nor what ZeRO trains. Planned: A100 80 GB, rows of",
        "2,048 tokens,",
        "gradient checkpointing, LoRA of rank 64 on all matrices in the QLoRA rows, all weights in the ZeRO",
        "rows. Tokens/s are",
        "by formula, with assumed efficiency and overlap, and not measured.",
        "",
        *table(header, rows),
        f"The guide is {factor:.1f} times as fast on 4 GPUs as on 1, where 4 times is the most: its first two",
        "rows are not of the",
        "same hardware or rows. With all weights trained, ZeRO-2 cannot need 20 GB on 4 GPUs: the 16-bit",
        "weights alone are",
        f"{2 * shape.parameters / 1e9:.1f} GB, and a quarter of the optimizer's state",
        f"{3 * shape.parameters / 1e9:.1f} GB. The figure fits an",
        "adapter, or an optimizer on the host.",
        "",
    ]


def recommendations() -> list[str]:
    planned = [(*row[:2], f"{row[2]}, {row[3]} x {row[4]} GB", chosen(*row[2:])) for row in SIZES]
    selector = [(*row[:2], f"{row[2]}, {row[3]} x {row[4]} GB", chosen(*row[2:])) for row in SELECTOR]
    guide = [(*row[:2], f"{row[2]}, 8 x 80 GB", chosen(row[2], 8, 80)) for row in LIGHTNING]
    header = ("guide: size", "guide: strategy", "planned for", "chosen way, memory of each GPU")
    return [
        "## Strategy by size of the model",
        "",
        "One row of 2,048 tokens (1,024 for GPT-2) on each GPU. `fgcli plan` plans pipelines, these formulas do not.",
        "",
        *table(header, planned),
        '"Data parallel" of replicas ends long before 70B: 16 bytes for each parameter are 1,100 GB.',
        "It holds for FSDP and ZeRO.",
        "",
        "## Strategy by size and number of GPUs",
        "",
        *table(header, selector),
        "DDP of a 7B with gradient checkpointing needs more than 110 GB on each GPU, whatever is recomputed:",
        "weights, gradients",
        "and optimizer are not smaller by it. The row of the guide holds for models of about 1B.",
        "",
        "## Strategy by size, of one `if`",
        "",
        *table(header, guide),
    ]


def comparison() -> list[str]:
    shape, device = model_shape("llama-2-7b"), hardware("a100-80")
    rows = [
        (name, f"{memory(shape, way).peak / 1e9:.1f}", f"{step_seconds(shape, way, device):.2f}")
        for name, way in COMPARED
    ]
    return [
        "## Memory efficiency and speed of strategies",
        "",
        "Llama-2-7B, 8 x A100 80 GB, one row of 2,048 tokens on each GPU, bf16, nothing recomputed.",
        "",
        *table(("guide: strategy, memory efficiency, speed, use", "planned GB", "planned seconds a step"), rows),
        "DDP Spawn trains as DDP does; it only starts its processes in another way, so that the step is as",
        "fast. FSDP and ZeRO-3",
        'divide the same things: "high" and "very high" differ by buckets alone.',
        "",
    ]


def diffusion() -> list[str]:
    header = ("configuration", "GPUs", "batch", "guide: steps/s", "planned", "guide: GB", "planned GB")
    shape, device = model_shape("sdxl"), hardware("a100-80")
    rows = [
        (
            name,
            gpus,
            batch,
            speed,
            f"{1 / step_seconds(shape, way, device):.1f}",
            gb,
            f"{memory(shape, way).peak / 1e9:.1f}",
        )
        for name, gpus, batch, speed, gb, way in SDXL
    ]
    return [
        "## Stable Diffusion XL training",
        "",
        "Planned: all weights of the U-Net, bf16, images of 1,024 x 1,024 pixels, A100 80 GB, nothing recomputed. A",
        "U-Net is not a stack of equal blocks: what an image keeps, and its FLOPs, are traced and not computed from",
        "the shape.",
        "",
        *table(header, rows),
    ]


def resources() -> list[str]:
    found = calculate_resources(7e9, 2048, 1)
    ours = [found[f"{name}_gb"] for name in ("model", "gradient", "optimizer", "activation", "logits", "total")]
    total = (28 + 28 + found["rule_of_thumb_gb"]) * 1.5
    rule = [28.0, 28.0, "none", f"{found['rule_of_thumb_gb']:,.0f}", "none", f"{total:,.0f}"]
    names = ("weights", "gradients", "optimizer", "activations", "logits", "total")
    rows = [(name, guide, f"{own:.1f}") for name, guide, own in zip(names, rule, ours, strict=True)]
    return [
        "## `calculate_resources(7e9, 2048, 1)`",
        "",
        *table(("GB", "guide", f"planned, as {found['like']} in 32 bits"), rows),
        "The guide multiplies batch x sequence x all parameters x 4 bytes: as if each token kept a number for",
        "each weight. Kept",
        "are a few numbers for each token, block and unit of width",
        "(`forgather.planner.formulas.block_activations`). It leaves",
        "the optimizer out, and its factor of 1.5 is applied to all.",
        "`forgather.planner.resources:calculate_resources` takes the",
        "same arguments.",
        "",
    ]


def page() -> str:
    head = [
        "# Tables of published guides, planned",
        "",
        "Written by `scripts/write_seed_tables.py`. Each row of the tables of four guides to distributed",
        "training, next to what",
        "the formulas of `fgcli select` give. No number here is measured; GB are 10^9 bytes.",
        "",
    ]
    lines = [*head, *throughput(), *diffusion(), *recommendations(), *comparison(), *resources()]
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return "\n\n".join(text if text[0] in "|#" else textwrap.fill(text, 118) for text in paragraphs) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page() and "docs/seed_tables.md is out of date: run scripts/write_seed_tables.py")
    PAGE.write_text(page())
