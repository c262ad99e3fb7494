"""Norm and clipping over plain and sharded gradients of several meshes, and over stages."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from forgather.ml.strategy.gradients import clip_grads, grad_norm, share_of_squares
from tests.ml.distributed.gang import run_ranks


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (7, 3), (4, 4), (3,))]


def expected():
    flat = torch.cat([gradient.flatten() for gradient in gradients()])
    return flat.norm().item(), (flat * min(1.0, 0.5 / (flat.norm().item() + 1e-6))).norm().item()


def parameter_with(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def measured_over_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first, second, third, fourth = gradients()
    parts = [
        parameter_with(distribute_tensor(first, mesh["dp"], [Shard(0)])),
        parameter_with(distribute_tensor(second, mesh["tp"], [Shard(0)])),
        parameter_with(distribute_tensor(third, mesh, [Replicate(), Shard(1)])),
        parameter_with(fourth),
    ]
    before = grad_norm([*parts, parts[0]])
    clip_grads(parts, before, 0.5)
    return before.item(), grad_norm(parts).item()


def test_the_norm_over_meshes_is_that_of_one_process():
    for found in run_ranks(4, measured_over_meshes, start_group=True):
        assert pytest.approx(expected(), rel=1e-14) == found


def measured_over_stages():
    first, second, third, fourth = map(parameter_with, gradients())
    tied = parameter_with(third.grad.clone())
    mine = [first, second, tied] if dist.get_rank() == 0 else [third, fourth]
    before = grad_norm(mine, pp_group=dist.group.WORLD, weights_counted_once=[tied])
    clip_grads(mine, before, 0.5)
    return before.item(), grad_norm(mine, pp_group=dist.group.WORLD, weights_counted_once=[tied]).item()


def test_the_norm_over_stages_counts_tied_weights_once():
    for found in run_ranks(2, measured_over_stages, start_group=True):
        assert pytest.approx(expected(), rel=1e-14) == found


def test_no_gradient_is_a_norm_of_zero():
    assert grad_norm([nn.Parameter(torch.ones(2))]).item() == 0.0


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_that_of_torch_and_leaves_a_norm_below_the_limit(max_norm):
    ours, theirs = ([parameter_with(value.clone()) for value in gradients()] for _ in range(2))
    clip_grads(ours, grad_norm(ours), max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(other.grad, one.grad, rtol=1e-6, atol=0)


def _norms_of_partial_sums():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer = torch.nn.LayerNorm(8)
    parallelize_module(layer, mesh, SequenceParallel(use_local_output=False), src_data_rank=None)
    output = layer(distribute_tensor(torch.arange(64.0).sin().reshape(2, 4, 8), mesh, [Shard(1)]))
    (output * output).sum().full_tensor().backward()
    place = {"dp_shard": 0, "tp": mesh.get_local_rank()}
    squares = share_of_squares(layer.parameters(), place, torch.device("cpu"))
    torch.distributed.all_reduce(squares)
    return float(squares.sqrt()), float(grad_norm(layer.parameters()))


def test_partial_sums_of_a_gradient_are_added_before_their_norm_is_taken():
    for found, expected in run_ranks(2, _norms_of_partial_sums, start_group=True):
        assert pytest.approx(expected, rel=1e-6) == found
