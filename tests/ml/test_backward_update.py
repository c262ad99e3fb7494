"""Updates in the backward pass: the bits of a plain step, one gradient at a time, and nothing that needs them all."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers.optimization import Adafactor
from transformers.trainer_callback import TrainerCallback

from forgather.errors import ForgatherError
from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.optim import MuonWithAdamW
from forgather.ml.strategy.backward_update import BackwardUpdate
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import StopAt, rows, tiny_llama
from tests.ml.strategy.equality import environment

SETTINGS = {"use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
SETTINGS |= {"max_grad_norm": 0.0, "weight_decay": 0.1, "logging_steps": 1, "save_strategy": "no"}


def made(folder, *, dropout=0.0, callbacks=(), trainer=Trainer, given=None, **more):
    given = given or {}
    return trainer(
        model_init=lambda: tiny_llama(attention_dropout=dropout),
        args=trainer.ARGUMENTS(str(folder), **{**SETTINGS, **more}),
        train_dataset=rows(8),
        callbacks=list(callbacks),
        **given,
    )


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.strategy.export()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def trained(folder, **more):
    trainer = made(folder, **more)
    trainer.train(more.get("resume_from_checkpoint"))
    return trainer


OPTIMIZERS = {
    "AdamW, one by one": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.1, scale_parameter=False, relative_step=False),
    "Muon and AdamW": lambda model: MuonWithAdamW(model, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_a_plain_step_bit_for_bit_and_a_flag_leaves_them_out(name):
    model = tiny_llama(tie_word_embeddings=True)
    plain = copy.deepcopy(model)
    optimizer, expected = OPTIMIZERS[name](model), OPTIMIZERS[name](plain)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    slower = torch.optim.lr_scheduler.ExponentialLR(expected, 0.9)
    update = BackwardUpdate(optimizer)
    ids = torch.arange(24).reshape(2, 12)
    for step in range(3):
        if step == 2:  # a restored state replaces the groups and the state of the optimizer
            optimizer.load_state_dict(optimizer.state_dict())
        with update.on(torch.zeros(())):
            model(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
        plain(input_ids=ids, labels=ids).loss.backward()
        expected.step()
        expected.zero_grad()
        schedule.step()
        slower.step()
    assert same(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert optimizer.state_dict().keys() == expected.state_dict().keys()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    with update.on(torch.zeros(())):
        model(input_ids=ids, labels=ids).loss.backward()
    assert same(dict(plain.named_parameters()), dict(model.named_parameters()))
    optimizer.found_inf = torch.zeros(())
    with update.on(torch.zeros(())):
        model(input_ids=ids, labels=ids).loss.backward()
    assert not same(dict(plain.named_parameters()), dict(model.named_parameters()))


def test_hooks_and_the_optimizer_go_with_the_run_that_made_them(tmp_path):
    plain, own = made(tmp_path / "plain"), made(tmp_path / "own", optimizer_in_backward=True)
    plain.train()
    own.train()
    first = weakref.ref(own.optimizer)
    plain.train()
    own.train()
    assert same(weights(plain), weights(own))
    model = own.model
    assert {1} == {len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()}
    del own
    gc.collect()
    assert first() is None
    assert {0} == {len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()}


def test_a_gradient_that_is_on_its_way_to_the_host_is_waited_for():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    before = copy.deepcopy(model.state_dict())
    seen = []

    class Streams:
        @staticmethod
        def current_stream(device):
            return SimpleNamespace(synchronize=lambda: seen.append(changed()))

    def changed():
        return sum(not torch.equal(value, before[name]) for name, value in model.state_dict().items())

    update = BackwardUpdate(torch.optim.SGD(model.parameters(), lr=0.1), streams=SimpleNamespace(accelerator=Streams))
    for share in (torch.zeros(()), torch.zeros((), device="meta")):
        with update.on(share):
            model(torch.ones(1, 2)).sum().backward()
        before = copy.deepcopy(model.state_dict()) if share.device.type == "cpu" else before
    # Once before each of the four updates, and not where the device is the host.
    assert [0, 1, 2, 3] == seen


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"ema_decay": 0.5, "bf16": True}], ids=str)
def test_a_run_has_the_bits_of_one_that_updates_after_the_backward_pass(tmp_path, more):
    plain = trained(tmp_path / "plain", dropout=0.1, **more)
    own = trained(tmp_path / "own", dropout=0.1, optimizer_in_backward=True, **more)
    assert same(weights(plain), weights(own))
    curves = [[line["loss"] for line in one.state.log_history if "loss" in line] for one in (plain, own)]
    assert curves[0] == curves[1]
    assert not any("grad_norm" in line for line in own.state.log_history)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_of_one_way_is_continued_by_the_other(tmp_path, first):
    saves = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1}
    plain = trained(tmp_path / "plain", **saves)
    folder = tmp_path / "stopped"
    trained(folder, callbacks=[StopAt(2)], optimizer_in_backward=first, **saves)
    resumed = trained(folder, optimizer_in_backward=not first, resume_from_checkpoint=True, **saves)
    assert same(weights(plain), weights(resumed))


class LivingGradients(TrainerCallback):
    """The largest sum of bytes of gradients that are alive when one of them is complete."""

    peak = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Hooks run in the order of their registration: this one sees a gradient before it is freed.
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._measure(model))

    def _measure(self, model):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.peak = max(self.peak, sum(gradient.nbytes for gradient in gradients))


def test_one_gradient_is_alive_at_a_time(tmp_path):
    peaks = {}
    for is_on in (False, True):
        living = LivingGradients()
        trainer = trained(tmp_path / str(is_on), callbacks=[living], optimizer_in_backward=is_on)
        peaks[is_on] = living.peak
    sizes = [parameter.nbytes for parameter in trainer.model.parameters()]
    assert {False: sum(sizes), True: max(sizes)} == peaks


def test_a_loss_that_is_not_finite_changes_no_weight(tmp_path):
    trainer = made(tmp_path, optimizer_in_backward=True)
    inner, kept = trainer.strategy.rule.total, []

    def poisoned(*args, **kwargs):
        kept.append(weights(trainer))
        return inner(*args, **kwargs) * (float("nan") if len(kept) == 3 else 1.0)

    trainer.strategy.rule.total = poisoned
    with pytest.raises(ForgatherError) as caught:
        trainer.train()
    assert "FG818" == caught.value.code
    assert same(kept[2], weights(trainer))
    assert not same(kept[1], kept[2])


class Reader(TrainerCallback):
    """A callback of a user that could read gradients."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        raise AssertionError("not reached")


class Counting(torch.optim.SGD):
    """An optimizer of a user, which might count its steps."""


@pytest.mark.parametrize(
    ("arguments", "more", "word"),
    [
        (TrainingArguments, {"max_grad_norm": 1.0}, "max_grad_norm is 1.0"),
        (TrainingArguments, {"gradient_accumulation_steps": 2}, "several micro-batches"),
        (TrainingArguments, {"accumulate_grad_batches": {0: 1, 1: 2}}, "several micro-batches"),
        (TrainingArguments, {"bad_step_policy": "skip"}, "bad_step_policy 'skip'"),
        (TrainingArguments, {"spike_threshold": 6.0}, "spike_threshold"),
        (
            TrainingArguments,
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "re-entrant",
        ),
        (AccelTrainingArguments, {"fp16": True}, "fp16 is true"),
        (AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed"),
        (AccelTrainingArguments, {"tensor_parallel_size": 2}, "sliced layers"),
        (PipelineTrainingArguments, {"split_spec": "auto"}, "a pipeline"),
    ],
    ids=str,
)
def test_what_needs_all_gradients_is_refused(tmp_path, arguments, more, word):
    with pytest.raises(ForgatherError, match=word) as caught:
        arguments(str(tmp_path), **{**SETTINGS, "optimizer_in_backward": True, **more})
    assert "FG707" == caught.value.code


def test_readers_of_gradients_and_unknown_optimizers_are_refused(tmp_path):
    on = {"optimizer_in_backward": True}
    with pytest.raises(ForgatherError, match="Reader has on_optimizer_step") as caught:
        made(tmp_path, callbacks=[Reader()], **on).train()
    assert "FG707" == caught.value.code
    with pytest.raises(ForgatherError, match="Counting of tests") as caught:
        made(tmp_path, given={"optimizer_factory": lambda parameters: Counting(parameters, lr=0.1)}, **on).train()
    assert "FG707" == caught.value.code


def test_a_gradient_that_is_completed_twice_is_an_error():
    model = torch.nn.Linear(2, 2)
    update = BackwardUpdate(torch.optim.SGD(model.parameters(), lr=0.1))
    with update.on(torch.zeros(())), pytest.raises(ForgatherError, match="completed twice"):  # noqa: PT012 - both passes in one step
        model(torch.ones(2)).sum().backward()
        model(torch.ones(2)).sum().backward()


def _refused(folder):
    try:
        made(
            folder,
            trainer=AccelTrainer,
            optimizer_in_backward=True,
            given={"distributed_env": environment()},
            per_device_train_batch_size=1,
        ).train()
    except ForgatherError as error:
        return error.code, str(error)


def test_ddp_keeps_its_buckets_and_is_refused(tmp_path):
    for code, message in run_ranks(2, _refused, tmp_path):
        assert "FG707" == code
        assert "DDP with 2 processes keeps gradients" in message
