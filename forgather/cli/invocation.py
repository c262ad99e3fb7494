"""The parsed arguments of one `fgcli` command.

The input is the namespace of argparse; the output is the project and the config that the arguments name. The modules
that read configs are imported only when a project is opened.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.project.project import Project


def refuse_lost_folder() -> None:
    """Raises an error if the working folder was removed, since relative paths would then fail with various errors.

    Raises:
        ProjectError: FG400 if the working folder does not exist.
    """
    try:
        os.getcwd()
    except OSError:
        from forgather.errors import ProjectError

        message = "the working folder does not exist any more"
        raise ProjectError(message, code="FG400", hint="go to a folder that exists: cd ~") from None


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The parsed arguments of one command.

    Args:
        options: the namespace of argparse.
        arguments: the words of the command line as they were typed, without the program name.
        variables: the values of the options that the config declares, by Jinja variable.
        handed: the words after `--`, which are passed to the program that the command starts.
    """

    options: argparse.Namespace
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    handed: tuple[str, ...] = ()

    @property
    def project_dir(self) -> str | None:
        """The folder that `-p` names, or None if the option is not given."""
        folder: str | None = self.options.project
        return folder

    @property
    def config(self) -> str | None:
        """The config that `-t` names, or None if the option is not given."""
        config: str | None = self.options.config
        return config

    @property
    def check_command(self) -> str:
        """The `fgcli check` command that lists all errors of the same config."""
        import shlex

        words = ["fgcli"]
        for option, value in (("-p", self.project_dir), ("-t", self.config)):
            words += [option, value] if value else []
        changes = getattr(self.options, "overrides", None) or ()
        return shlex.join([*words, "check", *(word for path, text in changes for word in ("--set", f"{path}={text}"))])

    @property
    def project_hint(self) -> str | None:
        """The project folder, to which file names in errors are relative, or None if there is no project."""
        from forgather.errors import ProjectError
        from forgather.project.workspace import find_project

        try:
            return find_project(self.project_dir)
        except ProjectError:
            # A command that needs a project reports this error itself.
            return None

    def open_project(self, config: str | None = None) -> Project:
        """Returns the project with the config that the arguments name; options and overrides are applied.

        Args:
            config: the name of a config, or None for the one that `-t` names.

        Raises:
            ForgatherError: if the project cannot be read.
            ProjectError: FG418 if `-o` or `--html` names a template or `meta.yaml` of the project.
        """
        from forgather.project.project import Project

        overrides = getattr(self.options, "overrides", None) or ()
        name = config or self.config
        project = Project(name, self._folder_of(name), overrides=overrides, **self.variables)
        for option in ("output", "html"):
            _refuse_overwriting(project, getattr(self.options, option, None))
        return project

    def undeclared(self) -> Project:
        """Returns the project without options and overrides, for reading the options that the config declares."""
        from forgather.project.project import Project

        return Project(self.config, self._folder_of(self.config))

    def _folder_of(self, config: str | None) -> str:
        """Returns the folder of the project: from `-p`, or from a config that is given as a file name."""
        if self.project_dir is not None:
            # Project(".") searches upwards for a project, while `-p .` means exactly this folder.
            return self.project_dir and os.path.join(self.project_dir, "")
        if config and config.endswith(".yaml") and os.sep in config and os.path.isfile(config):
            from forgather.project.workspace import project_above

            return project_above(os.path.dirname(config)) or "."
        return "."


def _refuse_overwriting(project: Project, output: str | None) -> None:
    """Raises FG418 if an output file is on the project's template search path, or the project's `meta.yaml`."""
    if not output or not os.path.isfile(output):
        return
    file = os.path.realpath(output)
    folders = [os.path.join(os.path.realpath(folder), "") for folder in project.meta.searchpath]
    meta = os.path.realpath(os.path.join(project.meta.project_dir, "meta.yaml"))
    if file == meta or file.startswith(tuple(folders)):
        from forgather.errors import ProjectError

        message = f"{output!r} is a file of the project, and would be overwritten"
        raise ProjectError(message, code="FG418", hint="name another file")
