"""Dry run of a multi-process training: mesh, parameters per rank, and shapes of one step, without memory for weights.

The inputs are a function that makes a trainer, and the number of processes. The result is a `DryRun`. torch's fake
process group replaces the other processes, so nothing is sent and no collective waits. If the strategy can build a
model on the meta device, the dry run calls the strategy's own `build` once for each pipeline rank, so that the errors
of this method are raised in the dry run too. Weights have shapes but take no memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from forgather.errors import DistributedError, first_line
from forgather.launcher_env import ProcessFacts
from forgather.ml.batch_sizes import num_rows
from forgather.ml.distributed.env import DistributedEnvironment, fake_world
from forgather.ml.distributed.layout import Layout
from forgather.ml.model_inputs import inputs_of
from forgather.ml.planner.model_builders import loading_fakes, without_memory_for_models
from forgather.ml.strategy.base import Recipe, Strategy, build_strategy
from forgather.ml.strategy.describe import axes_of
from forgather.ml.strategy.initial_room import lack_of_room
from forgather.ml.strategy.meta_model import meta_model, tensors_of
from forgather.ml.strategy.pipeline.microbatch_split import part_of
from forgather.ml.strategy.shapes_only import fill_with_fakes, shapes_only
from forgather.ml.trainer.trainer import Trainer

Constructor = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The part of the model that a range of ranks holds in memory.

    Args:
        ranks: the first and the last rank of the range.
        stages: the numbers of the pipeline stages on these ranks. Empty without a pipeline.
        modules: the names of the modules, with the blocks of a list as a range.
        parameters: the number of elements on one rank. If a split is uneven, the last ranks may have fewer.
        parameter_bytes: the memory of these elements in bytes.
        of: the number of elements of the same modules if they were not sharded.
    """

    ranks: tuple[int, int]
    stages: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    of: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The layout and the sizes of a run on several processes.

    Args:
        world_size: the number of processes.
        strategy: the name of the strategy class.
        mesh: the size of each mesh axis, by name.
        parameters: the number of elements of the whole model.
        rows_per_update: the number of rows in the first optimizer step, over all data-parallel ranks.
        holdings: the part of the model on each range of ranks, in the order of the ranks.
        step: the shapes in one micro-batch of one data-parallel rank: the inputs, the hidden states after each block,
            and the output.
        step_problem: the reason why some of these shapes are missing. None if no shape is missing.
        initial_weights: what this machine lacks to make the initial weights in one process, and what to set. None if
            it lacks nothing, or if no process makes the whole model.
    """

    world_size: int
    strategy: str
    mesh: Mapping[str, int]
    parameters: int
    rows_per_update: int
    holdings: tuple[Holding, ...]
    step: Mapping[str, str]
    step_problem: str | None = None
    initial_weights: str | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the dry run as a dict."""
        return asdict(self)


def dry_run(
    make_trainer: Callable[[Callable[[Constructor], Constructor]], Any], *, world_size: int, local_world_size: int
) -> dict[str, Any]:
    """Returns a `DryRun` as a dict.

    Args:
        make_trainer: a function that returns the trainer of the config. Its argument is a function that must be called
            with each constructor, and whose result is called in place of the constructor.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.

    Raises:
        DistributedError: FG745 if the function returns an object that is not a trainer of Forgather. The strategy may
            raise further errors.
    """
    recipes: list[Recipe] = []

    def build(strategy: Strategy, recipe: Recipe) -> None:
        recipes.append(recipe)
        _build(strategy, recipe)

    # A config may build its model before its trainer, whose weights would fill the memory.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A trainer builds its strategy in its constructor, with the function in this variable.
    token = build_strategy.set(build)
    try:
        with _as_rank(0, world_size, local_world_size), shapes_only(), loading_fakes():
            trainer = make_trainer(lambda function: without_memory_for_models(function, fake))
            _refuse_other_object(trainer)
            layout = trainer.strategy.layout
            first = _holding(trainer.strategy, layout, 0)
            step, problem = _step(trainer, recipes[0], fake)
        holdings = [first]
        # Without a pipeline all ranks hold the same modules: rank 0 stands for them.
        for position in range(1, layout.pipeline_parallel_size):
            rank = position * layout.ranks_of_stage
            with _as_rank(rank, world_size, local_world_size), shapes_only():
                strategy = trainer.choose_strategy(DistributedEnvironment())
                _build(strategy, recipes[0])
                holdings.append(_holding(strategy, layout, rank))
    finally:
        build_strategy.reset(token)
        # Accelerate keeps the state of the first strategy until the Python process ends.
        AcceleratorState._reset_state(reset_partial_state=True)
    args = trainer.args
    accumulated = args.accumulation.at(epoch=0, step=0)
    rows = args.per_device_train_batch_size * accumulated * layout.data_parallel_size
    model = meta_model(recipes[0].make_model)
    return DryRun(
        world_size=world_size,
        strategy=type(trainer.strategy).__name__,
        mesh=axes_of(trainer.strategy),
        parameters=_count(model),
        rows_per_update=rows,
        holdings=tuple(holdings),
        step=step,
        step_problem=problem,
        initial_weights=_lack_of_room(trainer.strategy, recipes[0], model),
    ).as_data()


def _lack_of_room(strategy: Strategy, recipe: Recipe, model: nn.Module) -> str | None:
    # Other strategies have the whole model on each process anyway; a loaded model has no weights to compute.
    makes_whole = strategy.builds_on_meta and recipe.initial_weights == "sequential" and recipe.model_is_made_anew
    if not makes_whole or recipe.stored_in is not None:
        return None
    return lack_of_room(sum({id(tensor): tensor.nbytes for *_, tensor in tensors_of(model)}.values()))


def _refuse_other_object(main: object) -> None:
    if not isinstance(main, Trainer):
        raise DistributedError(
            f"main is a {type(main).__name__}, and a dry run of several processes needs a trainer of Forgather",
            code="FG745",
            hint="use trainers/accel_trainer.yaml or trainers/pipeline_trainer.yaml, or leave --world-size out",
        )


def _as_rank(rank: int, world_size: int, local_world_size: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which this Python process acts as one rank of a fake process group."""
    local = min(local_world_size, world_size)
    return fake_world(ProcessFacts(rank=rank, local_rank=rank % local, world_size=world_size, local_world_size=local))


def _build(strategy: Strategy, recipe: Recipe) -> None:
    if strategy.builds_on_meta:
        strategy.build(recipe)
    else:
        # DeepSpeed's engine needs weights with values. The model on the meta device is enough to count elements.
        strategy.model = strategy.view = meta_model(recipe.make_model)
        strategy.rule = recipe.make_rule(strategy.model)


def _holding(strategy: Strategy, layout: Layout, rank: int) -> Holding:
    # The `view` of a pipeline represents all stages; its attribute `local` has the stages of this rank.
    model = getattr(strategy.view, "local", strategy.model)
    weights = dict(model.named_parameters())
    kept = [_local_elements(weight, strategy.slices_per_weight) for weight in weights.values()]
    ranks = layout.ranks_of_stage
    placement = getattr(strategy, "placement", None)
    return Holding(
        ranks=(rank, rank + ranks - 1),
        stages=() if placement is None else tuple(placement.stages_of(layout.position(rank).pipeline)),
        modules=tuple(module_ranges(list(weights))),
        parameters=sum(kept),
        parameter_bytes=sum(
            number * weight.element_size() for number, weight in zip(kept, weights.values(), strict=True)
        ),
        of=_count(model),
    )


def _local_elements(weight: Tensor, slices: int) -> int:
    if isinstance(weight, DTensor):
        return weight.to_local().numel()
    # Rounded up: the first ranks of an uneven split hold the larger parts.
    return -(-weight.numel() // slices)


def _count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def module_ranges(names: list[str]) -> list[str]:
    """Returns the names of the modules that the named weights belong to, with the blocks of a list as a range.

    Example:
        >>> module_ranges(["embed.weight", "layers.0.a.weight", "layers.0.b", "layers.1.a.weight"])
        ['embed', 'layers.0-1']
    """
    found: dict[str, list[int] | None] = {}
    for name in names:
        # Wrappers (compile, FSDP, activation checkpointing) insert parts into names.
        name = re.sub(r"\b_(checkpoint_wrapped_module|orig_mod|fsdp_wrapped_module)\.", "", name)
        numbered = re.match(r"(.*?)\.(\d+)(\.|$)", name)
        if numbered:
            blocks = found.setdefault(numbered[1], [])
            if blocks is not None and int(numbered[2]) not in blocks:
                blocks.append(int(numbered[2]))
        else:
            found.setdefault(name.rpartition(".")[0] or name, None)
    return [prefix if blocks is None else f"{prefix}.{_ranges(sorted(blocks))}" for prefix, blocks in found.items()]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _step(trainer: Trainer, recipe: Recipe, mode: FakeTensorMode) -> tuple[dict[str, str], str | None]:
    """Returns the shapes of one micro-batch in the model, and the reason why some are missing, or None."""
    if trainer.train_dataset is None:
        return {}, "there is no train_dataset"
    window = next(trainer._train_batches().windows(trainer.strategy.rule))
    batch = getattr(window.batches[0], "batch", window.batches[0])
    # Under a pipeline the model is called with micro-batches.
    parts = getattr(trainer.strategy, "parts", 1)
    if parts > 1:
        batch = part_of(batch, 0, num_rows(batch) // parts)
    shapes = {name: shape_of(value) for name, value in _named_items(inputs_of(batch)) if isinstance(value, Tensor)}
    # Fake tensors instead of the meta device: models that read values of tensors know fake ones and avoid it.
    placed = {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else value for name, value in _named_items(batch)
    }
    try:
        with mode:
            model = recipe.make_model()
            if any(weight.is_meta for weight in model.parameters()):
                # The config built it before the strategy, which has moved it.
                fill_with_fakes(model)
            _record_shapes(model, shapes)
            trainer.strategy.rule.total(
                model, placed if isinstance(batch, Mapping) else tuple(placed.values()), denom=1
            )
    except Exception as error:  # noqa: BLE001 - code of a user's model, which may read values of tensors
        said = first_line(error)
        return shapes, f"the model cannot be computed without values: {said[:160]}"
    return shapes, None


def _named_items(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return [
        (f"input {number}", item) for number, item in enumerate(batch if isinstance(batch, tuple | list) else (batch,))
    ]


def _record_shapes(model: nn.Module, shapes: dict[str, str]) -> None:
    """Registers hooks that record the shape after the first block of a list, and the shape of the model's output."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple | list) else getattr(output, "logits", output)
            if isinstance(found, Tensor):
                shapes.setdefault(name, shape_of(found))

        return hook

    for name, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            # The blocks of a list return hidden states of the same shape, so the first block stands for all.
            blocks[0].register_forward_hook(note(f"after each of {name}"))
            break
    model.register_forward_hook(note("output"))


def shape_of(tensor: Tensor) -> str:
    """Returns the shape and dtype of a tensor as text, such as "(4, 128) int64".

    Shapes:
        tensor: any shape.
    """
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
