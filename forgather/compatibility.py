"""Which combination of strategy, precision and the rest settings ask for, and what is known of it.

Takes the settings of a trainer's arguments; gives the value of each axis of the compatibility matrix, and out of
`ml/matrix.json` what holds for values together. Keeps true: the table is data, declared once; the check before a run,
the trainers and the documentation read it through these functions; what is not listed is equal to one process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from forgather.parallel_sizes import follows

REFUSED = "FG770"
"""The code of a combination that is refused."""
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "matrix.json")
_SHARED = {
    "full_shard": "fsdp2 with resharding",
    "shard_grad_op": "fsdp2",
    "hybrid_shard": "hybrid shards",
    "no_shard": "all-reduce",
}


class Cell(NamedTuple):
    """What holds where axes have certain values.

    Args:
        where: by axis, the values that it may have.
        verdict: "refused"; "setting": equal to one process with one setting of torch, which is made for the user;
            "near": equal but for rounding; "not tested"; "none": there is no such combination.
        reason: why.
        instead: the nearest thing that works; of a cell that is equal, the setting.
        arguments: the settings to point at, the first that is given; those of the arguments as `args.name`.
    """

    where: Mapping[str, tuple[str, ...]]
    verdict: str
    reason: str
    instead: str
    arguments: tuple[str, ...] = ()


class Axis(NamedTuple):
    """One axis of the matrix.

    Args:
        title: what it is about.
        decided: who knows its value: "arguments", "trainer" (by what it is given) or "model" (when it is built).
        values: its values, with words for people.
        when: of an axis that the trainer decides, conditions on what it is given, by value.
    """

    title: str
    decided: str
    values: Mapping[str, str]
    when: Mapping[str, str] = MappingProxyType({})


class Matrix(NamedTuple):
    """The table.

    Args:
        axes: by name.
        cells: what is not simply equal, the first that fits counts.
    """

    axes: Mapping[str, Axis]
    cells: tuple[Cell, ...]

    def cell(self, values: Mapping[str, str]) -> Cell | None:
        """Returns what holds for values of axes; None for equal to one process. An axis left out fits nothing."""
        return next((cell for cell in self.cells if _fits(cell, values)), None)

    def refusals(self, decided: str) -> Iterator[dict[str, Any]]:
        """Yields the refused cells as rules about what "arguments" or the "trainer" decides."""
        prefix = "" if decided == "arguments" else "args."
        for cell in self.cells:
            deciders = {self.axes[axis].decided for axis in cell.where}
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
def read_matrix(file: str = _FILE) -> Matrix:
    """Returns the table of a file."""
    with open(file, encoding="utf-8") as stream:
        facts = json.load(stream)
    cells = [
        Cell(**{**cell, "where": {axis: tuple(values) for axis, values in cell["where"].items()},
                "arguments": tuple(cell.get("arguments", ()))})
        for cell in facts["cells"]
    ]  # fmt: skip
    return Matrix(axes={name: Axis(**axis) for name, axis in facts["axes"].items()}, cells=tuple(cells))


def combination_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each axis that arguments decide; None where they decide nothing.

    Example:
        >>> facts = combination_facts({"trainer": "accel", "fsdp": "FULL_SHARD", "tensor_parallel_size": 1})
        >>> facts["strategy"], facts["precision"], facts["compile"]
        ('fsdp2', 'float32', 'no')
    """
    given = settings.get
    pipelined = given("trainer") == "pipeline"
    shared = follows(_shared, given("fsdp"), given("fsdp_config"), given("data_parallel_size"))
    strategy = follows(_strategy, given("deepspeed"), shared, given("tensor_parallel_size"))
    compiles = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    return {
        "strategy": "pipeline" if pipelined else strategy,
        "schedule": given("schedule_class") if pipelined else None,
        "replicas": follows(_replicas, shared, *map(given, _DDP)) if pipelined else None,
        "tensor": follows(lambda size: "yes" if (size or 1) > 1 else "no", given("tensor_parallel_size")),
        "accumulation": follows(_accumulation, given("gradient_accumulation_steps")),
        "precision": follows(_precision, given("fp16"), given("bf16"), given("accelerator_args")),
        "compile": follows(lambda *asked: "yes" if any(asked) else "no", *map(given, compiles)),
        "offload": follows(_offload, given("fsdp_config")),
        "reentrant": follows(_reentrant, given("gradient_checkpointing_kwargs")),
    }


_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def _shared(fsdp: bool | str | None, config: Mapping[str, Any] | None, replicas: int | None) -> str:
    """Returns how replicas share weights. What is only switched on reshards where that works."""
    if not fsdp or replicas == 1:
        return "all-reduce" if not fsdp else "fsdp2"
    asked = fsdp if isinstance(fsdp, str) else (config or {}).get("sharding_strategy")
    if (config or {}).get("reshard_after_forward") is True:
        return "fsdp2 with resharding"
    return _SHARED.get(str(asked).lower(), "fsdp2") if asked else "fsdp2"


def _replicas(shared: str, *ddp: Any) -> str:
    return "ddp" if any(value is not None for value in ddp) else shared


def _accumulation(steps: int | None) -> str:
    return "one" if steps in (None, 1) else "several"


def _offload(config: Mapping[str, Any] | None) -> str:
    return "weights" if config and (config.get("cpu_offload") or config.get("fsdp_cpu_offload")) else "none"


def _reentrant(kwargs: Mapping[str, Any] | None) -> str:
    return "yes" if kwargs and kwargs.get("use_reentrant") else "no"


def _strategy(deepspeed: Any, shared: str, tensor: int | None) -> str | None:
    if deepspeed is not None:
        return _zero(deepspeed)
    if (tensor or 1) > 1:
        return "tensor" if shared == "all-reduce" else "tensor and fsdp2"
    return {"all-reduce": "ddp", "hybrid shards": "hybrid shards"}.get(shared, "fsdp2")


def _zero(deepspeed: Any) -> str | None:
    section = deepspeed.get("zero_optimization") if isinstance(deepspeed, Mapping) else None
    stage = section.get("stage") if isinstance(section, Mapping) else None
    return f"zero{stage}" if stage in (1, 2, 3) else "zero"


def _precision(fp16: bool | None, bf16: bool | None, accelerator: Mapping[str, Any] | None) -> str:
    asked = (accelerator or {}).get("mixed_precision")
    if fp16 or asked == "fp16":
        return "float16"
    return "bfloat16" if bf16 or asked == "bf16" else "float32"
