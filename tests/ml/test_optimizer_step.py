"""A step that a flag on the device leaves out changes nothing, and a good one is that of the optimizer, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from forgather.ml.host_reads import host_can_read, reads_forbidden
from forgather.ml.optim import MuonWithAdamW, adamw
from forgather.ml.strategy import optimizer_step
from forgather.ml.strategy.optimizer_step import OptimizerStep
from tests.ml.fixtures import tiny_llama

OPTIMIZERS = {
    "AdamW, one by one": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.1, scale_parameter=False, relative_step=False),
    "Muon and AdamW": lambda model: MuonWithAdamW(model, lr=0.1),
}


def give_gradients(model, seed, value=1.0):
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw) * value


def tensors(model, optimizer):
    """Returns weights and states that lie on the device; torch counts steps on the host unless it is fused."""
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return [one.detach().clone() for one in [*model.parameters(), *states] if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_nothing_and_a_good_one_is_the_optimizers(name, bucket_bytes, monkeypatch):
    monkeypatch.setattr(optimizer_step, "BUCKET_BYTES", bucket_bytes)
    model = tiny_llama()
    plain = copy.deepcopy(model)
    optimizer, expected = OPTIMIZERS[name](model), OPTIMIZERS[name](plain)
    step = OptimizerStep(optimizer)
    assert step.can_skip
    optimizer.grad_scale = None
    for seed in range(3):
        optimizer.found_inf = torch.zeros(())
        give_gradients(model, seed)
        give_gradients(plain, seed)
        step()
        expected.step()
    before = tensors(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, tensors(plain, expected), strict=True))
    give_gradients(model, 3, float("nan"))
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.found_inf = torch.ones(())
    step()
    assert all(torch.equal(one, other) for one, other in zip(before, tensors(model, optimizer), strict=True))
    assert all(parameter.grad is kept for parameter, kept in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("name", ["SGD with momentum", "Adafactor"])
def test_a_first_step_that_is_bad_makes_no_state(name):
    model = tiny_llama()
    optimizer = OPTIMIZERS[name](model)
    optimizer.found_inf = torch.ones(())
    give_gradients(model, 0, float("inf"))
    before = tensors(model, optimizer)
    OptimizerStep(optimizer)()
    assert all(torch.equal(one, other) for one, other in zip(before, tensors(model, optimizer), strict=True))


class Counting(torch.optim.SGD):
    """An optimizer of a user, which might count its steps."""


def test_an_unknown_optimizer_is_not_stepped_in_parts():
    optimizer = Counting(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not OptimizerStep(optimizer).can_skip


def test_the_template_is_fused_on_an_accelerator_unless_the_user_says_otherwise():
    model = tiny_llama()
    assert host_can_read(torch.device("cpu"))
    assert [None, None] == [group["fused"] for group in adamw(model, weight_decay=0.1).param_groups]
    with reads_forbidden():
        assert [True, True] == [group["fused"] for group in adamw(model, weight_decay=0.1).param_groups]
        for key in ("fused", "foreach"):
            assert not any(group["fused"] for group in adamw(model, weight_decay=0.1, **{key: False}).param_groups)


def test_fused_updates_equal_those_of_earlier_releases_within_rounding_and_continue_their_state():
    model = tiny_llama()
    other = copy.deepcopy(model)
    one, fused = adamw(model, lr=1e-2), adamw(other, lr=1e-2, fused=True)
    for seed in range(6):
        give_gradients(model, seed)
        give_gradients(other, seed)
        one.step()
        if seed == 2:  # as a checkpoint of an earlier release, whose step counts are on the host
            saved = copy.deepcopy(one.state_dict())
            fused.load_state_dict({**saved, "param_groups": fused.state_dict()["param_groups"]})
            with torch.no_grad():
                for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                    mine.copy_(theirs)
        else:
            fused.step()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
