"""`fgcli ckpt`: lists, verifies, shows, exports and prunes checkpoints."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.checkpoint_output import (
    LOOK,
    contents_text,
    difference_text,
    fact_of,
    prune_text,
    survey_text,
    surveyed_fact,
)
from forgather.cli.commands.export import add_weight_options, folder_name, print_export
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import plural, print_note, write_json, write_text
from forgather.errors import CheckpointError, ProjectError
from forgather.project.path_display import near_path

TAKES_CONFIG = True
DESCRIPTION = """List, verify, show, export and prune checkpoints. FOLDER is an output folder with checkpoints, or one
checkpoint where that is enough. Without it, the output folder of the config that -p and -t name is used."""
EXAMPLES = """examples:
  fgcli ckpt ls output_models/tiny_llama               what there is, and which one '--resume auto' would take
  fgcli -t tiny.yaml ckpt verify                       every byte of every checkpoint against its digest
  fgcli ckpt show output_models/tiny_llama/checkpoint-500
  fgcli ckpt export output_models/tiny_llama/checkpoint-500 exported --dtype bfloat16
  fgcli ckpt prune output_models/tiny_llama --keep-last 2 --dry-run

'fgcli ckpt ACTION --help' describes an action."""
_ACTIONS = {
    "ls": "list the checkpoints of an output folder; the exit status is 1 if one is not complete",
    "verify": "read every byte and compare it with what was written; the exit status is 1 if anything differs",
    "show": "print the contents of a checkpoint, or how two differ",
    "export": "write the model of a checkpoint in Hugging Face layout",
    "prune": "remove checkpoints by hand; the newest, the best and the last intact one are always kept",
}
_EXAMPLES = {
    "ls": "example:\n  fgcli ckpt ls output_models/tiny_llama --json",
    "verify": "example:\n  fgcli ckpt verify output_models/tiny_llama/checkpoint-500",
    "show": "examples:\n  fgcli ckpt show output_models/tiny_llama/checkpoint-500\n"
    "  fgcli ckpt show output_models/tiny_llama/checkpoint-500 output_models/tiny_llama/checkpoint-400",
    "export": "example:\n  fgcli ckpt export output_models/tiny_llama/checkpoint-500 exported --max-shard-size 2GB",
    "prune": "example:\n  fgcli ckpt prune output_models/tiny_llama --keep-last 2 --keep-every 1000 --dry-run",
}
_ML = "forgather.ml.checkpoint"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    # argparse parses `ckpt ACTION` as a command of its own, so each action has only the options that it uses.
    for name, summary in _ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        action.epilog = _EXAMPLES[name]
        how_many = {"verify": "*", "show": "*", "export": None}.get(name, "?")
        what = "output folder" if name in ("ls", "prune") else "checkpoint or output folder"
        action.add_argument("folder", metavar="FOLDER", help=what, nargs=how_many, type=folder_name)
        if name in _OPTIONS:
            _OPTIONS[name](action)
        add_json(action)


def _export_options(parser: argparse.ArgumentParser) -> None:
    what = "folder for the model; it must not exist yet, or be empty"
    parser.add_argument("into", metavar="INTO", help=what, type=folder_name)
    add_weight_options(parser)


def _prune_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-last", type=_count, metavar="N", help="keep the N newest; the newest is always kept")
    parser.add_argument(
        "--keep-best", type=_count, metavar="K", help="keep the K best by the metric; the best is always kept"
    )
    parser.add_argument("--keep-every", type=_count, metavar="M", help="keep those of every Mth step")
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _count(text: str) -> int:
    """Converts a command-line argument to a whole number of at least 1, as an argparse type."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {"export": _export_options, "prune": _prune_options}


def run(invocation: Invocation) -> int:
    """Runs the action that the command line names, and returns the exit status."""
    acts = {"ls": _ls, "verify": _verify, "show": _show, "export": _export, "prune": _prune}
    return acts[invocation.options.action](invocation)


def _ml(module: str) -> Any:
    """Imports and returns a module of `forgather.ml.checkpoint`. Only `export` imports torch."""
    return import_module(f"{_ML}.{module}")


def _output_dir(invocation: Invocation) -> Path:
    # A late import: with a folder on the command line, no config is read.
    from forgather.launch import plan_run

    return Path(near_path(plan_run(invocation.open_project()).output_dir))


def _named(invocation: Invocation, folder: str | None) -> Path:
    """Returns the folder on the command line, or the output folder of the config if there is none.

    Raises:
        ProjectError: FG674 if the command line names both a folder and a config.
        CheckpointError: FG601 if the folder does not exist.
    """
    if folder is not None and invocation.config is not None:
        raise ProjectError(
            f"two folders are named: {folder!r}, and that of config {invocation.config!r}",
            code="FG674",
            hint="leave one of them out",
        )
    if folder is not None:
        found = Path(folder)
    else:
        found = _output_dir(invocation)
        if not (found.exists() or found.is_symlink()):
            raise _holds_none(found, of_config=True)
    _ml("files").require_folder(found)
    return found


def _survey(invocation: Invocation, folder: str | None) -> Any:
    """Returns a survey of the checkpoints in an output folder.

    Raises:
        ProjectError: FG674 if the folder is a checkpoint, not an output folder.
        CheckpointError: FG601 if the folder has no checkpoint.
    """
    found = _named(invocation, folder)
    survey = _ml("inspect").summarize_folder(found)
    if not survey.checkpoints:
        if _is_checkpoint(found) or found.name.startswith("checkpoint-"):
            raise ProjectError(
                f"{str(found)!r} is a checkpoint, not a folder of checkpoints",
                code="FG674",
                hint=f"name the folder above it, or see 'fgcli ckpt show {found}'",
            )
        raise _holds_none(found, of_config=folder is None)
    return survey


def _holds_none(folder: Path, *, of_config: bool) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint in {str(folder)!r}",
        code="FG601",
        hint="this config has saved no checkpoint yet: train it with save_strategy: steps, or name the folder that "
        "has the checkpoints"
        if of_config
        else "checkpoints are folders named checkpoint-<step> in output_dir; save_strategy: steps writes them",
    )


def _ls(invocation: Invocation) -> int:
    survey = _survey(invocation, invocation.options.folder)
    if invocation.options.json:
        newest = survey.newest
        write_json(
            {
                "output_dir": str(survey.folder),
                "resume_auto": None if newest is None or newest.is_model_alone else str(newest.folder),
                "checkpoints": [surveyed_fact(found) for found in survey.checkpoints],
            }
        )
    else:
        write_text(survey_text(survey), look=LOOK)
    return int(any(found.problem is not None for found in survey.checkpoints))


def _checkpoints(invocation: Invocation) -> list[Path]:
    """Returns the checkpoints on the command line, and all checkpoints of the output folders on the command line.

    Raises:
        CheckpointError: FG601 if an output folder has no checkpoint.
    """
    found: list[Path] = []
    for name in invocation.options.folder or [None]:
        folder = _named(invocation, name)
        inside = _inside(folder)
        # A run that was killed before its first save leaves an output folder without checkpoints.
        if not inside and (folder / "runs").is_dir() and not _is_checkpoint(folder):
            raise _holds_none(folder, of_config=name is None)
        found += inside or [folder]
    return found


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _inside(folder: Path) -> list[Path]:
    """Returns the checkpoints of an output folder, or an empty list if the folder is a checkpoint."""
    return [] if _is_checkpoint(folder) else [path for _, path in _ml("checkpoint_dir").list_checkpoints(folder)]


def _verify(invocation: Invocation) -> int:
    survey = _ml("inspect")
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
                size = import_module("forgather.ml.number_format").format_bytes(manifest.size)
                write_text(
                    f"{near_path(str(folder))}  intact: {plural(len(manifest.files), 'file')}, {size}", look=LOOK
                )
                continue
            write_text(f"{near_path(str(folder))}  {plural(len(problems), 'problem')}")
            write_text("\n".join(f"  [{error.code}] {error.message}" for error in problems))
    bad = [folder for folder, _, problems in judged if problems]
    if bad and not invocation.options.json:
        print_note(f"next: {_next_step(judged)}")
    return int(bool(bad))


def _next_step(judged: list[tuple[Path, Any, list[CheckpointError]]]) -> str:
    # Foreign files next to those of a checkpoint are no reason to remove the checkpoint.
    bad = [folder for folder, _, problems in judged if any(error.code != "FG673" for error in problems)]
    if not bad:
        return "move the files that are not part of a checkpoint elsewhere; a resumed run does not read them"
    if len(bad) < len(judged):
        words = " ".join(shlex.quote(near_path(str(folder))) for folder in bad)
        return f"'--resume auto' takes an intact one; to remove the damaged ones: rm -r {words}"
    if len(judged) == 1 and len(_ml("checkpoint_dir").list_checkpoints(bad[0].parent)) > 1:
        return f"restore its files from a copy, or check the others: fgcli ckpt verify {bad[0].parent}"
    return str(_ml("lineage").NONE_INTACT)


def _show(invocation: Invocation) -> int:
    survey = _ml("inspect")
    folders = [_one(invocation, name) for name in invocation.options.folder or [None]]
    if len(folders) > 2:
        raise ProjectError("'fgcli ckpt show' compares two checkpoints at most", code="FG674", hint="name two")
    found = [survey.contents(folder) for folder in folders]
    if invocation.options.json:
        write_json({"checkpoints": [_content_fact(folder, it) for folder, it in zip(folders, found, strict=True)]})
    elif len(found) == 1:
        write_text(contents_text(folders[0], found[0]), look=LOOK)
    else:
        write_text(difference_text(folders, found), look=LOOK)
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
    """Returns the folder of one checkpoint: the named checkpoint, or the newest complete one of an output folder.

    Raises:
        CheckpointError: FG607 if no checkpoint of the output folder is complete.
    """
    folder = _named(invocation, name)
    if not _inside(folder):
        return folder
    newest = _ml("inspect").summarize_folder(folder).newest
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {str(folder)!r} is complete",
            code="FG607",
            hint=f"'fgcli ckpt verify {folder}' lists the problems of each",
        )
    print_note(f"the newest of {near_path(str(folder))}: {newest.folder.name}")
    return Path(newest.folder)


def _export(invocation: Invocation) -> int:
    options = invocation.options
    source, into = _one(invocation, options.folder), Path(options.into)
    export = _ml("export").export_checkpoint
    written = export(source, into, max_shard_size=options.max_shard_size, dtype=options.dtype)
    print_export(source, into, {"files": written}, is_json=options.json)
    return 0


def _prune(invocation: Invocation) -> int:
    options = invocation.options
    asked = {"last": options.keep_last, "best": options.keep_best, "every": options.keep_every}
    if not any(asked.values()):
        raise ProjectError(
            "no option says which checkpoints to keep",
            code="FG678",
            hint="give --keep-last, --keep-best or --keep-every",
        )
    pruned = _ml("retention")
    survey = _survey(invocation, options.folder)
    gone = pruned.checkpoints_to_prune(survey, **asked)
    kept = [found for found in survey.checkpoints if found not in gone]
    if not options.json:
        write_text(prune_text(survey, gone, kept), look=LOOK)
    removed = gone
    if gone and not options.dry_run:
        # Every byte of what is kept is read before anything is removed.
        pruned.require_intact_checkpoint(survey, gone)
        removed = gone if options.yes or _agreed(len(gone)) else []
        for found in removed:
            pruned.remove_checkpoint(found)
    if options.json:
        names = {"removed": removed, "kept": [found for found in survey.checkpoints if found not in removed]}
        lists = {name: [str(found.folder) for found in founds] for name, founds in names.items()}
        write_json({"output_dir": str(survey.folder), "dry_run": options.dry_run, **lists})
    elif not options.dry_run:
        write_text(f"{plural(len(removed), 'checkpoint')} removed")
    return 0


def _agreed(count: int) -> bool:
    """Asks on the terminal whether checkpoints may be removed, and returns True if the user agrees.

    Raises:
        ProjectError: FG678 if the standard input is not a terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise ProjectError(
            f"there is no terminal to ask whether {plural(count, 'checkpoint')} may be removed",
            code="FG678",
            hint="--yes removes them, --dry-run only lists them",
        )
    print_note(f"remove {plural(count, 'checkpoint')} for good? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
