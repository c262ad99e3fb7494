"""The report of an exception from the user's code, with a shortened traceback.

The input is an exception; the output is lines with the type, the message, the place in the config, and the innermost
stack frames outside forgather's own modules for configs and commands. The innermost frame in a file of the user is
always included. `FORGATHER_TRACEBACK=full` shows the whole traceback.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable

from forgather.errors import BuildNote
from forgather.project.path_display import Display
from forgather.source import Span

_MAX_FRAMES = 3
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_PACKAGE, part) for part in ("cli", "config", "project", "launch"))
# The folders of Python and its libraries; code in any other folder is the user's.
_LIBRARIES = (_PACKAGE, *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")))
_IMPORTING = ("<frozen", os.path.join(os.path.dirname(os.__file__), "importlib"))


def crash_lines(error: BaseException, display: Display, *, place: Callable[[Span, Display], list[str]]) -> list[str]:
    """Returns the lines of a report on an exception.

    Args:
        error: the exception.
        display: the object that shortens the names of files.
        place: a function that returns the lines which show a place in a config.
    """
    message = str(error).strip().split("\n")
    lines = [f"error: {type(error).__name__}: {message[0]}" if message[0] else f"error: {type(error).__name__}"]
    lines += [f"  {line}" for line in message[1:3]]
    if isinstance(error, SystemExit):
        lines[:1] = [f"error: the process was ended by sys.exit({'' if error.code is None else repr(error.code)})"]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        lines[0] = f"error: {type(error).__name__}: {error.msg}"
        lines += place(Span(os.path.abspath(error.filename), error.lineno), display)
    for note in getattr(error, "__notes__", ()):
        lines += _note_lines(note, display, place)
    if error.__cause__ is not None:
        cause = (str(error.__cause__).strip().split("\n") or [""])[0]
        lines.append(f"  caused by {type(error.__cause__).__name__}: {cause}")
    return lines + _frames(error, display)


def _note_lines(note: str, display: Display, place: Callable[[Span, Display], list[str]]) -> list[str]:
    if not isinstance(note, BuildNote):
        return [f"  note: {line}" for line in str(note).split("\n")[:2]]
    lines = place(note.span, display) if note.span is not None else []
    return [*lines, f"  in  {note.path}  (calling {note.constructor})"]


def _frames(error: BaseException, display: Display) -> list[str]:
    if os.environ.get("FORGATHER_TRACEBACK") == "full":
        return ["".join(traceback.format_exception(error)).rstrip("\n")]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS + _IMPORTING)]
    # The frames of a syntax error are all of the import; its file and line are printed above.
    if not theirs and not isinstance(error, SyntaxError):
        theirs = list(frames)[-1:]
    lines: list[str] = []
    if len(theirs) > _MAX_FRAMES:
        hidden = len(theirs) - _MAX_FRAMES
        lines.append(f"  traceback ({hidden} outer frames hidden; FORGATHER_TRACEBACK=full shows all):")
    elif theirs:
        lines.append("  traceback:")
    shown = theirs[-_MAX_FRAMES:]
    own = [frame for frame in theirs if _is_own(frame.filename)]
    # The error may be raised deep in a library, and the user can only change the line that called it.
    if own and own[-1] not in shown:
        shown = [own[-1], *shown[1:]]
    for frame in shown:
        lines.append(f"    {display(frame.filename)}:{frame.lineno} in {frame.name}")
        if frame.line:
            lines.append(f"        {frame.line}")
    return lines


def _is_own(file: str) -> bool:
    """Returns True if a file belongs to the user, not to Python, an installed library or forgather."""
    return os.path.isfile(file) and not file.startswith(tuple(os.path.join(folder, "") for folder in _LIBRARIES))
