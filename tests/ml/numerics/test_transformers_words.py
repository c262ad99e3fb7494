"""A script with the words of transformers' Trainer gives the same losses with ours: on one process, to the last bit."""

import pytest
import transformers

from forgather.ml import Trainer, TrainingArguments
from tests.matrix import thinned
from tests.ml.fixtures import rows, tiny_llama, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
PLAIN = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "seed": 11}
SCRIPTS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "weight_decay": 0.1},
    "scheduled": {"lr_scheduler_type": "cosine", "warmup_steps": 0.25, "optim": "adamw_torch", "adam_beta2": 0.95},
    "smoothed": {"label_smoothing_factor": 0.1, "data_seed": 3, "max_steps": 7},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "constant", "dataloader_drop_last": True},
}


def losses(trainer):
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def both(tmp_path, make, data, given):
    words = {**PLAIN, "use_cpu": True, "report_to": "none", "save_strategy": "no", **given}
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), disable_tqdm=True, **words)
    theirs = transformers.Trainer(make(), args, train_dataset=data)
    theirs.train()
    args = TrainingArguments(str(tmp_path / "ours"), train_sampling_strategy="transformers_random", **words)
    ours = Trainer(make(), args, train_dataset=data)
    ours.train()
    return theirs, ours


@pytest.mark.parametrize("name", thinned([*SCRIPTS], lambda name: name == "accumulated"))
def test_the_losses_are_those_of_transformers(tmp_path, name):
    theirs, ours = both(tmp_path, lambda: tiny_llama(attention_dropout=0.1), rows(19), SCRIPTS[name])
    assert losses(theirs) == pytest.approx(losses(ours), rel=0, abs=1e-6)
    found = {key: float((value - weights(ours.model)[key]).abs().max()) for key, value in weights(theirs.model).items()}
    assert max(found.values()) <= 1e-6


@pytest.mark.matrix
def test_the_order_of_our_own_gives_other_losses(tmp_path):
    args = {**PLAIN, "use_cpu": True, "save_strategy": "no"}
    runs = []
    for order in ("random", "transformers_random"):
        trainer = Trainer(
            tiny_llama(),
            TrainingArguments(str(tmp_path), train_sampling_strategy=order, **args),
            train_dataset=rows(19),
        )
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] != runs[1]
