"""Sizes of a parallel run that follow from settings: stages, pipeline ranks, replicas, processes and machines.

The input is the settings of a trainer's arguments; the output is the sizes, by name, for the conditions of rules
(`computed: layout`). A size that depends on an unknown setting is `UNKNOWN`, and a size that no setting determines is
None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forgather.pipeline_schedules import SCHEDULES
from forgather.rule_conditions import SOMETHING, UNKNOWN

# int() refuses texts of more than 4,300 digits; a block's number has a few.
_BLOCK = re.compile(r"(.*)\.([0-9]{1,18})")


def layout_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes that follow from settings, by name.

    Returns:
        stages: the number of pieces into which `split_spec` cuts the model.
        ranks: the number of ranks of one pipeline.
        num_stages: the number of stages of the pipeline, from `split_spec` or from the ranks and the stages per rank.
        most_per_rank: the largest number of stages on one rank.
        held: the product of `pipeline_parallel_size` and `stages_per_rank`.
        held_cuts: the number of cuts that `held` stages need.
        rounds: the number of rounds in which an interleaved schedule runs the micro-batches.
        per_replica: the number of processes of one replica.
        replicas_asked: the number of replicas.
        processes: the number of processes of all replicas.
        machines: the number of machines with `nproc_per_node` processes each.

    Example:
        >>> facts = layout_facts({"split_spec": {"layer.4": "end"}, "schedule_class": "ScheduleGPipe"})
        >>> facts["stages"], facts["ranks"], facts["processes"]
        (2, 2, 2)
    """
    given = settings.get
    pipelined = "schedule_class" in settings
    stages = apply_if_known(_stages, given("split_spec"))
    usual = apply_if_known(_default_stages_per_rank, given("schedule_class"))
    each = apply_if_known(lambda each, usual: each or usual, given("stages_per_rank"), usual)
    ranks = apply_if_known(_ranks, given("pipeline_parallel_size"), stages, each) if pipelined else 1
    held = apply_if_known(_product, given("pipeline_parallel_size"), given("stages_per_rank"))
    per_replica = apply_if_known(
        lambda ranks, tensor, context: _product(ranks, (tensor or 1) * (context or 1)),
        ranks,
        given("tensor_parallel_size"),
        given("context_parallel_size"),
    )
    # Without `pipeline_parallel_size`, all processes form one pipeline.
    alone = pipelined and settings.get("pipeline_parallel_size") is None
    replicas = apply_if_known(lambda asked: asked or (1 if alone else None), given("data_parallel_size"))
    processes = apply_if_known(_product, replicas, per_replica)
    return {
        "stages": stages,
        "ranks": ranks,
        "num_stages": apply_if_known(lambda cut, ranks, each: cut or _product(ranks, each or 2), stages, ranks, each),
        "most_per_rank": apply_if_known(_most_per_rank, given("stages_per_rank"), stages, ranks),
        "held": held,
        "held_cuts": apply_if_known(lambda held: held and held - 1, held),
        "rounds": apply_if_known(_rounds, given("pipeline_chunks"), ranks),
        "per_replica": per_replica,
        "replicas_asked": replicas,
        "processes": processes,
        "machines": apply_if_known(_machines, processes, per_replica, given("nproc_per_node")),
    }


_OR_RING = "; or, if each row is one document, write context_parallel_method: ring"


def uneven_heads(heads: int, groups: int, *, size: int, tensor_size: int = 1) -> tuple[str, str] | None:
    """Returns why attention heads cannot be divided over context-parallel ranks, and what to write; None if they can.

    Args:
        heads: the number of query heads of the model.
        groups: the number of heads of keys and values.
        size: the number of ranks that divide the positions of a row.
        tensor_size: the number of ranks over which each layer is sliced.

    Example:
        >>> uneven_heads(6, 2, size=4)[0]
        'its 6 attention heads cannot be divided over context_parallel_size 4'
    """
    over = f"context_parallel_size {size}" + (f" x tensor_parallel_size {tensor_size}" if tensor_size > 1 else "")
    if heads % (size * tensor_size):
        problem = f"its {heads} attention heads cannot be divided over {over}"
        return problem, f"give sizes whose product divides {heads}{_OR_RING}"
    local = groups // tensor_size
    # Fewer heads of keys and values than ranks are copied, each the same number of times.
    if groups % tensor_size == 0 and local and local % size and size % local:
        problem = f"its {groups} heads of keys and values can neither be divided over {over} nor be copied evenly"
        return problem, f"give a context_parallel_size that divides {local}, or that {local} divides{_OR_RING}"
    return None


def apply_if_known(compute: Callable[..., Any], *values: Any) -> Any:
    """Returns `compute(*values)`; `UNKNOWN` if a value is unknown or of a wrong type.

    The rule about the setting itself reports a wrong type, so that one mistake gives one message.

    Args:
        compute: a function of plain values.
        *values: the arguments of the function.
    """
    if any(value is UNKNOWN or value is SOMETHING for value in values):
        return UNKNOWN
    try:
        return compute(*values)
    except (TypeError, AttributeError, ArithmeticError):
        return UNKNOWN


def _stages(spec: Any) -> int | None:
    if isinstance(spec, Mapping):
        # The same cut written in two ways counts once; n cuts make n + 1 stages.
        return len({_cut(str(name), where) for name, where in spec.items()}) + 1
    # A bool is an int in Python, and `split_spec: true` is no number of stages.
    return spec if isinstance(spec, int) and not isinstance(spec, bool) else None


def _cut(name: str, where: Any) -> tuple[str, Any]:
    """Returns a cut in its canonical form, in which the end of block 4 is the beginning of block 5."""
    found = _BLOCK.fullmatch(name)
    return (found[1], int(found[2]) + (where == "end")) if found else (name, where)


def _default_stages_per_rank(schedule: Any) -> int | None:
    facts = SCHEDULES.get(schedule) if isinstance(schedule, str) else None
    return facts.usual_stages if facts is not None and (facts.one_stage or facts.v_shaped) else None


def _ranks(given: int | None, stages: int | None, held: int | None) -> int | None:
    if given is not None:
        return given
    # A remainder is a conflict, which a rule of its own reports.
    return stages // held if stages and held and stages % held == 0 else None


def _most_per_rank(given: int | None, stages: int | None, ranks: int | None) -> int | None:
    return given or (-(-stages // ranks) if stages and ranks else None)


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _rounds(chunks: int | None, ranks: int | None) -> int | None:
    return max(1, chunks // ranks) if chunks and ranks else None


def _machines(processes: int | None, per_replica: int | None, per_node: int | None) -> int:
    needed = processes or per_replica
    return needed // per_node if needed and per_node and needed % per_node == 0 else 1
