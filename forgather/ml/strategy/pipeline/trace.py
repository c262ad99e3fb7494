"""One observed forward pass on the meta device, which shows when modules are used and what they cost.

`observe` takes a model and its list of blocks. It returns an `Observed`, or None if the forward pass fails with every
made-up input that is tried. The forward pass runs on a copy of the model without memory, never reads values of tensors,
and gives the same result on every rank.

The forward pass is divided into phases, which are numbered. Phase -1 is before the first block. The phase with the
index of a block is from the start of the block to the start of the next block. The last phase, whose number is the
number of blocks, is after the last block. Code between two blocks belongs to the phase of the earlier block, as it does
in a stage.

Shapes:
    B rows, T positions, D features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from forgather.ml.log import get_logger
from forgather.ml.model_inputs import NoCache

_log = get_logger(__name__)

_ROWS, _TOKENS = 2, 8


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that depends on weights and reaches a later block in addition to the hidden states.

    Args:
        made: the number of the phase that computed the tensor.
        used: the number of the phase that used the tensor.
        by: the name of the operation that used the tensor.
    """

    made: int
    used: int
    by: str


@dataclass(slots=True)
class Observed:
    """What was observed in a forward pass: the use of modules and the number of operations in each phase.

    Args:
        num_blocks: the number of blocks.
        phases: for each module or parameter outside the blocks, the numbers of the phases in which it was used.
        num_outputs: the length of the tuple that a block returns. None if a block returns a tensor.
        flops: the number of floating-point operations in each phase, starting with phase -1.
        crossing: the first tensor that bypasses the hidden states. None if there is no such tensor.

    Units:
        flops: floating-point operations.
    """

    num_blocks: int
    phases: dict[str, set[int]] = field(default_factory=dict)
    num_outputs: int | None = None
    flops: tuple[int, ...] | None = None
    crossing: Crossing | None = None


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Returns the hidden states among the arguments of a block.

    The hidden states are the first positional tensor. If there is none, they are the keyword argument `hidden_states`,
    or the first tensor among the keyword arguments.

    Args:
        args: the positional arguments of the block.
        kwargs: the keyword arguments of the block.

    Shapes:
        Returns (B, T, D), or the shape of the first tensor.
    """
    for value in args:
        if isinstance(value, Tensor):
            return value
    return cast(Tensor, kwargs[_states_keyword(kwargs)])


def _states_keyword(kwargs: dict[str, Any]) -> str:
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    if not names:
        raise TypeError("a block was called without a tensor")
    return "hidden_states" if "hidden_states" in names else names[0]


def with_first_tensor(args: Sequence[Any], kwargs: dict[str, Any], new: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a block with its hidden states replaced.

    Args:
        args: the positional arguments of the block.
        kwargs: the keyword arguments of the block.
        new: the hidden states that replace those in the arguments.

    Shapes:
        new: (B, T, D), like the replaced tensor.
    """
    replaced, keywords = list(args), dict(kwargs)
    for position, value in enumerate(replaced):
        if isinstance(value, Tensor):
            replaced[position] = new
            return replaced, keywords
    keywords[_states_keyword(keywords)] = new
    return replaced, keywords


def observe(model: nn.Module, name: str, keys: Sequence[str], units: Sequence[str]) -> Observed | None:
    """Runs a forward pass on made-up inputs, and returns the modules and the number of operations of each phase.

    Returns None if the forward pass fails with every made-up input.

    Args:
        model: the whole model.
        name: the name of the module that contains the blocks.
        keys: the names of the blocks in that module.
        units: the names of the modules and parameters outside the blocks.
    """
    for inputs in _made_up_inputs(model, name, units):
        try:
            return _observe(model, name, keys, units, inputs)
        except Exception as error:  # noqa: BLE001 - border: the forward pass of the user's model
            _log.debug("a forward pass on the meta device failed: %r", error)
    return None


def _made_up_inputs(model: nn.Module, name: str, units: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    parameters = inspect.signature(model.forward).parameters
    first = getattr(type(model), "main_input_name", None) or next(iter(parameters), "input")
    modules = [inner for unit in (*units, name) for inner in _module_or_none(model, unit)]
    if any(isinstance(module, nn.Embedding) for module in modules):
        yield {first: torch.zeros(_ROWS, _TOKENS, dtype=torch.long, device="meta")}
        return
    widths = {module.in_features: module.weight.dtype for module in modules if isinstance(module, nn.Linear)}
    for width, dtype in widths.items():
        yield {first: torch.zeros(_ROWS, _TOKENS, width, dtype=dtype, device="meta")}
        yield {first: torch.zeros(_ROWS, width, dtype=dtype, device="meta")}


def _module_or_none(model: nn.Module, name: str) -> list[nn.Module]:
    found = dict(model.named_modules()).get(name)
    return [] if found is None else list(found.modules())


def _observe(
    model: nn.Module, name: str, keys: Sequence[str], units: Sequence[str], inputs: dict[str, Tensor]
) -> Observed:
    # A copy, since hooks and detached hidden states must not stay in the user's model.
    replica = on_meta_device(model)
    for parameter in replica.parameters():
        # Frozen parameters too: a tensor computed from them must not bypass the hidden states either.
        parameter.requires_grad_(parameter.is_floating_point())
    seen = Observed(num_blocks=len(keys))
    counter = FlopCounterMode(display=False)
    watch = _Watch(replica, units, seen, counter)
    for index, key in enumerate(keys):
        watch.mark_block(replica.get_submodule(f"{name}.{key}"), index, len(keys))
    no_cache = NoCache(model)
    # With gradients, since `requires_grad` marks the tensors that depend on weights.
    with torch.enable_grad(), counter, watch, no_cache.in_force():
        replica(**inputs, **no_cache.keywords)
    if len(watch.entered) != len(keys):
        raise RuntimeError("not every block was called once, in order")
    watch.count_flops()
    seen.flops = tuple(watch.flops)
    return seen


def on_meta_device(model: nn.Module) -> nn.Module:
    """Returns a copy of a model on the meta device. Tied parameters stay tied, unlike with `model.to("meta")`."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
    if (config := getattr(model, "config", None)) is not None:
        memo[id(config)] = config
    return copy.deepcopy(model, memo)


class NumbersUnread(TorchFunctionMode):
    """Context manager in which code that reads values runs on the meta device: every value is read as zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation. An operation that reads a value returns zero."""
        if func is Tensor.__bool__:
            return False
        if func is Tensor.item:
            return 0
        return func(*args, **(kwargs or {}))


class _Watch(NumbersUnread):
    """Records, during one forward pass, in which phases tensors are made and used."""

    def __init__(self, model: nn.Module, units: Sequence[str], seen: Observed, counter: FlopCounterMode) -> None:
        super().__init__()
        self.phase = -1
        self.seen = seen
        self.entered: list[int] = []
        self.flops = [0] * (seen.num_blocks + 2)
        self._counted = 0
        self._counter = counter
        self._made: dict[int, tuple[int, Tensor]] = {}  # the tensor is kept, so that its id is not reused
        self._holders: dict[int, list[str]] = {}
        modules = dict(model.named_modules())
        for unit in units:
            seen.phases[unit] = set()
            held = [model.get_parameter(unit)] if unit not in modules else list(modules[unit].parameters())
            for parameter in held:
                self._holders.setdefault(id(parameter), []).append(unit)
            if unit in modules:
                modules[unit].register_forward_pre_hook(self._called(unit))
        self._open: dict[str, int] = {}

    def _called(self, unit: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.seen.phases[unit].add(self.phase)
            self._open[unit] = self.phase

        return hook

    def count_flops(self) -> None:
        """Adds the operations since the last call to the current phase."""
        total = self._counter.get_total_flops()
        self.flops[self.phase + 1] += total - self._counted
        self._counted = total

    def mark_block(self, block: nn.Module, index: int, num_blocks: int) -> None:
        """Registers hooks on a block that record its start, and replaces its hidden states by a tensor without history.

        The new tensor belongs to the current phase. From then on, any other tensor of an earlier phase that is used
        bypasses the hidden states.

        Args:
            block: the block.
            index: the index of the block.
            num_blocks: the number of blocks.
        """

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            """Begins the phase of the block, with hidden states that have no history."""
            if self.entered != list(range(index)):
                # A model that skips or repeats blocks has no order in which it could be cut.
                raise RuntimeError("blocks are not called once, in order")
            self.entered.append(index)
            states = first_tensor(args, kwargs)
            # Before the phase changes: the operations so far belong to the earlier phase.
            self.count_flops()
            self.phase = index
            replaced, keywords = with_first_tensor(args, kwargs, self._without_history(states))
            return tuple(replaced), keywords

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            """Ends the phase of the last block, whose output has no history either."""
            self.seen.num_outputs = len(output) if isinstance(output, tuple) else None
            if index + 1 < num_blocks:
                return None
            self.count_flops()
            self.phase = num_blocks
            if isinstance(output, tuple):
                return (self._without_history(output[0]), *output[1:])
            return self._without_history(output)

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)

    def _without_history(self, states: Tensor) -> Tensor:
        new = states.detach().requires_grad_()
        self._made[id(new)] = (self.phase, new)
        return new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and records the tensors that the operation used and made."""
        output = super().__torch_function__(func, types, args, kwargs)
        made = [value for value in _flat(output) if isinstance(value, Tensor)]
        if made:
            self._note(func, [*_flat(args), *_flat(kwargs or {})], made)
        return output

    def _note(self, func: Any, used: list[Any], made: list[Tensor]) -> None:
        computes = any(tensor.requires_grad for tensor in made)
        for tensor in used:
            if not isinstance(tensor, Tensor):
                continue
            for unit in self._holders.get(id(tensor), ()):
                self._use(unit, id(tensor))
            # An unknown tensor is an input, a parameter or a constant, and not the result of an earlier phase.
            phase, _ = self._made.get(id(tensor), (self.phase, None))
            if computes and phase != self.phase and tensor.requires_grad and self.seen.crossing is None:
                self.seen.crossing = Crossing(phase, self.phase, getattr(func, "__name__", str(func)))
        for tensor in made:
            self._made[id(tensor)] = (self.phase, tensor)

    def _use(self, unit: str, parameter: int) -> None:
        # A tied parameter belongs to several units; the one whose module was called in this phase used it.
        called = [other for other in self._holders[parameter] if self._open.get(other) == self.phase]
        if not called:
            self.seen.phases[unit].add(self.phase)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value
