"""What a sweep was asked for: the config with its overrides, and the options of the sweep, as its journal stores them.

The input is a command line or the first record of a journal; the output is the project, what the sweep is to do, and
the words that start a trial. A sweep goes on only if its config still describes the same runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forgather.cache_file import digest_of
from forgather.config.graph import Graph
from forgather.errors import ProjectError
from forgather.launch.launch_files import refuse_secret
from forgather.planner.leaf import value_text
from forgather.project.dynamic_args import Action, DeclaredOption, read_options
from forgather.project.literal import string_entries
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments
from forgather.sweeps.best_config import OUTPUT_DIR
from forgather.sweeps.spec import SweepSpec, spec_of
from forgather.sweeps.trials import built_digest

_OPTIONS = {"overrides": "set", "seed": "sweep-seed"}


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What a sweep was asked for.

    Args:
        project_dir: the absolute folder of the project.
        config: the name of the config.
        variables: the values of the options that the config declares.
        overrides: the pairs of path and YAML text that all trials have.
        file: the absolute path of a sweep file, or None for the target `sweep` of the config.
        grid: the assignments of lists to paths.
        method: the method, or None for that of the sweep.
        trials: the number of trials, or None for that of the sweep.
        metric: the metric, or None for that of the sweep.
        seed: the seed, or None for that of the sweep.
        working_dir: the absolute working folder, to which paths among the values are relative; "" in the journal of an
            earlier version.
    """

    project_dir: str
    config: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[tuple[str, str], ...] = ()
    file: str | None = None
    grid: tuple[str, ...] = ()
    method: str | None = None
    trials: int | None = None
    metric: str | None = None
    seed: int | None = None
    working_dir: str = ""

    def open(self) -> tuple[Project, SweepSpec]:
        """Returns the project with the config and the overrides, and what the sweep is to do.

        Raises:
            ForgatherError: if the config cannot be read.
            ProjectError: FG560 to FG562 if the sweep is malformed.
        """
        project = Project(self.config, self.project_dir, overrides=self.overrides, **self.variables)
        options: dict[str, Any] = {name: getattr(self, name) for name in ("grid", "method", "trials", "metric", "seed")}
        with project.located():
            return project, spec_of(project, file=self.file, **options)

    def refuse_secrets(self) -> None:
        """Raises an error if a value of the command line is a secret: the journal and the best config would have it.

        Raises:
            ProjectError: FG531 if there is one.
        """
        given = [f"{path}={text}" for path, text in [*self.variables.items(), *self.overrides]]
        refuse_secret("\n".join([*given, *self.grid]), "the journal of the sweep would store it")

    def as_record(self, project: Project, spec: SweepSpec) -> dict[str, Any]:
        """Returns the request as the first record of a journal.

        Args:
            project: the project that `open` returned.
            spec: what the sweep is to do.
        """
        # The metric may be that of the config, which readers of the journal do not open.
        compared = {"metric": spec.metric, "goal": str(spec.goal)}
        return {"request": asdict(self), "fingerprint": _fingerprint(project, spec), **compared}


def _asked_text(name: str, value: Any) -> str:
    """Returns a value of a request as it is written on a command line."""
    option = f"--{_OPTIONS.get(name, name)}"
    words = [value] if value is None or isinstance(value, str | int) else list(value)
    words = ["=".join(word) if isinstance(word, tuple) else word for word in words if word is not None]
    return " ".join(f"{option} {word}" for word in words) or f"no {option}"


def reopened(
    record: Mapping[str, Any], asked: Mapping[str, Any], *, trials: int | None = None
) -> tuple[SweepRequest, Project, SweepSpec]:
    """Returns the request of an existing sweep, its project, and what it is to do.

    Args:
        record: the first record of the journal.
        asked: what the command line asks for in addition, by the fields of a request; it must be what the sweep was
            started with.
        trials: a new number of trials in all, or None to keep it.

    Raises:
        ProjectError: FG569 if the config or the sweep has changed since the sweep was started, or if something else is
            asked for.
    """
    try:
        stored = dict(record["request"])
        stored["overrides"] = tuple((path, text) for path, text in stored["overrides"])
        request = SweepRequest(**{**stored, "grid": tuple(stored["grid"])})
    except (LookupError, TypeError, ValueError):
        raise ProjectError(
            "the first line of the journal does not say what was asked for", code="FG563", hint="start a new sweep"
        ) from None
    # The options that the config declares are compared one by one: those that are not given again are kept.
    options = {**asked, **asked.get("variables", {})}
    options.pop("variables", None)
    for name, value in options.items():
        known = getattr(request, name) if name in asked else request.variables.get(name)
        if known != value:
            raise ProjectError(
                f"this sweep was started with {_asked_text(name, known)}, not with {_asked_text(name, value)}",
                code="FG569",
                hint="leave that out to go on with the sweep as it is, or start a new one without --resume",
            )
    request = request if trials is None else replace(request, trials=trials)
    project, spec = request.open()
    if _fingerprint(project, spec) != record.get("fingerprint"):
        raise ProjectError(
            f"config {request.config!r} or its sweep has changed since this sweep was started",
            code="FG569",
            hint="its trials would not be comparable: undo the change, or start a new sweep",
        )
    return request, project, spec


def _fingerprint(project: Project, spec: SweepSpec) -> str:
    # The number of trials may grow when a sweep goes on.
    return digest_of(
        f"{built_digest(project.graph)} {replace(spec, num_trials=None)!r}".encode("utf-8", "surrogatepass")
    )


def trial_words(
    request: SweepRequest, project: Project, values: Mapping[str, str], output_dir: str, resume: Sequence[str]
) -> list[str]:
    """Returns the arguments of `fgcli` that run a trial.

    Args:
        request: what the sweep was asked for.
        project: its project.
        values: the values of the trial as YAML text, by path.
        output_dir: the output folder of the trial.
        resume: the arguments with which it goes on from its newest checkpoint, or none.
    """
    declared = read_options(project.declared_graph).options
    words = ["-p", request.project_dir, "-t", request.config, "train"]
    for option in declared:
        if option.variable in request.variables and option.variable != OUTPUT_DIR:
            words += _option_words(option, request.variables[option.variable])
    assignments = [*request.overrides, *values.items()]
    output = next((option for option in declared if option.variable == OUTPUT_DIR), None)
    if output is not None:
        words += [output.names[0], output_dir]
    else:
        assignments.append(_output_assignment(project.graph, value_text(output_dir)))
    for path, text in assignments:
        words += ["--set", f"{path}={text}"]
    return [*words, *resume]


def _output_assignment(graph: Graph, folder: str) -> tuple[str, str]:
    """Returns the assignment that gives a run an output folder, which is YAML text."""
    arguments = trainer_arguments(graph)
    if arguments is not None:
        return arguments.path(OUTPUT_DIR), folder
    meta = graph.targets.get("meta")
    if meta is None:
        return "+meta", f"{{{OUTPUT_DIR}: {folder}}}"
    is_set = any(entry.key == OUTPUT_DIR for entry in string_entries(meta.value))
    return f"{'' if is_set else '+'}meta.{OUTPUT_DIR}", folder


def _option_words(option: DeclaredOption, value: Any) -> list[str]:
    """Returns the words that give an option its value again."""
    name = option.names[0]
    if option.action is Action.APPEND:
        return [word for item in value for word in (name, str(item))]
    if option.action.is_flag:
        return [name] if value is (option.action is Action.STORE_TRUE) else []
    if option.type is bool:
        return [name if value else f"--no-{name.lstrip('-')}"]
    # One word: a value may begin with a dash.
    return [f"{name}={value}"]


def default_folder(output_dir: str, name: str) -> str:
    """Returns the sweep folder of a config.

    Args:
        output_dir: the output folder of the config.
        name: the name of the sweep.
    """
    return os.path.join(output_dir, "sweeps", name)


def newest_sweep(output_dir: str) -> str | None:
    """Returns the newest sweep folder of a config, or None if there is none.

    Args:
        output_dir: the output folder of the config.
    """
    parent = os.path.join(output_dir, "sweeps")
    try:
        folders = [os.path.join(parent, name) for name in os.listdir(parent)]
    except OSError:
        return None
    return max((one for one in folders if os.path.isdir(one)), key=os.path.getmtime, default=None)
