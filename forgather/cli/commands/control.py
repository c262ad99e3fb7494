"""`fgcli control`: pauses, resumes, saves, stops or changes a run that goes on."""

from __future__ import annotations

import argparse
import os
import platform

from forgather.cli.invocation import Invocation
from forgather.cli.options import NUMBER, a_name, a_time, add_json
from forgather.cli.output import print_note, write_json, write_text
from forgather.errors import ControlError
from forgather.launch.control_client import send_request
from forgather.run_control import SETTABLE, Action, Request, read_settings
from forgather.runs.run_choice import RUN_HELP, folder_of

DESCRIPTION = """Control a run that goes on: pause and resume it, save a checkpoint, stop it, or change a setting. The
run acts at the end of its current step, on all its processes, and answers what it did and at which step."""
EXAMPLES = f"""settings that can be set: {", ".join(SETTABLE)}

examples:
  fgcli control output_models/tiny/runs/20260101T120000Z-tiny pause
  fgcli control last resume
  fgcli control RUN save                          a checkpoint of this step, also with save_strategy: no
  fgcli control RUN set learning_rate=1e-4        the rate from now on; the rest of the schedule is scaled with it
  fgcli control RUN stop --timeout 60             saves and ends, as Ctrl-C does"""

REST_INTO = ("settings",)
_FIRST_NOTE_SECONDS, _NOTE_SECONDS = 2.0, 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("run_folder", metavar="RUN", type=a_name, help=RUN_HELP)
    parser.add_argument("action", choices=[str(action) for action in Action], metavar="ACTION", help=", ".join(Action))
    parser.add_argument(
        "settings", nargs="*", metavar="NAME=VALUE", help="with 'set': the settings and their new values"
    )
    parser.add_argument(
        "--timeout",
        type=a_time,
        metavar="SECONDS",
        help="how long to wait for the answer (default: while the run goes on)",
    )
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: sends the request and prints the answer. Returns 1 if the run refused it, else 0."""
    options = invocation.options
    action = Action(options.action)
    request = Request(action=action, settings=_settings(action, options.settings), host=platform.node())
    folder = folder_of(options.run_folder, options.project or os.curdir)
    answer = send_request(folder, request, timeout=options.timeout, waiting=_Notes())
    if answer.error is not None:
        at = "" if answer.step is None else f"step {answer.step}: "
        hint = answer.error.get("hint")
        raise ControlError(at + str(answer.error["message"]), code=str(answer.error.get("code")), hint=hint)
    if options.json:
        write_json({"action": action, "step": answer.step, "done": answer.done, **answer.facts})
    else:
        write_text(f"step {answer.step}: {answer.done}")
    return 0


def _settings(action: Action, words: list[str]) -> dict[str, float]:
    """Returns the new values of settings.

    Raises:
        ControlError: FG512 or FG513 if a word is not a setting with a value.
    """
    if action is not Action.SET:
        if words:
            raise ControlError(
                f"{str(action)!r} takes no {words[0]!r}", code="FG512", hint="only 'set' takes NAME=VALUE"
            )
        return {}
    if not words:
        names = ", ".join(SETTABLE)
        raise ControlError("'set' needs NAME=VALUE", code="FG512", hint=f"NAME is one of: {names}")
    found: dict[str, object] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name in found:
            raise ControlError(f"{name} is set twice", code="FG513", hint="give one value")
        found[name] = float(text) if NUMBER.fullmatch(text) else text
    return read_settings(found)


class _Notes:
    """Prints now and then that the run has not answered yet."""

    def __init__(self) -> None:
        self._next = _FIRST_NOTE_SECONDS

    def __call__(self, passed: float) -> None:
        if passed >= self._next:
            self._next = max(_NOTE_SECONDS, passed + _NOTE_SECONDS)
            print_note(f"waiting for the end of the step ({passed:.0f} s)")
