"""A head that computes the loss in place of logits, inside the forward pass of the model.

`DeferredHead` finds the head of a causal language model, and finds out once, with a few tokens of a real batch, what
the model does with the output of its head. Within `computing`, the head hands its input to a loss and returns zeros of
one column where logits would be. The loss is computed where the weight of the head is whole and unsharded, whatever
wrapper is around the model, and the output of the model stays connected with it in the autograd graph.

A head is deferred only if nobody else needs its logits: `reason` says what is in the way.

Shapes:
    B rows, T positions, D hidden size, V vocabulary, N flattened positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from forgather.ml.activation_offloading import saved_on_device
from forgather.ml.loss_terms import UNCHANGED, LogitMap
from forgather.ml.model_class import class_name
from forgather.ml.vocabulary_slice import VocabularySlice, like_output, local_head, why_not_sliced

HeadLoss = Callable[[Tensor, Tensor, Tensor | None, VocabularySlice | None], Tensor]
"""A function of flat hidden states, the weight and the bias of the head, and the slice of the vocabulary that they are.

It returns the sum of the losses."""
_LIBRARIES = ("torch.", "deepspeed.", "accelerate.", "transformers.", "peft.", "forgather.")
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_scale", "output_multiplier")
_UNKNOWN = "it changes the output of its head by more than a factor and a soft cap of its configuration"
_TOKENS = 16
"""The number of tokens of the real batch with which a model is tried."""


class Deferred:
    """The result of one deferred loss.

    The attribute `total` is the sum of the losses, or None if the head was not called.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def joined(self, output: Any) -> Tensor:
        """Returns the sum of the losses, so that its backward pass goes through the output of the model too.

        Hooks of wrappers on the model's output prepare the backward pass: they gather weights, for example.

        Args:
            output: the output of the model, with zeros in place of logits.

        Shapes:
            Returns a scalar.
        """
        zeros = _logits_of(output)
        assert self.total is not None and zeros is not None, "the head was called"  # noqa: S101
        joined: Tensor = self.total + 0.0 * zeros.sum()
        return joined


class DeferredHead:
    """The head of a model, or of the last stage of a pipeline, and whether its loss can be computed without logits.

    The attribute `reason` says why the head cannot be deferred; it is None if it can, and before `examine`.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.logit_map: LogitMap = UNCHANGED
        self.is_elsewhere = False
        """True on a rank whose stages of a pipeline do not include the head."""
        self._head: nn.Linear | None = None
        self._seen = _Seen()

    @property
    def is_ready(self) -> bool:
        """True if the head was examined and can be deferred."""
        return self._head is not None and self.reason is None

    def examine(self, model: nn.Module, tokens_T: Tensor, outputs: Callable[[Tensor], Any]) -> None:
        """Finds the head and what the model does with its output. Collective if the forward pass of the model is.

        Args:
            model: the model, or the module that holds the last stage of a pipeline.
            tokens_T: token ids of a real batch.
            outputs: a function that returns the output of the model for a row of token ids, without gradients, or None
                on a rank that does not have the head.

        Shapes:
            tokens_T: (T,).
        """
        row_1T = tokens_T[:_TOKENS].unsqueeze(0)
        head, self.reason = head_of(model)
        seen = self._seen = _Seen()
        # Both passes run on every rank, because other ranks may have found a head.
        with seen.watching(head, replace=False):
            real = outputs(row_1T)
        watched = head if self.reason is None else None
        with seen.watching(watched, replace=True):
            told = outputs(row_1T)
        self.is_elsewhere = real is None
        if self.reason is None:
            self.logit_map, self.reason = _map_of(model, seen, real, told)
        self._head = head if self.reason is None else None

    @property
    def is_sliced(self) -> bool:
        """True if each rank has a slice of the vocabulary."""
        return self._seen.is_sliced

    @contextlib.contextmanager
    def computing(self, loss: HeadLoss) -> Iterator[Deferred]:
        """Context manager in which the head computes a loss in place of logits.

        Args:
            loss: the loss. It gets hidden states of all positions, also of those without a target.

        Raises:
            RuntimeError: if the model calls its head more than once.
        """
        assert self._head is not None, "a head that can be deferred"  # noqa: S101
        found, head = Deferred(), self._head

        def forward(hidden_BTD: Tensor) -> Tensor:
            if found.total is not None:
                raise RuntimeError(f"{type(head).__name__}, the head of the model, was called twice in a forward pass")
            hidden, weight, bias, words = local_head(hidden_BTD, head.weight, head.bias)
            with saved_on_device():
                total = loss(hidden.reshape(-1, hidden.shape[-1]), weight, bias, words)
            shape = torch.Size((*hidden.shape[:-1], 1))
            found.total, zeros = _Joined.apply(total, shape, hidden.dtype)  # type: ignore[no-untyped-call]
            return like_output(hidden_BTD, zeros)

        with _forward_of(head, forward):
            yield found


class _Joined(torch.autograd.Function):
    """A sum of losses and the zeros in place of logits, whose backward passes are one.

    A wrapper that prepares the backward pass of the head by a hook on the zeros does so before the loss needs it.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the sum, and zeros of the given shape.

        Shapes:
            total: a scalar. Returns a scalar and the given shape.
        """
        ctx.set_materialize_grads(False)
        return total.clone(), total.new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, of_zeros: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Returns the gradient of the sum.

        Shapes:
            upstream: a scalar.
        """
        return upstream, None, None


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    # Of the instance, and only within a call: a copy or a pickle of the model has the forward of its class.
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _Seen:
    """What was seen of the head in two forward passes: its output, and the values that took the place of its output."""

    def __init__(self) -> None:
        self.calls = 0
        self.real: Tensor | None = None
        self.told: Tensor | None = None
        self.is_sliced = False
        self.special: str | None = None
        """Why the weight of the head cannot be used by itself; None if it can."""

    @contextlib.contextmanager
    def watching(self, head: nn.Linear | None, *, replace: bool) -> Iterator[None]:
        """Context manager that watches the head. With `replace`, it returns values that no head would return.

        The values reach from -100 to 100: caps that a new model never comes near to show, and factors too.
        """
        if head is None:
            yield
            return
        compute = head.forward

        def forward(hidden: Tensor) -> Tensor:
            self.calls += 1
            self.special = self.special or why_not_sliced(hidden, head)
            output = compute(hidden)
            if not replace:
                self.is_sliced = isinstance(output, DTensor)
                self.real = output.full_tensor() if isinstance(output, DTensor) else output
                return output
            values = torch.linspace(-100.0, 100.0, output.numel(), dtype=torch.float64, device=output.device)
            self.told = values.to(torch.promote_types(output.dtype, torch.float32)).reshape(output.shape)
            return like_output(output, self.told)

        with _forward_of(head, forward):
            yield


def head_of(model: nn.Module) -> tuple[nn.Linear | None, str | None]:
    """Returns the head of a model, and why its loss cannot be computed without logits, or None if it may be.

    Args:
        model: the model, a stage of it, or a module whose children are stages.
    """
    owner = next((part for part in _owners(model) if isinstance(_output_embeddings(part), nn.Module)), None)
    head = None if owner is None else _output_embeddings(owner)
    if owner is None or head is None:
        return None, f"{class_name(model)} names no head"
    # peft keeps the trained copy of a head beside the original one.
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and len(copies) == 1:
        head = next(iter(copies.values()))
    if type(head).forward is not nn.Linear.forward or not isinstance(head, nn.Linear):
        return None, f"its head is a {type(head).__name__}, not a plain nn.Linear"
    if "forward" in vars(head):
        return None, "another library has replaced the forward of its head"
    around = [part for part in model.modules() if any(inner is head for inner in part.modules())]
    if any(part._compiled_call_impl is not None or isinstance(part, OptimizedModule) for part in around):
        return None, "the model is compiled as a whole (torch_compile_regions: true compiles its blocks)"
    if any(hasattr(vars(part).get("forward"), "__wrapped__") for part in around):
        return None, "the forward of the model is wrapped as a whole, as recomputation does"
    return head, _read_by(around)


def _owners(model: nn.Module) -> Iterable[nn.Module]:
    yield model
    inner = getattr(model, "get_base_model", None)
    if callable(inner):
        yield inner()
    stages = getattr(model, "stages", None)
    if isinstance(stages, nn.ModuleDict):
        yield from reversed(list(stages.values()))


def _output_embeddings(part: nn.Module) -> Any:
    get = getattr(part, "get_output_embeddings", None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None
    # A stage has a stand-in without weights for a head that another stage has.
    return found if isinstance(found, nn.Module) and next(found.parameters(), None) is not None else None


def _read_by(modules: Iterable[nn.Module]) -> str | None:
    """Returns the reason that somebody's hook reads what the modules return, or None."""
    for module in modules:
        for hook in module._forward_hooks.values():
            place = str(getattr(hook, "__module__", "") or "") or str(type(hook).__module__)
            function = getattr(hook, "func", hook)
            place = str(getattr(function, "__module__", place))
            if not place.startswith(_LIBRARIES):
                return f"the forward hook {getattr(function, '__name__', hook)!r} of {class_name(module)} reads outputs"
    return None


def _map_of(model: nn.Module, seen: _Seen, real: Any, told: Any) -> tuple[LogitMap, str | None]:
    """Returns what the model does with the output of its head, and why that is not known, or None."""
    if seen.calls != 2 or seen.real is None or seen.told is None:
        return UNCHANGED, f"its head was called {seen.calls} times in two forward passes"
    if seen.special is not None:
        return UNCHANGED, seen.special
    logits, changed = _logits_of(real), _logits_of(told)
    if logits is None or changed is None or logits.shape != seen.real.shape:
        return UNCHANGED, "its logits have another shape than the output of its head"
    if _others_differ(real, told):
        return UNCHANGED, "it computes more than logits from the output of its head"
    if detect_fake_mode() is not None:
        return _map_without_values(model, seen, logits)
    for candidate in _candidates(model):
        if _agree(candidate, seen.told, changed) and _agree(candidate, seen.real, logits):
            return candidate, None
    return UNCHANGED, _UNKNOWN


def _map_without_values(model: nn.Module, seen: _Seen, logits: Tensor) -> tuple[LogitMap, str | None]:
    """Returns what the configuration says a model does with the output of its head, for a plan without values."""
    *_, said = _candidates(model)
    is_same = logits is seen.real or seen.is_sliced or (seen.real is not None and logits.dtype is not seen.real.dtype)
    if said == UNCHANGED and not is_same:
        return UNCHANGED, _UNKNOWN
    return (UNCHANGED if logits is seen.real else said), None


def _logits_of(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


def _others_differ(real: Any, told: Any) -> bool:
    """Returns whether a tensor of the output besides the logits depends on the output of the head."""
    if not isinstance(real, Mapping) or not isinstance(told, Mapping) or detect_fake_mode() is not None:
        return False
    for name, value in real.items():
        other = told.get(name)
        if name != "logits" and isinstance(value, Tensor) and isinstance(other, Tensor):
            if value.shape != other.shape or not torch.equal(value, other):
                return True
    return False


def _candidates(model: nn.Module) -> Iterator[LogitMap]:
    """Yields the maps that the numbers in the model's configuration allow, the simplest one first."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    numbers = (
        {
            name: float(value)
            for name, value in vars(config).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value
        }
        if config is not None
        else {}
    )
    given = [value for name, value in numbers.items() if name in _FACTORS or "logit" in name and "cap" not in name]
    factors = [1.0, *(factor for value in given for factor in (value, 1.0 / value))]
    caps = [None, *(value for name, value in numbers.items() if "cap" in name and "logit" in name)]
    for cap in caps:
        for factor in factors:
            yield LogitMap(factor, cap)


def _agree(candidate: LogitMap, output: Tensor, logits: Tensor) -> bool:
    expected = candidate(output)
    if candidate == UNCHANGED:
        return torch.equal(expected.to(logits.dtype), logits)
    # The model computes the same operations, perhaps in another order or as a product instead of a quotient.
    expected, logits = expected.double(), logits.double()
    precision = max(1e-6, 4 * torch.finfo(output.dtype).eps) if output.dtype is not torch.float64 else 1e-12
    return bool(((expected - logits).abs() <= precision * expected.abs().clamp(min=1.0)).all())
