"""No strategy makes the host wait in a step, each needs one collective beyond its engine's own, and both are exact."""

import functools
import importlib.util
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import forgather.ml
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.host_reads import reads_forbidden
from tests.matrix import thinned
from tests.ml.distributed.bench import GLOBAL_ROWS, LAYERS, make_model, packed_rows
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.read_cells import CELLS, ReadCell, expected, measure
from tests.ml.reads import counted_steps
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("cell", thinned(CELLS, lambda cell: cell.quick), ids=str)
def test_a_step_reads_and_sends_what_the_table_says(cell, record_property):
    row = expected()[cell.name]
    found = measure(cell)
    kind = "fp16" if cell.name in _FP16 else "step"
    record_property(f"{kind}_reads", found["reads"] + found["reads of the mask"])
    record_property(f"{kind}_collectives", found["beyond the engine"])
    assert row["reads of the mask"] >= found.pop("reads of the mask")
    assert {name: row[name] for name in found} == found


def test_the_table_has_a_row_for_each_cell():
    assert [cell.name for cell in CELLS] == [*expected()]


def test_no_strategy_reads_and_each_sends_one_collective_beyond_its_engine():
    for name, row in expected().items():
        assert (0, True) == (row["reads"], row["beyond the engine"] <= 1) or name in _FP16, name


_FP16 = ("one process, fp16", "FSDP2, fp16")
"""The host looks at the overflow of each step, on which the learning rate of the next one depends."""


def test_the_page_has_the_table():
    spec = importlib.util.spec_from_file_location("reads_table", ROOT / "scripts" / "reads_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with(text, script.table(expected())) == text, "run scripts/reads_table.py --page"


def _reading_model():
    model = make_model("llama", torch.float32, 2)
    model.lm_head.register_forward_hook(_reads)
    return model


def _reads(module, inputs, output):
    if output.sum().item() != output.sum().item() or output[output > 1e9].tolist():
        raise AssertionError("not finite")


def test_a_read_of_a_model_is_counted_and_its_line_named(tmp_path):
    args = forgather.ml.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=5, logging_steps=5, save_strategy="no")
    with counted_steps() as counts:
        forgather.ml.Trainer(model_init=_reading_model, args=args, train_dataset=packed_rows(1, 6)).train()
    own = {what: number for (_, line, what), number in counts.reads.items() if line.endswith(" _reads")}
    assert {"_local_scalar_dense": 4, "index by a mask": 2, "tolist": 2} == own


def curve(cell, forbids):
    """Trains two epochs, the last step of each with fewer rows, and returns losses, norms and weights."""
    with tempfile.TemporaryDirectory() as folder, reads_forbidden() if forbids else nullcontext():
        arguments = getattr(forgather.ml, f"{cell.trainer.removesuffix('Trainer')}TrainingArguments")
        args = arguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=GLOBAL_ROWS // cell.dp_size,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            logging_steps=1,
            save_strategy="no",
            **{"max_grad_norm": 0.5, "learning_rate": 1e-3, **cell.settings},
        )
        trainer = getattr(forgather.ml, cell.trainer)(
            model_init=functools.partial(make_model, "llama", torch.float64, 2 if cell.world_size < 3 else LAYERS),
            args=args,
            train_dataset=packed_rows(2, 3),
            distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
        )
        trainer.train()
        lines = [
            (line["loss"], line["grad_norm"], line["epoch"]) for line in trainer.state.log_history if "loss" in line
        ]
        tokens = trainer.state.num_input_tokens_seen
        return lines, tokens, {name: value.detach().clone() for name, value in trainer.strategy.export()}


ONE = ReadCell("one process", trainer="Trainer")
FSDP, TP = {"fsdp": "full_shard"}, {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "schedule_class": "Schedule1F1B"}
EXACT = [
    (ReadCell("DDP", 2, dp_size=2), False),
    (ReadCell("DDP", 2, dp_size=2), True),
    (ReadCell("FSDP2", 2, settings=FSDP, dp_size=2), False),
    (ReadCell("FSDP2", 2, settings=FSDP, dp_size=2), True),
    (ReadCell("tensor parallel", 2, settings=TP), True),
    (ReadCell("tensor parallel, SGD", 2, settings={**TP, "optim": "sgd"}), True),
    (ReadCell("1F1B", 2, "PipelineTrainer", STAGES), False),
    (ReadCell("1F1B", 2, "PipelineTrainer", STAGES), True),
    (ReadCell("one process, SGD", settings={"optim": "sgd"}), True),
]


@functools.cache
def reference(optim):
    return curve(ReadCell("one process", trainer="Trainer", settings={"optim": optim}), False)


def _is_quick(cell, forbids):
    return (cell.name, forbids) in {("DDP", False), ("tensor parallel", True)}


@pytest.mark.parametrize(("cell", "forbids"), thinned(EXACT, _is_quick))
def test_what_is_read_ahead_and_late_gives_the_numbers_of_one_process(cell, forbids):
    lines, tokens, weights = reference(cell.settings.get("optim", "adamw_torch_fused"))
    found_lines, found_tokens, found = run_ranks(cell.world_size, curve, cell, forbids)[0]
    torch.testing.assert_close(torch.tensor(found_lines), torch.tensor(lines), rtol=1e-6, atol=0)
    assert tokens == found_tokens
    for name, value in weights.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
