"""What the compatibility matrix calls equal is trained by a cell of the test-bench."""

import pytest
import torch

import forgather.ml
from forgather.compatibility import combination_facts, read_matrix
from tests.ml.distributed.bench import GLOBAL_ROWS, OPTIONS, PRECISIONS
from tests.ml.distributed.cells import all_cells

MATRIX = read_matrix()
AXES = [name for name in MATRIX.axes if name not in ("strategy", "schedule")]
STRATEGIES = [name for name in MATRIX.axes["strategy"].values if name not in ("pipeline", "zero")]


def facts_of(cell):
    """Returns the values that a cell has on the axes of the matrix."""
    given = PRECISIONS[cell.precision] | OPTIONS[cell.option].get("settings", {}) | cell.settings
    given = {name: value for name, value in given.items() if not isinstance(value, torch.dtype)}
    arguments = getattr(forgather.ml, f"{cell.trainer.removesuffix('Trainer')}TrainingArguments")
    rows = GLOBAL_ROWS // cell.dp_size
    args = arguments(per_device_train_batch_size=rows, gradient_accumulation_steps=cell.written_accumulation, **given)
    return combination_facts(args.RULES.complete(args.to_dict())) | {
        "packing": "flattened" if cell.option == "flattened" else "fixed",
        "optimizer": {"Adafactor": "adafactor", "Muon": "matrix"}.get(cell.option, "elementwise"),
        "adapter": cell.option[:4].lower() if cell.option[:4] in ("LoRA", "DoRA") else "none",
        "tied": "no" if cell.model == "llama" else "yes",
        "frozen": "stage" if "frozen stage" in cell.option else "no",
    }


def claims():
    """Yields every pair of a strategy (or a schedule) and a value of another axis that the matrix calls equal."""
    for strategy in STRATEGIES:
        for axis in AXES:
            if axis not in ("replicas", "tensor", "frozen"):  # those are of pipelines
                for value in MATRIX.axes[axis].values:
                    yield {"strategy": strategy, axis: value}
    for schedule in MATRIX.axes["schedule"].values:
        for axis in AXES:
            for value in MATRIX.axes[axis].values:
                yield {"strategy": "pipeline", "schedule": schedule, axis: value}


def is_equal(values):
    cell = MATRIX.cell(values)
    return cell is None or cell.verdict == "setting"


@pytest.fixture(scope="module")
def trained():
    return [facts_of(cell) for cell in all_cells()]


def test_a_claim_of_equality_has_a_cell_that_trains_it(trained):
    claimed = list(filter(is_equal, claims()))
    assert len(claimed) > 300
    assert [] == [values for values in claimed if not any(values.items() <= facts.items() for facts in trained)]


def test_a_claim_that_no_cell_trains_is_found(trained):
    assert not any({"strategy": "ddp", "precision": "float8"}.items() <= facts.items() for facts in trained)
