"""The cuts of a model into stages: balanced by cost, or at the places that the settings name.

`plan_split` takes a model and the setting `split_spec`, and returns a `SplitPlan`. `get_split_spec` returns balanced
cuts as such a setting. Costs are counted on the meta device instead of being measured, and are summed in the same order
on every rank, so every rank finds the same cuts.

The cost of a module is the mean of its share of the computation (the floating-point operations of a small batch) and
its share of the parameters (which determines memory, optimizer time and gradient traffic). An embedding computes almost
nothing but has parameters, so it has a cost; a head has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from forgather.errors import TrainingError, nearest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.strategy.pipeline.blocks import BlockList, find_blocks
from forgather.pipeline_schedules import too_many_stages
from forgather.planner.hardware import Hardware, hardware
from forgather.planner.stage_cuts import StageMemory, UnitCosts, balanced_cuts


def unit_costs(model: nn.Module, blocks: BlockList, *, seconds: Sequence[float] | None = None) -> UnitCosts:
    """Returns the costs of the parts of a model.

    Args:
        model: the whole model.
        blocks: the list of blocks in the model.
        seconds: the measured times of the modules before the blocks, of each block, and of the modules after the
            blocks. They are used instead of counted operations. None to use counted operations.
    """
    sizes = [_size(model, blocks.before)]
    sizes += [_size(model, [name]) for name in blocks.names]
    sizes += [_size(model, blocks.after)]
    work = list(seconds if seconds is not None else blocks.flops or sizes)
    if not any(work):
        # A model whose operations are not counted, such as one of element-wise modules, is balanced by its parameters.
        work = list(sizes)
    shares = [(size / (sum(sizes) or 1) + cost / (sum(work) or 1)) / 2 for size, cost in zip(sizes, work, strict=True)]
    return UnitCosts(before=shares[0], blocks=tuple(shares[1:-1]), after=shares[-1])


def part_bytes(model: nn.Module, blocks: BlockList, *, trained_only: bool = False) -> UnitCosts:
    """Returns the bytes of the weights of the parts of a model.

    Args:
        model: the whole model.
        blocks: the list of blocks in the model.
        trained_only: whether frozen weights are left out.
    """

    def size(names: Sequence[str]) -> int:
        found = (one for one in _parameters(model, names) if one.requires_grad or not trained_only)
        return sum(one.numel() * one.element_size() for one in found)

    return UnitCosts(
        before=size(blocks.before), blocks=tuple(size([name]) for name in blocks.names), after=size(blocks.after)
    )


def _size(model: nn.Module, names: Sequence[str]) -> int:
    return sum(parameter.numel() for parameter in _parameters(model, names))


def _parameters(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Parameter]:
    """Yields the parameters of the named modules. A tied parameter is yielded once for each of its names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        yield from modules[name].parameters() if name in modules else [model.get_parameter(name)]


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

    def as_spec(self) -> dict[str, str]:
        """Returns the cuts as a mapping for `split_spec`: the last block of each stage but the last, to "end"."""
        spec = {}
        for place in self.cuts:
            # A cut before the first block is after the embedding.
            name = self.blocks.block_name(place - 1) if place else self.blocks.before[-1]
            spec.update({self.blocks.after[0]: "beginning"} if name in spec else {name: "end"})
        return spec

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


def get_split_spec(
    model: nn.Module, num_stages: int, *, devices: Sequence[str | Hardware] | None = None
) -> dict[str, str]:
    """Returns a `split_spec` that cuts a model into stages of similar cost.

    The cost is that of `unit_costs`. If the devices are given, the stage of a faster one gets more, and what a stage
    needs for its weights, their gradients and the state of Adam fits into the memory of its device. Activations depend
    on the batch: `split_spec: auto` in a config counts them.

    Args:
        model: the whole model, preferably on the meta device.
        num_stages: the number of stages.
        devices: for each stage, the name of its device in the table of hardware or the facts of the device. None if all
            are alike and have memory enough.

    Raises:
        TrainingError: FG750 or FG754 if the model cannot be cut, FG753 if it has fewer blocks than stages.
        PlanError: FG947 if no cuts fit into the memory, FG994 if the table does not have a device.
        ValueError: if the number of devices is not that of the stages.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), *(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 100))
        >>> get_split_spec(model, 2)
        {'4': 'end'}
    """
    plan = plan_split(model, "auto", num_stages)
    if devices is None:
        return plan.as_spec()
    if len(devices) != num_stages:
        raise ValueError(f"{len(devices)} devices are given for {num_stages} stages")
    facts = [hardware(one) if isinstance(one, str) else one for one in devices]
    cuts = balanced_cuts(
        unit_costs(model, plan.blocks), num_stages, speeds=_speeds(facts), memory=_state_memory(model, plan, facts)
    )
    return replace(plan, cuts=cuts).as_spec()


def _speeds(devices: Sequence[Hardware]) -> list[float] | None:
    """Returns the peak rates of devices for the first type that all of them have; None if there is no such type."""
    for dtype in ("bf16", "fp16", "fp32"):
        if all(dtype in device.peak_flops for device in devices):
            return [device.peak_flops[dtype] for device in devices]
    return None


def _state_memory(model: nn.Module, plan: SplitPlan, devices: Sequence[Hardware]) -> StageMemory:
    """Returns the memory of stages without activations: weights, and for trained ones a gradient and Adam's moments."""
    weights, trained = part_bytes(model, plan.blocks), part_bytes(model, plan.blocks, trained_only=True)
    count = len(devices)
    return StageMemory(
        held=UnitCosts(
            before=weights.before + 3 * trained.before,
            blocks=tuple(one + 3 * other for one, other in zip(weights.blocks, trained.blocks, strict=True)),
            after=weights.after + 3 * trained.after,
        ),
        kept=UnitCosts(before=0, blocks=(0,) * len(plan.blocks), after=0),
        in_flight=(0,) * count,
        extra=(0,) * count,
        ranks=tuple(range(count)),
        limits=tuple(device.memory_bytes or float("inf") for device in devices),
    )


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
    problem = too_many_stages(count, len(blocks), num_others=bool(blocks.before) + bool(blocks.after))
    if problem is not None:
        raise TrainingError(
            f"{problem} ({_shown(blocks)})",
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
