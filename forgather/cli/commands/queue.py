"""`fgcli queue`: commands that wait until a place is free. Running them runs the code that their configs name."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import Line, print_note, write_json, write_lines
from forgather.cli.palette import styled
from forgather.errors import ProjectError, nearest
from forgather.sweeps.driver import Sweep
from forgather.sweeps.journal import Outcome, TrialHistory
from forgather.sweeps.queue import COMMAND, FOLDER, Queue, default_queue
from forgather.sweeps.slots import local_slots
from forgather.sweeps.space import MOST_TRIALS

EXECUTES = True
HANDS_THROUGH = True
REST_INTO = ("number",)
_ACTIONS = ("add", "ls", "rm", "run")
DESCRIPTION = """Let commands wait until a place is free. 'add' puts a command of fgcli into the queue, 'ls' lists it,
'rm' removes what has not been started, and 'run' runs the commands in order, as many at once as there are slots, until
none is left; commands can be added meanwhile. After Ctrl-C or a kill, 'run' starts what had not ended again."""
EXAMPLES = """examples:
  fgcli queue add -- -p projects/tiny_llama -t fast train
  fgcli queue add -- -p projects/tiny_llama -t fast train --set trainer_args.seed=2 --output-dir out/seed2
  fgcli queue ls
  fgcli queue run --slots 2"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("action", metavar="add|ls|rm|run", help="what to do; the command to add follows after --")
    parser.add_argument("number", nargs="*", metavar="N", help="with rm: the number of a command")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="with run: commands at once (default: one for each device, or 1)"
    )
    parser.add_argument("--queue", metavar="DIR", help="folder of the queue (default: the user's own)")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command, and returns the exit status; of 'run', 1 if a command failed."""
    options = invocation.options
    queue = Queue(os.path.abspath(options.queue) if options.queue else default_queue())
    if options.action not in _ACTIONS:
        hint = nearest(options.action, _ACTIONS) or f"use one of {', '.join(_ACTIONS)}"
        raise ProjectError(f"'fgcli queue {options.action}' has no meaning", code="FG563", hint=hint)
    _refuse_unused(options, invocation.handed)
    if options.action == "add":
        return _add(queue, invocation.handed, as_json=options.json)
    if options.action == "rm":
        if not options.number:
            raise ProjectError("'fgcli queue rm' names no command", code="FG563", hint="fgcli queue ls lists them")
        queue.remove([_number(word) for word in options.number])
        return 0
    if options.action == "run":
        if options.slots is not None and not 1 <= options.slots <= MOST_TRIALS:
            hint = f"give a number from 1 to {MOST_TRIALS:,}"
            raise ProjectError(f"--slots is {options.slots}", code="FG565", hint=hint)
        entries = queue.run(local_slots(options.slots, 1), _Reporter().report)
    else:
        entries = queue.entries()
    if options.json:
        write_json({"folder": queue.folder, "entries": [_as_data(entry) for entry in entries]})
    else:
        write_lines([_line(entry) for entry in entries] or [Line("the queue is empty")])
    return int(options.action == "run" and any(entry.outcome is Outcome.FAILED for entry in entries))


def _refuse_unused(options: argparse.Namespace, handed: Sequence[str]) -> None:
    """Raises an error if a word of the command line would have no effect."""
    given = {"add": handed and "the command after --", "rm": options.number and "the number of a command"}
    given["run"] = options.slots is not None and "--slots"
    for action, what in given.items():
        if what and action != options.action:
            message = f"{what} belongs to 'fgcli queue {action}', not to 'fgcli queue {options.action}'"
            raise ProjectError(message, code="FG563", hint="fgcli queue --help")


def _number(word: str) -> int:
    if word.isascii() and word.isdecimal() and len(word) < 19:
        return int(word)
    raise ProjectError(f"{word!r} is not the number of a command", code="FG563", hint="fgcli queue ls lists them")


def _add(queue: Queue, words: tuple[str, ...], *, as_json: bool) -> int:
    if not words:
        raise ProjectError(
            "'fgcli queue add' has no command",
            code="FG563",
            hint="write it after --: fgcli queue add -- -t tiny.yaml train",
        )
    number = queue.add(words, os.getcwd())
    if as_json:
        write_json({"number": number, "folder": queue.folder})
    else:
        print_note(f"command {number} waits: fgcli {shlex.join(words)}")
    return 0


def _state(entry: TrialHistory) -> str:
    if entry.skipped is not None:
        return entry.skipped
    if entry.outcome is not None:
        return str(entry.outcome)
    return "started" if entry.attempts else "waiting"


def _as_data(entry: TrialHistory) -> dict[str, object]:
    return {
        "number": entry.number,
        "state": _state(entry),
        "command": entry.values[COMMAND],
        "folder": entry.values[FOLDER],
        "attempts": entry.attempts,
        "cause": entry.cause,
    }


def _line(entry: TrialHistory) -> Line:
    state = _state(entry)
    role = {"failed": "error", "finished": "good", "started": "strong"}.get(state, "")
    cause = f"  ({entry.cause})" if entry.cause else ""
    return Line(
        f"{entry.number:4}  {state:<11}  fgcli {entry.values[COMMAND]}{cause}", lambda line: styled(role, line), 19
    )


class _Reporter:
    """Says in a line when a command starts or ends."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, int]] = {}

    def report(self, sweep: Sweep) -> None:
        for number, entry in sweep.journal.history.trials.items():
            now = (entry.attempts, entry.ends)
            before = self._said.setdefault(number, (0, 0) if entry.outcome is None else now)
            if now == before:
                continue
            self._said[number] = now
            what = (
                "starts" if entry.outcome is None else str(entry.outcome) + (f" ({entry.cause})" if entry.cause else "")
            )
            print_note(f"command {number} {what}: fgcli {entry.values[COMMAND]}")
