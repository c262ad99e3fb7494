"""`fgcli watch`: shows runs while they go on, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name, add_json
from forgather.cli.output import print_note, write_text
from forgather.errors import ProjectError
from forgather.project.path_display import near_path
from forgather.run_status import Status
from forgather.runs.run_choice import choose_runs
from forgather.runs.run_folders import find_runs
from forgather.runs.run_table import read_table
from forgather.runs.watch_data import snapshot
from forgather.runs.watched_runs import Ranking, WatchedRuns
from forgather.sweeps.journal import JOURNAL, read_history
from forgather.sweeps.spec import Goal

DESCRIPTION = """Show runs while they go on: curves, speed, time left, memory, metrics, anomalies. What a run logs is
visible within two seconds, and only what is new is read. RUN is the path of a run folder, a part of a name that only
one run has, or 'last'; the default is the newest run that goes on below this folder. Of a FOLDER, all runs that go on
are shown, and new ones as they start; of the folder of a sweep, all trials, the best first. The command ends with the
last RUN, and its exit status says how that ended: 0 finished, 1 failed, 3 killed or unknown, 4 interrupted. With a
FOLDER, and with --serve, it goes on until Ctrl-C."""
EXAMPLES = """examples:
  fgcli watch                                    the newest run that goes on
  fgcli watch output_models                      all runs below a folder, and those that start
  fgcli watch output_models/own/sweeps/20260101T120000Z
  fgcli watch last --once                        one frame, and no more
  fgcli watch last --json | jq .runs[0].metrics.loss
  fgcli watch --serve                            the same in a browser, on this machine only"""
REST_INTO = ("targets",)
POLL_SECONDS = 1.0
"""Units: seconds. The time between two looks at the files."""
_FATES = {Status.FINISHED: 0, Status.FAILED: 1, Status.INTERRUPTED: 4}
_UNKNOWN = 3
_WIDTH, _HEIGHT = 100, 30
"""The size of a frame where there is no terminal."""
_ASCII = str.maketrans({"·": "|", "…": "."})


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("targets", nargs="*", metavar="RUN|FOLDER", type=a_name, help="what is watched")
    parser.add_argument("--once", action="store_true", help="print one frame, and end")
    parser.add_argument("--serve", action="store_true", help="serve a page for a browser on this machine")
    parser.add_argument("--port", type=int, metavar="N", help="port of the page (default: any free one)")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: shows runs until they have ended, and returns the exit status."""
    options = invocation.options
    if options.port is not None and not (options.serve and 0 <= options.port < 2**16):
        what = "is no port" if options.serve else "is given without --serve"
        raise ProjectError(f"--port {options.port} {what}", code="FG551", hint="--serve --port 8000, or any free port")
    if options.serve and (options.once or options.json):
        raise ProjectError("--serve goes with neither --once nor --json", code="FG551", hint="leave one of them out")
    watched = _watched(options.targets, invocation.options.project or os.curdir)
    watched.update()
    if options.serve:
        return _serve(watched, options.port or 0)
    if options.json:
        _follow(watched, options.once, lambda: write_text(json.dumps(snapshot(watched), ensure_ascii=False)))
    elif options.once:
        _print_frame(watched)
    elif sys.stdout is not None and sys.stdout.isatty():
        _draw(watched)
    else:
        _print_lines(watched)
    return _fate(watched)


def _watched(targets: list[str], top: str) -> WatchedRuns:
    """Returns what the words of the command line name.

    Raises:
        ProjectError: FG500 if a word names no run; FG550 if there is no run below the default folder.
    """
    if not targets:
        runs = read_table([top]).runs
        if not runs:
            raise ProjectError(
                f"there is no run below {near_path(top)}",
                code="FG550",
                hint="'fgcli train' makes one; 'fgcli watch .' waits for it",
            )
        found = next((run for run in runs if run.status is not None and run.status.is_live), None)
        if found is None:
            print_note(
                f"no run goes on below {near_path(top)}: this is the newest one; 'fgcli watch .' waits for others"
            )
        return WatchedRuns([(found or runs[0]).folder])
    tops = [word for word in targets if _is_folder_of_runs(word)]
    named = [run.folder for run in choose_runs([word for word in targets if word not in tops], top)]
    return WatchedRuns(named, tops, _ranking(tops))


def _is_folder_of_runs(word: str) -> bool:
    if not os.path.isdir(word):
        return False
    return [os.path.realpath(word)] != [run.folder for run in find_runs(word)]


def _ranking(tops: list[str]) -> Ranking | None:
    """Returns the order of the trials of a sweep; None if the folders are not that of one sweep."""
    if len(tops) != 1 or not os.path.isfile(os.path.join(tops[0], JOURNAL)):
        return None
    history = read_history(tops[0])
    facts = history.sweep
    return Ranking(
        str(facts.get("metric", "eval_loss")),
        is_greater_better=facts.get("goal") == Goal.MAXIMIZE,
        title=f"sweep {os.path.basename(os.path.realpath(tops[0]))}",
        num_trials=sum(one.skipped is None for one in history.trials.values()),
    )


def _goes_on(watched: WatchedRuns) -> bool:
    return bool(watched.tops) or any(run.is_live for run in watched.live.values())


def _fate(watched: WatchedRuns) -> int:
    """Returns the exit status: the greatest of those of the runs that were named."""
    if watched.tops:
        return 0
    ends = [run.summary.status for run in watched.live.values() if not run.is_live]
    return max((_UNKNOWN if end is None else _FATES.get(end, _UNKNOWN) for end in ends), default=0)


def _follow(watched: WatchedRuns, once: bool, show: Callable[[], object]) -> None:
    """Shows the runs now and after each change, until they have ended."""
    show()
    while not once and _goes_on(watched):
        time.sleep(POLL_SECONDS)
        if watched.update():
            show()


def _draw(watched: WatchedRuns) -> None:
    """Draws the runs on the terminal until they have ended, and leaves the last frame on it."""
    from rich.console import Console
    from rich.live import Live

    from forgather.cli.watch_output import frame

    # Asked before the first frame: while frames are drawn, `sys.stdout` is one of rich's that has no encoding.
    console, is_braille = Console(), _has_braille()

    def drawn() -> object:
        size = console.size
        return frame(watched, width=size.width, height=size.height, now=time.time(), is_braille=is_braille)

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            # Drawn again without a change, too: the time goes on, and the window may have another size.
            while True:
                live.update(drawn(), refresh=True)  # type: ignore[arg-type]
                if not _goes_on(watched):
                    break
                time.sleep(POLL_SECONDS)
                watched.update()
    finally:
        console.print(drawn())


def _print_frame(watched: WatchedRuns) -> None:
    from rich.console import Console

    from forgather.cli.watch_output import frame

    is_terminal, is_braille = sys.stdout.isatty(), _has_braille()
    console = Console(file=sys.stdout, width=None if is_terminal else _width_of_environment())
    height = console.height if is_terminal else _HEIGHT
    shown = frame(watched, width=console.width, height=height, now=time.time(), is_braille=is_braille)
    if is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    lines = captured.get().split("\n")
    write_text("\n".join(line.rstrip() if is_braille else line.rstrip().translate(_ASCII) for line in lines).rstrip())


def _width_of_environment() -> int:
    with suppress(ValueError, KeyError):
        return max(20, min(400, int(os.environ["COLUMNS"])))
    return _WIDTH


def _has_braille() -> bool:
    with suppress(LookupError, UnicodeEncodeError):
        "⠿━╭".encode(getattr(sys.stdout, "encoding", None) or "ascii")
        return True
    return False


def _print_lines(watched: WatchedRuns) -> None:
    """Prints a line for each change of a run, for output that is no terminal."""
    from forgather.cli.watch_output import event_line, run_line, titles_of

    printed: dict[str, tuple[int, int]] = {}

    def show() -> None:
        lines = []
        is_named = len(watched.live) > 1 or bool(watched.tops)
        titles = titles_of(watched) if is_named else {}
        for folder, run in watched.live.items():
            version, count = printed.get(folder, (0, 0))
            if run.version <= version:
                continue
            # An earlier attempt at a trial has no title of its own.
            name = titles.get(folder, run.summary.name) if is_named else None
            lines += [event_line(event, name) for event in run.events if event.number > count]
            lines.append(run_line(run, name))
            printed[folder] = (run.version, run.num_events)
        if lines:
            write_text("\n".join(lines))

    _follow(watched, False, show)


def _serve(watched: WatchedRuns, port: int) -> int:
    """Serves the page until Ctrl-C."""
    from forgather.runs.watch_server import WatchServer

    with WatchServer(watched, port) as server:
        print_note(f"open  {server.address}")
        print_note("The address is a secret: who has it sees these runs. Ctrl-C ends the server, and no run.")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    return 0
