"""Trains a few updates with a strategy and compares with one process: loss, norm before clipping, and weights.

The figure of weights is |w - w_ref| / |w_ref - w_0|: relative to how far training went, so that an update which was left
out cannot hide behind large weights.
"""

import torch

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.losses import loss_rule
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.single import SingleDevice
from forgather.ml.types import Window
from tests.ml.strategy.models import batches, rows_of
from tests.patience import patience


def environment():
    return DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))


def recipe_of(make, *, make_optimizer=None, prepare=()):
    return Recipe(
        make_model=make,
        make_rule=loss_rule,
        make_optimizer=make_optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)),
        prepare=prepare,
        model_is_made_anew=True,
    )


def windows(accumulation, *, updates=3, rows=4):
    made = batches(updates * accumulation, rows=rows)
    return [made[start : start + accumulation] for start in range(0, len(made), accumulation)]


def train(strategy, groups, *, max_norm=0.5, after_update=None):
    """Returns losses and norms of the updates; the strategy reads its rows of the global micro-batches."""
    topology, losses, norms = strategy.topology, [], []
    for group in groups:
        mine = [strategy.rule.prepared(rows_of(batch, topology.dp_rank, topology.dp_size)) for batch in group]
        valid = sum(strategy.rule.count(batch) for batch in mine)
        denom = strategy.reduce(valid)
        window = Window(batches=mine, num_valid=valid, num_tokens=1, num_rows=1)
        losses.append(strategy.reduce(strategy.forward_backward(window, denom=denom)).item())
        update = strategy.update(
            max_norm=max_norm, want_norm=True, before_step=lambda norm: None, after_step=lambda: None
        )
        norms.append(update.grad_norm.item())
    return losses, norms


def evaluated(strategy, batch):
    """Returns the mean loss of a global batch."""
    topology = strategy.topology
    total, count, _ = strategy.evaluate(strategy.rule.prepared(rows_of(batch, topology.dp_rank, topology.dp_size)))
    return (strategy.reduce(total) / strategy.reduce(count)).item()


def reference(recipe, groups, **settings):
    """Returns losses, norms, weights and first weights of one process, which is forked and reads no variables."""
    from forgather.ml.distributed.env import ProcessFacts

    alone = environment()
    alone.__dict__["facts"] = ProcessFacts()
    strategy = SingleDevice(alone, use_cpu=True)
    strategy.build(recipe)
    first = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    strategy.build_optimizer()
    losses, norms = train(strategy, groups, **settings)
    return losses, norms, dict(strategy.model.state_dict()), first


def differences(found, expected):
    """Returns the largest relative difference of loss, norm, and weights."""
    losses, norms, weights = found
    ref_losses, ref_norms, ref_weights, first = expected
    assert set(ref_weights) == set(weights)
    apart = sum((weights[name].cpu() - ref_weights[name]).square().sum() for name in ref_weights).sqrt()
    moved = sum((first[name] - ref_weights[name]).square().sum() for name in ref_weights).sqrt()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, ref_losses, strict=True)),
        "grad_norm": max(abs(a - b) / abs(b) for a, b in zip(norms, ref_norms, strict=True)),
        "updrel": (apart / moved).item(),
    }
