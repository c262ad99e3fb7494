"""The repeated list of blocks in a model, and the modules that are used before and after the blocks.

`find_blocks` takes a model, preferably on the meta device, and returns a `BlockList`. The model is not changed. If
possible, a forward pass on the meta device shows where modules are used; otherwise the order in which they were
registered determines it. A model that cannot be cut is refused with an error that names its class.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from forgather.errors import TrainingError
from forgather.ml.strategy.pipeline.trace import Crossing, Observed, observe


class Entry(StrEnum):
    """How hidden states enter the model's forward in a stage that is not the first."""

    EMBEDS = "inputs_embeds"  # a keyword of the model's forward, as in transformers
    IDS = "ids"  # the forward takes only token ids: zeros of the right shape are passed
    VALUES = "values"  # the forward takes floating-point inputs: NaN of the shape of the hidden states is passed
    CHAIN = "chain"  # an nn.Sequential, whose children are the blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """The places where a model can be cut.

    Args:
        name: the name of the module that contains the blocks. "" if the model itself is an `nn.Sequential` of blocks.
        keys: the names of the blocks in that module, in order.
        before: the names of the modules and parameters that are used before the first block, in order.
        after: the names of the modules and parameters that are used after the last block, in order.
        entry: how hidden states enter the model's forward in a stage that is not the first.
        num_outputs: the length of the tuple that a block returns. None if a block returns a tensor.
        flops: the floating-point operations for one small batch: of the modules before the blocks, of each block, and
            of the modules after the blocks. None if they were not measured.
    """

    name: str
    keys: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    entry: Entry
    num_outputs: int | None = None
    flops: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def block_name(self, index: int) -> str:
        """Returns the name, in the whole model, of the block with the given index."""
        return f"{self.name}.{self.keys[index]}" if self.name else self.keys[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks in the whole model."""
        return tuple(self.block_name(index) for index in range(len(self)))


def find_blocks(model: nn.Module) -> BlockList:
    """Returns the repeated list of blocks in a model.

    Args:
        model: the whole model, preferably on the meta device.

    Raises:
        TrainingError: FG750 if the model has no such list or several; FG754 if the blocks pass on more than hidden
            states, if a module outside the blocks is used inside them, or if it is unknown where a parameter outside
            the blocks is used.
    """
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise TrainingError(
            f"{kind} adds a loss of its routers (output_router_logits), and pipeline stages pass on hidden states only",
            code="FG754",
            hint="set output_router_logits: false in the model's configuration, or train without a pipeline",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TrainingError(
            f"{kind} has an encoder and a decoder, and a pipeline needs one list of blocks",
            code="FG750",
            hint="train it data-parallel (trainers/accel_trainer.yaml)",
        )
    # A Sequential of embedding, list of blocks and head is cut along its inner list.
    if isinstance(model, nn.Sequential) and (_is_repeated(model) or not list(_repeated_lists(model))):
        if len(model) < 2:
            raise _no_list(kind)
        return BlockList(name="", keys=tuple(model._modules), before=(), after=(), entry=Entry.CHAIN)
    name = _list_name(model, kind)
    container = model.get_submodule(name)
    keys = tuple(container._modules)
    units = tuple(_unit_names(model, name))
    entry = _entry(model, units)
    # The order of registration is a guess: a model may use its modules in another order.
    seen = observe(model, name, keys, units)
    if seen is None:
        before, after = _by_registration(model, name, units)
        return BlockList(name=name, keys=keys, before=before, after=after, entry=entry)
    _refuse_crossings(kind, name, keys, seen)
    before, after = _by_use(model, name, units, seen)
    return BlockList(
        name=name,
        keys=keys,
        before=before,
        after=after,
        entry=entry,
        num_outputs=seen.num_outputs,
        flops=seen.flops,
    )


def _is_repeated(module: nn.Module) -> bool:
    """Returns whether a module is a list in which at least two children with parameters have the same class."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    # Only children with parameters count: a list of activations is not a list of blocks.
    kinds = Counter(type(child) for child in module.children() if next(child.parameters(), None) is not None)
    return bool(kinds) and max(kinds.values()) > 1


def _repeated_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields the name and the length of each outermost repeated list in a module."""
    for name, child in module.named_children():
        if _is_repeated(child):
            yield prefix + name, len(list(child.children()))
        else:
            yield from _repeated_lists(child, f"{prefix}{name}.")


def _no_list(kind: str) -> TrainingError:
    return TrainingError(
        f"{kind} has no list of two or more blocks of one class, so it cannot be cut into stages",
        code="FG750",
        hint="keep the blocks in an nn.ModuleList or nn.Sequential, or train without a pipeline",
    )


def _list_name(model: nn.Module, kind: str) -> str:
    found = sorted(_repeated_lists(model), key=lambda item: -item[1])
    if not found:
        raise _no_list(kind)
    # A second list of at most half the length does not make the choice ambiguous.
    if len(found) > 1 and found[1][1] * 2 > found[0][1]:
        shown = ", ".join(f"{name!r} ({length})" for name, length in found[:4])
        raise TrainingError(
            f"{kind} has {len(found)} lists of blocks, and a pipeline can cut only one: {shown}",
            code="FG750",
            hint="train it without a pipeline",
        )
    return found[0][0]


def _ancestors(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (prefix, module, child name) for each module on the path from the model to the container of the blocks.

    The prefix is the start of the names inside the module, and the child name is that of the next module on the path.
    """
    prefix, module = "", model
    for part in name.split("."):
        yield prefix, module, part
        prefix, module = f"{prefix}{part}.", module.get_submodule(part)


def _unit_names(model: nn.Module, name: str) -> Iterator[str]:
    """Yields the names of the modules and parameters outside the blocks that only the stages that use them must have.

    Modules without parameters, such as rotary embeddings, are not yielded, except for dropout modules. They need little
    memory and may be used by every block, so every stage has them.
    """
    for prefix, module, way in _ancestors(model, name):
        yield from (prefix + own for own, value in module._parameters.items() if value is not None)
        for child_name, child in module.named_children():
            if child_name != way and (next(child.parameters(), None) is not None or _is_dropout(child)):
                yield prefix + child_name


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _entry(model: nn.Module, units: Sequence[str]) -> Entry:
    if "inputs_embeds" in inspect.signature(model.forward).parameters:
        return Entry.EMBEDS
    modules = dict(model.named_modules())
    below = (inner for unit in units if unit in modules for inner in modules[unit].modules())
    return Entry.IDS if any(isinstance(inner, nn.Embedding) for inner in below) else Entry.VALUES


def _registered_after(model: nn.Module, name: str, unit: str) -> bool:
    for prefix, module, way in _ancestors(model, name):
        own = unit.removeprefix(prefix)
        if unit.startswith(prefix) and own in module._modules:
            order = list(module._modules)
            return order.index(own) > order.index(way)
    return False


def _innermost_first(after: list[str]) -> tuple[str, ...]:
    """Sorts names by depth in the module tree, the deepest first: a norm is used before a head that is further out."""
    return tuple(sorted(after, key=lambda unit: -unit.count(".")))


def _by_registration(model: nn.Module, name: str, units: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the modules before and after the blocks, according to the order of registration."""
    modules = dict(model.named_modules())
    bare = [unit for unit in units if unit not in modules]
    if bare:
        raise TrainingError(
            f"{type(model).__name__} has a parameter {bare[0]!r} of its own, and no forward pass on the meta device "
            f"could show where it is used",
            code="FG754",
            hint="keep it in a module of its own, before or after the blocks, or train without a pipeline",
        )
    after = [unit for unit in units if _registered_after(model, name, unit)]
    return tuple(unit for unit in units if unit not in after), _innermost_first(after)


def _by_use(
    model: nn.Module, name: str, units: Sequence[str], seen: Observed
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the modules and parameters before and after the blocks, according to their use in the forward pass.

    For a module that was not used, the order of registration determines whether it is before or after the blocks.
    """
    last = seen.num_blocks
    before, after = [], []
    for unit in units:
        phases = seen.phases.get(unit, set())
        inside = sorted(phase for phase in phases if 0 <= phase < last)
        if inside:
            blocks = f"block {inside[0]}" if len(inside) == 1 else f"blocks {inside[0]} to {inside[-1]}"
            raise TrainingError(
                f"{type(model).__name__} uses {unit!r} in {blocks} of {name!r}, so no single stage can hold it",
                code="FG754",
                hint="train it without a pipeline",
            )
        unused_after = not phases and _registered_after(model, name, unit)
        if last in phases or unused_after:
            after.append(unit)
        if -1 in phases or not (phases or unused_after):
            before.append(unit)
    return tuple(before), _innermost_first(after)


def _refuse_crossings(kind: str, name: str, keys: Sequence[str], seen: Observed) -> None:
    if seen.crossing is None:
        return
    crossing: Crossing = seen.crossing

    def place(phase: int) -> str:
        if phase < 0:
            return f"before {name!r}"
        return f"in '{name}.{keys[phase]}'" if phase < len(keys) else f"after {name!r}"

    raise TrainingError(
        f"{kind} computes a tensor {place(crossing.made)} that is used {place(crossing.used)} "
        f"({crossing.by}) in addition to the hidden states, and pipeline stages pass on hidden states only",
        code="FG754",
        hint="train it without a pipeline",
    )
