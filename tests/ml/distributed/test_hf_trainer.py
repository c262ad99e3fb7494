"""`transformers.Trainer` in several processes: a signal to one of them ends all after the same step."""

import os
import signal

from transformers import TrainingArguments

from forgather.ml.callbacks import TrainerCallback
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import rows, tiny_llama
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
