"""Creates the files of a new project or of a new config.

The input is names; the output is files. A new project or config can be run without changes, and no existing file is
overwritten.
"""

from __future__ import annotations

import os
import re

from forgather.errors import ProjectError, nearest
from forgather.project.metadata import ProjectMeta
from forgather.project.starters import Starter

DEFAULT_PARENT = "trainers/trainer.yaml"
_LISTED = 3
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")

_META = """\
## What this project is. 'fgcli ls' shows it. Keys: name, description, default_config, searchdir, config_prefix,
## system_path.
name: {title}
description: {description}
default_config: default.yaml
"""

_CONFIG = """\
## Everything that this config does not set comes from the template that it extends.
## See it all with: fgcli -t {file} pp
-- extends {parent}

[config_metadata]
    == super()
    -- set ns.config_name = {title}
    -- set ns.config_description = {description}

## A block in brackets replaces the parent's block of that name; '== super()' keeps the parent's lines,
## and a line after it with the same key wins.
[trainer_args]
    == super()
{settings}"""

_SETTINGS = """\
    max_steps: 100
    learning_rate: 1e-2
"""
# A template of the project has its own settings, which a new config must not replace without being asked.
_NO_SETTINGS = """\
    ## learning_rate: 1e-2
"""

_README = """\
# {title}

    fgcli ls                     # the configs of this project
    fgcli pp                     # the default config, all templates applied
    fgcli graph                  # what it would build
    fgcli train                  # run it
    fgcli train --set trainer_args.max_steps=10
    fgcli new config NAME        # another config

A config is a file in `templates/configs/`. It extends a template and overrides some of its blocks; templates of
the project's own go to `templates/`, next to the packaged ones (`fgcli tlist` lists both). A template with the name
of a packaged one replaces it: `templates/defaults/raw_dataset.yaml` gives your own data to every config here.

Models, checkpoints and the records of runs go to `output_models/`.
"""

_STARTER_README = """\
# {title}

{description}: `templates/configs/default.yaml` names the rows and the base model.

    fgcli data show              # the rows as the model sees them, and which tokens are trained
    fgcli check                  # every mistake that can be found without running anything
    fgcli train                  # train
    fgcli train --resume         # resume after Ctrl-C or a crash
    fgcli train --nproc-per-node 2
    {use}
    fgcli pp                     # the config, all templates applied

Models, checkpoints and the records of runs go to `output_models/`.
"""


def new_project(folder: str, starter: Starter | None = None) -> list[str]:
    """Creates a project folder and returns the paths of its files.

    Args:
        folder: the path of the folder, whose last part is the name of the project.
        starter: what the config of a project for fine-tuning says; None for a project that trains the demo model.

    Raises:
        ProjectError: FG414 if the name is not allowed, or the folder is not empty; FG418 if a file cannot be written;
            FG490 if a path of the starter has characters with a meaning in templates.
    """
    name = os.path.basename(os.path.abspath(folder))
    _refuse_name(name, "project")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ProjectError(
            f"{folder!r} exists already", code="FG414", hint="name a folder that does not exist yet, or an empty one"
        )
    title = _title(name)
    description = starter.description() if starter else "What one learns from this project"
    files = {
        "meta.yaml": _META.format(title=_quoted(title), description=_quoted(description)),
        "README.md": (_STARTER_README if starter else _README).format(
            title=title, description=description, use=starter.use(title) if starter else ""
        ),
        ".gitignore": "output_models/\n",
        "templates/configs/default.yaml": starter.config(title)
        if starter
        else _config_text("default.yaml", title, DEFAULT_PARENT),
    }
    if starter and (data := starter.data_file()):
        files[data[0]] = data[1]
    return [_write(os.path.join(folder, file), text) for file, text in files.items()]


def new_config(meta: ProjectMeta, name: str, parent: str = DEFAULT_PARENT) -> str:
    """Creates a config in a project and returns the path of its file.

    Args:
        meta: the project.
        name: the name of the config.
        parent: the name of the template that the config extends.

    Raises:
        ProjectError: FG414 if the name is not allowed, or the config exists; FG418 if the file cannot be written; FG419
            if the parent template does not exist.
    """
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for part in file.removesuffix(".yaml").split("/"):
        _refuse_name(part, "config")
    if not any(os.path.isfile(os.path.join(folder, parent)) for folder in meta.searchpath):
        raise ProjectError(
            f"no template {parent!r} on the search path of project {meta.name!r}",
            code="FG419",
            hint=_near_template(parent, _templates(meta)),
        )
    folder = meta.searchdir[0] if meta.searchdir else os.path.join(meta.project_dir, "templates")
    path = os.path.join(folder, meta.config_prefix, file)
    return _write(path, _config_text(file, _title(os.path.basename(file.removesuffix(".yaml"))), parent))


def _config_text(file: str, title: str, parent: str) -> str:
    return _CONFIG.format(
        file=file,
        parent=_quoted(parent),
        title=_quoted(title),
        description=_quoted("What this run is for"),
        settings=_SETTINGS if parent.startswith("trainers/") else _NO_SETTINGS,
    )


def _near_template(name: str, known: list[str]) -> str:
    """Returns a hint with templates of the same file name in other folders, or else with the most similar name."""
    same = [template for template in known if os.path.basename(template) == os.path.basename(name)][:_LISTED]
    same = same or [template for template in known if os.path.basename(template) == f"{os.path.basename(name)}.yaml"]
    if same:
        return f"did you mean {' or '.join(map(repr, same[:_LISTED]))}?"
    return nearest(name, known) or "'fgcli tlist' lists the templates"


def _templates(meta: ProjectMeta) -> list[str]:
    return [
        os.path.relpath(os.path.join(here, file), top).replace(os.sep, "/")
        for top in meta.searchpath
        for here, _, files in os.walk(top)
        for file in files
        if file.endswith(".yaml")
    ]


def _refuse_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise ProjectError(
            f"{name!r} cannot be the name of a {what}",
            code="FG414",
            hint="use letters, digits, '_', '-' and '.', and begin with a letter, a digit or '_'",
        )


def _write(file: str, text: str) -> str:
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        # "x" fails if the file exists: it must not be overwritten.
        with open(file, "x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except FileExistsError:
        raise ProjectError(f"{file!r} exists already", code="FG414", hint="choose another name") from None
    except OSError as error:
        raise ProjectError(
            f"{file!r} cannot be written: {error.strerror or error}",
            code="FG418",
            hint="name a folder that you can write to",
        ) from error
    return file


def title_of(folder: str) -> str:
    """Returns the title of a project, by the name of its folder."""
    return _title(os.path.basename(os.path.abspath(folder)))


def _title(name: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in re.split(r"[_\-. ]+", name) if word)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
