"""The ways out of a run that does not fit on its device: changes of the config, each checked and planned like the run.

Takes a `Project`, its plan and the device; gives `forgather.planner.ways_out.WayOut`s as plain data. A change is a list
of assignments for `--set`, so that what was planned is what a user writes. One pair of traces serves all sizes of
micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from forgather.config.graph import Call, Graph
from forgather.errors import ForgatherError, ProjectError, Severity
from forgather.launch.in_process import MAIN
from forgather.launch.planning import Device, error_line, traced_plan
from forgather.launch.time_planning import step_of
from forgather.planner.choices import MICRO_BATCHES, ROWS
from forgather.planner.fit import Verdict, fit_plan, worst_fit
from forgather.planner.leaf import value_text
from forgather.planner.memory_plan import OPTIMIZER_STEP
from forgather.planner.ways_out import (
    EVALUATIONS,
    NUMBER,
    READ,
    Change,
    WayOut,
    changes_of,
    evaluation_change,
    fused_change,
    nearest_first,
)
from forgather.planner.work import RunWork
from forgather.project.check import check_project
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.project.trainer_arguments import keyword, path_of, trainer_arguments

_BATCHES = "forgather.ml.planner.batch_plans:plan_batches"
_ADAMW = "forgather.ml.optim:adamw"
_MOST_COMBINED = 3
_Planned = tuple[Change, dict[str, Any], RunWork]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is planned.

    Args:
        device: the device of each process.
        device_type: the kind of device, "cpu" or "cuda", see `traced_plan`.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
    """

    device: Device
    device_type: str
    gpus: int
    nodes: int


def ways_out(
    project: Project, plan: Mapping[str, Any], place: Place, *, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Returns the ways out of a plan, nearest first: three that fit, where there are so many.

    Single changes are planned until three fit. If fewer do, those that do not fit alone are planned together.

    Args:
        project: the project, opened with the config, which is not changed.
        plan: the plan of the config as data.
        place: where it is planned.
        say: a function that gets a line when a change is planned.
    """
    if trainer_arguments(project.graph) is None:
        return []
    planner = _Planner(project, plan, place, say)
    need = max((fit.least for fit in planner.fits(plan)), default=0)
    found: list[tuple[Change, WayOut]] = []
    optimizer = _adamw(project.graph)
    given = _given(project.graph)
    for change in changes_of(plan, given, optimizer):
        if sum(way.fits for _, way in found) == NUMBER:
            break
        if any(change.title == one.title and way.reason is None for one, way in found):
            continue
        found.append((change, planner.way(change)))
    # With a change that fits alone, no other one is needed.
    # One that brings nothing alone may do so after others: where the weights are elsewhere, activations are the rest.
    lacking = [one for one in found if one[1].reason is None and not one[1].fits]
    lacking.sort(key=lambda one: one[1].least)
    if lacking and lacking[0][1].least < need:
        found += _combined(planner, lacking, evaluation_change(given), fused_change(plan, optimizer))
    ways = (
        way if way.reason is not None or way.least < need else replace(way, reason="it needs as much memory as the run")
        for _, way in found
    )
    return [way.as_data() for way in nearest_first(ways)]


def _combined(
    planner: _Planner, lacking: list[tuple[Change, WayOut]], evaluation: Change | None, fused: Change | None
) -> list[tuple[Change, WayOut]]:
    """Returns plans of several changes together, until one fits; a change that does not help the others is left out.

    Args:
        planner: plans a change.
        lacking: changes with which the run does not fit yet, the most effective first.
        evaluation: a change that helps where the others have made the evaluation the largest part.
        fused: the same of the optimizer step.
    """
    best, best_way = lacking[0]
    found: list[tuple[Change, WayOut]] = []
    waiting = [change for change, _ in lacking[1:]]
    while len(found) < _MOST_COMBINED and not best_way.fits:
        # As long as the evaluation is the largest part, no change of the training helps.
        if evaluation is not None and best_way.phase in EVALUATIONS and not best.sets & evaluation.sets:
            change = evaluation
        elif waiting:
            change = waiting.pop(0)
        else:
            break
        if best.sets & change.sets:
            continue
        together = best.plus(change)
        way = planner.way(together)
        if way.reason is None and way.least < best_way.least:
            best, best_way = together, way
            found.append((together, way))
        elif change is evaluation:
            evaluation = None
    if fused is not None and not best_way.fits and best_way.at == OPTIMIZER_STEP and not best.sets & fused.sets:
        together = best.plus(fused)
        found.append((together, planner.way(together)))
    return found


class _Planner:
    def __init__(self, project: Project, plan: Mapping[str, Any], place: Place, say: Callable[[str], None]) -> None:
        self._project = project
        self._reader = reader_for(project.meta)
        self._place = place
        self._say = say
        self._rows: int = plan["settings"][ROWS]
        self._update: int = self._rows * plan["settings"][MICRO_BATCHES]
        self._cluster: Any = {"gpus": place.gpus, "nodes": place.nodes, "device_type": place.device_type}
        self._is_pipeline = plan["mesh"].get("pipeline", 1) > 1

    def way(self, change: Change) -> WayOut:
        """Returns the plan of a change; of smaller micro-batches, that of the largest that fits."""
        first = self._sized(change, self._divisions()[-1]) if change.divides else change
        refusal = self._refusal(first)
        if refusal is not None:
            return WayOut(title=change.title, assignments=self._assignments(change), reason=refusal)
        self._say(f"planning a way out: {change.title}")
        best: WayOut | None = None
        try:
            for planned in self._plans(change):
                way = self._filled(*planned)
                if way.fits and change.divides:
                    # Sizes follow from two traces; what is promised is traced itself.
                    way = self._filled(planned[0], *traced_plan(self._changed(planned[0]), **self._cluster))
                if best is None or way.fits or (best.verdict is Verdict.TOO_LARGE and way.least < best.least):
                    best = way
                if way.fits:
                    break
        except Exception as error:  # noqa: BLE001 - code of the user's model with settings that it may not support
            if best is None:
                self._say(f"not planned: {change.title} ({error_line(error)})")
                return WayOut(title=change.title, assignments=self._assignments(change), reason=error_line(error))
        assert best is not None  # noqa: S101 - there is a plan, or an error
        return best

    def fits(self, plan: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns whether the ranks of a plan fit on the device."""
        device = self._place.device
        return fit_plan(plan, device.hardware, held_bytes=device.held_bytes)

    def _divisions(self) -> list[tuple[int, int]]:
        """Returns the divisions of an update into smaller micro-batches: rows and number, the largest first."""
        smaller = [rows for rows in range(1, self._rows) if self._update % rows == 0]
        return [(rows, self._update // rows) for rows in reversed(smaller)]

    @staticmethod
    def _sized(change: Change, division: tuple[int, int]) -> Change:
        rows, number = division
        title = f"{change.title} ({rows} row{'' if rows == 1 else 's'}, {number} accumulated)"
        return replace(change, title=title, settings={**change.settings, ROWS: rows, MICRO_BATCHES: number})

    def _plans(self, change: Change) -> Any:
        """Yields the changes with their plans and their work."""
        sized = [self._sized(change, one) for one in self._divisions()] if change.divides else [change]
        if len(sized) == 1 or self._is_pipeline:
            # The stages of a pipeline are made for one number of rows, so that each number is planned itself.
            for one in sized:
                yield one, *traced_plan(self._changed(one), **self._cluster)
            return
        module, function = _BATCHES.split(":")
        smallest = self._changed(sized[-1])
        plans = getattr(import_module(module), function)(
            lambda hook: smallest.build_with(hook, MAIN),
            world_size=self._place.gpus * self._place.nodes,
            local_world_size=self._place.gpus,
            batches=self._divisions(),
            device_type=self._place.device_type,
        )
        for one, plan in zip(sized, plans, strict=True):
            if isinstance(plan, ForgatherError):
                raise plan
            yield one, *plan

    def _filled(self, change: Change, plan: Mapping[str, Any], work: RunWork) -> WayOut:
        worst = worst_fit(self.fits(plan))
        assert worst is not None  # noqa: S101 - the memory of the device is known
        hardware = self._place.device.hardware
        rank = next(rank for rank in plan["ranks"] if tuple(rank["ranks"]) == worst.ranks)
        largest = max(rank["phases"], key=lambda phase: phase["num_bytes"])
        host = sum(row["num_bytes"] for row in rank["host"])
        return WayOut(
            title=change.title,
            assignments=self._assignments(change),
            host_bytes=host,
            phase=largest["phase"],
            at=largest["at"],
            peak_bytes=worst.peak_bytes,
            least=worst.least,
            most=worst.most,
            available=worst.available,
            verdict=worst.verdict,
            seconds=step_of(work, hardware).seconds if hardware.gives_times else None,
        )

    def _assignments(self, change: Change) -> tuple[tuple[str, str], ...]:
        arguments = trainer_arguments(self._project.graph)
        assert arguments is not None  # noqa: S101 - the plan is that of a trainer
        factory = keyword(self._project.graph.targets[MAIN].value, "optimizer_factory")
        return (
            *((arguments.path(name), value_text(value)) for name, value in change.settings.items()),
            *((f"{MAIN}.{name}", text) for name, text in change.of_main.items()),
            *(
                (f"+{path_of(self._project.graph, factory)}.{name}", text)
                for name, text in change.of_optimizer.items()
                if factory is not None
            ),
        )

    def _changed(self, change: Change) -> Project:
        changed = copy.copy(self._project)
        changed.add_overrides(self._assignments(change))
        return changed

    def _refusal(self, change: Change) -> str | None:
        """Returns the first error that `fgcli check` finds in the changed config; None if there is none."""
        findings = check_project(self._changed(change), self._reader).findings
        errors = [one for one in findings if one.severity is Severity.ERROR]
        return f"[{errors[0].code}] {errors[0].message}" if errors else None


def _given(graph: Graph) -> dict[str, Any]:
    """Returns the settings of the trainer that changes depend on, as far as they are plain values."""
    arguments = trainer_arguments(graph)
    main = graph.targets[MAIN].value
    found: dict[str, Any] = {"trainer": main.constructor if isinstance(main, Call) else ""}
    for name in READ:
        node = arguments.get(name) if arguments is not None else None
        try:
            found[name] = None if node is None else plain_value(node, name)
        except ProjectError:
            found[name] = "computed"
    return found


def _adamw(graph: Graph) -> dict[str, Any] | None:
    """Returns the arguments of the optimizer factory if it is our AdamW and they are plain; None otherwise."""
    factory = keyword(graph.targets[MAIN].value, "optimizer_factory")
    if not isinstance(factory, Call) or factory.constructor != _ADAMW or factory.args:
        return None
    try:
        return {str(entry.key): plain_value(entry.value, str(entry.key)) for entry in factory.kwargs}
    except ProjectError:
        return None
