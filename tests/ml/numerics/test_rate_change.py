"""A resumed run with a new learning rate does the steps of a plain loop with the new rates."""

import functools
import logging
import math
from pathlib import Path

import pytest
import torch

from forgather.errors import CheckpointError
from forgather.interventions import read_interventions
from forgather.ml import Trainer
from tests.cli.checkpoint_folders import forge
from tests.ml.fixtures import StopAt, rows, tiny_llama, weights

STEPS, STOP, WARMUP = 9, 4, 2
OLD, NEW, RATIO = 1e-2, 4e-3, 3.0
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
ROWS = rows(18)


def groups(model, rate):
    """Two groups, the embeddings with three times the rate."""
    named = dict(model.named_parameters())
    wide = [one for name, one in named.items() if "embed" in name]
    rest = [one for name, one in named.items() if "embed" not in name]
    return torch.optim.AdamW([{"params": rest, "lr": rate}, {"params": wide, "lr": rate * RATIO}], lr=rate, **ADAMW)


def optimizer_of(rate):
    def factory(model):
        return groups(model, rate)

    return factory


def trainer(settings, *callbacks, rate=OLD, schedule=None, **given):
    words = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
        "learning_rate": rate,
        **given,
    }
    model = tiny_llama()
    return Trainer(
        model,
        settings(**words),
        train_dataset=ROWS,
        optimizer_factory=optimizer_of(rate),
        lr_scheduler_factory=schedule,
        callbacks=callbacks,
    )


def cosine(step):
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def plain_loop(rate_of):
    """Returns the weights after all steps; `rate_of(step)` is the rate of the first group."""
    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = groups(model, OLD)
    for step in range(STEPS):
        for group, factor in zip(optimizer.param_groups, (1.0, RATIO), strict=True):
            group["lr"] = rate_of(step) * factor
        batch = [ROWS[(2 * step + place) % len(ROWS)] for place in range(2)]
        model(**{name: torch.stack([row[name] for row in batch]) for name in batch[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def farthest(expected, actual):
    return max(float((expected[name] - actual[name]).abs().max()) for name in expected)


def test_the_schedule_goes_on_with_the_new_base_rate(settings, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trainer(settings, StopAt(STOP)).train()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    changed = trainer(settings, rate=NEW, allow_changed=["learning_rate"], logging_dir=str(run_dir))
    changed.train(resume_from_checkpoint=True)
    expected = plain_loop(lambda step: (OLD if step < STOP else NEW) * cosine(step))
    assert farthest(expected, weights(changed.model)) <= 1e-6
    # The control: the loop without the change is far away.
    assert farthest(plain_loop(lambda step: OLD * cosine(step)), weights(changed.model)) > 1e-4
    assert "learning_rate is 0.004 (was 0.01), 0.012 (was 0.03) from step 4 on" in caplog.text
    assert "settings of the checkpoint" not in caplog.text
    (said,) = read_interventions(str(run_dir))
    assert (STOP, "learning_rate", NEW, OLD) == (said.step, said.name, said.value, said.before)
    # The checkpoints of the changed run hold the new base rates: a further resume changes nothing.
    caplog.clear()
    again = trainer(settings, rate=NEW, allow_changed=["learning_rate"])
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-6")
    assert "learning_rate is" not in caplog.text
    assert farthest(expected, weights(again.model)) <= 1e-6


def test_without_the_word_the_earlier_rate_is_kept_and_the_word_is_said(settings, caplog):
    trainer(settings, StopAt(STOP)).train()
    kept = trainer(settings, rate=NEW)
    kept.train(resume_from_checkpoint=True)
    assert farthest(plain_loop(lambda step: OLD * cosine(step)), weights(kept.model)) <= 1e-6
    assert "allow_changed: [learning_rate]" in caplog.text


@pytest.mark.matrix
def test_a_product_of_torch_is_scaled_and_any_other_schedule_is_refused(settings):
    halving = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    trainer(settings, StopAt(STOP), schedule=halving).train()
    changed = trainer(settings, rate=NEW, schedule=halving, allow_changed=["learning_rate"])
    changed.train(resume_from_checkpoint=True)
    expected = plain_loop(lambda step: (OLD if step < STOP else NEW) * 0.5 ** (step // 2))
    assert farthest(expected, weights(changed.model)) <= 1e-6
    one_cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, total_steps=STEPS)
    folder = f"{changed.args.output_dir}/one"
    trainer(settings, StopAt(STOP), schedule=functools.partial(one_cycle, max_lr=OLD), output_dir=folder).train()
    other = functools.partial(one_cycle, max_lr=NEW)
    with pytest.raises(CheckpointError, match="FG617.*OneCycleLR has rates that are not"):
        trainer(settings, schedule=other, allow_changed=["learning_rate"], output_dir=folder).train(True)


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1e9},  # each evaluation halves the rate
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "loss",
}


def on_plateau(settings, *callbacks, rate=OLD, **given):
    words = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "learning_rate": rate, **PLATEAU, **given}
    return Trainer(tiny_llama(), settings(**words), train_dataset=ROWS, eval_dataset=ROWS, callbacks=callbacks)


def last_rate(run):
    return float(run.optimizer.param_groups[0]["lr"])


def test_a_rate_that_a_plateau_has_reduced_stays_reduced(settings):
    whole = on_plateau(settings)
    whole.train()
    folder = f"{whole.args.output_dir}/checkpoint-3"
    # Several resumes, of which the first changes nothing.
    for rate in (OLD, NEW, NEW):
        resumed = on_plateau(settings, rate=rate, allow_changed=["learning_rate"])
        resumed.train(resume_from_checkpoint=folder)
        assert math.isclose(last_rate(resumed), last_rate(whole) * rate / OLD, rel_tol=1e-9)
        folder = f"{whole.args.output_dir}/checkpoint-5"
    least = {"lr_scheduler_kwargs": {**PLATEAU["lr_scheduler_kwargs"], "min_lr": 1e-6}}
    on_plateau(settings, StopAt(2), **least).train()
    with pytest.raises(CheckpointError, match="FG617.*ReduceLROnPlateau has rates that are not"):
        on_plateau(settings, rate=NEW, allow_changed=["learning_rate"], **least).train(folder.replace("-5", "-2"))


def test_a_checkpoint_without_optimizer_state_takes_the_new_rate_too(settings):
    first = trainer(settings, StopAt(STOP))
    first.train()
    folder = Path(first.args.output_dir) / f"checkpoint-{STOP}"
    for file in folder.glob("optimizer*"):
        forge(folder, file.name, None)
    allowed = {"allow_changed": ["learning_rate"], "allow_missing": ["optimizer"], "logging_steps": 1}
    changed = trainer(settings, rate=NEW, logging_strategy="steps", **allowed)
    changed.train(resume_from_checkpoint=str(folder))
    rates = [line["learning_rate"] for line in changed.state.log_history if "learning_rate" in line]
    assert rates == [pytest.approx(NEW * cosine(step), rel=1e-9) for step in range(STOP, STEPS)]
