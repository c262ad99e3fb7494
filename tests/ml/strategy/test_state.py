"""States of optimizers by name, which any layout of processes reads."""

import torch
from torch import nn

from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.strategy.state import local_optimizer_state, local_state, restore_optimizer
from tests.ml.distributed.states import write


def trained(**settings):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_how_a_step_is_computed_does_not_come_from_a_checkpoint(tmp_path):
    model, optimizer = trained(lr=0.5, fused=True)
    other, reader = trained(lr=0.1, fused=False)

    write(local_state(model.state_dict(keep_vars=True), local_optimizer_state(model, optimizer)), tmp_path)
    with CheckpointReader(tmp_path) as saved:
        restore_optimizer(other, reader, saved)

    (group,) = reader.param_groups
    assert (0.5, False) == (group["lr"], group["fused"])
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], reader.state[other.weight]["exp_avg"])
