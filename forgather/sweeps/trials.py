"""The trials of a sweep, judged before anything runs.

The input is a `SweepSpec` and the project of its config; the output is a `Trial` for each combination of values, with
the error of `fgcli check` for one that cannot run, and the number of the trial that builds the same objects for a
duplicate.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgather.cache_file import digest_of
from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.graph import Graph
from forgather.config.insight.path_lookup import path_text
from forgather.config.load import load_value
from forgather.config.path import Key
from forgather.config.traverse import walk_places
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity, nearest
from forgather.planner.leaf import value_text
from forgather.project.check import check_project
from forgather.project.dynamic_args import without_options
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.project.trainer_arguments import trainer_arguments
from forgather.sweeps.space import Parameter, below, drawn, fault, grid_of
from forgather.sweeps.spec import TARGET, Method, SweepSpec


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep.

    Args:
        number: the number of the trial, from 0.
        values: the value of each parameter, by its path in the config.
        refusal: the first error of the config with these values, or None if it can run.
        same_as: the number of the earlier trial that builds the same objects, or None.
    """

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    refusal: Diagnostic | None = None
    same_as: int | None = None

    @property
    def runs(self) -> bool:
        """Whether the trial is run: it is neither refused nor a duplicate."""
        return self.refusal is None and self.same_as is None

    @property
    def assignments(self) -> list[tuple[str, str]]:
        """The values as pairs of path and YAML text, as for `--set`."""
        return [(path, value_text(value)) for path, value in self.values.items()]


class Trials:
    """Makes and judges the trials of a sweep, in order.

    Args:
        project: the project, opened with the config.
        spec: what the sweep is to do.
    """

    def __init__(self, project: Project, spec: SweepSpec) -> None:
        self._project = project
        self._reader = reader_for(project.meta)
        self._known: dict[str, int] = {}
        self.spec = _with_paths(project, spec)

    def planned(self) -> Iterator[Trial]:
        """Yields the trials of a grid, or of random values; nothing for a method that needs results.

        Raises:
            ProjectError: FG560 if the grid is infinite.
        """
        spec = self.spec
        if spec.method is Method.GRID:
            rows = grid_of(spec.parameters)
            rows = rows if spec.num_trials is None else rows[: spec.num_trials]
        elif spec.method is Method.RANDOM:
            rows = [drawn(spec.parameters, spec.seed, number) for number in range(spec.num_trials or 0)]
        else:
            rows = []
        for number, values in enumerate(rows):
            yield self.judged(number, values)

    def values_of(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Returns the values of a trial of the journal, by path.

        Args:
            texts: the values as YAML text.
        """
        return {path: plain_value(load_value(text), path) for path, text in texts.items()}

    def judged(self, number: int, values: Mapping[str, Any]) -> Trial:
        """Returns the trial with some values, with what speaks against running it.

        Args:
            number: the number of the trial.
            values: the values by path.
        """
        trial = Trial(number=number, values=dict(values))
        opened = opened_with(self._project, trial.assignments)
        try:
            errors = [one for one in check_project(opened, self._reader).findings if one.severity is Severity.ERROR]
            if errors:
                return replace(trial, refusal=errors[0])
            built = built_digest(opened.graph)
        except ForgatherError as error:
            return replace(trial, refusal=error.diagnostic)
        first = self._known.setdefault(built, number)
        return trial if first == number else replace(trial, same_as=first)

    def remember(self, number: int, texts: Mapping[str, str]) -> None:
        """Notes a trial of an earlier process of the sweep, so that a later one that builds the same is a duplicate.

        Args:
            number: the number of the trial.
            texts: its values as YAML text, by path.
        """
        self._known.setdefault(built_digest(opened_with(self._project, [*texts.items()]).graph), number)


def opened_with(project: Project, assignments: Sequence[tuple[str, str]]) -> Project:
    """Returns a copy of a project with further overrides, which shares the rendered text.

    Args:
        project: the project.
        assignments: the pairs of path and YAML text.
    """
    # The text does not depend on overrides, and rendering it is most of the work.
    project.declared_graph  # noqa: B018 - computed once, before it is copied
    opened = copy.copy(project)
    opened.add_overrides(assignments)
    return opened


def built_digest(graph: Graph) -> str:
    """Returns a text that is the same for two configs that build the same objects; their sweeps may differ."""
    targets = {name: entry for name, entry in without_options(graph).targets.items() if name != TARGET}
    return digest_of(emit_yaml(replace(graph, targets=targets)).encode("utf-8", "surrogatepass"))


def _with_paths(project: Project, spec: SweepSpec) -> SweepSpec:
    """Returns the sweep with the full path of each parameter: `learning_rate` may be one of the trainer's arguments.

    Raises:
        ProjectError: FG562 if a path does not exist, with near names.
    """
    paths = {path_text(path) for path, _ in walk_places(project.graph) if path and path[0] != Key(TARGET)}
    arguments = trainer_arguments(project.graph)
    found: list[Parameter] = []
    own_folder = "meta.output_dir" if arguments is None else arguments.path("output_dir")
    for parameter in spec.parameters:
        path = parameter.path
        if path.removeprefix("+") not in paths and not path.startswith("+"):
            setting = arguments.path(path) if arguments is not None and "." not in path else None
            if setting is None or setting.startswith("+"):
                raise _no_such_path(path, paths)
            path = setting
        if path.removeprefix("+") == own_folder.removeprefix("+"):
            message = f"the sweep changes {path!r}, and each trial has an output folder of its own"
            raise fault(message, below(f"{TARGET}.parameters", parameter.path), "remove it from the parameters")
        if any(one.path == path for one in found):
            raise fault(
                f"the sweep changes {path!r} twice", f"{TARGET}.parameters", "keep one of the two lists of values"
            )
        found.append(Parameter(path, parameter.distribution))
    return replace(spec, parameters=tuple(found))


def refuse_set_parameters(project: Project, spec: SweepSpec) -> None:
    """Raises an error if a parameter has a value of its own on the command line, which no trial would have.

    Raises:
        ProjectError: FG560 with the name of the parameter.
    """
    for path, text in project.overrides:
        if any(parameter.path.removeprefix("+") == path.removeprefix("+") for parameter in spec.parameters):
            message = f"--set gives {path} the value {text}, and the sweep changes it"
            raise fault(message, f"{TARGET}.parameters", f"leave out --set {path}, or the parameter")


def _no_such_path(path: str, paths: set[str]) -> ProjectError:
    ends = [one for one in paths if one.split(".")[-1] == path.split(".")[-1]]
    hint = nearest(path, ends or sorted(paths)) or f"+{path} adds a value that the config does not have"
    return ProjectError(
        f"the sweep changes {path!r}, and the config has no such value",
        code="FG562",
        path=f"{TARGET}.parameters",
        hint=hint,
    )
