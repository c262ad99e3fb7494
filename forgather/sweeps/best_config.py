"""The best trial of a sweep as a config of a few lines, which extends the config of the sweep.

The input is the project of a sweep and the values of a trial; the output is the text of a config, which has been
rendered and compared with what the trial ran.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forgather.config.equality import same_value
from forgather.config.graph import Graph, Node
from forgather.config.insight.path_lookup import read_path, steps_along
from forgather.config.path import Key
from forgather.errors import ForgatherError, ProjectError
from forgather.project.configs import template_name
from forgather.project.project import Project
from forgather.project.template_environment import project_environment
from forgather.sweeps.trials import opened_with

OUTPUT_DIR = "output_dir"
"""The variable with the output folder, which each config has for itself."""


def config_text(project: Project, values: Mapping[str, str], name: str) -> str:
    """Returns the text of a config that extends the config of a sweep and has the values of a trial.

    Args:
        project: the project of the sweep, with its overrides.
        values: the values as YAML text, by path.
        name: the name of the config, without `.yaml`.

    Raises:
        ProjectError: FG567 if the templates have no block for one of the values.
    """
    chosen = opened_with(project, [*values.items()]).graph
    assignments = [
        (path, text)
        for path, text in [*project.overrides, *values.items()]
        if not _is_same(project.declared_graph, chosen, path)
    ]
    blocks: dict[str, dict[str, str]] = {}
    for path, text in assignments:
        steps = read_path(path.removeprefix("+"))
        if len(steps) != 2 or not all(isinstance(step, Key) for step in steps):
            raise _unwritable(path, assignments)
        block, key = (str(step.name) for step in steps if isinstance(step, Key))
        blocks.setdefault(block, {})[key] = text
    # With `default`, the options of the command line and configs that extend this one can change them.
    lines = [
        f"-- set {variable} = {variable} | default({json.dumps(value)})"
        for variable, value in project.variables.items()
        if variable != OUTPUT_DIR
    ]
    lines += [f"-- extends '{template_name(project.meta, project.config_name)}'", "", "[config_metadata]"]
    lines += ["    == super()", f"    -- set ns.config_name = {json.dumps(name)}"]
    for block, settings in blocks.items():
        lines += ["", f"[{block}]", "    == super()", *(f"    {key}: {text}" for key, text in settings.items())]
    text = "\n".join(lines) + "\n"
    _verify(project, text, name, assignments, chosen)
    return text


def _verify(project: Project, text: str, name: str, assignments: Sequence[tuple[str, str]], expected: Graph) -> None:
    """Raises an error if the config does not have the values, because its templates have no such block."""
    with tempfile.TemporaryDirectory() as folder:
        config = f"{name}.yaml"
        file = os.path.join(folder, template_name(project.meta, config))
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        environment = project_environment(project.meta)
        environment = replace(environment, searchpath=(folder, *environment.searchpath))
        written = Project.in_environment(project.meta, config, environment=environment)
        for path, _ in assignments:
            try:
                is_same = _is_same(written.graph, expected, path)
            except ForgatherError as error:
                raise _unwritable(path, assignments) from error
            if not is_same:
                raise _unwritable(path, assignments)


def _is_same(graph: Graph, other: Graph, path: str) -> bool:
    """Returns whether two graphs have the same value at a path."""
    found, wanted = _value(graph, path), _value(other, path)
    return found is not None and wanted is not None and same_value(found, wanted)


def _value(graph: Graph, path: str) -> Node | None:
    steps = read_path(path.removeprefix("+"))
    stops = steps_along(graph, steps)
    return stops[-1].node if len(stops) == len(steps) else None


def _unwritable(path: str, assignments: Sequence[tuple[str, str]]) -> ProjectError:
    words = " ".join(f"--set {name}={text}" for name, text in assignments)
    return ProjectError(
        f"{path!r} cannot be written as a line of a block",
        code="FG567",
        hint=f"write it into the config by hand, or run it with {words}",
    )
