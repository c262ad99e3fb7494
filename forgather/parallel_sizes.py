"""How many processes settings ask for, and how stages, micro-batches and rows fit together.

Takes the settings of a trainer's arguments; gives further facts for rules (`layout`). Keeps true: plain numbers; what
hangs on a setting that is not known is `UNKNOWN`, and what no setting says is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forgather.rule_conditions import SOMETHING, UNKNOWN

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
"""Schedules that run one stage on each rank."""
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that run two stages on each rank: one on the way down, one on the way up."""
# Longer numbers are no blocks, and more than int() reads.
_BLOCK = re.compile(r"(.*)\.([0-9]{1,18})")


def layout_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what follows from sizes.

    Returns:
        `stages`: pieces that `split_spec` cuts the model into; `ranks`: ranks of one pipeline; `num_stages`: stages in
        all, whoever says so; `most_per_rank`: stages that a rank would hold; `held` and `held_cuts`: stages that the
        ranks hold, and the cuts that make them; `rounds`: in which interleaved schedules run the micro-batches;
        `per_replica`: processes of one replica; `replicas_asked`, `processes`: replicas, and processes in all;
        `machines`: how many with `nproc_per_node` each.

    Example:
        >>> facts = layout_facts({"split_spec": {"layer.4": "end"}, "schedule_class": "ScheduleGPipe"})
        >>> facts["stages"], facts["ranks"], facts["processes"]
        (2, 2, 2)
    """
    given = settings.get
    pipelined = "schedule_class" in settings
    stages = follows(_stages, given("split_spec"))
    usual = follows(_usual_per_rank, given("schedule_class"))
    each = follows(lambda each, usual: each or usual, given("stages_per_rank"), usual)
    ranks = follows(_ranks, given("pipeline_parallel_size"), stages, each) if pipelined else 1
    held = follows(_times, given("pipeline_parallel_size"), given("stages_per_rank"))
    per_replica = follows(lambda ranks, tensor: _times(ranks, tensor or 1), ranks, given("tensor_parallel_size"))
    # A pipeline whose sizes are left open takes all processes for one replica.
    alone = pipelined and settings.get("pipeline_parallel_size") is None
    replicas = follows(lambda asked: asked or (1 if alone else None), given("data_parallel_size"))
    processes = follows(_times, replicas, per_replica)
    return {
        "stages": stages,
        "ranks": ranks,
        "num_stages": follows(lambda cut, ranks, each: cut or _times(ranks, each or 2), stages, ranks, each),
        "most_per_rank": follows(_most_per_rank, given("stages_per_rank"), stages, ranks),
        "held": held,
        "held_cuts": follows(lambda held: held and held - 1, held),
        "rounds": follows(_rounds, given("pipeline_chunks"), ranks),
        "per_replica": per_replica,
        "replicas_asked": replicas,
        "processes": processes,
        "machines": follows(_machines, processes, per_replica, given("nproc_per_node")),
    }


def follows(compute: Callable[..., Any], *values: Any) -> Any:
    """Returns what follows from values; `UNKNOWN` where one is not known, or of a wrong type (said elsewhere)."""
    if any(value is UNKNOWN or value is SOMETHING for value in values):
        return UNKNOWN
    try:
        return compute(*values)
    except (TypeError, AttributeError, ArithmeticError):
        return UNKNOWN


def _stages(spec: Any) -> int | None:
    if isinstance(spec, Mapping):
        return len({_cut(str(name), where) for name, where in spec.items()}) + 1
    return spec if isinstance(spec, int) and not isinstance(spec, bool) else None


def _cut(name: str, where: Any) -> tuple[str, Any]:
    """Returns a cut in one form: the end of block 4 is the beginning of block 5."""
    found = _BLOCK.fullmatch(name)
    return (found[1], int(found[2]) + (where == "end")) if found else (name, where)


def _usual_per_rank(schedule: Any) -> int | None:
    return 1 if schedule in ONE_STAGE else 2 if schedule in V_SHAPED else None


def _ranks(given: int | None, stages: int | None, held: int | None) -> int | None:
    if given is not None:
        return given
    return stages // held if stages and held and stages % held == 0 else None


def _most_per_rank(given: int | None, stages: int | None, ranks: int | None) -> int | None:
    return given or (-(-stages // ranks) if stages and ranks else None)


def _times(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _rounds(chunks: int | None, ranks: int | None) -> int | None:
    return max(1, chunks // ranks) if chunks and ranks else None


def _machines(processes: int | None, per_replica: int | None, per_node: int | None) -> int:
    needed = processes or per_replica
    return needed // per_node if needed and per_node and needed % per_node == 0 else 1
