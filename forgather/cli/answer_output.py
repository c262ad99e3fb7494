"""Writes the pieces of an answer to the standard output while the model generates."""

from __future__ import annotations

import sys

from forgather.cli.output import flush_output
from forgather.cli.source_excerpt import visible
from forgather.errors import ProjectError
from forgather.redaction import hide


def write_piece(text: str) -> None:
    """Writes a piece of text to the standard output at once, without a line break after it.

    Args:
        text: the text. On a terminal its control characters are escaped.

    Raises:
        ProjectError: FG418 if the standard output cannot be written.
    """
    if sys.stdout is None:
        raise ProjectError("the standard output is closed", code="FG418", hint="open it before the command")
    shown = visible(hide(text)) if sys.stdout.isatty() else hide(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        # A character that the terminal's encoding does not have must not end a conversation.
        sys.stdout.write(shown.encode(encoding, errors="backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProjectError(
            f"the standard output cannot be written: {reason}", code="FG418", hint="make room where it goes"
        ) from None
    flush_output()
