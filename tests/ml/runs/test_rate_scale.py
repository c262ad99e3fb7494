"""A scaled schedule gives, at every later step, the factor times the rate of the schedule alone."""

import random

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules
from transformers import get_scheduler

from forgather.ml.trainer.rate_scale import ScaledSchedule

STEPS = 24


def _sequential(optimizer):
    parts = [torch_schedules.LinearLR(optimizer, 0.1, total_iters=5), torch_schedules.ExponentialLR(optimizer, 0.9)]
    return torch_schedules.SequentialLR(optimizer, parts, [5])


SCHEDULES = {
    **{
        name: lambda optimizer, name=name: get_scheduler(name, optimizer, 3, STEPS + 2)
        for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt")
    },
    "StepLR": lambda optimizer: torch_schedules.StepLR(optimizer, 4, 0.5),
    "CosineAnnealingLR": lambda optimizer: torch_schedules.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch_schedules.CosineAnnealingWarmRestarts(
        optimizer, 7, eta_min=1e-4
    ),
    "OneCycleLR": lambda optimizer: torch_schedules.OneCycleLR(optimizer, [0.1, 0.02], total_steps=STEPS + 2),
    "CyclicLR": lambda optimizer: torch_schedules.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=5),
    "SequentialLR": _sequential,
    "ReduceLROnPlateau": lambda optimizer: torch_schedules.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=1, min_lr=1e-3
    ),
}


def made(name, *, scalar=float):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": scalar(rate)} for rate in (0.1, 0.02)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return optimizer, SCHEDULES[name](optimizer)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def metric(step):
    return [1.0 + step % 3] if step > 4 else [10.0 - step]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_every_later_rate_is_the_factor_times_that_of_the_schedule_alone(name, seed):
    follows = name == "ReduceLROnPlateau"
    (alone, schedule), (optimizer, inner) = made(name), made(name)
    scaled = ScaledSchedule(inner, optimizer)
    draw = random.Random(seed)
    changes = {step: draw.choice([0.25, 0.3, 1.7]) for step in draw.sample(range(STEPS), 3)}
    factor = 1.0
    for step in range(STEPS):
        for one in (alone, optimizer):
            one.step()
        schedule.step(*metric(step) if follows else ())
        scaled.step(*metric(step) if follows else ())
        if step in changes:
            factor = changes[step]
            scaled.set_factor(factor)
        assert [rate * factor for rate in rates(alone)] == rates(optimizer), step


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_restored_schedule_goes_on_as_the_one_that_was_saved(name):
    follows = name == "ReduceLROnPlateau"
    optimizer, inner = made(name)
    scaled = ScaledSchedule(inner, optimizer)
    for step in range(6):
        optimizer.step()
        scaled.step(*metric(step) if follows else ())
    scaled.set_factor(0.3)
    state = (inner.state_dict(), optimizer.state_dict(), scaled.state_dict())
    other_optimizer, other_inner = made(name)
    other = ScaledSchedule(other_inner, other_optimizer)
    other_optimizer.load_state_dict(state[1])
    other_inner.load_state_dict(state[0])
    if isinstance(other_inner, torch_schedules.LambdaLR):
        # As a resume does: the rates that the schedule gives at this step.
        for group, base, of in zip(
            other_optimizer.param_groups, other_inner.base_lrs, other_inner.lr_lambdas, strict=True
        ):
            group["lr"] = base * of(other_inner.last_epoch)
    other.load_state_dict(state[2])
    for step in range(6, STEPS):
        assert rates(optimizer) == rates(other_optimizer), step
        for one in (optimizer, other_optimizer):
            one.step()
        for one in (scaled, other):
            one.step(*metric(step) if follows else ())


def test_a_rate_in_a_tensor_stays_that_tensor():
    optimizer, inner = made("linear", scalar=torch.tensor)
    tensors = [group["lr"] for group in optimizer.param_groups]
    scaled = ScaledSchedule(inner, optimizer)
    optimizer.step()
    scaled.step()
    scaled.set_factor(0.5)
    scaled.step()
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
