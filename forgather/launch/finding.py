"""The search for the best way to train a config on some devices: every legal choice, planned and ranked.

Takes a `Project`, a number of devices and their facts; gives the ranking as plain data. One pair of traces serves all
micro-batches of a choice. What cannot fit by the sizes of weights and optimizer state alone is not traced. The first
five of the ranking are traced again at their own size and with all blocks of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from forgather.errors import ForgatherError
from forgather.launch.choice_project import ChoiceProjects
from forgather.launch.in_process import MAIN
from forgather.launch.pipeline_search import PipelineSearch
from forgather.launch.planning import Device, error_line
from forgather.launch.time_planning import step_of
from forgather.planner.choices import CHUNKS, Choice, batches, choices
from forgather.planner.efficiency import Range
from forgather.planner.fit import Verdict, fit_plan, overheads, worst_fit
from forgather.planner.ranking import Cell, ranked, refuse_if_nothing_fits
from forgather.planner.storage import offloaded_rows
from forgather.planner.work import RunWork
from forgather.project.project import Project

VERIFIED = 5
"""The number of cells at the top of the ranking that are traced in full."""
_BATCHES = "forgather.ml.planner.batch_plans:plans_by_offload"
_BOTH = "forgather.ml.planner.batch_plans:plans_by_recomputation"
_IN_FULL = "forgather.ml.planner.batch_plans:full_plans"

_Plans = list[tuple[dict[str, Any], RunWork] | ForgatherError]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for.

    Args:
        gpus: the number of devices of a machine.
        nodes: the number of machines.
        device: the device of each process.
        by: the order of the ranking, one of `forgather.planner.ranking.ORDERS`.
        price: the price of a device for an hour; None if it is unknown.
        rows: the rows of an update; None for those of the config.
        say: a function that gets a line when a choice is planned.
    """

    gpus: int
    nodes: int
    device: Device
    by: str = "tokens"
    price: float | None = None
    rows: int | None = None
    say: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    Args:
        cells: all cells, with those that cannot be used.
        ranking: those that may be used, best first.
        choices: the choice of each title.
        rows: the rows of an update.
        traced: the number of choices that were traced.
        interruption: what ended the search early; None of a whole search.
    """

    cells: tuple[Cell, ...]
    ranking: tuple[Cell, ...]
    choices: Mapping[str, Choice]
    rows: int
    traced: int
    interruption: KeyboardInterrupt | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the ranking and the other cells as plain data."""
        return {
            "rows_per_update": self.rows,
            "num_cells": len(self.cells),
            "num_traced_choices": self.traced,
            "is_complete": self.interruption is None,
            "ranking": [cell.as_data() for cell in self.ranking],
            "rejected": [cell.as_data() for cell in self.cells if not cell.is_usable],
        }


def find(project: Project, search: Search) -> Found:
    """Returns the ways to train a config, ranked.

    Args:
        project: the project, opened with the config.
        search: what is searched for.

    Returns:
        The ranking; after Ctrl-C, that of what was planned until then.

    Raises:
        PlanError: FG992 if nothing fits; FG993 if the trainer of the config has no other strategies.
        KeyboardInterrupt: after Ctrl-C, if nothing that fits was planned until then.
    """
    cells: list[Cell] = []
    ranking: list[Cell] = []
    interruption = None
    with ChoiceProjects(project, search.gpus, search.nodes) as projects:
        rows = search.rows if search.rows is not None else projects.rows_per_update()
        found = choices(search.gpus, search.nodes, projects.given)
        planner = _Planner(search, projects, rows, found)
        by_title = {choice.title: choice for choice in found}
        try:
            traced = [choice for choice in found if choice.like is None]
            for number, choice in enumerate(traced, start=1):
                if choice.offloads and _fits_without(cells, search.by):
                    reason = "the model fits without it, which is faster"
                    cells += _cells(choice, batches(rows, choice.replicas)[:1], reason=reason)
                    continue
                offloaded = [one for one in found if one.like == choice.title]
                cells += planner.cells_of(choice, offloaded, f"{number} of {len(traced)}")
            pipelines = planner.pipelines()
            for choice in pipelines.choices:
                by_title[choice.title] = choice
                cells += pipelines.cells_of(choice, cells)
                planner.traced += pipelines.traced
                pipelines.traced = 0
            refuse_if_nothing_fits(cells)
            ranking = planner.verified(ranked(cells, search.by), by_title)
        except KeyboardInterrupt as stop:
            if not any(cell.is_usable for cell in cells):
                raise
            interruption = stop
    kept = {(cell.title, cell.rows, cell.settings.get(CHUNKS)): cell for cell in [*cells, *ranking]}
    refuse_if_nothing_fits([*kept.values()])
    return Found(
        cells=tuple(kept.values()),
        ranking=tuple(ranked(kept.values(), search.by)),
        choices=by_title,
        rows=rows,
        traced=planner.traced,
        interruption=interruption,
    )


class _Planner:
    def __init__(self, search: Search, projects: ChoiceProjects, rows: int, choices: Sequence[Choice]) -> None:
        self._search = search
        self._projects = projects
        self._rows = rows
        self._choices = choices
        self._shared: dict[tuple[str, tuple[tuple[str, ...], ...]], Mapping[tuple[str, ...], _Plans]] = {}
        self._state: tuple[int, int, int] | None = None
        self.traced = 0

    def cells_of(self, choice: Choice, offloaded: Sequence[Choice], place: str) -> list[Cell]:
        """Returns the cells of a choice and of those that only offload more, one for each size of micro-batches.

        Args:
            choice: the choice.
            offloaded: the choices whose needs follow from the trace of this one.
            place: that of the choice in the search.
        """
        sizes = batches(self._rows, choice.replicas)
        if not sizes:
            rows = f"{self._rows} row{'' if self._rows == 1 else 's'}"
            reason = (
                f"{rows} of an update cannot be divided among {choice.replicas} replicas: "
                f"give --global-batch a multiple of {choice.replicas}"
            )
            return [Cell(title=choice.title, rows=1, micro_batches=1, settings={}, reason=reason)]
        opened = self._projects.open(choice, sizes[0])
        refusal = self._projects.refusal(opened, choice)
        if refusal is not None:
            return [cell for one in (choice, *offloaded) for cell in _cells(one, sizes, reason=refusal)]
        refused = {one.title: self._projects.refusal(self._projects.open(one, sizes[0]), one) for one in offloaded}
        usable = [one for one in offloaded if refused[one.title] is None]
        cells = [cell for one in offloaded for cell in _cells(one, sizes, reason=refused[one.title]) if cell.reason]
        bound = self._least(choice)
        if bound is not None and not usable:
            return [*_cells(choice, sizes, **bound), *cells]
        self._search.say(f"planning {choice.title} ({place})")
        self.traced += 1
        planned = [choice, *usable]
        try:
            plans = self._plans(choice, opened, sizes, tuple(one.offloads for one in usable))
        except Exception as error:  # noqa: BLE001 - code of the user's model under a strategy that it may not support
            return [*(cell for one in planned for cell in _cells(one, sizes, reason=error_line(error))), *cells]
        self._know_state(plans[()])
        for one in planned:
            found = plans[one.offloads if one.like is not None else ()]
            cells += [self._filled(*pair) for pair in zip(_cells(one, sizes), found, strict=True)]
        return cells

    def _plans(
        self, choice: Choice, opened: Project, sizes: Sequence[tuple[int, int]], offloads: tuple[tuple[str, ...], ...]
    ) -> Mapping[tuple[str, ...], _Plans]:
        """Returns the plans of a choice, by what is offloaded; those of the same one without recomputation are kept."""
        if (shared := self._shared.pop((choice.title, offloads), None)) is not None:
            return shared
        other = choice.without_recomputation(self._choices)
        if other is not None and self._is_shared(opened, other, sizes[0]):
            # What fails for both may be right for one of them, which is then planned alone.
            with suppress(Exception):
                both = self._traced(_BOTH, opened, sizes, offloads=offloads)
                if False in both:
                    self._shared[other.title, offloads] = both[False]
                recomputing: Mapping[tuple[str, ...], _Plans] = both[True]
                return recomputing
        found: Mapping[tuple[str, ...], _Plans] = self._traced(_BATCHES, opened, sizes, offloads=offloads)
        return found

    def _is_shared(self, opened: Project, other: Choice, size: tuple[int, int]) -> bool:
        """Returns whether one trainer can be traced for a choice and for the same one without recomputation."""
        project = self._projects.open(other, size)
        return (
            self._projects.differ_in_recomputation_only(opened, project)
            and self._projects.refusal(project, other) is None
        )

    def _traced(self, place: str, opened: Project, sizes: Sequence[tuple[int, int]], **more: Any) -> Any:
        module, function = place.split(":")
        plan = getattr(import_module(module), function)
        gpus, nodes = self._search.gpus, self._search.nodes
        return plan(
            lambda hook: opened.build_with(hook, MAIN),
            world_size=gpus * nodes,
            local_world_size=gpus,
            batches=sizes,
            device_type=self._search.device.type,
            **more,
        )

    def _know_state(self, plans: _Plans) -> None:
        """Remembers the sizes of weights, gradients and optimizer state if a plan has them."""
        found = next((one[0] for one in plans if not isinstance(one, ForgatherError)), None)
        if self._state is None and found is not None and found["optimizer_bytes"] is not None:
            share = found["trainable"] / found["parameters"]
            self._state = (found["model_bytes"], int(found["model_bytes"] * share), found["optimizer_bytes"])

    def _least(self, choice: Choice) -> dict[str, Any] | None:
        """Returns the least need of a choice if it is above the memory of a device, by the sizes of the state alone."""
        hardware = self._search.device.hardware
        if self._state is None or hardware.memory_bytes is None:
            return None
        state = choice.least_state(*self._state)
        least = state + sum(one.least for one in overheads(hardware.kind, state, {}))
        available = hardware.memory_bytes - self._search.device.held_bytes
        if least <= available:
            return None
        rows = (("weights, gradients and optimizer state", state),)
        return {"least": least, "most": least, "available": available, "largest": rows, "is_bound": True}

    def _filled(
        self, cell: Cell, found: tuple[dict[str, Any], RunWork] | ForgatherError, *, verified: bool = False
    ) -> Cell:
        if isinstance(found, ForgatherError):
            # Such as data with fewer rows than the micro-batches of all replicas.
            return replace(cell, reason=error_line(found))
        plan, work = found
        device = self._search.device
        fits = fit_plan(plan, device.hardware, held_bytes=device.held_bytes)
        worst = worst_fit(fits)
        rank = plan["ranks"][0]
        phase = max(rank["phases"], key=lambda phase: phase["num_bytes"])
        peak = phase["num_bytes"]
        step = step_of(work, device.hardware) if device.hardware.gives_times else None
        price = self._search.price
        tokens = None if step is None else step.tokens_per_second
        return replace(
            cell,
            verdict=Verdict.FITS if worst is None else worst.verdict,
            least=peak if worst is None else worst.least,
            most=peak if worst is None else worst.most,
            available=None if worst is None else worst.available,
            largest=tuple((row["name"], row["num_bytes"]) for row in phase["rows"]),
            tokens_per_second=tokens,
            seconds=None if step is None else step.seconds,
            price=_price(price, tokens, work.world_size),
            host_bytes=sum(row.least for row in offloaded_rows(plan, processes=self._search.gpus)),
            is_verified=verified,
        )

    def pipelines(self) -> PipelineSearch:
        """Returns the search among pipelines; one device has none."""
        search = self._search
        return PipelineSearch(
            self._projects,
            gpus=search.gpus,
            nodes=search.nodes,
            rows=self._rows,
            device=search.device,
            least=self._least,
            filled=self._filled,
            say=search.say,
        )

    def verified(self, ranking: list[Cell], by_title: Mapping[str, Choice]) -> list[Cell]:
        """Returns the ranking whose first cells were traced in full, those of one choice by one trainer."""
        while cells := _unverified(ranking):
            title = cells[0].title
            sizes = [(cell.rows, cell.micro_batches) for cell in cells]
            self._search.say(f"verifying {title}, {', '.join(f'{rows} x {number}' for rows, number in sizes)} rows")
            try:
                plans = self._traced(_IN_FULL, self._projects.open(by_title[title], sizes[0]), sizes)
            except Exception as error:  # noqa: BLE001 - code of the user's model in all its blocks
                verified = [replace(cell, reason=error_line(error)) for cell in cells]
            else:
                verified = [self._filled(*one, verified=True) for one in zip(cells, plans, strict=True)]
            filled = {cell.rows: cell for cell in verified}
            ranking = [filled.get(cell.rows, cell) if cell.title == title else cell for cell in ranking]
            usable = ranked(ranking, self._search.by)
            ranking = [*usable, *(one for one in ranking if not one.is_usable)]
        return ranking


def _cells(choice: Choice, sizes: Sequence[tuple[int, int]], **facts: Any) -> list[Cell]:
    """Returns a cell for each size of micro-batches."""
    return [
        Cell(title=choice.title, rows=size, micro_batches=number, settings=choice.settings, **facts)
        for size, number in sizes
    ]


def _fits_without(cells: Sequence[Cell], by: str) -> bool:
    """Returns whether all that was planned surely fits, so that offload could only make it slower."""
    usable = [cell for cell in cells if cell.reason is None]
    return by != "memory" and bool(usable) and all(cell.verdict is Verdict.FITS for cell in usable)


def _unverified(ranking: Sequence[Cell]) -> list[Cell]:
    """Returns the first of the first cells that are not yet traced in full, and those of the same choice.

    A pipeline with many micro-batches takes minutes to trace: it stays drawn from traces of its stages.
    """
    found = [
        cell for cell in ranking[:VERIFIED] if cell.is_usable and not cell.is_verified and CHUNKS not in cell.settings
    ]
    return [cell for cell in found if cell.title == found[0].title]


def _price(price: float | None, tokens: Range | None, processes: int) -> Range | None:
    """Returns the price of a billion tokens."""
    return None if price is None or tokens is None else tokens.under(1e9 * price * processes / 3600)
