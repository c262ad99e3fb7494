"""`fgcli runs`: lists runs, and labels, archives and removes them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import import_module

from forgather.cli import runs_import
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name, add_json, add_output, comma_separated
from forgather.cli.output import columns, plural, print_note, write_json, write_lines, write_text
from forgather.cli.runs_output import csv_text, details_lines, strict, table_lines
from forgather.control_socket import remove_dead_sockets
from forgather.errors import ControlError, ProjectError
from forgather.interventions import Intervention, read_interventions
from forgather.project.path_display import near_path
from forgather.project.run_facts import is_run_folder
from forgather.run_status import Status
from forgather.runs.condition import parse_condition
from forgather.runs.labels import Labels, change_labels, read_labels
from forgather.runs.references import output_folder
from forgather.runs.removal import Usage, archive_run, disk_usage, kept_checkpoints, refuse_needed, remove_run
from forgather.runs.run_choice import choose_runs
from forgather.runs.run_table import RunTable, read_table
from forgather.runs.summary import RunSummary

DESCRIPTION = """List the runs below a folder: what each does or how it ended, its metrics, and the values of the
config that differ between them. Runs are found wherever they were moved to. The exit status is 1 if a file of a run
is damaged or of a newer version; all other runs are listed. Without an action, runs are listed."""
EXAMPLES = """examples:
  fgcli runs
  fgcli runs output_models --where 'trainer_args.learning_rate<1e-3' --where 'eval_loss<2.5' --sort eval_loss
  fgcli runs --status failed,killed -n 10
  fgcli runs show last
  fgcli runs tag baseline 20260101T120000Z-tiny
  fgcli runs rm --dry-run output_models/tiny_llama/runs/20260101*

RUN is the path of a run folder, a part of a name that only one run has, or 'last'.
'fgcli runs ACTION --help' describes an action."""
REST_INTO = ("runs", "folders")
_ACTIONS = {
    "ls": "list runs; the action can be left out",
    "show": "print what is known about runs",
    "tag": "give runs tags, which the option --tag finds",
    "untag": "take tags from runs",
    "group": "put runs into a group; '' takes them out of it",
    "note": "write a note on runs; '' removes it",
    "archive": "pack run folders into runs/archive/NAME.tar.gz, and remove them",
    "rm": "remove run folders; checkpoints and models of the output folder stay",
    "import": "make run folders of the local files of W&B or TensorBoard",
}
_EXAMPLES = {
    "ls": "examples:\n  fgcli runs --where 'optimizer~adamw' --sort -time\n  fgcli runs --group warmup --csv",
    "show": "example:\n  fgcli runs show last --json",
    "tag": "example:\n  fgcli runs tag baseline,paper 20260101T120000Z-tiny",
    "untag": "example:\n  fgcli runs untag paper 20260101T120000Z-tiny",
    "group": "example:\n  fgcli runs group warmup output_models/tiny_llama/runs/*",
    "note": "example:\n  fgcli runs note 'learning rate too high' last",
    "archive": "example:\n  fgcli runs archive output_models/tiny_llama/runs/20260101T120000Z-tiny",
    "rm": "example:\n  fgcli runs rm output_models/tiny_llama/runs/20260101* --dry-run",
    "import": "examples:\n  fgcli runs import wandb wandb\n  fgcli runs import tensorboard logs -o old_runs",
}
_LABELS = {"tag": "TAG,...", "untag": "TAG,...", "group": "GROUP", "note": "TEXT"}


def completed_words(words: Sequence[str]) -> list[str]:
    """Returns the words after `runs` as argparse needs them: with the action, and with `--sort=-NAME` as one word."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--sort" and word.startswith("-"):
            joined[-1] = f"--sort={word}"
        else:
            joined.append(word)
    if not {"-h", "--help"}.isdisjoint(joined[:1]) or (joined and joined[0] in _ACTIONS):
        return joined
    return ["ls", *joined]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in _ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        action.epilog = _EXAMPLES[name]
        if name == "ls":
            _list_options(action)
        elif name == "import":
            runs_import.configure(action)
        else:
            _run_options(action, name)
        add_json(action)


def _list_options(parser: argparse.ArgumentParser) -> None:
    what = "folder with runs (default: that of -p, or this one)"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=a_name, help=what)
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs with a value, as 'optimizer.lr<1e-3': a column, a metric or a path of the config, one of "
        "= != < <= > >= ~, and a value; repeat it for several",
    )
    parser.add_argument(
        "--sort", metavar="NAME", help="sort by a value; -NAME for the greatest first (default: -started)"
    )
    parser.add_argument("--status", metavar="WORD,...", type=_statuses, help=f"only runs that are {', '.join(_WORDS)}")
    parser.add_argument("--tag", metavar="TAG", type=a_name, help="only runs with this tag")
    parser.add_argument("--group", metavar="GROUP", type=a_name, help="only runs of this group")
    parser.add_argument("-n", "--number", metavar="N", type=_count, help="the first N runs of the list")
    parser.add_argument(
        "--attempts", action="store_true", help="every attempt at a trial of a sweep (default: the last one)"
    )
    parser.add_argument("--csv", action="store_true", help="print the list as CSV")
    add_output(parser)


def _run_options(parser: argparse.ArgumentParser, name: str) -> None:
    if name in _LABELS:
        parser.add_argument("label", metavar=_LABELS[name])
    parser.add_argument("runs", nargs="+", metavar="RUN", type=a_name, help="path or unique part of the name of a run")
    if name in ("rm", "archive"):
        parser.add_argument("--dry-run", action="store_true", help="print what would go, and change nothing")
        parser.add_argument("--yes", action="store_true", help="do not ask")


_WORDS = [*map(str, Status), "unknown"]


def _statuses(text: str) -> tuple[str, ...]:
    words = comma_separated(text)
    for word in words:
        if word not in _WORDS:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(_WORDS)}")
    return words


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")


def run(invocation: Invocation) -> int:
    """Runs the action that the command line names, and returns the exit status."""
    action = invocation.options.action
    acts: dict[str, Callable[[Invocation], int]] = {"ls": _ls, "show": _show, "rm": _remove, "archive": _remove}
    acts["import"] = runs_import.run_import
    return acts.get(action, _label)(invocation)


def _top(invocation: Invocation) -> str:
    return invocation.options.project or os.curdir


def _ls(invocation: Invocation) -> int:
    options = invocation.options
    if options.csv and options.json:
        raise ProjectError("two formats are given: --json and --csv", code="FG450", hint="leave one of them out")
    conditions = [parse_condition(text) for text in options.where]
    table = read_table(options.folders or [_top(invocation)])
    if not options.attempts and (count := table.leave_out_earlier_attempts()):
        print_note(f"{plural(count, 'earlier attempt')} at trials of sweeps left out; --attempts lists every attempt")
    if options.status:
        table.runs = [run for run in table.runs if str(run.status or "unknown") in options.status]
    if options.tag is not None:
        table.runs = [run for run in table.runs if options.tag in run.labels.tags]
    if options.group is not None:
        table.runs = [run for run in table.runs if run.labels.group == options.group]
    for name, count in table.where(conditions).items():
        print_note(f"{plural(count, 'run')} without {name!r} {'is' if count == 1 else 'are'} left out")
    if options.sort is not None:
        table.sort(options.sort)
    _write_table(table, invocation)
    table.save()
    remove_dead_sockets()
    return int(any(run.problems for run in table.runs))


def _write_table(table: RunTable, invocation: Invocation) -> None:
    options = invocation.options
    if options.json or options.csv:
        table.runs = table.runs[: options.number]
        if options.json:
            write_json({"runs": strict(table.records())}, options.output)
        else:
            write_text(csv_text(table.rows()), options.output)
        return
    top = (options.folders or [_top(invocation)])[0]
    width = columns() if options.output is None else None
    lines = table_lines(table, top, width=width, most=options.number, now=time.time())
    write_lines(lines, options.output)
    if not table.stores:
        print_note(f"there are no runs below {near_path(top)}: 'fgcli train' makes one")


def _show(invocation: Invocation) -> int:
    found = [_with_interventions(run) for run in choose_runs(invocation.options.runs, _top(invocation))]
    if invocation.options.json:
        write_json({"runs": [_facts(run, changes) for run, changes in found]})
    else:
        texts = ["\n".join(details_lines(run, _size(disk_usage(run.folder)), changes)) for run, changes in found]
        write_text("\n\n".join(texts))
    return int(any(run.problems for run, _ in found))


def _with_interventions(run: RunSummary) -> tuple[RunSummary, list[Intervention]]:
    """Returns a run and what the user changed while it went on; a damaged record of that is a problem of the run."""
    try:
        return run, read_interventions(run.folder)
    except ControlError as error:
        return replace(run, problems=(*run.problems, error.message)), []


def _facts(run: RunSummary, changes: Sequence[Intervention]) -> object:
    (record,) = RunTable([run], {}).records()
    usage = disk_usage(run.folder)
    more = {"command": run.command, "output_dir": run.output_dir, "rerun_of": run.rerun_of, "bytes": usage.num_bytes}
    return strict({**record, **more, "values": dict(run.changes), "interventions": [asdict(one) for one in changes]})


def _label(invocation: Invocation) -> int:
    options = invocation.options
    is_path = os.path.isdir(options.label) and (os.sep in options.label or is_run_folder(options.label))
    # A plain word may be the name of a folder here, too.
    if is_path and options.action != "note":
        raise ProjectError(
            f"{options.label!r} is a folder, and the first word after {options.action!r} is a label",
            code="FG504",
            hint=f"fgcli runs {options.action} {_LABELS[options.action]} RUN ...",
        )
    runs = choose_runs(options.runs, _top(invocation))
    # All files are read before the first one is written.
    for run in runs:
        read_labels(run.folder)

    def change(labels: Labels) -> Labels:
        return _labelled(labels, options.action, options.label)

    changed = [(run, change_labels(run.folder, change)) for run in runs]
    if options.json:
        write_json({"runs": [{"folder": run.folder, **_fields(labels)} for run, labels in changed]})
    else:
        for run, labels in changed:
            texts = [f"{name} {', '.join(value) if isinstance(value, list) else value}"
                     for name, value in _fields(labels).items() if value]  # fmt: skip
            write_text(f"{run.name}: {'; '.join(texts) or 'no labels'}")
    return 0


def _labelled(labels: Labels, action: str, text: str) -> Labels:
    if action == "group":
        return replace(labels, group=text or None)
    if action == "note":
        return replace(labels, note=text or None)
    words = set(comma_separated(text))
    tags = set(labels.tags) | words if action == "tag" else set(labels.tags) - words
    return replace(labels, tags=tuple(sorted(tags)))


def _fields(labels: Labels) -> dict[str, object]:
    return {"group": labels.group, "tags": list(labels.tags), "note": labels.note}


def _remove(invocation: Invocation) -> int:
    options = invocation.options
    runs = choose_runs(options.runs, _top(invocation))
    word = "removed" if options.action == "rm" else "archived"
    refuse_needed(runs, _surroundings(runs, invocation), word)
    usages = [disk_usage(run.folder) for run in runs]
    total = Usage(sum(one.num_files for one in usages), sum(one.num_bytes for one in usages))
    if not options.json:
        lines = [f"  {near_path(run.folder)}  {_size(usage)}" for run, usage in zip(runs, usages, strict=True)]
        write_text("\n".join([*lines, f"{plural(len(runs), 'run')}, {_size(total)}", *_kept(runs)]))
    done = not options.dry_run and (options.yes or _agreed(len(runs), options.action))
    archives = []
    for run in runs if done else ():
        if options.action == "rm":
            remove_run(run.folder)
        else:
            archives.append(archive_run(run.folder))
    if options.json:
        gone = [run.folder for run in runs]
        facts = {"runs": gone, "bytes": total.num_bytes, "dry_run": options.dry_run, "done": done}
        write_json(facts | ({"archives": archives} if options.action == "archive" else {}))
    elif done:
        write_text(f"{plural(len(runs), 'run')} {word}")
        for file in archives:
            folder = os.path.dirname(os.path.dirname(file))
            restore = shlex.join(["tar", "-xzf", near_path(file), "-C", near_path(folder)])
            write_text(f"  {near_path(file)}  (to restore: {restore})")
    return 0


def _surroundings(runs: Sequence[RunSummary], invocation: Invocation) -> list[RunSummary]:
    """Returns the runs that may refer to these: those below the working folder, their projects and output folders."""
    folders = {os.path.realpath(_top(invocation))}
    for run in runs:
        output_dir = output_folder(run.folder)
        near = [run.project_dir, output_dir and os.path.dirname(output_dir), os.path.dirname(run.folder)]
        folders |= {os.path.realpath(folder) for folder in near if folder and os.path.isdir(folder)}
    # A folder inside another one is searched with it, and the root would be the whole disk.
    tops = [
        one for one in folders if one != os.sep and not any(one.startswith(f"{other}{os.sep}") for other in folders)
    ]
    return read_table(tops).runs


def _kept(runs: Sequence[RunSummary]) -> list[str]:
    kept = kept_checkpoints(runs)
    return [
        f"stays: {plural(len(names), 'checkpoint')} in {near_path(folder)} ('fgcli ckpt prune' removes checkpoints)"
        for folder, names in kept.items()
    ]


def _size(usage: Usage) -> str:
    size: str = import_module("forgather.ml.number_format").format_bytes(usage.num_bytes)
    return f"{size} in {plural(usage.num_files, 'file')}"


def _agreed(count: int, action: str) -> bool:
    """Asks on the terminal whether run folders may be removed, and returns True if the user agrees.

    Raises:
        ProjectError: FG503 if the standard input is not a terminal.
    """
    what = f"{plural(count, 'run folder')} may be {'removed' if action == 'rm' else 'archived and removed'}"
    if sys.stdin is None or not sys.stdin.isatty():
        raise ProjectError(
            f"there is no terminal to ask whether {what}",
            code="FG503",
            hint="--yes does it without a question, --dry-run only lists them",
        )
    verb = "remove" if action == "rm" else "archive and remove"
    print_note(f"{verb} {plural(count, 'run folder')}? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
