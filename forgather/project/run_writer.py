"""Writes the folder of a run: everything that is needed to repeat the run, before anything is constructed.

The input is a project and the command line; the output is a new folder with `config.yaml` (the rendered text),
`graph.yaml` (the graph as a config without templates), `origins.txt` (the line that set each value), `templates/` with
copies of templates and code, `overrides.yaml`, `signatures.json` (the default arguments of constructors), `run.json`.
The folder contains no secrets: neither values that `!env` reads nor values whose names suggest a secret.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from forgather.bounded import MAX_CODE_BYTES, read_text
from forgather.cache_file import digest_of
from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.graph import Call, Entry, Env, Graph, Mapped, Scalar
from forgather.config.graph import Sequence as Items
from forgather.config.insight.blame import Writing, blame
from forgather.config.insight.path_lookup import path_text
from forgather.config.load import COMMAND_LINE
from forgather.config.path import Key, format_path
from forgather.config.traverse import all_nodes
from forgather.errors import ProjectError
from forgather.folder_lock import folder_lock
from forgather.launcher_env import ProcessFacts, is_worker, process_facts
from forgather.planner.memory_plan import PLAN_FILE
from forgather.project.configs import template_name
from forgather.project.defaults import read_defaults
from forgather.project.dependencies import code_files, data_facts
from forgather.project.dynamic_args import without_options
from forgather.project.git_state import git_state
from forgather.project.locations import library_dir
from forgather.project.origin_labels import Labels, options_first
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.rendered_variable import with_rendered
from forgather.project.run_facts import FACTS, FORM, GRAPH
from forgather.project.template_environment import host_facts
from forgather.project.versions import installed_versions
from forgather.redaction import hidden, hide, note_secrets
from forgather.run_status import STATUS_FILE
from forgather.source import variable_of

# These targets describe the run and its options, so a change of them changes no object.
_NOT_BUILT = (Key("meta"), Key("dynamic_args"))
OVERRIDES, SIGNATURES, ORIGINS = "overrides.yaml", "signatures.json", "origins.txt"
# A run that has not begun writes these, too.
_OF_THE_START = {PLAN_FILE, STATUS_FILE}
_RUNTIME = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
"""The environment variables that numerical results can depend on."""


def make_run_folder(output_dir: str, config_name: str, now: datetime) -> str:
    """Creates and returns `<output_dir>/runs/<utc time>-<config>/`; a number is added if the folder exists.

    Args:
        output_dir: the output folder.
        config_name: the name of the config.
        now: the current time in UTC.

    Raises:
        ProjectError: FG413 if the folder cannot be created.
    """
    return new_folder(run_folder_name(output_dir, config_name, now))


def new_folder(folder: str) -> str:
    """Creates and returns a folder of this name; a number is added if the folder exists.

    Raises:
        ProjectError: FG413 if the folder cannot be created.
    """
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        for unique in (folder, *(f"{folder}-{attempt}" for attempt in range(2, 1000))):
            with suppress(FileExistsError):
                # mkdir fails if the folder exists, so that two runs never get the same one.
                os.mkdir(unique)
                return unique
    except OSError as error:
        raise unwritable(folder, error) from error
    raise ProjectError(f"{folder!r} and 998 more of its name exist", code="FG413", hint="remove old runs")


def run_folder_name(output_dir: str, config_name: str, now: datetime) -> str:
    """Returns the path that `make_run_folder` creates if no such folder exists.

    Args:
        output_dir: the output folder.
        config_name: the name of the config.
        now: the current time in UTC.
    """
    stem = config_name.removesuffix(".yaml").replace("/", "-")
    return os.path.join(output_dir, "runs", f"{now:%Y%m%dT%H%M%SZ}-{stem}")


def write_record(folder: str, project: Project, *, command: Sequence[str], started: datetime) -> None:
    """Writes everything that is needed to repeat the run into a run folder.

    Args:
        folder: the run folder.
        project: the config.
        command: the words of the command line.
        started: the time at which the run was started, in UTC.

    Raises:
        ProjectError: FG413 if a file cannot be written.
    """
    defaults = read_defaults(project.graph, project.meta)
    files = {
        "config.yaml": project.rendered.text,
        GRAPH: _graph_text(with_rendered(project.graph, project.rendered.text)),
        ORIGINS: origins_text(project),
        OVERRIDES: overrides_text(project.variables, project.overrides),
        SIGNATURES: json.dumps(defaults, indent=1) + "\n",
        **_template_files(project),
        **_code_files(project),
    }
    for name, text in files.items():
        # All secrets are collected before any text is written: one that a file shows under its name may occur without
        # it in another file.
        note_secrets(text, is_code=name.endswith(".py"))
    shown = {name: hide(text, is_code=name.endswith(".py"), is_document=True) for name, text in files.items()}
    # The digest of the original shows later whether the source has changed; that of the redacted copy cannot.
    redacted = {name: _digest(text) for name, text in files.items() if shown[name] != text}
    files = shown
    digests = {name: _digest(text) for name, text in files.items()}
    output_dir = os.path.dirname(os.path.dirname(folder))
    facts = {
        **_run_facts(project, command, started, output_dir),
        "output_dir": output_dir,
        "files": digests,
        "redacted": redacted,
    }
    files[FACTS] = json.dumps(hidden(facts), indent=2, default=str) + "\n"
    try:
        for name, text in files.items():
            file = os.path.join(folder, name)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
    except OSError as error:
        raise unwritable(folder, error) from error


def remove_unused_record(folder: str) -> None:
    """Removes the folder of a run that did not start, if the folder contains only the record of the start.

    If a file was added or changed, it belongs to the run or to the user, and the whole folder is kept.

    Args:
        folder: the run folder.
    """
    # The error that ended the start is the one to report.
    with suppress(OSError, ValueError, LookupError, TypeError):
        # The main process may write its status meanwhile, and a folder must not be removed in part.
        with folder_lock(folder):
            _remove_record(folder)


def _remove_record(folder: str) -> None:
    with open(os.path.join(folder, FACTS), encoding="utf-8") as stream:
        written = json.load(stream)["files"]
    folders, files = [], []
    for parent, subfolders, names in os.walk(folder):
        folders.append(parent)
        files += [os.path.join(parent, name) for name in names]
        # `os.walk` counts a link to a folder as a folder, although the record contains no link.
        files += [path for name in subfolders if os.path.islink(path := os.path.join(parent, name))]
    if {os.path.relpath(file, folder) for file in files} - _OF_THE_START != {FACTS, *written}:
        return
    for file in files:
        name = os.path.relpath(file, folder)
        is_recorded = name != FACTS and name not in _OF_THE_START
        if os.path.islink(file) or (is_recorded and _digest_of_file(file) != written[name]):
            return
    for file in files:
        os.remove(file)
    for parent in reversed(folders):
        os.rmdir(parent)


def _digest_of_file(file: str) -> str:
    with open(file, "rb") as stream:
        return digest_of(stream.read())


def _digest(text: str) -> str:
    # Undecodable bytes of file names are surrogates in Python texts.
    return digest_of(text.encode("utf-8", "surrogatepass"))


def _template_files(project: Project) -> dict[str, str]:
    display = Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False)
    texts = {file: _read_source(file) for file in project.meta.files}
    texts |= {file: source.text for file, source in project.rendered.sources.items()}
    return {f"templates/{display.archive_name(file)}": text for file, text in texts.items()}


def _graph_text(graph: Graph) -> str:
    text = emit_yaml(without_options(graph))
    # The file is rendered as a template when the run is repeated, and braces in it must not be read as Jinja.
    head = "# What was built, overrides included: a config by itself, without templates. {% raw %}"
    return f"{head}\n{text}# {{% endraw %}}\n"


def _code_files(project: Project) -> dict[str, str]:
    """Returns the texts of the project's Python files that the config needs, by their paths in the run folder."""
    display = Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False)
    texts: dict[str, str] = {}
    for file in code_files(project.graph, project.meta.project_dir, project.meta.system_path):
        with suppress(OSError, UnicodeDecodeError):
            texts[f"templates/{display.archive_name(file)}"] = _read_source(file)
    return texts


def _read_source(file: str) -> str:
    return read_text(file, MAX_CODE_BYTES)


def overrides_text(variables: Mapping[str, object], overrides: Sequence[tuple[str, str]]) -> str:
    """Returns the content of `overrides.yaml`.

    Args:
        variables: the Jinja variables.
        overrides: the pairs of graph path and YAML text.
    """
    lines = ["# What the command line changed: options of the config as variables, then --set as path and YAML text."]
    # Variables that a Python caller passes can be any objects.
    lines.append(f"variables: {json.dumps(dict(variables), default=str)}")
    if not overrides:
        return "\n".join([*lines, "overrides: []", ""])
    lines.append("overrides:")
    for path, text in overrides:
        lines += [f"- path: {json.dumps(path)}", f"  value: {json.dumps(text)}"]
    return "\n".join([*lines, ""])


def origins_text(project: Project) -> str:
    """Returns the content of `origins.txt`: for each value that is built from, the line that set it.

    Args:
        project: the config.
    """
    # Not relative to the working folder: the record is read elsewhere.
    labels = Labels(
        Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False),
        lambda: project.declared_graph,
    )
    lines: list[str] = []
    for found in blame(project.graph, aliases=False):
        if found.path[0] in _NOT_BUILT or (isinstance(found.node, (Mapped, Items)) and found.now.text.endswith(")")):
            continue
        name = str(getattr(found.path[-1], "name", ""))
        sites = options_first(found.now.origin.sets) if found.now.origin is not None else ()
        places = [labels.where(found.now), *(f"set at {labels.site(site)}" for site in sites)]
        lines.append(f"{path_text(found.path)} = {hidden(found.now.text, name)}  # {', '.join(filter(None, places))}\n")
    return "".join(lines)


def _run_facts(project: Project, command: Sequence[str], started: datetime, output_dir: str) -> dict[str, object]:
    return {
        "form": FORM,
        "project": project.meta.name,
        "project_dir": project.meta.project_dir,
        "workspace_root": project.meta.workspace_root,
        "library": library_dir(),
        "config": project.config_name,
        "template": template_name(project.meta, project.config_name),
        "instant": project.instant.isoformat(),
        "started": started.isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "working_dir": os.getcwd(),
        "hostname": platform.node(),
        "uname": host_facts(),
        "platform": platform.platform(),
        "processors": runtime_facts(),
        "processes": _processes(),
        "versions": installed_versions(),
        "git": git_state(project.meta.project_dir, output_dir),
        "environment_read": dict(sorted({**project.meta.env_reads, **project.rendered.env_reads}.items())),
        "environment_needed": environment_needed(project.graph),
        "search_path": list(project.meta.searchpath),
        "system_path": list(project.meta.system_path),
        "data": data_facts(project.graph, project.meta.project_dir),
        "seeds": _seeds(project.graph),
        "changes": _changes(project),
    }


def _changes(project: Project) -> dict[str, object]:
    """Returns the values that the config or the command line adds, or sets in place of those of the parent template.

    `parent` is the name of the template that the config extends; it is None for a config that extends none.
    """
    own, *others = project.rendered.templates
    parent = next((use.name for use in others if use.parent == 0 and use.why == "extends"), None)
    values: list[dict[str, object]] = []
    whole: set[tuple[object, ...]] = set()
    for found in blame(project.graph, aliases=False) if parent is not None or project.overrides else ():
        if found.path[:-1] in whole and not found.was:
            # It was written together with the value around it, which is listed.
            whole.add(found.path)
        elif isinstance(found.node, (Mapped, Items)) and found.now.text.endswith(")"):
            # The text does not show all of the value, so the values inside are listed instead.
            continue
        elif found.path[0] not in _NOT_BUILT and _is_own(found.now, own.file if parent else None):
            whole.add(found.path)
            name = str(getattr(found.path[-1], "name", ""))
            texts = {"value": found.now.text, "was": found.was[0].text if found.was else None}
            shown = {part: hidden(text, name) for part, text in texts.items()}
            values.append({"path": path_text(found.path), **shown})
    return {"parent": parent, "values": values}


def _is_own(writing: Writing, file: str | None) -> bool:
    """Returns whether a value comes from the command line or from the config's own file."""
    if writing.origin is None or writing.alias is not None:
        return False
    # A file that the config includes is a part of it.
    sites = (*writing.origin.sites, *writing.origin.sets)
    return any(site.span.file in (COMMAND_LINE, file) or variable_of(site) is not None for site in sites)


def environment_needed(graph: Graph) -> dict[str, bool]:
    """Returns, by name, whether each environment variable that construction reads is set; values are left out."""
    names = {node.variable for _, node in all_nodes(graph) if isinstance(node, Env)}
    return {name: name in os.environ for name in sorted(names)}


def runtime_facts() -> dict[str, object]:
    """Returns the number of processors, and the environment variables that numerical results can depend on."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"count": count} | {name: os.environ.get(name) for name in _RUNTIME}


def _processes() -> dict[str, int]:
    """Returns the number of processes of the run on all machines, and on this machine."""
    facts = process_facts(os.environ) if is_worker(os.environ) else ProcessFacts()
    return {"total": facts.world_size, "per_node": facts.local_world_size}


def _seeds(graph: Graph) -> dict[str, object]:
    found: dict[str, object] = {}
    for path, node in all_nodes(graph):
        for entry in _keywords(node):
            if isinstance(entry.key, str) and entry.key.endswith("seed") and isinstance(entry.value, Scalar):
                found[format_path((*path, Key(entry.key)))] = entry.value.value
    return found


def _keywords(node: object) -> tuple[Entry, ...]:
    if isinstance(node, Call):
        return node.kwargs
    return node.entries if isinstance(node, Mapped) else ()


def unwritable(folder: str, error: OSError) -> ProjectError:
    """Returns the error for a run folder that cannot be written.

    Args:
        folder: the run folder.
        error: the error of the file system.
    """
    return ProjectError(
        f"the run folder {folder!r} cannot be written: {error.strerror or error}",
        code="FG413",
        hint="set 'output_dir' of the trainer's arguments (or of 'meta') to a folder that you can write to",
    )
