"""Runs a page of the documentation as its reader does: writes its files, types its commands, compares what is printed.

Takes a page of Markdown and an empty folder; raises `AssertionError` where a command prints anything else than the page
shows. What a page holds:

* A fence with a file name after its language (```` ```yaml templates/configs/own.yaml ````) is a file, written before
  the commands after it; the line above the fence names it, because a reader does not see the fence's own words.
* A fence `console` is a terminal. `$ ` begins a command, and the lines below it are all that it prints.
* `...` in a line stands for any text, and a line `...` for any number of lines. A run folder that is shown as
  `runs/...-NAME` may end with a number: on a fast machine, two runs begin in the same second.
* `fgcli train ... > FILE 2>&1 &` goes on while the next commands are typed; at the end of the page, it is interrupted.
* `^C` is Ctrl-C, pressed when the lines above it have been printed; lines printed until it arrives are not compared.

`fgcli train`, and a script that imports torch, run in a fork of this process, where the libraries are imported already;
everything else, and the processes that a run starts, are started as a shell starts them.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import runpy
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patience
from tests.reliability.forks import Child

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
RUN = re.compile(
    r"fgcli (-[pt] \S+ )*(train|construct|rerun|eval|data|generate|plan|export|ckpt (export|verify)|new project \S+ --kind)\b"
)
BACKGROUND = re.compile(r"(fgcli .*) > (\S+) 2>&1 &")
SCRIPT = re.compile(r"python (\S+\.py)\b")
PIPED = re.compile(r"printf '([^']*)' \| (fgcli chat\b.*)")
SHELL = re.compile(r"[|;&<>$]")
TIMEOUT_SECONDS = 120
INTERRUPT = "^C"
RUN_FOLDER = re.compile(r"runs/\.\*(?:\w|\\?-)+")


@dataclass(frozen=True)
class File:
    """A file that the page shows, and where its fence begins in the text."""

    path: str
    text: str
    at: int


@dataclass(frozen=True)
class Command:
    """What is typed, and the lines that the page shows below it."""

    words: str
    shown: tuple[str, ...]


def steps(page: str) -> list[File | Command]:
    """Returns the files and commands of a page, in its order."""
    found: list[File | Command] = []
    for fence in FENCE.finditer(page):
        language, path, text = fence.groups()
        if path:
            found.append(File(path, text, fence.start()))
        elif language == "console":
            first, *entries = re.split(r"^\$ ", text, flags=re.M)
            assert first == "", f"a console that does not begin with a command: {text}"
            for entry in entries:
                words, *shown = entry.rstrip("\n").split("\n")
                found.append(Command(words, tuple(shown)))
    return found


def follow(page: str, folder: Path, *, only: tuple[str, ...] = ("",)) -> Path:
    """Does what a page says, in a folder.

    Args:
        page: text of the page.
        folder: where its reader is when he begins.
        only: beginnings of the commands that are typed; all of them by default.

    Returns:
        The folder where its reader is at the end.
    """
    terminal = Terminal(folder)
    try:
        for step in steps(page):
            if isinstance(step, Command):
                if step.words.startswith(only):
                    terminal.type(step)
                continue
            assert f"`{step.path}`" in page[: step.at].rstrip().rpartition("\n")[2], f"{step.path} is not announced"
            file = terminal.folder / step.path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.text, encoding="utf-8")
    finally:
        terminal.close()
    return terminal.folder


class Terminal:
    """A folder in which commands are typed one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._background: list[_Forked] = []

    def close(self) -> None:
        """Interrupts the commands that still go on."""
        for one in self._background:
            one.interrupt()
            one.stop()

    def type(self, command: Command) -> None:
        """Runs a command and compares what it prints."""
        words = command.words
        if words.startswith("cd "):
            self.folder = (self.folder / words.removeprefix("cd ")).resolve(strict=True)
            return
        if begun := BACKGROUND.fullmatch(words):
            with (self.folder / begun[2]).open("wb") as log:
                self._background.append(_Forked(begun[1], self.folder, log.fileno()))
            return
        before, pressed, _ = "\n".join(command.shown).partition(INTERRUPT)
        moment = re.compile(pattern(before.split("\n")[:-1]) + "(?:.*\n)*") if pressed else None
        status, printed = self._run(words, moment)
        expected = pattern(["..." if line == INTERRUPT else line for line in command.shown])
        assert re.fullmatch(expected, printed), difference(command, printed)
        fails = "error" in "".join(command.shown) or words.startswith("fgcli diff") or pressed
        assert status == 0 or fails, f"$ {words}\n{printed}\nexit status {status}"

    def _run(self, words: str, moment: re.Pattern[str] | None) -> tuple[int, str]:
        reading, writing = os.pipe()
        in_fork = PIPED.match(words) or (imports_libraries(words, self.folder) and not SHELL.search(words))
        process = _Forked if in_fork else _Started
        started = process(words, self.folder, writing)
        os.close(writing)
        printed = b""
        deadline = time.monotonic() + patience(TIMEOUT_SECONDS)
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                assert select.select([reading], [], [], left)[0], f"$ {words}\n{printed.decode()}\n(it does not end)"
                piece = os.read(reading, 1 << 16)
                if not piece:
                    break
                printed += piece
                if moment is not None and moment.fullmatch(printed.decode(errors="replace")):
                    started.interrupt()
                    moment = None
        finally:
            os.close(reading)
            started.stop()
        assert moment is None, f"$ {words}\n{printed.decode()}\n(it ended before {INTERRUPT})"
        lines = printed.decode().splitlines()
        return started.status, "".join(line.rstrip() + "\n" for line in lines)


def imports_libraries(words: str, folder: Path) -> bool:
    """Whether what is typed would first import torch for seconds."""
    if script := SCRIPT.match(words):
        return re.search("^(import|from) (torch|transformers|peft)", (folder / script[1]).read_text(), re.M) is not None
    return RUN.match(words) is not None


def difference(command: Command, printed: str) -> str:
    """Returns what a command printed, and the first line of the page that is not in it."""
    shown = ["..." if line == INTERRUPT else line for line in command.shown]
    agrees = max(n for n in range(len(shown) + 1) if re.fullmatch(pattern(shown[:n]) + "(?:.*\n)*", printed))
    place = repr(shown[agrees]) if agrees < len(shown) else "nothing more"
    return f"$ {command.words}\n{printed}\nthe page shows {place} after {agrees} lines"


def pattern(shown: list[str] | tuple[str, ...]) -> str:
    """Returns the regular expression of what a page shows."""
    lines = ["(?:.*\n)*?" if line == "..." else _line(line) + "\n" for line in shown]
    return "".join(lines)


def _line(line: str) -> str:
    line = ".*".join(re.escape(part) for part in line.rstrip().split("..."))
    return RUN_FOLDER.sub(lambda folder: folder[0] + r"(?:-\d+)?", line)


class _Started:
    """A command that a shell runs."""

    def __init__(self, words: str, folder: Path, output: int) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        environment.pop("FORGATHER_TRUST", None)
        self._process = subprocess.Popen(
            ["bash", "-c", words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        self.status = 0

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        try:
            self.status = self._process.wait(patience(10))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.status = self._process.wait()


class _Forked:
    """A command of `fgcli` in a process where the libraries are imported already."""

    def __init__(self, words: str, folder: Path, output: int) -> None:
        import_libraries()
        piped = PIPED.match(words)
        said, words = (piped[1].replace("\\n", "\n"), piped[2]) if piped else ("", words)
        expanded = [name for word in shlex.split(words) for name in sorted(glob.glob(word, root_dir=folder)) or [word]]
        self._process = Child(_typed, expanded, folder, output, said)
        self.status = 0

    def interrupt(self) -> None:
        self._process.signal(signal.SIGINT)

    def stop(self) -> None:
        ended = self._process.ended(timeout=10)
        self.status = ended.value if ended.error == "" and not ended.signal else -1
        assert ended.error == "", ended.error


def import_libraries() -> None:
    """Imports what a run imports."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer  # noqa: F401

    import forgather.ml.callbacks
    import forgather.ml.data
    import forgather.ml.models
    import forgather.ml.tb_logger  # noqa: F401
    from forgather.ml import AccelTrainer, Trainer  # noqa: F401, F811


def _typed(words: list[str], folder: Path, output: int, said: str) -> int:
    os.environ.pop("FORGATHER_TRUST", None)
    return run_fgcli(words, folder, output, said) if words[0] == "fgcli" else _run_script(words, folder, output)


def _run_script(words: list[str], folder: Path, output: int) -> int:
    _begin(words[1:], folder, output)
    sys.path.insert(0, str(folder))
    try:
        runpy.run_path(words[1], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def run_fgcli(words: list[str], folder: Path, output: int, said: str = "") -> int:
    """Runs a command in this process, a fork, as a shell would: its words, its folder, and where both streams go."""
    _begin([str(Path(sys.executable).parent / words[0]), *words[1:]], folder, output, said)
    from forgather.cli.main import main

    try:
        return main(words[1:])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _begin(words: list[str], folder: Path, output: int, said: str = "") -> None:
    """Makes a fork what a shell starts: what is piped to it, one stream for all output, a new interpreter's settings."""
    with tempfile.TemporaryFile() as heard:
        heard.write(said.encode())
        heard.seek(0)
        os.dup2(heard.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
    # A process of its own has none of the settings that pytest made for warnings and logging.
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", quiet)
    os.chdir(folder)
    sys.argv = words
