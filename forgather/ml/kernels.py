"""The registry of custom kernels: operations of a model that have a fast implementation and a plain one.

A kernel is registered under a name, with a reference: a function of torch operations that computes the same. It becomes
an operator of torch (`torch.ops.forgather.<name>`), so it works under `torch.compile`, in plans and with automatic
differentiation. Before the first use for a device, for dtypes and for shapes, its results and gradients are compared
with those of the reference, on the tensors of that call (`kernel_comparison.py`). A kernel that fails or differs is
replaced by its reference, and a warning says so. On another device than the kernel's, the reference is used without a
comparison.

Example:
    >>> def scaled_reference(x: Tensor, factor: float) -> Tensor:
    ...     return x * factor
    >>> @register_custom_kernel("scaled", reference=scaled_reference, device_types=("cpu",))
    ... def scaled(x, factor):
    ...     return torch.mul(x, factor)
    >>> scaled(torch.ones(2), 3.0)
    tensor([3., 3.])
"""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError, nearest
from forgather.ml.kernel_comparison import Backward, compare, gradients_of, has_gradient, without_none
from forgather.ml.log import get_logger
from forgather.value_text import shown

_log = get_logger(__name__)

_NAMESPACE = "forgather"
_TYPES = ("Tensor", "int", "SymInt", "float", "bool", "str", "ScalarType")
"""The types of arguments, as torch writes them, that a kernel may have."""
_GRADIENT = "{}_backward"
_MOST_SHAPES = 16
"""The number of shapes for which a kernel is compared, for each device and dtypes: rows may have any length."""
_kernels: dict[str, CustomKernel] = {}


class CustomKernel:
    """An operation with a fast implementation, and a reference that computes the same.

    It is called as the reference is.

    Args:
        name: the name in the registry, which is also that of the operator.
        kernel: the fast implementation, with the arguments of the reference. It must not change its arguments.
        reference: the function of torch operations.
        device_types: the types of the devices on which the kernel runs.
        tolerance: the relative and the absolute tolerance of the comparison; None for those of
            `torch.testing.assert_close`.

    Raises:
        TrainingError: FG788 if torch cannot make an operator of the reference.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        device_types: Sequence[str],
        tolerance: tuple[float, float] | None,
    ) -> None:
        self.name = name
        self.kernel = kernel
        self.reference = reference
        self.device_types = tuple(device_types)
        self.verdicts: dict[tuple[str, ...], str | None] = {}
        """For each device type with dtypes: None if the kernel is right there, else why its reference is used."""
        self._compared: dict[tuple[str, ...], set[tuple[torch.Size, ...]]] = {}
        self._tolerance = tolerance
        self._backward: Backward | None = None
        self._operator, self._gradient = _operators(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the reference returns, computed by the kernel where it is right."""
        # An operator of torch takes keywords too, but saves its inputs by position.
        bound = inspect.signature(self.reference).bind(*args, **kwargs)
        bound.apply_defaults()
        return self._operator(*bound.args)

    def backward(self, function: Backward) -> Backward:
        """Decorator for the kernel of the backward pass; without one, the reference is differentiated.

        Args:
            function: a function of the gradients of the outputs (a list) and of the inputs. It returns the gradient of
                each floating-point tensor among the inputs, in their order.

        Raises:
            TrainingError: FG788 if it cannot be called.
        """
        if not callable(function):
            raise _refusal(
                f"the backward pass of custom kernel {self.name!r} is {shown(function)}",
                "give a function of its gradients",
            )
        self._backward = function
        self.verdicts.clear()
        self._compared.clear()
        return function

    def forward_on(self, args: Sequence[Any]) -> Any:
        """Returns the outputs for real tensors, by the kernel or by its reference."""
        return self.kernel(*args) if self._is_right(args) else self.reference(*args)

    def gradients_on(self, grads: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
        """Returns the gradients of the floating-point tensors among the inputs, by the kernel or by the reference."""
        if self._backward is None or not self._is_right(args):
            return gradients_of(self.reference, grads, args)
        return without_none(self._backward(grads, *args), args)

    def _is_right(self, args: Sequence[Any]) -> bool:
        tensors = [value for value in args if isinstance(value, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if not devices <= set(self.device_types):
            return False
        place = (*sorted(devices), *(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
        if self.verdicts.get(place) is not None:
            return False
        shapes = tuple(tensor.shape for tensor in tensors)
        compared = self._compared.setdefault(place, set())
        if shapes in compared or len(compared) == _MOST_SHAPES:
            return True
        found = compare(self.kernel, self._backward, self.reference, self._tolerance, args)
        if found.problem is not None:
            self.verdicts[place] = found.problem
            _log.warning("custom kernel %r %s on %s: its reference is used", self.name, found.problem, ", ".join(place))
        elif found.is_telling:
            self.verdicts[place] = None
            compared.add(shapes)
        return found.problem is None and found.is_telling


def register_custom_kernel(
    name: str,
    *,
    reference: Callable[..., Any] | None = None,
    device_types: Sequence[str] = ("cuda",),
    tolerance: tuple[float, float] | None = None,
) -> Callable[[Callable[..., Any]], CustomKernel]:
    """Decorator that registers a function as a custom kernel; see `CustomKernel` for the arguments.

    The reference has type annotations: `Tensor`, `int`, `float`, `bool`, `str` and `torch.dtype` for its arguments, and
    one `Tensor` or a tuple of them for its result.

    Raises:
        TrainingError: FG788 if the name is no identifier or belongs to another function, if there is no reference, or
            if torch cannot make an operator of it; if the devices or the tolerance are none, or nothing can be called.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise _refusal(f"{shown(name)} is no name of a custom kernel", "give a name of letters, digits and _")
    if name.startswith("__"):
        raise _refusal(f"{name!r} is a name of Python's own, and no custom kernel can have it", "give another name")
    # torch's operator for the gradients of a kernel has the name of the kernel and this ending.
    if other := next((one for one in _kernels if _GRADIENT.format(one) == name or _GRADIENT.format(name) == one), None):
        raise _refusal(
            f"the names of the custom kernels {name!r} and {other!r} differ by '_backward', which is the name of a "
            "kernel's own gradients",
            "choose another name",
        )
    _check_places(name, device_types, tolerance)
    if not callable(reference):
        raise _refusal(
            f"custom kernel {shown(name)} has no reference, so nothing could tell whether its numbers are right",
            f"@register_custom_kernel({shown(name)}, reference=f), where f computes the same with torch operations",
        )

    def register(kernel: Callable[..., Any]) -> CustomKernel:
        if not callable(kernel):
            raise _refusal(f"custom kernel {name!r} is {shown(kernel)}, which cannot be called", "decorate a function")
        other = _kernels.get(name)
        if other is not None and _origin(other.kernel) != _origin(kernel):
            raise _refusal(
                f"custom kernel {name!r} is registered already, by {'.'.join(_origin(other.kernel))}",
                "choose another name",
            )
        _kernels[name] = CustomKernel(name, kernel, reference, device_types, tolerance)
        return _kernels[name]

    return register


def custom_kernel(name: str) -> CustomKernel:
    """Returns a registered kernel by its name, for a config that gives it to a model.

    Args:
        name: the name under which the kernel was registered.

    Raises:
        TrainingError: FG789 if no kernel has this name.
    """
    if not isinstance(name, str) or name not in _kernels:
        raise TrainingError(
            f"no custom kernel {shown(name)} is registered",
            code="FG789",
            hint=nearest(shown(name), list(_kernels))
            if _kernels
            else "import the module with @register_custom_kernel first",
        )
    return _kernels[name]


def _operators(kernel: CustomKernel) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the operators of torch for a kernel and for its gradients."""
    try:
        schema = torch.library.infer_schema(kernel.reference, mutates_args=())
    except (ValueError, NameError, AttributeError, TypeError) as error:
        raise _refusal(
            f"torch makes no operator of the reference of custom kernel {kernel.name!r}: {str(error).splitlines()[0]}",
            "annotate each argument and the result of the reference, as in x: Tensor, eps: float) -> Tensor",
        ) from None
    # torch leaves out arguments that have their default, and a kernel has no defaults.
    schema = re.sub(r"=[^,)]+", "", schema)
    arguments = schema[1:].rsplit(") -> ", 1)[0]
    for argument in filter(None, arguments.split(", ")):
        if argument.split(" ")[0] not in _TYPES:
            raise _refusal(
                f"the reference of custom kernel {kernel.name!r} has the argument {argument!r}",
                "use Tensor, int, float, bool, str and torch.dtype, without None",
            )

    if schema.endswith("()"):
        raise _refusal(
            f"the reference of custom kernel {kernel.name!r} returns nothing", "return one Tensor or a tuple"
        )

    def forward(*args: Any) -> Any:
        return _own_storage(kernel.forward_on(args), args)

    def gradient(grad_outputs: list[Tensor], *args: Any) -> list[Tensor]:
        return [_own_storage(each, (*grad_outputs, *args)) for each in kernel.gradients_on(grad_outputs, args)]

    def fake_gradient(grad_outputs: list[Tensor], *args: Any) -> list[Tensor]:
        return [torch.empty_like(value) for value in args if has_gradient(value)]

    operator = torch.library.custom_op(f"{_NAMESPACE}::{kernel.name}", forward, mutates_args=(), schema=schema)
    operator.register_fake(lambda *args: _own_storage(kernel.reference(*args), args))
    backward = torch.library.custom_op(
        f"{_NAMESPACE}::{_GRADIENT.format(kernel.name)}",
        gradient,
        mutates_args=(),
        schema=f"({', '.join(['Tensor[] grad_outputs', *filter(None, [arguments])])}) -> Tensor[]",
    )
    backward.register_fake(fake_gradient)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        args = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        found = iter(backward(list(grads), *args))
        return tuple(next(found) if has_gradient(value) else None for value in args)

    operator.register_autograd(differentiate, setup_context=save)
    return operator, backward


def _own_storage(found: Any, args: Sequence[Any]) -> Any:
    """Returns outputs that share no memory with the inputs or one another, which torch requires of an operator."""
    storages = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}

    def own(each: Any) -> Tensor:
        # After the comparison a kernel can still take another way, as for another shape.
        if not isinstance(each, Tensor):
            raise _refusal(f"a custom kernel gave {shown(each)} in place of a tensor", "return what the reference does")
        result = each.clone() if each.untyped_storage()._cdata in storages else each
        storages.add(result.untyped_storage()._cdata)
        return result

    return tuple(map(own, found)) if isinstance(found, tuple | list) else own(found)


def _check_places(name: str, device_types: Any, tolerance: Any) -> None:
    """Raises an error if the devices or the tolerance of a kernel are none."""
    is_list = isinstance(device_types, Sequence | set | frozenset) and not isinstance(device_types, str)
    if not is_list or not device_types or not all(isinstance(one, str) and _is_device(one) for one in device_types):
        raise _refusal(
            f"custom kernel {name!r} has device_types={shown(device_types)}", 'list types of devices, as in ("cuda",)'
        )
    if tolerance is None:
        return
    is_pair = isinstance(tolerance, tuple | list) and len(tolerance) == 2
    numbers = list(tolerance) if is_pair else []
    if not is_pair or any(type(one) not in (int, float) or not math.isfinite(one) or one < 0 for one in numbers):
        raise _refusal(
            f"custom kernel {name!r} has tolerance={shown(tolerance)}",
            "give a relative and an absolute tolerance, as in (1e-3, 1e-5)",
        )


def _is_device(text: str) -> bool:
    try:
        return torch.device(text).type == text
    except RuntimeError:
        return False


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    # Code that `exec` runs may have no module.
    return str(function.__module__), getattr(function, "__qualname__", type(function).__name__)


def _refusal(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG788", hint=hint).about("register_custom_kernel")
