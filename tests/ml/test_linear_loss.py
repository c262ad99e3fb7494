"""The cross entropy of hidden states and a head equals the plain formula on logits, for every term and dtype."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from forgather.ml.linear_loss import chunk_size_for, linear_cross_entropy
from forgather.ml.loss_kernels import torch_kernel
from forgather.ml.loss_terms import UNCHANGED, LogitMap, LossTerms, z_loss_of

N, D, V = 37, 16, 101
CAPPED = LogitMap(factor=0.25, cap=3.0)
TERMS = [LossTerms(), LossTerms(label_smoothing=0.1), LossTerms(z_loss=1e-2), LossTerms(-100, 0.1, 1e-2)]


def problem(dtype=torch.float64, *, bias=True):
    made = torch.Generator().manual_seed(0)
    hidden, weight, bias_V = (
        torch.randn(*shape, dtype=torch.float64, generator=made).to(dtype).requires_grad_()
        for shape in ((N, D), (V, D), (V,))
    )
    targets = torch.randint(0, V, (N,), generator=made)
    targets[::5] = -100
    return hidden, weight, bias_V if bias else None, targets


def plain(hidden, weight, bias, targets, *, terms, logit_map=UNCHANGED):
    """The formula on all logits, written out."""
    logits = F.linear(hidden, weight, bias) * logit_map.factor
    if logit_map.cap is not None:
        logits = logit_map.cap * torch.tanh(logits / logit_map.cap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    smooth = terms.label_smoothing
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smooth)
    return total + terms.z_loss * (torch.logsumexp(logits, -1)[targets != -100] ** 2).sum()


def gradients(total, *tensors):
    return torch.autograd.grad(total, [tensor for tensor in tensors if tensor is not None and tensor.requires_grad])


@pytest.mark.parametrize(
    ("terms", "logit_map", "bias", "size"), [*itertools.product(TERMS, [UNCHANGED, CAPPED], [True, False], [8, N])]
)
def test_loss_and_gradients_equal_the_formula(terms, logit_map, bias, size):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        *tensors, targets = problem(dtype, bias=bias)
        expected = plain(*tensors, targets, terms=terms, logit_map=logit_map)
        actual = linear_cross_entropy(*tensors, targets, terms=terms, logit_map=logit_map, chunk_size=size)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0.0)
        for one, other in zip(gradients(actual / 7, *tensors), gradients(expected / 7, *tensors), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("term", ["label_smoothing", "z_loss"])
def test_each_term_changes_the_loss(term):
    *tensors, targets = problem()
    with_term = linear_cross_entropy(*tensors, targets, terms=LossTerms(**{term: 0.1}), chunk_size=8)
    assert abs(with_term - linear_cross_entropy(*tensors, targets, terms=LossTerms(), chunk_size=8)) > 1.0


def test_z_loss_of_logits_is_the_same_number():
    hidden, weight, bias, targets = problem()
    terms = LossTerms(z_loss=0.5)
    found = z_loss_of(F.linear(hidden, weight, bias), targets, terms)
    without = plain(hidden, weight, bias, targets, terms=LossTerms())
    torch.testing.assert_close(without + found, plain(hidden, weight, bias, targets, terms=terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float64_as_logits_are(dtype):
    scale = 2.0**12
    *tensors, targets = problem()
    exact = gradients(plain(*tensors, targets, terms=LossTerms()), *tensors)
    errors = []
    for compute in (plain, linear_cross_entropy):
        *tensors, targets = problem(torch.float32)
        more = {} if compute is plain else {"chunk_size": 8}
        with torch.autocast("cpu", dtype=dtype):
            total = compute(*tensors, targets, terms=LossTerms(), **more)
        assert total.dtype is torch.float32
        found = gradients(total * scale, *tensors)
        assert {gradient.dtype for gradient in found} == {torch.float32}
        errors.append(max(float((a / scale - b).abs().max()) for a, b in zip(found, exact, strict=True)))
    assert errors[1] <= 1.5 * errors[0]


def test_small_gradients_survive_in_float16_as_they_do_with_logits():
    # Without the factor of the loss they would be below the smallest number of float16.
    hidden, weight, _, targets = problem(torch.float16, bias=False)
    weight = (weight.detach() * 1e-3).requires_grad_()
    total = linear_cross_entropy(hidden, weight, None, targets, terms=LossTerms(), chunk_size=8)
    (found,) = torch.autograd.grad(total * 2.0**-20, [hidden])
    (expected,) = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum") * 2.0**-20, [hidden]
    )
    assert torch.equal(found == 0, expected == 0)
    (found,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, None, targets, terms=LossTerms(), chunk_size=8) * 2.0**10, [hidden]
    )
    (expected,) = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum") * 2.0**10, [hidden]
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


def test_frozen_heads_and_inputs_get_no_gradient():
    hidden, weight, bias, targets = problem()
    frozen, still = weight.detach(), bias.detach()
    expected = gradients(plain(hidden, frozen, still, targets, terms=LossTerms()), hidden)
    actual = gradients(linear_cross_entropy(hidden, frozen, still, targets, terms=LossTerms(), chunk_size=8), hidden)
    torch.testing.assert_close(actual, expected)
    only = gradients(
        linear_cross_entropy(hidden.detach(), weight, bias, targets, terms=LossTerms(), chunk_size=8), weight, bias
    )
    torch.testing.assert_close(only, gradients(plain(hidden, weight, bias, targets, terms=LossTerms()), weight, bias))
    assert not linear_cross_entropy(hidden.detach(), frozen, still, targets, terms=LossTerms()).requires_grad


def test_a_second_backward_pass_raises_unless_it_was_asked_for():
    *tensors, targets = problem()
    once = linear_cross_entropy(*tensors, targets, terms=LossTerms(), chunk_size=8)
    once.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given away"):
        once.backward()
    twice = linear_cross_entropy(*tensors, targets, terms=LossTerms(), chunk_size=8, runs_backward_twice=True)
    first = torch.autograd.grad(twice, tensors[0], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(twice, tensors[0])[0])


def test_targets_that_are_all_ignored_give_zero():
    *tensors, targets = problem()
    total = linear_cross_entropy(*tensors, torch.full_like(targets, -100), terms=TERMS[-1], chunk_size=8)
    assert float(total.detach()) == 0.0
    assert all(not gradient.any() for gradient in gradients(total, *tensors))


def test_a_target_above_the_vocabulary_raises_the_error_of_cross_entropy():
    *tensors, targets = problem()
    targets[0] = V
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(*tensors, targets, terms=LossTerms())


def test_a_chunk_has_fixed_bytes():
    assert chunk_size_for(128_256) == 512
    assert chunk_size_for(50_257) == 1_280
    assert chunk_size_for(10**9) == 1


def test_the_kernel_of_torch_gives_the_same_numbers():
    *tensors, targets = problem()
    expected = plain(*tensors, targets, terms=LossTerms())
    actual = torch_kernel(*tensors, targets, terms=LossTerms(), chunk_size=8)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, *tensors), gradients(expected, *tensors))
