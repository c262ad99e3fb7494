"""The cuts of a model into stages: balanced by cost, or at the places that the settings name.

`plan_split` takes a model and the setting `split_spec`, and returns a `SplitPlan`. Costs are counted on the meta device
instead of being measured, and are summed in the same order on every rank, so every rank finds the same cuts.

The cost of a module is the mean of its share of the computation (the floating-point operations of a small batch) and
its share of the parameters (which determines memory, optimizer time and gradient traffic). An embedding computes almost
nothing but has parameters, so it has a cost; a head has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from forgather.errors import TrainingError, nearest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.strategy.pipeline.blocks import BlockList, find_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """The costs of the parts of a model, as shares of the whole or in any other unit.

    Args:
        before: the cost of the modules before the blocks.
        blocks: the cost of each block.
        after: the cost of the modules after the blocks.
    """

    before: float
    blocks: tuple[float, ...]
    after: float

    def of_stages(self, cuts: Sequence[int]) -> list[float]:
        """Returns the cost of each stage.

        Args:
            cuts: for each stage except the last, the number of blocks up to its end.
        """
        edges = (0, *cuts, len(self.blocks))
        costs = [sum(self.blocks[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]
        costs[0] += self.before
        costs[-1] += self.after
        return costs


def unit_costs(model: nn.Module, blocks: BlockList, *, seconds: Sequence[float] | None = None) -> UnitCosts:
    """Returns the costs of the parts of a model.

    Args:
        model: the whole model.
        blocks: the list of blocks in the model.
        seconds: the measured times of the modules before the blocks, of each block, and of the modules after the
            blocks. They are used instead of counted operations. None to use counted operations.
    """
    sizes = [_parameters(model, blocks.before)]
    sizes += [_parameters(model, [name]) for name in blocks.names]
    sizes += [_parameters(model, blocks.after)]
    work = list(seconds if seconds is not None else blocks.flops or sizes)
    if not any(work):
        # A model whose operations are not counted, such as one of element-wise modules, is balanced by its parameters.
        work = list(sizes)
    shares = [(size / (sum(sizes) or 1) + cost / (sum(work) or 1)) / 2 for size, cost in zip(sizes, work, strict=True)]
    return UnitCosts(before=shares[0], blocks=tuple(shares[1:-1]), after=shares[-1])


def _parameters(model: nn.Module, names: Sequence[str]) -> int:
    """Returns the number of parameters in the named modules. A tied parameter is counted once for each of its names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    total = 0
    for name in names:
        held = modules[name].parameters() if name in modules else [model.get_parameter(name)]
        total += sum(parameter.numel() for parameter in held)
    return total


def balanced_cuts(costs: UnitCosts, num_stages: int) -> tuple[int, ...]:
    """Returns the cuts with the smallest maximal stage cost, and among those, the cuts with the most even stage costs.

    Each stage has at least one block if there are enough blocks. Otherwise the modules before the blocks, and then also
    the modules after the blocks, become a stage of their own.

    Args:
        costs: the costs of the parts of the model.
        num_stages: the number of stages.

    Example:
        >>> balanced_cuts(UnitCosts(before=1.0, blocks=(1.0,) * 6, after=1.0), 4)
        (1, 3, 5)
    """
    count = len(costs.blocks)
    alone_first = num_stages > count
    alone_last = num_stages > count + 1
    first, last = (0 if alone_first else 1), (count if alone_last else count - 1)
    # Many cuts have the same heaviest stage: the second search chooses the most even of them.
    heaviest = _best_cuts(costs, num_stages, first, last, None)
    return _best_cuts(costs, num_stages, first, last, heaviest[0])[1]


def _best_cuts(
    costs: UnitCosts, num_stages: int, first: int, last: int, limit: float | None
) -> tuple[float, tuple[int, ...]]:
    """Returns the best value and the cuts that have it.

    Without a limit, the value is the largest stage cost. With a limit, which no stage cost may exceed, the value is the
    sum of the squares of the stage costs.
    """
    count = len(costs.blocks)
    total = [0.0]
    for cost in costs.blocks:
        total.append(total[-1] + cost)

    def join(best: float, cost: float) -> float:
        if limit is None:
            return max(best, cost)
        # The tolerance is for rounding: the limit is a difference of sums, and the cuts that it comes from must pass.
        return best + cost * cost if cost <= limit * (1 + 1e-9) else float("inf")

    if num_stages == 1:
        return costs.of_stages(())[0], ()
    # best[place] is the best value of the stages so far, the last of which ends at `place`.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        place: (join(0.0, total[place] + costs.before), (place,)) for place in range(first, last + 1)
    }
    for _ in range(num_stages - 2):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(first, last + 1):
            options = [
                (join(value, total[stop] - total[start]), cuts) for start, (value, cuts) in best.items() if start < stop
            ]
            if options:
                value, cuts = min(options)
                following[stop] = (value, (*cuts, stop))
        best = following
    # The last stage may have no block if it has modules after the blocks.
    ends = [
        (join(value, total[count] - total[start] + costs.after), cuts)
        for start, (value, cuts) in best.items()
        if start < count or costs.after
    ]
    return min(ends)


_log = get_logger(__name__)

_WORDS_FOR_BLOCKS = ("layer", "layers", "block", "blocks", "h")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The cuts of a model.

    Args:
        blocks: the list of blocks, and the modules before and after the blocks.
        cuts: for each stage except the last, the number of blocks up to its end.
    """

    blocks: BlockList
    cuts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def span(self, index: int) -> range:
        """Returns the indices of the blocks in the stage with the given number."""
        edges = (0, *self.cuts, len(self.blocks))
        return range(edges[index], edges[index + 1])

    def held(self, index: int) -> tuple[str, ...]:
        """Returns the names of a stage's blocks, and of the stage's modules and parameters outside the blocks.

        Args:
            index: the number of the stage.
        """
        before = self.blocks.before if index == 0 else ()
        after = self.blocks.after if index == self.num_stages - 1 else ()
        return (*before, *(self.blocks.block_name(block) for block in self.span(index)), *after)

    def holds(self, index: int, fqn: str) -> bool:
        """Returns whether a stage has a parameter or buffer.

        Args:
            index: the number of the stage.
            fqn: the name of the parameter or buffer.
        """
        return any(fqn == name or fqn.startswith(name + ".") for name in self.held(index))

    def describe(self) -> list[str]:
        """Returns one line per stage, which names the stage's blocks and its other modules."""
        lines = []
        for index in range(self.num_stages):
            span = self.span(index)
            blocks = f"blocks {span.start} to {span.stop - 1}" if len(span) > 1 else f"block {span.start}"
            parts = [*(self.blocks.before if index == 0 else ()), *([blocks] if span else [])]
            parts += self.blocks.after if index == self.num_stages - 1 else ()
            lines.append(f"stage {index}: {', '.join(parts)}")
        return lines


def plan_split(
    model: nn.Module, split_spec: Mapping[str, Any] | str | int | None, num_stages: int | None = None
) -> SplitPlan:
    """Returns the cuts of a model.

    Args:
        model: the whole model, preferably on the meta device.
        split_spec: a mapping of names to "end" or "beginning"; or "auto" or None for balanced cuts; or a number of
            balanced stages. A name in the mapping is that of a block in the whole model, or of a module next to the
            list of blocks. A word for blocks with a number, such as `layer.4`, stands for the block with this number.
        num_stages: the number of stages that the ranks have. None if `split_spec` determines the number of stages.

    Raises:
        TrainingError: FG750 or FG754 if the model cannot be cut, FG751 if a name is unknown, FG752 if a number is out
            of range, FG753 if the ranks have another number of stages, FG755 if `split_spec` has no meaning.
    """
    blocks = find_blocks(model)
    try:
        if isinstance(split_spec, Mapping):
            cuts = _cuts_of(model, blocks, split_spec)
            _check_count(blocks, len(cuts) + 1, num_stages, f"split_spec has {plural(len(cuts), 'cut')}, which make")
            return SplitPlan(blocks=blocks, cuts=cuts)
        count = _count_of(split_spec, num_stages)
        _check_count(blocks, count, num_stages, "split_spec asks for")
    except TrainingError as error:
        raise error.about("split_spec" if split_spec is not None else "stages_per_rank") from None
    return SplitPlan(blocks=blocks, cuts=balanced_cuts(unit_costs(model, blocks), count))


def _count_of(split_spec: Any, num_stages: int | None) -> int:
    if isinstance(split_spec, int) and not isinstance(split_spec, bool):
        if split_spec < 1:
            raise _no_meaning(split_spec)
        return split_spec
    if split_spec is None or split_spec == "auto":
        if num_stages is None:
            raise TrainingError(
                "split_spec is 'auto', and the number of stages is not given",
                code="FG753",
                hint="give pipeline_parallel_size, or the number of stages as split_spec",
            )
        return num_stages
    raise _no_meaning(split_spec)


def _no_meaning(split_spec: Any) -> TrainingError:
    return TrainingError(
        f"split_spec is {split_spec!r}",
        code="FG755",
        hint='give a mapping of names to "end" or "beginning", "auto", or a number of stages',
    )


def _check_count(blocks: BlockList, count: int, num_stages: int | None, words: str) -> None:
    if num_stages is not None and count != num_stages:
        raise TrainingError(
            f"{words} {plural(count, 'stage')}, and the ranks hold {num_stages} "
            f"(pipeline_parallel_size x stages_per_rank)",
            code="FG753",
            hint=f"make {num_stages - 1} cuts, leave split_spec out, or change the sizes",
            expected=num_stages,
            found=count,
        )
    # The modules before the blocks, and those after them, can each be a stage without a block.
    most = len(blocks) + bool(blocks.before) + bool(blocks.after)
    if count > most:
        raise TrainingError(
            f"{count} stages are requested, and the model has {plural(len(blocks), 'block')} ({_shown(blocks)})",
            code="FG753",
            hint=f"request at most {plural(len(blocks), 'stage')}",
            expected=len(blocks),
            found=count,
        )


def _shown(blocks: BlockList) -> str:
    return f"{blocks.block_name(0)} to {blocks.block_name(len(blocks) - 1)}"


def _cuts_of(model: nn.Module, blocks: BlockList, split_spec: Mapping[str, Any]) -> tuple[int, ...]:
    if not split_spec:
        raise TrainingError(
            "split_spec names no cut",
            code="FG755",
            hint='name blocks, as in {"layer.4": "end"}, or write "auto"',
        )
    places: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, word in split_spec.items():
        side = _side(name, word)
        place = _cut_position(model, blocks, str(name), side, aliases)
        if place in places:
            raise TrainingError(
                f"split_spec has two cuts at the same place: {places[place]!r} and {str(name)!r}",
                code="FG755",
                hint="remove one of them",
            )
        places[place] = str(name)
    if aliases:
        _log.warning(
            "split_spec: %s of the model's one list of blocks (%s)",
            ", ".join(f"{name!r} is block {own.rpartition('.')[2]}" for name, own in aliases.items()),
            f"{_shown(blocks)}",
        )
    return tuple(sorted(places))


def _side(name: Any, word: Any) -> str:
    # torch's `SplitPoint` is accepted too, by the name of its member.
    text = str(getattr(word, "name", word)).lower()
    if text not in ("end", "beginning"):
        raise TrainingError(
            f"split_spec gives {str(name)!r} the value {word!r}",
            code="FG755",
            hint='write "end" (cut after it) or "beginning" (cut before it)',
        )
    return text


def _cut_position(model: nn.Module, blocks: BlockList, name: str, side: str, aliases: dict[str, str]) -> int:
    """Returns the number of blocks before the cut at the named module.

    Args:
        model: the whole model.
        blocks: the list of blocks in the model.
        name: the name in `split_spec`.
        side: "end" to cut after the named module, or "beginning" to cut before it.
        aliases: a mapping, which is extended in place, of other names in `split_spec` to the blocks that they stand
            for.
    """
    index = _index_of(model, blocks, name, aliases)
    if index is None:
        return _cut_next_to_list(blocks, name, side)
    place = index + 1 if side == "end" else index
    nothing_before, nothing_after = place == 0 and not blocks.before, place == len(blocks) and not blocks.after
    if nothing_before or nothing_after:
        where = "before" if nothing_before else "after"
        raise TrainingError(
            f"split_spec cuts at the {side} of {name!r}, and the model has nothing {where} it",
            code="FG752",
            hint=f"cut between {blocks.block_name(0)!r} and {blocks.block_name(len(blocks) - 1)!r}",
        )
    return place


def _cut_next_to_list(blocks: BlockList, name: str, side: str) -> int:
    if blocks.before and (name, side) == (blocks.before[-1], "end"):
        return 0
    if blocks.after and (name, side) == (blocks.after[0], "beginning"):
        return len(blocks)
    where = "before the first block" if name in blocks.before else "after the last block"
    raise TrainingError(
        f"split_spec cuts at the {side} of {name!r}, which is {where}; a cut is between two blocks",
        code="FG751",
        hint=f"cut at one of {_shown(blocks)}",
    )


def _index_of(model: nn.Module, blocks: BlockList, name: str, aliases: dict[str, str]) -> int | None:
    """Returns the index of the block that a name in `split_spec` means, or None for a module outside the blocks."""
    names = blocks.names
    if name in names:
        return names.index(name)
    if name in (*blocks.before, *blocks.after):
        return None
    if name in dict(model.named_modules()):
        around = next((block for block in names if name.startswith(block + ".")), None)
        raise TrainingError(
            f"split_spec names {name!r}, which is not a block; a cut is between two blocks ({_shown(blocks)})",
            code="FG751",
            hint=f"name the block around it: {around!r}" if around else f"name one of {_shown(blocks)}",
        )
    word, _, number = name.rpartition(".")
    known = (*_WORDS_FOR_BLOCKS, blocks.name.rpartition(".")[2])
    # The length is limited since Python refuses to convert thousands of digits.
    if number.isascii() and number.isdigit() and len(number) < 19 and word.rpartition(".")[2] in known:
        if int(number) >= len(names):
            raise TrainingError(
                f"split_spec names {name!r}, and the model has blocks 0 to {len(names) - 1} ({_shown(blocks)})",
                code="FG752",
                hint=f"name a block from 0 to {len(names) - 1}",
                expected=len(names) - 1,
                found=int(number),
            )
        aliases[name] = names[int(number)]
        return int(number)
    candidates: Sequence[str] = (*names, *blocks.before, *blocks.after)
    raise TrainingError(
        f"split_spec names {name!r}, which {type(model).__name__} does not have (its blocks are {_shown(blocks)})",
        code="FG751",
        hint=nearest(name, candidates) or f"name one of {_shown(blocks)}",
    )
