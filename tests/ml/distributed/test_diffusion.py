"""Text-to-image training on several ranks: the weights are those of one process, since a row's noise is its own."""

import pytest
import torch

from forgather.ml import AccelTrainer, AccelTrainingArguments
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.diffusion import DenoisingLoss
from forgather.ml.distributed.env import DistributedEnvironment
from tests.matrix import thinned
from tests.ml.diffusion_cases import ADAPTER, denoiser, noised_rows
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import StopAt, largest_difference
from tests.ml.test_diffusion import trained
from tests.patience import patience

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
LAYOUTS = {
    "copies": {},
    "shards": {"fsdp": "full_shard"},
    "ZeRO-2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "ZeRO-3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}


def part(folder, layout, stop):
    """Trains as one of two processes; returns the losses."""
    args = AccelTrainingArguments(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        use_cpu=True,
        **LAYOUTS[layout],
    )
    trainer = AccelTrainer(
        denoiser,
        args,
        train_dataset=noised_rows(),
        data_collator=torch.utils.data.default_collate,
        loss_fn=DenoisingLoss(),
        adapter=ADAPTER,
        callbacks=[StopAt(4)] if stop else [],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20)),
    )
    trainer.train(resume_from_checkpoint=True)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("layout", thinned(list(LAYOUTS), lambda layout: layout == "copies"))
def test_two_processes_train_as_one_and_resume_bit_for_bit(layout, tmp_path, record_property):
    _, expected = trained(tmp_path / "one", noised_rows())
    if layout.startswith("ZeRO"):
        import_engine()
    losses = run_ranks(2, part, tmp_path / "whole", layout, False)[0]
    run_ranks(2, part, tmp_path / "stopped", layout, True)
    assert losses == run_ranks(2, part, tmp_path / "stopped", layout, False)[0]
    assert losses == pytest.approx(expected, abs=1e-6)
    one, whole, stopped = (
        dict(whole_weights(tmp_path / name / "checkpoint-5")) for name in ("one", "whole", "stopped")
    )
    assert 0 == largest_difference(whole, stopped)
    assert sorted(one) == sorted(whole)
    record_property("difference", float(largest_difference(one, whole)))
    assert largest_difference(one, whole) <= 1e-6
