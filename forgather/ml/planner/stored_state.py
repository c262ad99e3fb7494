"""The bytes of a run's weights and optimizer state, as its checkpoints store them.

Takes a strategy whose model and optimizer hold fake tensors; gives a `StoredState`, by the names of a checkpoint.
A sharded tensor counts with its whole size, because the shards of all ranks together make one. The `capture` of a
strategy cannot be used: it compares the addresses of tensors, and fake tensors have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from forgather.ml.adapter_base import stored_state
from forgather.ml.planner.extrapolation import line
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.strategy.pipeline.strategy import Pipeline
from forgather.ml.strategy.state import local_optimizer_state


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The sizes of the state of one rank, by name and in bytes, as if nothing were sharded.

    Args:
        model: the weights and persistent buffers.
        weights: those of them that a checkpoint stores; without the frozen ones if there is an adapter.
        optimizer: the optimizer state of each weight.
        is_known: False if the strategy stores its state in a way of its own.
    """

    model: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)
    is_known: bool = True

    def at_depth(self, deeper: StoredState, num_blocks: int) -> StoredState:
        """Returns the state of a model with more blocks, on the line through two depths, as entries without a name."""

        def drawn(shallow: Mapping[str, int], deep: Mapping[str, int]) -> dict[str, int]:
            return {"": line(sum(shallow.values()), sum(deep.values()), num_blocks)}

        return StoredState(
            model=drawn(self.model, deeper.model),
            weights=drawn(self.weights, deeper.weights),
            optimizer=drawn(self.optimizer, deeper.optimizer),
            is_known=self.is_known,
        )


def joined(states: Iterable[StoredState]) -> StoredState:
    """Returns the state of several ranks; a tied weight that two pipeline stages hold is stored once."""
    found = list(states)
    return StoredState(
        model={name: size for state in found for name, size in state.model.items()},
        weights={name: size for state in found for name, size in state.weights.items()},
        optimizer={name: size for state in found for name, size in state.optimizer.items()},
        is_known=all(state.is_known for state in found),
    )


def state_of(strategy: Any) -> StoredState:
    """Returns the sizes of the state of a strategy, after an optimizer step."""
    if not isinstance(strategy, ModelStrategy):
        named = strategy.model.state_dict(keep_vars=True)
        return StoredState(model=_sizes(named), is_known=False)
    modules: Any = strategy.model
    named = modules.state_dict(keep_vars=True)
    if isinstance(strategy, Pipeline):
        modules = strategy._local
        named = modules.named_state()
    optimizer = local_optimizer_state(modules, strategy.optimizer) or {"state": {}}
    return StoredState(
        model=_sizes(named),
        weights=_sizes(stored_state(strategy.model, named)),
        optimizer={name: _optimizer_bytes(state) for name, state in optimizer["state"].items()},
    )


def _sizes(named: Mapping[str, Any]) -> dict[str, int]:
    # Tied weights are one object under several names.
    first = {id(value): name for name, value in reversed(list(named.items()))}
    return {name: _bytes(named[name]) for name in first.values()}


def _optimizer_bytes(state: Any) -> int:
    # Counters of steps are scalars, which a checkpoint stores as text.
    return sum(_bytes(item) for item in tree_iter(state) if isinstance(item, Tensor) and item.dim())


def _bytes(value: Any) -> int:
    # The shape of a DTensor is that of the whole tensor.
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
