"""Half precision: what float16 scales, leaves out, and refuses."""

import pytest
import torch
from torch import nn

from forgather.errors import TrainingError
from forgather.ml.strategy.precision import Precision

CPU = torch.device("cpu")


def _step(precision, layer, optimizer, factor):
    precision.scale(layer(torch.ones(1, 2)).sum() * factor).backward()
    overflowed = precision.unscale(optimizer)
    if not overflowed:
        optimizer.step()
    optimizer.zero_grad()
    precision.update_scale()
    return overflowed


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_only_float16_scales(dtype):
    precision = Precision(CPU, dtype)
    loss = torch.ones(())
    assert precision.scale(loss) is loss
    assert not precision.scales
    assert {} == precision.state_dict()


def test_an_overflow_halves_the_scale_and_an_update_does_not():
    precision = Precision(CPU, torch.float16, scaling={"init_scale": 2.0**10})
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    assert _step(precision, layer, optimizer, float("inf"))
    assert torch.equal(before, layer.weight)
    assert 2.0**9 == precision.state_dict()["scale"]
    assert not _step(precision, layer, optimizer, 1.0)
    assert torch.allclose(before - 0.1, layer.weight)
    assert 2.0**9 == precision.state_dict()["scale"]


def test_gradients_that_no_update_follows_leave_the_scale_and_its_growth_as_they_were():
    precision = Precision(CPU, torch.float16, scaling={"init_scale": 2.0**10, "growth_interval": 2})
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert not _step(precision, layer, optimizer, 1.0)
    before = precision.state_dict()
    for _ in range(3):
        precision.scale(layer(torch.ones(1, 2)).sum()).backward()
        assert not precision.unscale(optimizer)
        optimizer.zero_grad()
        precision.keep_scale()
        assert before == precision.state_dict()
    assert not _step(precision, layer, optimizer, 1.0)
    assert 2.0**11 == precision.state_dict()["scale"]
    Precision(CPU, None).keep_scale()


def test_a_scale_is_resumed():
    first = Precision(CPU, torch.float16, scaling={"init_scale": 2.0**7})
    first.scale(torch.ones(()))
    second = Precision(CPU, torch.float16)
    second.load_state_dict(first.state_dict())
    assert 2.0**7 == float(second.scale(torch.ones(())))
    Precision(CPU, None).load_state_dict(first.state_dict())


def test_a_scale_that_falls_for_ever_ends_the_run():
    precision = Precision(CPU, torch.float16, scaling={"init_scale": 2.0**-13})
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    _step(precision, layer, optimizer, float("inf"))
    with pytest.raises(TrainingError, match="gradients still overflow") as caught:
        _step(precision, layer, optimizer, float("inf"))
    assert caught.value.code == "FG721"


def test_float16_weights_are_refused():
    with pytest.raises(TrainingError, match="float16 already") as caught:
        Precision(CPU, torch.float16).check(nn.Linear(2, 2).half().parameters())
    assert caught.value.code == "FG720"
