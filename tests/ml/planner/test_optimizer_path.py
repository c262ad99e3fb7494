"""Which optimizers of torch update all weights at once on a GPU."""

import functools
from types import SimpleNamespace

import pytest
import torch

from forgather.ml.planner.rank_trace import choose_path

KINDS = {name: getattr(torch.optim, name) for name in ("AdamW", "SGD", "Adafactor")}


@pytest.mark.parametrize(
    ("make", "device", "found"),
    [
        (KINDS["AdamW"], "cuda", True),
        (KINDS["SGD"], "cuda", True),
        (KINDS["AdamW"], "cpu", None),
        (functools.partial(KINDS["AdamW"], fused=True), "cuda", None),
        (functools.partial(KINDS["AdamW"], foreach=False), "cuda", False),
        (functools.partial(KINDS["AdamW"], differentiable=True), "cuda", None),
        # It takes weights one by one: `foreach=None` means False.
        (KINDS["Adafactor"], "cuda", None),
    ],
)
def test_an_optimizer_updates_all_weights_at_once_where_torch_does(make, device, found):
    optimizer = make([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    choose_path(SimpleNamespace(optimizer=optimizer), device)
    assert found is optimizer.param_groups[0]["foreach"]
