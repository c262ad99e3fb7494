"""The comparison on a GPU runs from end to end with tiny models: the three loops train the same model on the same rows."""

import itertools

import pytest

from scripts.bench import gpu_compare

CELLS = [cell for cell in gpu_compare.cells(tiny=True) if cell.tokens == 32]
MODELS = [list(group) for _, group in itertools.groupby(CELLS, lambda cell: (cell.size, cell.packed))]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("loops", MODELS, ids=lambda cells: cells[0].name)
def test_the_loops_train_the_same_model_on_the_same_rows(loops):
    found = [gpu_compare.compared(cell) for cell in loops]
    assert [*gpu_compare.LOOPS] == [cell.loop for cell in loops]
    assert 1 == len({one["parameters"] for one in found})
    assert all(one["tokens_per_second"] > 0 for one in found)
    # Each loop has its own order of the rows.
    assert [found[0]["loss"]] * 3 == pytest.approx([one["loss"] for one in found], abs=0.01)
