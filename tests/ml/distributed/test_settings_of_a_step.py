"""Settings that change a step are equal in all strategies: several of them at once, in small cells.

Each setting alone, in every strategy, is a cell of the matrix (`cells.py`).
"""

import pytest

from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainer, PipelineTrainingArguments
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.trainer.freezing import Freezing
from tests.matrix import thinned
from tests.ml.distributed.bench import LIMITS, Cell, broken_limits, measure
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import StopAt, assert_same_weights, rows, tiny_llama
from tests.patience import patience

SMALL = {"accumulation": 1, "precision": "fp64", "layers": 4, "updates": 2}
DDP = Cell("DDP", 2, "AccelTrainer", dp_size=2, option="several", **SMALL)
FSDP2 = Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard"}, dp_size=2, option="several", **SMALL)
STAGES = {"split_spec": "auto", "schedule_class": "Schedule1F1B", "pipeline_parallel_size": 2, "pipeline_chunks": 4}
PIPELINE = Cell("1F1B", 2, "PipelineTrainer", STAGES, option="several in stages", **SMALL)


@pytest.mark.parametrize("cell", thinned([DDP, FSDP2, PIPELINE], lambda cell: cell is not FSDP2))
def test_groups_frozen_parameters_and_an_average_are_those_of_one_process(cell):
    assert {} == broken_limits(measure(cell), LIMITS["fp64"])


def _without_schedule(trainer):
    trainer._freezing = Freezing(None)


@pytest.mark.matrix
def test_a_run_that_does_not_freeze_is_far_off():
    assert "updrel" in broken_limits(measure(DDP, _without_schedule), LIMITS["fp64"])


def _train(folder, stop, resume, fsdp):
    args = AccelTrainingArguments(
        folder,
        use_cpu=True,
        fsdp="full_shard" if fsdp else None,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        save_steps=2,
        ema_decay=0.7,
        neftune_noise_alpha=5.0,
        layer_lr_decay=0.8,
        freeze=[{"pattern": "layers.0", "until": 3}],
    )
    trainer = AccelTrainer(
        model_init=tiny_llama,
        args=args,
        train_dataset=rows(),
        callbacks=[] if stop is None else [StopAt(stop)],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return {name: value.detach().clone() for name, value in trainer.strategy.export()}


@pytest.mark.parametrize(
    ("stop", "fsdp"), thinned([(2, False), (2, True)], lambda stop, fsdp: (stop, fsdp) == (2, True))
)
def test_ranks_resume_exactly(tmp_path, stop, fsdp):
    whole = run_ranks(2, _train, str(tmp_path / "whole"), None, None, fsdp)[0]
    run_ranks(2, _train, str(tmp_path / "parts"), stop, None, fsdp)
    again = run_ranks(2, _train, str(tmp_path / "parts"), None, True, fsdp)[0]
    assert_same_weights(whole, again)


@pytest.mark.matrix
def test_shards_have_the_noise_of_replicas(tmp_path):
    replicas = run_ranks(2, _train, str(tmp_path / "one"), None, None, False)[0]
    shards = run_ranks(2, _train, str(tmp_path / "other"), None, None, True)[0]
    assert max(float((replicas[name] - value).abs().max()) for name, value in shards.items()) < 1e-5


def _train_stages(folder, rates, stop, resume, allowed=None):
    args = PipelineTrainingArguments(
        folder,
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        pipeline_chunks=2,
        parameter_groups=[{"pattern": name, "learning_rate": rate} for name, rate in rates.items()],
        allow_changed=allowed,
    )
    trainer = PipelineTrainer(
        model_init=lambda: tiny_llama(tie_word_embeddings=False),
        args=args,
        train_dataset=rows(),
        callbacks=[] if stop is None else [StopAt(stop)],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
    )
    trainer.train(resume_from_checkpoint=resume)
    groups = [(group.get("name"), group["initial_lr"], float(group["lr"])) for group in trainer.optimizer.param_groups]
    return groups, {name: value.detach().clone() for name, value in trainer.strategy.export()}


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param({"embed_tokens": 1e-3}, id="one stage"),
        pytest.param({"embed_tokens": 1e-3, "lm_head": 2e-3}, id="both stages", marks=pytest.mark.matrix),
    ],
)
def test_stages_with_other_groups_resume_exactly(tmp_path, rates):
    whole = run_ranks(2, _train_stages, str(tmp_path / "whole"), rates, None, None)
    run_ranks(2, _train_stages, str(tmp_path / "parts"), rates, 2, None)
    again = run_ranks(2, _train_stages, str(tmp_path / "parts"), rates, None, True)
    assert [groups for groups, _ in whole] == [groups for groups, _ in again]
    assert_same_weights(whole[0][1], again[0][1])


def test_a_rate_of_one_stage_alone_can_change_at_a_resume(tmp_path):
    run_ranks(2, _train_stages, str(tmp_path), {"embed_tokens": 1e-3}, 2, None)
    first, last = run_ranks(2, _train_stages, str(tmp_path), {"embed_tokens": 4e-3}, None, True, ["learning_rate"])
    assert ("embed_tokens", 4e-3) in [group[:2] for group in first[0]]
    assert [None] == [name for name, *_ in last[0]]
