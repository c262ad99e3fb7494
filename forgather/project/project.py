"""`Project`: one config of one project, with all stages from its text to its objects.

The input is the name of a config, a project folder, overrides and variables; the output is the rendered text, the
graph, and objects. Rendering and loading happen once, on first use. Every call constructs new objects, and nothing is
constructed from a config that has errors. The modules of the stages after loading are imported on first use, because
commands such as `fgcli pp` need none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forgather.config.render import render
from forgather.config.rendered import RenderedText
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity, UnknownTargetError
from forgather.launcher_env import RequestedProcesses, compared_by_launcher, requested
from forgather.process_limits import limits_while_reading
from forgather.project.configs import choose_config, config_stem, template_name
from forgather.project.dynamic_args import read_options, unread_options
from forgather.project.graph_secrets import note_graph
from forgather.project.metadata import ProjectMeta
from forgather.project.metadata_cache import load_meta
from forgather.project.rendered_variable import RENDERED, reads_rendered
from forgather.project.template_environment import project_environment
from forgather.project.workspace import find_project
from forgather.redaction import note, note_secrets

if TYPE_CHECKING:
    from forgather.config.environment import ConfigEnvironment
    from forgather.config.graph import Graph
    from forgather.config.materialize import Hook
    from forgather.project.error_location import Writers
    from forgather.project.setting_precedence import Precedence
    from forgather.project.trust import Trust

_Construction = tuple[str, str, tuple[str, ...]]
# The constructions that are running in this context, outermost first; paths in `from_project` are relative to the last.
_RUNNING: ContextVar[tuple[_Construction, ...]] = ContextVar("constructions_under_way", default=())


class Project:
    """One config of one project.

    Args:
        config: the name of the config, with or without `.yaml`; None for the project's default config.
        project_dir: the project's folder; "." also finds the nearest project above the working folder.
        overrides: the pairs of graph path and YAML text, as for `--set`.
        trust: whether all code that this config calls is allowed, whatever the user's list (`fgcli trust`) contains.
        variables: the Jinja variables. `nproc_per_node` also replaces the number of processes that the config requests
            for a trainer that is built by this object; 1 trains in the current process.

    Raises:
        ForgatherError: if there is no such project or config. A broken config raises its error on first use.
    """

    def __init__(
        self,
        config: str | None = None,
        project_dir: str | os.PathLike[str] = ".",
        *,
        overrides: Sequence[tuple[str, str]] = (),
        trust: bool = False,
        **variables: Any,
    ) -> None:
        folder = os.fspath(project_dir)
        self.meta: ProjectMeta = load_meta(find_project(None if folder == "." else folder))
        self.config_name: str = choose_config(self.meta, config)
        self.overrides: tuple[tuple[str, str], ...] = tuple(overrides)
        self.variables: Mapping[str, Any] = variables
        self._is_trusted = trust
        self._environment: ConfigEnvironment | None = None
        self._template: str | None = None

    @classmethod
    def in_environment(
        cls,
        meta: ProjectMeta,
        config_name: str,
        *,
        environment: ConfigEnvironment,
        overrides: Sequence[tuple[str, str]] = (),
        variables: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> Project:
        """Returns a config whose templates see the given environment instead of the current one.

        Args:
            meta: the facts of the project.
            config_name: the name of an existing config, including `.yaml`.
            environment: the search path, variables and clock of the render.
            overrides: the pairs of graph path and YAML text.
            variables: the Jinja variables.
            template: the name of the template to render; None for the template of the config.
        """
        project = cls.__new__(cls)
        project.meta, project.config_name = meta, config_name
        project.overrides, project.variables = tuple(overrides), dict(variables or {})
        project._environment, project._template, project._is_trusted = environment, template, False
        return project

    def __repr__(self) -> str:
        return f"Project({self.config_name!r}, {self.meta.project_dir!r})"

    @cached_property
    def rendered(self) -> RenderedText:
        """The rendered text of the config, with the origin of every line."""
        environment = self._environment or project_environment(self.meta)
        variables = {**environment.variables, "config_stem": self.config_stem}
        environment = replace(environment, now=environment.now or datetime.now(), variables=variables)
        self._environment = environment
        with self._named_in_errors(), self._reading():
            rendered = render(environment, self._template or template_name(self.meta, self.config_name), self.variables)
        for name, value in {**rendered.env_reads, **self.variables}.items():
            note(name, value)
        # A secret may appear under another name in the rendered text than in the template.
        for text in (rendered.text, *(source.text for source in rendered.sources.values())):
            note_secrets(text)
        return rendered

    def set_clock(self, now: datetime) -> None:
        """Sets the time that the clock functions of the templates return.

        This method must be called before the first render, so that all processes of a run render the same text.
        """
        self._environment = replace(project_environment(self.meta), now=now)

    def add_overrides(self, assignments: Sequence[tuple[str, str]]) -> None:
        """Adds overrides after the existing ones, so that the new overrides have precedence."""
        if assignments:
            self.overrides = (*self.overrides, *assignments)
            # Both are cached and depend on the overrides.
            for derived in ("graph", "diagnostics"):
                self.__dict__.pop(derived, None)

    @property
    def instant(self) -> datetime:
        """The time that the clock functions of the templates returned, with its time zone."""
        # Reading `rendered` renders the config, which sets the time.
        now = self._environment.now if self.rendered and self._environment else None
        return (now or datetime.now()).astimezone()

    @cached_property
    def declared_graph(self) -> Graph:
        """The graph of the config's files, before overrides."""
        from forgather.config.load import load

        rendered = self.rendered
        with self._named_in_errors(), self._reading():
            graph = load(rendered)
        note_graph(graph)
        return graph

    @cached_property
    def graph(self) -> Graph:
        """The graph of the config, with overrides applied."""
        from forgather.project.setting_precedence import settable_paths, without_duplicate_settings

        graph = self.declared_graph
        if self.overrides:
            from forgather.config.override import override

            with self._named_in_errors(), self._reading():
                graph = override(graph, settable_paths(graph, self.overrides))
            note_graph(graph)
        return without_duplicate_settings(graph, self.precedence)

    @property
    def writers(self) -> Writers:
        """The finder of the lines and options that set the values of the graph."""
        from forgather.project.error_location import Writers

        return Writers(self.meta.project_dir, self.graph, self.declared_graph)

    @property
    def precedence(self) -> Precedence:
        """The order of the templates, which decides which of two conflicting settings takes effect."""
        from forgather.project.setting_precedence import Precedence

        return Precedence(self.meta.project_dir, (use.file for use in self.rendered.templates))

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the targets, in the order of the config."""
        return tuple(self.graph.targets)

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All findings about the project and this config that are known without constructing anything."""
        from forgather.config.lint.graph_check import check_graph

        found = [*self.meta.diagnostics, *self.rendered.diagnostics, *self.graph.diagnostics, *check_graph(self.graph)]
        options, faults = read_options(self.graph)
        found += unread_options(options, self.rendered.reads)
        # Commands that do not use the option continue without it.
        found += [replace(fault.error.diagnostic, severity=Severity.WARNING) for fault in faults]
        return tuple(replace(finding, context=self._context(finding.context)) for finding in dict.fromkeys(found))

    @property
    def config_stem(self) -> str:
        """The path of the config without suffix, with `.` for `/`; it is the default for the config's name."""
        return config_stem(self.config_name)

    @property
    def lineage(self) -> tuple[str, ...]:
        """The config and the templates that it extends, as lines for messages."""
        chain = self.__dict__["rendered"].extends_chain if "rendered" in self.__dict__ else ()
        return (f"config {self.config_name}", *(f"extends {name}" for name in chain))

    def __call__(self, *targets: str | Sequence[str], **variables: Any) -> Any:
        """Builds targets in one construction.

        Args:
            targets: the names of the targets; `main` if none is given. A list of names returns a dict.
            variables: the values for `!var`.

        Returns:
            The object of a single target, a tuple for several targets, or a dict for a list.

        Raises:
            ForgatherError: if the config has errors, or a target or variable is missing.
        """
        if len(targets) == 1 and not isinstance(targets[0], str):
            return self._build(tuple(targets[0]), variables)
        names = tuple(name for name in targets if isinstance(name, str)) or ("main",)
        built = self._build(names, variables)
        return built[names[0]] if len(names) == 1 else tuple(built[name] for name in names)

    def build_with(self, hook: Hook, target: str) -> Any:
        """Returns the object of a target; `hook` gets each constructor, and returns what is called in its place."""
        return self._build((target,), {}, hook)[target]

    def refuse_errors(self) -> None:
        """Raises an error if the config has a finding of severity "error".

        Raises:
            ProjectError: the first such finding as an exception, with the other ones attached.
        """
        self.refuse(self.diagnostics)

    def refuse(self, findings: Sequence[Diagnostic]) -> None:
        """Raises an error if one of the given findings has the severity "error".

        Raises:
            ProjectError: the first such finding as an exception, with the other ones attached.
        """
        errors = [found for found in findings if found.severity is Severity.ERROR]
        if errors:
            first, *rest = errors
            raise ProjectError(
                first.message,
                code=first.code,
                span=first.span,
                path=first.path,
                hint=first.hint,
                context=first.context or self.lineage,
                others=rest,
            )

    def _build(
        self, targets: tuple[str, ...], variables: Mapping[str, Any], hook: Hook | None = None
    ) -> dict[str, Any]:
        from forgather.config.materialize import materialize
        from forgather.config.resolve import Resolver
        from forgather.project.guard import ProjectGuard
        from forgather.project.seeding import seeded_construction

        self.refuse_errors()
        guard = ProjectGuard(self.meta, self._trust)
        with self._marked_as_running(targets), self.located():
            # Checked before it is added: an import from a folder runs the code in it.
            guard.before_files(self.meta.system_path)
            for folder in self.meta.system_path:
                # At the end: a module of the project must not replace an installed one.
                if folder not in sys.path:
                    sys.path.append(folder)
            resolver = Resolver(self.meta.project_dir, guard=guard)
            with self._requesting_processes(), seeded_construction(self.graph, self.meta) as seed_all:
                return materialize(
                    self.graph,
                    targets=targets,
                    variables={**self._own_variables, **variables},
                    resolver=resolver,
                    hook=hook,
                    before_calls=seed_all,
                )

    @property
    def _own_variables(self) -> dict[str, object]:
        """The variables that the config itself defines; a repeated run has their values in its graph instead."""
        return {RENDERED: self.rendered.text} if not self._template and reads_rendered(self.graph) else {}

    def _trust(self) -> Trust:
        """Returns the code that may run: what the user trusts, or everything if the caller passed `trust=True`."""
        from forgather.project.trust import EVERYTHING, current_trust

        return EVERYTHING if self._is_trusted else current_trust()

    @contextmanager
    def _requesting_processes(self) -> Iterator[None]:
        """Context manager that passes the requested number of processes to a trainer, unless the launcher checks it."""
        if compared_by_launcher.get():
            yield
            return
        from forgather.project.world_size import processes_per_machine

        given = self.variables.get("nproc_per_node")
        number = given if isinstance(given, int) else processes_per_machine(self.graph)
        token = requested.set(RequestedProcesses(number, self.config_name, self.meta.project_dir))
        try:
            yield
        finally:
            requested.reset(token)

    @contextmanager
    def _marked_as_running(self, targets: tuple[str, ...]) -> Iterator[None]:
        outer = _RUNNING.get()
        this = (self.meta.project_dir, self.config_name, targets)
        if this in outer:
            circle = " -> ".join(name for _, name, _ in (*outer[outer.index(this) :], this))
            raise ProjectError(
                f"config {self.config_name!r} builds itself: {circle}",
                code="FG416",
                hint="'from_project' must name a config or targets that do not lead back here",
            )
        token = _RUNNING.set((*outer, this))
        try:
            yield
        finally:
            _RUNNING.reset(token)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except ForgatherError as error:
            error.context = self._context(error.context) or self.lineage
            raise

    def _reading(self) -> AbstractContextManager[None]:
        # During a construction, memory and time belong to the objects, so a config that they read has the other budgets
        # only.
        return nullcontext() if _RUNNING.get() else limits_while_reading(self.config_name, self._file)

    def _file(self) -> str | None:
        name = template_name(self.meta, self.config_name)
        files = (os.path.join(folder, name) for folder in self.meta.searchpath)
        return next((file for file in files if os.path.isfile(file)), None)

    def _context(self, context: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the context of a finding, in which the config has the name for `-t`."""
        template = f"config {template_name(self.meta, self.config_name)}"
        named = f"config {self.config_name}"
        return tuple(
            named + part.removeprefix(template) if part == template or part.startswith(f"{template},") else part
            for part in context
        )

    @contextmanager
    def located(self) -> Iterator[None]:
        """Context manager that adds to an error of Forgather the config, the failed call, and the setting it names."""
        try:
            yield
        except ForgatherError as error:
            # A late import: most configs are built without an error.
            from forgather.project.error_location import locate_error, note_path, shortest_path

            if error.span is None and not isinstance(error, UnknownTargetError):
                locate_error(error, self.writers)
            if (path := error.path or note_path(error)) is not None:
                error.path = shortest_path(self.graph, path)
            error.context = self._context(error.context) or self.lineage
            raise


def from_project(
    project_dir: str,
    config_template: str | None,
    targets: str | Sequence[str],
    pp_kwargs: Mapping[str, Any] | None = None,
    **variables: Any,
) -> Any:
    """Returns targets of another project; configs call this function.

    Args:
        project_dir: the other project's folder, relative to the project of the calling config.
        config_template: the name of the config; None for the default config.
        targets: the name of a target, which returns its object, or a list of names, which returns a dict.
        pp_kwargs: the Jinja variables of the other config.
        variables: the values for `!var` in the other config.

    Raises:
        ForgatherError: if the other config is missing or has errors; FG416 if it builds the calling config again.
    """
    under_way = _RUNNING.get()
    base = under_way[-1][0] if under_way else os.getcwd()
    project = Project(config_template, os.path.normpath(os.path.join(base, project_dir)), **dict(pp_kwargs or {}))
    return project(targets, **variables)
