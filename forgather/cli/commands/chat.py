"""`fgcli chat`: a conversation with a trained model in the terminal, or with the lines of a pipe as turns."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from forgather.cli.answer_output import write_piece
from forgather.cli.generation_options import (
    Speaker,
    add_model,
    add_sampling,
    chat_form,
    control_note,
    form_lines,
    load_speaker,
    print_notes,
    refuse_encoder,
    sampling_line,
    sampling_of,
)
from forgather.cli.invocation import Invocation
from forgather.cli.output import plural, print_error, print_note
from forgather.errors import ForgatherError, ProjectError

EXECUTES = True
DESCRIPTION = """Talk to a model that a run has saved. Each line is a message of the user; the answer is printed
while it is generated, and the model sees the whole conversation. Ctrl-C stops an answer, Ctrl-D ends. If the standard
input is not a terminal, each of its lines is a turn."""
EXAMPLES = """examples:
  fgcli chat output_models/chat
  fgcli chat output_models/chat --checkpoint best --system "Answer in one word."
  fgcli chat output_models/chat --temperature 0.7 --seed 1
  printf 'What comes after five?\\nAnd then?\\n' | fgcli chat output_models/chat"""
_HELP = """/reset       begin a new conversation
/save FILE   add the conversation to FILE as a JSON line, which the template datasets/chat.yaml reads
/exit        end; so does Ctrl-D
//...        a message that begins with /
Ctrl-C       stop the answer"""
_FINISHES = {
    "length": "cut after --max-new-tokens",
    "context": "cut at the last position of the model; /reset begins a new conversation",
    "interrupted": "stopped",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: that of the training data)")
    add_sampling(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: answers each line, and returns the exit status: 1 if a line of a pipe could not be answered."""
    options = invocation.options
    sampling = sampling_of(options)
    speaker = load_speaker(options)
    refuse_encoder(speaker, "chat")
    form = chat_form(speaker, options.system)
    print_notes([*speaker.described(), *form_lines(form, speaker)[1:], sampling_line(sampling)])
    lines = Lines()
    if lines.is_terminal:
        print_note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    with _interrupts() as stop:
        return Conversation(speaker, form, sampling, stop).answer_all(lines)


class Stop:
    """Whether the user has pressed Ctrl-C during the current answer."""

    def __init__(self) -> None:
        self.requested = False
        self.is_answering = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes the signal during an answer; the second one, and one between answers, raise KeyboardInterrupt."""
        if not self.is_answering or self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def during_answer(self) -> Iterator[None]:
        """Context manager in which the first signal only asks the model to stop."""
        self.requested, self.is_answering = False, True
        try:
            yield
        finally:
            self.is_answering = False


@contextmanager
def _interrupts() -> Iterator[Stop]:
    """Context manager in which Ctrl-C stops an answer, and not the program."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Lines:
    """The lines that the user writes."""

    def __init__(self) -> None:
        self.is_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
        if self.is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 - gives `input` the arrow keys and a history

    def read(self) -> str | None:
        """Returns the next line without its line break; None at the end."""
        if self.is_terminal:
            try:
                return input("> ")
            except EOFError:
                write_piece("\n")
                return None
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.removesuffix("\n") if line else None


class Conversation:
    """A conversation, with the commands that begin with a slash.

    Args:
        speaker: the loaded model.
        form: how messages become a prompt.
        sampling: how tokens are chosen. Each answer has a seed of its own: the next number.
        stop: whether the user asks the model to stop.
    """

    def __init__(self, speaker: Speaker, form: Any, sampling: Any, stop: Stop) -> None:
        self._speaker = speaker
        self._form = form
        self._sampling = sampling
        self._stop = stop
        self._messages: list[dict[str, Any]] = []
        self._num_answers = 0

    def answer_all(self, lines: Lines) -> int:
        """Answers each line until the end; returns the exit status."""
        has_failed = False
        while True:
            try:
                line = lines.read()
                if line is None or line.strip() == "/exit":
                    return int(has_failed and not lines.is_terminal)
                self._take(line)
            except ForgatherError as error:
                # The conversation so far must not be lost: the line had no effect.
                print_error(error)
                has_failed = True
            except UnicodeDecodeError:
                print_error(ProjectError("a line is not text in UTF-8", code="FG920", hint="convert the text first"))
                has_failed = True
            except KeyboardInterrupt:
                if not lines.is_terminal:
                    raise
                write_piece("\n")
                print_note("Ctrl-D or /exit ends the conversation")

    def _take(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            self._command(*line[1:].split(maxsplit=1))
        elif line.strip():
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _command(self, name: str = "", argument: str = "") -> None:
        if name == "help":
            print_note(_HELP)
        elif name == "reset":
            self._messages = []
            print_note("a new conversation")
        elif name == "save":
            self._save(argument.strip())
        else:
            raise ProjectError(
                f"there is no command '/{name}'", code="FG920", hint="/help lists them; // begins a message with /"
            )

    def _answer(self, text: str) -> None:
        prompts = import_module("forgather.ml.generation.prompt")
        question = prompts.Question(messages=(*self._messages, {"role": "user", "content": text}))
        ids = self._form.ids(question)
        control_note(self._form, prompts.Question(text=text))
        sampling = self._sampling.numbered(self._num_answers)
        with self._stop.during_answer():
            answer = self._speaker.generator.answer(
                ids, sampling, write=write_piece, stopped=lambda: self._stop.requested
            )
        write_piece("\n")
        self._num_answers += 1
        self._messages = [*question.messages, {"role": "assistant", "content": answer.text}]
        if answer.finish in _FINISHES:
            print_note(f"({_FINISHES[answer.finish]})")

    def _save(self, file: str) -> None:
        if not file or not self._messages:
            what = "/save needs the name of a file" if not file else "there is nothing to save yet"
            raise ProjectError(what, code="FG920", hint="/save FILE, after an answer")
        messages = self._form.messages(
            import_module("forgather.ml.generation.prompt").Question(messages=tuple(self._messages))
        )
        try:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ProjectError(
                f"{file!r} cannot be written: {error.strerror or error}",
                code="FG418",
                hint="name a file in a folder that exists and that you can write to",
            ) from None
        print_note(f"added {plural(len(messages), 'message')} to {file}")
