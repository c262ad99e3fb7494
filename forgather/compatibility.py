"""The compatibility matrix: which combinations of strategy, precision and further features work together.

The input is the settings of a trainer's arguments. The output is the value of each axis of the matrix, and the verdict
that `ml/matrix.json` contains for this combination of values. The check before a run, the trainers and the
documentation all read this one table. A combination that is not in the table gives the same training result as a run
with one process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from forgather.parallel_sizes import apply_if_known
from forgather.pipeline_schedules import with_schedules

REFUSED = "FG770"
"""The error code of a refused combination."""
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "matrix.json")
_SHARDING = {
    "full_shard": "fsdp2 with resharding",
    "shard_grad_op": "fsdp2",
    "hybrid_shard": "hybrid shards",
    "no_shard": "all-reduce",
}


class Cell(NamedTuple):
    """The verdict for a set of axis values.

    Args:
        where: the axis values to which the verdict applies, by axis.
        verdict: one of five words. "refused": the combination is an error. "setting": the result equals that of one
            process because the trainer changes one setting of torch. "near": the result equals that of one process
            except for rounding. "not tested": the result was not compared. "none": the combination does not exist.
        reason: the reason for the verdict.
        instead: the closest combination that works; for the verdict "setting", the changed setting.
        arguments: the settings to which the error may point; it points to the first one that the config gives. A
            setting of the training arguments is written as `args.name`.
    """

    where: Mapping[str, tuple[str, ...]]
    verdict: str
    reason: str
    instead: str
    arguments: tuple[str, ...] = ()


class Axis(NamedTuple):
    """One axis of the compatibility matrix, which lists the settings that can be combined.

    Args:
        title: the heading of the axis.
        decided: the source of the axis value: "arguments" (the settings), "trainer" (the objects that the trainer
            receives) or "model" (the model, once it is built).
        values: the values of the axis, each with a description.
        when: for an axis with `decided="trainer"`, the condition on the received objects under which each value
            applies.
    """

    title: str
    decided: str
    values: Mapping[str, str]
    when: Mapping[str, str] = MappingProxyType({})


class Matrix(NamedTuple):
    """The compatibility matrix.

    Args:
        axes: the axes, by name.
        cells: the combinations with a verdict other than "same training result as with one process". If several cells
            match, the first one applies.
    """

    axes: Mapping[str, Axis]
    cells: tuple[Cell, ...]

    def cell(self, values: Mapping[str, str]) -> Cell | None:
        """Returns the first cell that matches the values; None if no cell matches.

        A combination without a cell gives the same training result as a run with one process.

        Args:
            values: the value of each axis, by name. A cell with an axis that is missing here does not match.
        """
        return next((cell for cell in self.cells if _fits(cell, values)), None)

    def refusals(self, decided: str) -> Iterator[dict[str, Any]]:
        """Yields the refused cells as conflict rules, in the form of a rules file (see `rules.Rules`).

        Args:
            decided: "arguments" for the cells whose axes depend on settings only, "trainer" for the cells with an axis
                that depends on objects which the trainer receives.
        """
        prefix = "" if decided == "arguments" else "args."
        for cell in self.cells:
            deciders = {self.axes[axis].decided for axis in cell.where}
            # A value that depends on the model is known only after the model is built; the trainer checks those cells.
            if cell.verdict != "refused" or "model" in deciders or ("trainer" in deciders) == (decided == "arguments"):
                continue
            yield {
                "code": REFUSED,
                "argument": [name if prefix else name.removeprefix("args.") for name in cell.arguments],
                "when": " and ".join(self._condition(axis, cell, prefix) for axis in cell.where),
                "message": cell.reason if prefix else cell.reason.replace("{args.", "{"),
                "hint": cell.instead,
            }

    def _condition(self, axis: str, cell: Cell, prefix: str) -> str:
        if self.axes[axis].decided == "trainer":
            return "(" + " or ".join(self.axes[axis].when[value] for value in cell.where[axis]) + ")"
        return f"{prefix}{axis} in ({', '.join(repr(value) for value in cell.where[axis])},)"


def _fits(cell: Cell, values: Mapping[str, str]) -> bool:
    return all(values.get(axis) in among for axis, among in cell.where.items())


@functools.cache
def read_matrix() -> Matrix:
    """Returns the compatibility matrix of `ml/matrix.json`."""
    with open(_FILE, encoding="utf-8") as stream:
        facts = with_schedules(json.load(stream))
    cells = [
        Cell(**{**cell, "where": {axis: tuple(values) for axis, values in cell["where"].items()},
                "arguments": tuple(cell.get("arguments", ()))})
        for cell in facts["cells"]
    ]  # fmt: skip
    # `with_schedules` gives only the class names, and the documentation prints a description of each value.
    schedule = facts["axes"].get("schedule", {"values": ()})
    schedule["values"] = {name: name.removeprefix("Schedule") for name in schedule["values"]}
    return Matrix(axes={name: Axis(**axis) for name, axis in facts["axes"].items()}, cells=tuple(cells))


def combination_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each axis that depends on settings.

    The value is `UNKNOWN` if it depends on an unknown setting. It is None if the axis does not apply, as the axis of
    pipeline schedules does not apply to a trainer without a pipeline.

    Args:
        settings: the settings by name, with the kind of trainer under the name `trainer`.

    Example:
        >>> facts = combination_facts({"trainer": "accel", "fsdp": "FULL_SHARD", "tensor_parallel_size": 1})
        >>> facts["strategy"], facts["precision"], facts["compile"]
        ('fsdp2', 'float32', 'no')
        >>> combination_facts({"trainer": "accel", "torch_compile_regions": True})["compile"]
        'yes'
    """
    given = settings.get
    pipelined = given("trainer") == "pipeline"
    shared = apply_if_known(_weight_sharding, given("fsdp"), given("fsdp_config"), given("data_parallel_size"))
    strategy = apply_if_known(_strategy, given("deepspeed"), shared, given("tensor_parallel_size"))
    compiles = ("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_compile_regions")
    return {
        "strategy": "pipeline" if pipelined else strategy,
        # None leaves an axis open, so that no cell about pipelines applies to another trainer.
        "schedule": given("schedule_class") if pipelined else None,
        "replicas": apply_if_known(_replicas, shared, *map(given, _DDP)) if pipelined else None,
        "tensor": apply_if_known(lambda size: "yes" if (size or 1) > 1 else "no", given("tensor_parallel_size")),
        "context": apply_if_known(_context, given("context_parallel_size"), given("context_parallel_method")),
        "accumulation": apply_if_known(
            _accumulation, given("gradient_accumulation_steps"), given("accumulate_grad_batches")
        ),
        "precision": apply_if_known(_precision, given("fp16"), given("bf16"), given("accelerator_args")),
        "compile": apply_if_known(lambda *asked: "yes" if any(asked) else "no", *map(given, compiles)),
        "offload": apply_if_known(_offload, given("fsdp_config")),
        "reentrant": apply_if_known(_reentrant, given("gradient_checkpointing_kwargs")),
        "logits": apply_if_known(_logits, given("linear_cross_entropy")),
    }


def _context(size: int | None, method: str | None) -> str:
    if (size or 1) == 1:
        return "no"
    return "ring" if method == "ring" else "yes"


_DDP = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "ddp_gradient_as_bucket_view",
)


def _weight_sharding(fsdp: bool | str | None, config: Mapping[str, Any] | None, replicas: int | None) -> str:
    """Returns "all-reduce" if each data-parallel rank has all weights, or the form of FSDP2 that shards the weights."""
    if not fsdp or replicas == 1:
        # With one replica, all forms of FSDP2 are the same: nothing is sharded.
        return "all-reduce" if not fsdp else "fsdp2"
    # `fsdp: true` names no sharding strategy; it reshards after the forward pass wherever the trainer supports that.
    asked = fsdp if isinstance(fsdp, str) else (config or {}).get("sharding_strategy")
    if (config or {}).get("reshard_after_forward") is True:
        return "fsdp2 with resharding"
    return _SHARDING.get(str(asked).lower(), "fsdp2") if asked else "fsdp2"


def _replicas(shared: str, *ddp: Any) -> str:
    return "ddp" if any(value is not None for value in ddp) else shared


def _accumulation(steps: int | None, schedule: Mapping[Any, Any] | None) -> str:
    if schedule is not None:
        return "scheduled"
    return "one" if steps in (None, 1) else "several"


def _offload(config: Mapping[str, Any] | None) -> str:
    return "weights" if config and (config.get("cpu_offload") or config.get("fsdp_cpu_offload")) else "none"


def _reentrant(kwargs: Mapping[str, Any] | None) -> str:
    return "yes" if kwargs and kwargs.get("use_reentrant") else "no"


def _logits(kernel: str | bool | None) -> str:
    # "auto" depends on the model, and is exact wherever it applies.
    return "held" if kernel in (None, False, "auto") else "chunked"


def _strategy(deepspeed: Any, shared: str, tensor: int | None) -> str | None:
    if deepspeed is not None:
        return _zero(deepspeed)
    if (tensor or 1) > 1:
        return "tensor" if shared == "all-reduce" else "tensor and fsdp2"
    return {"all-reduce": "ddp", "hybrid shards": "hybrid shards"}.get(shared, "fsdp2")


def _zero(deepspeed: Any) -> str | None:
    section = deepspeed.get("zero_optimization") if isinstance(deepspeed, Mapping) else None
    stage = section.get("stage") if isinstance(section, Mapping) else None
    # The stage may be in a JSON file that is not read here; "zero" then stands for any of them.
    return f"zero{stage}" if stage in (1, 2, 3) else "zero"


def _precision(fp16: bool | None, bf16: bool | None, accelerator: Mapping[str, Any] | None) -> str:
    asked = (accelerator or {}).get("mixed_precision")
    if fp16 or asked == "fp16":
        return "float16"
    return "bfloat16" if bf16 or asked == "bf16" else "float32"
