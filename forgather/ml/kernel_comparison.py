"""The comparison of a custom kernel with its reference, on the tensors of one call.

Takes both functions, the kernel's backward pass and the arguments; gives what is wrong with the kernel. Keeps true:
the arguments of the run are not changed. Results without a number that is finite and not zero tell nothing: a wrong
kernel would give them, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_KEYS = torch._C.DispatchKey
_AUTOGRAD_KEYS = (_KEYS.AutogradOther, _KEYS.AutogradCPU, _KEYS.AutogradCUDA, _KEYS.ADInplaceOrView)

Backward = Callable[..., Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one call says about a kernel.

    Args:
        problem: why the kernel cannot be used; None if it equals the reference.
        is_telling: whether the results have a number that a wrong kernel would hardly give.
    """

    problem: str | None
    is_telling: bool


def compare(
    kernel: Callable[..., Any],
    backward: Backward | None,
    reference: Callable[..., Any],
    tolerance: tuple[float, float] | None,
    args: Sequence[Any],
) -> Comparison:
    """Compares the results and the gradients of a kernel with those of its reference.

    Args:
        kernel: the fast implementation.
        backward: its backward pass; None if the reference is differentiated.
        reference: the function of torch operations.
        tolerance: the relative and the absolute tolerance; None for those of `torch.testing.assert_close`.
        args: the arguments of the call.

    Raises:
        torch.OutOfMemoryError: if the memory of the device does not suffice.
    """
    made = reference(*args)
    is_telling = any(_has_number(out) for out in as_tuple(made))
    try:
        problem = _problem(kernel, backward, reference, tolerance, args, made)
    except torch.OutOfMemoryError:
        # The reference would not fit either.
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, its reference can be used
        said = str(error).splitlines()[0] if str(error) else "no message"
        problem = f"failed with {type(error).__name__} ({said})"
    return Comparison(problem, is_telling)


def _has_number(out: Tensor) -> bool:
    # torch compares no values of one byte with a fraction.
    wide = out.float() if out.is_floating_point() and out.dtype.itemsize == 1 else out
    return bool((wide.isfinite() & (wide != 0)).any())


def _problem(
    kernel: Callable[..., Any],
    backward: Backward | None,
    reference: Callable[..., Any],
    tolerance: tuple[float, float] | None,
    args: Sequence[Any],
    expected: Any,
) -> str | None:
    # A kernel that writes into its arguments must not change those of the run.
    given = [value.clone() if isinstance(value, Tensor) else value for value in args]
    made = kernel(*given)
    if isinstance(made, tuple | list) != isinstance(expected, tuple | list):
        return f"gives {type(made).__name__}, its reference {type(expected).__name__}"
    problem = _change(given, args) or _difference("results", as_tuple(made), as_tuple(expected), tolerance)
    if problem is not None or backward is None:
        return problem
    # Ones would hide a kernel that ignores the gradients of its outputs.
    grads = [
        torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out) for out in as_tuple(expected)
    ]
    given_grads = [grad.clone() for grad in grads]
    own = without_none(backward(given_grads, *given), args)
    problem = _change([*given_grads, *given], [*grads, *args])
    return problem or _difference("gradients", own, gradients_of(reference, grads, args), tolerance)


def _difference(
    what: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: tuple[float, float] | None
) -> str | None:
    if [(one.shape, one.dtype) for one in found] != [(one.shape, one.dtype) for one in expected]:
        shapes = (", ".join(f"{one.dtype} {list(one.shape)}" for one in each) for each in (found, expected))
        return "gives {} of {}, its reference of {}".format(what, *shapes)
    rtol, atol = tolerance or (None, None)
    try:
        torch.testing.assert_close(list(found), list(expected), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        largest = max(_largest_difference(one, other) for one, other in zip(found, expected, strict=True))
        return f"gives {what} that differ from those of its reference by up to {largest:.3g}"
    return None


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    # Truth values have no difference, and that of unsigned numbers wraps around.
    wide = torch.complex128 if one.is_complex() else torch.float64
    return (one.cpu().to(wide) - other.cpu().to(wide)).abs().max().item()


def _change(given: Sequence[Any], before: Sequence[Any]) -> str | None:
    """Returns what a kernel did to its arguments, by their values: a kernel in another language counts no versions."""
    for number, (now, then) in enumerate(zip(given, before, strict=True), 1):
        if isinstance(now, Tensor) and not torch.equal(now.nan_to_num(), then.nan_to_num()):
            return f"changes its argument {number}"
    return None


def gradients_of(reference: Callable[..., Any], grads: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
    """Returns the gradients of a function of torch operations, for each floating-point tensor among its arguments.

    Args:
        reference: the function.
        grads: the gradients of its outputs.
        args: its arguments.
    """
    with _autograd():
        own = [value.detach().requires_grad_() if has_gradient(value) else value for value in args]
        outputs = as_tuple(reference(*own))
        inputs = [value for value in own if has_gradient(value)]
        # Outputs of whole numbers have no gradient.
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not pairs or not inputs:
            return without_none([None] * len(inputs), args)
        own_outputs, own_grads = zip(*pairs, strict=True)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(own_outputs, inputs, own_grads, allow_unused=True)
    return without_none(found, args)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Context manager in which operations are differentiable, also inside an operator, where torch switches it off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def without_none(found: Sequence[Tensor | None], args: Sequence[Any]) -> list[Tensor]:
    """Returns the gradients of the floating-point tensors among arguments, with zeros where there is none."""
    inputs = [value for value in args if has_gradient(value)]
    return [torch.zeros_like(value) if grad is None else grad for grad, value in zip(found, inputs, strict=True)]


def has_gradient(value: Any) -> bool:
    """Returns whether an argument can have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    """Returns the outputs of a function as a tuple, also where there is one."""
    return tuple(found) if isinstance(found, tuple | list) else (found,)
