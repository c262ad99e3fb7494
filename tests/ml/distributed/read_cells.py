"""The runs whose host reads and collectives are counted, and what each of them may have.

Takes nothing; gives a table of `ReadCell`s. Keeps true: `reads.json` beside this file has a row for each cell, which
`scripts/reads_table.py` writes from a run and `test_reads` compares with.
"""

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

import forgather.ml
from forgather.ml.data.padding import PaddingCollator
from forgather.ml.distributed.env import DistributedEnvironment
from tests.ml.distributed.bench import GLOBAL_ROWS, LENGTH, OPTIONS, least_layers, make_model, packed_rows
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.reads import counted_steps
from tests.patience import patience

EXPECTED = Path(__file__).with_name("reads.json")

ENGINES_OWN = (
    "strategy/gradients.py sum_bucket_async",
    "strategy/gradients.py _sum_bucket",
    "strategy/gradients.py _send",
    "strategy/pipeline/",
    "strategy/model_strategy.py _backward",
    "strategy/deepspeed.py forward_backward",
    "strategy/deepspeed.py update",
    "model_inputs.py call",
    "activation_checkpointing.py forward",
    # Starts the engine's own gathering of the head.
    "strategy/fsdp_units.py _gather",
)
"""The lines that lead to torch's engine, or sum gradients in its place: what a loop by hand would send as well."""

_MASK = "transformers/masking_utils.py"
"""Where transformers looks whether a mask may be left out."""


@dataclass(frozen=True)
class ReadCell:
    """A run whose steps are counted.

    Args:
        name: its name in the table.
        world_size: the number of processes.
        trainer: the name of the trainer in `forgather.ml`.
        settings: its arguments.
        dp_size: the number of data-parallel ranks.
        accumulation: the micro-batches of a step.
        option: a row of `bench.OPTIONS`.
        padded: whether rows of different lengths are padded.
        quick: whether it is in the reduced set.
    """

    name: str
    world_size: int = 1
    trainer: str = "AccelTrainer"
    settings: dict = field(default_factory=dict)
    dp_size: int = 1
    accumulation: int = 1
    option: str = ""
    padded: bool = False
    quick: bool = False


def _pipeline(schedule, stages=1, world_size=2, quick=False, **more):
    settings = {"pipeline_parallel_size": 2, "schedule_class": f"Schedule{schedule}", "stages_per_rank": stages, **more}
    dp = world_size // 2 // more.get("tensor_parallel_size", 1)
    name = f"{schedule}{f', DDP {dp}' if dp > 1 else ''}{', FSDP2' if 'fsdp' in more else ''}"
    return ReadCell(name, world_size, "PipelineTrainer", settings, dp_size=dp, quick=quick)


_FSDP, _TP = {"fsdp": "full_shard"}, {"tensor_parallel_size": 2}
CELLS = [
    ReadCell("one process", trainer="Trainer", accumulation=2, quick=True),
    ReadCell("one process, padded rows", trainer="Trainer", padded=True),
    ReadCell(
        "one process, bf16, recomputed", trainer="Trainer", option="bf16", settings={"gradient_checkpointing": True}
    ),
    ReadCell("one process, SGD", trainer="Trainer", settings={"optim": "sgd"}),
    ReadCell("one process, Adafactor", trainer="Trainer", settings={"optim": "adafactor"}),
    ReadCell("one process, AdamW, not fused", trainer="Trainer", settings={"optim": "adamw_torch"}),
    ReadCell("one process, Muon", trainer="Trainer", option="Muon"),
    ReadCell("one process, fp16", option="fp16"),
    ReadCell("DDP", 2, dp_size=2),
    ReadCell("DDP, accumulated, bf16", 2, dp_size=2, accumulation=2, option="bf16"),
    ReadCell("FSDP2", 2, settings=_FSDP, dp_size=2, quick=True),
    ReadCell("FSDP2, accumulated, bf16", 2, settings=_FSDP, dp_size=2, accumulation=2, option="bf16"),
    ReadCell("FSDP2, padded rows", 2, settings=_FSDP, dp_size=2, padded=True),
    ReadCell("FSDP2, fp16", 2, settings=_FSDP, dp_size=2, option="fp16"),
    ReadCell("HSDP", 4, settings={"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}, dp_size=4),
    ReadCell("tensor parallel", 2, settings=_TP, quick=True),
    ReadCell("tensor parallel x FSDP2", 4, settings={**_FSDP, **_TP}, dp_size=2),
    _pipeline("GPipe"),
    _pipeline("1F1B", quick=True),
    _pipeline("Interleaved1F1B", 2),
    _pipeline("LoopedBFS", 2),
    _pipeline("InterleavedZeroBubble", 2),
    _pipeline("ZBVZeroBubble", 2, quick=True),
    _pipeline("DualPipeV", 2),
    _pipeline("1F1B", world_size=4),
    _pipeline("1F1B", world_size=4, **_FSDP),
]


def rows_of(cell):
    """Returns the rows of a cell: packed ones, or ones of different lengths."""
    if not cell.padded:
        return packed_rows(cell.accumulation, 6)
    return [
        {"input_ids": list(range(3, 3 + LENGTH - number % 5)), "labels": list(range(3, 3 + LENGTH - number % 5))}
        for number in range(6 * GLOBAL_ROWS)
    ]


def train(cell):
    """Trains a cell as the rank that the environment says, and returns the counts of its steady steps."""
    option = OPTIONS[cell.option]
    arguments = getattr(forgather.ml, f"{cell.trainer.removesuffix('Trainer')}TrainingArguments")
    with tempfile.TemporaryDirectory() as folder, counted_steps() as counts:
        args = arguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=GLOBAL_ROWS // cell.dp_size,
            gradient_accumulation_steps=cell.accumulation,
            max_steps=5,
            logging_steps=5,
            save_strategy="no",
            **({"max_grad_norm": 0.5, "weight_decay": 0.1} | option.get("settings", {}) | cell.settings),
        )
        trainer = getattr(forgather.ml, cell.trainer)(
            model_init=functools.partial(make_model, "llama", torch.float32, least_layers(cell.settings)),
            args=args,
            train_dataset=rows_of(cell),
            data_collator=PaddingCollator() if cell.padded else None,
            optimizer_factory=option.get("factory"),
            distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
        )
        trainer.train()
    return counts


def measure(cell):
    """Returns a row of the table: reads and collectives of one step, the most of any rank, and where they are."""
    if "deepspeed" in cell.settings:
        import_engine()
    ranks = run_ranks(cell.world_size, train, cell)
    assert all(rank.steps == 2 for rank in ranks)
    every = [_per_step(rank.reads, rank.steps) for rank in ranks]
    reads = [{place: n for place, n in one.items() if _MASK not in place} for one in every]
    of_mask = max(sum(one.values()) for one in every) - max(sum(one.values()) for one in reads)
    sent = [_per_step(rank.collectives, rank.steps) for rank in ranks]
    own = [{place: n for place, n in one.items() if not place.startswith(ENGINES_OWN)} for one in sent]
    return {
        "reads": max(sum(one.values()) for one in reads),
        "reads of the mask": of_mask,
        "collectives": max(sum(one.values()) for one in sent),
        "beyond the engine": max(sum(one.values()) for one in own),
        "places": sorted({place for one in [*reads, *own] for place in one}),
    }


def _per_step(counts, steps):
    found = {}
    for place, number in counts.items():
        found[" ".join(place)] = found.get(" ".join(place), 0) + number / steps
    return found


def expected():
    """Returns the rows of the table, by the names of the cells."""
    return json.loads(EXPECTED.read_text(encoding="utf-8"))
