"""Each strategy gives the losses, norms and weights of one process; `--all-cells` trains the whole matrix."""

import pytest
import torch

from tests.ml.distributed.bench import LIMITS, Cell, Errors, broken_limits, compare, measure, reference
from tests.ml.distributed.cells import SCHEDULES, all_cells

CELLS = list(all_cells())
SCHEDULE_NAMES = [name.removeprefix("Schedule") for name in SCHEDULES]


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        whole = metafunc.config.getoption("all_cells")
        chosen = CELLS if whole else [cell.small for cell in CELLS if cell.quick]
        metafunc.parametrize("cell", chosen, ids=[cell.name for cell in chosen])


def test_the_quick_cells_hold_every_strategy_schedule_model_and_accumulation():
    quick = [cell for cell in CELLS if cell.quick]
    words = set().union(*(cell.strategy.replace(",", "").split() for cell in quick))
    assert {*SCHEDULE_NAMES, "DDP", "FSDP2", "HSDP", "TP2", "CP", "ZeRO-2", "ZeRO-3"} <= words
    for dimension in ("model", "accumulation", "trainer"):
        assert {getattr(cell, dimension) for cell in quick} == {getattr(cell, dimension) for cell in CELLS}


def test_the_cell_is_equal_to_one_process(cell, measured):
    errors = measure(cell)
    measured(cell, errors)
    assert {} == broken_limits(errors, cell.limits)


WHOLE = Cell("DDP", 2, "AccelTrainer", dp_size=2, accumulation=3)
DDP = WHOLE.small


def _doubles_gradients(trainer):
    inner = trainer.strategy.forward_backward

    def doubling(*args, **kwargs):
        loss = inner(*args, **kwargs)
        for parameter in trainer.model.parameters():
            parameter.grad *= 2
        return loss

    trainer.strategy.forward_backward = doubling


def _averages_means(trainer):
    inner = trainer.strategy.forward_backward

    def averaging(window, *, denom, **kwargs):
        return inner(window, denom=window.num_valid * 2, **kwargs)

    trainer.strategy.forward_backward = averaging


def _drops_a_rank(trainer):
    rule = trainer.strategy.rule
    inner = rule.total
    if trainer.strategy.topology.rank == 1:
        rule.total = lambda *args, **kwargs: inner(*args, **kwargs) * 0


@pytest.mark.parametrize("sabotage", [_doubles_gradients, _averages_means, _drops_a_rank])
def test_the_bench_sees_what_is_wrong(sabotage):
    assert "grad_norm" in broken_limits(measure(DDP, sabotage), DDP.limits)


def test_clipped_adamw_hides_doubled_gradients_in_the_weights_and_the_norm_shows_them():
    errors = measure(WHOLE, _doubles_gradients)
    assert errors.grad_norm > 0.5
    assert errors.updrel < 1e-4


def test_the_bench_compares_with_a_run_that_learns():
    curve = reference("llama", 3, "fp64")
    assert curve.losses[-1] < curve.losses[0]
    assert Errors(0.0, 0.0, 0.0, 0.0) == compare(curve, curve)


def test_a_curve_that_begins_with_other_weights_is_refused():
    curve = reference("llama", 1, "fp64")
    other = {name: value + 1 for name, value in curve.before.items()}
    with pytest.raises(AssertionError, match="initial weights"):
        compare(curve, type(curve)(curve.losses, curve.norms, other, curve.after))


def test_a_difference_beyond_the_limits_is_reported():
    assert {"loss": (1e-9, 1e-10)} == broken_limits(Errors(1e-9, 0.0, 0.0, 0.0), LIMITS["fp64"])
    assert {"updrel": (float("inf"), 1e-10)} == broken_limits(Errors(0.0, 0.0, float("inf"), 0.0), LIMITS["fp64"])
    assert torch.isnan(torch.tensor(broken_limits(Errors(float("nan"), 0.0, 0.0, 0.0), LIMITS["fp64"])["loss"][0]))
