"""Muon and AdamW as one optimizer, and what factories are called with."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Muon

from forgather.errors import CheckpointError, TrainingError
from forgather.launcher_env import ProcessFacts
from forgather.ml import Trainer
from forgather.ml.distributed.env import fake_world
from forgather.ml.optim import MuonWithAdamW, adafactor, adamw, decay_groups, sgd
from forgather.ml.strategy import SingleDevice
from forgather.ml.trainer.optimizers import make_optimizer, make_schedule
from forgather.ml.types import Update
from tests.ml.fixtures import Regression, assert_same_weights, regression_rows, rows, tiny_llama, weights


def test_an_optimizer_that_wants_a_closure_is_refused(settings):
    with pytest.raises(TrainingError, match="needs a closure") as caught:
        make_optimizer(Regression(), settings(), torch.optim.LBFGS)
    assert "FG819" == caught.value.code


class PartlySliced(nn.Module):
    """A weight that is sliced over two processes, and one that is whole on each."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.sliced = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        self.whole = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("factory", [None, AdamW, torch.optim.SGD])
def test_sliced_and_whole_weights_are_never_updated_by_one_operator(factory, settings):
    args = settings(optim="adamw_torch", weight_decay=0.0)
    with fake_world(ProcessFacts(rank=0, local_rank=0, world_size=2, local_world_size=2)):
        model = PartlySliced()
        optimizer = make_optimizer(model, args, factory)
        # What torch would do on a GPU, where it takes `foreach` by default.
        by_default = AdamW(model.parameters(), foreach=True)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            by_default.step()
        optimizer.step()
    assert [False] * len(optimizer.param_groups) == [group["foreach"] for group in optimizer.param_groups]


def test_weights_of_one_kind_are_updated_as_torch_does_by_default(settings):
    optimizer = make_optimizer(tiny_llama(), settings(optim="adamw_torch"))
    assert {None} == {group["foreach"] for group in optimizer.param_groups}


def backward(model):
    model(input_ids=torch.arange(10).reshape(1, 10), labels=torch.arange(10).reshape(1, 10)).loss.backward()


def test_the_two_parts_step_as_muon_and_adamw_would():
    expected, actual = tiny_llama(), tiny_llama()
    named = dict(expected.named_parameters())
    hidden = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ends = [p for n, p in named.items() if p.ndim == 2 and ("embed" in n or "lm_head" in n)]
    norms = [p for p in named.values() if p.ndim < 2]
    parts = [
        Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW([{"params": ends, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=0.003),
    ]
    whole = MuonWithAdamW(actual, lr=0.02, adamw_lr=0.003)
    for _ in range(3):
        for model, optimizers in ((expected, parts), (actual, [whole])):
            backward(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(weights(expected), weights(actual))


def test_every_parameter_is_in_exactly_one_group():
    model = tiny_llama()
    optimizer = MuonWithAdamW(model)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert ["muon", "adamw", "adamw"] == [group["algorithm"] for group in optimizer.param_groups]


def test_one_state_dict_resumes_exactly():
    def steps(model, optimizer, count):
        for _ in range(count):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

    expected, actual = tiny_llama(), tiny_llama()
    first = MuonWithAdamW(expected, lr=0.01)
    steps(expected, first, 2)
    actual.load_state_dict(expected.state_dict())
    second = MuonWithAdamW(actual, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(expected, first, 2)
    steps(actual, second, 2)
    assert_same_weights(weights(expected), weights(actual))


def test_a_schedule_moves_both_parts():
    optimizer = MuonWithAdamW(tiny_llama(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    backward_free = [optimizer.step(), schedule.step()]
    assert [None, None] == backward_free
    assert [0.005] * 3 == [group["lr"] for group in optimizer.param_groups]


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(TrainingError, match=r"FG816.*no two-dimensional hidden weight"):
        MuonWithAdamW(nn.LayerNorm(4))


def test_muon_trains_and_resumes_in_the_trainer(settings):
    def make(**given):
        args = settings(save_strategy="steps", save_steps=2, max_steps=6, **given)
        return Trainer(tiny_llama(), args, train_dataset=rows(), optimizer_factory=MuonWithAdamW)

    whole = make()
    whole.train()
    resumed = make()
    resumed.train(f"{whole.args.output_dir}/checkpoint-4")
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert isinstance(whole.optimizer, MuonWithAdamW)


def test_a_factory_gets_what_it_accepts_and_does_not_set(settings):
    model, args = Regression(), settings(learning_rate=0.5, weight_decay=0.25)
    plain = make_optimizer(model, args, torch.optim.SGD)
    assert (0.5, 0.25) == (plain.defaults["lr"], plain.defaults["weight_decay"])
    own = make_optimizer(model, args, functools.partial(torch.optim.SGD, lr=0.125))
    assert (0.125, 0.25) == (own.defaults["lr"], own.defaults["weight_decay"])
    closed = make_optimizer(model, args, lambda parameters: AdamW(parameters, lr=0.75))
    assert (0.75, 0.01) == (closed.defaults["lr"], closed.defaults["weight_decay"])


def test_a_factory_whose_call_hides_its_parameters_is_looked_into(settings):
    class Deferred:
        func, keywords = torch.optim.SGD, {"momentum": 0.5}

        def __call__(self, *args, **kwargs):
            return self.func(*args, **{**self.keywords, **kwargs})

    optimizer = make_optimizer(Regression(), settings(learning_rate=0.5), Deferred())
    assert (0.5, 0.5) == (optimizer.defaults["lr"], optimizer.defaults["momentum"])


def test_a_learning_rate_without_effect_is_reported_once(settings, caplog):
    factory = functools.partial(torch.optim.SGD, lr=0.125)
    make_optimizer(Regression(), settings(learning_rate=0.5), factory)
    assert ["learning_rate is 0.5, but the optimizer_factory sets its own (0.125), which is used"] == caplog.messages


def test_a_learning_rate_that_nobody_set_is_not_mentioned(caplog):
    from forgather.ml import TrainingArguments

    make_optimizer(Regression(), TrainingArguments(), functools.partial(torch.optim.SGD, lr=0.125))
    assert [] == caplog.messages


def test_arguments_of_transformers_do_as_well(tmp_path, caplog):
    import transformers

    args = transformers.TrainingArguments(str(tmp_path), learning_rate=0.5, use_cpu=True, warmup_steps=0.5)
    optimizer = make_optimizer(Regression(), args, functools.partial(torch.optim.SGD, lr=0.125))
    assert 0.125 == optimizer.defaults["lr"]
    assert 1 == len(caplog.messages)
    schedule = make_schedule(optimizer, args, 10, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3))
    assert 3 == schedule.step_size


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd"])
def test_every_default_optimizer_trains(settings, name):
    model = Regression()
    before = weights(model)
    args = settings(optim=name, weight_decay=0.1)
    trainer = Trainer(model, args, train_dataset=regression_rows())
    trainer.train()
    assert [0.1, 0.0] == [group["weight_decay"] for group in trainer.optimizer.param_groups]
    assert not torch.equal(before["layers.0.weight"], weights(model)["layers.0.weight"])


def test_an_object_that_is_not_an_optimizer_is_refused(settings):
    with pytest.raises(TrainingError, match=r"FG819.*optimizer_factory returned a list"):
        make_optimizer(Regression(), settings(), list)


def test_a_model_without_trainable_parameters_is_refused(settings):
    with pytest.raises(TrainingError, match=r"FG820.*Regression has no trainable parameter"):
        make_optimizer(Regression().requires_grad_(False), settings())


def test_a_schedule_factory_gets_what_it_accepts_and_does_not_set(settings):
    from transformers import get_cosine_schedule_with_warmup, get_scheduler

    optimizer = torch.optim.SGD(Regression().parameters(), lr=1.0)
    args = settings(warmup_steps=2)
    schedule = make_schedule(optimizer, args, 10, get_cosine_schedule_with_warmup)
    expected = get_cosine_schedule_with_warmup(torch.optim.SGD(Regression().parameters(), lr=1.0), 2, 10)
    for _ in range(10):
        assert expected.get_last_lr() == schedule.get_last_lr()
        expected.optimizer.step(), expected.step(), optimizer.step(), schedule.step()
    by_name = make_schedule(optimizer, args, 10, functools.partial(get_scheduler, "linear"))
    assert [0.0] == by_name.get_last_lr()
    own = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    assert 3 == make_schedule(optimizer, args, 10, own).step_size


def test_an_object_that_is_not_a_schedule_is_refused(settings):
    optimizer = torch.optim.SGD(Regression().parameters(), lr=1.0)
    with pytest.raises(TrainingError, match=r"FG819.*lr_scheduler_factory returned a str"):
        make_schedule(optimizer, settings(), 10, lambda optimizer: "linear")


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_the_last_learning_rate_is_that_of_the_last_update(settings, kind):
    """The schedule moves once an update, however many micro-batches an update has."""
    from transformers import get_scheduler

    args = settings(lr_scheduler_type=kind, gradient_accumulation_steps=2, num_train_epochs=3, warmup_steps=2)
    trainer = Trainer(Regression(), args, train_dataset=regression_rows())
    trainer.train()
    expected = get_scheduler(kind, torch.optim.SGD(Regression().parameters(), lr=1e-2), 2, 6)
    for _ in range(6):
        expected.optimizer.step()
        expected.step()
    assert expected.get_last_lr() == trainer.lr_scheduler.get_last_lr()


class EverySecond(SingleDevice):
    """A strategy that leaves every second update out, as one with a loss scale may."""

    calls = 0

    def update(self, **given):
        self.calls += 1
        if self.calls % 2:
            return super().update(**given)
        self.discard()
        return Update(skipped=True)


def test_the_learning_rate_stays_where_an_update_was_left_out(settings):
    trainer = Trainer(Regression(), settings(num_train_epochs=2), train_dataset=regression_rows())
    trainer.strategy.__class__ = EverySecond
    assert 8 == trainer.train().global_step
    assert 4 == trainer.lr_scheduler.last_epoch


def test_a_schedule_that_follows_a_metric_is_stepped_by_evaluations(settings):
    args = settings(
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="epoch", num_train_epochs=4, learning_rate=0.5, optim="sgd",
    )  # fmt: skip
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(), eval_dataset=regression_rows())
    trainer.train()
    assert 4 == trainer.lr_scheduler.last_epoch


# Which parameters decay.


class OwnNorm(nn.LayerNorm):
    pass


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


class OwnBlock(nn.Module):
    """Norms whose names say nothing, a vector that is neither norm nor bias, and a bias of two dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = OwnNorm(4), nn.BatchNorm1d(4), ScaleNorm()
        self.gate = nn.Parameter(torch.ones(4))
        self.expert_bias = nn.Parameter(torch.zeros(2, 4))
        self.linear = nn.Linear(4, 4)


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))


def tiny_bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8))


def names_that_decay(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_bert, Regression])
def test_what_decays_is_what_transformers_lets_decay(make):
    import transformers

    model = make()
    wanted = transformers.Trainer.get_decay_parameter_names(None, model)
    expected = [name for name, _ in model.named_parameters() if name in wanted]
    assert expected == names_that_decay(model, decay_groups(model, 0.1))
    assert 0 < len(expected) < len(list(model.named_parameters()))


def test_norms_are_known_by_their_class_and_biases_by_their_name():
    model = OwnBlock()
    assert ["gate", "linear.weight"] == names_that_decay(model, decay_groups(model, 0.1))
    assert "first.weight" in names_that_decay(model, decay_groups(model, 0.1, ["bias"]))
    assert "linear.bias" in names_that_decay(model, decay_groups(model, 0.1, ["norm"]))
    everything = [name for name, _ in model.named_parameters()]
    assert everything == names_that_decay(model, decay_groups(model, 0.1, []))


def test_what_is_frozen_is_in_no_group_and_no_decay_makes_one_group():
    model = tiny_llama()
    model.get_input_embeddings().requires_grad_(False)
    groups = decay_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) - 1
    assert 1 == len(decay_groups(model, 0.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adamw(tiny_llama(), no_decay=["biases"]), r"FG867.*no_decay names 'biases'.*did you mean 'bias'"),
        (lambda: adamw(tiny_llama().parameters()), r"FG867.*needs the model, and got a generator"),
    ],
)
def test_a_kind_that_is_not_known_and_parameters_without_their_model_are_refused(call, message):
    with pytest.raises(TrainingError, match=message):
        call()


def hand_written(groups_of, make, data, steps=4, lr=1e-2):
    """Trains without a trainer, on all rows at once; `groups_of` says by names what decays."""
    model = tiny_llama()
    optimizer = make(groups_of(model), lr=lr)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    targets = (batch["labels"][:, 1:] != -100).sum()
    for _ in range(steps):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).reshape(-1)
        flat = logits.reshape(-1, logits.shape[-1])
        (nn.functional.cross_entropy(flat, labels, reduction="sum") / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_groups(model):
    kinds = {True: [], False: []}
    for name, parameter in model.named_parameters():
        kinds["norm" not in name].append(parameter)
    return [{"params": kinds[True], "weight_decay": 0.5}, {"params": kinds[False], "weight_decay": 0.0}]


def one_group(model):
    return [{"params": list(model.parameters()), "weight_decay": 0.5}]


@pytest.mark.parametrize(
    ("ours", "torchs"), [(adamw, AdamW), (sgd, torch.optim.SGD), (adafactor, torch.optim.Adafactor)]
)
def test_two_groups_train_as_a_loop_of_torch_with_two_groups_and_not_as_one_with_one(settings, ours, torchs):
    args = settings(
        weight_decay=0.5, max_steps=4, per_device_train_batch_size=8, lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), optimizer_factory=ours)
    trainer.train()
    assert_same_weights(hand_written(two_groups, torchs, rows()), weights(trainer.model))
    other = hand_written(one_group, torchs, rows())
    assert not torch.equal(other["model.norm.weight"], weights(trainer.model)["model.norm.weight"])


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_an_optimizer_by_name_and_one_by_a_factory_decay_the_same(settings, optim):
    model, args = tiny_gpt2(), settings(weight_decay=0.1, optim=optim)
    by_name = make_optimizer(model, args)
    by_factory = make_optimizer(model, args, sgd if optim == "sgd" else adamw)
    for one, other in zip(by_name.param_groups, by_factory.param_groups, strict=True):
        assert one["weight_decay"] == other["weight_decay"]
        assert list(map(id, one["params"])) == list(map(id, other["params"]))


def test_a_checkpoint_of_one_group_resumes_with_its_decay_and_logs_that(settings, caplog):
    def make(factory, **given):
        args = settings(save_strategy="steps", save_steps=2, max_steps=4, weight_decay=0.5, **given)
        return Trainer(tiny_llama(), args, train_dataset=rows(), optimizer_factory=factory)

    whole = make(AdamW)
    whole.train()
    folder = f"{whole.args.output_dir}/checkpoint-2"
    resumed = make(adamw)
    resumed.train(folder)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert whole.lr_scheduler.get_last_lr() * 2 == resumed.lr_scheduler.get_last_lr()
    assert "settings of the checkpoint: weight_decay 0.5 in parameter group 1 (the config says 0.0)" in caplog.text


def test_one_group_does_not_go_on_from_two_that_decay_differently(settings):
    args = settings(save_strategy="steps", save_steps=2, max_steps=4, weight_decay=0.5)
    Trainer(tiny_llama(), args, train_dataset=rows(), optimizer_factory=adamw).train()
    one = Trainer(tiny_llama(), args, train_dataset=rows(), optimizer_factory=AdamW)
    with pytest.raises(
        CheckpointError, match=r"FG605.*weight_decay 0.5 for .*and 0.0 for .*norm.*which are in one group"
    ):
        one.train(f"{args.output_dir}/checkpoint-2")
