"""The moving average of weights against torch's AveragedModel; noise on embeddings against transformers' hook."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback
from transformers.integrations.neftune import activate_neftune

from forgather.errors import TrainingError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, Trainer
from forgather.ml.adapters import lora
from forgather.ml.trainer.argument_checks import SettingError
from tests.matrix import thinned
from tests.ml.fixtures import StopAt, assert_same_weights, largest_difference, rows, tiny_llama, weights
from tests.ml.test_parameter_settings import LR, STEPS, close, plain_loop

EMA = {"ema_decay": 0.7, "ema_update_after_step": 1, "ema_every": 2}


class Averaged(TrainerCallback):
    """Keeps torch's average, and the weights of the model while it is evaluated."""

    def __init__(self, decay=0.7, after=1, every=2):
        self.decay, self.after, self.every = decay, after, every
        self.trained, self.evaluated = {}, {}

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step > self.after and state.global_step % self.every == 0:
            self.average.update_parameters(model)
        self.trained[state.global_step] = weights(model)

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.evaluated[state.global_step] = (
            weights(model),
            weights(self.average.module),
            self.average.n_averaged.item(),
        )


def train(settings, *callbacks, model=None, resume=None, **given):
    args = settings(**{"num_train_epochs": 2, **given})
    trainer = Trainer(
        model or tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(4, seed=1), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_torch_and_is_evaluated_exported_and_stored(settings, dtype):
    heard = Averaged()
    saves = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(settings, heard, model=tiny_llama().to(dtype), **EMA, **saves)
    plain = train(settings, model=tiny_llama().to(dtype))
    # The average changes nothing that is trained, whatever is evaluated in between.
    assert_same_weights(weights(plain.model), heard.trained[STEPS])
    for evaluated, average, count in heard.evaluated.values():
        if count and dtype == torch.float32:
            assert_same_weights(average, evaluated)
    assert_same_weights(heard.trained[1], heard.evaluated[1][0])
    assert largest_difference(heard.trained[STEPS], weights(trainer.model)) > 0
    folder = Path(trainer.args.output_dir)
    stored = load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors")
    assert all(torch.equal(heard.trained[STEPS][name], value) for name, value in stored.items())
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights(trainer.model)[name], value) for name, value in exported.items())
    if dtype == torch.float32:
        assert_same_weights(weights(heard.average.module), weights(trainer.model))


def test_weights_that_are_trained_are_evaluated_if_asked(settings):
    heard = Averaged()
    train(settings, heard, **EMA, eval_strategy="steps", eval_steps=2, ema_evaluate=False)
    for step, (evaluated, *_) in heard.evaluated.items():
        assert_same_weights(heard.trained[step], evaluated)


@pytest.mark.parametrize("stop", thinned([1, 2, 5], lambda stop: stop == 5))
def test_a_run_with_an_average_resumes_exactly(settings, stop):
    given = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2, **EMA}
    whole = train(settings, **given)
    expected = [line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line]
    train(settings, StopAt(stop), **given)
    resumed = train(settings, resume=str(Path(whole.args.output_dir) / f"checkpoint-{stop}"), **given)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert expected == [line["eval_loss"] for line in resumed.state.log_history if "eval_loss" in line]


def test_the_average_of_the_best_step_is_loaded_at_the_end(settings):
    heard = Averaged()
    given = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.2}
    trainer = train(settings, heard, **EMA, **given, load_best_model_at_end=True)
    best = trainer.state.best_global_step
    assert best < STEPS
    assert_same_weights(heard.evaluated[best][0], weights(trainer.model))


def test_only_the_adapter_is_averaged(settings):
    model = lora(r=2).apply(tiny_llama(), seed=1)
    heard = Averaged(after=0, every=1)
    trainer = train(settings, heard, model=model, ema_decay=0.7)
    assert_same_weights(weights(heard.average.module), weights(trainer.model))


def test_averaged_weights_that_one_of_the_runs_lacks_are_told(settings, caplog):
    train(settings, StopAt(2), save_strategy="steps", save_steps=2)
    train(settings, StopAt(4), save_strategy="steps", save_steps=2, resume=True, ema_decay=0.9)
    assert "the average starts at the next update" in caplog.text
    train(settings, save_strategy="steps", resume=True)
    assert "which are left out: ema_decay is not set" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        (AccelTrainingArguments, {"ema_decay": 0.9, "deepspeed": "auto"}, "DeepSpeed keeps the weights"),
        (AccelTrainingArguments, {"ema_decay": 0.9, "save_only_model": True}, "save_only_model"),
        (AccelTrainingArguments, {"ema_decay": 1.0}, "below 1"),
        (
            AccelTrainingArguments,
            {"ema_decay": 0.9, "ema_evaluate": False, "load_best_model_at_end": True, "eval_strategy": "steps"},
            "load the averaged weights of that step",
        ),
        (PipelineTrainingArguments, {"neftune_noise_alpha": 5.0}, "in another order"),
    ],
)
def test_what_cannot_be_averaged_or_made_noisy_is_refused(arguments, given, says, tmp_path):
    with pytest.raises(SettingError, match=says):
        arguments(str(tmp_path), **given)


# -- noise


def noisy_loop(alpha):
    model = tiny_llama()
    if alpha:
        activate_neftune(model, alpha)
    model.train()
    torch.manual_seed(42)
    return plain_loop(model, rows(), rate=lambda name: LR, decay=lambda name: 0.0)


def test_noise_on_embeddings_is_that_of_transformers(settings):
    trainer = train(settings, neftune_noise_alpha=5.0)
    close(noisy_loop(5.0), weights(trainer.model))
    with pytest.raises(AssertionError):
        close(noisy_loop(None), weights(trainer.model))
    # None in an evaluation: that is not random.
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_noise_ends_with_the_training_and_begins_with_the_next(settings):
    """A model that is trained again, by another trainer or in a loop of the user, has the noise that is asked for then."""
    model, other = tiny_llama(), tiny_llama()
    with_noise = train(settings, model=model, neftune_noise_alpha=5.0)
    train(settings, model=other, neftune_noise_alpha=5.0)
    assert not model.get_input_embeddings()._forward_hooks
    second = train(settings, model=model)
    Trainer(other, settings(neftune_noise_alpha=5.0), train_dataset=rows())  # which never trains
    assert_same_weights(weights(second.model), weights(train(settings, model=other).model))
    before = weights(with_noise.model)
    with_noise.train()
    model.load_state_dict(before)
    train(settings, model=model, neftune_noise_alpha=5.0)
    expected = weights(model)
    model.load_state_dict(before)
    with_noise.train()
    assert_same_weights(expected, weights(model))


def test_a_run_with_noise_resumes_exactly(settings):
    whole = train(settings, neftune_noise_alpha=5.0)
    train(settings, StopAt(3), save_strategy="steps", save_steps=3, neftune_noise_alpha=5.0)
    resumed = train(settings, save_strategy="steps", resume=True, neftune_noise_alpha=5.0)
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_a_model_without_known_embeddings_gets_no_noise(settings):
    with pytest.raises(TrainingError, match="no get_input_embeddings"):
        Trainer(nn.Linear(2, 2), settings(neftune_noise_alpha=5.0), train_dataset=rows(), loss_fn=nn.MSELoss())


# -- together with steps that are taken back


class BadOnce(TrainerCallback):
    """Makes the outputs of one step not a number, once."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.step = None
            hook = model.get_output_embeddings().register_forward_hook(
                lambda module, given, found: found * float("nan")
            )
            model.register_forward_hook(lambda *_: hook.remove())


def test_a_run_that_goes_back_is_one_that_skips_the_bad_step(settings):
    """The average, what is frozen and the number of tokens belong to the checkpoint that the run goes back to."""
    given = {
        "max_steps": 10,
        "num_train_epochs": 5,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "save_strategy": "steps",
        "save_steps": 4,
        "freeze": [{"pattern": "layers.0", "until": 6}],
        "include_num_input_tokens_seen": "all",
        **EMA,
    }
    ends = {}
    for policy in ("skip", "rewind"):
        trainer = train(
            settings, BadOnce(7), bad_step_policy=policy, output_dir=f"{settings().output_dir}-{policy}", **given
        )
        ends[policy] = weights(trainer.model), trainer.state.num_input_tokens_seen
    assert_same_weights(ends["skip"][0], ends["rewind"][0])
    assert ends["skip"][1] == ends["rewind"][1]
    steady = train(settings, bad_step_policy="skip", **given)
    assert largest_difference(ends["skip"][0], weights(steady.model)) > 0
