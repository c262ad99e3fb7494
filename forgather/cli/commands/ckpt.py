"""`fgcli ckpt`: checkpoints: which there are, whether they are whole, what is in them, as models, and which stay."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.checkpoints import contents_text, difference_text, fact_of, survey_text, surveyed_fact
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import plural, print_note, write_json, write_text
from forgather.errors import CheckpointError, ProjectError
from forgather.project.display import near_path

TAKES_CONFIG = True
DESCRIPTION = """Look after checkpoints. FOLDER is a checkpoint, or an output folder that holds some; without one it is
the output folder of the config that -p and -t name."""
EXAMPLES = """examples:
  fgcli ckpt ls output_models/tiny_llama               what there is, and which one '--resume auto' would take
  fgcli -t tiny.yaml ckpt verify                       every byte of every checkpoint against its digest
  fgcli ckpt show output_models/tiny_llama/checkpoint-500

'fgcli ckpt ACTION --help' says more of one."""
_ACTIONS = {
    "ls": "list the checkpoints of an output folder; the exit status is 1 where one is not complete",
    "verify": "read every byte and compare it with what was written; the exit status is 1 where anything differs",
    "show": "tell what is in a checkpoint, or how two differ",
}
_EXAMPLES = {
    "ls": "example:\n  fgcli ckpt ls output_models/tiny_llama --json",
    "verify": "example:\n  fgcli ckpt verify output_models/tiny_llama/checkpoint-500",
    "show": "examples:\n  fgcli ckpt show output_models/tiny_llama/checkpoint-500\n"
    "  fgcli ckpt show output_models/tiny_llama/checkpoint-500 output_models/tiny_llama/checkpoint-400",
}
_ML = "forgather.ml.checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in _ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        action.epilog = _EXAMPLES[name]
        many = {"nargs": "*" if name in ("verify", "show") else "?"}
        action.add_argument("folder", metavar="FOLDER", help="checkpoint or output folder", **many)  # type: ignore[arg-type]
        add_json(action)


def run(invocation: Invocation) -> int:
    """Does what the action says and returns the exit status."""
    act: Callable[[Invocation], int] = {"ls": _ls, "verify": _verify, "show": _show}[invocation.options.action]
    return act(invocation)


def _ml(module: str) -> Any:
    """Returns a module of the other tower; those that are named here import no torch, but for the export."""
    return import_module(f"{_ML}.{module}")


def _output_dir(invocation: Invocation) -> Path:
    from forgather.launch import plan_run

    return Path(near_path(plan_run(invocation.open_project()).output_dir))


def _named(invocation: Invocation, folder: str | None) -> Path:
    """Returns the folder that was named, or the output folder of the config.

    Raises:
        ProjectError: both were named.
        CheckpointError: FG601 where there is no such folder.
    """
    if folder is not None and (invocation.config is not None or invocation.project_dir is not None):
        raise ProjectError(
            f"{folder!r} and the config of -p and -t each name a folder",
            code="FG674",
            hint="leave one of them out",
        )
    found = _output_dir(invocation) if folder is None else Path(folder)
    _ml("foreign").refuse_no_folder(found)
    return found


def _survey(invocation: Invocation, folder: str | None) -> Any:
    """Returns what lies in an output folder; a checkpoint that is named stands for the folder that holds it alone."""
    found = _named(invocation, folder)
    survey = _ml("survey").survey(found)
    if not survey.checkpoints:
        if (found / "manifest.json").is_file() or found.name.startswith("checkpoint-"):
            raise ProjectError(
                f"{str(found)!r} is one checkpoint, and no folder of checkpoints",
                code="FG674",
                hint=f"name the folder above it, or see 'fgcli ckpt show {found}'",
            )
        raise CheckpointError(
            f"there is no checkpoint in {str(found)!r}",
            code="FG601",
            hint="checkpoints are folders named checkpoint-<step> in output_dir; save_strategy: steps writes them",
        )
    return survey


def _ls(invocation: Invocation) -> int:
    survey = _survey(invocation, invocation.options.folder)
    if invocation.options.json:
        newest = survey.newest
        write_json(
            {
                "output_dir": str(survey.folder),
                "resume_auto": None if newest is None else str(newest.folder),
                "checkpoints": [surveyed_fact(found) for found in survey.checkpoints],
            }
        )
    else:
        write_text(survey_text(survey))
    return int(any(found.problem is not None for found in survey.checkpoints))


def _checkpoints(invocation: Invocation) -> list[Path]:
    """Returns the checkpoints that were named; all of an output folder where one is named."""
    found: list[Path] = []
    for name in invocation.options.folder or [None]:
        folder = _named(invocation, name)
        inside = [path for _, path in _ml("folders").list_checkpoints(folder)]
        found += [folder] if (folder / "manifest.json").is_file() or not inside else inside
    return found


def _verify(invocation: Invocation) -> int:
    survey = _ml("survey")
    judged = [(folder, *survey.all_problems(folder)) for folder in _checkpoints(invocation)]
    if invocation.options.json:
        write_json(
            {
                "checkpoints": [
                    {"folder": str(folder), "intact": not problems, "problems": [fact_of(error) for error in problems]}
                    for folder, _, problems in judged
                ]
            }
        )
    else:
        for folder, manifest, problems in judged:
            if not problems:
                size = import_module("forgather.ml.figures").size(manifest.size)
                write_text(f"{near_path(str(folder))}  intact: {plural(len(manifest.files), 'file')}, {size}")
                continue
            write_text(f"{near_path(str(folder))}  {plural(len(problems), 'problem')}")
            write_text("\n".join(f"  [{error.code}] {error.message}" for error in problems))
    bad = [folder for folder, _, problems in judged if problems]
    if bad and not invocation.options.json:
        print_note(_next_step(judged))
    return int(bool(bad))


def _next_step(judged: list[tuple[Path, Any, list[CheckpointError]]]) -> str:
    whole = [folder for folder, _, problems in judged if not problems]
    if whole:
        return (
            f"next: '--resume auto' takes an intact one; 'rm -r {judged[0][0].parent}/checkpoint-N' removes a bad one"
        )
    return "next: restore the files from a copy, or begin anew: fgcli train --resume never"


def _show(invocation: Invocation) -> int:
    survey = _ml("survey")
    folders = [_one(invocation, name) for name in invocation.options.folder or [None]]
    if len(folders) > 2:
        raise ProjectError("'fgcli ckpt show' compares two checkpoints, not more", code="FG674", hint="name two")
    found = [survey.contents(folder) for folder in folders]
    if invocation.options.json:
        write_json({"checkpoints": [_content_fact(folder, it) for folder, it in zip(folders, found, strict=True)]})
    elif len(found) == 1:
        write_text(contents_text(folders[0], found[0]))
    else:
        write_text(difference_text(folders, found))
    return 0


def _content_fact(folder: Path, found: Any) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "step": found.manifest.step,
        "bytes": found.manifest.size,
        "facts": dict(found.manifest.facts),
        "files": {name: {"bytes": fact.size, "xxh3": fact.digest} for name, fact in found.manifest.files.items()},
        "tensors": {
            name: [{"name": it.name, "dtype": it.dtype, "shape": list(it.shape)} for it in tensors]
            for name, tensors in found.tensors.items()
        },
        "classes": dict(found.classes),
        "param_groups": found.settings,
        "position": dict(found.position),
    }


def _one(invocation: Invocation, name: str | None) -> Path:
    """Returns one checkpoint: the named one, or the newest complete one of an output folder."""
    folder = _named(invocation, name)
    if (folder / "manifest.json").is_file() or not _ml("folders").list_checkpoints(folder):
        return folder
    newest = _ml("survey").survey(folder).newest
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {str(folder)!r} is complete",
            code="FG607",
            hint=f"'fgcli ckpt verify {folder}' tells what is wrong with each",
        )
    print_note(f"the newest of {near_path(str(folder))}: {newest.folder.name}")
    return Path(newest.folder)
