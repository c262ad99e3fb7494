"""The words by which a user controls a run: actions, settings that may change, and the messages that carry them.

A client sends a `Request` as one line of JSON, and the run answers with an `Answer`. Both sides use this module. The
content of a message is untrusted: `read_request` accepts what `encode_request` writes, and refuses everything else.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from forgather.bounded import read_bytes
from forgather.errors import ControlError, ForgatherError, nearest
from forgather.heartbeat import Heartbeat, current_heartbeat
from forgather.run_status import RunStatus, Status, of_this_process, status_of_facts

FORM = 1
"""The number of the format of messages."""
MAX_BYTES = 1 << 16
"""Units: bytes. The largest message."""
FOLDER = "control"
"""The folder inside a run folder for requests that cannot be sent through a socket."""
BY_FILE = "file"
"""The address of a run that takes requests through files only."""
NOTE = "control.json"
REQUEST_FILE = re.compile(r"request-[0-9a-f]{32}\.json")
_LONGEST_NAME = 255


class Action(StrEnum):
    """What a user asks a run to do."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    STOP = "stop"
    SET = "set"


class Setting(NamedTuple):
    """A setting that may change while a run goes on.

    Args:
        accepts: a function that returns whether a number is a value of the setting.
        expected: the values that are accepted, in words.
        strategy: the training argument that must be "steps" for the setting to have an effect, or None.
    """

    accepts: Callable[[float], bool]
    expected: str
    strategy: str | None = None


_STEPS = (lambda value: value >= 1 and value == int(value) and value < 2**53, "a whole number from 1")
SETTABLE = {
    "learning_rate": Setting(lambda value: 0 < value < 2**53, "a number above 0"),
    "logging_steps": Setting(*_STEPS, "logging_strategy"),
    "eval_steps": Setting(*_STEPS, "eval_strategy"),
    "save_steps": Setting(*_STEPS, "save_strategy"),
}
"""The settings that `set` may change. Each has the same effect when the run is repeated."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of a user to a run.

    Args:
        action: what to do.
        settings: the new values of settings; empty for all actions but `set`.
        who: the name of the user, from the system's credentials and not from the message.
        host: the name of the machine on which the user is.
    """

    action: Action
    settings: Mapping[str, float] = field(default_factory=dict)
    who: str = ""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a run to a request.

    Args:
        step: the last finished optimizer step when the request was done or refused, or None if none is finished.
        done: what was done, as text; empty if the request was refused.
        facts: further facts about what was done, such as the folder of a checkpoint.
        error: the code, the message and the hint of a refusal, or None.
    """

    step: int | None = None
    done: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


def refusal(error: ForgatherError, step: int | None = None) -> Answer:
    """Returns the answer that refuses a request with an error.

    Args:
        error: the reason.
        step: the last finished optimizer step, or None.
    """
    return Answer(step=step, error={"code": error.code, "message": error.message, "hint": error.hint})


def read_settings(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns new values of settings after a check of names and values.

    Args:
        values: the values, as numbers, by the name of the setting.

    Raises:
        ControlError: FG512 if a setting cannot change while a run goes on; FG513 if a value is not accepted.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if name not in SETTABLE:
            raise ControlError(
                f"{_short(name)} cannot be set while a run goes on",
                code="FG512",
                hint=nearest(name, list(SETTABLE)),
            )
        setting = SETTABLE[name]
        # A whole number may have more digits than a float can have.
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not is_number or not math.isfinite(value) or not setting.accepts(value):
            raise ControlError(
                f"{name} is {_short(value)}, and must be {setting.expected}",
                code="FG513",
                hint=f"as in {name}={'100' if setting.strategy else '1e-4'}",
            )
        found[name] = int(value) if setting.strategy else float(value)
    return found


def encode_request(request: Request) -> bytes:
    """Returns a request as one line of JSON."""
    content = {"form": FORM, "action": request.action, "settings": dict(request.settings), "host": request.host}
    return _line(content)


def encode_answer(answer: Answer) -> bytes:
    """Returns an answer as one line of JSON."""
    return _line({"form": FORM, **asdict(answer)})


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode("ascii") + b"\n"


def read_request(content: bytes, *, who: str, host: str | None = None) -> Request:
    """Returns the request of a message.

    Args:
        content: the message.
        who: the name of the sender, from the system.
        host: the name of this machine, if the sender is on it; None to take the name that the message gives.

    Raises:
        ControlError: FG517 if the message is malformed; FG512 or FG513 if a setting is not accepted.
    """
    if len(content) > MAX_BYTES:
        raise _malformed(f"it has more than {MAX_BYTES:,} bytes")
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"it is not JSON ({str(error)[:80] or 'nested too deeply'})") from None
    if not isinstance(found, dict) or found.keys() != {"form", "action", "settings", "host"}:
        raise _malformed("it is not an object of 'form', 'action', 'settings' and 'host'")
    if type(found["form"]) is not int or found["form"] != FORM:
        raise _malformed(f"its form is {_short(found['form'])}, and this run reads form {FORM}")
    if found["action"] not in list(Action):
        raise _malformed(f"its action is {_short(found['action'])}, which is none of {', '.join(Action)}")
    name = found["host"]
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable():
        raise _malformed("its host is not the name of a machine")
    action, settings = Action(found["action"]), found["settings"]
    if not isinstance(settings, dict) or bool(settings) != (action is Action.SET):
        raise _malformed("'set' has settings, and no other action has any")
    return Request(action=action, settings=read_settings(settings), who=who, host=name if host is None else host)


def read_answer(content: bytes) -> Answer:
    """Returns the answer of a message.

    Raises:
        ControlError: FG517 if the message is malformed.
    """
    try:
        found = json.loads(content)
        step, error = found["step"], found["error"]
        if not (step is None or type(step) is int) or not (error is None or _is_error(error)):
            raise TypeError
        return Answer(step=step, done=str(found["done"]), facts=dict(found["facts"]), error=error)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ControlError(
            "the answer of the run is malformed", code="FG517", hint="is it a run of another version of Forgather?"
        ) from None


def _is_error(found: Any) -> bool:
    texts = [found.get("code"), found.get("hint")] if isinstance(found, dict) else [0]
    return all(text is None or isinstance(text, str) for text in texts) and isinstance(found["message"], str)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _malformed(why: str) -> ControlError:
    return ControlError(
        f"the message to the run is refused: {why}", code="FG517", hint="send requests with 'fgcli control'"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def note_address(run_dir: str, address: str | None) -> None:
    """Notes in the run folder how the run in this process takes requests.

    The heartbeat has it in `status.json`. A run that was started from Python has no heartbeat, and a file of its own.

    Args:
        run_dir: the run folder.
        address: the path of the socket, or `BY_FILE`; None when the run takes no more requests.
    """
    if (heartbeat := _heartbeat_of(run_dir)) is not None:
        heartbeat.update(control=address)
    elif address is not None:
        _write_note(run_dir, replace(of_this_process(0.0), control=address))
    else:
        with suppress(OSError):
            os.remove(os.path.join(run_dir, NOTE))


def note_pause(run_dir: str, *, is_paused: bool) -> None:
    """Notes in the run folder whether the run in this process is paused.

    Args:
        run_dir: the run folder.
        is_paused: whether it is paused.
    """
    state = Status.PAUSED if is_paused else Status.RUNNING
    if (heartbeat := _heartbeat_of(run_dir)) is not None:
        heartbeat.update(status=state)
    elif (status := noted_status(run_dir)) is not None:
        _write_note(run_dir, replace(status, status=state))


def _heartbeat_of(run_dir: str) -> Heartbeat | None:
    found = current_heartbeat()
    return found if found is not None and os.path.realpath(found.run_dir) == os.path.realpath(run_dir) else None


def _write_note(run_dir: str, status: RunStatus) -> None:
    file = os.path.join(run_dir, NOTE)
    with suppress(OSError):
        with open(f"{file}.draft", "w", encoding="utf-8") as stream:
            json.dump(asdict(status), stream)
        os.replace(f"{file}.draft", file)


def noted_status(run_dir: str) -> RunStatus | None:
    """Returns the status of the run that has noted its address in a run folder, or None."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        found = json.loads(read_bytes(os.path.join(run_dir, NOTE), MAX_BYTES))
        return status_of_facts(found)
    return None


def is_private(found: os.stat_result, *, is_folder: bool) -> bool:
    """Returns whether a file or folder belongs to this user, and no other user may write to it.

    Args:
        found: the result of `os.lstat` or `os.fstat`.
        is_folder: whether it must be a folder; otherwise it must be a regular file.
    """
    is_kind = stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode)
    return is_kind and found.st_uid == os.getuid() and not found.st_mode & 0o022
