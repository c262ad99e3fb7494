"""A command that is run when something happens in a run, such as `["notify-send", "{kind}"]`.

The input is the words of the command and the facts of an event. The command runs during the training: no shell, no
input, no output on the terminal, and it is ended after some seconds. A command that fails is logged once, and neither
ends nor delays the run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.redaction import hide

_log = get_logger(__name__)
TIMEOUT_SECONDS = 10.0
_PLACEHOLDER = re.compile(r"\{(message|kind|step|run)\}")
_LONGEST, _MOST_OUTPUT_BYTES = 200, 1 << 24
_POLL_SECONDS = 0.1


class AlertError(TrainingError, ValueError):
    """An error about a command for alerts that is not a list of words."""

    code = "FG521"


class AlertCommand:
    """A command that is run for each alert.

    Args:
        words: the program and its arguments. `{message}`, `{kind}`, `{step}` and `{run}` (the run folder) are replaced
            in the arguments; if no word has one of them, the message is added as the last argument.
        timeout: the time after which the command is ended.

    Units:
        timeout: seconds.

    Raises:
        AlertError: FG521 if `words` is not a list of strings, or is empty.
    """

    def __init__(self, words: Sequence[str], timeout: float = TIMEOUT_SECONDS) -> None:
        if isinstance(words, str | bytes) or not isinstance(words, Sequence) or not words:
            raise AlertError(
                f"on_alert is {words!r}", hint='give a list of words, such as ["notify-send", "{message}"]: no shell'
            ).about("on_alert")
        wrong = next((word for word in words if not isinstance(word, str) or not word or "\0" in word), None)
        if wrong is not None:
            raise AlertError(f"on_alert has the word {wrong!r}", hint="each word is a string").about("on_alert")
        self.words = tuple(words)
        self.timeout = timeout
        self._warned = False

    def run(self, event: Mapping[str, Any], run_dir: str) -> None:
        """Starts the command for an event, and returns at once.

        Args:
            event: the facts of the event, with `kind`, `step` and `message`.
            run_dir: the run folder.
        """
        facts = {name: hide(str(event.get(name, ""))) for name in ("message", "kind", "step")} | {"run": run_dir}
        output: IO[bytes] | None = None
        try:
            output = tempfile.TemporaryFile()
            # Started here and not in the thread: a run that ends at this anomaly would end before its alert.
            process = subprocess.Popen(
                self._filled(facts),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C for the run does not reach it, and what it starts ends with it.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            # A program that does not exist, or a disk that is full.
            if output is not None:
                output.close()
            return self._warn(str(error))
        threading.Thread(target=self._follow, args=(process, output), name="alert", daemon=True).start()
        return None

    def _filled(self, facts: Mapping[str, str]) -> list[str]:
        program, *arguments = self.words
        filled = [_PLACEHOLDER.sub(lambda found: facts[found[1]], word) for word in arguments]
        return [program, *filled, *([] if any(map(_PLACEHOLDER.search, arguments)) else [facts["message"]])]

    def _follow(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        with output:
            status, until = None, time.monotonic() + self.timeout
            why = f"it took longer than {self.timeout:g} s"
            while status is None and time.monotonic() < until:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.0, min(_POLL_SECONDS, until - time.monotonic())))
                if status is None and os.fstat(output.fileno()).st_size > _MOST_OUTPUT_BYTES:
                    # The disk is the run's, too.
                    why = f"it printed more than {_MOST_OUTPUT_BYTES:,} bytes"
                    break
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                why = f"it ended with status {status}" if status else ""
            if why:
                output.seek(0)
                said = output.read(_LONGEST).decode(errors="replace").strip()
                self._warn(f"{why}: {hide(said)}" if said else why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the command of on_alert, %r, failed: %s", self.words[0], why)
