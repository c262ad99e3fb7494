"""Writes the best way of a search: as a config that extends the given one, or as a file of another tool.

A config is checked before it is written, as a config of the project under its own name.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from forgather.errors import PlanError
from forgather.launch.choice_project import ChoiceProjects, unwritable_overrides
from forgather.launch.finding import Found, Search
from forgather.planner.choices import DEFAULTS
from forgather.planner.foreign_configs import FORMS, foreign_text
from forgather.planner.ranking import Cell
from forgather.project.configs import config_files
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments

_PLAIN = ("bf16", "fp16", "max_grad_norm")
"""The settings of the config that files of other tools repeat, besides those of the choice."""


def refuse_writing(project: Project, path: str, form: str) -> None:
    """Raises an error if the best way could not be written, before anything is planned.

    Args:
        project: the project, opened with the config.
        path: the file.
        form: "config", or one of `FORMS`.

    Raises:
        PlanError: FG993 if the file exists, if configs are not read from its folder, or if the plan is made with
            overrides that the file would not contain.
    """
    refuse_file(project, path, form)
    unwritable = unwritable_overrides(project)
    if form != "config":
        unwritable = [
            name for name, _ in project.overrides if name.lstrip("+").split(".")[-1] not in (*_PLAIN, *DEFAULTS)
        ]
    if unwritable:
        raise PlanError(
            f"--set {unwritable[0]} is part of the plan, and would not be part of {path!r}",
            code="FG993",
            hint="write the value into the config, and plan that",
        )


def refuse_file(project: Project, path: str, form: str) -> None:
    """Raises an error if a file cannot be made.

    Args:
        project: the project, opened with the config.
        path: the file.
        form: "config", or one of `FORMS`.

    Raises:
        PlanError: FG993 if the file exists, or if configs are not read from its folder.
    """
    file = target_file(project, path, form)
    if os.path.exists(file):
        raise PlanError(f"{path!r} exists already", code="FG993", hint="name a new file")
    folder = os.path.dirname(os.path.abspath(file))
    if form == "config" and not _is_inside(folder, _config_folder(project)):
        raise PlanError(
            f"{path!r} is not in the folder of the project's configs",
            code="FG993",
            hint=f"name a file in {_config_folder(project)}, or only the name of the config",
        )
    if not os.path.isdir(folder):
        raise PlanError(f"there is no folder {os.path.dirname(path)!r}", code="FG993", hint="make the folder first")


def write_best(project: Project, found: Found, search: Search, path: str, form: str) -> tuple[str, Cell]:
    """Writes the best way that can be expressed in a form; returns the file and the cell.

    Args:
        project: the project, opened with the config.
        found: the result of the search.
        search: what was searched for.
        path: the file.
        form: "config", or one of `FORMS`.

    Raises:
        PlanError: FG993 if no way of the ranking can be expressed in the form.
    """
    file = target_file(project, path, form)
    if form == "config":
        cell = found.ranking[0]
        name = os.path.basename(file).removesuffix(".yaml")
        with ChoiceProjects(project, search.gpus, search.nodes) as projects:
            choice = replace(found.choices[cell.title], settings=cell.settings)
            text = projects.text(choice, (cell.rows, cell.micro_batches), name=name)
    else:
        cell, text = _foreign(found, search, form, _plain_arguments(project))
    with open(file, "x", encoding="utf-8") as stream:
        stream.write(text)
    return file, cell


def _foreign(found: Found, search: Search, form: str, given: dict[str, Any]) -> tuple[Cell, str]:
    sizes = {"gpus": search.gpus, "nodes": search.nodes}
    for cell in found.ranking:
        text = foreign_text(form, cell.settings, cell.rows, cell.micro_batches, **sizes, given=given)
        if text is not None:
            return cell, text
    raise PlanError(
        f"none of the ways that fit can be written as {FORMS[form]}",
        code="FG993",
        hint="write a config: --write-as config",
    )


def target_file(project: Project, path: str, form: str) -> str:
    """Returns the file that is written; the name of a config alone is one of the project."""
    if form != "config":
        return path
    name = path if path.endswith(".yaml") else f"{path}.yaml"
    return name if os.path.dirname(name) else os.path.join(_config_folder(project), name)


def _config_folder(project: Project) -> str:
    """Returns the folder below which the project has the given config and others."""
    file = config_files(project.meta.searchdir, project.meta.config_prefix)[project.config_name]
    return os.path.normpath(os.path.join(file, *[os.pardir] * (project.config_name.count("/") + 1)))


def _is_inside(folder: str, parent: str) -> bool:
    return os.path.join(os.path.realpath(folder), "").startswith(os.path.join(os.path.realpath(parent), ""))


def _plain_arguments(project: Project) -> dict[str, Any]:
    arguments = trainer_arguments(project.graph)
    return {} if arguments is None else {name: arguments.plain(name) for name in _PLAIN}
