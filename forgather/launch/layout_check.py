"""Whether a trainer can run in a number of processes, decided before a file that starts them is printed.

Takes a project and the number of all processes; raises an error with the reason if the trainer would refuse them. Only
plain values are read: the trainer's arguments, and the number of blocks in the model's configuration. What depends on
other values is decided when the run starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from forgather.config.graph import Call, Node, Scalar
from forgather.config.traverse import walk
from forgather.errors import ProjectError, Severity
from forgather.pipeline_schedules import too_many_stages
from forgather.project.constructor_rules import home_of, rules_of
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.trainer_arguments import TrainerArguments, keyword, model_of_main, trainer_arguments
from forgather.rule_conditions import AUTO, UNKNOWN
from forgather.rules import Rules, Violation

_OF_ONE_PROCESS = ("forgather.ml:Trainer", "forgather.ml.trainer:Trainer", "forgather.ml.trainer.trainer:Trainer")
_CONFIG = re.compile(r"transformers(\.[\w.]+)?:\w+Config")
_NUM_BLOCKS = ("num_hidden_layers", "n_layer")


def refuse_other_layout(project: Project, processes: int) -> None:
    """Raises an error if a config's trainer cannot run in some number of processes.

    Args:
        project: the project, opened with the config of the run.
        processes: the number of processes on all machines together.

    Raises:
        ProjectError: FG530 with the reason.
    """
    arguments = trainer_arguments(project.graph)
    found = next(_conflicts(project, arguments, processes), None)
    if found is None:
        return
    entry = arguments.entry(found.argument) if arguments else None
    many = "1 process" if processes == 1 else f"{processes} processes"
    raise ProjectError(
        f"{project.config_name} cannot run in {many}: {found.message}",
        code="FG530",
        span=entry.span if entry else project.graph.targets["main"].span,
        path="main",
        hint=found.hint,
    )


def _conflicts(project: Project, arguments: TrainerArguments | None, processes: int) -> Iterator[Violation]:
    main = project.graph.targets["main"].value
    if processes > 1 and isinstance(main, Call) and home_of(main.constructor) in _OF_ONE_PROCESS:
        yield _violation(
            "its trainer runs in one process",
            "extend trainers/accel_trainer.yaml or trainers/pipeline_trainer.yaml, or start one process on one machine",
        )
    for rules in rules_of(arguments.call.constructor) if arguments else ():
        if arguments and "layout" in rules.computed:
            yield from _broken(rules, _settings(rules, arguments), processes, _num_blocks(project))


def _violation(message: str, hint: str) -> Violation:
    return Violation(code="FG530", message=message, argument="data_parallel_size", hint=hint)


def _num_blocks(project: Project) -> int | None:
    """Returns the number of blocks of the model; None unless exactly one configuration of transformers gives it."""
    model = model_of_main(project.graph)
    found = [
        node.value
        for _, call in walk([] if model is None else [((), model[1])])
        if isinstance(call, Call) and _CONFIG.fullmatch(call.constructor)
        for name in _NUM_BLOCKS
        if isinstance(node := keyword(call, name), Scalar)
    ]
    return found[0] if len(found) == 1 and isinstance(found[0], int) else None


def _broken(rules: Rules, given: Mapping[str, Any], processes: int, num_blocks: int | None) -> Iterator[Violation]:
    """Yields the conflicts that the number of processes makes; those that the settings have without it are left out."""
    alone = rules.complete(given, given)
    wanted = alone["processes"]
    if isinstance(wanted, int) and wanted != processes:
        yield _violation(
            f"its parallel sizes multiply to {wanted}",
            f"start {wanted} with --nnodes and --nproc-per-node, or change the sizes",
        )
        return
    laid_out = {**given, "nproc_per_node": processes}
    tensor = given.get("tensor_parallel_size")
    others = (given.get("data_parallel_size"), tensor)
    if "schedule_class" in given and alone["ranks"] is None and UNKNOWN not in others:
        # Without a size of its own, a pipeline takes all processes that the other sizes leave.
        laid_out["pipeline_parallel_size"] = processes // ((given.get("data_parallel_size") or 1) * (tensor or 1))
    known = {one.message for one in rules.broken(alone, given)}
    complete = rules.complete(laid_out, given)
    for one in rules.broken(complete, given):
        if one.severity is Severity.ERROR and one.message not in known:
            yield one
    num_stages = complete.get("num_stages")
    if isinstance(num_stages, int) and num_blocks is not None:
        problem = too_many_stages(num_stages, num_blocks)
        if problem is not None:
            hint = "start fewer processes, or set data_parallel_size for replicas of a shorter pipeline"
            yield Violation(code="FG530", message=problem, argument="stages_per_rank", hint=hint)


def _settings(rules: Rules, arguments: TrainerArguments) -> dict[str, Any]:
    found = {str(entry.key): _plain(str(entry.key), entry.value) for entry in arguments.call.kwargs}
    current = {rules.renamed.get(name, name): value for name, value in found.items()}
    is_found = {name for name, rule in rules.settings.items() if rule.get("found")}
    return {name: UNKNOWN if value == AUTO and name in is_found else value for name, value in current.items()}


def _plain(name: str, node: Node) -> Any:
    try:
        return plain_value(node, name)
    except ProjectError:
        return UNKNOWN
