"""Settings about some of the parameters against a loop that knows the parameters by their names."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, Trainer
from forgather.ml.adapters import lora
from forgather.ml.name_patterns import matches
from forgather.ml.optim import MuonWithAdamW
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.batch_sampler import epoch_seed
from forgather.ml.trainer.parameter_groups import base_group
from tests.matrix import thinned
from tests.ml.fixtures import Recorder, StopAt, assert_same_weights, rows, tiny_llama, weights

LR, STEPS = 1e-2, 8  # two epochs of four steps


def plain_loop(model, data, *, rate, decay, is_frozen=lambda name, step: False, after=lambda step: None):
    """Trains with an optimizer of its own for each parameter."""
    named = dict(model.named_parameters())
    made = {
        name: torch.optim.AdamW([one], lr=rate(name), weight_decay=decay(name), foreach=False, fused=True)
        for name, one in named.items()
    }
    step = 0
    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch_seed(42, epoch))).tolist()
        for at in range(0, len(data), 2):
            batch = {name: torch.stack([data[i][name] for i in order[at : at + 2]]) for name in data[0]}
            for name, one in named.items():
                one.requires_grad_(not is_frozen(name, step))
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            labels = batch["labels"][:, 1:].reshape(-1)
            total = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels, reduction="sum")
            (total / int((labels != -100).sum())).backward()
            torch.nn.utils.clip_grad_norm_([one for one in named.values() if one.grad is not None], 1.0)
            for name, one in named.items():
                if one.grad is not None:
                    made[name].param_groups[0]["lr"] = rate(name) * (STEPS - step) / STEPS
                    made[name].step()
                    one.grad = None
            step += 1
            after(step)
    return weights(model)


def train(settings, *callbacks, model=None, resume=None, factory=None, **given):
    args = settings(**{"num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 1, **given})
    made = model or tiny_llama()
    trainer = Trainer(made, args, train_dataset=rows(), callbacks=callbacks, optimizer_factory=factory)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def close(expected, actual):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


# -- patterns


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.1", "model.layers.1.mlp.weight", True),
        ("layers.1", "model.layers.10.mlp.weight", False),
        ("layers.1.*", "model.layers.10.mlp.weight", False),
        ("layers.[0-3]", "model.layers.2.weight", True),
        ("layers.[!0-3]", "model.layers.2.weight", False),
        ("embed", "model.embed_tokens.weight", False),
        ("embed*", "model.embed_tokens.weight", True),
        ("q_proj|lm_head", "lm_head.weight", True),
        ("layers.*.bias", "layers.3.mlp.bias", True),
        ("layers.?", "layers.12.bias", False),
        ("", "lm_head.weight", False),
        ("q|", "lm_head.weight", False),
        (r"layers\.1", "model.layers.1.weight", False),
    ],
)
def test_a_pattern_matches_whole_parts_of_a_name(pattern, name, expected):
    assert expected == matches(pattern, name)


# -- groups


def test_groups_and_layer_decay_give_the_weights_of_a_loop_by_names(settings):
    groups = [
        {"pattern": "embed_tokens", "learning_rate": 3e-3, "weight_decay": 0.3},
        {"pattern": "mlp", "weight_decay": 0.5},
        {"pattern": "layers.1", "learning_rate": 4e-2},
    ]
    trainer = train(settings, parameter_groups=groups, layer_lr_decay=0.5, weight_decay=0.1)

    def rate(name):
        if "embed_tokens" in name:
            return 3e-3
        if "layers.1" in name:
            return LR * 0.5 if "mlp" in name else 4e-2
        return LR * 0.25 if "layers.0" in name else LR

    def decay(name):
        if "embed_tokens" in name or "mlp" in name:
            return 0.3 if "embed" in name else 0.5
        return 0.0 if "norm" in name else 0.1

    expected = plain_loop(tiny_llama(), rows(), rate=rate, decay=decay)
    close(expected, weights(trainer.model))
    with pytest.raises(AssertionError):
        close(plain_loop(tiny_llama(), rows(), rate=lambda name: LR, decay=decay), weights(trainer.model))


def test_the_rates_of_groups_are_logged_and_follow_the_schedule(settings):
    heard = Recorder()
    train(settings, heard, parameter_groups=[{"pattern": "lm_head|embed_tokens", "learning_rate": 0.1}])
    lines = [line for line in heard.lines if "learning_rate" in line]
    assert STEPS == len(lines)
    for number, line in enumerate(lines):
        assert math.isclose(LR * (STEPS - number) / STEPS, line["learning_rate"])
        assert math.isclose(0.1 * (STEPS - number) / STEPS, line["learning_rate/lm_head|embed_tokens"])


def test_a_run_of_groups_resumes_exactly(settings):
    given = {"parameter_groups": [{"pattern": "layers.0", "learning_rate": 0.1}], "lr_scheduler_type": "cosine"}
    whole = train(settings, **given)
    train(settings, StopAt(3), save_strategy="steps", save_steps=3, **given)
    assert_same_weights(
        weights(whole.model), weights(train(settings, save_strategy="steps", resume=True, **given).model)
    )


def test_a_rate_that_is_set_during_a_run_keeps_the_ratios(settings):
    trainer = train(settings, StopAt(1), parameter_groups=[{"pattern": "*", "learning_rate": 0.1}])
    assert 0 == len(base_group(trainer.optimizer)["params"])
    from forgather.ml.trainer.rate_scale import ScaledSchedule

    scaled = ScaledSchedule(trainer.lr_scheduler, trainer.optimizer)
    before = [group["lr"] for group in trainer.optimizer.param_groups]
    scaled.set_factor(5e-3 / scaled.rate)
    assert math.isclose(5e-3, base_group(trainer.optimizer)["lr"])
    assert all(
        math.isclose(10 * base_group(trainer.optimizer)["lr"], g["lr"]) for g in trainer.optimizer.param_groups[1:]
    )
    assert len(before) == len(trainer.optimizer.param_groups)


def test_groups_work_with_muon_and_with_an_adapter(settings):
    trainer = train(
        settings, factory=MuonWithAdamW, parameter_groups=[{"pattern": "layers.0", "learning_rate": 0.5}], max_steps=1
    )
    rates = {group["algorithm"]: group["initial_lr"] for group in trainer.optimizer.param_groups if group.get("name")}
    assert {"muon": 0.5, "adamw": 0.5} == rates
    model = lora(r=2).apply(tiny_llama(), seed=1)
    trainer = train(settings, model=model, parameter_groups=[{"pattern": "lora_B", "learning_rate": 0.5}], max_steps=1)
    names = {id(one): name for name, one in trainer.model.named_parameters()}
    (group,) = [group for group in trainer.optimizer.param_groups if group.get("name")]
    assert all("lora_B" in names[id(one)] for one in group["params"])


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (
            {"parameter_groups": [{"pattern": "embed_token", "learning_rate": 1}]},
            "FG867",
            "near names are 'model.embed_",
        ),
        ({"parameter_groups": [{"pattern": r"layers\.\d+", "learning_rate": 1}]}, "FG867", "no regular expression"),
        (
            {"parameter_groups": [{"pattern": "layers", "learning_rate": 1}, {"pattern": "mlp", "learning_rate": 2}]},
            "FG867",
            "put the narrower pattern first",
        ),
        ({"freeze": ["layers.7"]}, "FG867", "matches no parameter"),
        ({"freeze": ["layers.0", {"pattern": "layers.0.mlp", "until": 2}]}, "FG867", "frozen for the whole run"),
        ({"freeze": ["*"]}, "FG820", "no parameter that is trained"),
        ({"freeze": [{"pattern": "*", "until": 3}]}, "FG820", "from the first step on"),
        (
            {"parameter_groups": [{"pattern": "layers.0", "learning_rate": 1}], "freeze": ["layers.0"]},
            "FG867",
            "all of them are frozen",
        ),
    ],
)
def test_a_pattern_without_an_effect_is_refused(given, code, says, settings):
    with pytest.raises(TrainingError, match=says) as caught:
        Trainer(tiny_llama(), settings(**given), train_dataset=rows())
    assert code == caught.value.code


def test_the_further_name_of_a_tied_weight_is_refused_with_the_first(settings):
    with pytest.raises(TrainingError, match="tied to 'model.embed_tokens.weight'"):
        Trainer(tiny_llama(tie_word_embeddings=True), settings(freeze=["lm_head"]), train_dataset=rows())


def test_layer_decay_needs_one_list_of_blocks(settings):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TrainingError, match="the model has none"):
        Trainer(model, settings(layer_lr_decay=0.9), train_dataset=rows(), loss_fn=nn.MSELoss())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"freeze": [3]}, "has no pattern"),
        ({"freeze": [{"pattern": "a", "until": "2 epochs"}]}, "is '2 epochs'"),
        ({"freeze": [{"pattern": "a", "till": 3}]}, "no setting 'till'"),
        ({"freeze": "layers"}, "expected a list"),
        ({"parameter_groups": [{"pattern": "a", "lr": 1}]}, "write learning_rate"),
        ({"parameter_groups": [{"pattern": "a"}]}, "has no learning_rate or weight_decay"),
        ({"loraplus_lr_ratio": 2, "layer_lr_decay": 0.5}, "keep one of them"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(given, says, settings):
    with pytest.raises(SettingError, match=says):
        settings(**given)


@pytest.mark.parametrize(
    ("arguments", "given"), [(PipelineTrainingArguments, {}), (AccelTrainingArguments, {"deepspeed": "auto"})]
)
def test_a_schedule_of_freezing_is_refused_where_a_strategy_cannot_follow(arguments, given, tmp_path):
    arguments(str(tmp_path), freeze=["a"], **given)
    with pytest.raises(SettingError, match="freeze has an until") as caught:
        arguments(str(tmp_path), freeze=[{"pattern": "a", "until": 2}], **given)
    assert "FG814" == caught.value.code


# -- freezing


SCHEDULE = ["lm_head", {"pattern": "embed_tokens|layers.0.mlp", "until": 3}, {"pattern": "layers.1", "until": "1ep"}]


def is_frozen(name, step):
    return "lm_head" in name or (("embed" in name or "0.mlp" in name) and step < 3) or ("layers.1" in name and step < 4)


def test_frozen_parameters_do_not_move_and_are_trained_from_their_step_on(settings):
    trainer = train(settings, freeze=SCHEDULE, weight_decay=0.1)

    def decay(name):
        return 0.0 if "norm" in name else 0.1

    expected = plain_loop(tiny_llama(), rows(), rate=lambda name: LR, decay=decay, is_frozen=is_frozen)
    close(expected, weights(trainer.model))
    assert torch.equal(tiny_llama().lm_head.weight, trainer.model.lm_head.weight)
    later = plain_loop(tiny_llama(), rows(), rate=lambda name: LR, decay=decay)
    with pytest.raises(AssertionError):
        close(later, weights(trainer.model))


@pytest.mark.parametrize("stop", thinned([2, 3, 4, 6], lambda stop: stop in (2, 4)))
def test_a_run_with_a_schedule_of_freezing_resumes_exactly(settings, stop):
    whole = train(settings, freeze=SCHEDULE)
    train(settings, StopAt(stop), save_strategy="steps", save_steps=stop, freeze=SCHEDULE)
    resumed = train(settings, save_strategy="steps", resume=True, freeze=SCHEDULE)
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_a_second_run_of_a_trainer_begins_with_the_frozen_parameters_again(settings):
    trainer = train(settings, freeze=[{"pattern": "embed_tokens", "until": 5}], max_steps=2)
    trained = len([one for group in trainer.optimizer.param_groups for one in group["params"]])
    trainer.train()
    assert trained == len([one for group in trainer.optimizer.param_groups for one in group["params"]])


def test_reentrant_recomputation_of_inputs_that_are_frozen_at_first_is_refused(settings):
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(TrainingError) as caught:
        Trainer(tiny_llama(), settings(freeze=[{"pattern": "embed_tokens", "until": 5}], **given), train_dataset=rows())
    assert "FG907" == caught.value.code
