"""The pipelines in the search for the best way to train a config.

Takes the `ChoiceProjects` of a search; gives the cells of all pipelines. The stages of two traced ranks serve all of
them, see `forgather/ml/planner/pipeline_plans.py`. What cannot fit by the sizes of weights and optimizer state is not
traced, nor is recomputation where the same pipeline fits without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from forgather.launch.choice_project import ChoiceProjects
from forgather.launch.in_process import MAIN
from forgather.launch.planning import Device, error_line
from forgather.planner.choices import CHUNKS, PIPELINE_TRAINER, POSITIONS, RECOMPUTE, SCHEDULE, Choice
from forgather.planner.fit import Verdict
from forgather.planner.pipeline_choices import Division, divisions, pipeline_choices, settings_of
from forgather.planner.ranking import Cell
from forgather.planner.work import RunWork
from forgather.project.project import Project

_PLANS = "forgather.ml.planner.pipeline_plans"
_TRACED = "forgather.ml.planner.memory"
_SIMPLEST = "Schedule1F1B"
_FASTER = "the pipeline fits without it, which is faster"

Plan = tuple[dict[str, Any], RunWork]


class PipelineSearch:
    """The cells of pipelines.

    Args:
        projects: the projects of choices.
        gpus: the number of devices of a machine.
        nodes: the number of machines.
        rows: the rows of an update.
        device: the device of each process.
        least: a function that returns the facts of a cell if a choice cannot fit by the sizes of its state alone.
        filled: a function that returns a cell with its needs and times.
        say: a function that gets a line when something is traced.
    """

    def __init__(
        self,
        projects: ChoiceProjects,
        *,
        gpus: int,
        nodes: int,
        rows: int,
        device: Device,
        least: Callable[[Choice], dict[str, Any] | None],
        filled: Callable[[Cell, Plan], Cell],
        say: Callable[[str], None],
    ) -> None:
        self._projects = projects
        self._gpus, self._nodes = gpus, nodes
        self._rows = rows
        self._device = device
        self._least = least
        self._filled = filled
        self._say = say
        self._plans: dict[bool, Any] = {}
        # The stages of a pipeline get whole rows.
        divides_rows = projects.given.get(POSITIONS, 1) > 1
        self.choices = () if divides_rows else pipeline_choices(gpus, nodes)
        self.traced = 0

    def cells_of(self, choice: Choice, earlier: Sequence[Cell]) -> list[Cell]:
        """Returns the cells of a pipeline, one for each division of an update.

        Args:
            choice: the pipeline.
            earlier: the cells of earlier choices.
        """
        found = divisions(choice, self._rows)
        if not found:
            reason = f"{self._rows} rows of an update are no number of micro-batches that the schedule allows"
            return [Cell(title=choice.title, rows=1, micro_batches=1, settings=choice.settings, reason=reason)]
        if (facts := self._reason(choice, found[0], earlier)) is not None:
            return [replace(_cell(choice, one), **facts) for one in found]
        try:
            plans = self._plans_of(choice)
            split = plans.split_spec(choice.settings[SCHEDULE], *_sizes(choice), self._device.hardware)
            return [self._drawn(choice, one, plans, split) for one in found]
        except import_module(_PLANS).IrregularPassError as error:
            if isinstance(error, import_module(_PLANS).TooFewBlocksError) and choice.settings[SCHEDULE] == _SIMPLEST:
                self._say(f"tracing {choice.title}: {error}")
                self.traced += 1
                return [self._traced(choice, found[-1])]
            reason = f"no trace of other stages says what it needs ({error}): plan a config with these settings"
            return [replace(_cell(choice, one), reason=reason) for one in found[-1:]]
        except Exception as error:  # noqa: BLE001 - code of the user's model under a strategy that it may not support
            return [replace(_cell(choice, one), reason=error_line(error)) for one in found]

    def _reason(self, choice: Choice, first: Division, earlier: Sequence[Cell]) -> dict[str, Any] | None:
        """Returns the facts of the cells of a pipeline that is not planned; None if it is."""
        other = choice.title.replace(", recomputed", " without recomputation")
        same = [cell for cell in earlier if cell.title == other]
        if choice.recomputes and same and all(cell.is_usable and cell.verdict is Verdict.FITS for cell in same):
            return {"reason": _FASTER}
        if (bound := self._least(choice)) is not None:
            return bound
        opened = self._open(choice, first)
        refusal = self._projects.refusal(opened, choice)
        return None if refusal is None else {"reason": refusal}

    def _open(self, choice: Choice, division: Division) -> Project:
        settings = settings_of(choice, division)
        return self._projects.open(replace(choice, settings=settings), (1, division.chunks * division.runs))

    def _plans_of(self, choice: Choice) -> Any:
        """Returns the plans of pipelines with or without recomputation. Stages are traced when they are needed."""
        recomputes = choice.recomputes
        if recomputes not in self._plans:
            plans = import_module(_PLANS)
            self._plans[recomputes] = plans.PipelinePlans(
                lambda divided: self._family(divided, recomputes=recomputes), device_type=self._device.type
            )
        return self._plans[recomputes]

    def _family(self, divides_backward: bool, *, recomputes: bool) -> Any:
        plans = import_module(_PLANS)
        kind = "two parts" if divides_backward else "one part"
        self._say(f"planning stages of pipelines{', recomputed' if recomputes else ''}, with backward passes in {kind}")
        self.traced += 1
        settings = {**plans.family_settings(divides_backward=divides_backward), RECOMPUTE: recomputes}
        choice = Choice(title="stages", trainer=PIPELINE_TRAINER, settings=settings)
        opened = self._projects.open(choice, (1, settings[CHUNKS]))
        return plans.trace_family(lambda hook: opened.build_with(hook, MAIN), device_type=self._device.type)

    def _drawn(self, choice: Choice, division: Division, plans: Any, split: dict[str, str]) -> Cell:
        cell = _cell(choice, division, split)
        plan = plans.plan(
            choice.settings[SCHEDULE],
            *_sizes(choice),
            replicas=choice.replicas,
            rows=1,
            parts=division.chunks,
            runs=division.runs,
            local_world_size=self._gpus,
        )
        return self._filled(cell, plan)

    def _traced(self, choice: Choice, division: Division) -> Cell:
        """Returns the cell from a trace of all its ranks at its own size."""
        cell = _cell(choice, division)
        opened = self._open(choice, division)
        plan_run = import_module(_TRACED).plan_run
        try:
            plan = plan_run(
                lambda hook: opened.build_with(hook, MAIN),
                world_size=self._gpus * self._nodes,
                local_world_size=self._gpus,
                device_type=self._device.type,
            )
        except Exception as error:  # noqa: BLE001 - code of the user's model under a strategy that it may not support
            return replace(cell, reason=error_line(error))
        return replace(self._filled(cell, plan), is_verified=True)


def _sizes(choice: Choice) -> tuple[int, int]:
    return choice.settings["pipeline_parallel_size"], choice.settings["stages_per_rank"]


def _cell(choice: Choice, division: Division, split: dict[str, str] | None = None) -> Cell:
    settings = settings_of(choice, division, split)
    return Cell(title=choice.title, rows=1, micro_batches=division.chunks * division.runs, settings=settings)
