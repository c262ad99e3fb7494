"""How far the loss and the gradients of rows that are divided by positions are from those of whole rows."""

import contextlib

import torch
import torch.distributed as dist

from forgather.ml.losses import loss_rule
from forgather.ml.strategy.context_parallel import SequenceParts


def distance(model, batch, damage=contextlib.nullcontext, **method):
    """Returns the largest relative difference between divided and whole rows, of the loss or of the gradients."""
    rule = loss_rule(model)
    batch = rule.prepared(batch)
    whole = rule.total(model, batch)
    expected = _gradients(model, whole)
    parts = SequenceParts(dist.group.WORLD, torch.device("cpu"), **method)
    with damage():
        part = parts.part(batch)
        with parts.computing(part):
            loss = rule.total(model, part)
            found = _gradients(model, loss)
    for gradient in found:
        dist.all_reduce(gradient)
    apart = _norm(one - other for one, other in zip(found, expected, strict=True)) / _norm(expected)
    total, whole = loss.detach().clone(), whole.detach()
    dist.all_reduce(total)
    return max(apart, float((total - whole).abs() / whole))


def _gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _norm(tensors):
    return float(sum(tensor.double().square().sum() for tensor in tensors).sqrt())
