"""Trials of the demo: the bundled project with a small part of its data and short rows, trained with one learning rate.

Takes a learning rate and a seed; gives the loss of the evaluation by step. The model is that of the demo with two blocks
of half the width; the schedule is the demo's, a warm-up in a tenth of the steps and then a cosine.
"""

from forgather import Project
from forgather.ml import Trainer
from forgather.ml.callbacks import TrainerCallback
from tests.project.workbench import ROOT

STEPS, FIRST_RUNG = 54, 6
EVALUATED = (6, 12, 18, 27, 36, 45, 54)
RATES = tuple(f"{10 ** (third / 3):.1e}" for third in range(-15, -2))
"""From 1e-5 to 1e-1, three in each power of ten."""
SETTINGS = {
    "model_config.hidden_size": "64",
    "model_config.intermediate_size": "192",
    "model_config.num_hidden_layers": "2",
    "raw_dataset.max_bytes": "200000",
    "train_dataset.block_size": "32",
    "eval_dataset.block_size": "32",
    "trainer_args.max_steps": str(STEPS),
    "trainer_args.eval_strategy": "no",
    "trainer_args.per_device_train_batch_size": "8",
    "trainer_args.warmup_steps": "5",
    "trainer_args.save_strategy": "no",
    "+trainer_args.use_cpu": "true",
    "trainer_callbacks": "[]",
}


class Evaluates(TrainerCallback):
    """Evaluates at the rungs and between the last two."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step in EVALUATED


def trained(rate: str, seed: int, folder: str) -> list[tuple[int, float]]:
    """Trains a trial, and returns the loss of the evaluation by step."""
    of_trial = {
        "trainer_args.output_dir": folder,
        "trainer_args.learning_rate": rate,
        "trainer_args.seed": str(seed),
        "model.seed": str(seed),
    }
    overrides = list((SETTINGS | of_trial).items())
    trainer = Project("tiny", str(ROOT / "projects" / "tiny_llama"), overrides=overrides)("main")
    assert isinstance(trainer, Trainer)
    trainer.add_callback(Evaluates())
    trainer.train()
    return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]
