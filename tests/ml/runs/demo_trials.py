"""Trials of the demo: the bundled project with a small part of its data and short rows, trained with one learning rate.

Takes a learning rate and a seed; gives the loss of the evaluation by step. The model is that of the demo.
"""

from forgather import Project
from forgather.ml import Trainer
from tests.project.workbench import ROOT

STEPS, EVAL_STEPS = 54, 2
RATES = tuple(f"{10 ** (quarter / 4):.1e}" for quarter in range(-20, -3))
"""From 1e-5 to 1e-1, four in each power of ten."""
SETTINGS = {
    "raw_dataset.max_bytes": "60000",
    "train_dataset.block_size": "32",
    "eval_dataset.block_size": "32",
    "trainer_args.max_steps": str(STEPS),
    "trainer_args.eval_steps": str(EVAL_STEPS),
    "trainer_args.per_device_train_batch_size": "4",
    "trainer_args.warmup_steps": "0",
    "trainer_args.lr_scheduler_type": "constant",
    "trainer_args.save_strategy": "no",
    "+trainer_args.use_cpu": "true",
    "trainer_callbacks": "[]",
}


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
    trainer.train()
    return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]
