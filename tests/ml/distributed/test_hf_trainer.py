"""`transformers.Trainer` in several processes: a signal to one ends all, a `loss_fn` has the loss of all rows."""

import os
import signal

import pytest
from transformers import TrainingArguments

from forgather.ml.callbacks import TrainerCallback
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.distributed.gang import run_ranks
from tests.ml.epoch_cases import DATA_SETS, EPOCHS, ROWS, STEP, read_by, readings
from tests.ml.fixtures import largest_difference, rows, tiny_llama, weights
from tests.ml.test_hf_loss import LOSSES, Classifier, class_rows, trained
from tests.patience import patience


class Stopped(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == 1:
            signal.raise_signal(signal.SIGTERM)


def _stopped(folder):
    os.environ["OMP_NUM_THREADS"] = "1"  # as a launcher does; Accelerate would warn
    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=12,
        save_strategy="steps",
        save_steps=100,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        ddp_timeout=patience(20),
        ddp_find_unused_parameters=False,
    )
    trainer = HFTrainer(tiny_llama(), args, train_dataset=rows(), callbacks=[Stopped()])
    try:
        trainer.train()
    except KeyboardInterrupt as stop:
        return trainer.state.global_step, type(stop).__name__, os.listdir(folder)
    return trainer.state.global_step, "", os.listdir(folder)


def test_a_signal_to_one_process_ends_all_after_the_same_step_with_a_checkpoint(tmp_path):
    assert [(4, "Terminated", ["checkpoint-4"])] * 2 == run_ranks(2, _stopped, str(tmp_path))


def _weighted(folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    model = Classifier()
    given = {"batch": 1, "accumulation": 2, "ddp_timeout": patience(20)}
    trainer, losses = trained("transformers", folder, model, class_rows(), LOSSES["mean with weights"], **given)
    return losses, weights(model), trainer.evaluate()["eval_loss"]


def test_a_loss_with_weights_is_that_of_one_process_in_training_and_evaluation(tmp_path):
    alone = Classifier()
    trainer, expected = trained("ours", tmp_path, alone, class_rows(), LOSSES["mean with weights"])
    evaluated = trainer.evaluate()["eval_loss"]
    for losses, found, evaluation in run_ranks(2, _weighted, str(tmp_path)):
        assert losses == [] or expected == pytest.approx(losses, abs=1e-6)
        assert largest_difference(weights(alone), found) < 1e-6
        assert evaluated == pytest.approx(evaluation, abs=1e-6)


def test_rows_of_each_epoch_are_those_of_one_process_also_after_a_resume(tmp_path):
    known = readings("images")
    given = ("transformers", str(tmp_path), DATA_SETS["images"], 0)
    whole = run_ranks(2, read_by, *given, None, 2)
    resumed = run_ranks(2, read_by, *given, str(tmp_path / f"checkpoint-{STEP}"), 2)
    for epoch in range(EPOCHS):
        read = [known[key] for trained, _ in whole for key in trained[epoch * ROWS // 2 : (epoch + 1) * ROWS // 2]]
        assert [(epoch, row) for row in range(ROWS)] == sorted(read)
    assert [trained[STEP:] for trained, _ in whole] == [trained for trained, _ in resumed]
