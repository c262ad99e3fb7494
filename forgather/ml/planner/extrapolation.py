"""The trace of a deep model, computed from the traces of two shallow ones.

The blocks of a model are alike, so that every sum of bytes is affine in their number: within the first two blocks, the
last two, and what runs before, between and after them. `shorten` makes a model shallow, `extrapolated` draws the line
through two depths. Models whose blocks differ are traced as they are.

Source:
    Each region and each category has a line of its own, and the maximum is taken afterwards: at another depth the peak
    may be in another region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from forgather.ml.activation_checkpointing import CONTAINERS
from forgather.ml.planner.allocations import Region
from forgather.ml.planner.peaks import Peak

SHALLOW, DEEPER = 3, 5
"""The two depths that are traced: the least at which the first two and the last two blocks are known."""

_ENDS = 2
_SIZES = ("flops", "num_bytes")


def block_list(model: nn.Module) -> nn.ModuleList | None:
    """Returns the only list of blocks of a model that can be shortened, or None.

    Args:
        model: the model. If it has several lists, as an encoder and a decoder, or if its blocks differ, there is none.
    """
    found = [one for one in _containers(model) if next(one.parameters(), None) is not None]
    if len(found) != 1 or not isinstance(found[0], nn.ModuleList):
        return None
    blocks = found[0]
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or ()
    if len(blocks) <= DEEPER or len(set(kinds)) > 1 or len({_form(block) for block in blocks}) > 1:
        return None
    return blocks


def _containers(model: nn.Module) -> list[nn.Module]:
    return [
        found
        for child in model.children()
        for found in ([child] if isinstance(child, CONTAINERS) else _containers(child))
    ]


def _form(block: nn.Module) -> Any:
    weights = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in block.named_parameters())
    return type(block), weights


def shorten(model: nn.Module, depth: int) -> None:
    """Removes all blocks of a model but the first ones. `block_list` must have found them.

    Args:
        model: the model, which is changed in place.
        depth: the number of blocks that stay.
    """
    blocks = block_list(model)
    assert blocks is not None, "the caller asked for them"  # noqa: S101
    del blocks[depth:]


def extrapolated(shallow: Mapping[Region, Peak], deeper: Mapping[Region, Peak], num_blocks: int) -> dict[Region, Peak]:
    """Returns the peaks of a model with `num_blocks` blocks.

    Args:
        shallow: the peaks at the depth `SHALLOW`.
        deeper: the peaks at the depth `DEEPER`.
        num_blocks: the number of blocks of the model.
    """
    places = {-1: (-1, -1, -1), num_blocks: (SHALLOW, DEEPER, num_blocks)}
    for index in range(_ENDS):
        places[index] = (index, index, index)
        places[num_blocks - 1 - index] = (SHALLOW - 1 - index, DEEPER - 1 - index, num_blocks - 1 - index)
    found: dict[Region, Peak] = {}
    for low_block, high_block, block in places.values():
        for phase in {region.phase for region in deeper}:
            low, high = shallow.get(Region(phase, low_block)), deeper.get(Region(phase, high_block))
            if low is not None and high is not None:
                found[Region(phase, block)] = _line(low, high, num_blocks)
    return found


def extrapolated_counts(shallow: Mapping[Any, Any], deeper: Mapping[Any, Any], num_blocks: int) -> dict[Any, Any]:
    """Returns how often each kind of work is done in a model with `num_blocks` blocks.

    Args:
        shallow: the counts at the depth `SHALLOW`.
        deeper: the counts at the depth `DEEPER`.
        num_blocks: the number of blocks of the model.
    """
    keys = {*shallow, *deeper}
    return {key: line(shallow.get(key, 0), deeper.get(key, 0), num_blocks) for key in keys}


def extrapolated_work(shallow: Mapping[Any, Any], deeper: Mapping[Any, Any], num_blocks: int) -> dict[Any, Any]:
    """Returns how often each operation or message occurs in a model with `num_blocks` blocks.

    What occurs once for each block occurs more often in a deeper model; what takes all weights at once, as a fused
    optimizer does, gets larger.

    Args:
        shallow: the counts of `Operation`s or `Message`s at the depth `SHALLOW`.
        deeper: the counts at the depth `DEEPER`.
        num_blocks: the number of blocks of the model.
    """
    found = {key: line(shallow[key], deeper[key], num_blocks) for key in shallow if key in deeper}
    low, high = _by_name(shallow, deeper), _by_name(deeper, shallow)
    for name in {*low, *high}:
        small, large = low.get(name, []), high.get(name, [])
        if [shallow[key] for key in small] == [deeper[key] for key in large]:
            pairs = [(one, other, shallow[one]) for one, other in zip(small, large, strict=True)]
        else:
            # Rarely, the operators differ between the depths. Their sum is on a line, too.
            pairs = [(_sum(small, shallow, large), _sum(large, deeper, small), 1)]
        for one, other, count in pairs:
            sizes = [size for size in _SIZES if size in other._fields]
            key = other._replace(**{size: line(getattr(one, size), getattr(other, size), num_blocks) for size in sizes})
            found[key] = found.get(key, 0) + count
    return found


def _by_name(work: Mapping[Any, float], others: Mapping[Any, float]) -> dict[Any, list[Any]]:
    """Returns the operations or messages that the other depth does not have, smallest first, by all but their sizes."""
    found: dict[Any, list[Any]] = {}
    for key in sorted(work, key=lambda key: key.num_bytes):
        if key not in others:
            name = tuple(getattr(key, field) for field in key._fields if field not in _SIZES)
            found.setdefault(name, []).append(key)
    return found


def _sum(keys: Sequence[Any], counts: Mapping[Any, float], others: Sequence[Any]) -> Any:
    form = (keys or others)[0]
    sizes = {size: sum(getattr(key, size) * counts[key] for key in keys) for size in _SIZES if size in form._fields}
    return form._replace(**sizes)


def line(low: Any, high: Any, num_blocks: int) -> Any:
    """Returns the value at a depth, on the line through the values at the two depths that are traced.

    Args:
        low: the value at the depth `SHALLOW`.
        high: the value at the depth `DEEPER`.
        num_blocks: the depth.
    """
    rise = (high - low) * (num_blocks - SHALLOW)
    # The mean of a step whose accumulation changes is no whole number.
    return low + (rise // (DEEPER - SHALLOW) if isinstance(rise, int) else rise / (DEEPER - SHALLOW))


def _line(low: Peak, high: Peak, num_blocks: int) -> Peak:
    parts = extrapolated_counts(low.categories, high.categories, num_blocks)
    num_bytes = line(low.num_bytes, high.num_bytes, num_blocks)
    if min(parts.values(), default=0) < 0:
        # The peaks of the two depths come from different operators: those of the deeper one are compared instead.
        alike = next((one for one in low.course if str(one.maker) == high.made_by), None)
        if alike is not None:
            parts = extrapolated_counts(alike.categories, high.categories, num_blocks)
            num_bytes = line(alike.num_bytes, high.num_bytes, num_blocks)
    return Peak(num_bytes, _none_below_zero(parts), made_by=high.made_by)


def _none_below_zero(parts: Mapping[str, int]) -> dict[str, int]:
    """Returns the same sum without negative parts, which are taken from the largest ones."""
    missing = sum(size for size in parts.values() if size < 0)
    found = {name: max(0, size) for name, size in parts.items()}
    for name in sorted(found, key=found.__getitem__, reverse=True):
        taken = max(missing, -found[name])
        found[name] += taken
        missing -= taken
    return found
