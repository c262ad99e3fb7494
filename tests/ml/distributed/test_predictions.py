"""Predictions under every strategy are those of one process: the same rows, in the same order, each once."""

import numpy as np
import pytest
import torch

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.distributed.env import DistributedEnvironment
from tests.matrix import thinned
from tests.ml.distributed.gang import RankFailed, run_ranks
from tests.ml.distributed.pipeline_runs import VOCAB, make_llama
from tests.patience import patience

ROWS = 9
"""With batches of two, four replicas have an uneven tail: one of them has one row, and two have none."""

CELLS = {
    "DDP": (4, {}),
    "FSDP2": (4, {"fsdp": "full_shard"}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "TP2 x DP2": (4, {"tensor_parallel_size": 2}),
    "ZeRO-3": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    "1F1B": (2, {"schedule_class": "Schedule1F1B", "pipeline_chunks": 2}),
    "ZBV x DP2": (4, {"schedule_class": "ScheduleZBVZeroBubble", "pipeline_chunks": 4, "data_parallel_size": 2}),
}
QUICK = ("FSDP2", "1F1B")


def rows(labelled=True):
    generator = torch.Generator().manual_seed(3)
    made = [{"input_ids": torch.randint(0, VOCAB, (6,), generator=generator)} for _ in range(ROWS)]
    return [{**row, "labels": row["input_ids"].clone()} for row in made] if labelled else made


def trainer_of(folder, settings, compute, **further):
    kind, arguments = Trainer, TrainingArguments
    if settings is not None:
        piped = "schedule_class" in settings
        kind, arguments = (
            (PipelineTrainer, PipelineTrainingArguments) if piped else (AccelTrainer, AccelTrainingArguments)
        )
        settings = {**settings, **({"per_device_train_batch_size": 4} if piped else {})}
    args = arguments(str(folder), use_cpu=True, per_device_eval_batch_size=2, **(settings or {}), **further)
    dtype = torch.float32 if settings and "deepspeed" in settings else torch.float64
    return kind(
        lambda: make_llama(dtype=dtype, num_key_value_heads=2),
        args,
        train_dataset=rows(),
        eval_dataset=rows(),
        compute_metrics=compute,
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)),
    )


def everything(folder, settings):
    """Returns, of this process: what `compute_metrics` got, with and without batches, and what `predict` returned."""
    whole, parts = [], []

    def compute(prediction):
        whole.extend([prediction.predictions, prediction.label_ids, prediction.inputs])
        return {"correct": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).sum())}

    def compute_batch(prediction, compute_result):
        parts.append((prediction.predictions, prediction.label_ids))
        return {"batches": len(parts)} if compute_result else {}

    trainer = trainer_of(folder, settings, compute, include_for_metrics=["inputs"])
    trainer.strategy.build_optimizer()  # ZeRO gathers weights in its engine, which is made with the optimizer
    metrics = trainer.evaluate()
    bare = trainer.predict(rows(labelled=False))
    each = trainer_of(folder, settings, compute_batch, batch_eval_metrics=True)
    each.strategy.build_optimizer()
    assert each.evaluate()["eval_batches"] == len(parts)
    assert bare.label_ids is None
    by_batch = [torch.cat(column).numpy() for column in zip(*parts, strict=True)]
    return metrics["eval_correct"], [*whole, bare.predictions, *by_batch]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("one"), None)


@pytest.mark.parametrize("name", thinned(list(CELLS), lambda name: name in QUICK))
def test_predictions_are_those_of_one_process(tmp_path, name, expected, record_property):
    world, settings = CELLS[name]
    limit = 1e-5 if "deepspeed" in settings else 1e-12
    for correct, arrays in run_ranks(world, everything, tmp_path, settings):
        assert correct == expected[0]
        for found, wanted in zip(arrays, expected[1], strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)
            kind = "difference in single precision" if limit > 1e-6 else "difference"
            record_property(kind, float(np.abs(np.asarray(found, dtype=float) - wanted).max(initial=0.0)))


def _shifted_by_a_row(folder, settings):
    correct, arrays = everything(folder, settings)
    return correct, [np.roll(array, 1, axis=0) for array in arrays]


def test_rows_in_another_order_are_seen(tmp_path, expected):
    _, arrays = _shifted_by_a_row(tmp_path, None)
    assert all(np.abs(found - wanted).max() > 1e-3 for found, wanted in zip(arrays, expected[1], strict=True))


def _fails_on_one_rank(folder):
    environment = DistributedEnvironment()

    def compute(prediction):
        if environment.rank == 1:
            raise ValueError("of the user")
        return {}

    trainer_of(folder, {}, compute).evaluate()


def test_a_metric_that_fails_on_one_rank_ends_all_of_them(tmp_path):
    with pytest.raises(RankFailed, match="of the user"):
        run_ranks(2, _fails_on_one_rank, tmp_path)
