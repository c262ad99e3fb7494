"""The loss of a head that is cut by its vocabulary equals the one of the whole head, with every term."""

import functools

import pytest
import torch
import torch.distributed as dist

from forgather.ml.linear_loss import linear_cross_entropy
from forgather.ml.loss_terms import UNCHANGED, LogitMap, LossTerms
from forgather.ml.vocabulary_slice import VocabularySlice
from tests.ml.distributed.gang import run_ranks
from tests.ml.test_linear_loss import gradients, plain

TERMS = [LossTerms(), LossTerms(-100, 0.1, 1e-2)]
MAPS = [UNCHANGED, LogitMap(factor=0.25, cap=3.0)]
N, D, V = 37, 16, 102


def problem(dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype, generator=made) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(0, V, (N,), generator=made)
    targets[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def of_slices(*, target=None, dtype=torch.float64):
    """Returns, for each term and map, the loss and the gradients of the whole head, from the slices of two ranks."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for terms in TERMS:
        for logit_map in MAPS:
            hidden, weight, bias, targets = problem(dtype)
            targets[1] = targets[1] if target is None else target
            here = slice(rank * V // 2, (rank + 1) * V // 2)
            parts = [whole.detach()[here].requires_grad_() for whole in (weight, bias)]
            words = VocabularySlice(dist.group.WORLD, here.start, V)
            total = linear_cross_entropy(
                hidden, *parts, targets, terms=terms, logit_map=logit_map, chunk_size=8, words=words
            )
            of_hidden, *of_parts = gradients(total / 7, hidden, *parts)
            dist.all_reduce(of_hidden)
            wholes = [torch.empty_like(whole) for whole in (weight, bias)]
            for whole, part in zip(wholes, of_parts, strict=True):
                dist.all_gather(list(whole.detach().chunk(2)), part.contiguous())
            found.append((total.detach(), of_hidden, *wholes))
    return found


def test_slices_give_the_loss_and_the_gradients_of_the_whole_head():
    for found in run_ranks(2, of_slices):
        expected = [(terms, logit_map) for terms in TERMS for logit_map in MAPS]
        for (terms, logit_map), (total, *actual) in zip(expected, found, strict=True):
            *tensors, targets = problem()
            whole = plain(*tensors, targets, terms=terms, logit_map=logit_map)
            torch.testing.assert_close(total, whole.detach(), rtol=1e-13, atol=0.0)
            torch.testing.assert_close(tuple(actual), gradients(whole / 7, *tensors), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("target", [V, pytest.param(-1, marks=pytest.mark.matrix)])
def test_a_target_that_no_slice_has_makes_the_loss_nan(target):
    for found in run_ranks(2, functools.partial(of_slices, target=target)):
        assert all(total.isnan() for total, *_ in found)
