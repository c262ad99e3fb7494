"""A config with another strategy, which is not written yet: the same leaf that `fgcli plan --find --write` writes.

Takes the `Project` of a config and a `Choice`; gives the text of the leaf, and a `Project` that reads it from a
temporary folder. What is checked and planned is therefore what is written.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

from forgather.config.equality import same_graph
from forgather.config.graph import Call, Graph, Node, is_null
from forgather.config.traverse import replace_nodes
from forgather.errors import PlanError, ProjectError, Severity
from forgather.launch.in_process import MAIN
from forgather.planner.choices import (
    DEFAULTS,
    GLOBAL_BATCH,
    MICRO_BATCHES,
    PIPELINE_TRAINER,
    RECOMPUTE,
    ROWS,
    TRAINER,
    TRAINERS,
    Choice,
    changes,
)
from forgather.planner.leaf import leaf_text
from forgather.project.check import check_project
from forgather.project.configs import template_name
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.project.targets import run_meta
from forgather.project.template_environment import project_environment
from forgather.project.trainer_arguments import trainer_arguments

_TRIED, _COMPUTED = "tried", "computed"
_WRITTEN = "forgather.ml.strategy.deepspeed_config:written_settings"
_SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "context_parallel_size")


class ChoiceProjects:
    """Makes projects of choices; a context manager that removes its temporary folder.

    Args:
        project: the project, opened with the config.
        gpus: the number of processes on each machine.
        nodes: the number of machines.

    Raises:
        PlanError: FG993 if the trainer of the config has no other strategies.
    """

    def __init__(self, project: Project, gpus: int, nodes: int = 1) -> None:
        self._project = project
        self._gpus = gpus
        self._nodes = nodes
        self._trainer = _trainer_of(project)
        self._reader = reader_for(project.meta)
        self._stack = ExitStack()

    def __enter__(self) -> ChoiceProjects:
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The settings of the config that choices decide, as far as they are plain, with the overrides of the user.

        Raises:
            PlanError: FG993 if settings are computed of which choices keep a part.
            TrainingError: FG741 if the DeepSpeed config cannot be read.
        """
        found = _given(self._project.graph)
        for name in ("fsdp_config", "deepspeed"):
            if found.get(name) == _COMPUTED:
                raise PlanError(
                    f"{name} is computed, and the ways that are searched keep its settings",
                    code="FG993",
                    hint=f"write its values, or search without them: --set trainer_args.{name}=~",
                )
        if "deepspeed" in found:
            module, function = _WRITTEN.split(":")
            found["deepspeed"] = getattr(import_module(module), function)(found["deepspeed"])
        return found

    def rows_per_update(self) -> int:
        """Returns the rows of an update of the config on the devices of the search, as a plan for them has.

        Raises:
            PlanError: FG993 if the rows are not plain numbers.
        """
        arguments = trainer_arguments(self._project.graph)
        if arguments is not None and (node := arguments.get("accumulate_grad_batches")) and not is_null(node):
            raise PlanError(
                "accumulate_grad_batches changes the rows of an update during the run",
                code="FG993",
                hint="search with a constant number: --set trainer_args.accumulate_grad_batches=~ --global-batch ROWS",
            )
        if arguments is not None and (total := arguments.global_batch()) is not None:
            return total
        values = {**DEFAULTS, **self.given}
        counts = {name: values[name] for name in (GLOBAL_BATCH, ROWS, MICRO_BATCHES, *_SIZES)}
        unknown = [f"{name} is {value}" for name, value in counts.items() if not _is_count(value)]
        if arguments is None or unknown:
            raise PlanError(
                f"the rows of an update do not follow from the config: {', '.join(unknown) or 'its args are no call'}",
                code="FG993",
                hint="give them with --global-batch ROWS",
            )
        replicas = arguments.replicas(self._gpus * self._nodes)
        return int(values[ROWS] * values[MICRO_BATCHES] * replicas)

    def text(self, choice: Choice, batch: tuple[int, int], *, name: str) -> str:
        """Returns the text of the leaf of a choice.

        Args:
            choice: the choice.
            batch: the rows of a micro-batch, and the number of micro-batches.
            name: the name of the config.
        """
        written = self._project.declared_graph
        keeps = choice.trainer == TRAINER and self._trainer != PIPELINE_TRAINER
        trainer = self._trainer if keeps else choice.trainer
        asked = run_meta(written).nproc_per_node
        return leaf_text(
            template_name(self._project.meta, self._project.config_name),
            {**self._set_values(), **changes(choice, batch, _given(written))},
            name=name,
            trainer=None if trainer == self._trainer else trainer,
            processes=None if asked == self._gpus else self._gpus,
        )

    def open(self, choice: Choice, batch: tuple[int, int]) -> Project:
        """Returns the project of a choice, with the overrides of the user."""
        meta = self._project.meta
        # One name for all, so that two of them differ in what they choose only. A folder of its own for each: the name
        # of the config in the search path is that of its template.
        config = f"{_TRIED}.yaml"
        folder = os.path.join(self._folder, str(len(os.listdir(self._folder))))
        file = os.path.join(folder, template_name(meta, config))
        os.makedirs(os.path.dirname(file))
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(self.text(choice, batch, name=config.removesuffix(".yaml")))
        environment = project_environment(meta)
        environment = replace(environment, searchpath=(folder, *environment.searchpath))
        # The leaf has those of the trainer's settings.
        overrides = [one for one in self._project.overrides if not _is_setting(one[0])]
        return Project.in_environment(
            meta, config, environment=environment, overrides=overrides, variables=self._project.variables
        )

    def refusal(self, opened: Project, choice: Choice) -> str | None:
        """Returns the first error that `fgcli check` finds in the project of a choice; None if there is none."""
        findings = check_project(opened, self._reader).findings
        errors = [one for one in findings if one.severity is Severity.ERROR]
        if errors:
            return f"[{errors[0].code}] {errors[0].message}"
        found = _constructor(opened.graph)
        if choice.trainer != TRAINER and found != choice.trainer:
            return f"the config keeps its trainer {found!r}: its templates do not read `trainer_class`"
        return None

    @staticmethod
    def differ_in_recomputation_only(one: Project, other: Project) -> bool:
        """Returns whether the projects of two choices build the same, but for the setting of recomputation."""
        return same_graph(_without_recomputation(one.graph), _without_recomputation(other.graph))

    def _set_values(self) -> dict[str, Any]:
        """Returns the trainer's settings that the user has set for this command and that no choice decides."""
        arguments = trainer_arguments(self._project.graph)
        found: dict[str, Any] = {}
        for path, _ in self._project.overrides:
            name = path.split(".")[-1]
            node = None if arguments is None or not _is_setting(path) else arguments.get(name)
            if node is not None and not _is_decided(path):
                found[name] = plain_value(node, name)
        return found


def unwritable_overrides(project: Project) -> list[str]:
    """Returns the paths of the overrides that a leaf would not contain: all but the trainer's settings."""
    return [path for path, _ in project.overrides if not _is_setting(path)]


def _given(graph: Graph) -> dict[str, Any]:
    arguments = trainer_arguments(graph)
    if arguments is None:
        return {}
    found: dict[str, Any] = {}
    for name in DEFAULTS:
        node = arguments.get(name)
        if node is not None:
            try:
                value = plain_value(node, name)
            except ProjectError:
                value = _COMPUTED
            # Templates leave settings open with `~`, which is the default.
            if value is not None:
                found[name] = value
    return found


def _trainer_of(project: Project) -> str:
    found = _constructor(project.graph)
    if found not in TRAINERS:
        raise PlanError(
            f"{MAIN!r} is {found!r}, whose strategies are not searched",
            code="FG993",
            hint="extend trainers/trainer.yaml, trainers/accel_trainer.yaml or trainers/pipeline_trainer.yaml",
        )
    return found


def _without_recomputation(graph: Graph) -> Graph:
    arguments = trainer_arguments(graph)
    if arguments is None:
        return graph

    def without(node: Node) -> Node:
        if node is not arguments.call:
            return node
        return replace(arguments.call, kwargs=tuple(one for one in arguments.call.kwargs if one.key != RECOMPUTE))

    return replace_nodes(graph, without)


def _constructor(graph: Graph) -> str:
    main = graph.targets[MAIN].value
    return main.constructor if isinstance(main, Call) else "no constructor"


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and value > 0)


def _is_setting(path: str) -> bool:
    return re.fullmatch(r"\+?(trainer_args|main\.args)\.\w+", path) is not None


def _is_decided(path: str) -> bool:
    return _is_setting(path) and path.split(".")[-1] in DEFAULTS
