"""`fgcli golden`: compares the graphs of a project's configs with their goldens, which are stored snapshots."""

from __future__ import annotations

import argparse

from forgather.cli.diff_output import Places, difference_facts, difference_lines, hang, paint, summary
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import plural, print_error, write_json, write_text
from forgather.cli.palette import Look
from forgather.project.golden import GoldenCheck, GoldenState, compare_goldens, update_golden
from forgather.project.metadata_cache import load_meta
from forgather.project.origin_labels import Labels
from forgather.project.path_display import Display, near_path
from forgather.project.workspace import find_project

TROUBLE = 2
DESCRIPTION = """Compare the graph of each config with its golden, the snapshot in the project's folder 'goldens'.
The exit status is 0 if all are equal, 1 if one differs or is missing, 2 after an error. Nothing is imported or
constructed. A golden does not depend on the machine: paths begin with {project}, times and host names are constants."""
EXAMPLES = """examples:
  fgcli golden                                   all configs of the project
  fgcli golden tiny                              one of them
  fgcli golden --update                          make today's graphs the goldens; then read 'git diff'"""
_WORDS = {GoldenState.SAME: "as before", GoldenState.BROKEN: "cannot be compared"}
_NEXT = {GoldenState.MISSING: "'--update' writes it", GoldenState.LOST: "'--update' removes the golden"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="configs (default: all of the project)")
    parser.add_argument(
        "--update", action="store_true", help="write the goldens again, and remove those without a config"
    )
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: compares or writes the goldens, and returns the exit status."""
    options = invocation.options
    meta = load_meta(find_project(invocation.project_dir))
    judged = compare_goldens(meta, options.configs)
    display = Display(meta.project_dir, meta.workspace_root)
    labels = Labels(display, lambda: None)
    changed = [item for item in judged if update_golden(item)] if options.update else []
    if options.json:
        write_json(
            {"project": meta.name, "goldens": [_fact(item, item in changed, (labels, labels)) for item in judged]}
        )
    elif options.update:
        write_text("\n".join([*(_done(item) for item in changed), _counts(changed, "changed")]))
    else:
        write_text(
            "\n".join([*_report(judged, (labels, labels)), _verdict(judged)]), look=Look(paint, hang, display.named)
        )
    broken = [item for item in judged if item.state is GoldenState.BROKEN and item not in changed]
    for item in broken:
        if item.error is not None:
            print_error(item.error, meta.project_dir)
    return TROUBLE if broken else int(not options.update and any(item.state is not GoldenState.SAME for item in judged))


def _fact(item: GoldenCheck, changed: bool, places: Places) -> dict[str, object]:
    return {
        "config": item.config,
        "file": places[0].file(item.file),
        "state": str(item.state),
        "updated": changed,
        "differences": difference_facts(item.differences, places),
    }


def _done(item: GoldenCheck) -> str:
    return f"{near_path(item.file)} {'removed' if item.state is GoldenState.LOST else 'written'}"


def _counts(items: list[GoldenCheck], word: str) -> str:
    return f"{plural(len(items), 'golden')} {word}"


def _report(judged: list[GoldenCheck], places: Places) -> list[str]:
    lines: list[str] = []
    for item in judged:
        if item.state is GoldenState.DIFFERS:
            lines += [f"--- {near_path(item.file)}", f"+++ {item.config}", ""]
            lines += [*difference_lines(item.differences, places), "", summary(item.differences), ""]
    width = max((len(item.config) for item in judged), default=0)
    for item in judged:
        words = summary(item.differences) if item.differences else _WORDS.get(item.state, str(item.state))
        following = f": {_NEXT[item.state]}" if item.state in _NEXT else ""
        lines.append(f"{item.config:<{width}}  {words}{following}")
    return lines


def _verdict(judged: list[GoldenCheck]) -> str:
    same = sum(item.state is GoldenState.SAME for item in judged)
    return f"{same} of {len(judged)} as before"
