"""`fgcli`: parses the command line, runs one command, and returns the exit status.

The exit status is 0 for success, 1 for a failure (or the value of `TROUBLE` in the command's module), 2 for wrong
usage, 130 after Ctrl-C, and 143 if a signal of a scheduler ended a command that runs a config. The modules that a
command needs are imported only when the command is chosen. This module prints every error once; with `--json`, the
error is also written as JSON.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType

from forgather.cli.invocation import Invocation, refuse_lost_folder
from forgather.cli.output import (
    flush_output,
    flush_reports,
    open_closed_streams,
    outlasting_readers,
    print_crash,
    print_error,
    print_note,
    silence_output,
)
from forgather.cli.parsing import parse
from forgather.errors import BuildNote, ForgatherError, ProjectError
from forgather.interrupt import (
    NOTHING_TRAINED,
    SAME_OF_SEVERAL_SECONDS,
    SAME_SECONDS,
    Interrupt,
    handle_signals,
    status_of,
)
from forgather.launcher_env import is_worker, process_facts
from forgather.process_limits import limits_on
from forgather.redaction import note_words, without_secrets


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `fgcli` and returns the exit status; the arguments are `sys.argv[1:]` by default."""
    if "_ARGCOMPLETE" in os.environ:
        from forgather.cli.completion import complete

        complete()
    collecting = gc.isenabled()
    # A static command ends before a garbage collection would pay off: without the collector it takes a tenth less.
    gc.disable()
    # The collection at the end of the interpreter costs as much again, and frozen objects are left out of it.
    atexit.register(gc.freeze)
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        note_words(words)
        with without_secrets(), limits_on():
            status = _run(words)
        flush_output()
    except BrokenPipeError:
        # The reader of the pipe is gone (`fgcli pp | head`). The interpreter must not try to flush the rest either.
        silence_output()
        return 141
    except ProjectError as error:
        print_error(error)
        return 1
    finally:
        flush_reports()
        if collecting:
            if arguments is None and not gc.isenabled():
                # Otherwise the next collection would visit all objects of the static command, because they are new:
                # that takes a twentieth of the time of a check. Objects that a caller in this process froze stay so.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
    if (several := sys.modules.get("forgather.launch.multi_process")) is not None:
        several.skip_teardown_after_leaving(status)
    return status


def _run(arguments: list[str]) -> int:
    project_dir: str | None = None
    invocation: Invocation | None = None
    command: ModuleType | None = None
    interrupt: Interrupt | None = None
    trouble = 1
    try:
        refuse_lost_folder()
        command, invocation = parse(arguments)
        trouble = getattr(command, "TROUBLE", 1)
        project_dir = invocation.project_hint
        if getattr(command, "EXECUTES", False):
            # User code runs now, for hours perhaps: it needs the collector again.
            gc.enable()
            atexit.unregister(gc.freeze)
            open_closed_streams()
            # Of several processes one prints, and a signal to all of them may come twice.
            is_one = not is_worker(os.environ)
            speaks = is_one or process_facts(os.environ).rank == 0
            same_within = SAME_SECONDS if is_one else SAME_OF_SEVERAL_SECONDS
            interrupt = Interrupt(same_within=same_within, insists=True, speaks=speaks)
            # A closed console must not end a run: what it has computed would be lost.
            lasting = outlasting_readers() if getattr(command, "TRAINS", False) else nullcontext()
            with handle_signals(interrupt), without_library_bars(speaks=speaks), lasting:
                return int(command.run(invocation))
        return int(command.run(invocation))
    except ForgatherError as error:
        about_config = invocation is not None and getattr(command, "CONFIG_OPTIONS", False)
        print_error(error, project_dir, invocation.check_command if invocation and about_config else None)
        _tell_tools(error, arguments, project_dir)
        return trouble
    except KeyboardInterrupt as stop:
        loses_nothing = getattr(command, "TRAINS", False) and interrupt is not None and not interrupt.began
        # With several processes, the signal may come from a launcher after a failure that another process reports.
        if interrupt is None or not interrupt.is_quiet():
            print_note(NOTHING_TRAINED if loses_nothing else "interrupted")
        return status_of(stop)
    except SystemExit as ended:
        if not any(isinstance(note, BuildNote) for note in getattr(ended, "__notes__", ())):
            raise
        # A constructor that calls sys.exit(0) has built nothing, so its status is not a success.
        print_crash(ended, project_dir)
        _tell_tools(ended, arguments, project_dir)
        return ended.code if isinstance(ended.code, int) and ended.code else 1
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the top: any exception of a constructor or a run is printed
        print_crash(error, project_dir)
        _tell_tools(error, arguments, project_dir)
        return trouble


@contextmanager
def without_library_bars(*, speaks: bool) -> Iterator[None]:
    """Context manager that disables the progress bars of `datasets`, unless they are drawn on a terminal.

    In a log file, each update of a bar would be a line.

    Args:
        speaks: True in the process that prints for the whole run.
    """
    name = "HF_DATASETS_DISABLE_PROGRESS_BARS"
    if name in os.environ or (speaks and sys.stderr.isatty()):
        yield
        return
    # The variable, because `datasets` is not imported yet, and processes that a command starts inherit it.
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _tell_tools(error: BaseException, arguments: list[str], project_dir: str | None) -> None:
    """Writes an error to the standard output as JSON if `--json` was given, in addition to the printed report."""
    if "--json" in arguments:
        from forgather.cli.diagnostic_output import write_error

        # If the standard output cannot be written, that is the error, and it has been printed already.
        with suppress(ProjectError):
            write_error(error, project_dir)


if __name__ == "__main__":
    sys.exit(main())
