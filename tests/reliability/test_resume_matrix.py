"""R4: a run that stops and goes on, in other processes, ends with the bits of one that was never stopped.

A cell is a place to stop, a strategy, an accumulation and a kind of data; 144 cells in all. Compared are digests of all
that the last checkpoint holds (each tensor, optimizer, schedule, random states of every rank, position, losses) and of
the exported model. The model has dropout, rows and collator draw, in workers where updates have three micro-batches.
"""

import functools
import itertools
import shutil
import time

import pytest
import torch

import forgather.ml
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.unset_tensors import has_unset
from forgather.ml.trainer import run as run_module
from forgather.ml.trainer.data_loader import TrainBatches
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import StopAt, tiny_llama
from tests.patience import patience
from tests.reliability import job
from tests.reliability.data_sets import KINDS, data_of, drawn_collate
from tests.reliability.forks import spread

pytestmark = pytest.mark.usefixtures("warm")

ROWS = 9  # five micro-batches of two rows, the last one short
PLACES = ("first step", "before an epoch ends", "at its end", "after it", "in the second epoch", "last step but one")
STRATEGIES = {
    "plain": ("Trainer", 1, 2, {}),
    "DDP": ("AccelTrainer", 2, 1, {}),
    "FSDP2": ("AccelTrainer", 2, 1, {"fsdp": "full_shard"}),
    "pipeline": ("PipelineTrainer", 2, 2, {"split_spec": "auto", "pipeline_parallel_size": 2, "pipeline_chunks": 2}),
}
ACCUMULATIONS = (1, 3)
CELLS = list(itertools.product(PLACES, STRATEGIES, ACCUMULATIONS, KINDS))
STAGES = STRATEGIES["pipeline"][3]
STRATEGIES |= {
    "slices": ("AccelTrainer", 2, 2, {"tensor_parallel_size": 2}),
    "hybrid shards": ("AccelTrainer", 4, 1, {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}),
    "shards of slices": ("AccelTrainer", 4, 1, {"tensor_parallel_size": 2, "fsdp": "full_shard"}),
    "copies of a pipeline": ("PipelineTrainer", 4, 2, STAGES),
    "shards of a pipeline": ("PipelineTrainer", 4, 2, {**STAGES, "fsdp": "shard_grad_op"}),
    # Sums of more than two numbers depend on their order.
    "DDP of 4": ("AccelTrainer", 4, 1, {}),
    "static DDP of 4": ("AccelTrainer", 4, 1, {"ddp_static_graph": True}),
    "FSDP2 of 4": ("AccelTrainer", 4, 1, {"fsdp": "full_shard"}),
    "four copies of a pipeline": ("PipelineTrainer", 8, 2, STAGES),
    **{
        f"ZeRO-{stage} of 4": ("AccelTrainer", 4, 1, {"deepspeed": {"zero_optimization": {"stage": stage}}})
        for stage in (1, 2, 3)
    },
}
# Workers, which come with three micro-batches, are forked by one process here: test_samples.py has them for replicas.
QUICK = [
    ("first step", "plain", 3, "packed"),
    ("before an epoch ends", "FSDP2", 1, "map"),
    ("at its end", "plain", 3, "iterable"),
    ("after it", "DDP", 1, "packed"),
    ("in the second epoch", "pipeline", 1, "iterable"),
    ("last step but one", "plain", 1, "map"),
]
OTHERS = [("in the second epoch", strategy, 3, "iterable") for strategy in list(STRATEGIES)[4:]]


def updates_per_epoch(accumulation):
    return -(-5 // accumulation)


def steps_of(accumulation):
    """Two epochs, and two updates of a third."""
    return 2 * updates_per_epoch(accumulation) + 2


def stop_of(place, accumulation):
    epoch = updates_per_epoch(accumulation)
    return dict(zip(PLACES, (1, epoch - 1, epoch, epoch + 1, 2 * epoch - 1, 2 * epoch + 1), strict=True))[place]


def make_model():
    return tiny_llama(attention_dropout=0.1)


def train(strategy, accumulation, kind, folder, *, stop=0, resume=None, sabotage=None):
    """Trains on one rank."""
    name, ranks, rows, settings = STRATEGIES[strategy]
    given = {
        "max_steps": steps_of(accumulation),
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": rows,
        "dataloader_num_workers": 2 if accumulation == 3 else 0,
        "save_strategy": "steps",
        "save_steps": 1000,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "resume_from_checkpoint": resume,
        **settings,
    }
    environment = (
        DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)) if ranks > 1 else None
    )
    made = getattr(forgather.ml, name)(
        make_model,
        getattr(forgather.ml, f"{name.removesuffix('Trainer')}TrainingArguments")(str(folder), **given),
        train_dataset=data_of(kind, ROWS),
        data_collator=drawn_collate,
        callbacks=[StopAt(stop)] if stop else (),
        distributed_env=environment,
    )
    if resume and "deepspeed" not in settings:
        assert any(map(has_unset, made.strategy.local.modules())), "the initial weights were made"
    if sabotage is not None:
        sabotage()
    made.train()


def in_ranks(strategy, *args, **settings):
    """Trains on all ranks, each a process of its own."""
    torch.set_num_threads(1)
    if "deepspeed" in STRATEGIES[strategy][3]:
        import_engine()
    run_ranks(STRATEGIES[strategy][1], functools.partial(train, strategy, *args, **settings), timeout=120.0)


def undisturbed(combination, folder):
    """Returns the digests of a run that nobody stopped."""
    strategy, accumulation, kind = combination
    out = folder / "-".join(map(str, combination))
    in_ranks(strategy, accumulation, kind, out)
    return job.digest(out, steps_of(accumulation))


def resumed(cell, folder, sabotage=None):
    """Returns the digests of a run that was stopped at the place of a cell and went on in new processes."""
    place, strategy, accumulation, kind = cell
    first, second = folder / "first", folder / "second"
    stop = stop_of(place, accumulation)
    in_ranks(strategy, accumulation, kind, first, stop=stop)
    checkpoint = str(first / f"checkpoint-{stop}")
    in_ranks(strategy, accumulation, kind, second, resume=checkpoint, sabotage=sabotage)
    return job.digest(second, steps_of(accumulation))


REQUEST = "training_args.json/resume_from_checkpoint"
"""What the two runs differ in by intention."""


def difference(cell, expected, folder):
    """Returns the names whose digests differ in a cell."""
    out = folder / "-".join(map(str, cell)).replace(" ", "_")
    try:
        return [name for name in job.differences(expected[cell[1:]], resumed(cell, out)) if name != REQUEST]
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_a_resumed_run_equals_an_undisturbed_one_in_every_cell(tmp_path, full, figure):
    cells = CELLS if full else QUICK
    began = time.perf_counter()
    combinations = list(dict.fromkeys(cell[1:] for cell in cells))
    expected = dict(zip(combinations, spread(undisturbed, combinations, tmp_path), strict=True))
    found = dict(zip(cells, spread(difference, cells, expected, tmp_path), strict=True))
    assert {} == {cell: names for cell, names in found.items() if names}
    seconds = time.perf_counter() - began
    figure("R4", f"{len(cells)} of {len(CELLS)} cells equal, each tensor and state, {seconds:.0f} s")


@pytest.mark.matrix
def test_other_strategies_resume_with_the_random_numbers_of_each_rank_too(tmp_path, figure):
    expected = {cell[1:]: undisturbed(cell[1:], tmp_path) for cell in OTHERS}
    assert {} == {cell: names for cell in OTHERS if (names := difference(cell, expected, tmp_path))}
    figure("R4", f"in addition {', '.join(cell[1] for cell in OTHERS)}: equal")


def test_the_quick_cells_hold_every_place_strategy_accumulation_and_kind_of_data():
    assert set(QUICK) <= set(CELLS)
    assert [set(values) for values in zip(*CELLS, strict=True)] == [set(values) for values in zip(*QUICK, strict=True)]


def forget_random_states():
    run_module.restore_rng = lambda state: None


def one_row_off():
    load = TrainBatches.load_state_dict
    TrainBatches.load_state_dict = lambda self, state: load(self, state | {"row": state["row"] - 2})


def test_random_states_that_are_not_restored_and_a_position_that_is_off_are_found(tmp_path, full):
    for strategy in list(STRATEGIES)[:4] if full else ("plain",):
        expected = undisturbed((strategy, 1, "map"), tmp_path)
        for sabotage in (forget_random_states, one_row_off):
            cell = ("in the second epoch", strategy, 1, "map")
            names = job.differences(expected, resumed(cell, tmp_path / f"{strategy}-{sabotage.__name__}", sabotage))
            assert any("model" in name for name in names), (strategy, sabotage.__name__, names)
