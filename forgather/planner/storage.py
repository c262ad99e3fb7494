"""What a run needs besides its devices: memory of the host, and disk.

Takes a memory plan as data; gives rows with bounds, as `forgather.planner.fit` does. Sizes of weights and of the
optimizer's state follow from the trace; what processes hold besides is assumed.

Units:
    bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.planner.fit import Overhead
from forgather.planner.memory_plan import GRADIENTS, PARAMETERS, Source

_MIB = 2**20


def host_rows(plan: Mapping[str, Any], *, processes: int) -> tuple[Overhead, ...]:
    """Returns what one machine holds in its own memory.

    Args:
        plan: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
        processes: the number of processes on the machine.
    """
    settings = plan["settings"]
    rows = [
        _first_weights(plan, processes),
        *_saved_rows(plan),
        *offloaded_rows(plan, processes=processes),
        Overhead(
            name="processes",
            least=700 * _MIB * processes,
            most=3000 * _MIB * processes,
            basis=f"0.7 to 3 GB of code for each of {processes}",
        ),
    ]
    if workers := (settings.get("dataloader_num_workers") or 0) * processes:
        basis = f"0.3 to 1 GB for each of {workers}; more if the dataset is held in lists of Python"
        rows.append(
            Overhead(name="data loader workers", least=300 * _MIB * workers, most=1000 * _MIB * workers, basis=basis)
        )
    stored = checkpoint_bytes(plan)
    if settings.get("async_save") and stored is not None:
        part = stored * processes // plan["world_size"]
        rows.append(_exact("copies for async_save", part, "the part of a checkpoint that the machine writes"))
    return tuple(rows)


def _first_weights(plan: Mapping[str, Any], processes: int) -> Overhead:
    name = "weights while they are made or read"
    if plan["settings"].get("initial_weights") != "counter":
        return _exact(name, plan["model_bytes"], "one process of a machine holds the whole model")
    part = plan["model_bytes"] * processes // plan["world_size"]
    basis = "initial_weights: counter, so each process fills its part, one weight after the other"
    return Overhead(name=name, least=0, most=part, basis=basis)


def _saved_rows(plan: Mapping[str, Any]) -> list[Overhead]:
    """Returns what rank 0 holds when it writes the whole model at the end; checkpoints are written in parts."""
    if plan["settings"].get("save_strategy") == "no" or not plan["weights_bytes"]:
        return []
    basis = "rank 0 copies the whole model to its machine; checkpoints are written in parts, by all ranks"
    return [_exact("weights while the model is saved", plan["weights_bytes"], basis)]


def offloaded_rows(plan: Mapping[str, Any], *, processes: int) -> tuple[Overhead, ...]:
    """Returns what the processes of one machine offload to its memory; empty if nothing is offloaded.

    Args:
        plan: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
        processes: the number of processes on the machine.
    """
    sums: dict[str, int] = {}
    for rank in plan["ranks"]:
        first, last = rank["ranks"]
        for row in rank["host"]:
            sums[row["name"]] = sums.get(row["name"], 0) + row["num_bytes"] * (last - first + 1)
    return tuple(
        Overhead(
            name=f"offloaded {name}",
            least=size * processes // plan["world_size"],
            # torch rounds pinned memory up to a power of two.
            most=size * processes // plan["world_size"] * (2 if name in _PINNED else 1),
            basis=f"of {processes} process{'es' * (processes > 1)}"
            + ("; at most twice as much, where pinned memory is rounded up" if name in _PINNED else ""),
            source=Source.TRACED,
        )
        for name, size in sums.items()
    )


_PINNED = (PARAMETERS, GRADIENTS)


def checkpoint_bytes(plan: Mapping[str, Any]) -> int | None:
    """Returns the size of one checkpoint: weights and optimizer state; None if it is unknown."""
    weights, optimizer = plan["weights_bytes"], plan["optimizer_bytes"]
    if plan["settings"].get("save_only_model"):
        return None if weights is None else int(weights)
    return None if weights is None or optimizer is None else int(weights + optimizer)


def disk_rows(plan: Mapping[str, Any]) -> tuple[Overhead, ...]:
    """Returns what the run writes: its checkpoints, while the last one is written, and the model.

    Empty if the strategy stores its state in a way of its own, such as DeepSpeed.

    Args:
        plan: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
    """
    settings, one = plan["settings"], checkpoint_bytes(plan)
    if one is None or settings.get("save_strategy") == "no":
        return ()
    rows = [_exact("one checkpoint", one, "weights" + " and optimizer" * (not settings.get("save_only_model")))]
    limit = settings.get("save_total_limit")
    if limit is not None:
        # A new checkpoint is complete before an old one is removed.
        rows.append(
            _exact(
                "checkpoints that are kept",
                one * (limit + 1),
                f"save_total_limit {limit}, and one more while it is written",
            )
        )
    elif (saves := _saves(settings)) is not None:
        rows.append(_exact("all checkpoints", one * saves, f"{saves} saves; save_total_limit is not set"))
    rows.append(_exact("the model", plan["weights_bytes"], "at the end of the run"))
    return tuple(rows)


def _saves(settings: Mapping[str, Any]) -> int | None:
    """Returns how often a run saves; None if that depends on the length of its data."""
    steps, every = settings.get("max_steps") or 0, settings.get("save_steps") or 0
    if settings.get("save_strategy") != "steps" or steps <= 0 or every <= 0:
        return None
    # A number below 1 is a share of all steps.
    return max(1, int(steps // (every if every >= 1 else max(1, steps * every))))


def _exact(name: str, num_bytes: int, basis: str) -> Overhead:
    return Overhead(name=name, least=num_bytes, most=num_bytes, basis=basis, source=Source.FORMULA)
